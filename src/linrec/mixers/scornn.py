"""scoRNN: Orthogonal Recurrent Neural Networks with Scaled Cayley Transform (Helfrich and others, 2018).

    Z = (I + A)^-1 (I - A)
    W = Z D
    h_t = modrelu(x_t U + h_{t-1} W)
    modrelu(z) = sign(z) relu(|z| + b)

x is the input, t time, h the hidden state and output, both rows, U an input matrix, A a skew-symmetric
matrix, D a diagonal matrix of 1 and -1 that is not learned, Z and W orthogonal and b a bias per channel.
Cayley's map alone has no eigenvalue -1, and needs large A for eigenvalues near -1. With D, A stays small.
"""

import torch
from torch import Tensor, nn

from linrec.nn.activations import modrelu
from linrec.nn.cells import NonlinearMixer
from linrec.nn.mixer import State
from linrec.nn.orthogonal import Orthogonal
from linrec.rules import require

__all__ = ["ScoRNN"]


class ScoRNN(NonlinearMixer):
    """h_t = modrelu(x_t U + h_{t-1} W), W = (I + A)^-1 (I - A) D: an orthogonal matrix by Cayley's map.

    | task of the released code | arguments |
    |---|---|
    | copying, 190 channels; adding, 170 channels | the defaults |
    | sequential MNIST, 170 channels | `rho=17` |

    A starts in blocks [[0, s], [-s, 0]] with s = -tan(u / 2) and u uniform in [0, pi / 2], U uniform in
    [-0.01, 0.01], and b zero, as in the released code. A is in group "transition" without weight decay: the
    released code trains it with a tenth of the learning rate of the other parameters, and RMSprop. An
    orthogonal W does not contract, so Newton's method needs many iterations.

    Args:
        d_model: width of the sequence and of the state.
        rho: entries -1 of D, its last entries. None is half of `d_model`, rounded down.
        mode: mode of `linrec.ops.nonlinear_scan`; "auto" is the loop.

    Raises:
        ValueError: `rho` is out of range, or the mode does not exist.

    Source:
        Helfrich, Willmott and Ye, Orthogonal Recurrent Neural Networks with Scaled Cayley Transform (2018),
        and the released code, SpartinStuff/scoRNN.

    Example:
        >>> mixer = ScoRNN(64, rho=6)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 64]))
    """

    D: Tensor

    def __init__(self, d_model: int, *, rho: int | None = None, mode: str = "auto") -> None:
        super().__init__(d_model, mode)
        rho = d_model // 2 if rho is None else rho
        require(
            0 <= rho <= d_model,
            f"`rho` must be a number of channels in [0, `d_model` = {d_model}]; got {rho}. None is half.",
        )
        self.rho = rho
        self.U = nn.Linear(d_model, d_model, bias=False)
        nn.init.uniform_(self.U.weight, -0.01, 0.01)
        self.Z = Orthogonal(d_model, matrix_map="cayley")
        self.add_constants(like=self.U.weight)
        self.b = nn.Parameter(torch.zeros(d_model))

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return h of every step, and the last h (b, d_model)."""

        def cell(h: Tensor, Ux: Tensor, W: Tensor, b: Tensor) -> Tensor:
            return modrelu(Ux + h @ W, b)

        parameters = self.Z() * self.D, self.b
        return self.nonlinear_scan(cell, self.U(x), parameters, state=state, reset=reset)

    def constants(self) -> dict[str, Tensor]:
        """Return the diagonal of D."""
        return {"D": torch.cat([torch.ones(self.d_model - self.rho), -torch.ones(self.rho)])}
