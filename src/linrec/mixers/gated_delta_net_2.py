"""Gated DeltaNet-2: Decoupling Erase and Write in Linear Attention (2026), as flash-linear-attention has it.

    q_t = L2Norm(SiLU(conv(W_q x)_t))
    k_t = L2Norm(SiLU(conv(W_k x)_t))
    v_t = SiLU(conv(W_v x)_t)
    alpha_t = exp(-A softplus(W_alpha^2 W_alpha^1 x_t + b_dt))
    b_t = sigmoid(W_b x_t)
    w_t = sigmoid(W_w x_t)
    S_t = (I - k_t (b_t * k_t)^T) Diag(alpha_t) S_{t-1} + k_t (w_t * v_t)^T
    o_t = S_t^T q_t
    y_t = W_o (sigmoid(W_g^2 W_g^1 x_t) * RMSNorm(o_t))

x input, q query, k key, v value, alpha decay and b erase gate of a key channel, w write gate of a value
channel, A = exp(A_log) one learned number per head and b_dt (dt_bias) per key channel, S state, o output of a
head, y output, conv a causal convolution of a few steps, t time. W_alpha and W_g have low rank. With b = w,
one number per head, it is Kimi Delta Attention.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from linrec.nn.decays import softplus, step_bias
from linrec.nn.fast_weights import UnitFeatures
from linrec.nn.gates import GateLinear
from linrec.nn.head_sizes import heads_of, most_heads, repeat_heads
from linrec.nn.mixer import Mixer, State
from linrec.nn.norms import RMSNorm, gated
from linrec.nn.parameters import mark
from linrec.nn.projections import projected
from linrec.nn.short_convolution import ShortConvolution
from linrec.ops.generalized_delta_rule import generalized_delta_rule
from linrec.rules import at_least, divisor, positive

__all__ = ["GatedDeltaNet2"]

Erase = Literal["sigmoid", "double_sigmoid"]

# of the released layer
CHANNELS_PER_HEAD = 128
A_INIT = (1.0, 16.0)
STEP_SIZES = (0.001, 0.1)
SMALLEST_STEP = 1e-4


class GatedDeltaNet2(Mixer):
    """S_t = (I - k_t (b_t * k_t)^T) Diag(alpha_t) S_{t-1} + k_t (w_t * v_t)^T: gates of erasing and writing.

    | variant | arguments |
    |---|---|
    | without short convolutions | `conv_size=None` |
    | without output gate | `output_gate=False` |
    | negative eigenvalues (Grazzi and others) | `erase="double_sigmoid"`: b in (0, 2) |

    When training starts, A is uniform in [1, 16], and softplus(b_dt) is log-uniform in (0.001, 0.1), as in
    the released layer. All else is as torch draws it. A_log and b_dt have no weight decay.

    Args:
        d_model: width of the sequence.
        n_heads: heads h. None is the largest number that divides `d_v` and leaves at least 128 channels to
            each head, or 1.
        qk_heads: heads of q, k, alpha and b, each shared by `n_heads` / `qk_heads` neighbouring heads of v.
            None is `n_heads`.
        d_qk: width of q and k over their heads. None gives a head of q and k as many channels as a head of v.
        d_v: width of v over all heads; None is `d_model`.
        qk_eps: added to |SiLU|^2 in the L2 norms; the released layer has 1e-6.
        erase: "sigmoid" or "double_sigmoid".
        rank: width between the two matrices of W_alpha, and of W_g; None is `d_v` / `n_heads`.
        conv_size: taps of a causal convolution of each channel of q, k and v; None disables it.
        conv_bias: whether the convolutions have biases.
        output_gate: whether the normalised o is multiplied by sigmoid(W_g^2 W_g^1 x).
        norm_eps: of the norm. The released layer divides q by sqrt(dk), dk channels of a head of q. The norm
            undoes that but for this number: an eps there is eps dk here.

    Raises:
        ValueError: widths that the heads do not divide, `qk_heads` that do not divide `n_heads`, an unknown
            name of a variant, or a number out of range.

    Source:
        flash-linear-attention, `GatedDeltaNet2`.

    Example:
        >>> mixer = GatedDeltaNet2(64, n_heads=4)
        >>> y, (tail, S) = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, S.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 4, 16, 16]))
    """

    recurrence = "generalized_delta_rule"
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
        erase: Erase = "sigmoid",
        rank: int | None = None,
        conv_size: int | None = 4,
        conv_bias: bool = False,
        output_gate: bool = True,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__(d_model)
        at_least(1, n_heads=n_heads, qk_heads=qk_heads, d_v=d_v, rank=rank, or_none=True)
        positive(norm_eps=norm_eps, cure="The released code has 1e-5.")
        d_v = d_model if d_v is None else d_v
        self.n_heads = most_heads(d_v, CHANNELS_PER_HEAD) if n_heads is None else n_heads
        self.qk_heads = self.n_heads if qk_heads is None else qk_heads
        divisor("n_heads", self.n_heads, qk_heads=self.qk_heads, cure="Each serves as many heads of v.")
        self.d_value = heads_of("d_v", d_v, self.n_heads)
        d_qk = self.qk_heads * self.d_value if d_qk is None else d_qk
        rank = self.d_value if rank is None else rank
        self.erase = erase
        self.features = UnitFeatures(
            heads_of("d_qk", d_qk, self.qk_heads), feature_map="identity", eps=qk_eps, strength=erase
        )

        self.q = nn.Linear(d_model, d_qk, bias=False)
        self.k = nn.Linear(d_model, d_qk, bias=False)
        self.v = nn.Linear(d_model, d_v, bias=False)
        self.conv = ShortConvolution(2 * d_qk + d_v, conv_size, bias=conv_bias, silu=True)
        self.alpha = nn.Sequential(nn.Linear(d_model, rank, bias=False), GateLinear(rank, d_qk, bias=False))
        self.A_log = nn.Parameter(torch.empty(self.qk_heads).uniform_(*A_INIT).log())
        self.dt_bias = nn.Parameter(step_bias(d_qk, STEP_SIZES, floor=SMALLEST_STEP))
        mark(self, "A_log", "dt_bias", group="default", weight_decay=False, float32=True)
        self.b = GateLinear(d_model, d_qk, bias=False)
        self.w = nn.Linear(d_model, d_v, bias=False)
        self.gate: nn.Sequential | None = None
        if output_gate:
            self.gate = nn.Sequential(nn.Linear(d_model, rank, bias=False), nn.Linear(rank, d_v))
        self.norm = RMSNorm(self.d_value, eps=norm_eps)
        self.out = nn.Linear(d_v, d_model, bias=False)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return y, and S (b, h, dk, dv); with a convolution, its tail and S."""
        tail, S = self.conv.split(state)
        (q, k, v), tail = self.conv.side_by_side(projected(x, self.q, self.k, self.v), tail, reset=reset)
        q, k = (self.features(part.unflatten(-1, (self.qk_heads, -1))) for part in (q, k))
        dt = softplus(self.alpha(x) + self.dt_bias).unflatten(-1, (self.qk_heads, -1))
        log_alpha = -torch.exp(self.A_log.to(dt.dtype))[:, None] * dt
        b = torch.sigmoid(self.b(x)).unflatten(-1, (self.qk_heads, -1))
        b = 2 * b if self.erase == "double_sigmoid" else b
        # the decayed state is read
        r = (log_alpha.exp() * b * k).to(q)
        q, k, r, log_alpha = (repeat_heads(part, self.n_heads) for part in (q, k, r, log_alpha))
        v = (torch.sigmoid(self.w(x)) * v).to(q).unflatten(-1, (self.n_heads, -1))
        o, S = generalized_delta_rule(q, k, v, r, k, log_alpha, state=S, reset=reset)
        g = None if self.gate is None else self.gate(x)
        o = gated(self.norm(o).flatten(-2).to(x.dtype), g, torch.sigmoid)
        return self.out(o), self.conv.joined(tail, S)
