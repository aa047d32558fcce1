"""eLSTM: the LSTM with an element-wise recurrence (Irie, Gopalakrishnan and Schmidhuber, 2023).

    f_t = sigmoid(F u_t + w_f * c_{t-1} + b_f)
    z_t = tanh(Z u_t + w_z * c_{t-1} + b_z)
    c_t = f_t * c_{t-1} + (1 - f_t) * z_t
    o_t = sigmoid(O u_t + W c_t + b)
    h_t = o_t * c_t

u is the input, t time, * the product of channels, f the forget gate, z the new content, c the state, o the
output gate, and h the output. The gates read c through weights per channel, w_f and w_z, so the Jacobian of a
step is diagonal:

    d c_t / d c_{t-1} = f_t + (1 - f_t) (1 - z_t^2) w_z + (c_{t-1} - z_t) f_t (1 - f_t) w_f

Real-time recurrent learning then needs a single trace per parameter, and is exact.
"""

import torch
from torch import Tensor, nn

from linrec.nn.cells import NonlinearMixer
from linrec.nn.mixer import State
from linrec.nn.parameters import mark
from linrec.rules import at_least

__all__ = ["ELSTM"]


class ELSTM(NonlinearMixer):
    """c_t = f_t * c_{t-1} + (1 - f_t) * z_t, h_t = o_t * c_t.

    Each channel of f_t and z_t reads the same channel of c_{t-1} alone, so the recurrence is element-wise.

    F, Z, w_f, w_z, b_f and b_z start at Gaussian values of standard deviation 0.1, as in the released code.
    The output gate starts as torch's Linear. w_f and w_z are marked as group "transition" without weight
    decay.

    Args:
        d_model: width of the sequence and of the state.
        forget_bias: mean of the initial b_f.
        mode: mode of `linrec.ops.nonlinear_scan`; "auto" is the loop. The modes of Newton's method know that
            the Jacobian is diagonal: each iteration is one pass over the cell, one backwards, and a scan.

    Raises:
        ValueError: `forget_bias` is negative or not finite, or the mode does not exist.

    Source:
        Irie and others, Exploring the Promise and Limits of Real-Time Recurrent Learning (2023), and the
        released code, where the layer of the copy task ends at c and the model has the output gate.

    Example:
        >>> mixer = ELSTM(64)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 64]))
    """

    def __init__(self, d_model: int, *, forget_bias: float = 0.0, mode: str = "auto") -> None:
        super().__init__(d_model, mode)
        at_least(0, forget_bias=forget_bias, cure="Pass 1, so that memories last at first.")
        self.F = nn.Linear(d_model, d_model)
        self.Z = nn.Linear(d_model, d_model)
        self.w_f = nn.Parameter(torch.empty(d_model))
        self.w_z = nn.Parameter(torch.empty(d_model))
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.1)
        with torch.no_grad():
            self.F.bias.add_(forget_bias)
        mark(self, "w_f", "w_z", float32=True)
        # O, then W
        self.o = nn.Linear(2 * d_model, d_model)

    def mix(self, u: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return h of every step, and the last c (b, d_model)."""
        # a last axis of size 1 tells Newton's method that each channel of c sees itself alone
        inputs, start = torch.stack([self.F(u), self.Z(u)], -1), self.started(u, state)[..., None]
        weights = self.w_f[:, None], self.w_z[:, None]
        c, last = self.nonlinear_scan(self._cell, inputs, weights, state=start, reset=reset)
        c = c[..., 0]
        return torch.sigmoid(self.o(torch.cat([u, c], -1))) * c, last[..., 0]

    def _cell(self, c: Tensor, inputs: Tensor, w_f: Tensor, w_z: Tensor) -> Tensor:
        """Return c_t (b, d_model, 1)."""
        Fu, Zu = inputs.split(1, -1)
        f, z = torch.sigmoid(Fu + w_f * c), torch.tanh(Zu + w_z * c)
        return f * c + (1 - f) * z
