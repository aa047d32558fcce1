"""Preconditioned DeltaNet (2026), gated and as Kimi Delta Attention, as flash-linear-attention has them.

    q_t = L2Norm(SiLU(conv(W_q x)_t))    k_t = L2Norm(SiLU(conv(W_k x)_t))    v_t = SiLU(conv(W_v x)_t)
    alpha_t = exp(-A softplus(W_alpha x_t + b_dt)),    beta_t = sigmoid(W_beta x_t)
    alpha'_t = exp(-A' softplus(W'_alpha x_t + b'_dt)),    beta'_t = sigmoid(W'_beta x_t)
    M_t = alpha'_t M_{t-1} + beta'_t k_t^2
    m_t = squash^(-r_t / (1 + |r_t|)),    r_t = log(M_t + 1e-6) - c
    S_t = (I - beta_t (m_t * k_t) k_t^T) Diag(alpha_t) S_{t-1} + beta_t (m_t * k_t) v_t^T
    o_t = S_t^T q_t
    y_t = W_o (g(x_t) * RMSNorm(o_t))

x input, q query, k key, v value, M second moment of a key channel, m its preconditioner, from 1 / squash to
squash; alpha and alpha' decays, beta and beta' writing strengths of a head, A = exp(A_log), b_dt
(dt_bias), their twins, and c learned numbers of a head, S state, o output of a head, y output, g a gate, conv
a causal convolution of a few steps, t time.
"""

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from linrec.nn.decays import softplus, step_bias
from linrec.nn.fast_weights import Strength, UnitFeatures, WriteStrength
from linrec.nn.gates import GateLinear
from linrec.nn.head_sizes import heads_of, most_heads
from linrec.nn.mixer import Mixer, State
from linrec.nn.norms import RMSNorm, gated
from linrec.nn.parameters import mark
from linrec.nn.projections import projected
from linrec.nn.short_convolution import ShortConvolution
from linrec.ops.generalized_delta_rule import generalized_delta_rule
from linrec.ops.scan import scan
from linrec.rules import at_least, positive, require

__all__ = ["PreconditionedDeltaNet"]

Decay = Literal["head", "channel"]

# of the released layers
CHANNELS_PER_HEAD = 128
STEP_SIZES = (0.001, 0.1)
SMALLEST_STEP = 1e-4
EPS = 1e-6


class PreconditionedDeltaNet(Mixer):
    """S_t = (I - beta_t (m_t * k_t) k_t^T) Diag(alpha_t) S_{t-1} + beta_t (m_t * k_t) v_t^T.

    | `decay` | layer | alpha of a | g |
    |---|---|---|---|
    | "head" | preconditioned Gated DeltaNet | head | SiLU(W_g x) |
    | "channel" | preconditioned Kimi Delta Attention | key channel | sigmoid(W_g^2 W_g^1 x) |

    With "channel", W_alpha has low rank too.

    When training starts, as in the released layers, A' and with "head" A are uniform in (0, 16], in [1, 16]
    with "channel"; softplus(b'_dt) and with "head" softplus(b_dt) are log-uniform in (0.001, 0.1), and b_dt
    is 0 with "channel"; c is -0.2. All else is as torch draws it. These numbers have no weight decay.

    Args:
        d_model: width of the sequence.
        n_heads: heads h. None is the largest number that divides `d_qk` and leaves at least 128 channels to
            each head, or 1.
        d_qk: width of q and k over all heads; None is `d_model`.
        d_v: width of v over all heads; None is `d_qk`.
        decay: "head" or "channel".
        qk_eps: added to |SiLU|^2 in the L2 norms; the released layers have 1e-6.
        squash: bound of m, at least 1; above 2, the state may grow.
        rank: width between the two matrices of W_alpha and W_g with "channel"; None is `d_v` / `n_heads`.
        beta: "sigmoid", in (0, 1); "double_sigmoid", in (0, 2); or "one".
        conv_size: taps of a causal convolution of each channel of q, k and v; None disables it.
        conv_bias: whether the convolutions have biases.
        output_gate: whether the normalised o is multiplied by g.
        norm_eps: of the norm. The released layers divide q by sqrt(dk), dk channels of a head of q. The norm
            undoes that but for this number: an eps there is eps dk here.

    Raises:
        ValueError: widths that the heads do not divide, an unknown name of a variant, or a number out of
            range.

    Source:
        flash-linear-attention, `PrecondGatedDeltaNet` and `PrecondKDA`.

    Example:
        >>> mixer = PreconditionedDeltaNet(64, n_heads=4)
        >>> y, (tail, (M, S)) = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, M.shape, S.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 64]), torch.Size([2, 4, 16, 16]))
    """

    recurrence = "generalized_delta_rule"
    of_one_input = "q", "k", "v"

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int | None = None,
        d_qk: int | None = None,
        d_v: int | None = None,
        decay: Decay = "head",
        qk_eps: float = 0.0,
        squash: float = 1.5,
        rank: int | None = None,
        beta: Strength = "sigmoid",
        conv_size: int | None = 4,
        conv_bias: bool = False,
        output_gate: bool = True,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__(d_model)
        at_least(1, n_heads=n_heads, d_qk=d_qk, d_v=d_v, rank=rank, or_none=True)
        positive(norm_eps=norm_eps, cure="The released code has 1e-5.")
        require(squash >= 1, f"`squash` must be at least 1; got {squash}. The released layers have 1.5.")
        d_qk = d_model if d_qk is None else d_qk
        d_v = d_qk if d_v is None else d_v
        self.n_heads = most_heads(d_qk, CHANNELS_PER_HEAD) if n_heads is None else n_heads
        d_value, self.decay, self.squash = heads_of("d_v", d_v, self.n_heads), decay, squash
        rank = d_value if rank is None else rank
        d_key = heads_of("d_qk", d_qk, self.n_heads)
        self.features = UnitFeatures(d_key, feature_map="identity", eps=qk_eps, strength=beta)

        self.q = nn.Linear(d_model, d_qk, bias=False)
        self.k = nn.Linear(d_model, d_qk, bias=False)
        self.v = nn.Linear(d_model, d_v, bias=False)
        self.conv = ShortConvolution(2 * d_qk + d_v, conv_size, bias=conv_bias, silu=True)
        by_channel, least = decay == "channel", 1.0 if decay == "channel" else 0.0

        def sizes() -> nn.Parameter:
            # the largest less a number in [0, 1): zero has no logarithm
            return nn.Parameter(torch.log(16 - (16 - least) * torch.rand(self.n_heads)))

        def steps() -> nn.Parameter:
            return nn.Parameter(step_bias(self.n_heads, STEP_SIZES, floor=SMALLEST_STEP))

        self.alpha: nn.Module = GateLinear(d_model, self.n_heads, bias=False)
        self.moment_alpha = GateLinear(d_model, self.n_heads, bias=False)
        if by_channel:
            low, high = nn.Linear(d_model, rank, bias=False), GateLinear(rank, d_qk, bias=False)
            self.alpha = nn.Sequential(low, high)
        self.A_log, self.moment_A_log = sizes(), sizes()
        self.dt_bias = nn.Parameter(torch.zeros(d_qk)) if by_channel else steps()
        self.moment_dt_bias = steps()
        self.c = nn.Parameter(torch.full((self.n_heads,), -0.2))
        names = "A_log", "moment_A_log", "dt_bias", "moment_dt_bias", "c"
        mark(self, *names, group="default", weight_decay=False, float32=True)
        self.beta = WriteStrength(d_model, self.n_heads, strength=beta)
        self.moment_beta = GateLinear(d_model, self.n_heads, bias=False)
        self.norm = RMSNorm(d_value, eps=norm_eps)
        self.gate: nn.Module | None = None
        if output_gate:
            whole = nn.Linear(d_model, d_v, bias=False)
            parts = nn.Linear(d_model, rank, bias=False), nn.Linear(rank, d_v)
            self.gate = nn.Sequential(*parts) if by_channel else whole
        self.out = nn.Linear(d_v, d_model, bias=False)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return y, and M (b, h dk) with S (b, h, dk, dv); with a convolution, its tail and both."""
        tail, both = self.conv.split(state)
        M, S = (None, None) if both is None else both
        (q, k, v), tail = self.conv.side_by_side(projected(x, self.q, self.k, self.v), tail, reset=reset)
        q, k, v = (part.unflatten(-1, (self.n_heads, -1)) for part in (q, k, v))
        q, k = self.features(q), self.features(k)
        dt = softplus(self.alpha(x) + self.dt_bias).unflatten(-1, (self.n_heads, -1))
        log_alpha = -torch.exp(self.A_log.to(dt.dtype))[:, None] * dt
        dt = softplus(self.moment_alpha(x) + self.moment_dt_bias)
        moment_alpha = torch.exp(-torch.exp(self.moment_A_log.to(dt.dtype)) * dt)[..., None]
        squares = torch.sigmoid(self.moment_beta(x))[..., None] * k.to(dt.dtype).square()
        a = moment_alpha.expand_as(squares).flatten(-2)
        moments, M = scan(a, squares.flatten(-2), state=M, reset=reset)
        r = torch.log(moments.unflatten(-1, (self.n_heads, -1)) + EPS) - self.c.to(dt.dtype)[:, None]
        m = torch.exp(-math.log(self.squash) * r / (1 + r.abs()))
        # the decayed state is read
        read, write = log_alpha.exp() * k, self.beta(x)[..., None] * m * k
        v, read, write = (part.to(q.dtype) for part in (v, read, write))
        o, S = generalized_delta_rule(q, write, v, read, write, log_alpha, state=S, reset=reset)
        g = None if self.gate is None else self.gate(x)
        f = torch.sigmoid if self.decay == "channel" else functional.silu
        o = gated(self.norm(o).flatten(-2).to(x.dtype), g, f)
        return self.out(o), self.conv.joined(tail, (M, S))
