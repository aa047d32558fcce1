"""GILR: Parallelizing Linear Recurrent Neural Nets Over Sequence Length (Martin and Cundy, 2018).

    g_t = sigmoid(U x_t + b_g)
    i_t = tau(V x_t + b_z)
    h_t = g_t * h_{t-1} + (1 - g_t) * i_t
    y_t = h_t

The gated impulse linear recurrence. x input, g gate, i impulse, tau tanh, h hidden state, y output, t time.
The linear surrogate LSTM, which has one of these inside, is `linrec.mixers.ls_lstm`.
"""

from typing import Literal

from torch import Tensor, nn

from linrec.nn.activations import ACTIVATIONS
from linrec.nn.gates import Gate
from linrec.nn.mixer import Mixer, State
from linrec.nn.projections import draw
from linrec.ops.inspection import note
from linrec.ops.scan import scan
from linrec.rules import require

__all__ = ["GILR", "Impulse"]

Impulse = Literal["tanh", "relu", "leaky_relu", "elu"]
Init = Literal["torch", "released"]

# of the released code: the weights' largest magnitude
LARGEST_WEIGHT = 0.05


class GILR(Mixer):
    """h_t = g_t * h_{t-1} + (1 - g_t) * tau(V x_t + b_z), g_t = sigmoid(U x_t + b_g): a gated average.

    A gate and its opposite weigh the past and the present, so h stays in the range of tau. The paper's layers
    are this alone, one upon the other.

    The paper gives no initial values: weights start as torch's Linear draws them. The released code is
    `impulse="elu", init="released"`. U and b_g are marked as group "transition" without weight decay.

    Args:
        d_model: width of the sequence and of the state.
        impulse: tau, "tanh", "relu", "leaky_relu" or "elu".
        output_projection: whether y_t = W h_t + b.
        init: where U, V and the biases start. "torch": as torch's Linear draws them. "released": weights
            uniform in +- 0.05 and biases at zero, as in the released code.
        refine: whether g has a refine gate; see `linrec.nn.Gate`.
        uniform_init: whether gates start uniformly spread; see `linrec.nn.Gate`.

    Raises:
        ValueError: an unknown `impulse` or `init`, or `init="released"` beside `uniform_init`.

    Source:
        Martin and Cundy (2018), the gated impulse linear recurrence; the released code is layers_new.py of
        eamartin/parallelizing_linear_rnns; refine gate and uniform initialisation: Gu and others (2020).

    Example:
        >>> import torch
        >>> mixer = GILR(64)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 64]))
    """

    recurrence = "scan"

    def __init__(
        self,
        d_model: int,
        *,
        impulse: Impulse = "tanh",
        output_projection: bool = False,
        init: Init = "torch",
        refine: bool = False,
        uniform_init: bool = False,
    ) -> None:
        super().__init__(d_model)
        require(
            init == "torch" or not uniform_init,
            '`init="released"` and `uniform_init=True` both say how the gate starts. Leave one out.',
        )
        self.impulse = ACTIVATIONS[impulse]
        self.g = Gate(d_model, d_model, refine=refine, uniform_init=uniform_init)
        self.i = nn.Linear(d_model, d_model)
        if init == "released":
            draw(self, nn.init.uniform_, a=-LARGEST_WEIGHT, b=LARGEST_WEIGHT)
        self.out = nn.Linear(d_model, d_model) if output_projection else None

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return y, and h (b, d_model)."""
        g, rest = self.g(x)
        i = self.impulse(self.i(x))
        note(gate=rest)
        h, state = scan(g, rest * i, state=state, reset=reset)
        y = h.to(x.dtype)
        return y if self.out is None else self.out(y), state
