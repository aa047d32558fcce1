"""LSSL: Linear State-Space Layers (Gu, Johnson, Goel, Saab, Dao, Rudra and Ré, 2021).

    A = (S - S^T) / 2 - P P^T - mu I
    Abar = (I - dt/2 A)^-1 (I + dt/2 A)     Bbar = (I - dt/2 A)^-1 dt B
    x_t = Abar x_{t-1} + Bbar u_t     y_t = C x_t + D u_t
    o_t = W GELU(y_t) + b

u input of a channel, x its state, y its M outputs, o output of the layer, which mixes all outputs of all
channels; A and B shared by the channels, C, D and the step size dt of each channel's own. As a convolution,
y = K * u + D u with K_l = C Abar^l Bbar.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from linrec.hippo import Measure, StateSpace, discretize, matrices
from linrec.hippo.measures import low_rank
from linrec.nn.mixer import Mixer, State
from linrec.nn.parameters import mark
from linrec.nn.position_wise import Output, make_output, position_wise
from linrec.nn.state_space import log_steps
from linrec.ops.dense_ssm import OPERATOR, dense_ssm
from linrec.ops.inspection import kernel_mixing

__all__ = ["LSSL"]


class LSSL(Mixer):
    """x_t = Abar x_{t-1} + Bbar u_t, y_t = C x_t + D u_t per channel with a whole matrix A, then GELU and W.

    Trained as a convolution and streamed as a recurrence; `mode` chooses, see `linrec.ops.dense_ssm`. It is
    what S4 and S4D make cheaper: a step costs N^2 per channel, and the kernel is made from powers of A.

    | the paper's variant | argument |
    |---|---|
    | LSSL | the defaults: A, B and dt are learned |
    | LSSL-fixed | `learn_transition=False`: A and dt stay HiPPO's |
    | other measures | `measure`, see `linrec.hippo.matrices` |
    | M outputs per channel | `n_outputs` |

    A starts as HiPPO's, B too, C normal with variance 1, D normal, and dt log-uniform. All of HiPPO's
    matrices are a skew-symmetric one minus P P^T and mu I; while S and P are learned, A stays of that form,
    whose states never grow by themselves: |Abar x| <= |x| whatever is learned, for any dt. The paper learns
    within another family of matrices around HiPPO's, of fewer numbers, which need not be stable.

    Args:
        d_model: width of the sequence, and channels.
        d_state: N, numbers of the state of each channel.
        measure: "legs", "legt", "lagt" or "fout", where A and B start.
        n_outputs: M.
        learn_transition: whether A and dt are learned.
        dt_min: smallest step size when training starts.
        dt_max: largest step size when training starts.
        activation: whether y goes through GELU.
        output: "linear", "glu" or "none", what mixes the channels at the end; "none" needs `n_outputs=1`.
        mode: "auto", "convolution" or "recurrent".

    Raises:
        ValueError: an unknown name, a size below 1, step sizes without 0 < dt_min <= dt_max, or several
            outputs that nothing mixes.

    Source:
        LSSL (Gu, Johnson, Goel, Saab, Dao, Rudra and Ré, 2021).

    Example:
        >>> import torch
        >>> mixer = LSSL(16, d_state=8)
        >>> y, state = mixer(torch.zeros(2, 50, 16))
        >>> y.shape, state.shape
        (torch.Size([2, 50, 16]), torch.Size([2, 16, 8]))
    """

    mu: float

    def __init__(
        self,
        d_model: int,
        *,
        d_state: int = 64,
        measure: Measure = "legs",
        n_outputs: int = 1,
        learn_transition: bool = True,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        activation: bool = True,
        output: Output = "linear",
        mode: str = "auto",
    ) -> None:
        super().__init__(d_model)
        OPERATOR.check_mode(mode)
        for name, size in (("d_state", d_state), ("n_outputs", n_outputs)):
            if size < 1:
                raise ValueError(f"`{name}` must be at least 1; got {size}.")
        if output == "none" and n_outputs > 1:
            raise ValueError(
                f'`output="none"` needs `n_outputs=1`; got {n_outputs}, which nothing makes d_model channels '
                'of. Choose "linear" or "glu".'
            )
        self.d_state, self.measure, self.n_outputs, self.mode = d_state, measure, n_outputs, mode
        self.activation, self.output = activation, output

        A, B = matrices(measure, d_state)
        P = low_rank(measure, d_state)
        self.mu = 0.5 if measure == "legs" else 0.0
        self.dt_log: Tensor
        self.S: Tensor
        self.P: Tensor
        dtype = torch.get_default_dtype()
        start = {
            "S": ((A - A.mT) / 2).to(dtype),
            "P": P.to(dtype),
            "dt_log": log_steps(d_model, dt_min, dt_max),
        }
        for name, tensor in start.items():
            if learn_transition:
                setattr(self, name, nn.Parameter(tensor))
                mark(self, name, group="transition", weight_decay=False)
            else:
                self.register_buffer(name, tensor)
        self.keep_float32(*start)
        self.B = nn.Parameter(B.to(dtype))
        mark(self, "B", group="transition", weight_decay=False)
        self.keep_float32("B")
        self.C = nn.Parameter(torch.randn(d_model, n_outputs, d_state))
        self.D = nn.Parameter(torch.randn(d_model, n_outputs))
        for name in ("C", "D"):
            # numbers of single channels, not a matrix
            mark(self, name, group="channel", weight_decay=True)
        self.out = make_output(output, d_model * n_outputs, d_model)

    def forward(
        self,
        x: Float[Tensor, "b t d_model"],
        state: State = None,
        *,
        reset: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b t d_model"], Tensor]:
        """Mix `x` over time; see `Mixer.forward`. The state is x of the equations, (b, d_model, N)."""
        self.check_input(x, reset, state)
        y, state = self._run(x, state, reset)
        y = (y + self.D.to(y.dtype) * x[..., None]).flatten(-2)
        o = position_wise(y, self.out, output=self.output, activation=self.activation)
        return o, state

    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> Tensor:
        """Zeros (batch, d_model, N)."""
        device = self.B.device if device is None else device
        return torch.zeros(batch, self.d_model, self.d_state, dtype=self._state_dtype(), device=device)

    @property
    def state_size(self) -> int:
        """Elements of x: d_model N."""
        return self.d_model * self.d_state

    def token_mixing(
        self, x: Float[Tensor, "b t d_model"], *, reset: Bool[Tensor, "b t"] | None = None
    ) -> Float[Tensor, "b t t"]:
        """Mean over channels and outputs of |K_(n - m)|, of the kernel without D."""
        impulse = torch.zeros(1, x.shape[1], self.d_model, dtype=self._state_dtype(), device=x.device)
        impulse[:, :1] = 1
        kernel, _ = self._run(impulse, None, None)
        return kernel_mixing(kernel[0].flatten(1).mT, x, reset)

    def system(self) -> StateSpace:
        """A (N, N) and B (N,) of all channels, in continuous time."""
        dtype = self._state_dtype()
        S, P = self.S.to(dtype), self.P.to(dtype)
        # no product of matrices, which autocast would round
        decay = (P[:, None] * P).sum(-1) + self.mu * torch.eye(self.d_state, dtype=dtype, device=P.device)
        return StateSpace((S - S.mT) / 2 - decay, self.B.to(dtype))

    def _run(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, Tensor]:
        dt = self.dt_log.to(self._state_dtype()).exp()
        A, B = discretize(self.system(), dt, "bilinear")
        return dense_ssm(x, A, B, self.C.to(A.dtype), state=state, reset=reset, mode=self.mode)
