"""Kimi Delta Attention: Kimi Linear, An Expressive, Efficient Attention Architecture (Kimi Team, 2025).

    q_t = L2Norm(SiLU(conv(W_q x)_t))
    k_t = L2Norm(SiLU(conv(W_k x)_t))
    v_t = SiLU(conv(W_v x)_t)
    alpha_t = exp(-A softplus(W_alpha^2 W_alpha^1 x_t + b_dt))
    beta_t = sigmoid(W_beta x_t)
    S_t = (I - beta_t k_t k_t^T) Diag(alpha_t) S_{t-1} + beta_t k_t v_t^T                                (1)
    o_t = S_t^T q_t
    y_t = W_o (sigmoid(W_g^2 W_g^1 x_t) * RMSNorm(o_t))                                                 (10)

x input, q query, k key, v value, alpha decay of a key channel and beta writing strength of a head, A =
exp(A_log) one learned number per head and b_dt (dt_bias) per key channel, S state, o output of a head, y
output, conv a causal convolution of a few steps, t time. W_alpha and W_g have low rank.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from linrec.nn.decays import softplus, step_bias
from linrec.nn.fast_weights import Strength, UnitFeatures, WriteStrength
from linrec.nn.gates import GateLinear
from linrec.nn.head_sizes import heads_of, most_heads, repeat_heads
from linrec.nn.mixer import Mixer, State
from linrec.nn.norms import RMSNorm, gated
from linrec.nn.parameters import mark
from linrec.nn.projections import projected
from linrec.nn.short_convolution import ShortConvolution
from linrec.ops.delta_rule import delta_rule
from linrec.rules import at_least, divisor, positive, require

__all__ = ["KimiDeltaAttention"]

Decay = Literal["softplus", "bounded"]

# of the paper's models
CHANNELS_PER_HEAD = 128
# ranges of A and of softplus(b_dt) when training starts, in the released code
A_INIT = (1.0, 16.0)
STEP_SIZES = (0.001, 0.1)
SMALLEST_STEP = 1e-4


class KimiDeltaAttention(Mixer):
    """S_t = (I - beta_t k_t k_t^T) Diag(alpha_t) S_{t-1} + beta_t k_t v_t^T (eq. 1): a decay per key channel.

    The defaults are the paper's layer. The paper's models have three of these layers for each layer of full
    attention without positions.

    | variant | arguments |
    |---|---|
    | without short convolutions | `conv_size=None` |
    | without output gate | `output_gate=False` |
    | negative eigenvalues (Grazzi and others) | `beta="double_sigmoid"` |
    | "safe gate" of GLM-5.3-Flash and Ling-3.0-Flash | `decay="bounded"` |

    The bounded decay is alpha_t = exp(`lower_bound` sigmoid(A (W_alpha^2 W_alpha^1 x_t + b_dt))). Ling has a
    single matrix in place of W_alpha^2 W_alpha^1; `rank=d_model` includes it.

    When training starts, A is uniform in [1, 16], or 1 with `decay="bounded"`; softplus(b_dt) is log-uniform
    in (0.001, 0.1), as in flash-linear-attention. All else is as torch draws it. A_log and b_dt have no
    weight decay. transformers' layer has no bias in W_g^2, `gate_bias=False`.

    Args:
        d_model: width of the sequence.
        n_heads: heads h. None is the largest number that divides `d_v` and leaves at least 128 channels to
            each head, or 1.
        qk_heads: heads of q and k, each shared by `n_heads` / `qk_heads` neighbouring heads of v. None is
            `n_heads`.
        d_qk: width of q and k over their heads. None gives a head of q and k as many channels as a head of v.
        d_v: width of v over all heads; None is `d_model`.
        qk_eps: added to |SiLU|^2 in the L2 norms; released code has 1e-6.
        decay: "softplus", or "bounded" in [`lower_bound`, 0).
        lower_bound: the smallest log alpha with `decay="bounded"`, below 0.
        rank: width between the two matrices of W_alpha, and of W_g; None is `d_v` / `n_heads`.
        beta: "sigmoid", in (0, 1); "double_sigmoid", in (0, 2); or "one".
        conv_size: taps of a causal convolution of each channel of q, k and v; None disables it.
        conv_bias: whether the convolutions have biases.
        output_gate: whether the normalised o is multiplied by sigmoid(W_g^2 W_g^1 x).
        gate_bias: whether W_g^2 has a bias.
        norm_eps: of the norm. The released code divides q by sqrt(dk), dk channels of a head of q. The norm
            undoes that but for this number: an eps there is eps dk here.

    Raises:
        ValueError: widths that the heads do not divide, `qk_heads` that do not divide `n_heads`, an unknown
            name of a variant, or a number out of range.

    Source:
        Kimi Team (2025), sections 3 and 4. Constants missing in the paper come from the released code.

    Example:
        >>> mixer = KimiDeltaAttention(64, n_heads=4)
        >>> y, (tail, S) = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, S.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 4, 16, 16]))
    """

    recurrence = "delta_rule"
    of_one_input = "q", "k", "v"

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int | None = None,
        qk_heads: int | None = None,
        d_qk: int | None = None,
        d_v: int | None = None,
        qk_eps: float = 0.0,
        decay: Decay = "softplus",
        lower_bound: float = -5.0,
        rank: int | None = None,
        beta: Strength = "sigmoid",
        conv_size: int | None = 4,
        conv_bias: bool = False,
        output_gate: bool = True,
        gate_bias: bool = True,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__(d_model)
        at_least(1, n_heads=n_heads, qk_heads=qk_heads, d_v=d_v, rank=rank, or_none=True)
        positive(norm_eps=norm_eps, cure="The released code has 1e-5.")
        require(lower_bound < 0, f"`lower_bound` must be below 0, the least log alpha; got {lower_bound}.")
        d_v = d_model if d_v is None else d_v
        self.n_heads = most_heads(d_v, CHANNELS_PER_HEAD) if n_heads is None else n_heads
        self.qk_heads = self.n_heads if qk_heads is None else qk_heads
        divisor("n_heads", self.n_heads, qk_heads=self.qk_heads, cure="Each serves as many heads of v.")
        self.d_value = heads_of("d_v", d_v, self.n_heads)
        d_qk = self.qk_heads * self.d_value if d_qk is None else d_qk
        d_key = heads_of("d_qk", d_qk, self.qk_heads)
        rank = self.d_value if rank is None else rank
        self.features = UnitFeatures(d_key, feature_map="identity", eps=qk_eps, strength=beta)
        self.lower_bound = lower_bound if decay == "bounded" else None

        self.q = nn.Linear(d_model, d_qk, bias=False)
        self.k = nn.Linear(d_model, d_qk, bias=False)
        self.v = nn.Linear(d_model, d_v, bias=False)
        self.conv = ShortConvolution(2 * d_qk + d_v, conv_size, bias=conv_bias, silu=True)
        decays = self.n_heads * d_key
        self.alpha = nn.Sequential(nn.Linear(d_model, rank, bias=False), GateLinear(rank, decays, bias=False))
        A = torch.ones(self.n_heads) if decay == "bounded" else torch.empty(self.n_heads).uniform_(*A_INIT)
        self.A_log = nn.Parameter(A.log())
        self.dt_bias = nn.Parameter(step_bias(decays, STEP_SIZES, floor=SMALLEST_STEP))
        mark(self, "A_log", "dt_bias", group="default", weight_decay=False, float32=True)
        self.beta = WriteStrength(d_model, self.n_heads, strength=beta)
        self.gate: nn.Sequential | None = None
        if output_gate:
            self.gate = nn.Sequential(
                nn.Linear(d_model, rank, bias=False), nn.Linear(rank, d_v, bias=gate_bias)
            )
        self.norm = RMSNorm(self.d_value, eps=norm_eps)
        self.out = nn.Linear(d_v, d_model, bias=False)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return y, and S (b, h, dk, dv); with a convolution, its tail and S."""
        tail, S = self.conv.split(state)
        (q, k, v), tail = self.conv.side_by_side(projected(x, self.q, self.k, self.v), tail, reset=reset)
        q, k = (self.features(part.unflatten(-1, (self.qk_heads, -1))) for part in (q, k))
        q, k = repeat_heads(q, self.n_heads), repeat_heads(k, self.n_heads)
        v = v.unflatten(-1, (self.n_heads, -1))
        dt = (self.alpha(x) + self.dt_bias).unflatten(-1, (self.n_heads, -1))
        A = torch.exp(self.A_log.to(dt.dtype))[:, None]
        if self.lower_bound is None:
            log_alpha = -A * softplus(dt)
        else:
            log_alpha = self.lower_bound * torch.sigmoid(A * dt)
        o, S = delta_rule(q, k, v.to(q), self.beta(x), log_alpha, state=S, reset=reset)
        g = None if self.gate is None else self.gate(x)
        o = gated(self.norm(o).flatten(-2).to(x.dtype), g, torch.sigmoid)
        return self.out(o), self.conv.joined(tail, S)
