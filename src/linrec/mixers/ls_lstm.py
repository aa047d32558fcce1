"""LS-LSTM: Parallelizing Linear Recurrent Neural Nets Over Sequence Length (Martin and Cundy, 2018).

    h~_t = GILR(x)_t
    f_t, i_t, o_t = sigmoid(U_{f,i,o} h~_{t-1} + V_{f,i,o} x_t + b_{f,i,o})
    z_t = tau(U_z h~_{t-1} + V_z x_t + b_z)
    c_t = f_t * c_{t-1} + i_t * z_t
    h_t = o_t * c_t
    y_t = h_t

The linear surrogate LSTM: its gates see a linear recurrence in the place of its own output, the gated impulse
of `linrec.mixers.gilr`, which makes it the paper's GILR-LSTM. x input, h~ surrogate, f forget, i input and o
output gate, z candidate, tau tanh, c cell, y output, t time.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from linrec.mixers.gilr import GILR, Impulse
from linrec.nn.gates import Gate
from linrec.nn.mixer import Mixer, State
from linrec.nn.projections import draw
from linrec.nn.token_shift import token_shift
from linrec.ops.inspection import note
from linrec.ops.scan import scan
from linrec.rules import require

__all__ = ["LSLSTM"]

Variant = Literal["paper", "released"]

# of the released code: the weights' largest magnitude, and b_f
LARGEST_WEIGHT = 0.05
FORGET_BIAS = 5.0


class LSLSTM(Mixer):
    """c_t = f_t * c_{t-1} + i_t * z_t, whose gates see h~_{t-1} and x_t: an LSTM that is two scans.

    The gates of an LSTM see h_{t-1}, so its steps run one by one. Here a first scan computes h~ of all steps
    from x alone, and a second scan computes c.

    The paper's equations and the released code differ:

    | | gates and candidate see | weights start | biases start |
    |---|---|---|---|
    | `variant="paper"` | h~_{t-1} and x_t | as torch's Linear draws them | likewise |
    | `variant="released"` | h~_t and x_t | uniform in +- 0.05 | at zero, b_f at 5 |

    The paper gives no initial values. The parameters of f and of the gate of h~ are marked as group
    "transition" without weight decay.

    Args:
        d_model: width of the sequence, of h~ and of c.
        variant: "paper", the paper's equations, or "released", the released code.
        impulse: tau, of z and of h~: "tanh", "relu", "leaky_relu" or "elu".
        output_projection: whether y_t = W h_t + b.
        refine: whether f and the gate of h~ have refine gates; see `linrec.nn.Gate`.
        uniform_init: whether these two start uniformly spread; see `linrec.nn.Gate`.
        forget_bias_init: initial b_f. None follows the variant. With the released code's 5, cells start to
            forget after 150 steps, with torch's biases after two.

    Raises:
        ValueError: an unknown `variant` or `impulse`, or an initial b_f beside `uniform_init`.

    Source:
        Martin and Cundy (2018), the linear surrogate LSTM and GILR-LSTM; the released code is layers_new.py
        of eamartin/parallelizing_linear_rnns; refine gate and uniform initialisation: Gu and others (2020).

    Example:
        >>> mixer = LSLSTM(64)
        >>> y, (surrogate, c) = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, surrogate.shape, c.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 64]), torch.Size([2, 64]))
    """

    recurrence = "scan"

    def __init__(
        self,
        d_model: int,
        *,
        variant: Variant = "paper",
        impulse: Impulse = "tanh",
        output_projection: bool = False,
        refine: bool = False,
        uniform_init: bool = False,
        forget_bias_init: float | None = None,
    ) -> None:
        super().__init__(d_model)
        if variant == "released" and forget_bias_init is None:
            forget_bias_init = FORGET_BIAS
        require(
            forget_bias_init is None or not uniform_init,
            '`forget_bias_init`, or the default of `variant="released"`, and `uniform_init` both say how the '
            f"forget gate starts; got {forget_bias_init} beside uniform_init=True. Leave one out.",
        )
        self.sees_before = variant == "paper"
        self.surrogate = GILR(d_model, impulse=impulse, refine=refine, uniform_init=uniform_init)
        self.impulse = self.surrogate.impulse
        # U and V side by side
        self.f = Gate(2 * d_model, d_model, refine=refine, uniform_init=uniform_init)
        self.i = nn.Linear(2 * d_model, d_model)
        self.o = nn.Linear(2 * d_model, d_model)
        self.z = nn.Linear(2 * d_model, d_model)
        self.out = nn.Linear(d_model, d_model) if output_projection else None
        if variant == "released":
            draw(self, nn.init.uniform_, a=-LARGEST_WEIGHT, b=LARGEST_WEIGHT)
        if forget_bias_init is not None:
            nn.init.constant_(self.f.f.bias, forget_bias_init)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return y, and the last h~ and c, each (b, d_model)."""
        before, c = (None, None) if state is None else state
        surrogate, last = self.surrogate(x, before, reset=reset)
        if self.sees_before:
            surrogate, _ = token_shift(surrogate, before, reset=reset)
        seen = torch.cat([surrogate, x], dim=-1)
        f, _ = self.f(seen)
        i, o = torch.sigmoid(self.i(seen)), torch.sigmoid(self.o(seen))
        z = self.impulse(self.z(seen))
        note(gate=i)
        cells, c = scan(f, (i * z).to(f.dtype), state=c, reset=reset)
        h = o * cells.to(x.dtype)
        return h if self.out is None else self.out(h), (last, c)
