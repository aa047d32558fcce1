"""Causal softmax attention (Vaswani and others, 2017), rotary positions (Su and others, 2021), ALiBi or xPos.

    q_n = x_n W^Q      k_n = x_n W^K      v_n = x_n W^V
    q'_n = R_n q_n     k'_n = R_n k_n                       RoFormer (14, 15)
    head = softmax(M_-inf(Q' K'^T / sqrt(d_head))) V        Transformer (1)
    head_h = softmax(M_-inf(Q K^T / sqrt(d_head)) - s_h (n - m)) V      ALiBi (Press and others, 2022)
    s_nm = q_n . (D^(n - m) R_(n - m) k_m)                  scores of xPos (Sun and others, 2022)
    o = [head_1, .., head_h] W^O

x input, q query, k key, v value of a head, R_n the turn of pairs of channels by n theta_i, theta_i =
base^(-2i/d_head), M_-inf the causal mask, s_h = 2^(-8 h / H) slope of head h of H, n - m the distance of a
query and a key, D = diag(zeta^(1/512)) with a zeta < 1 for each pair, o output, n time. Recurrent mixers are
compared with this mixer.
"""

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from linrec.nn.decays import alibi_slopes, xpos_decays
from linrec.nn.evicting_cache import EvictingCache, Eviction
from linrec.nn.head_sizes import heads_of, kv_groups, most_heads, repeat_heads
from linrec.nn.mixer import Mixer, State
from linrec.nn.norms import Norm, gated, make_norm
from linrec.nn.positions import AttentionState, positions
from linrec.nn.projections import output_kwargs, projected
from linrec.nn.rotary import Rotary
from linrec.ops.attention import check_options, gate_loop_attention, softmax_attention
from linrec.rules import at_least, require

__all__ = ["Attention", "AttentionState"]

Positions = Literal["rotary", "alibi", "xpos", "none"]
QKNorm = Literal["head", "all", "none"]

# of the Transformer, table 3: d_k = d_v = 64
CHANNELS_PER_HEAD = 64


class Attention(Mixer):
    """head = softmax(M_-inf(Q' K'^T / sqrt(d_head))) V: each step attends to the steps so far.

    The state is a cache of keys and values, and the number of steps seen. The cache grows with every step,
    and time is quadratic in the length. `window` bounds the cache and makes time linear. The cache keeps keys
    and values in their own dtype, which under autocast is bfloat16.

    | variant | arguments |
    |---|---|
    | multi-query attention | `kv_heads=1` |
    | grouped-query attention | `kv_heads` = a number that divides `n_heads` |
    | Griffin's local attention | `kv_heads=1, window=1024` |
    | attention of Qwen3-Next | `qk_norm="head"`, `output_gate=True`, `rotary_fraction=0.25` |
    | attention of OLMo 2 | `qk_norm="all"` |
    | attention sinks of StreamingLLM | `cache_size=2048, sinks=4` |
    | TOVA, a policy for the cache | `cache_size=512, eviction="tova"` |
    | H2O, a policy for the cache | `cache_size=512, eviction="h2o"` |

    With `cache_size` the state has at most that number of steps (`linrec.nn.evicting_cache`): a policy evicts
    after every step, and a step attends to the kept steps and itself. Until then results are those of
    attention without a bound. Policies have no parameters, so that weights of a model without a bound fit;
    the papers apply them to trained models. In their released code a prompt attends to all of itself, and the
    cache is cut once, behind it. Here a prompt gives what its steps give one at a time.

    With xPos, scores turn as with rotary positions, and the products of fast pairs fall with the distance:
    zeta_j = (2j / d_head + 0.4) / 1.4 for j = 0 .. d_head / 2 - 1. The paper multiplies queries by zeta^n and
    keys by zeta^-m, whose exponents need a limit on the length. Here the scores are of `gate_loop_attention`,
    which forms differences of exponents, at any length; scores of all pairs are then in memory.

    A reset does not restart positions: only their differences matter, and no step sees beyond a reset.

    Args:
        d_model: width of the sequence.
        n_heads: heads h. None is the largest number that divides `d_model` and leaves at least 64 channels to
            each head, or 1: 6 at width 384, 12 at 768.
        d_head: channels of q, k and v in a head. None is `d_model` / `n_heads`.
        kv_heads: heads of keys and values, each shared by `n_heads` / `kv_heads` neighbouring queries. None
            is `n_heads`.
        positions: "rotary"; "alibi", biases of scores that fall with the distance, whose slopes s_h are
            `linrec.nn.decays.alibi_slopes`; "xpos", causal, over all steps and without dropout; or "none",
            with which order enters by the causal mask alone.
        rotary_base: base of the frequencies.
        rotary_fraction: share of the channels of a head that turn, which are the first channels; the others
            do not depend on the position.
        qk_norm: RMSNorm of q and k, before they turn: "head", over the channels of each head, with a weight
            that all heads share; "all", over the channels of all heads; or "none".
        qk_norm_eps: epsilon of `qk_norm`.
        output_gate: whether the heads are multiplied by sigmoid(x W^G) before W^O.
        bias: whether the projections have biases. The paper's are matrices alone.
        output_bias: whether W^O has a bias; None is `bias`.
        window: steps that each step sees, its own included; None is all.
        cache_size: steps that the cache keeps at most, without the step itself; None is all. It takes the
            place of `window`.
        eviction: which step leaves a full cache: "window", the oldest but the sinks; "tova", the step with
            the smallest weight of the last query, on average over heads; or "h2o", in each head, of the older
            half, the step with the smallest sum of weights so far.
        sinks: first steps that "window" keeps. Distances to them are at most `cache_size`.
        causal: whether steps see the past alone. False is for encoders: a step sees its whole document, from
            one reset to the next, and there is no state.
        dropout: probability that a share of attention is dropped, in training alone.

    Raises:
        ValueError: `n_heads` that does not divide `d_model`, `kv_heads` that does not divide `n_heads`, an
            odd number of channels to turn, an unknown name in `positions`, or a number out of range; a
            `cache_size` beside a `window` or without `causal`; or "xpos" beside one of these arguments,
            `dropout` or a `rotary_fraction`.

    Source:
        Vaswani and others, Attention Is All You Need (2017), section 3.2; Su and others, RoFormer: Enhanced
        Transformer with Rotary Position Embedding (2021), section 3.2; Press, Smith and Lewis, Train Short,
        Test Long: Attention with Linear Biases Enables Input Length Extrapolation (2022), section 3; Sun and
        others, A Length-Extrapolatable Transformer (2022), algorithm 1. With
        `causal=False`, which ALiBi's paper does not have, the distance is |n - m|. Dropout of shares and
        windows are not theirs. Shared keys and values: Shazeer, Fast Transformer Decoding (2019); Ainslie and
        others, GQA (2023). Norms of q and k: Dehghani and others, Scaling Vision Transformers to 22 Billion
        Parameters (2023). Output gate: Qiu and others, Gated Attention for Large Language Models (2025).

    Example:
        >>> mixer = Attention(64, n_heads=4)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y, state = mixer(torch.zeros(2, 1, 64), state)
        >>> y.shape, state.cache.k.shape, state.position
        (torch.Size([2, 1, 64]), torch.Size([2, 11, 4, 16]), tensor([11, 11]))
    """

    recurrence: str | None = "softmax_attention"
    of_one_input = "q", "k", "v", "gate"

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int | None = None,
        d_head: int | None = None,
        kv_heads: int | None = None,
        positions: Positions = "rotary",
        rotary_base: float = 10_000.0,
        rotary_fraction: float = 1.0,
        qk_norm: QKNorm = "none",
        qk_norm_eps: float = 1e-6,
        output_gate: bool = False,
        bias: bool = False,
        output_bias: bool | None = None,
        window: int | None = None,
        cache_size: int | None = None,
        eviction: Eviction = "window",
        sinks: int = 0,
        causal: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(d_model)
        check_options(window, dropout)
        self.n_heads = most_heads(d_model, CHANNELS_PER_HEAD) if n_heads is None else n_heads
        self.d_head = heads_of("d_model", d_model, self.n_heads) if d_head is None else d_head
        at_least(1, n_heads=self.n_heads, d_head=self.d_head)
        at_least(0, qk_norm_eps=qk_norm_eps)
        self.kv_heads = kv_groups(self.n_heads, kv_heads)
        self.window, self.causal, self.dropout = window, causal, dropout
        require(
            cache_size is None or (window is None and causal and positions in ("rotary", "none")),
            "`cache_size` needs `causal`, no `window`, and positions that are rotary or none; got "
            f"window={window}, causal={causal} and positions={positions!r}. Leave out one of them.",
        )
        require(
            positions != "xpos" or (window is None and causal and not dropout and rotary_fraction == 1),
            '`positions="xpos"` needs `causal`, no `window`, no `dropout` and a `rotary_fraction` of 1; got '
            f"causal={causal}, window={window}, dropout={dropout} and {rotary_fraction}. "
            "Leave out one of them.",
        )
        require(
            cache_size is not None or (eviction == "window" and not sinks),
            "`eviction` and `sinks` are of a bounded cache; got `cache_size=None`. Pass a number of steps.",
        )
        self.bounded = None if cache_size is None else EvictingCache(cache_size, eviction, sinks)
        # a policy evicts steps one after another
        self.takes_turns = cache_size is not None
        if self.bounded is not None:
            # no call of an operator has the weights of all steps
            self.recurrence = None

        width, kv_width = self.n_heads * self.d_head, self.kv_heads * self.d_head
        self.q = nn.Linear(d_model, width, bias=bias)
        self.k = nn.Linear(d_model, kv_width, bias=bias)
        self.v = nn.Linear(d_model, kv_width, bias=bias)
        self.rotary: Rotary | None = None
        if positions in ("rotary", "xpos"):
            self.rotary = Rotary(self.d_head, base=rotary_base, fraction=rotary_fraction)
        self.alibi, self.xpos = positions == "alibi", positions == "xpos"
        if self.xpos:
            self.recurrence = "gate_loop_attention"
        self.qk_norm = qk_norm
        norm: Norm = "none" if qk_norm == "none" else "rms"
        normed = (self.d_head, self.d_head) if qk_norm == "head" else (width, kv_width)
        self.q_norm, self.k_norm = (make_norm(norm, channels, eps=qk_norm_eps) for channels in normed)
        self.gate = nn.Linear(d_model, width, bias=bias) if output_gate else None
        self.out = nn.Linear(width, d_model, bias=bias if output_bias is None else output_bias)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return o, and an `AttentionState`, None without `causal`, an `EvictionState` with `cache_size`."""
        if self.bounded is not None:
            return self._evicting(self.bounded, x, state, reset)
        start = None, torch.zeros(1, dtype=torch.int64, device=x.device)
        cache, position = start if state is None else state
        q, k, v, g = self.qkv(x)
        places, position = positions(position, x.shape[1])
        if self.rotary is not None:
            q, k = self.rotary(places, q, k)
        factory: dict[str, Any] = {"dtype": self.state_dtype, "device": x.device}
        if self.xpos:
            decay = xpos_decays(self.d_head, **factory).expand(self.n_heads, -1)
            k, v = repeat_heads(k, self.n_heads), repeat_heads(v, self.n_heads)
            scale = 1 / math.sqrt(self.d_head)
            heads, cache = gate_loop_attention(q, k, v, decay, state=cache, reset=reset, scale=scale)
        else:
            heads, cache = softmax_attention(
                q,
                k,
                v,
                state=cache,
                reset=reset,
                window=self.window,
                causal=self.causal,
                dropout=self.dropout if self.training else 0.0,
                slopes=alibi_slopes(self.n_heads, **factory) if self.alibi else None,
            )
        o = self.out(gated(heads.flatten(-2), g, torch.sigmoid))
        if cache is None:
            return o, None
        return o, AttentionState(cache, position.expand(x.shape[0]).contiguous())

    def _evicting(
        self, cache: EvictingCache, x: Tensor, state: State, reset: Tensor | None
    ) -> tuple[Tensor, State]:
        """Return o, and the steps that the policy keeps."""
        q, k, v, g = self.qkv(x)
        heads, state = cache.attend(
            q,
            k,
            v,
            self.init_state(x.shape[0], device=x.device) if state is None else state,
            reset=reset,
            rotary=self.rotary,
            dropout=self.dropout if self.training else 0.0,
        )
        return self.out(gated(heads.flatten(-2), g, torch.sigmoid)), state

    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> State:
        """Return a cache of no steps in the dtype of keys, at position 0; None without `causal`."""
        if not self.causal:
            return None
        sizes = self.kv_heads, self.d_head, self.d_head
        if self.xpos:
            of_queries = batch, self.n_heads, self.d_head, self.d_head
            cache = gate_loop_attention.empty_state(*of_queries, **self.factory_kwargs(device))
            return AttentionState.first(cache._replace(log_decay=torch.zeros_like(cache.k)))
        if self.bounded is not None:
            return self.bounded.empty(batch, *sizes, **output_kwargs(self.k, device))
        cache = softmax_attention.empty_state(batch, *sizes, **output_kwargs(self.k, device))
        return AttentionState.first(cache)

    @property
    def is_causal(self) -> bool:
        """Whether steps see the past alone."""
        return self.causal

    @property
    def state_grows(self) -> bool:
        """Whether the cache grows without a bound: without `window` and `cache_size`."""
        return self.causal and self.window is None and self.bounded is None

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return q, k and v (b, t, heads, d_head) of `x` (b, t, d_model), before they turn, and the gate."""
        q, k, v, g = projected(x, self.q, self.k, self.v, self.gate)
        q, k = self._normalised(q, self.q_norm), self._normalised(k, self.k_norm)
        return q, k, v.unflatten(-1, (self.kv_heads, self.d_head)), g

    def _normalised(self, x: Tensor, norm: nn.Module) -> Tensor:
        """Return queries or keys (b, t, heads d_head) as (b, t, heads, d_head), after their norm."""
        of_heads = x.unflatten(-1, (-1, self.d_head))
        y = norm(of_heads) if self.qk_norm == "head" else norm(x).unflatten(-1, (-1, self.d_head))
        return y.to(x.dtype)

    @property
    def state_size(self) -> int:
        """Elements per cached step: keys, values and, with `cache_size`, the numbers that a policy reads.

        There are at most `window` - 1 steps, or `cache_size`. With xPos, each head of queries has keys, and
        the sums of their decays.
        """
        if self.xpos:
            return 3 * self.n_heads * self.d_head + 1
        of_policy = 0 if self.bounded is None else self.bounded.per_step(self.kv_heads)
        return 2 * self.kv_heads * self.d_head + of_policy if self.causal else 0
