"""AFT: An Attention Free Transformer (Zhai and others, 2021), causal: AFT-simple, -full, -local and -conv.

    Q = X W_Q     K = X W_K     V = X W_V
    Y_t = sigmoid(Q_t) * sum_{t' <= t} exp(K_t' + w_{t,t'}) * V_t' / sum_{t' <= t} exp(K_t' + w_{t,t'})

X input, Q query, K key, V value, * the product of channels, Y output, t time, w learned biases of pairs of
positions, which AFT-simple leaves out. Every channel has weights of its own. AFT-simple is a recurrence. Its
sums are kept over exp(m_t), m_t the largest key so far, so that neither overflows:

    n_t = exp(m_{t-1} - m_t) * n_{t-1} + exp(K_t - m_t) * V_t
    d_t = exp(m_{t-1} - m_t) * d_{t-1} + exp(K_t - m_t)
    Y_t = sigmoid(Q_t) * n_t / d_t

AFT-local has w_{t,t'} = 0 for t - t' >= s: steps behind the window of s steps are in these sums. AFT-conv has
one key for each of h heads i, and biases of distances, which gamma and beta scale and shift:

    w^i_{t,t'} = gamma^i (u^i_{t-t'} - mean(u^i)) / std(u^i) + beta^i for t - t' < s, else 0
"""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from linrec.nn.head_sizes import heads_of, most_heads
from linrec.nn.mixer import Mixer, State
from linrec.nn.positions import StandardizedBias, positions
from linrec.nn.running_maximum import running_maximum
from linrec.nn.windowed_mean import WindowState, window_biases, windowed_mean, windowed_weights
from linrec.ops.core.call import refuse_split_time
from linrec.ops.core.isolation import documents
from linrec.ops.core.precision import without_autocast
from linrec.ops.gate_loop import gate_loop_matrix
from linrec.ops.inspection import note, noting
from linrec.ops.scan import scan
from linrec.rules import at_least, choice

__all__ = ["AFT", "AFTCache", "AFTState"]

Variant = Literal["simple", "full", "local", "conv"]

# of u and v when training starts, in public implementations
FACTOR_STD = 0.01
# of the paper's image models with 32 heads: a width of 192
CHANNELS_PER_HEAD = 6


class AFTState(NamedTuple):
    """The state of AFT-simple between two pieces of a sequence.

    Attributes:
        sums: n and d side by side, (b, 2 d_model).
        largest: m, the largest key so far, (b, d_model); -inf at the start.
    """

    sums: Float[Tensor, "b two_d"]
    largest: Float[Tensor, "b d"]


class AFTCache(NamedTuple):
    """The state of AFT-full between two pieces of a sequence: all steps so far.

    Attributes:
        k: keys (b, n, d_model).
        v: values (b, n, d_model).
        position: of each step in its sequence, (b, n) int64; -1 where a reset has cut the step off.
    """

    k: Float[Tensor, "b n d"]
    v: Float[Tensor, "b n d"]
    position: Int[Tensor, "b n"]


class AFT(Mixer):
    """Y_t = sigmoid(Q_t) * sum_{t' <= t} exp(K_t' + w_{t,t'}) * V_t' / sum_{t' <= t} exp(K_t' + w_{t,t'}).

    AFT-simple, w = 0, is a recurrence with a state of three vectors. The order of steps enters by the causal
    sums alone.

    AFT-full has w = u v^T of learned u (`position_q`) and v (`position_k`). It is not a recurrence, since the
    weights of past steps change with every step. Its state is a cache that grows with every step. Time and
    memory are quadratic in the length, and memory is proportional to d_model too. Positions start again at a
    reset. Positions from `max_length` on use the biases of the last position.

    AFT-local has the same w for the last `window` steps, and w = 0 for earlier steps, whose weights are
    exp(K). AFT-conv has one key per head, and a w of distances in the window alone. The state of both has the
    sums of AFT-simple and the last `window` steps: its size does not grow. Time and memory have a factor
    `window`.

    When training starts, u and v are normal with a standard deviation of 0.01, so that w is near zero; gamma
    and beta of AFT-conv are zero, so that w is zero; the linear layers start as torch's own.

    Args:
        d_model: width of the sequence, and of Q, K and V.
        variant: "simple", "full", "local" or "conv".
        max_length: positions T that "full" and "local" tell apart.
        rank: of w of "full" and "local", the width d' of u and v (T, d').
        window: s of "local" and "conv", in steps, the step itself included.
        n_heads: heads h of "conv", which share a key and biases. None is the largest number that divides
            `d_model` and leaves at least 6 channels to each head, or 1.
        bias: whether the projections have biases.
        output_projection: whether a Linear from d_model to d_model ends the layer, as in the attention that
            AFT replaces.

    Raises:
        ValueError: an unknown `variant`, a `max_length`, `rank` or `window` below 1, a `window` below 2 of
            "conv", whose biases have a standard deviation, or `n_heads` that does not divide `d_model`.

    Source:
        An Attention Free Transformer (Zhai and others, 2021), section 3: AFT-full with w of rank 128, and
        AFT-simple, AFT-local and AFT-conv. AFT-conv's two-dimensional windows are one-dimensional here.

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
        window: int = 32,
        n_heads: int | None = None,
        bias: bool = True,
        output_projection: bool = True,
    ) -> None:
        super().__init__(d_model)
        choice(Variant, variant=variant)
        at_least(1, n_heads=n_heads, or_none=True)
        at_least(1, max_length=max_length, rank=rank)
        at_least(2 if variant == "conv" else 1, window=window)
        self.variant, self.max_length, self.window = variant, max_length, window
        # AFT-conv has a key for each head
        self.n_keys = d_model
        if variant == "conv":
            self.n_keys = most_heads(d_model, CHANNELS_PER_HEAD) if n_heads is None else n_heads
        self.d_head = heads_of("d_model", d_model, self.n_keys)
        self.q = nn.Linear(d_model, d_model, bias=bias)
        self.k = nn.Linear(d_model, self.n_keys, bias=bias)
        self.v = nn.Linear(d_model, d_model, bias=bias)
        if variant == "conv":
            self.w = StandardizedBias(self.n_keys, window)
        if variant in ("full", "local"):
            self.position_q = nn.Parameter(FACTOR_STD * torch.randn(max_length, rank))
            self.position_k = nn.Parameter(FACTOR_STD * torch.randn(max_length, rank))
        self.out = nn.Linear(d_model, d_model, bias=bias) if output_projection else nn.Identity()

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return Y, and an `AFTState`, AFT-full's `AFTCache`, or the `WindowState` of AFT-local and -conv."""
        # the largest key so far is over the steps of all processes
        refuse_split_time("aft")
        past = self.init_state(x.shape[0], device=x.device) if state is None else state
        Q, K, V = self.q(x), self.k(x).to(past[0].dtype), self.v(x).to(past[0].dtype)
        if self.variant == "simple":
            # the quotient does not depend on m, so m needs no gradient
            largest = running_maximum(K, past.largest, reset=reset)
            before, m = largest[:, :-1], largest[:, 1:]
            # where a new sequence starts the largest key may fall, and nothing is left to fade
            fade, weight = (before - m).clamp(max=0).exp(), (K - m).exp()
            update = torch.cat([weight * V, weight], -1)
            sums, last = scan(torch.cat([fade, fade], -1), update, state=past.sums, reset=reset)
            n, d = sums.chunk(2, -1)
            note(Q=Q, fade=fade, weight=weight, d=d)
            # a view would keep m of all steps as long as the state
            mean, state = n / d, AFTState(last, largest[:, -1].clone())
        elif self.variant != "full":
            position, _ = positions(past.seen, x.shape[1], reset=reset)
            if self.variant == "conv":
                w = self.w(dtype=K.dtype)
            else:
                u, v = self.position_q.to(K.dtype), self.position_k.to(K.dtype)
                w = window_biases(u, v, position, past.seen, size=self.window)[:, :, None]
            note(Q=Q, K=K, w=w, position=position)
            V = V.unflatten(-1, (self.n_keys, self.d_head))
            mean, state = windowed_mean(K, V, w, position, past, reset=reset)
            mean = mean.flatten(2)
        else:
            last_position = functional.pad(past.position, (1, 0), value=-1)[:, -1]
            new, _ = positions(last_position + 1, x.shape[1], reset=reset)
            k, v, position = (torch.cat(pair, 1) for pair in zip(past, (K, V, new), strict=True))
            rows, columns = (
                factor.to(K.dtype)[at.clamp(0, self.max_length - 1)]
                for factor, at in ((self.position_q, new), (self.position_k, position))
            )
            with without_autocast(x.device.type):
                w = rows @ columns.mT
            # of cached steps 0, or -1 where a reset has cut it off
            document = torch.zeros_like(new) if reset is None else documents(reset)
            of_keys = torch.cat([past.position.clamp(max=0), document], 1)
            hidden = ~(document[:, :, None] == of_keys[:, None]).tril(past.position.shape[1])
            share = (k[:, None] + w[..., None]).masked_fill(hidden[..., None], -torch.inf).softmax(2)
            values = v[:, None]
            if reset is not None:
                # a share of zero would let NaN pass
                values = values.masked_fill(hidden[..., None], 0)
                cut = of_keys != of_keys[:, -1:]
                k, v = (part.masked_fill(cut[..., None], 0) for part in (k, v))
                position = position.masked_fill(cut, -1)
            note(Q=Q, share=share)
            mean, state = (share * values).sum(2), AFTCache(k, v, position)
        return self.out(torch.sigmoid(Q) * mean.to(x.dtype)), state

    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> State:
        """Return sums of zero and largest keys of -inf; of AFT-full, a cache of no steps.

        AFT-local and AFT-conv also have the steps of a window, of zeros.
        """
        sums = scan.empty_state(batch, 2 * self.d_model, **self.factory_kwargs(device))
        if self.variant in ("local", "conv"):
            return WindowState.empty(batch, self.n_keys, self.d_head, self.window, like=sums)
        if self.variant == "full":
            none = sums.new_zeros(batch, 0, self.d_model)
            return AFTCache(none, none, none.new_zeros(batch, 0, dtype=torch.int64))
        return AFTState(sums, sums.new_full((batch, self.d_model), -torch.inf))

    @property
    def state_size(self) -> int:
        """Elements of n, d and m, 3 d_model, and of a window; of AFT-full, 2 d_model + 1 per cached step."""
        return 2 * self.d_model + 1 if self.variant == "full" else super().state_size

    def token_mixing(self, x: Tensor, *, reset: Tensor | None = None) -> Tensor:
        """Return the mean over channels of the weights that V is multiplied by, sigmoid(Q) among them."""
        with noting() as noted:
            self.forward(x, reset=reset)
        gate = torch.sigmoid(noted["Q"])
        if self.variant in ("local", "conv"):
            share = windowed_weights(noted["K"], noted["w"], noted["position"])
            return (gate.unflatten(-1, (self.n_keys, -1)).mean(-1)[:, :, None] * share).mean(-1)
        if self.variant == "full":
            return (gate[:, :, None] * noted["share"]).mean(-1)
        heads = gate / noted["d"] / self.d_model, noted["weight"], noted["fade"].log()
        return gate_loop_matrix(*(part[:, :, None] for part in heads), reset=reset)[:, 0]
