"""Gated DeltaProduct: State-Tracking in Linear RNNs via Householder Products (Siems and others, 2025).

    q_t = SiLU(W_q x_t) / |SiLU(W_q x_t)|
    k_tj = SiLU(W_kj x_t) / |SiLU(W_kj x_t)|    v_tj = SiLU(W_vj x_t)    beta_tj = 2 sigmoid(W_betaj x_t)
    alpha_t = exp(-A softplus(W_alpha x_t + b_dt))
    H_t0 = alpha_t H_{t-1}
    H_tj = (I - beta_tj k_tj k_tj^T) H_t,j-1 + beta_tj k_tj v_tj^T        j = 1 .. n_h
    H_t = H_t,n_h    o_t = H_t^T q_t
    y_t = W_o (RMSNorm(o_t) * SiLU(W_g x_t))

x input, q query, k_j keys, v_j values and beta_j writing strengths of the n_h steps of the delta rule at a
token, alpha decay of a head, A = exp(A_log) and b_dt (dt_bias) one learned number per head each, H state, o
output of a head, y output, t time. A convolution of a few steps follows each of W_q x, W_k x and W_v x.
"""

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
from linrec.nn.projections import draw, projected
from linrec.nn.short_convolution import ShortConvolution
from linrec.ops import inspection
from linrec.ops.delta_rule import delta_rule
from linrec.rules import COUNT, at_least, positive

__all__ = ["GatedDeltaProduct"]

Decay = Literal["data", "none"]

# of the released code: channels of a head of q and k, and of v as a multiple
CHANNELS_PER_HEAD = 256
GAIN = 2**-2.5
LARGEST_A = 16.0
STEP_SIZES = (0.001, 0.1)
SMALLEST_STEP = 1e-4


class GatedDeltaProduct(Mixer):
    """H_t = prod_j (I - beta_tj k_tj k_tj^T) alpha_t H_{t-1} + ..: n_h steps of the delta rule at a token.

    The transition of a token is a product of n_h generalised Householder matrices. With strengths up to 2 it
    includes rotations, so that a layer tracks states of groups that one Householder matrix cannot express.

    The n_h steps of a token are n_h neighbouring steps of the operator. Only the first decays, and only the
    last is read.

    | variant | arguments |
    |---|---|
    | DeltaProduct, without decay | `decay="none"` |
    | Gated DeltaNet, with other defaults | `n_householder=1` |
    | eigenvalues of a Householder matrix in (0, 1) | `beta="sigmoid"` |

    When training starts, A is uniform in (0, 16] and softplus(b_dt) is log-uniform in (0.001, 0.1), as in
    flash-linear-attention. All matrices are Xavier uniform with gain 2^-2.5. A_log and b_dt have no weight
    decay.

    The defaults are the layer of flash-linear-attention 0.6.0. That layer defines the Xavier start but never
    calls it, and its language models draw with a standard deviation of 0.02. Their configuration also has
    other defaults: `n_householder=1, decay="none", beta="sigmoid"`. Heads of v that share a head of q and k
    are not available here.

    Args:
        d_model: width of the sequence.
        n_heads: heads h. None is the largest number that divides `d_qk` and leaves at least 256 channels to
            each head, or 1.
        d_qk: width of q, and of each k_j, over all heads. None is 3/4 `d_model`, or the next smaller multiple
            of `n_heads`.
        d_v: width of each v_j over all heads; None is twice `d_qk`.
        n_householder: steps n_h of the delta rule at a token.
        qk_eps: added to |SiLU|^2; released code has 1e-6.
        decay: "data", or "none" for alpha = 1.
        beta: "double_sigmoid", in (0, 2); "sigmoid", in (0, 1); or "one".
        conv_size: taps of a causal convolution of each channel of q, k and v, before SiLU; None disables it.
        conv_bias: whether the convolutions have biases.
        norm_eps: of the norm of the output. The released code divides q by sqrt(dk), dk channels of a head of
            q. The norm undoes that but for this number: an eps there is eps dk here.
        output_gate: whether the normalised o is multiplied by SiLU(W_g x).

    Raises:
        ValueError: widths that the heads do not divide, an unknown name of a variant, or a number out of
            range.

    Source:
        Siems and others, DeltaProduct (2025), section 3. Constants missing in the paper come from
        flash-linear-attention.

    Example:
        >>> mixer = GatedDeltaProduct(64, n_heads=4, n_householder=3)
        >>> y, (tail, H) = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, H.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 4, 12, 24]))
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
        n_householder: int = 2,
        qk_eps: float = 0.0,
        decay: Decay = "data",
        beta: Strength = "double_sigmoid",
        conv_size: int | None = 4,
        conv_bias: bool = False,
        norm_eps: float = 1e-5,
        output_gate: bool = True,
    ) -> None:
        super().__init__(d_model)
        at_least(1, n_heads=n_heads, d_qk=d_qk, or_none=True)
        at_least(1, most=COUNT, n_householder=n_householder, cure="The paper's models have 2 to 4.")
        positive(norm_eps=norm_eps, cure="The released code has 1e-5.")
        if d_qk is None:
            multiple = 1 if n_heads is None else n_heads
            d_qk = max(3 * d_model // 4 // multiple, 1) * multiple
        self.n_heads = most_heads(d_qk, CHANNELS_PER_HEAD) if n_heads is None else n_heads
        d_v = 2 * d_qk if d_v is None else d_v
        self.d_value = heads_of("d_v", d_v, self.n_heads)
        d_key, self.n_householder = heads_of("d_qk", d_qk, self.n_heads), n_householder
        self.features = UnitFeatures(d_key, feature_map="identity", eps=qk_eps, strength=beta)

        # rows of W_k, W_v and W_beta for j = 1, then for j = 2, ..
        keys, values = n_householder * d_qk, n_householder * d_v
        self.q = nn.Linear(d_model, d_qk, bias=False)
        self.k = nn.Linear(d_model, keys, bias=False)
        self.v = nn.Linear(d_model, values, bias=False)
        self.conv = ShortConvolution(d_qk + keys + values, conv_size, bias=conv_bias, silu=True)
        self.alpha: GateLinear | None = None
        if decay == "data":
            self.alpha = GateLinear(d_model, self.n_heads, bias=False)
            # 1 less a number in [0, 1): zero has no logarithm
            self.A_log = nn.Parameter(torch.log(LARGEST_A * (1 - torch.rand(self.n_heads))))
            self.dt_bias = nn.Parameter(step_bias(self.n_heads, STEP_SIZES, floor=SMALLEST_STEP))
            mark(self, "A_log", "dt_bias", group="default", weight_decay=False, float32=True)
        self.beta = WriteStrength(d_model, n_householder * self.n_heads, strength=beta)
        self.norm = RMSNorm(self.d_value, eps=norm_eps)
        self.gate = nn.Linear(d_model, d_v, bias=False) if output_gate else None
        self.out = nn.Linear(d_v, d_model, bias=False)
        draw(self, nn.init.xavier_uniform_, gain=GAIN)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return y, and H (b, h, dk, dv); with a convolution, its tail and H."""
        tail, H = self.conv.split(state)
        *qkv, g = projected(x, self.q, self.k, self.v, self.gate)
        (q, k, v), tail = self.conv.side_by_side(qkv, tail, reset=reset)
        q = self.features(q.unflatten(-1, (self.n_heads, -1)))
        k, v, beta = (self._in_turn(part) for part in (k, v, self.beta(x)))
        k, beta = self.features(k), beta[..., 0]
        log_alpha = None
        if self.alpha is not None:
            dt = softplus(self.alpha(x) + self.dt_bias)
            log_alpha = self._first(-torch.exp(self.A_log.to(dt.dtype)) * dt)
        first = None if reset is None else self._first(reset[..., None])[..., 0]
        q = q.repeat_interleave(self.n_householder, 1)
        o, H = delta_rule(q, k, v.to(q), beta, log_alpha, state=H, reset=first)
        o = o.unflatten(1, (-1, self.n_householder))[:, :, -1]
        o = gated(self.norm(o).flatten(-2).to(x.dtype), g)
        return self.out(o), self.conv.joined(tail, H)

    def token_mixing(self, x: Tensor, *, reset: Tensor | None = None) -> Tensor:
        """Return the sum over j of the magnitudes of the weights of v_j, on average over heads."""
        mixing = inspection.token_mixing(*self._memory(x, reset))
        assert mixing is not None
        read = mixing[:, self.n_householder - 1 :: self.n_householder]
        return read.unflatten(-1, (-1, self.n_householder)).sum(-1)

    def _in_turn(self, x: Tensor) -> Tensor:
        """Return `x` (b, t, n_h h d) as (b, t n_h, h, d): the steps of a token one after the other."""
        return x.unflatten(-1, (self.n_householder, self.n_heads, -1)).flatten(1, 2)

    def _first(self, x: Tensor) -> Tensor:
        """Return `x` (b, t, h) as (b, t n_h, h), with zeros at all but the first step of a token."""
        return functional.pad(x[:, :, None], (0, 0, 0, self.n_householder - 1)).flatten(1, 2)
