"""AFT: An Attention Free Transformer (Zhai and others, 2021), its variant AFT-simple, causal.

    Q = X W_Q     K = X W_K     V = X W_V
    Y_t = sigmoid(Q_t) * sum_{t' <= t} exp(K_t') * V_t' / sum_{t' <= t} exp(K_t')

X input, Q query, K key, V value, * the product of channels, Y output, t time. Every channel has weights of
its own. Both sums are kept over exp(m_t), m_t the largest key so far, so that neither overflows:

    n_t = exp(m_{t-1} - m_t) * n_{t-1} + exp(K_t - m_t) * V_t
    d_t = exp(m_{t-1} - m_t) * d_{t-1} + exp(K_t - m_t)
    Y_t = sigmoid(Q_t) * n_t / d_t
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from linrec.mixers.base import Mixer, State
from linrec.ops.gate_loop import gate_loop_matrix
from linrec.ops.scan import scan

__all__ = ["AFT", "AFTState"]


class AFTState(NamedTuple):
    """What AFT-simple carries from one piece of a sequence to the next, each (b, d_model).

    Attributes:
        sums: n and d side by side, (b, 2 d_model).
        largest: m, the largest key so far; -inf at the start.
    """

    sums: Float[Tensor, "b two_d"]
    largest: Float[Tensor, "b d"]


class AFT(Mixer):
    """Y_t = sigmoid(Q_t) * sum_{t' <= t} exp(K_t') * V_t' / sum_{t' <= t} exp(K_t'): AFT-simple.

    The paper's AFT-full adds a learned bias w_{t, t'} of absolute positions to K_t'. It is no recurrence: its
    weights of past steps change with every step, so a stream would have to keep all of them. It is not here.

    Args:
        d_model: width of the sequence, and of Q, K and V.
        bias: whether the projections have biases.
        output_projection: whether a Linear from d_model to d_model ends the layer, as it ends the attention
            that AFT takes the place of.

    Source:
        An Attention Free Transformer (Zhai and others, 2021), section 3: AFT-simple.

    Example:
        >>> import torch
        >>> mixer = AFT(64)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.sums.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 128]))
    """

    def __init__(self, d_model: int, *, bias: bool = True, output_projection: bool = True) -> None:
        super().__init__(d_model)
        self.q = nn.Linear(d_model, d_model, bias=bias)
        self.k = nn.Linear(d_model, d_model, bias=bias)
        self.v = nn.Linear(d_model, d_model, bias=bias)
        self.out = nn.Linear(d_model, d_model, bias=bias) if output_projection else nn.Identity()

    def forward(
        self,
        x: Float[Tensor, "b t d_model"],
        state: State = None,
        *,
        reset: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b t d_model"], AFTState]:
        """Mix `x` over time; see `Mixer.forward`. The state is an `AFTState`."""
        self.check_input(x)
        past = self.init_state(len(x), device=x.device) if state is None else state
        if x.shape[1] == 0:
            return self.out(torch.zeros_like(x)), past
        fade, weight, largest = self._weights(x, past.largest, reset)
        update = torch.cat([weight * self.v(x).to(weight.dtype), weight], -1)
        sums, last = scan(torch.cat([fade, fade], -1), update, state=past.sums, reset=reset)
        n, d = sums.chunk(2, -1)
        y = torch.sigmoid(self.q(x)) * (n / d).to(x.dtype)
        return self.out(y), AFTState(last, largest[:, -1])

    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> AFTState:
        """Sums of zero and largest keys of -inf."""
        device = self.q.weight.device if device is None else device
        sums = torch.zeros(batch, 2 * self.d_model, dtype=self._state_dtype(), device=device)
        return AFTState(sums, torch.full_like(sums[:, : self.d_model], -torch.inf))

    @property
    def state_size(self) -> int:
        """Elements of n, d and m: 3 d_model."""
        return 3 * self.d_model

    def token_mixing(
        self, x: Float[Tensor, "b t d_model"], *, reset: Bool[Tensor, "b t"] | None = None
    ) -> Float[Tensor, "b t t"]:
        """Mean over channels of the weights that V is multiplied by, sigmoid(Q) among them."""
        fade, weight, _ = self._weights(x, self.init_state(len(x), device=x.device).largest, reset)
        d, _ = scan(fade, weight, reset=reset)
        share = torch.sigmoid(self.q(x)).to(d.dtype) / d / self.d_model
        heads = (part[:, :, None] for part in (share, weight, fade.log()))
        return gate_loop_matrix(*heads, reset=reset)[:, 0]

    def _weights(self, x: Tensor, before: Tensor, reset: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """exp(m_{t-1} - m_t), exp(K_t - m_t) and m_t, all (b, t, d_model)."""
        k = self.k(x).to(self._state_dtype())
        # sums over exp(m) are what they are whatever m is, so no gradient passes it
        largest = _largest_so_far(k.detach(), before.detach(), reset)
        earlier = torch.cat([before.detach()[:, None].to(k.dtype), largest[:, :-1]], 1)
        # where a new sequence starts the largest key may fall, and nothing is left to fade
        return (earlier - largest).clamp(max=0).exp(), (k - largest).exp(), largest


def _largest_so_far(k: Tensor, before: Tensor, reset: Tensor | None) -> Tensor:
    """The largest of `before` (b, d) and k (b, t, d) up to each step, since the last reset."""
    keys = torch.cat([before[:, None].to(k.dtype), k], 1)
    if reset is None:
        return keys.cummax(1).values[:, 1:]
    # sequences are told apart by lifting each above all before it
    before = torch.where(before.isinf(), k[:, 0], before.to(k.dtype))
    low, high = torch.minimum(before, k.amin(1)), torch.maximum(before, k.amax(1))
    wide = torch.float32 if k.device.type == "mps" else torch.float64
    lift = (high - low + 1).to(wide)[:, None] * reset.cumsum(1).to(wide)[..., None]
    lifted = torch.cat([keys[:, :1].to(wide), k.to(wide) + lift], 1)
    return (lifted.cummax(1).values[:, 1:] - lift).to(k.dtype)
