"""AFT: An Attention Free Transformer (Zhai and others, 2021), causal: AFT-simple and AFT-full.

    Q = X W_Q     K = X W_K     V = X W_V
    Y_t = sigmoid(Q_t) * sum_{t' <= t} exp(K_t' + w_{t,t'}) * V_t' / sum_{t' <= t} exp(K_t' + w_{t,t'})

X input, Q query, K key, V value, * the product of channels, Y output, t time, w learned biases of pairs of
positions, which AFT-simple leaves out. Every channel has weights of its own. AFT-simple is a recurrence. Its
sums are kept over exp(m_t), m_t the largest key so far, so that neither overflows:

    n_t = exp(m_{t-1} - m_t) * n_{t-1} + exp(K_t - m_t) * V_t
    d_t = exp(m_{t-1} - m_t) * d_{t-1} + exp(K_t - m_t)
    Y_t = sigmoid(Q_t) * n_t / d_t
"""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from linrec.errors import unknown
from linrec.nn.mixer import Mixer, State
from linrec.nn.running_maximum import running_maximum
from linrec.ops.core.handlers import refuse_split_time
from linrec.ops.core.precision import without_autocast
from linrec.ops.gate_loop import gate_loop_matrix
from linrec.ops.scan import scan

__all__ = ["AFT", "AFTCache", "AFTState"]

Variant = Literal["simple", "full"]

# of u and v when training starts; the paper gives none
FACTOR_STD = 0.1


class AFTState(NamedTuple):
    """What AFT-simple carries from one piece of a sequence to the next, each (b, d_model).

    Attributes:
        sums: n and d side by side, (b, 2 d_model).
        largest: m, the largest key so far; -inf at the start.
    """

    sums: Float[Tensor, "b two_d"]
    largest: Float[Tensor, "b d"]


class AFTCache(NamedTuple):
    """What AFT-full carries from one piece of a sequence to the next: all steps so far.

    Attributes:
        k: keys (b, n, d_model).
        v: values (b, n, d_model).
        position: of each in its sequence, (b, n) int64; -1 where a reset has cut it off.
    """

    k: Float[Tensor, "b n d"]
    v: Float[Tensor, "b n d"]
    position: Int[Tensor, "b n"]


class AFT(Mixer):
    """Y_t = sigmoid(Q_t) * sum_{t' <= t} exp(K_t' + w_{t,t'}) * V_t' / sum_{t' <= t} exp(K_t' + w_{t,t'}).

    AFT-simple, w = 0, is a recurrence with a state of three vectors. It knows of order by the causal sums
    alone.

    AFT-full has w = u v^T of learned u (`position_q`) and v (`position_k`). It is no recurrence, since the
    weights of past steps change with every step: its state is a cache that grows with every step, and time
    and memory are quadratic in the length, memory with a factor d_model. Positions start again at a reset.
    Those from `max_length` on have the biases of the last.

    When training starts, u and v are normal with a standard deviation of 0.1, so that w is near zero; the
    linear layers are torch's own.

    Args:
        d_model: width of the sequence, and of Q, K and V.
        variant: "simple" or "full".
        max_length: positions T that "full" tells apart.
        rank: of w, the width d' of u and v (T, d').
        bias: whether the projections have biases.
        output_projection: whether a Linear from d_model to d_model ends the layer, as it ends the attention
            that AFT takes the place of.

    Raises:
        ValueError: an unknown `variant`, or a `max_length` or `rank` below 1.

    Source:
        An Attention Free Transformer (Zhai and others, 2021), section 3: AFT-full with w of rank 128, and
        AFT-simple.

    Example:
        >>> import torch
        >>> mixer = AFT(64)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.sums.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 128]))
    """

    def __init__(
        self,
        d_model: int,
        *,
        variant: Variant = "simple",
        max_length: int = 1024,
        rank: int = 128,
        bias: bool = True,
        output_projection: bool = True,
    ) -> None:
        super().__init__(d_model)
        if variant not in ("simple", "full"):
            raise unknown("`variant`", variant, ["simple", "full"])
        if max_length < 1 or rank < 1:
            raise ValueError(f"`max_length` and `rank` must be at least 1; got {max_length} and {rank}.")
        self.is_full, self.max_length = variant == "full", max_length
        self.q = nn.Linear(d_model, d_model, bias=bias)
        self.k = nn.Linear(d_model, d_model, bias=bias)
        self.v = nn.Linear(d_model, d_model, bias=bias)
        if self.is_full:
            self.position_q = nn.Parameter(FACTOR_STD * torch.randn(max_length, rank))
            self.position_k = nn.Parameter(FACTOR_STD * torch.randn(max_length, rank))
        self.out = nn.Linear(d_model, d_model, bias=bias) if output_projection else nn.Identity()

    def forward(
        self,
        x: Float[Tensor, "b t d_model"],
        state: State = None,
        *,
        reset: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b t d_model"], State]:
        """Mix `x` over time; see `Mixer.forward`. The state is an `AFTState`, or AFT-full's `AFTCache`."""
        self.check_input(x, reset, state)
        # the largest key so far is that of all parts
        refuse_split_time("aft")
        past = self.init_state(x.shape[0], device=x.device) if state is None else state
        if x.shape[1] == 0:
            return self.out(torch.zeros_like(x)), past
        if self.is_full:
            share, v, state = self._pairs(x, past, reset)
            mean = (share * v).sum(2)
        else:
            fade, weight, largest = self._weights(x, past.largest, reset)
            update = torch.cat([weight * self.v(x).to(weight.dtype), weight], -1)
            sums, last = scan(torch.cat([fade, fade], -1), update, state=past.sums, reset=reset)
            n, d = sums.chunk(2, -1)
            # a view would keep m of all steps as long as the state
            mean, state = n / d, AFTState(last, largest[:, -1].clone())
        return self.out(torch.sigmoid(self.q(x)) * mean.to(x.dtype)), state

    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> State:
        """Sums of zero and largest keys of -inf; of AFT-full, a cache of no steps."""
        device = self.q.weight.device if device is None else device
        if self.is_full:
            none = torch.zeros(batch, 0, self.d_model, dtype=self._state_dtype(), device=device)
            return AFTCache(none, none, torch.zeros(batch, 0, dtype=torch.int64, device=device))
        sums = torch.zeros(batch, 2 * self.d_model, dtype=self._state_dtype(), device=device)
        return AFTState(sums, torch.full_like(sums[:, : self.d_model], -torch.inf))

    @property
    def state_size(self) -> int:
        """Elements of n, d and m, 3 d_model; of AFT-full, 2 d_model + 1 per cached step."""
        return 2 * self.d_model + 1 if self.is_full else 3 * self.d_model

    def token_mixing(
        self, x: Float[Tensor, "b t d_model"], *, reset: Bool[Tensor, "b t"] | None = None
    ) -> Float[Tensor, "b t t"]:
        """Mean over channels of the weights that V is multiplied by, sigmoid(Q) among them."""
        start, gate = self.init_state(x.shape[0], device=x.device), torch.sigmoid(self.q(x))
        if self.is_full:
            share, *_ = self._pairs(x, start, reset)
            return (gate[:, :, None].to(share.dtype) * share).mean(-1)
        fade, weight, _ = self._weights(x, start.largest, reset)
        d, _ = scan(fade, weight, reset=reset)
        share = gate.to(d.dtype) / d / self.d_model
        heads = (part[:, :, None] for part in (share, weight, fade.log()))
        return gate_loop_matrix(*heads, reset=reset)[:, 0]

    def _pairs(self, x: Tensor, past: AFTCache, reset: Tensor | None) -> tuple[Tensor, Tensor, AFTCache]:
        """Shares (b, t, n + t, d_model) of all steps so far in each step's mean, their v, and the cache."""
        batch, time = x.shape[:2]
        step = torch.arange(time, device=x.device).expand(batch, -1)
        cut = torch.zeros_like(step, dtype=torch.bool) if reset is None else reset
        document = cut.cumsum(1)
        begin = torch.where(cut, step, -1).cummax(1).values
        seen = past.position[:, -1:] + 1 if past.position.shape[1] else torch.zeros_like(step[:, :1])
        position = torch.where(begin < 0, seen + step, step - begin)

        k, v = (
            torch.cat([old, linear(x).to(old.dtype)], 1)
            for old, linear in ((past.k, self.k), (past.v, self.v))
        )
        positions = torch.cat([past.position, position], 1)
        rows, columns = (
            factor.to(k.dtype)[where.clamp(0, self.max_length - 1)]
            for factor, where in ((self.position_q, position), (self.position_k, positions))
        )
        before = (past.position >= 0)[:, None] & (document == 0)[..., None]
        now = (document[..., None] == document[:, None]) & (step[:, :, None] >= step[:, None])
        seen_by = torch.cat([before, now], -1)
        with without_autocast(x.device.type):
            scores = k[:, None] + (rows @ columns.mT)[..., None]
        share = scores.masked_fill(~seen_by[..., None], -torch.inf).softmax(2)
        values = v[:, None]
        if reset is not None:
            # a share of zero would let NaN pass
            values = values.masked_fill(~seen_by[..., None], 0)
            k, v = (part.masked_fill(~seen_by[:, -1, :, None], 0) for part in (k, v))
        # what the last step sees is what its successors may see
        return share, values, AFTCache(k, v, torch.where(seen_by[:, -1], positions, -1))

    def _weights(self, x: Tensor, before: Tensor, reset: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """exp(m_{t-1} - m_t), exp(K_t - m_t) and m_t, all (b, t, d_model)."""
        k = self.k(x).to(self._state_dtype())
        # sums over exp(m) are what they are whatever m is, so no gradient passes it
        largest = running_maximum(k, before, reset=reset)
        earlier, largest = largest[:, :-1], largest[:, 1:]
        # where a new sequence starts the largest key may fall, and nothing is left to fade
        return (earlier - largest).clamp(max=0).exp(), (k - largest).exp(), largest
