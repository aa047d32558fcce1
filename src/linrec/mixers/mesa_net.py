"""MesaNet: Sequence Modeling by Locally Optimal Test-Time Training (von Oswald and others, 2025).

    q_t = L2Norm(SiLU(conv(W_q x)_t))    k_t = L2Norm(SiLU(conv(W_k x)_t))    v_t = W_v x_t
    gamma_t = sigmoid(W_gamma x_t + b_gamma)    beta_t = sigmoid(W_beta x_t + b_beta)
    H_t = gamma_t H_{t-1} + beta_t k_t k_t^T
    G_t = gamma_t G_{t-1} + beta_t k_t v_t^T
    o_t = G_t^T (H_t + Diag(lambda))^-1 q_t
    y_t = W_o RMSNorm(o_t)

x input, q query, k key, v value, gamma decay and beta writing strength of a head, H and G states, lambda a
learned regulariser of a key channel, o output of a head, y output, conv a causal convolution of a few steps,
t time. A ridge regression of the values on the keys, weighted by beta and gamma, predicts o_t from q_t.
Conjugate gradients solve for all steps at once: H_t p_t is the output of `gate_loop` for queries p.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from linrec.nn.decays import softplus
from linrec.nn.fast_weights import UnitFeatures
from linrec.nn.gates import GateLinear
from linrec.nn.head_sizes import split_width
from linrec.nn.mixer import Mixer, State
from linrec.nn.norms import RMSNorm, gated
from linrec.nn.parameters import mark
from linrec.nn.projections import projected
from linrec.nn.short_convolution import ShortConvolution
from linrec.ops.gate_loop import gate_loop
from linrec.rules import COUNT, at_least, positive

__all__ = ["MesaNet"]

# of the released layer
CHANNELS_PER_HEAD = 128
LEAST_LAMBDA = 0.25
# keeps divisions defined after convergence, relative to the first residual, which has norm 1
TINY = 1e-30


class MesaNet(Mixer):
    """o_t = G_t^T (H_t + Diag(lambda))^-1 q_t: the output is a ridge regression over the past.

    The work per step is `n_iterations` + 1 times that of linear attention, in float32. With `n_iterations` of
    at least the channels of a head, conjugate gradients are exact up to rounding.

    When training starts, lambda is 1, as in the released layer; all else is as torch draws it. lambda is
    softplus of a number, which has no weight decay, plus 1/4.

    Args:
        d_model: width of the sequence, and of q, k and v over all heads.
        n_heads: heads h. None is the largest number that divides `d_model` and leaves at least 128 channels
            to each head, or 1.
        n_iterations: steps of conjugate gradients.
        qk_eps: added to |SiLU|^2 in the L2 norms; the released layer has 1e-6.
        conv_size: taps of a causal convolution of each channel of q and k; None disables it.
        conv_bias: whether the convolutions have biases.
        output_gate: whether the normalised o is multiplied by SiLU(W_g x).
        norm_eps: of the norm.

    Raises:
        ValueError: an `n_heads` that does not divide `d_model`, or a number out of range.

    Source:
        Von Oswald and others (2025); constants come from flash-linear-attention, `MesaNet`, whose conjugate
        gradients add 1e-5 to their divisors.

    Example:
        >>> mixer = MesaNet(64, n_heads=4)
        >>> y, (tail, (H, G)) = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, H.shape, G.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 4, 16, 16]), torch.Size([2, 4, 16, 16]))
    """

    recurrence = "gate_loop"
    of_one_input = "q", "k", "v", "gate"

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int | None = None,
        n_iterations: int = 30,
        qk_eps: float = 0.0,
        conv_size: int | None = 4,
        conv_bias: bool = False,
        output_gate: bool = False,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__(d_model)
        at_least(1, most=COUNT, n_iterations=n_iterations)
        positive(norm_eps=norm_eps, cure="The released code has 1e-5.")
        self.n_heads, d_head = split_width("d_model", d_model, n_heads, least=CHANNELS_PER_HEAD)
        self.n_iterations = n_iterations
        self.features = UnitFeatures(d_head, feature_map="identity", eps=qk_eps)
        self.q = nn.Linear(d_model, d_model, bias=False)
        self.k = nn.Linear(d_model, d_model, bias=False)
        self.v = nn.Linear(d_model, d_model, bias=False)
        self.conv = ShortConvolution(2 * d_model, conv_size, bias=conv_bias, silu=True)
        self.gamma, self.beta = mark(GateLinear(d_model, self.n_heads)), GateLinear(d_model, self.n_heads)
        # lambda = softplus(ridge) + 1/4 = 1
        self.ridge = nn.Parameter(torch.full((d_model,), math.log(math.expm1(1 - LEAST_LAMBDA))))
        mark(self, "ridge", group="default", weight_decay=False, float32=True)
        self.gate = nn.Linear(d_model, d_model, bias=False) if output_gate else None
        self.norm = RMSNorm(d_head, eps=norm_eps)
        self.out = nn.Linear(d_model, d_model, bias=False)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return y, and H (b, h, d, d) with G (b, h, d, d); with a convolution, its tail and both."""
        tail, both = self.conv.split(state)
        H, G = (None, None) if both is None else both
        q, k, v, g = projected(x, self.q, self.k, self.v, self.gate)
        (q, k), tail = self.conv.side_by_side([q, k], tail, reset=reset)
        q, k, v = (part.unflatten(-1, (self.n_heads, -1)) for part in (q, k, v))
        log_gamma, beta = functional.logsigmoid(self.gamma(x)), torch.sigmoid(self.beta(x))[..., None]
        # conjugate gradients lose their directions in half precision
        q, k, v = self.features(q).to(beta), self.features(k).to(beta), v.to(beta)
        ridge = (softplus(self.ridge.to(beta.dtype)) + LEAST_LAMBDA).unflatten(0, (self.n_heads, -1))
        written = beta * k

        def regress(queries: Tensor, values: Tensor, past: State) -> tuple[Tensor, Tensor]:
            return gate_loop(queries, written, values, log_gamma, state=past, reset=reset)

        def applied(p: Tensor) -> tuple[Tensor, Tensor]:
            found, last = regress(p, k, H)
            return found + ridge * p, last

        z, last = _solved(applied, q, self.n_iterations)
        o, G = regress(z, v, G)
        o = gated(self.norm(o).flatten(-2).to(x.dtype), g)
        return self.out(o), self.conv.joined(tail, (last, G))


def _solved(
    applied: Callable[[Tensor], tuple[Tensor, Tensor]], q: Tensor, n_iterations: int
) -> tuple[Tensor, Tensor]:
    """Return z with (H + Diag(lambda)) z = q for each step and head, by conjugate gradients, and the last H.

    `applied` returns the product with a vector, and the last H.
    """
    z, residual, p = torch.zeros_like(q), q, q
    size = residual.square().sum(-1, keepdim=True)
    for _ in range(n_iterations):
        image, last = applied(p)
        alpha = size / ((p * image).sum(-1, keepdim=True) + TINY)
        z, residual = z + alpha * p, residual - alpha * image
        before, size = size, residual.square().sum(-1, keepdim=True)
        p = residual + size / (before + TINY) * p
    return z, last
