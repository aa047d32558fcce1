"""RWKV-5, Eagle: RWKV with Matrix-Valued States and Dynamic Recurrence (Peng and others, 2024).

    lerp(a, b, mu) = a + (b - a) * mu
    r_t = lerp(x_t, x_{t-1}, mu_r) W_r, and so k_t, v_t and g_t
    w = exp(-exp(omega))
    S_t = diag(w) S_{t-1} + k_t^T v_t
    wkv_t = S_{t-1} + diag(u) k_t^T v_t
    o_t = concat(SiLU(g_t) * LayerNorm(r_t wkv_t)) W_o

x is the input, t time, o the output, and * the product of channels. mu are shares of the last token, r is the
receptance, k the key, v the value, and g the gate. w is the decay and u the bonus of a key channel, and S the
state of a head.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from linrec.nn.gates import stable_exponential
from linrec.nn.head_sizes import split_width
from linrec.nn.mixer import Mixer, State
from linrec.nn.norms import HeadNorm, gated
from linrec.nn.parameters import mark
from linrec.nn.projections import orthogonal_linear
from linrec.nn.token_shift import Place, TokenShift, start_matrix_state
from linrec.ops.gate_loop import gate_loop
from linrec.rules import positive

__all__ = ["RWKV5"]

# of the paper's models
CHANNELS_PER_HEAD = 64
# of the released code, whose 1e-5 is for outputs divided by 8
EPS = 64e-5


class RWKV5(Mixer):
    """S_t = diag(w) S_{t-1} + k_t^T v_t, wkv_t = S_{t-1} + diag(u) k_t^T v_t: RWKV with matrix states, Eagle.

    The defaults are the paper's layer, and the released RWKV-5.2. Its channel mixing is
    `linrec.nn.RWKVChannelMixing`.

    | variant | argument |
    |---|---|
    | without token shift | `token_shift=False`: mu = 0 |
    | without bonus | `bonus=False`: S_t in place of wkv_t |
    | without gate | `output_gate=False`: 1 in place of SiLU(g_t) |
    | without norm | `output_norm=False` |

    When training starts, for channel i of d and layer l of L, as in the released code:

        mu_k = 1 - (i/d)^(1 - l/L)    mu_v = mu_k - 0.3 l/(L - 1)    mu_r = mu_g = 1 - (i/d)^((1 - l/L) / 2)
        omega = -6 + 5 (i/(d - 1))^(0.7 + 1.3 l/(L - 1))
        u = l/(L - 1) (1 - i/(d - 1)) + 0, 0.1, -0.1, 0, ..

    W_r, W_k, W_v and W_g are orthogonal with gains 1, 0.1, 1 and 0.1, and W_o is zero, so that every output
    is zero at first. The norm's weights are ((l + 1)/L)^0.7. Layers learn their places when a model calls
    `RWKV5.share`; a layer that stands alone is the first of one. omega is marked as group "transition"
    without weight decay; the released code trains it with twice the learning rate of the rest.

    Args:
        d_model: width of the sequence, and of r, k, v and g over all heads.
        n_heads: heads. None is the largest number that divides `d_model` and leaves at least 64 channels to
            each head, or 1.
        token_shift: whether r, k, v and g see the input of the step before.
        bonus: whether the current token has the factor u, beside a state that is not yet decayed.
        output_gate: whether the normed output is multiplied by SiLU(g).
        output_norm: whether the output of each head is normalised.
        norm_eps: of that norm; the released code divides outputs by 8, and adds 1e-5 there.
        zero_init: whether W_o starts at zero; else it is orthogonal.

    Raises:
        ValueError: an `n_heads` that does not divide `d_model`, or a `norm_eps` that is not positive.

    Source:
        Eagle and Finch (Peng and others, 2024), the section on Eagle; the initialisation comes from the
        authors' RWKV-LM.

    Example:
        >>> mixer = RWKV5(64, n_heads=4)
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
        token_shift: bool = True,
        bonus: bool = True,
        output_gate: bool = True,
        output_norm: bool = True,
        norm_eps: float = EPS,
        zero_init: bool = True,
    ) -> None:
        super().__init__(d_model)
        positive(norm_eps=norm_eps, cure="The released code's is 64e-5.")
        self.n_heads, self.d_head = split_width("d_model", d_model, n_heads, least=CHANNELS_PER_HEAD)
        # r, k, v and the gate are each made from a mixture of tokens of its own
        self.shift = TokenShift(d_model, 3 + output_gate, present=token_shift)
        self.r = orthogonal_linear(d_model, d_model)
        self.k = orthogonal_linear(d_model, d_model, gain=0.1)
        self.v = orthogonal_linear(d_model, d_model)
        self.gate = orthogonal_linear(d_model, d_model, gain=0.1) if output_gate else None
        self.omega = nn.Parameter(torch.empty(d_model))
        mark(self, "omega", float32=True)
        self.u = nn.Parameter(torch.empty(d_model)) if bonus else None
        self.norm = HeadNorm(self.n_heads, self.d_head, eps=norm_eps, bias=True) if output_norm else None
        self.out = orthogonal_linear(d_model, d_model, gain=0.0 if zero_init else 1.0)
        self.share([self])

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return y, and the last input (b, d_model) with S (b, h, d, d); without token shift, S alone."""
        heads = self.n_heads, self.d_head
        last, S = self.shift.split(state)
        z, last = self.shift(x, last, reset=reset)
        r, k, v = (W(x_z).unflatten(-1, heads) for W, x_z in zip((self.r, self.k, self.v), z, strict=False))
        log_w = stable_exponential(self.omega.to(self.state_dtype)).unflatten(-1, heads)
        u = None if self.u is None else self.u.to(self.state_dtype).unflatten(-1, heads)
        o, S = gate_loop(r, k, v, log_w, bonus=u, state=S, reset=reset)
        g = None if self.gate is None else self.gate(z[-1])
        o = (o if self.norm is None else self.norm(o)).flatten(-2).to(x.dtype)
        return self.out(gated(o, g)), self.shift.joined(last, S)

    @classmethod
    def share(cls, layers: "Sequence[RWKV5]") -> None:
        """Start mu, omega, u and the norm's weights of each layer from its place in the stack."""
        for layer, mixer in enumerate(layers):
            place = Place(layer, len(layers))
            start_matrix_state(place, mixer.shift, "rkvg"[: mixer.shift.n], mixer.omega, mixer.u, mixer.norm)
