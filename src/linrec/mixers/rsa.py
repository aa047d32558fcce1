"""RSA: self-attention with recurrence (Huang, Lu, Cai, Qin, Fang, Tian and Li, 2023).

    head = ((1 - sigmoid(mu)) softmax(M_-inf(Q K^T / sqrt(d_head))) + sigmoid(mu) P) V
    P^R_nm  = lambda^(n-m)                              lambda = tanh(eta)
    P^C1_nm = gamma^(n-m) cos((n-m) theta)              gamma = sigmoid(nu)
    P^C2_nm = gamma^(n-m) sin((n-m) theta)              all for m < n, and 0 elsewhere
    o = [head_1, .., head_h] W^O

Q queries, K keys and V values of a head, M_-inf the causal mask, P the recurrence encoding matrix (REM) of
one of three kinds, mu its gate, o output, n and m steps. P V is a linear recurrence over V:
S_n = a S_{n-1} + v_n and (P V)_n = S_n - v_n, with a = lambda, and with the real or the imaginary part for
a = gamma exp(i theta).
"""

import math
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Inexact
from torch import Tensor, nn

from linrec.nn.head_sizes import heads_of, most_heads
from linrec.nn.mixer import Mixer, State
from linrec.nn.parameters import mark
from linrec.nn.projections import output_kwargs, projected
from linrec.ops.attention import AttentionCache, check_options, softmax_attention
from linrec.ops.scan import scan
from linrec.rules import at_least, require

__all__ = ["RSA", "RSAState"]

Gate = Literal["head", "layer"]

# of heads whose number is not given
CHANNELS_PER_HEAD = 64
# bounds of the uniform distributions of abs(mu), abs(eta) and nu when training starts, and theta
GATE_BOUND, LEAST, MOST, THETA = 3.0, 1.0, 2.0, math.pi / 4


class RSAState(NamedTuple):
    """The state of RSA between two pieces of a sequence.

    Attributes:
        cache: keys and values of past steps.
        S: the recurrence (b, h d_head), complex if there are cosine or sine heads.
    """

    cache: AttentionCache
    S: Inexact[Tensor, "b c"]


class RSA(Mixer):
    """head = ((1 - sigmoid(mu)) softmax(..) + sigmoid(mu) P) V: attention and a recurrence over its values.

    Regular heads come first, then cosine heads, then sine heads. The default is half of the heads regular and
    a quarter each of the cyclical kinds, which one head or two do not have. P holds the distance of steps; it
    does not depend on their contents. A step's own value reaches it by the softmax alone.

    The state is the cache of attention, which grows with every step, and S. The paper's dilated matrices, and
    its matrices that see later steps, are left out.

    Args:
        d_model: width of the sequence.
        n_heads: heads h. None is the largest number that divides `d_model` and leaves at least 64 channels to
            each head, or 1.
        d_head: channels of q, k and v in a head. None is `d_model` / `n_heads`.
        n_cosine: heads with P^C1. None is a quarter of the heads, rounded down.
        n_sine: heads with P^C2. None is a quarter of the heads, rounded down.
        gate: whether each "head" has its own mu, or the "layer" has one for all heads.
        bias: whether the projections have biases.
        dropout: probability that a share of the softmax is dropped, in training alone.

    Raises:
        ValueError: `n_heads` that does not divide `d_model`, more cosine and sine heads than heads, an
            unknown name, or a number out of range.

    Source:
        Huang and others, Encoding Recurrence into Transformers (2023), section 3.

    Example:
        >>> mixer = RSA(64, n_heads=4)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.cache.k.shape, state.S.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 10, 4, 16]), torch.Size([2, 64]))
    """

    recurrence = "scan"
    of_one_input = "q", "k", "v"

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int | None = None,
        d_head: int | None = None,
        n_cosine: int | None = None,
        n_sine: int | None = None,
        gate: Gate = "head",
        bias: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(d_model)
        check_options(None, dropout)
        at_least(0, n_cosine=n_cosine, n_sine=n_sine, or_none=True)
        self.n_heads = most_heads(d_model, CHANNELS_PER_HEAD) if n_heads is None else n_heads
        self.d_head = heads_of("d_model", d_model, self.n_heads) if d_head is None else d_head
        at_least(1, n_heads=self.n_heads, d_head=self.d_head)
        self.n_cosine = self.n_heads // 4 if n_cosine is None else n_cosine
        self.n_sine = self.n_heads // 4 if n_sine is None else n_sine
        cyclical = self.n_cosine + self.n_sine
        require(
            cyclical <= self.n_heads,
            f"`n_cosine` and `n_sine` must be at most `n_heads` = {self.n_heads} together; got {cyclical}.",
        )
        self.dropout = dropout

        width = self.n_heads * self.d_head
        self.q = nn.Linear(d_model, width, bias=bias)
        self.k = nn.Linear(d_model, width, bias=bias)
        self.v = nn.Linear(d_model, width, bias=bias)
        self.mu = nn.Parameter((2 * torch.rand(self.n_heads if gate == "head" else 1) - 1) * GATE_BOUND)
        eta = _between(self.n_heads - cyclical)
        self.eta = nn.Parameter(torch.where(torch.rand_like(eta) < 0.5, -eta, eta))
        self.nu = nn.Parameter(_between(cyclical))
        self.theta = nn.Parameter(torch.full((cyclical,), THETA))
        mark(self, "mu", "eta", "nu", "theta", float32=True)
        self.out = nn.Linear(width, d_model, bias=bias)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return o, and an `RSAState`."""
        past = self.init_state(x.shape[0], device=x.device) if state is None else state
        Q, K, V = self._projected(x)
        heads, state = self._heads(Q, K, V, past, reset, self.dropout if self.training else 0.0)
        return self.out(heads.flatten(-2)), state

    def _projected(self, x: Tensor) -> list[Tensor]:
        """Return Q, K and V (b, t, h, d_head)."""
        return [y.unflatten(-1, (self.n_heads, -1)) for y in projected(x, self.q, self.k, self.v)]

    def _heads(
        self, Q: Tensor, K: Tensor, V: Tensor, past: RSAState, reset: Tensor | None, dropout: float
    ) -> tuple[Tensor, RSAState]:
        """Return the heads (b, t, h, d_head), and the state."""
        attended, cache = softmax_attention(Q, K, V, state=past.cache, reset=reset, dropout=dropout)
        assert cache is not None
        dtype = self.state_dtype
        a = torch.tanh(self.eta.to(dtype))
        if self.theta.numel():
            a = torch.cat([a + 0j, torch.polar(torch.sigmoid(self.nu.to(dtype)), self.theta.to(dtype))])
        v = V.flatten(-2).to(dtype)
        S, last = scan(a.repeat_interleave(V.shape[-1]), v, state=past.S, reset=reset)
        PV = (S - v).unflatten(-1, (self.n_heads, -1))
        if self.theta.numel():
            real, sine = PV.real, self.n_heads - self.n_sine
            PV = torch.cat([real[:, :, :sine], PV[:, :, sine:].imag], 2)
        gate = torch.sigmoid(self.mu.to(dtype))[:, None]
        return ((1 - gate) * attended + gate * PV).to(V.dtype), RSAState(cache, last)

    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> State:
        """Return a cache of no steps, and S of zeros."""
        sizes = self.n_heads, self.d_head, self.d_head
        cache = softmax_attention.empty_state(batch, *sizes, **output_kwargs(self.k, device))
        factory = self.factory_kwargs(device, is_complex=self.theta.numel() > 0)
        S = torch.zeros(batch, self.n_heads * self.d_head, **factory)
        return RSAState(cache, S)

    @property
    def state_size(self) -> int:
        """Elements per cached step: key and value of every head. S, which does not grow, is not counted."""
        return 2 * self.n_heads * self.d_head

    def token_mixing(self, x: Tensor, *, reset: Tensor | None = None) -> Tensor | None:
        """Return the mean magnitude over heads of the weights that V is multiplied by."""
        self.check_input(x, reset)
        batch, time, _ = x.shape
        past = self.init_state(batch, device=x.device)
        Q, K, V = self._projected(x)
        # values that make the heads the weights, with states of as many channels
        one_hot = torch.eye(time, dtype=V.dtype, device=x.device)[:, None].expand(batch, -1, self.n_heads, -1)
        S = past.S.new_zeros(batch, self.n_heads * time)
        past = RSAState(past.cache._replace(v=one_hot[:, :0]), S)
        weights, _ = self._heads(Q, K, one_hot, past, reset, 0.0)
        return weights.abs().mean(2)


def _between(size: int) -> Float[Tensor, "size"]:
    """Return uniform numbers between 1 and 2."""
    return LEAST + (MOST - LEAST) * torch.rand(size)
