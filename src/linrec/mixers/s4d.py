"""S4D: Parameterization and Initialization of Diagonal State Space Models (Gu, Gupta, Goel and Ré, 2022).

    A = -exp(A_log) + i A_imag
    Abar = exp(dt A)     Bbar = (exp(dt A) - 1) / A * B
    x_t = Abar * x_{t-1} + Bbar u_t     y_t = 2 Re(C x_t) + D u_t
    o_t = GLU(W GELU(y_t) + b)

u input of a channel, x state with one entry of each conjugate pair, y output of the channel, o output of the
layer; A diagonal, B a column, C a row, D a number and dt the step size, all per channel. As a convolution,
y = K * u + D u with K_l = 2 Re(sum_n C_n Bbar_n Abar_n^l).
"""

from torch import Tensor

from linrec.nn.channel_mixing import Output, PositionWise
from linrec.nn.mixer import Mixer, State
from linrec.nn.state_space import DiagonalSSM, Spectrum, Start
from linrec.ops.diagonal_ssm import diagonal_ssm
from linrec.ops.long_conv import Discretization

__all__ = ["S4D"]


class S4D(Mixer):
    """x_t = Abar * x_{t-1} + Bbar u_t, y_t = 2 Re(C x_t) + D u_t per channel, then GELU and a gated unit.

    The layer is trained as a convolution and streamed as a recurrence, with the same results. `mode` chooses
    between them, for tests and measurements; see `linrec.ops.diagonal_ssm`.

    With irregular steps, `dt` is a factor of the step sizes. A convolution has one step size, so the layer
    then runs as a recurrence with Abar and Bbar of every step, and refuses `mode="convolution"`. That takes
    memory for n numbers for each step and channel.

    | the paper's variant | argument |
    |---|---|
    | S4D-Lin, S4D-Inv, S4D-LegS | `init="lin"`, "inv", "legs" |
    | S4D-Real | `init="real"`: N real entries, A_n = -(n + 1) |
    | bilinear transform | `discretization="bilinear"` |
    | B not trained | `learn_b=False` |

    | the released code's | argument |
    |---|---|
    | A and B shared by channels, `n_ssm` | `n_ssm` |
    | several outputs for each channel, `channels` | `n_outputs` |
    | B of S4D-LegS clipped when training starts | `start="released"` |

    A has the paper's N / 2 = 32 pairs for each channel. B starts at one (HiPPO's with "legs"), C normal with
    variance 1, D normal, and step sizes log-uniform. A, B and the step sizes are marked as group "transition"
    without weight decay.

    Args:
        d_model: width of the sequence, and channels.
        d_state: N, numbers of the real state of each channel; even, but with "real".
        init: where A starts, "lin", "inv", "legs" or "real".
        discretization: "zoh", "bilinear" or "euler".
        dt_min: smallest step size when training starts.
        dt_max: largest step size when training starts.
        learn_b: whether B is learned.
        activation: whether y goes through GELU.
        output: "glu", "linear" or "none", the map that mixes the channels at the end.
        mode: "auto", "convolution", "recurrent" or "scan".
        n_ssm: how many A and B there are; None is `d_model`. Channel c has the A and B of index c mod
            `n_ssm`, and a C, a D and a step size of its own.
        n_outputs: outputs of each channel, with a C and a D each, which the map at the end takes to
            `d_model`.
        start: where B starts with "legs", "paper" or "released"; see `linrec.nn.state_space.released_start`.

    Raises:
        ValueError: an unknown name, a `d_state` that is odd or not positive, a step size that is not
            positive, or one that makes Euler's steps unstable; an `n_ssm` that does not divide `d_model`, or
            `n_outputs` above 1 without a map.

    Source:
        S4D (Gu et al., 2022); the layer around the models is S4's (Gu, Goel and Ré, 2022).

    Example:
        >>> import torch
        >>> mixer = S4D(16, d_state=8)
        >>> y, state = mixer(torch.zeros(2, 50, 16))
        >>> y.shape, state.shape, state.dtype
        (torch.Size([2, 50, 16]), torch.Size([2, 16, 4]), torch.complex64)
    """

    recurrence = "diagonal_ssm"
    takes_dt = True

    def __init__(
        self,
        d_model: int,
        *,
        d_state: int = 64,
        init: Spectrum = "lin",
        discretization: Discretization = "zoh",
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        learn_b: bool = True,
        activation: bool = True,
        output: Output = "glu",
        mode: str = "auto",
        n_ssm: int | None = None,
        n_outputs: int = 1,
        start: Start = "paper",
    ) -> None:
        super().__init__(d_model)
        self.ssm = DiagonalSSM(
            d_model,
            d_state=d_state,
            init=init,
            discretization=discretization,
            dt_min=dt_min,
            dt_max=dt_max,
            learn_b=learn_b,
            mode=mode,
            n_ssm=n_ssm,
            n_outputs=n_outputs,
            start=start,
        )
        self.n_outputs = n_outputs
        self.out = PositionWise(d_model, output=output, n_outputs=n_outputs, activation=activation)

    def mix(
        self, x: Tensor, state: State, reset: Tensor | None, dt: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Return o, and the state x (b, n_outputs d_model, n): complex, or real with `init="real"`."""
        # of all channels for the first output, then for the second
        u = x if self.n_outputs == 1 else x.repeat(1, 1, self.n_outputs)
        if dt is None:
            *system, D = self.ssm()
            y, state = diagonal_ssm(u, *system, state=state, reset=reset, mode=self.ssm.mode)
            y = y + D.to(y.dtype) * u
        else:
            y, state = self.ssm.irregular(u, dt, state=state, reset=reset)
        return self.out(y), state
