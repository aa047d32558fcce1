"""Comba: Improving Bilinear RNNs with Closed-loop Control (Hu and others, 2025).

    q_t = L2Norm(SiLU(conv(W_q x)_t))    k_t = L2Norm(SiLU(conv(W_k x)_t))    v_t = SiLU(conv(W_v x)_t)
    alpha_t = exp(-A softplus(W_alpha x_t + b_dt))
    beta_t = sigmoid(W_beta x_t)
    p_t = sigmoid(d) k_t
    S_t = (I - beta_t k_t p_t^T) alpha_t S_{t-1} + beta_t k_t v_t^T
    o_t = S_t^T (q_t - D p_t)
    y_t = W_o (sigmoid(W_g x_t) * RMSNorm(o_t))

x input, q query, k key, v value, p feedback key, alpha decay and beta writing strength of a head, A =
exp(A_log), b_dt (dt_bias), d and D one learned number per head each, S state, o output of a head, y output,
conv a causal convolution of a few steps, t time.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from linrec.nn.decays import softplus, step_bias
from linrec.nn.fast_weights import UnitFeatures
from linrec.nn.gates import GateLinear
from linrec.nn.head_sizes import heads_of, most_heads
from linrec.nn.mixer import Mixer, State
from linrec.nn.norms import RMSNorm, gated
from linrec.nn.parameters import mark
from linrec.nn.projections import projected
from linrec.nn.short_convolution import ShortConvolution
from linrec.ops.generalized_delta_rule import generalized_delta_rule
from linrec.rules import at_least, positive

__all__ = ["Comba"]

Variant = Literal["paper", "released"]

# of the released layer
CHANNELS_PER_HEAD = 256
LARGEST_A = 16.0
STEP_SIZES = (0.001, 0.1)
SMALLEST_STEP = 1e-4


class Comba(Mixer):
    """S_t = (I - beta_t k_t p_t^T) alpha_t S_{t-1} + beta_t k_t v_t^T: a feedback key p reads for erasing.

    The defaults are the widths of the released layer. With `variant="released"`, the L2 norms come after p
    and after the correction of q, as in flash-linear-attention: q_t = L2Norm(q'_t - D p_t), and p_t has norm
    1 too, so that d has an effect on q alone.

    | variant | arguments |
    |---|---|
    | without short convolutions | `conv_size=None` |
    | without output gate | `output_gate=False` |
    | without correction of the output | `correction=None`: D = 0 |
    | without decay of the feedback | `inner_decay=False`: p = k |

    When training starts, A is uniform in (0, 16], softplus(b_dt) is log-uniform in (0.001, 0.1), and d = 1,
    as in the released layer. All else is as torch draws it. A_log, b_dt and D have no weight decay.

    Args:
        d_model: width of the sequence.
        n_heads: heads h. None is the largest number that divides `d_qk` and leaves at least 256 channels to
            each head, or 1.
        d_qk: width of q and k over all heads. None is 3/4 `d_model`, or the next smaller multiple of
            `n_heads`.
        d_v: width of v over all heads; None is twice `d_qk`.
        qk_eps: added to the squares in the L2 norms; the released layer has 1e-6.
        variant: "paper" or "released".
        inner_decay: whether p is sigmoid(d) k.
        correction: D when training starts. The released layer has 1, and recommends 0.02 for small models.
        conv_size: taps of a causal convolution of each channel of q, k and v; None disables it.
        conv_bias: whether the convolutions have biases.
        output_gate: whether the normalised o is multiplied by sigmoid(W_g x).
        norm_eps: of the norm. The released layer divides q by sqrt(dk), dk channels of a head of q. The norm
            undoes that but for this number: an eps there is eps dk here.

    Raises:
        ValueError: widths that the heads do not divide, an unknown `variant`, or a number out of range.

    Source:
        Hu and others (2025), and flash-linear-attention, `Comba`.

    Example:
        >>> mixer = Comba(64, n_heads=4)
        >>> y, (tail, S) = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, S.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 4, 12, 24]))
    """

    recurrence = "generalized_delta_rule"
    of_one_input = "q", "k", "v", "gate"

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int | None = None,
        d_qk: int | None = None,
        d_v: int | None = None,
        qk_eps: float = 0.0,
        variant: Variant = "paper",
        inner_decay: bool = True,
        correction: float | None = 1.0,
        conv_size: int | None = 4,
        conv_bias: bool = False,
        output_gate: bool = True,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__(d_model)
        at_least(1, n_heads=n_heads, d_qk=d_qk, d_v=d_v, or_none=True)
        positive(norm_eps=norm_eps, cure="The released code has 1e-5.")
        if d_qk is None:
            multiple = 1 if n_heads is None else n_heads
            d_qk = max(3 * d_model // 4 // multiple, 1) * multiple
        d_v = 2 * d_qk if d_v is None else d_v
        self.n_heads = most_heads(d_qk, CHANNELS_PER_HEAD) if n_heads is None else n_heads
        self.d_value, self.variant = heads_of("d_v", d_v, self.n_heads), variant
        d_key = heads_of("d_qk", d_qk, self.n_heads)
        self.features = UnitFeatures(d_key, feature_map="identity", eps=qk_eps)

        self.q = nn.Linear(d_model, d_qk, bias=False)
        self.k = nn.Linear(d_model, d_qk, bias=False)
        self.v = nn.Linear(d_model, d_v, bias=False)
        self.conv = ShortConvolution(2 * d_qk + d_v, conv_size, bias=conv_bias, silu=True)
        self.alpha = GateLinear(d_model, self.n_heads, bias=False)
        # 1 less a number in [0, 1): zero has no logarithm
        self.A_log = nn.Parameter(torch.log(LARGEST_A * (1 - torch.rand(self.n_heads))))
        self.dt_bias = nn.Parameter(step_bias(self.n_heads, STEP_SIZES, floor=SMALLEST_STEP))
        mark(self, "A_log", "dt_bias", group="default", weight_decay=False, float32=True)
        self.beta = GateLinear(d_model, self.n_heads, bias=False)
        self.d = nn.Parameter(torch.ones(self.n_heads)) if inner_decay else None
        self.D: nn.Parameter | None = None
        if correction is not None:
            self.D = nn.Parameter(torch.full((self.n_heads,), float(correction)))
            mark(self, "D", group="default", weight_decay=False)
        self.norm = RMSNorm(self.d_value, eps=norm_eps)
        self.gate = nn.Linear(d_model, d_v, bias=False) if output_gate else None
        self.out = nn.Linear(d_v, d_model, bias=False)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return y, and S (b, h, dk, dv); with a convolution, its tail and S."""
        tail, S = self.conv.split(state)
        *qkv, g = projected(x, self.q, self.k, self.v, self.gate)
        (q, k, v), tail = self.conv.side_by_side(qkv, tail, reset=reset)
        q, k, v = (part.unflatten(-1, (self.n_heads, -1)) for part in (q, k, v))
        if self.variant == "paper":
            q, k = self.features(q), self.features(k)
        p = k if self.d is None else torch.sigmoid(self.d)[:, None] * k
        q = q if self.D is None else q - self.D[:, None] * p
        if self.variant == "released":
            q, k, p = (self.features(part) for part in (q, k, p))
        dt = softplus(self.alpha(x) + self.dt_bias)
        log_alpha = -torch.exp(self.A_log.to(dt.dtype)) * dt
        beta = torch.sigmoid(self.beta(x))[..., None]
        # the decayed state is read
        r = beta * log_alpha.exp()[..., None] * p
        q, k, v, r = (part.to(x.dtype) for part in (q, k, beta * v, r))
        o, S = generalized_delta_rule(q, k, v, r, k, log_alpha, state=S, reset=reset)
        o = gated(self.norm(o).flatten(-2).to(x.dtype), g, torch.sigmoid)
        return self.out(o), self.conv.joined(tail, S)
