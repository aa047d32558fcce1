"""RWKV-6, Finch: RWKV with Matrix-Valued States and Dynamic Recurrence (Peng and others, 2024).

    lora_z(x) = lambda_z + tanh(x A_z) B_z
    ddlerp_z(a, b) = a + (b - a) * lora_z(a + (b - a) * mu_x)
    r_t = ddlerp_r(x_t, x_{t-1}) W_r, and so k_t, v_t and g_t
    d_t = lora_d(ddlerp_w(x_t, x_{t-1}))
    w_t = exp(-exp(d_t))
    S_t = diag(w_t) S_{t-1} + k_t^T v_t
    wkv_t = S_{t-1} + diag(u) k_t^T v_t
    o_t = concat(SiLU(g_t) * LayerNorm(r_t wkv_t)) W_o

x is the input, t time, o the output, and * the product of channels. A and B are projections of low rank,
lambda and mu_x learned vectors; lambda of the token shift is `shift.mu`. r is the receptance, k the key, v
the value, g the gate, w the decay and u the bonus of a key channel, and S the state of a head.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from linrec.nn.gates import GateLinear, stable_exponential
from linrec.nn.head_sizes import split_width
from linrec.nn.mixer import Mixer, State
from linrec.nn.norms import HeadNorm, gated
from linrec.nn.parameters import mark
from linrec.nn.projections import orthogonal_linear
from linrec.nn.token_shift import Place, TokenShift, start_matrix_state
from linrec.ops.gate_loop import gate_loop
from linrec.rules import at_least, positive

__all__ = ["RWKV6"]

Shift = Literal["data", "learned", "none"]
Decay = Literal["data", "learned"]

# of the paper's models
CHANNELS_PER_HEAD = 64
# the bound of B_d when training starts
LORA_BOUND = 0.01
# of the released code, whose 1e-5 is for outputs divided by 8
EPS = 64e-5


class RWKV6(Mixer):
    """S_t = diag(w_t) S_{t-1} + k_t^T v_t, wkv_t = S_{t-1} + diag(u) k_t^T v_t, w_t of the input: Finch.

    The defaults are the paper's layer. Its channel mixing is `linrec.nn.RWKVChannelMixing`.

    | variant | argument |
    |---|---|
    | token shift of RWKV-5; none | `token_shift="learned"`, without A, B and mu_x; "none" |
    | decay of RWKV-5 | `decay="learned"`: d_t = lambda_d |
    | without bonus | `bonus=False`: S_t in place of wkv_t |
    | without gate | `output_gate=False`: 1 in place of SiLU(g_t) |
    | without norm | `output_norm=False` |

    When training starts, for channel i of d and layer l of L, as in the released code:

        lambda_w = lambda_k = mu_x = 1 - (i/d)^(1 - l/L)          lambda_v = lambda_k - 0.3 l/(L - 1)
        lambda_r = lambda_g = 1 - (i/d)^((1 - l/L) / 2)
        lambda_d = -6 + 5 (i/(d - 1))^(0.7 + 1.3 l/(L - 1))
        u = l/(L - 1) (1 - i/(d - 1)) + 0, 0.1, -0.1, 0, ..

    All A are zero and all B uniform in +- 0.01. W_r, W_k, W_v and W_g are orthogonal with gains 1, 0.1, 1 and
    0.1, and W_o is zero, so that every output is zero at first. The norm's weights are ((l + 1)/L)^0.7.
    Layers learn their places when a model calls `RWKV6.share`; a layer that stands alone is the first of one.
    lambda_d, A_d and B_d are marked as group "transition" without weight decay; the other A and B have no
    weight decay either. The released code trains lambda_d, of that group, with twice the learning rate of the
    rest.

    Args:
        d_model: width of the sequence, and of r, k, v and g over all heads.
        n_heads: heads. None is the largest number that divides `d_model` and leaves at least 64 channels to
            each head, or 1.
        token_shift: "data", "learned" or "none".
        shift_rank: of each A B in the token shift.
        decay: "data" or "learned".
        decay_rank: of A_d B_d.
        bonus: whether the current token has the factor u, beside a state that is not yet decayed.
        output_gate: whether the normed output is multiplied by SiLU(g).
        output_norm: whether the output of each head is normalised.
        norm_eps: of that norm; the released code divides outputs by 8, and adds 1e-5 there.
        zero_init: whether W_o starts at zero; else it is orthogonal.

    Raises:
        ValueError: an `n_heads` that does not divide `d_model`, a rank below 1, a `norm_eps` that is not
            positive, or an unknown name of a variant.

    Source:
        Eagle and Finch (Peng and others, 2024), the section on Finch; the initialisation comes from the
        authors' RWKV-LM.

    Example:
        >>> mixer = RWKV6(64, n_heads=4)
        >>> y, (last, S) = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, last.shape, S.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 64]), torch.Size([2, 4, 16, 16]))
    """

    recurrence = "gate_loop"

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int | None = None,
        token_shift: Shift = "data",
        shift_rank: int = 32,
        decay: Decay = "data",
        decay_rank: int = 64,
        bonus: bool = True,
        output_gate: bool = True,
        output_norm: bool = True,
        norm_eps: float = EPS,
        zero_init: bool = True,
    ) -> None:
        super().__init__(d_model)
        at_least(1, shift_rank=shift_rank, decay_rank=decay_rank)
        positive(norm_eps=norm_eps, cure="The released code's is 64e-5.")
        self.n_heads, self.d_head = split_width("d_model", d_model, n_heads, least=CHANNELS_PER_HEAD)
        # vectors with a mixture of tokens of their own
        self.mixtures = ["r", "k", "v"] + ["w"] * (decay == "data") + ["g"] * output_gate
        rank = shift_rank if token_shift == "data" else None
        self.shift = TokenShift(d_model, len(self.mixtures), rank=rank, present=token_shift != "none")
        self.r = orthogonal_linear(d_model, d_model)
        self.k = orthogonal_linear(d_model, d_model, gain=0.1)
        self.v = orthogonal_linear(d_model, d_model)
        self.gate = orthogonal_linear(d_model, d_model, gain=0.1) if output_gate else None
        self.lambda_d = nn.Parameter(torch.empty(d_model))
        mark(self, "lambda_d", float32=True)
        self.d: nn.Sequential | None = None
        if decay == "data":
            A, B = GateLinear(d_model, decay_rank, bias=False), GateLinear(decay_rank, d_model, bias=False)
            nn.init.zeros_(A.weight)
            nn.init.uniform_(B.weight, -LORA_BOUND, LORA_BOUND)
            self.d = mark(nn.Sequential(A, nn.Tanh(), B), group="transition", weight_decay=False)
        self.u = nn.Parameter(torch.empty(d_model)) if bonus else None
        self.norm = HeadNorm(self.n_heads, self.d_head, eps=norm_eps, bias=True) if output_norm else None
        self.out = orthogonal_linear(d_model, d_model, gain=0.0 if zero_init else 1.0)
        self.share([self])

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return y, and the last input (b, d_model) with S (b, h, d, d); without token shift, S alone."""
        heads = self.n_heads, self.d_head
        last, S = self.shift.split(state)
        mixed, last = self.shift(x, last, reset=reset)
        z = dict(zip(self.mixtures, mixed, strict=True))
        r, k = self.r(z["r"]).unflatten(-1, heads), self.k(z["k"]).unflatten(-1, heads)
        v = self.v(z["v"]).unflatten(-1, heads)
        d = self.lambda_d.to(self.state_dtype)
        if self.d is not None:
            d = d + self.d(z["w"])
        log_w = stable_exponential(d).unflatten(-1, heads)
        u = None if self.u is None else self.u.to(self.state_dtype).unflatten(-1, heads)
        o, S = gate_loop(r, k, v, log_w, bonus=u, state=S, reset=reset)
        g = None if self.gate is None else self.gate(z["g"])
        o = (o if self.norm is None else self.norm(o)).flatten(-2).to(x.dtype)
        return self.out(gated(o, g)), self.shift.joined(last, S)

    @classmethod
    def share(cls, layers: "Sequence[RWKV6]") -> None:
        """Start mu, lambda_d, u and the norm's weights of each layer from its place in the stack."""
        for layer, mixer in enumerate(layers):
            place = Place(layer, len(layers))
            start_matrix_state(place, mixer.shift, mixer.mixtures, mixer.lambda_d, mixer.u, mixer.norm)
