"""GLA: Gated Linear Attention Transformers with Hardware-Efficient Training (Yang and others, 2023).

    q_t = x_t W_Q    k_t = x_t W_K    v_t = x_t W_V
    alpha_t = Sigmoid(x_t W_alpha^1 W_alpha^2 + b_alpha)^(1 / tau)
    S_t = (alpha_t^T 1) * S_{t-1} + k_t^T v_t
    o_t = q_t S_t
    o'_t = Concat(LayerNorm(o_t^1), .., LayerNorm(o_t^h))
    r_t = Swish(x_t W_r + b_r)
    y_t = (r_t * o'_t) W_O

x input, q query, k key, v value, alpha forget gate of a key channel, S state and o output of a head, r output
gate, y output, t time. The equations are in section 4.4 of the paper.
"""

import math
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional

from linrec.nn import feature_maps
from linrec.nn.decays import multi_scale_decay
from linrec.nn.gates import GateLinear
from linrec.nn.head_sizes import key_value_heads, kv_groups, repeat_heads
from linrec.nn.mixer import Mixer, State, Transitions
from linrec.nn.norms import Norm, gated, make_norm
from linrec.nn.parameters import mark
from linrec.nn.projections import projected, xavier_linear
from linrec.nn.short_convolution import ShortConvolution
from linrec.ops.gate_loop import gate_loop
from linrec.rules import at_least, positive, require

__all__ = ["GLA"]

ForgetGate = Literal["channel", "head", "fixed", "none"]

# of the paper's language models
HEADS = 4
# of the released code, for all matrices
GAIN = 2**-2.5


class GLA(Mixer):
    """S_t = (alpha_t^T 1) * S_{t-1} + k_t^T v_t, alpha_t from a projection of low rank (section 4.4).

    The defaults are the paper's layer.

    | the paper's ablation | argument |
    |---|---|
    | no gate: linear attention | `forget_gate="none"`: alpha = 1 |
    | data-independent scalar decay: RetNet | `forget_gate="fixed"`: alpha = 1 - 2^(-5 - arange(0, h)) |
    | data-dependent scalar gate | `forget_gate="head"`: one alpha_t for all channels of a head |
    | small and large heads | `n_heads` |

    flash-linear-attention's layer also has short convolutions, feature maps of q and k, and grouped heads:
    `conv_size`, `feature_map` and `kv_heads`. It divides q by sqrt(dk), which the norm undoes but for its
    eps: an eps there is eps dk here, as in `output_norm="rms", norm_eps=1e-5 * dk`.

    As in the released code, all matrices start Xavier uniform with gain 2^-2.5, b_r starts at zero, and
    b_alpha is initialised by torch's Linear. W_alpha and b_alpha are marked as group "transition" without
    weight decay, unlike in the paper.

    Args:
        d_model: width of the sequence.
        n_heads: heads h. None is 4, or the largest of 2 and 1 that divides `d_qk` and `d_v` where 4 does not.
        kv_heads: heads of k, v and alpha, each shared by `n_heads` / `kv_heads` neighbouring queries. None is
            `n_heads`.
        d_qk: width of q over all heads. None is `d_model` / 2, rounded down, at least 1.
        d_v: width of o over all heads. None is `d_model`.
        feature_map: phi of q and k, a name of `linrec.nn.feature_maps` with a feature for each channel.
        conv_size: taps of a causal convolution of each channel of q, k and v, which SiLU follows; None
            disables both.
        conv_bias: whether the convolutions have biases.
        forget_gate: "channel", "head", "fixed" or "none".
        gate_rank: width between W_alpha^1 and W_alpha^2.
        tau: alpha is the root of this order of a sigmoid, so a large one forgets slowly.
        clamp_min: the smallest log alpha of a data-dependent gate; None disables the bound.
        output_norm: of each head, with one scale for all: "layer", "rms" (the released code) or "none".
        norm_eps: of that norm.
        output_gate: whether o' is multiplied by r.
        gate_bias: whether r has a bias b_r. The layer of flash-linear-attention has no bias.

    Raises:
        ValueError: widths that the heads do not divide, `kv_heads` that do not divide `n_heads`, a feature
            map without a feature for each channel, a number out of range, or an unknown name of a variant.

    Source:
        GLA (Yang and others, 2023), section 4.4; the ablations are in table 4. The initialisation comes from
        the authors' flash-linear-attention.

    Example:
        >>> import torch
        >>> mixer = GLA(64)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.shape, state.dtype
        (torch.Size([2, 10, 64]), torch.Size([2, 4, 8, 16]), torch.float32)
    """

    recurrence = "gate_loop"
    of_one_input = "q", "k", "v", "gate"

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int | None = None,
        kv_heads: int | None = None,
        d_qk: int | None = None,
        d_v: int | None = None,
        feature_map: str = "identity",
        conv_size: int | None = None,
        conv_bias: bool = False,
        forget_gate: ForgetGate = "channel",
        gate_rank: int = 16,
        tau: float = 16.0,
        clamp_min: float | None = None,
        output_norm: Norm = "layer",
        norm_eps: float = 1e-5,
        output_gate: bool = True,
        gate_bias: bool = True,
    ) -> None:
        super().__init__(d_model)
        at_least(1, gate_rank=gate_rank, cure="The paper's is 16.")
        positive(tau=tau, cure="The paper's is 16.")
        positive(norm_eps=norm_eps, cure="torch's is 1e-5.")
        d_qk = max(1, d_model // 2) if d_qk is None else d_qk
        d_v = d_model if d_v is None else d_v
        n_heads = math.gcd(HEADS, d_qk, d_v) if n_heads is None else n_heads
        self.n_heads, self.d_key, self.d_value = key_value_heads(n_heads, d_qk, d_v, width=d_model)
        self.kv_heads = kv_groups(n_heads, kv_heads)
        require(
            clamp_min is None or -math.inf < clamp_min < 0,
            f"`clamp_min` must be a negative number, the least log alpha; got {clamp_min}.",
        )
        self.forget_gate, self.tau, self.clamp_min = forget_gate, tau, clamp_min
        d_k, d_kv = self.kv_heads * self.d_key, self.kv_heads * self.d_value
        self.phi = feature_maps.build(feature_map, self.d_key)
        require(
            self.phi.phase is None and self.phi.d_features == self.d_key,
            "`feature_map` must have a feature for each channel, and no phase; got "
            f'{feature_map!r}. Pass one such as "elu", "relu" or "silu".',
        )

        self.q = xavier_linear(d_model, d_qk, gain=GAIN)
        self.k = xavier_linear(d_model, d_k, gain=GAIN)
        self.v = xavier_linear(d_model, d_kv, gain=GAIN)
        self.conv = ShortConvolution(d_qk + d_k + d_kv, conv_size, bias=conv_bias, silu=conv_size is not None)
        self.alpha: nn.Sequential | None = None
        if forget_gate in ("channel", "head"):
            width = d_k if forget_gate == "channel" else self.kv_heads
            low_rank = [GateLinear(d_model, gate_rank, bias=False), GateLinear(gate_rank, width)]
            self.alpha = mark(nn.Sequential(*low_rank))
            for linear in low_rank:
                nn.init.xavier_uniform_(linear.weight, gain=GAIN)
        self.norm = make_norm(output_norm, self.d_value, eps=norm_eps)
        self.gate = xavier_linear(d_model, d_v, gain=GAIN, bias=gate_bias) if output_gate else None
        self.out = xavier_linear(d_v, d_model, gain=GAIN)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return y, and S (b, h, dk, dv); with a convolution, its tail and S."""
        tail, S = self.conv.split(state)
        *qkv, g = projected(x, self.q, self.k, self.v, self.gate)
        (q, k, v), tail = self.conv.side_by_side(qkv, tail, reset=reset)
        q = self.phi(q.unflatten(-1, (self.n_heads, self.d_key)))
        k = repeat_heads(self.phi(k.unflatten(-1, (self.kv_heads, self.d_key))), self.n_heads)
        v = repeat_heads(v.unflatten(-1, (self.kv_heads, self.d_value)), self.n_heads)
        log_alpha = None
        if self.alpha is not None:
            # of every key channel, or one of all
            log_alpha = functional.logsigmoid(self.alpha(x)) / self.tau
            if self.clamp_min is not None:
                log_alpha = log_alpha.clamp(min=self.clamp_min)
            log_alpha = repeat_heads(log_alpha.unflatten(-1, (self.kv_heads, -1)), self.n_heads)
        elif self.forget_gate == "fixed":
            log_alpha = multi_scale_decay(self.n_heads, **self.factory_kwargs(x.device))
        o, S = gate_loop(q, k, v, log_alpha, state=S, reset=reset)
        return self.out(gated(self.norm(o).flatten(-2), g)), self.conv.joined(tail, S)

    def transitions(self, x: Tensor) -> Transitions | None:
        """Return alpha_t of every key channel, which is 1 without a gate."""
        ones = Transitions.ones(self.n_heads * self.d_key, **self.factory_kwargs(x.device))
        return super().transitions(x) or ones
