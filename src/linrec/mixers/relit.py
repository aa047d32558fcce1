"""ReLiT: Recurrent Linear Transformers (Pramanik, Elelimy, Machado and White, 2023), and AReLiT.

    phi(k_t) = relu(W_p1 x_t) (x) relu(W_K x_t)      phi(q_t) = relu(W_p2 x_t) (x) relu(W_Q x_t)
    gamma_t = sigmoid(W_p3 x_t) (x) sigmoid(W_gamma x_t)     beta_t = sigmoid(W_beta x_t)     v_t = W_V x_t
    C_t = ((1 - beta_t) (x) (1 - gamma_t)) * C_{t-1} + (beta_t * v_t) (x) (gamma_t * phi(k_t))
    s_t = (1 - gamma_t) * s_{t-1} + gamma_t * phi(k_t)
    a_t = C_t phi(q_t) / (s_t . phi(q_t))

x input, q query, k key, v value of a head, phi learned features, beta and gamma gates of value and key
channels, C and s state, a output of a head, t time, * products of entries, (x) outer products, which in
features and gamma have eta rows and are flattened. Heads side by side are projected. AReLiT approximates C
by r terms:

    w_k = 2 pi k / r,     k = 0 .. r - 1
    vv^k_t = (1 - beta_t) * vv^k_{t-1} + cos(w_k t) beta_t * v_t
    kk^k_t = (1 - gamma_t) * kk^k_{t-1} + cos(w_k t) gamma_t * phi(k_t)
    C_t ~ 2/r sum_k vv^k_t (x) kk^k_t

for 2/r sum_k cos(w_k t) cos(w_k t') is 1 where t' = t, and 0 at most other steps. Terms k and r - k are
equal, and kk^0 is s: r // 2 + 1 are kept.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from linrec.nn.gates import GateLinear
from linrec.nn.head_sizes import heads_of, most_heads
from linrec.nn.mixer import Mixer, State, Transitions
from linrec.nn.parameters import mark
from linrec.ops.gate_loop import gate_loop, gate_loop_matrix
from linrec.ops.scan import scan

__all__ = ["ReLiT", "ReLiTState"]

# without approximation, every entry of a head's state is a channel of its own, kept for every step
CHANNELS_PER_HEAD = 16
# of the released code, for all matrices
GAIN = math.sqrt(2)


class ReLiTState(NamedTuple):
    """What AReLiT carries from one piece of a sequence to the next, n = r // 2 + 1 terms of it.

    Attributes:
        k: kk^k as columns (b, h, eta dk, n), the first of which is s.
        v: vv^k as rows (b, h, n, dv).
        t: steps since the sequence began, modulo r, (b, 1).
    """

    k: Float[Tensor, "b h m n"]
    v: Float[Tensor, "b h n dv"]
    t: Float[Tensor, "b 1"]


class ReLiT(Mixer):
    """C_t = ((1 - beta_t) (x) (1 - gamma_t)) * C_{t-1} + (beta_t * v_t) (x) (gamma_t * phi(k_t)), normalised.

    The default is ReLiT: a recurrence of h eta d (d + 1) channels for heads of d channels, all kept for every
    step. `r` makes it AReLiT, whose state and memory have h (r // 2 + 1) (eta + 1) d. Steps are told apart by
    cosines of period r: a step t' meets t also where t - t' or t + t' is a multiple of r, unless it is
    forgotten by then.

    When training starts, all matrices are orthogonal times sqrt(2) and biases zero, as in the released code.
    Gates have no weight decay.

    Args:
        d_model: width of the sequence.
        n_heads: heads h. None is the largest number that divides `d_model` and leaves at least 16 channels to
            each head, or 1.
        eta: rows of the features' outer products: phi has eta d entries.
        r: terms of AReLiT; None is ReLiT.
        floor: the smallest denominator. Features are not negative, and may vanish together.

    Raises:
        ValueError: `n_heads` that does not divide `d_model`, an `eta` or `r` below 1, or a `floor` that is
            not positive.

    Source:
        Pramanik, Elelimy, Machado and White, Recurrent Linear Transformers (2023), later AGaLiTe.
        A survey (Tiezzi and others, 2024) has the idea in words. 2 / r makes the approximation one; the
        released code has 1 / (2 r), frequencies from -pi to pi, and a time that goes on after resets.

    Example:
        >>> import torch
        >>> mixer = ReLiT(64, n_heads=4)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 4, 64, 17]))
        >>> ReLiT(64, n_heads=4, r=4).state_size
        961
    """

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int | None = None,
        eta: int = 4,
        r: int | None = None,
        floor: float = 1e-5,
    ) -> None:
        super().__init__(d_model)
        if eta < 1:
            raise ValueError(f"`eta` must be at least 1; got {eta}.")
        if r is not None and r < 1:
            raise ValueError(
                f"`r` must be at least 1 term, or None for ReLiT without approximation; got {r}."
            )
        if not floor > 0:
            raise ValueError(f"`floor` must be positive; got {floor}. It keeps a sum from being zero.")
        self.n_heads = most_heads(d_model, CHANNELS_PER_HEAD) if n_heads is None else n_heads
        self.d_head = heads_of("d_model", d_model, self.n_heads)
        self.d_features, self.floor = eta * self.d_head, floor
        # 0 where nothing is approximated
        self.r = 0 if r is None else r

        self.q = nn.Linear(d_model, d_model)
        self.k = nn.Linear(d_model, d_model)
        self.v = nn.Linear(d_model, d_model)
        self.p1 = nn.Linear(d_model, self.n_heads * eta)
        self.p2 = nn.Linear(d_model, self.n_heads * eta)
        self.p3 = mark(GateLinear(d_model, self.n_heads * eta), group="transition", weight_decay=False)
        self.gamma = mark(GateLinear(d_model, d_model), group="transition", weight_decay=False)
        self.beta = mark(GateLinear(d_model, d_model), group="transition", weight_decay=False)
        self.out = nn.Linear(d_model, d_model)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.orthogonal_(module.weight, gain=GAIN)
                nn.init.zeros_(module.bias)

    def forward(
        self,
        x: Float[Tensor, "b t d_model"],
        state: State = None,
        *,
        reset: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b t d_model"], State]:
        """Mix `x` over time; see `Mixer.forward`.

        The state is C^T, its last column s, (b, h, eta dk, dv + 1); of AReLiT, a `ReLiTState`.
        """
        self.check_input(x, reset, state)
        run = self._approximate if self.r else self._exact
        a, state = run(x, state, reset)
        return self.out(a.flatten(-2).to(x.dtype)), state

    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> State:
        """Zeros (batch, h, eta dk, dv + 1), or a `ReLiTState` of zeros."""
        device = self.q.weight.device if device is None else device

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(batch, *shape, dtype=self._state_dtype(), device=device)

        h, m = self.n_heads, self.d_features
        if not self.r:
            return zeros(h, m, self.d_head + 1)
        n = self.r // 2 + 1
        return ReLiTState(zeros(h, m, n), zeros(h, n, self.d_head), zeros(1))

    @property
    def state_size(self) -> int:
        """Elements of C and s, h eta dk (dv + 1); of AReLiT, h (r // 2 + 1) (eta dk + dv), and the time."""
        if not self.r:
            return self.n_heads * self.d_features * (self.d_head + 1)
        return self.n_heads * (self.r // 2 + 1) * (self.d_features + self.d_head) + 1

    def transitions(self, x: Float[Tensor, "b t d_model"]) -> Transitions:
        """(1 - beta_t) (x) (1 - gamma_t), c = h eta dk dv; of AReLiT, both side by side, h (eta dk + dv)."""
        log_key, log_value = self._keys(x)[1], self._values(x)[1]
        if not self.r:
            return Transitions((log_key[..., None] + log_value[..., None, :]).exp().flatten(2), None)
        return Transitions.of_heads(torch.cat([log_key, log_value], -1), None)

    def token_mixing(
        self, x: Float[Tensor, "b t d_model"], *, reset: Bool[Tensor, "b t"] | None = None
    ) -> Float[Tensor, "b t t"]:
        """Mean over heads and value channels of the magnitudes of the weights that v is multiplied by."""
        (k, log_key), log_value, q = self._keys(x), self._values(x)[1], self._queries(x)
        beta = -torch.expm1(log_value)
        if not self.r:
            s, _ = gate_loop(q, k, torch.ones_like(q[..., :1]), log_key, reset=reset)
            q = q / s.clamp(min=self.floor)
            log_decay = log_key[..., None, :] + log_value[..., None]
        else:
            cosines, _ = self._cosines(x, None, reset)
            dots, _ = gate_loop(q, k, cosines, log_key, reset=reset)
            q, k, log_decay = self._weights(dots), cosines, log_value[..., None].expand(-1, -1, -1, -1, 1)
        # to one value channel, the state is a head of its own
        q = q.repeat_interleave(self.d_head, 2)
        k = (k[..., None, :] * beta[..., None]).flatten(2, 3)
        log_decay = log_decay.expand(*log_decay.shape[:-1], k.shape[-1]).flatten(2, 3)
        return gate_loop_matrix(q, k, log_decay, reset=reset).abs().mean(1)

    def _exact(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, Tensor]:
        (k, log_key), (v, log_value) = self._keys(x), self._values(x)
        # s is what C is for a value of 1 that is not forgotten
        v, log_value = functional.pad(v, (0, 1), value=1.0), functional.pad(log_value, (0, 1))
        decay = (log_key[..., None] + log_value[..., None, :]).exp()
        update = k[..., None] * v[..., None, :]
        state = None if state is None else state.flatten(1)
        C, last = scan(decay.flatten(2), update.flatten(2), state=state, reset=reset)
        a = (self._queries(x)[..., None, :] @ C.unflatten(-1, decay.shape[2:]))[..., 0, :]
        return a[..., :-1] / a[..., -1:].clamp(min=self.floor), last.unflatten(-1, decay.shape[2:])

    def _approximate(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, ReLiTState]:
        past = self.init_state(x.shape[0], device=x.device) if state is None else state
        (k, log_key), (v, log_value) = self._keys(x), self._values(x)
        cosines, t = self._cosines(x, past.t, reset)
        # kk^k . phi(q) for all k
        dots, kk = gate_loop(self._queries(x), k, cosines, log_key, state=past.k, reset=reset)
        update = cosines[..., None] * v[..., None, :]
        decay = log_value.exp()[..., None, :].expand_as(update)
        vv, last = scan(decay.flatten(2), update.flatten(2), state=past.v.flatten(1), reset=reset)
        a = (self._weights(dots)[..., None, :] @ vv.unflatten(-1, update.shape[2:]))[..., 0, :]
        return a, ReLiTState(kk, last.unflatten(-1, update.shape[2:]), t)

    def _cosines(self, x: Tensor, before: Tensor | None, reset: Tensor | None) -> tuple[Tensor, Tensor]:
        """cos(w_k t) (b, t, h, n), and the last t modulo r (b, 1)."""
        one = torch.ones(*x.shape[:2], 1, dtype=self._state_dtype(), device=x.device)
        # counted by the operator, which knows of resets, and of other processes' steps
        t, last = scan(one, one, state=before, reset=reset)
        k = torch.arange(self.r // 2 + 1, dtype=one.dtype, device=x.device)
        cosines = torch.cos(2 * math.pi / self.r * k * (t % self.r))
        return cosines[:, :, None].expand(-1, -1, self.n_heads, -1), last % self.r

    def _weights(self, dots: Tensor) -> Tensor:
        """2/r kk^k . phi(q) / (s . phi(q)) of all terms; those of which there are two, twice."""
        k = torch.arange(dots.shape[-1], device=dots.device)
        times = torch.where(2 * k % self.r == 0, 1, 2)
        return dots / dots[..., :1].clamp(min=self.floor) * times * (2 / self.r)

    def _queries(self, x: Tensor) -> Tensor:
        """phi(q) (b, t, h, eta dk)."""
        return _outer(*(functional.relu(self._heads(linear, x)) for linear in (self.p2, self.q)))

    def _keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """gamma * phi(k) and log(1 - gamma), (b, t, h, eta dk)."""
        k = _outer(*(functional.relu(self._heads(linear, x)) for linear in (self.p1, self.k)))
        a, b = self._heads(self.p3, x)[..., None], self._heads(self.gamma, x)[..., None, :]
        gamma = (torch.sigmoid(a) * torch.sigmoid(b)).flatten(-2)
        # 1 - gamma = sigmoid(-a) + sigmoid(a) sigmoid(-b): no difference, so its logarithm is finite
        right = functional.logsigmoid(a) + functional.logsigmoid(-b)
        return gamma * k, torch.logaddexp(functional.logsigmoid(-a), right).flatten(-2)

    def _values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """beta * v and log(1 - beta), (b, t, h, dv)."""
        beta = self._heads(self.beta, x)
        return torch.sigmoid(beta) * self._heads(self.v, x), functional.logsigmoid(-beta)

    def _heads(self, linear: nn.Linear, x: Tensor) -> Tensor:
        return linear(x).to(self._state_dtype()).unflatten(-1, (self.n_heads, -1))


def _outer(a: Tensor, b: Tensor) -> Tensor:
    """All products of entries of a and b, flattened."""
    return (a[..., None] * b[..., None, :]).flatten(-2)
