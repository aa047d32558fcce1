"""uRNN: Unitary Evolution Recurrent Neural Networks (Arjovsky, Shah and Bengio, 2016).

    W = D_3 R_2 F^-1 D_2 Pi R_1 F D_1
    h_t = modrelu(W h_{t-1} + V x_t)
    modrelu(z) = z relu(|z| + b) / |z|
    y_t = U [Re(h_t), Im(h_t)] + c

x is the input, t time, h the complex hidden state, y the output, V a complex and U a real matrix, b and c
biases. D are diagonal matrices with entries e^(i theta), R = I - 2 v v^* / |v|^2 reflections, F the unitary
Fourier transform and Pi a fixed permutation. W is unitary, and a product with W takes O(n log n) steps.
"""

import math

import torch
from torch import Tensor, nn

from linrec.nn.activations import complex_modrelu, to_complex, to_pairs
from linrec.nn.cells import NonlinearMixer
from linrec.nn.mixer import State
from linrec.nn.parameters import mark
from linrec.rules import at_least

__all__ = ["URNN"]


class URNN(NonlinearMixer):
    """h_t = modrelu(W h_{t-1} + V x_t), W = D_3 R_2 F^-1 D_2 Pi R_1 F D_1: a unitary matrix of 7 n numbers.

    | task of the paper | arguments |
    |---|---|
    | copying | `d_state=128` |
    | adding, sequential MNIST | `d_state=512` |

    A sequence starts from a learned h_0. The state is h - h_0, so that zeros start a sequence. modReLU
    divides by |z| + 1e-5, as in the released code, and then has a derivative at 0.

    Initial values are those of the released code: U and V with Xavier's uniform, theta uniform in [-pi, pi],
    parts of v in +- sqrt(6 / (2 + 2 d_state)), parts of h_0 in +- sqrt(3 / (2 d_state)), b in [-0.01, 0.01],
    c zero, and a random permutation. The reflections of the released code have the conjugates of v. theta
    and v are in group "transition" without weight decay.

    V, U, v and h_0 are real tensors of pairs: row 2j of `V`, column 2j of `U`, and entries 2j of `v` and
    `h_0` belong to real parts, and the next to imaginary parts.

    A state has 2 d_state real channels in `linrec.ops.nonlinear_scan`. A unitary W does not contract, so
    Newton's method needs many iterations.

    Args:
        d_model: width of the sequence.
        d_state: complex numbers of the state, n. None is `d_model`.
        mode: mode of `linrec.ops.nonlinear_scan`; "auto" is the loop.

    Raises:
        ValueError: a `d_state` below 1, or the mode does not exist.

    Source:
        Arjovsky, Shah and Bengio, Unitary Evolution Recurrent Neural Networks (2016), and the released code,
        amarshah/complex_RNN.

    Example:
        >>> mixer = URNN(64, d_state=32)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.shape, state.dtype
        (torch.Size([2, 10, 64]), torch.Size([2, 32]), torch.complex64)
    """

    permutation: Tensor

    def __init__(self, d_model: int, *, d_state: int | None = None, mode: str = "auto") -> None:
        at_least(1, d_state=d_state, or_none=True, cure="None is `d_model`.")
        n = d_model if d_state is None else d_state
        super().__init__(d_model, mode, n, is_complex=True)
        self.d_state = n
        self.V = nn.Linear(d_model, 2 * n, bias=False)
        self.U = nn.Linear(2 * n, d_model)
        nn.init.xavier_uniform_(self.V.weight)
        nn.init.xavier_uniform_(self.U.weight)
        nn.init.zeros_(self.U.bias)
        self.theta = nn.Parameter(torch.empty(3, n).uniform_(-math.pi, math.pi))
        self.v = nn.Parameter((6 / (2 + 2 * n)) ** 0.5 * torch.empty(2, 2 * n).uniform_(-1, 1))
        mark(self, "theta", "v", float32=True)
        self.register_buffer("permutation", torch.randperm(n))
        self.b = nn.Parameter(torch.empty(n).uniform_(-0.01, 0.01))
        self.h_0 = nn.Parameter((1.5 / n) ** 0.5 * torch.empty(2 * n).uniform_(-1, 1))

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return y, and h - h_0 of the last step (b, d_state)."""
        dtype = self.state_dtype
        theta, v = self.theta.to(dtype), self.v.to(dtype)
        D = torch.polar(torch.ones_like(theta), theta)
        v = to_complex(v / v.norm(dim=-1, keepdim=True))
        parameters = D, v, self.permutation, self.h_0, self.b
        moved, state = self.nonlinear_scan(self._cell, self.V(x), parameters, state=state, reset=reset)
        return self.U(moved + self.h_0.to(x.dtype)), state

    @staticmethod
    def _cell(moved: Tensor, Vx: Tensor, *parameters: Tensor) -> Tensor:
        """Return h_t - h_0 from h_{t-1} - h_0, as pairs."""
        D, v, permutation, h_0, b = parameters
        h = torch.fft.fft(D[0] * to_complex(h_0 + moved), norm="ortho")
        h = torch.fft.ifft(D[1] * _reflected(h, v[0])[:, permutation], norm="ortho")
        h = D[2] * _reflected(h, v[1])
        return to_pairs(complex_modrelu(h + to_complex(Vx), b)) - h_0


def _reflected(z: Tensor, v: Tensor) -> Tensor:
    """Return (I - 2 v v^*) z for a v of length 1."""
    return z - 2 * torch.outer(z @ v.conj(), v)
