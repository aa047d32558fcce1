"""Forgetting attention: Forgetting Transformer, Softmax Attention with a Forget Gate (Lin and others, 2025).

    q_t = W_q x_t    k_t = W_k x_t    v_t = W_v x_t    f_t = sigmoid(W_f x_t + b_f)
    d_ij = sum_{l=j+1..i} log f_l
    o_i = sum_{j<=i} softmax_j(q_i . k_j / sqrt(d) + d_ij) v_j
    y_t = W_o (sigmoid(W_g x_t) * o_t)

x input, q query, k key, v value, f forget gate of a head, o output of a head, y output, t, i and j time.
d is the logarithm of the product of the gates between two steps. The gates are the only positions.

d_ij is F_i - F_j, with F the running sum of log f, and F_i is the same for all j. So q . k with a further
channel, 1 in q and -F_j in k, has the same softmax. In half precision, -F_j is the sum of three numbers.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from linrec.nn.gates import GateLinear
from linrec.nn.head_sizes import split_width
from linrec.nn.mixer import Mixer, State
from linrec.nn.norms import GroupRMSNorm, gated
from linrec.nn.parameters import mark
from linrec.nn.projections import output_kwargs, projected
from linrec.ops.attention import AttentionCache, softmax_attention
from linrec.ops.scan import scan
from linrec.rules import positive

__all__ = ["ForgettingTransformer"]

CHANNELS_PER_HEAD = 64
# factor that moves -F from k to q, so that float16 holds it
MOVED = 256.0
# terms of F in half precision; caches of all precisions have as many channels
PARTS = 3


class ForgettingState(NamedTuple):
    """State of `ForgettingTransformer`.

    Attributes:
        total: F of the last step (b, h).
        cache: keys with their further channels, and values.
    """

    total: Float[Tensor, "b h"]
    cache: AttentionCache


class ForgettingTransformer(Mixer):
    """o_i = sum_{j<=i} softmax_j(q_i . k_j / sqrt(d) + d_ij) v_j: attention with a forget gate, FoX.

    The paper's "Pro" block adds norms and a shift of keys and values, which are not part of this layer, but
    for `qk_norm` and `output_gate`.

    When training starts, all is as torch draws it. W_f and b_f are marked as group "transition" without
    weight decay.

    Args:
        d_model: width of the sequence.
        n_heads: heads h. None is the largest number that divides `d_model` and leaves at least 64 channels to
            each head, or 1.
        qk_norm: whether each head of q and of k is normalised by its root mean square, with a weight for each
            channel.
        norm_eps: of that norm.
        output_gate: whether o is multiplied by sigmoid(W_g x).
        bias: whether W_q, W_k and W_v have biases.

    Raises:
        ValueError: an `n_heads` that does not divide `d_model`, or a `norm_eps` that is not positive.

    Source:
        Lin and others (2025), section 3; the form of the layer is that of flash-linear-attention.

    Example:
        >>> mixer = ForgettingTransformer(64, n_heads=4)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.cache.v.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 10, 4, 16]))
    """

    recurrence = "softmax_attention"
    of_one_input = "q", "k", "v", "gate"

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int | None = None,
        qk_norm: bool = False,
        norm_eps: float = 1e-5,
        output_gate: bool = False,
        bias: bool = False,
    ) -> None:
        super().__init__(d_model)
        positive(norm_eps=norm_eps, cure="The released code has 1e-5.")
        self.n_heads, self.d_head = split_width("d_model", d_model, n_heads, least=CHANNELS_PER_HEAD)
        self.q = nn.Linear(d_model, d_model, bias=bias)
        self.k = nn.Linear(d_model, d_model, bias=bias)
        self.v = nn.Linear(d_model, d_model, bias=bias)
        self.f = mark(GateLinear(d_model, self.n_heads))
        self.q_norm, self.k_norm = (
            GroupRMSNorm(d_model, n_groups=self.n_heads, eps=norm_eps) if qk_norm else nn.Identity()
            for _ in range(2)
        )
        self.gate = nn.Linear(d_model, d_model, bias=False) if output_gate else None
        self.out = nn.Linear(d_model, d_model, bias=False)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return y, and the sum of log f with the cache of all steps so far."""
        total, cache = (None, None) if state is None else state
        q, k, v, g = projected(x, self.q, self.k, self.v, self.gate)
        q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
        q, k, v = (part.unflatten(-1, (self.n_heads, -1)) for part in (q, k, v))
        log_f = functional.logsigmoid(self.f(x))
        F, total = scan(torch.ones_like(log_f), log_f, state=total, reset=reset)
        channels = _parts(-F * (self.d_head**0.5 / MOVED), v.dtype)
        ones = torch.full_like(channels, MOVED)
        q, k = torch.cat([q, ones], -1), torch.cat([k, channels], -1)
        scale = self.d_head**-0.5
        o, cache = softmax_attention(q, k, v, state=cache, reset=reset, scale=scale)
        assert cache is not None
        return self.out(gated(o.flatten(-2), g, torch.sigmoid)), ForgettingState(total, cache)

    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> ForgettingState:
        """Return a sum of zero, and a cache of no steps in the dtype of values."""
        total = scan.empty_state(batch, self.n_heads, **self.factory_kwargs(device))
        like = output_kwargs(self.v, device)
        sizes = self.n_heads, self.d_head + PARTS, self.d_head
        return ForgettingState(total, softmax_attention.empty_state(batch, *sizes, **like))

    @property
    def state_size(self) -> int:
        """Elements per cached step: keys with their further channels, and values."""
        cache = self.init_state(1, device="meta").cache
        return self.n_heads * (cache.k.shape[-1] + self.d_head)


def _parts(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return numbers (...) as sums of numbers of a dtype, (..., parts)."""
    parts = []
    for _ in range(PARTS):
        parts.append(x.to(dtype))
        x = x - parts[-1].to(x.dtype)
    return torch.stack(parts, -1)
