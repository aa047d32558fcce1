"""ReLiT: Recurrent Linear Transformers (Pramanik, Elelimy, Machado and White, 2023), and AReLiT.

    phi(k_t) = relu(W_p1 x_t) (x) relu(W_K x_t)      phi(q_t) = relu(W_p2 x_t) (x) relu(W_Q x_t)
    gamma_t = sigmoid(W_p3 x_t) (x) sigmoid(W_gamma x_t)     beta_t = sigmoid(W_beta x_t)     v_t = W_V x_t
    C_t = ((1 - beta_t) (x) (1 - gamma_t)) * C_{t-1} + (beta_t * v_t) (x) (gamma_t * phi(k_t))
    s_t = (1 - gamma_t) * s_{t-1} + gamma_t * phi(k_t)
    a_t = C_t phi(q_t) / (s_t . phi(q_t))

x is the input, t time, * the product of entries, and (x) the outer product. Outer products in features and
gamma have eta rows and are flattened. Of a head, q is the query, k the key, v the value, and phi are learned
features. beta and gamma are the gates of value and key channels, C and s the state, and a the output. Heads
side by side are projected. AReLiT approximates C by r terms:

    w_k = 2 pi k / r,     k = 0 .. r - 1
    vv^k_t = (1 - beta_t) * vv^k_{t-1} + cos(w_k t) beta_t * v_t
    kk^k_t = (1 - gamma_t) * kk^k_{t-1} + cos(w_k t) gamma_t * phi(k_t)
    C_t ~ 2/r sum_k vv^k_t (x) kk^k_t

for 2/r sum_k cos(w_k t) cos(w_k t') is 1 where t' = t, and 0 at most other steps. Terms k and r - k are
equal, and kk^0 is s: r // 2 + 1 are kept.

The released code differs. ReLiT has C_t = (1 - beta_t (x) gamma_t) * C_{t-1} + (beta_t * v_t) (x) (gamma_t *
phi(k_t)). AReLiT has w_k = -pi + 2 pi k / (r - 1) and 1 / (2 r) in place of 2 / r. It counts steps from 2.
"""

import math
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from linrec.nn.fast_weights import fast_weights, fast_weights_matrix, joint_decay
from linrec.nn.gates import GateLinear
from linrec.nn.head_sizes import split_width
from linrec.nn.mixer import Mixer, State, Transitions
from linrec.nn.parameters import mark
from linrec.nn.projections import draw
from linrec.ops.gate_loop import gate_loop
from linrec.ops.inspection import note
from linrec.ops.scan import scan
from linrec.rules import at_least, positive, require

__all__ = ["ReLiT", "ReLiTState"]

Variant = Literal["paper", "released"]

# without approximation, every entry of a head's state is a channel of its own, kept for every step
CHANNELS_PER_HEAD = 16
# of the released code, for all matrices
GAIN = math.sqrt(2)


class ReLiTState(NamedTuple):
    """The state of AReLiT: n = r // 2 + 1 terms.

    Attributes:
        k: kk^k as columns (b, h, eta dk, n), the first of which is s.
        v: vv^k as rows (b, h, n, dv).
        t: steps since the sequence began, modulo the period of the cosines, (b, 1).
    """

    k: Float[Tensor, "b h m n"]
    v: Float[Tensor, "b h n dv"]
    t: Float[Tensor, "b 1"]


class ReLiT(Mixer):
    """C_t = ((1 - beta_t) (x) (1 - gamma_t)) * C_{t-1} + (beta_t * v_t) (x) (gamma_t * phi(k_t)), normalised.

    The default is ReLiT, a recurrence of h eta d (d + 1) channels for heads of d channels, all kept for every
    step. With `r`, the layer is AReLiT, whose state and memory have h (r // 2 + 1) (eta + 1) d channels.
    Cosines of period r tell steps apart. So step t also sees a step t' where t - t' or t + t' is a multiple
    of r, unless t' is forgotten by then.

    `variant="released"` computes the equations of the released code. An entry of C then decays by 1 - beta
    gamma: where beta is 1, C and s have the same decay. In AReLiT, a value and its own key enter C with the
    weight (r + 1) / (4 r) in place of 1. A value and the key of another step enter C with the weight 1 / (2
    r) or its negative, in place of 0. After a reset, the released code continues to count steps; this layer
    starts again.

    When training starts, all matrices are orthogonal times sqrt(2), biases zero. `variant="released"` draws
    them as the released code does. Each head of ReLiT has an orthogonal matrix, times 2 in W_Q and W_p2. In
    AReLiT, W_K, W_Q, W_V, W_beta and W_gamma are orthogonal as one matrix, and so are W_p1, W_p2 and W_p3.
    Gates have no weight decay.

    Args:
        d_model: width of the sequence.
        n_heads: heads h. None is the largest number that divides `d_model` and leaves at least 16 channels to
            each head, or 1.
        eta: rows of the features' outer products: phi has eta d entries.
        r: terms of AReLiT; None is ReLiT.
        floor: the smallest denominator. Features are not negative, and may vanish together. With
            `variant="released"`, `floor` is added to s_t . phi(q_t) in ReLiT, and to 2 r s_t . phi(q_t) in
            AReLiT. The released code adds 1e-10 and 1e-5.
        variant: "paper" for the paper's equations, "released" for the released code's.

    Raises:
        ValueError: `n_heads` that does not divide `d_model`, an `eta` or `r` below 1, a `floor` that is
            not positive, or `r=1` with `variant="released"`.

    Source:
        Pramanik, Elelimy, Machado and White, Recurrent Linear Transformers (2023), later AGaLiTe.
        A survey (Tiezzi and others, 2024) has the idea in words. 2 / r makes the approximation one.

    Example:
        >>> mixer = ReLiT(64, n_heads=4)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 4, 64, 17]))
        >>> ReLiT(64, n_heads=4, r=4).state_size
        961
    """

    recurrence = "scan"

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int | None = None,
        eta: int = 4,
        r: int | None = None,
        floor: float = 1e-5,
        variant: Variant = "paper",
    ) -> None:
        super().__init__(d_model)
        at_least(1, eta=eta)
        at_least(1, r=r, or_none=True, cure="None is ReLiT, without approximation.")
        positive(floor=floor, cure="It keeps a sum from being zero.")
        self.is_released = variant == "released"
        require(
            r != 1 or not self.is_released,
            '`r` must be at least 2 with `variant="released"`; got 1. Frequencies have both ends of a range.',
        )
        self.n_heads, self.d_head = split_width("d_model", d_model, n_heads, least=CHANNELS_PER_HEAD)
        self.d_features, self.floor = eta * self.d_head, floor
        # 0 where nothing is approximated
        self.r = 0 if r is None else r

        self.q = nn.Linear(d_model, d_model)
        self.k = nn.Linear(d_model, d_model)
        self.v = nn.Linear(d_model, d_model)
        self.p1 = nn.Linear(d_model, self.n_heads * eta)
        self.p2 = nn.Linear(d_model, self.n_heads * eta)
        self.p3 = mark(GateLinear(d_model, self.n_heads * eta))
        self.gamma = mark(GateLinear(d_model, d_model))
        self.beta = mark(GateLinear(d_model, d_model))
        self.out = nn.Linear(d_model, d_model)
        draw(self, nn.init.orthogonal_, gain=GAIN)
        if self.is_released:
            self._draw_as_released()

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return y, and C^T with s as its last column (b, h, eta dk, dv + 1); of AReLiT, a `ReLiTState`."""
        linears = (self.p1, self.k, self.p2, self.q, self.p3, self.gamma, self.beta, self.v)
        p1, k, p2, q, p3, g, b, v = (
            linear(x).to(self.state_dtype).unflatten(-1, (self.n_heads, -1)) for linear in linears
        )
        k = _outer(functional.relu(p1), functional.relu(k))
        q = _outer(functional.relu(p2), functional.relu(q))
        gamma, beta = _outer(torch.sigmoid(p3), torch.sigmoid(g)), torch.sigmoid(b)
        # f = 1 - gamma = sigmoid(-p3) + sigmoid(p3) sigmoid(-g): no difference, so its logarithm is finite
        p3, g = p3[..., None], g[..., None, :]
        right = functional.logsigmoid(p3) + functional.logsigmoid(-g)
        log_f = torch.logaddexp(functional.logsigmoid(-p3), right).flatten(-2)
        # z = 1 - beta
        log_z = functional.logsigmoid(-b)
        k, v = gamma * k, beta * v
        note(log_f=log_f, log_z=log_z, beta=beta)
        if not self.r:
            # s is C for a value of 1 that decays by f alone: z is 1, or 0 in the released code
            kept = -math.inf if self.is_released else 0.0
            v, log_z = functional.pad(v, (0, 1), value=1.0), functional.pad(log_z, (0, 1), value=kept)
            a, state = fast_weights(q, k, v, log_f, log_z, joint=self.is_released, state=state, reset=reset)
            s = self._denominator(a[..., -1:])
            note(q=q, k=k, s=s)
            a = a[..., :-1] / s
        else:
            kk, vv, before = (None, None, None) if state is None else state
            one = torch.ones(*x.shape[:2], 1, dtype=self.state_dtype, device=x.device)
            # the operator counts, since it handles resets and the steps of other processes
            t, last = scan(one, one, state=before, reset=reset)
            period, factors, counts = self._terms(one)
            t = (t + self.is_released) % period
            cosines = torch.cos(2 * math.pi / period * factors * t)[:, :, None]
            cosines = cosines.expand(-1, -1, self.n_heads, -1)
            # kk^k . phi(q) of all k
            dots, kk = gate_loop(q, k, cosines, log_f, state=kk, reset=reset)
            weights = dots / self._denominator(dots[..., :1]) * counts
            note(q=weights, k=cosines)
            a, vv = fast_weights(weights, cosines, v, None, log_z, state=vv, reset=reset)
            state = ReLiTState(kk, vv, last % period)
        return self.out(a.flatten(-2).to(x.dtype)), state

    @torch.no_grad()
    def _draw_as_released(self) -> None:
        """Draw the weights of all matrices but W_out as the released code draws them."""
        full, few = (self.k, self.q, self.v, self.beta, self.gamma), (self.p1, self.p2, self.p3)
        if not self.r:
            for linear in full + few:
                for head in linear.weight.chunk(self.n_heads):
                    # of queries, a product of two matrices
                    nn.init.orthogonal_(head, gain=GAIN**2 if linear in (self.q, self.p2) else GAIN)
            return
        for group in (full, few):
            weights = [linear.weight for linear in group]
            drawn = nn.init.orthogonal_(torch.cat(weights), gain=GAIN).chunk(len(group))
            for weight, part in zip(weights, drawn, strict=True):
                weight.copy_(part)

    def _denominator(self, s: Tensor) -> Tensor:
        """Return s_t . phi(q_t), kept from zero."""
        if self.is_released:
            return (2 * self.r or 1) * s + self.floor
        return s.clamp(min=self.floor)

    def _terms(self, like: Tensor) -> tuple[int, Tensor, Tensor]:
        """Return the period of the cosines, the factors of 2 pi / period, and the terms' weights."""
        term = torch.arange(self.r // 2 + 1, dtype=like.dtype, device=like.device)
        if not self.is_released:
            # terms k and r - k are one that counts twice
            return self.r, term, torch.where(2 * term % self.r == 0, 1, 2).to(term) * (2 / self.r)
        # frequencies of either sign; pi (2 k - 1) / (r - 1) has no zero, which is kept for s
        even = 1 - self.r % 2
        factors = (2 * term - even).clamp(min=0)
        return 2 * (self.r - 1), factors, torch.where(term == 0, 1 - even, 2).to(term)

    def transitions(self, x: Tensor) -> Transitions:
        """Return the decays of C, c = h eta dk dv; of AReLiT, 1 - gamma and 1 - beta, c = h (eta dk + dv)."""
        _, notes = self._memory(x, None)
        log_f, log_z = notes["log_f"], notes["log_z"]
        if self.r:
            kept = torch.cat([log_f, log_z], -1).exp()
        elif self.is_released:
            kept = joint_decay(log_f[..., None], log_z[..., None, :]).flatten(-2)
        else:
            kept = _outer(log_f.exp(), log_z.exp())
        return Transitions(kept.flatten(2), None)

    def token_mixing(self, x: Tensor, *, reset: Tensor | None = None) -> Tensor:
        """Return the mean over heads and value channels of the magnitudes of the weights of v."""
        _, notes = self._memory(x, reset)
        q, log_f = (notes["q"], None) if self.r else (notes["q"] / notes["s"], notes["log_f"])
        return fast_weights_matrix(
            q, notes["k"], log_f, notes["log_z"], notes["beta"], joint=self.is_released, reset=reset
        )


def _outer(a: Tensor, b: Tensor) -> Tensor:
    """All products of entries of a and b, flattened."""
    return (a[..., None] * b[..., None, :]).flatten(-2)
