"""nnRNN: Non-normal Recurrent Neural Network (Kerg and others, 2019).

    V = P (Lambda + T) P^T
    h_t = modrelu(x_t U + h_{t-1} V)
    modrelu(u) = sign(u) relu(|u| + b)

x is the input, t time, h the hidden state and output, both rows, U an input matrix, P orthogonal and b a bias
per channel. Lambda has blocks alpha [[cos theta, -sin theta], [sin theta, cos theta]] along its diagonal, and
T learned numbers above these blocks. V is a Schur decomposition: its eigenvalues are alpha e^(+- i theta)
for any T. T makes V non-normal: states may grow for some steps although no eigenvalue is above 1.
"""

import math

import torch
from torch import Tensor, nn

from linrec.nn.activations import modrelu
from linrec.nn.added_loss import with_loss
from linrec.nn.cells import NonlinearMixer
from linrec.nn.mixer import State
from linrec.nn.orthogonal import Orthogonal, SkewInit
from linrec.nn.parameters import mark
from linrec.ops.core.precision import without_autocast
from linrec.rules import at_least, require

__all__ = ["NNRNN"]


class NNRNN(NonlinearMixer):
    """h_t = modrelu(x_t U + h_{t-1} P (Lambda + T) P^T): a matrix that may be far from normal.

    | task of the released code | arguments |
    |---|---|
    | copying, 128 channels; Penn Treebank, 1024 channels | `delta=1e-4` |
    | sequential MNIST, 512 channels | `delta=0.1` |

    P = exp(A - A^T). alpha starts at 1, theta uniform in [0, 2 pi], T at zero, U with Xavier's normal, and b
    uniform in [-0.01, 0.01]: V starts orthogonal. A, theta and alpha are in group "transition" without weight
    decay. T has weight decay. The paper trains A alone with a smaller learning rate.

    The released code differs in details. Its T has numbers within the blocks too, which change eigenvalues:
    `corners=True`. Half of its angles are unused. A starts in uninitialised memory there, whatever
    initialisation is chosen.

    V starts without contraction, so Newton's method needs many iterations.

    Args:
        d_model: width of the sequence and of the state; even.
        init: of A, "cayley" or "henaff"; see `linrec.nn.orthogonal.Orthogonal`.
        corners: whether a learned number is added to the upper right entry of every block of Lambda.
        delta: weight of a loss delta sum (alpha - 1)^2, whose gradient joins every backward pass in training.
        mode: mode of `linrec.ops.nonlinear_scan`; "auto" is the loop.

    Raises:
        ValueError: an odd `d_model`, a negative `delta`, or an unknown name.

    Source:
        Kerg and others, Non-normal Recurrent Neural Network (nnRNN): learning long time dependencies while
        improving expressivity with transient dynamics (2019), and the released code, KyleGoyette/nnRNN.

    Example:
        >>> mixer = NNRNN(64)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 64]))
    """

    def __init__(
        self,
        d_model: int,
        *,
        init: SkewInit = "cayley",
        corners: bool = False,
        delta: float = 0.0,
        mode: str = "auto",
    ) -> None:
        super().__init__(d_model, mode)
        require(
            d_model % 2 == 0, f"`d_model` must be even, for Lambda has blocks of 2 channels; got {d_model}."
        )
        at_least(0, delta=delta)
        self.delta = delta

        n = d_model // 2
        self.U = nn.Linear(d_model, d_model, bias=False)
        nn.init.xavier_normal_(self.U.weight)
        self.P = Orthogonal(d_model, init=init)
        self.theta = nn.Parameter(torch.empty(n).uniform_(0, math.tau))
        self.alpha = nn.Parameter(torch.ones(n))
        mark(self, "theta", "alpha", float32=True)
        # blocks (i, j) with i < j
        self.T = nn.Parameter(torch.zeros(n * (n - 1) // 2, 2, 2))
        self.corners = nn.Parameter(torch.zeros(n)) if corners else None
        self.b = nn.Parameter(torch.empty(d_model).uniform_(-0.01, 0.01))

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return h of every step, and the last h (b, d_model)."""

        def cell(h: Tensor, Ux: Tensor, V: Tensor, b: Tensor) -> Tensor:
            return modrelu(Ux + h @ V, b)

        with without_autocast(x.device.type):
            P = self.P()
            V = P @ self._schur() @ P.mT
        h, state = self.nonlinear_scan(cell, self.U(x), (V, self.b), state=state, reset=reset)
        if self.delta and self.training and torch.is_grad_enabled():
            h = with_loss(h, self.delta * (self.alpha - 1).square().sum())
        return h, state

    def _schur(self) -> Tensor:
        """Return Lambda + T."""
        n = len(self.alpha)
        cos, sin = self.alpha * self.theta.cos(), self.alpha * self.theta.sin()
        corner = -sin if self.corners is None else self.corners - sin
        Lambda = torch.stack([cos, corner, sin, cos], -1).unflatten(-1, (2, 2))
        i, j = torch.triu_indices(n, n, 1, device=cos.device)
        k = torch.arange(n, device=cos.device)
        blocks = Lambda.new_zeros(n, n, 2, 2)
        blocks = blocks.index_put((i, j), self.T.to(Lambda.dtype)).index_put((k, k), Lambda)
        return blocks.transpose(1, 2).reshape(2 * n, 2 * n)
