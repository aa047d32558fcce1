"""LSSL: Linear State-Space Layers (Gu, Johnson, Goel, Saab, Dao, Rudra and Ré, 2021).

    A = (S - S^T) / 2 - P P^T - mu I
    Abar = (I - dt/2 A)^-1 (I + dt/2 A)     Bbar = (I - dt/2 A)^-1 dt B
    x_t = Abar x_{t-1} + Bbar u_t     y_t = C x_t + D u_t
    o_t = W GELU(y_t) + b

u input of a channel, x its state, y its M outputs, o output of the layer, which mixes all outputs of all
channels; A and B shared by the channels, C, D and the step size dt of each channel's own. As a convolution,
y = K * u + D u with K_l = C Abar^l Bbar.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from linrec.hippo import Measure, StateSpace, discretize, matrices
from linrec.hippo.measures import low_rank
from linrec.nn.channel_mixing import Output, PositionWise
from linrec.nn.mixer import Mixer, State
from linrec.nn.parameters import Float32Module, mark
from linrec.nn.state_space import add_transition, log_steps
from linrec.ops.dense_ssm import dense_ssm
from linrec.rules import COUNT, at_least, choice

__all__ = ["LSSL", "QuasiSeparable"]

Transition = Literal["stable", "quasi_separable"]
# of the quasi-separable matrices
MEASURES = ("legs", "legt", "lagt")


class LSSL(Mixer):
    """x_t = Abar x_{t-1} + Bbar u_t, y_t = C x_t + D u_t per channel with a whole matrix A, then GELU and W.

    The layer is trained as a convolution and streamed as a recurrence; `mode` chooses, see
    `linrec.ops.dense_ssm`. A step costs N^2 per channel, and the kernel is made from powers of A; S4 and S4D
    are cheaper.

    | the paper's variant | argument |
    |---|---|
    | LSSL, with a stable A | the defaults: A, B and dt are learned |
    | LSSL, with the paper's family of matrices | `transition="quasi_separable"` |
    | LSSL-fixed | `learn_transition=False`: A and dt stay HiPPO's |
    | other measures | `measure`, see `linrec.hippo.matrices` |
    | M outputs per channel | `n_outputs` |

    A starts as HiPPO's, B too, C normal with variance 1, D normal, and dt log-uniform. All of HiPPO's
    matrices are a skew-symmetric one minus P P^T and mu I; while S and P are learned, A keeps this form, and
    states never grow by themselves: |Abar x| <= |x| for any dt. The paper and its code learn within another
    family of matrices, with fewer numbers, which need not be stable: `QuasiSeparable`.

    Args:
        d_model: width of the sequence, and channels.
        d_state: N, numbers of the state of each channel.
        measure: "legs", "legt", "lagt" or "fout", where A and B start.
        n_outputs: M.
        learn_transition: whether A and dt are learned. Without, B is learned beside a "stable" A alone; the
            released code leaves B as it starts.
        transition: the family that A is learned in, "stable", or "quasi_separable", the paper's, for "legs",
            "legt" and "lagt".
        dt_min: smallest step size when training starts.
        dt_max: largest step size when training starts.
        activation: whether y goes through GELU.
        output: "linear", "glu" or "none", the map that mixes the channels at the end; "none" needs
            `n_outputs=1`.
        mode: "auto", "convolution" or "recurrent".

    Raises:
        ValueError: an unknown name, a size below 1, step sizes without 0 < dt_min <= dt_max, or several
            outputs that nothing mixes.

    Source:
        LSSL (Gu, Johnson, Goel, Saab, Dao, Rudra and Ré, 2021).

    Example:
        >>> mixer = LSSL(16, d_state=8)
        >>> y, state = mixer(torch.zeros(2, 50, 16))
        >>> y.shape, state.shape
        (torch.Size([2, 50, 16]), torch.Size([2, 16, 8]))
    """

    recurrence = "dense_ssm"

    S: Tensor
    P: Tensor
    B: Tensor
    dt_log: Tensor

    def __init__(
        self,
        d_model: int,
        *,
        d_state: int = 64,
        measure: Measure = "legs",
        n_outputs: int = 1,
        learn_transition: bool = True,
        transition: Transition = "stable",
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        activation: bool = True,
        output: Output = "linear",
        mode: str = "auto",
    ) -> None:
        super().__init__(d_model)
        dense_ssm.operator.check_mode(mode)
        at_least(1, most=COUNT, d_state=d_state, n_outputs=n_outputs)
        self.d_state, self.measure, self.mode = d_state, measure, mode

        dt_log = log_steps(d_model, dt_min, dt_max)
        self.quasi_separable: QuasiSeparable | None = None
        if transition == "quasi_separable":
            self.quasi_separable = QuasiSeparable(measure, d_state, learn=learn_transition)
            add_transition(self, learn=learn_transition, dt_log=dt_log)
        else:
            A, B = matrices(measure, d_state)
            S, P = (A - A.mT) / 2, low_rank(measure, d_state)
            self.mu = 0.5 if measure == "legs" else 0.0
            add_transition(self, learn=learn_transition, S=S.to(dt_log), P=P.to(dt_log), dt_log=dt_log)
            add_transition(self, B=B.to(dt_log))
        self.C = nn.Parameter(torch.randn(d_model, n_outputs, d_state))
        self.D = nn.Parameter(torch.randn(d_model, n_outputs))
        # numbers of single channels, not a matrix
        mark(self, "C", "D", group="channel", weight_decay=True)
        self.out = PositionWise(d_model, output=output, n_outputs=n_outputs, activation=activation)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return o, and x of the equations (b, d_model, N)."""
        u, dtype = x, self.state_dtype
        if self.quasi_separable is not None:
            A, B = self.quasi_separable()
        else:
            S, P, B = (part.to(dtype) for part in (self.S, self.P, self.B))
            # no product of matrices, which autocast would round
            decay = (P[:, None] * P).sum(-1) + self.mu * torch.eye(self.d_state, dtype=dtype, device=P.device)
            A = (S - S.mT) / 2 - decay
        Abar, Bbar = discretize(StateSpace(A, B), self.dt_log.to(dtype).exp(), "bilinear")
        y, state = dense_ssm(u, Abar, Bbar, self.C.to(dtype), state=state, reset=reset, mode=self.mode)
        y = (y + self.D.to(y.dtype) * u[..., None]).flatten(-2)
        return self.out(y), state


class QuasiSeparable(Float32Module):
    """A = -diag(p) (T^-1 + diag(c)) diag(q) and B = p * b, with T tridiagonal: 7 N - 2 numbers.

    It starts as HiPPO's A and B. Nothing keeps a learned A stable.

    Args:
        measure: "legs", "legt" or "lagt", where A and B start.
        d_state: N.
        learn: whether all of the numbers are learned, in group "transition" without weight decay.

    Raises:
        ValueError: an unknown measure, or one whose matrix is not of this form.

    Source:
        LSSL (Gu, Johnson, Goel, Saab, Dao, Rudra and Ré, 2021), its quasiseparable matrices; they start as in
        the released code.

    Example:
        >>> A, B = QuasiSeparable("lagt", 3)()
        >>> A[:, 0].tolist(), B.tolist()
        ([-0.5, -1.0, -1.0], [1.0, 1.0, 1.0])
    """

    lower: Tensor
    diagonal: Tensor
    upper: Tensor
    c: Tensor
    p: Tensor
    q: Tensor
    b: Tensor

    def __init__(self, measure: Measure, d_state: int, *, learn: bool = True) -> None:
        super().__init__()
        choice(MEASURES, measure=measure)
        A, p = matrices(measure, d_state)
        one = torch.ones_like(p)
        if measure == "legt":
            # the inverse has ones below the diagonal, and signs in turn above it
            diagonal, lower, upper = torch.zeros_like(p), -one[1:] / 2, one[1:] / 2
            diagonal[0] += 0.5
            diagonal[-1] += 0.5
        else:
            # the inverse has ones below the diagonal
            diagonal, lower, upper = one, -one[1:], torch.zeros_like(p[1:])
        start = {"lower": lower, "diagonal": diagonal, "upper": upper, "p": p, "q": p, "b": one}
        start["c"] = -A.diagonal() / p**2 - 1
        dtype = torch.get_default_dtype()
        add_transition(self, learn=learn, **{name: part.to(dtype, copy=True) for name, part in start.items()})

    def forward(self) -> StateSpace:
        """Return A (N, N) and B (N,), in float32 or better."""
        T = self.diagonal.diag() + self.lower.diag(-1) + self.upper.diag(1)
        # without the check that waits for a GPU
        inverse, _ = torch.linalg.inv_ex(T)
        return StateSpace(-self.p[:, None] * (inverse + self.c.diag()) * self.q, self.p * self.b)
