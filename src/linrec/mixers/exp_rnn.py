"""expRNN: Cheap Orthogonal Constraints in Neural Networks (Lezcano-Casado and Martinez-Rubio, 2019).

    B = exp(A - A^T)
    h_t = modrelu(x_t V + h_{t-1} B)
    modrelu(u) = sign(u) relu(|u| + b)

x is the input, t time, h the hidden state and output, both rows, V an input matrix, A a strictly upper
triangular matrix, B orthogonal and b a bias per channel. B keeps the norm of h, forwards and backwards.

Trivializations for Gradient-Based Optimization on Manifolds (Lezcano-Casado, 2019), dtriv, takes
B = B_0 exp(A - A^T) with a base B_0.
"""

import torch
from torch import Tensor, nn

from linrec.nn.activations import modrelu
from linrec.nn.cells import NonlinearMixer
from linrec.nn.mixer import State
from linrec.nn.orthogonal import Base, MatrixMap, Orthogonal, SkewInit

__all__ = ["ExpRNN"]


class ExpRNN(NonlinearMixer):
    """h_t = modrelu(x_t V + h_{t-1} exp(A - A^T)): an orthogonal recurrent matrix of any angles.

    | model of the papers | arguments |
    |---|---|
    | expRNN on sequential MNIST, 170 to 512 channels | the defaults |
    | expRNN on copying, 190 channels | `init="henaff"` |
    | dtriv with a fixed base (K = infinity) | `base="start"` |
    | dtriv whose base moves, K = 100 | `base="start", rebase_every=100` |
    | the comparison with Cayley's map | `matrix_map="cayley"` |

    `linrec train` moves the base. In other training, call `B.after_update(n)` after update n, counted from 1.
    The optimiser keeps its averages of A. A is in group "transition" without weight decay: the papers train
    it with a tenth of the learning rate of the other parameters, and RMSprop.

    V starts normal with variance 2 / d_model, b uniform in [-0.01, 0.01], as in the released code. An
    orthogonal B does not contract, so Newton's method needs many iterations.

    Args:
        d_model: width of the sequence and of the state.
        matrix_map: "exp", or "cayley" for (I + S)^-1 (I - S) with S = A - A^T.
        init: of A, "henaff" or "cayley"; see `linrec.nn.orthogonal.Orthogonal`.
        base: B_0: "identity", or "start" for the initial B, after which A starts at zero.
        rebase_every: with the base "start", number of updates K after which B_0 moves to B, and A to zero;
            None keeps B_0.
        mode: mode of `linrec.ops.nonlinear_scan`; "auto" is the loop.

    Raises:
        ValueError: an unknown name, K below 1, or K without the base "start".

    Source:
        Lezcano-Casado and Martinez-Rubio, Cheap Orthogonal Constraints in Neural Networks (2019);
        Lezcano-Casado, Trivializations for Gradient-Based Optimization on Manifolds (2019); and the released
        code, Lezcano/expRNN.

    Example:
        >>> mixer = ExpRNN(64)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 64]))
    """

    def __init__(
        self,
        d_model: int,
        *,
        matrix_map: MatrixMap = "exp",
        init: SkewInit = "cayley",
        base: Base = "identity",
        rebase_every: int | None = None,
        mode: str = "auto",
    ) -> None:
        super().__init__(d_model, mode)
        self.V = nn.Linear(d_model, d_model, bias=False)
        nn.init.kaiming_normal_(self.V.weight, nonlinearity="relu")
        self.B = Orthogonal(d_model, matrix_map=matrix_map, init=init, base=base, rebase_every=rebase_every)
        self.b = nn.Parameter(torch.empty(d_model).uniform_(-0.01, 0.01))

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return h of every step, and the last h (b, d_model)."""

        def cell(h: Tensor, Vx: Tensor, B: Tensor, b: Tensor) -> Tensor:
            return modrelu(Vx + h @ B, b)

        parameters = self.B(), self.b
        return self.nonlinear_scan(cell, self.V(x), parameters, state=state, reset=reset)
