"""AFT: An Attention Free Transformer (Zhai and others, 2021): AFT-simple, -full, -local and -conv.

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

Without a causal mask, sums are over all t' of the sequence, and windows over |t - t'| < s.
"""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from linrec.nn.documents import largest_of_documents, softmax_means, totals
from linrec.nn.head_sizes import heads_of, most_heads
from linrec.nn.mixer import Mixer, State
from linrec.nn.positions import StandardizedBias, Windows, positions
from linrec.nn.running_maximum import maxima_around_steps, running_maximum
from linrec.nn.seen_steps import SeenSteps
from linrec.ops.core.precision import wide, without_autocast
from linrec.ops.gate_loop import gate_loop_matrix
from linrec.ops.inspection import note, noting
from linrec.ops.scan import scan
from linrec.rules import at_least

__all__ = ["AFT", "AFTCache", "AFTState", "WindowState", "window_biases", "windowed_mean", "windowed_weights"]

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


class WindowState(NamedTuple):
    """State of a windowed mean after a piece of a sequence.

    Attributes:
        sums: sums of exp(k) v and of exp(k), as the last column, over the steps behind the window, both times
            exp(-largest), (b, h, dv + 1).
        largest: the largest key behind the window (b, h).
        k: keys of the last s steps (b, s, h).
        v: values of the last s steps (b, s, h, dv).
        seen: steps of each sequence so far, (b,) int64.
    """

    sums: Float[Tensor, "b h dv+1"]
    largest: Float[Tensor, "b h"]
    k: Float[Tensor, "b s h"]
    v: Float[Tensor, "b s h dv"]
    seen: Int[Tensor, "b"]

    @classmethod
    def empty(cls, batch: int, h: int, dv: int, s: int, *, like: Tensor) -> "WindowState":
        """Return the state at the start, with the dtype and the device of `like`."""
        return cls(
            like.new_zeros(batch, h, dv + 1),
            like.new_full((batch, h), -torch.inf),
            like.new_zeros(batch, s, h),
            like.new_zeros(batch, s, h, dv),
            like.new_zeros(batch, dtype=torch.int64),
        )


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

    Without `causal`, AFT-simple is linear in the length. The other variants form the weights of all pairs of
    steps, in time and memory quadratic in the length and proportional to their keys.

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
        causal: whether steps see the past alone. False is for encoders: a step sees its whole document, from
            one reset to the next, and there is no state. "conv" then has biases of 2 `window` - 1 distances.

    Raises:
        ValueError: an unknown `variant`, a `max_length`, `rank` or `window` below 1, a `window` below 2 of
            "conv", whose biases have a standard deviation, or `n_heads` that does not divide `d_model`.

    Source:
        An Attention Free Transformer (Zhai and others, 2021), section 3: AFT-full with w of rank 128, and
        AFT-simple, AFT-local and AFT-conv. AFT-conv's two-dimensional windows are one-dimensional here.

    Example:
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
        causal: bool = True,
    ) -> None:
        super().__init__(d_model)
        at_least(1, n_heads=n_heads, or_none=True)
        at_least(1, max_length=max_length, rank=rank)
        at_least(2 if variant == "conv" else 1, window=window)
        self.variant, self.max_length, self.window, self.causal = variant, max_length, window, causal
        # the other variants weigh pairs of steps
        self.takes_turns = variant != "simple"
        # AFT-conv has a key for each head
        self.n_keys = d_model
        if variant == "conv":
            self.n_keys = most_heads(d_model, CHANNELS_PER_HEAD) if n_heads is None else n_heads
        self.d_head = heads_of("d_model", d_model, self.n_keys)
        self.q = nn.Linear(d_model, d_model, bias=bias)
        self.k = nn.Linear(d_model, self.n_keys, bias=bias)
        self.v = nn.Linear(d_model, d_model, bias=bias)
        if variant == "conv":
            self.w = StandardizedBias(self.n_keys, window if causal else 2 * window - 1)
        if variant in ("full", "local"):
            self.position_q = nn.Parameter(FACTOR_STD * torch.randn(max_length, rank))
            self.position_k = nn.Parameter(FACTOR_STD * torch.randn(max_length, rank))
        self.out = nn.Linear(d_model, d_model, bias=bias) if output_projection else nn.Identity()

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return Y, and an `AFTState`, AFT-full's `AFTCache`, or the `WindowState` of AFT-local and -conv.

        Without `causal`, the state is None.
        """
        if not self.causal:
            mean = self._whole(wide(self.k(x)), wide(self.v(x)), reset)
            return self.out(torch.sigmoid(self.q(x)) * mean.to(x.dtype)), None
        past = self.init_state(x.shape[0], device=x.device) if state is None else state
        Q, K, V = self.q(x), self.k(x).to(past[0].dtype), self.v(x).to(past[0].dtype)
        if self.variant == "simple":
            # the quotient does not depend on m, so m needs no gradient
            before, m, largest = maxima_around_steps(K, past.largest, reset=reset)
            fade, weight = (before - m).exp(), (K - m).exp()
            update = torch.cat([weight * V, weight], -1)
            sums, last = scan(torch.cat([fade, fade], -1), update, state=past.sums, reset=reset)
            n, d = sums.chunk(2, -1)
            note(Q=Q, fade=fade, weight=weight, d=d)
            mean, state = n / d, AFTState(last, largest)
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
            seen = SeenSteps(past.position, x.shape[1], reset=reset)
            k, v = torch.cat([past.k, K], 1), torch.cat([past.v, V], 1)
            rows, columns = (
                factor.to(K.dtype)[at.clamp(0, self.max_length - 1)]
                for factor, at in ((self.position_q, seen.new), (self.position_k, seen.position))
            )
            with without_autocast(x.device.type):
                w = rows @ columns.mT
            hidden = ~seen.visible[..., None]
            share = (k[:, None] + w[..., None]).masked_fill(hidden, -torch.inf).softmax(2)
            # a share of zero would let NaN pass
            values = v[:, None] if reset is None else v[:, None].masked_fill(hidden, 0)
            note(Q=Q, share=share)
            mean, state = (share * values).sum(2), AFTCache(seen.kept(k), seen.kept(v), seen.kept_position)
        return self.out(torch.sigmoid(Q) * mean.to(x.dtype)), state

    def _whole(self, K: Tensor, V: Tensor, reset: Tensor | None) -> Tensor:
        """Return the weighted means of V over the document of each step."""
        if self.variant == "simple":
            weight = (K - largest_of_documents(K, reset)).exp()
            n, d = totals(torch.cat([weight * V, weight], -1), reset).chunk(2, -1)
            return n / d
        step = torch.arange(K.shape[1], device=K.device)
        age = step[:, None] - step
        if self.variant == "conv":
            # the largest age first, as in a window
            w = self.w(dtype=K.dtype)[:, (self.window - 1 - age).clamp(0, 2 * self.window - 2)]
            w = w.permute(1, 2, 0)
        else:
            start = torch.zeros(len(K), dtype=torch.int64, device=K.device)
            position, _ = positions(start, K.shape[1], reset=reset)
            rows, columns = (
                factor.to(K.dtype)[position.clamp(max=self.max_length - 1)]
                for factor in (self.position_q, self.position_k)
            )
            with without_autocast(K.device.type):
                w = (rows @ columns.mT)[..., None]
        if self.variant != "full":
            w = w.masked_fill((age.abs() >= self.window)[..., None], 0)
        mean = softmax_means(K[:, None] + w, V.unflatten(-1, (self.n_keys, self.d_head)), reset)
        return mean.flatten(2)

    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> State:
        """Return sums of zero and largest keys of -inf; of AFT-full, a cache of no steps.

        AFT-local and AFT-conv also have the steps of a window, of zeros. None without `causal`.
        """
        if not self.causal:
            return None
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
        return 2 * self.d_model + 1 if self.variant == "full" and self.causal else super().state_size

    @property
    def is_causal(self) -> bool:
        """Whether steps see the past alone."""
        return self.causal

    def token_mixing(self, x: Tensor, *, reset: Tensor | None = None) -> Tensor | None:
        """Return the mean over channels of the weights that V is multiplied by, sigmoid(Q) among them.

        None without `causal`.
        """
        if not self.causal:
            return None
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


def windowed_mean(
    k: Float[Tensor, "b t h"],
    v: Float[Tensor, "b t h dv"],
    w: Float[Tensor, "*bt #h s"],
    position: Int[Tensor, "b t"],
    state: WindowState,
    *,
    reset: Bool[Tensor, "b t"] | None = None,
) -> tuple[Float[Tensor, "b t h dv"], WindowState]:
    """Return sum_m exp(k_m + w_nm) v_m / sum_m exp(k_m + w_nm) over m <= n, with w_nm = 0 for n - m >= s.

    Steps behind the window of s steps are two running sums over their largest exponential; the window is
    formed in pairs of steps. No exponential overflows. Memory grows with s keys and values for each step.

    w has the biases of the steps of each window, oldest first; w[..., -1] is the bias of the step itself. Its
    shape is (b, t, h or 1, s), or (h or 1, s) for biases that are the same at every step. `position` is the
    position of each step in its sequence.
    """
    (t, h), s = k.shape[1:], w.shape[-1]
    k, v = torch.cat([state.k, k], 1), torch.cat([state.v, v], 1)
    # a step that is s steps old leaves the window
    passed = position >= s
    old_k = k[:, :t].masked_fill(~passed[..., None], -torch.inf)
    old_v = v[:, :t].masked_fill(~passed[..., None, None], 0)
    maxima = running_maximum(old_k, state.largest, reset=reset)
    # -inf less -inf would be NaN
    m = maxima.clamp(min=torch.finfo(k.dtype).min)
    fade, weight = (m[:, :-1] - m[:, 1:]).clamp(max=0).exp(), (old_k - m[:, 1:]).exp()[..., None]
    update = torch.cat([weight * old_v, weight], -1)
    sums, last = scan(
        fade[..., None].expand_as(update).flatten(2),
        update.flatten(2),
        state=state.sums.flatten(1),
        reset=reset,
    )
    n, d = sums.unflatten(2, (h, -1)).split([v.shape[-1], 1], -1)
    d = d.masked_fill(~passed[..., None, None], 1)
    behind = (d.squeeze(-1).log() + m[:, 1:]).masked_fill(~passed[..., None], -torch.inf)

    age = torch.arange(s - 1, -1, -1, device=k.device)
    hidden = (age > position[..., None])[:, :, None]
    near = (k.unfold(1, s, 1)[:, 1:] + w).masked_fill(hidden, -torch.inf)
    near_v = v.unfold(1, s, 1)[:, 1:]
    seen = torch.cat([state.seen[:, None] - 1, position], 1)[:, -1] + 1
    # views would keep all steps as long as the state
    largest, last_k, last_v = (x.clone() for x in (maxima[:, -1], k[:, t:], v[:, t:]))
    if reset is not None:
        # a share of zero would let NaN pass
        near_v = near_v.masked_fill(hidden[..., None, :], 0)
        last_v = last_v.masked_fill((age >= seen[:, None])[..., None, None], 0)
    share = torch.cat([near, behind[..., None]], -1).softmax(-1)
    mean = (share[..., None, :-1] * near_v).sum(-1) + share[..., -1:] * (n / d)
    return mean, WindowState(last.unflatten(1, (h, -1)), largest, last_k, last_v, seen)


def windowed_weights(
    k: Float[Tensor, "b t h"], w: Float[Tensor, "*bt #h s"], position: Int[Tensor, "b t"]
) -> Float[Tensor, "b t t h"]:
    """Return the weight of v_m in `windowed_mean` at step n, for sequences that start at the first step."""
    t, s = k.shape[1], w.shape[-1]
    step = torch.arange(t, device=k.device)
    age = step[:, None] - step
    pairs = w.flip(-1).expand(k.shape[0], t, -1, -1).mT
    index = age.clamp(0, s - 1)[None, ..., None].expand(k.shape[0], -1, -1, pairs.shape[-1])
    bias = pairs.gather(2, index).masked_fill((age >= s)[..., None], 0)
    hidden = (age < 0) | (age > position[..., None])
    return (k[:, None] + bias).masked_fill(hidden[..., None], -torch.inf).softmax(2)


def window_biases(
    u: Float[Tensor, "T r"],
    v: Float[Tensor, "T r"],
    position: Int[Tensor, "b t"],
    seen: Int[Tensor, "b"],
    *,
    size: int,
) -> Float[Tensor, "b t size"]:
    """Return u_n . v_m for the `size` steps m of the window of each step n, oldest first.

    u and v have rows for T positions; positions from T on are T - 1. `position` is the position of each step
    in its sequence, and `seen` has the steps of each sequence before the first.
    """
    windows, last = Windows(position.shape[1], size), u.shape[0] - 1
    before = seen[:, None] + torch.arange(-size, 0, device=seen.device)
    seen_from = torch.cat([before, position], 1).clamp(0, last)
    with without_autocast(u.device.type):
        w = windows.steps(u[position.clamp(max=last)]) @ windows.behind(v[seen_from])
    # a block sees `size` steps before itself
    oldest = torch.arange(w.shape[2], device=w.device)[:, None] + 1
    index = oldest + torch.arange(size, device=w.device)
    return windows.joined(w.gather(-1, index.expand(*w.shape[:2], -1, -1)))
