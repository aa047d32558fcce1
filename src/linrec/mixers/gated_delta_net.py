"""Gated DeltaNet: Gated Delta Networks, Improving Mamba2 with Delta Rule (Yang, Kautz and Hatamizadeh, 2025).

    q_t = phi(W_q x_t) / |phi(W_q x_t)|    k_t = phi(W_k x_t) / |phi(W_k x_t)|    v_t = SiLU(W_v x_t)
    alpha_t = exp(-A softplus(W_alpha x_t + b_dt))
    beta_t = sigmoid(W_beta x_t)
    S_t = S_{t-1} (alpha_t (I - beta_t k_t k_t^T)) + beta_t v_t k_t^T                                   (10)
    o_t = S_t q_t
    y_t = W_o (RMSNorm(o_t) * SiLU(W_g x_t))

x input, q query, k key, v value, alpha decay and beta writing strength of a head, A = exp(A_log) and b_dt
(dt_bias) one learned number per head each, S state, o output of a head, y output, phi SiLU, t time. A
convolution of a few steps follows each of W_q x, W_k x and W_v x. alpha is made as Mamba-2 makes it. The
operator's state is the transpose of S.
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from linrec.nn.decays import softplus, step_bias
from linrec.nn.fast_weights import Strength, UnitFeatures, WriteStrength
from linrec.nn.gates import GateLinear
from linrec.nn.head_sizes import heads_of, most_heads, repeat_heads
from linrec.nn.mixer import Mixer, State
from linrec.nn.norms import Norm, gated, make_norm
from linrec.nn.parameters import mark
from linrec.nn.projections import draw, projected
from linrec.nn.short_convolution import ShortConvolution
from linrec.ops.delta_rule import delta_rule
from linrec.rules import at_least, divisor, positive

__all__ = ["GatedDeltaNet"]

Decay = Literal["data", "none"]
KeyNorm = Literal["l2", "l1", "longhorn", "none"]

# of the released code, whose d_qk is three quarters of d_model, and d_v twice d_qk
CHANNELS_PER_HEAD = 256
# of flash-linear-attention until March 2025, for all matrices
GAIN = 2**-2.5
# ranges of A and of softplus(b_dt) when training starts, in the released code
LARGEST_A = 16.0
STEP_SIZES = (0.001, 0.1)


class GatedDeltaNet(Mixer):
    """S_t = S_{t-1} (alpha_t (I - beta_t k_t k_t^T)) + beta_t v_t k_t^T (eq. 10): one decay for a whole head.

    The defaults are the paper's layer in the released code's widths: with d_qk = 3/4 d_model and d_v = 2 d_qk
    its matrices have 6 d_model^2 parameters.

    | the paper's ablation (table S.1) | arguments |
    |---|---|
    | without decay: DeltaNet | `decay="none"` |
    | without short convolutions | `conv_size=None` |
    | without output gate | `output_gate=False` |
    | without output norm | `output_norm="none"` |
    | L1 norm; other features | `qk_norm="l1"`; `feature_map="relu"`, `"elu"` |
    | heads of 64; of 128, the paper's trade-off | `n_heads` = `d_qk` / 64; `d_qk` / 128 |
    | negative eigenvalues (Grazzi and others) | `beta="double_sigmoid"` |

    NVlabs' released code has a bias of beta, `beta_bias=True`, and two further norms: softmax, which is
    `feature_map="softmax", qk_norm="none"`, and Longhorn's, `qk_norm="longhorn"`, which leaves k as it is and
    has beta_t / (1 + beta_t |k_t|^2) in place of beta_t. flash-linear-attention and Qwen3-Next have fewer
    heads of q and k than of v, `qk_heads`.

    When training starts, A is uniform in (0, 16] and softplus(b_dt) is log-uniform in (0.001, 0.1), as in the
    released code. All matrices are Xavier uniform with gain 2^-2.5, as in flash-linear-attention until March
    2025. Since then, it draws them with a standard deviation of 0.02; in NVlabs' code, they are torch's own.
    A_log and b_dt have no weight decay.

    Args:
        d_model: width of the sequence.
        n_heads: heads h. None is the largest number that divides `d_qk` and leaves at least 256 channels to
            each head, or 1.
        qk_heads: heads of q and k, each shared by `n_heads` / `qk_heads` neighbouring heads of v. None is
            `n_heads`.
        d_qk: width of q and k over all their heads. None is 3/4 `d_model`, or the next smaller multiple of
            `n_heads`, divided by `n_heads` / `qk_heads`.
        d_v: width of v over all heads. None is twice the width of q and k over `n_heads` heads.
        feature_map: phi, a name of `linrec.nn.feature_maps`.
        qk_norm: "l2"; "l1" for features >= 0; "longhorn"; or "none" for features of "softmax".
        qk_eps: with "l2", added to |phi|^2; released code has 1e-6.
        decay: "data", or "none" for alpha = 1.
        beta: "sigmoid", in (0, 1); "double_sigmoid", in (0, 2); or "one".
        beta_bias: whether the sigmoid's argument has a bias.
        conv_size: taps of a causal convolution of each channel of q, k and v, before phi and SiLU; None
            disables it.
        conv_bias: whether the convolutions have biases.
        output_norm: of each head, "rms", "layer" or "none".
        norm_eps: of that norm. The released code divides q by sqrt(d_qk / n_heads), which the norm undoes but
            for this number: an eps there is eps d_qk / n_heads here.
        output_gate: whether the normalised o is multiplied by SiLU(W_g x).

    Raises:
        ValueError: widths that the heads do not divide, `qk_heads` that do not divide `n_heads`, an unknown
            name of a variant, or a `norm_eps` that is not positive.

    Source:
        Yang, Kautz and Hatamizadeh (2025), sections 3.1 and 3.4. Constants missing in the paper come from the
        released code.

    Example:
        >>> mixer = GatedDeltaNet(64, n_heads=4)
        >>> y, (tail, S) = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, S.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 4, 12, 24]))
    """

    recurrence = "delta_rule"
    of_one_input = "q", "k", "v", "gate"

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int | None = None,
        qk_heads: int | None = None,
        d_qk: int | None = None,
        d_v: int | None = None,
        feature_map: str = "silu",
        qk_norm: KeyNorm = "l2",
        qk_eps: float = 0.0,
        decay: Decay = "data",
        beta: Strength = "sigmoid",
        beta_bias: bool = False,
        conv_size: int | None = 4,
        conv_bias: bool = False,
        output_norm: Norm = "rms",
        norm_eps: float = 1e-5,
        output_gate: bool = True,
    ) -> None:
        super().__init__(d_model)
        at_least(1, n_heads=n_heads, qk_heads=qk_heads, or_none=True)
        positive(norm_eps=norm_eps, cure="torch's is 1e-5.")
        if d_qk is None:
            multiple = 1 if n_heads is None else max(n_heads, 1)
            d_qk = max(3 * d_model // 4 // multiple, 1) * multiple
            if qk_heads is not None:
                d_qk = d_qk // multiple * qk_heads
        self.n_heads = most_heads(d_qk, CHANNELS_PER_HEAD) if n_heads is None else n_heads
        self.qk_heads = self.n_heads if qk_heads is None else qk_heads
        divisor("n_heads", self.n_heads, qk_heads=self.qk_heads, cure="Each serves as many heads of v.")
        self.qk_norm, d_key = qk_norm, heads_of("d_qk", d_qk, self.qk_heads)
        d_v = 2 * self.n_heads * d_key if d_v is None else d_v
        self.d_value = heads_of("d_v", d_v, self.n_heads)
        norm = "none" if qk_norm == "longhorn" else qk_norm
        # one SiLU of q, k and v follows their convolution
        silu = feature_map == "silu"
        phi = "identity" if silu else feature_map
        self.features = UnitFeatures(d_key, feature_map=phi, norm=norm, eps=qk_eps, strength=beta)

        self.q = nn.Linear(d_model, d_qk, bias=False)
        self.k = nn.Linear(d_model, d_qk, bias=False)
        self.v = nn.Linear(d_model, d_v, bias=False)
        self.conv = ShortConvolution(2 * d_qk + d_v, conv_size, bias=conv_bias, silu=silu)
        self.alpha: GateLinear | None = None
        if decay == "data":
            self.alpha = GateLinear(d_model, self.n_heads, bias=False)
            # 1 less a number in [0, 1): zero has no logarithm
            self.A_log = nn.Parameter(torch.log(LARGEST_A * (1 - torch.rand(self.n_heads))))
            self.dt_bias = nn.Parameter(step_bias(self.n_heads, STEP_SIZES))
            mark(self, "A_log", "dt_bias", group="default", weight_decay=False, float32=True)
        self.beta = WriteStrength(d_model, self.n_heads, strength=beta, bias=beta_bias)
        self.norm = make_norm(output_norm, self.d_value, eps=norm_eps)
        self.gate = nn.Linear(d_model, d_v, bias=False) if output_gate else None
        self.out = nn.Linear(d_v, d_model, bias=False)
        draw(self, nn.init.xavier_uniform_, gain=GAIN)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return y, and S^T (b, h, dk, dv); with a convolution, its tail and S^T."""
        tail, S = self.conv.split(state)
        *qkv, g = projected(x, self.q, self.k, self.v, self.gate)
        (q, k, v), tail = self.conv.side_by_side(qkv, tail, reset=reset)
        q, k = (self.features(part.unflatten(-1, (self.qk_heads, -1))) for part in (q, k))
        q, k = repeat_heads(q, self.n_heads), repeat_heads(k, self.n_heads)
        v = (v if self.conv.silu else functional.silu(v)).unflatten(-1, (self.n_heads, -1))
        beta = self.beta(x)
        if self.qk_norm == "longhorn":
            beta = beta / (1 + beta * k.to(beta.dtype).square().sum(-1))
        log_alpha = None
        if self.alpha is not None:
            dt = softplus(self.alpha(x) + self.dt_bias)
            log_alpha = -torch.exp(self.A_log.to(dt.dtype)) * dt
        o, S = delta_rule(q, k, v.to(q), beta, log_alpha, state=S, reset=reset)
        o = gated(self.norm(o).flatten(-2).to(x.dtype), g)
        return self.out(o), self.conv.joined(tail, S)
