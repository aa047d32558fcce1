"""TransNormerLLM: A Faster and Better Large Language Model with Improved TransNormer (Qin and others, 2023).

    Q = phi(X W_q)    K = phi(X W_k)    V = X W_v    U = X W_u
    lambda = exp(-s_h (1 - l / (L - 1)))    s_h = 2^(-8 h / H), H a power of two
    a_st = q_s^T k_t lambda^(s - t) cos(theta (s - t))
    O = SRMSNorm(sum_t a_st v_t) * U
    Y = O W_o

X input, Q query, K key, V value, U gate, phi Swish, lambda decay of head h = 1 .. H in layer l = 0 .. L - 1,
theta the learned frequencies of key channels (LRPE), a_st how much of step t is in step s, SRMSNorm(x) = x /
RMS(x) over all heads, Y output. As a recurrence, lambda is the magnitude of the transition and theta its
phase: q and k are real, so only the real part of exp(i theta (s - t)) matters.

The first layers of TransNormer (Qin and others, 2022) have DiagAttention in place of O's linear attention: a
step attends by softmax to the steps of its block, without phi, decay and norm.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from linrec.nn import feature_maps
from linrec.nn.decays import alibi_slopes
from linrec.nn.head_sizes import split_width
from linrec.nn.mixer import Mixer, State, Transitions
from linrec.nn.norms import make_norm
from linrec.nn.parameters import mark
from linrec.nn.positions import AttentionState, positions
from linrec.nn.projections import drawn_linear, output_kwargs, projected
from linrec.ops.attention import AttentionCache, softmax_attention
from linrec.ops.gate_loop import gate_loop
from linrec.rules import at_least

__all__ = ["TransNormer", "block_attention", "first_state"]

FeatureMap = Literal["silu", "elu", "identity"]
OutputNorm = Literal["simple_rms", "rms", "layer", "none"]
Positions = Literal["mix", "lrpe_d", "lrpe", "decay", "none"]
Slopes = Literal["alibi", "geometric", "linear"]

# of the released language models
CHANNELS_PER_HEAD = 128
INIT_STD = 0.02
EPS = 1e-6


class TransNormer(Mixer):
    """O = SRMSNorm(sum_t a_st v_t) * U, a_st = q_s^T k_t lambda^(s - t) cos(theta (s - t)).

    The defaults are the paper's layer. Decays are constants of head and layer. They are strongest in the
    first layer, and the last layer does not decay. Frequencies are learned and belong to the first layer
    alone. Layers learn their places when a model calls `TransNormer.share`; a layer that stands alone is the
    first.

    | the paper's ablation | argument |
    |---|---|
    | LRPE with decay in the first layer, decay in the others | `positions="mix"`, the default |
    | LRPE with decay, LRPE, decay, in all layers | `positions="lrpe_d"`, "lrpe", "decay" |
    | without decay temperature | `layer_decay=False`: s_h in every layer |
    | without gate | `output_gate=False` |
    | activation of q and k: elu + 1, none | `feature_map="elu"`, "identity" |
    | RMSNorm, LayerNorm | `output_norm="rms"`, "layer" |
    | TransNormer: DiagAttention, then NormAttention | `block_size=64, positions="none", feature_map="elu"` |

    The paper prints lambda = exp(-(8 h / H) (1 - l / L)), `slopes="linear"`, with which every head but a few
    forgets within a step or two. Its released code has the slopes of ALiBi, the default. They are geometric,
    2^(-8 h / H), where the number of heads is a power of two; for other numbers some heads lie between the
    heads of the power below. `slopes="geometric"` keeps 2^(-8 h / H) for every number. The last layer does
    not decay, as in the paper's text; the released code adds 1e-5 to 1 - l / (L - 1).

    With `block_size`, the first half of the layers attends by softmax within blocks of `block_size` steps,
    and so does a layer that stands alone. Blocks are counted from the start of each sequence, so from each
    reset on. The code of TransNormer has blocks of 64 steps, no norm in these layers, and no gate in any
    layer, `output_gate=False`. Its LRPE differs, and is not here. The state of a layer with blocks is a cache
    of at most `block_size` - 1 steps and a position.

    When training starts, all matrices are normal with standard deviation 0.02, and theta_j = base^(-2j / d)
    for j = 0 .. d - 1 over the d channels of all heads: the released code. theta is marked as group
    "transition" without weight decay.

    Args:
        d_model: width d of the sequence, and of Q, K, V and U.
        n_heads: heads H. None is the largest number that divides `d_model` and leaves at least 128 channels
            to each head, or 1.
        positions: "mix", "lrpe_d", "lrpe", "decay" or "none", which is NormAttention of TransNormer.
        slopes: s_h, "alibi", "geometric" or "linear", 8 h / H.
        layer_decay: whether decays weaken from layer to layer.
        lrpe_base: base of theta when training starts.
        feature_map: phi, "silu", "elu" (elu + 1) or "identity".
        output_norm: over all heads, "simple_rms", which has no parameters, "rms", "layer" or "none".
        output_gate: whether the normed output is multiplied by U.
        block_size: steps of a block of DiagAttention; None is linear attention in all layers.

    Raises:
        ValueError: an `n_heads` that does not divide `d_model`, an `lrpe_base` or a `block_size` below 1, or
            an unknown name of a variant.

    Source:
        TransNormerLLM (Qin and others, 2023), its improvements of the architecture, and their ablations;
        TransNormer (Qin and others, The Devil in Linear Transformer, 2022) for the norm and the blocks.

    Example:
        >>> mixer = TransNormer(64, n_heads=4)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.shape, state.dtype
        (torch.Size([2, 10, 64]), torch.Size([2, 4, 16, 16]), torch.complex64)
    """

    recurrence = "gate_loop"
    of_one_input = "q", "k", "v", "gate"

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int | None = None,
        positions: Positions = "mix",
        slopes: Slopes = "alibi",
        layer_decay: bool = True,
        lrpe_base: float = 10_000.0,
        feature_map: FeatureMap = "silu",
        output_norm: OutputNorm = "simple_rms",
        output_gate: bool = True,
        block_size: int | None = None,
    ) -> None:
        super().__init__(d_model)
        at_least(1, lrpe_base=lrpe_base, cure="The paper's is 10000.")
        at_least(1, block_size=block_size, or_none=True, cure="TransNormer's is 64.")
        self.n_heads, self.d_head = split_width("d_model", d_model, n_heads, least=CHANNELS_PER_HEAD)
        self.positions, self.slopes, self.layer_decay = positions, slopes, layer_decay
        self.block_size = block_size
        self._place(0, 1)

        self.phi = feature_maps.build(feature_map, self.d_head)
        self.q = drawn_linear(d_model, d_model, nn.init.normal_, std=INIT_STD)
        self.k = drawn_linear(d_model, d_model, nn.init.normal_, std=INIT_STD)
        self.v = drawn_linear(d_model, d_model, nn.init.normal_, std=INIT_STD)
        self.gate = drawn_linear(d_model, d_model, nn.init.normal_, std=INIT_STD) if output_gate else None
        self.out = drawn_linear(d_model, d_model, nn.init.normal_, std=INIT_STD)
        self.theta: nn.Parameter | None = None
        if positions in ("mix", "lrpe_d", "lrpe"):
            theta = lrpe_base ** (-2 * torch.arange(d_model) / d_model)
            self.theta = nn.Parameter(theta.unflatten(0, (self.n_heads, self.d_head)))
            mark(self, "theta", float32=True)
        if output_norm == "simple_rms":
            self.norm = make_norm("rms", d_model, eps=EPS, affine=False)
        else:
            self.norm = make_norm(output_norm, d_model)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return y, and the state (b, h, dk, dv), complex with theta; with blocks an `AttentionState`."""
        heads = self.n_heads, self.d_head
        *qkv, g = projected(x, self.q, self.k, self.v, self.gate)
        q, k, v = (part.unflatten(-1, heads) for part in qkv)
        theta = None if self.theta is None else self.theta.to(self.state_dtype)
        if self.blocks is not None:
            past = self.init_state(x.shape[0], device=x.device) if state is None else state
            o, state = block_attention(q, k, v, theta, block_size=self.blocks, state=past, reset=reset)
            o = o.flatten(-2)
        else:
            log_lambda = None if self.positions in ("lrpe", "none") else -self._slopes(x.device)
            o, state = gate_loop(self.phi(q), self.phi(k), v, log_lambda, theta, state=state, reset=reset)
            o = self.norm(o.flatten(-2))
        return self.out(o if g is None else o * g), state

    @property
    def state_grows(self) -> bool:
        """False: the cache of DiagAttention has at most a block."""
        return False

    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> State:
        """Return zeros (batch, h, dk, dv): complex with theta, else real; with blocks no steps."""
        turns = self.theta is not None
        if self.blocks is None:
            sizes = self.n_heads, self.d_head, self.d_head
            return gate_loop.empty_state(batch, *sizes, **self.factory_kwargs(device, is_complex=turns))
        sizes = self.n_heads, self.d_head * (1 + turns), self.d_head
        cache = softmax_attention.empty_state(batch, *sizes, **output_kwargs(self.k, device))
        return first_state(cache)

    @property
    def state_size(self) -> int:
        """Elements of the state; with blocks per cached step: key, value, and if the block has it."""
        if self.blocks is None:
            return super().state_size
        return (2 if self.theta is None else 3) * self.d_model + 1

    def transitions(self, x: Tensor) -> Transitions | None:
        """Return lambda and theta, constant in time; lambda is 1 where nothing decays. None with blocks."""
        if self.blocks is not None:
            return None
        return super().transitions(x) or Transitions.ones(self.d_model, **self.factory_kwargs(x.device))

    @classmethod
    def share(cls, layers: "Sequence[TransNormer]") -> None:
        """Tell each layer its place in the stack; with `positions="mix"`, the first alone keeps theta."""
        for layer, mixer in enumerate(layers):
            mixer._place(layer, len(layers))
            if mixer.positions == "mix" and layer > 0:
                mixer.theta = None
            if mixer.blocks is not None:
                mixer.norm = nn.Identity()

    def _place(self, layer: int, n_layers: int) -> None:
        self.layer, self.n_layers = layer, n_layers
        self.blocks = self.block_size if layer < max(1, n_layers // 2) else None
        self.recurrence = "gate_loop" if self.blocks is None else "softmax_attention"

    def _slopes(self, device: torch.device) -> Float[Tensor, "h"]:
        """Return s_h, weakened by the place of the layer."""
        like = self.factory_kwargs(device)
        share = torch.arange(1, self.n_heads + 1, **like) / self.n_heads
        if self.slopes == "alibi":
            slope = alibi_slopes(self.n_heads, **like)
        else:
            slope = 2.0 ** (-8 * share) if self.slopes == "geometric" else 8 * share
        fades = self.layer_decay and self.n_layers > 1
        return slope * (1 - self.layer / (self.n_layers - 1) if fades else 1)


def first_state(cache: AttentionCache) -> AttentionState:
    """Return the state at position 0 of an empty cache, whose keys have 2 d channels with `theta`."""
    # later states say which cached steps are in the current block
    alive = cache.k.new_ones(cache.k.shape[:2], dtype=torch.bool)
    return AttentionState.first(cache._replace(alive=alive))


def block_attention(
    q: Float[Tensor, "b t h d"],
    k: Float[Tensor, "b t h d"],
    v: Float[Tensor, "b t h dv"],
    theta: Float[Tensor, "h d"] | None = None,
    *,
    block_size: int,
    state: AttentionState,
    reset: Bool[Tensor, "b t"] | None = None,
) -> tuple[Float[Tensor, "b t h dv"], AttentionState]:
    """Attend to the steps so far of the same block.

        a_st = q_s^T diag(cos(theta (s - t))) k_t / sqrt(d)
        o_s = sum_t softmax_t(a_st) v_t,    t <= s, t in the block of s

    Blocks are counted from the start of each sequence, so from each reset on. A step that begins a block is a
    reset of the attention. theta has frequencies in radians per step; without it, a_st = q_s^T k_t / sqrt(d).

    Source:
        Qin and others, The Devil in Linear Transformer (2022), its DiagAttention.
    """
    scale = q.shape[-1] ** -0.5
    position, seen = positions(state.position, q.shape[1], reset=reset)
    step = position % block_size
    if theta is not None:
        # the products of both halves add up to the cosine of the difference
        angle = step[..., None, None] * theta
        q, k = (torch.cat([x * angle.cos(), x * angle.sin()], dim=-1).to(x.dtype) for x in (q, k))
    o, cache = softmax_attention(q, k, v, state=state.cache, reset=step == 0, scale=scale, window=block_size)
    assert cache is not None
    return o, AttentionState(cache, seen)
