"""DeltaNet: Parallelizing Linear Transformers with the Delta Rule (Yang, Wang, Zhang, Shen and Kim, 2024).

    q_t = phi(W_Q x_t) / |phi(W_Q x_t)|    k_t = phi(W_K x_t) / |phi(W_K x_t)|    v_t = SiLU(W_V x_t)
    beta_t = sigmoid(W_beta x_t)
    S_t = S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T
    o_t = S_t q_t
    y_t = W_O RMSNorm(o_t)

x input, q query, k key, v value, beta writing strength of a head, S state, o output of a head, y output, phi
SiLU, t time. A convolution of a few steps follows each of W_Q x, W_K x and W_V x. The rule comes from Schlag,
Irie and Schmidhuber (2021), whose layer has other features, no convolution and no norm of o. The operator's
state is the transpose of S.
"""

from typing import Literal

from torch import Tensor, nn

from linrec.nn.activations import ACTIVATIONS
from linrec.nn.fast_weights import FeatureNorm, Strength, UnitFeatures, WriteStrength
from linrec.nn.head_sizes import key_value_heads, most_heads
from linrec.nn.mixer import Mixer, State
from linrec.nn.norms import Norm, gated, make_norm
from linrec.nn.projections import draw, projected
from linrec.nn.short_convolution import ShortConvolution
from linrec.ops.delta_rule import delta_rule
from linrec.rules import positive

__all__ = ["DeltaNet"]

ValueActivation = Literal["silu", "none"]

# of the paper's models
CHANNELS_PER_HEAD = 128
# of the code released with the paper, for all matrices
GAIN = 2**-2.5


class DeltaNet(Mixer):
    """S_t = S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T: the entry of a key moves towards its value.

    The defaults are the paper's layer.

    | the paper's ablation, or an earlier layer | arguments |
    |---|---|
    | without short convolutions | `conv_size=None` |
    | L1 norm, 1 + ELU | `qk_norm="l1", feature_map="elu"` |
    | L2 norm, 1 + ELU | `feature_map="elu"` |
    | L2 norm, ReLU | `feature_map="relu"` |
    | the delta rule without strengths | `beta="one"` |
    | negative eigenvalues (Grazzi and others) | `beta="double_sigmoid"` |

    The layer of Schlag, Irie and Schmidhuber is `feature_map="dpfp", nu=3, qk_norm="l1", conv_size=None,
    value_activation="none", output_norm="none"`.

    When training starts, all matrices are Xavier uniform with gain 2^-2.5, as in the code released with the
    paper, flash-linear-attention. Since March 2025, that code draws them with a standard deviation of 0.02.

    Args:
        d_model: width of the sequence.
        n_heads: heads h. None is the largest number that divides `d_qk` and leaves at least 128 channels to
            each head, or 1.
        d_qk: width of q and k over all heads. None is `d_model`.
        d_v: width of v over all heads. None is `d_model`.
        feature_map: phi, a name of `linrec.nn.feature_maps`.
        nu: shifts of the feature map "dpfp"; None is 1.
        qk_norm: "l2"; "l1" for features >= 0; or "none" for features of "softmax".
        qk_eps: with "l2", added to |phi|^2, where released code has 1e-6; with "l1", to the sum of |phi|.
        beta: "sigmoid", in (0, 1); "double_sigmoid", in (0, 2); or "one".
        conv_size: taps of a causal convolution of each channel of q, k and v, before phi and SiLU; None
            disables it.
        value_activation: of v, "silu" or "none".
        conv_bias: whether the convolutions have biases.
        output_norm: of each head, "rms", "layer" or "none".
        norm_eps: of that norm. flash-linear-attention divides q by sqrt(dk), which the norm undoes but for
            this number: an eps there is eps dk here.
        output_gate: whether the normalised o is multiplied by SiLU(W_G x), as Gated DeltaNet does.

    Raises:
        ValueError: widths that the heads do not divide, or an unknown name of a variant.

    Source:
        Yang, Wang, Zhang, Shen and Kim, Parallelizing Linear Transformers with the Delta Rule over Sequence
        Length (2024), the layer of its DeltaNet Transformer. Constants missing in the paper come from
        flash-linear-attention, which its authors released with it.

    Example:
        >>> import torch
        >>> mixer = DeltaNet(64, n_heads=4)
        >>> y, (tail, S) = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, S.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 4, 16, 16]))
    """

    recurrence = "delta_rule"
    of_one_input = "q", "k", "v", "gate"

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int | None = None,
        d_qk: int | None = None,
        d_v: int | None = None,
        feature_map: str = "silu",
        nu: int | None = None,
        qk_norm: FeatureNorm = "l2",
        qk_eps: float = 0.0,
        beta: Strength = "sigmoid",
        conv_size: int | None = 4,
        conv_bias: bool = False,
        value_activation: ValueActivation = "silu",
        output_norm: Norm = "rms",
        norm_eps: float = 1e-5,
        output_gate: bool = False,
    ) -> None:
        super().__init__(d_model)
        positive(norm_eps=norm_eps, cure="torch's is 1e-5.")
        d_qk = d_model if d_qk is None else d_qk
        d_v = d_model if d_v is None else d_v
        n_heads = most_heads(d_qk, CHANNELS_PER_HEAD) if n_heads is None else n_heads
        self.n_heads, d_key, self.d_value = key_value_heads(n_heads, d_qk, d_v, width=d_model)
        # one SiLU of q, k and v follows their convolution
        silu = feature_map == value_activation == "silu"
        self.value_activation: ValueActivation = "none" if silu else value_activation
        phi = "identity" if silu else feature_map
        self.features = UnitFeatures(d_key, feature_map=phi, norm=qk_norm, nu=nu, eps=qk_eps, strength=beta)

        self.q = nn.Linear(d_model, d_qk, bias=False)
        self.k = nn.Linear(d_model, d_qk, bias=False)
        self.v = nn.Linear(d_model, d_v, bias=False)
        self.conv = ShortConvolution(2 * d_qk + d_v, conv_size, bias=conv_bias, silu=silu)
        self.beta = WriteStrength(d_model, self.n_heads, strength=beta)
        self.norm = make_norm(output_norm, self.d_value, eps=norm_eps)
        self.gate = nn.Linear(d_model, d_v, bias=False) if output_gate else None
        self.out = nn.Linear(d_v, d_model, bias=False)
        draw(self, nn.init.xavier_uniform_, gain=GAIN)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return y, and S^T (b, h, dk, dv); with a convolution, its tail and S^T."""
        tail, S = self.conv.split(state)
        *qkv, g = projected(x, self.q, self.k, self.v, self.gate)
        (q, k, v), tail = self.conv.side_by_side(qkv, tail, reset=reset)
        q, k, v = (part.unflatten(-1, (self.n_heads, -1)) for part in (q, k, v))
        q, k = self.features(q), self.features(k)
        v = ACTIVATIONS[self.value_activation](v)
        o, S = delta_rule(q, k, v.to(q), self.beta(x), state=S, reset=reset)
        o = gated(self.norm(o).flatten(-2).to(x.dtype), g)
        return self.out(o), self.conv.joined(tail, S)
