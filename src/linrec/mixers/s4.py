"""S4: Efficiently Modeling Long Sequences with Structured State Spaces (Gu, Goel and Ré, 2022).

    A = diag(Lambda) - P P^*     Lambda = -exp(A_log) + i A_imag
    Abar = (I - dt/2 A)^-1 (I + dt/2 A)     Bbar = (I - dt/2 A)^-1 dt B
    x_t = Abar x_{t-1} + Bbar u_t     y_t = 2 Re(C x_t) + D u_t
    o_t = W GELU(y_t) + b

u input of a channel, x state with one entry of each conjugate pair, y output of the channel, o output of the
layer; Lambda and P the normal and the low-rank part of A, B a column, C a row, D a number and dt the step
size, all per channel. As a convolution, y = K * u + D u with K_l = 2 Re(C Abar^l Bbar). That P stands at both
sides and that the real part of Lambda is negative keeps A stable: SaShiMi (Goel, Gu, Donahue and Ré, 2022).
"""

import math
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Complex, Float
from torch import Tensor, nn

from linrec.errors import unknown
from linrec.hippo import StateSpace, discretize, normal_plus_low_rank
from linrec.nn.mixer import Mixer, State
from linrec.nn.parameters import mark
from linrec.nn.position_wise import Output, make_output, position_wise
from linrec.nn.state_space import log_steps
from linrec.ops.dense_ssm import dense_ssm
from linrec.ops.dplr_ssm import OPERATOR, dplr_ssm
from linrec.ops.inspection import kernel_mixing
from linrec.ops.long_conv import discretize_diagonal

__all__ = ["S4"]

Measure = Literal["legs", "legt", "fout"]
Discretization = Literal["bilinear", "zoh"]

# the normal parts of "legt" and "fout" do not decay, and have no logarithm
SMALLEST_DECAY = 1e-4


class LowRank(NamedTuple):
    """What `linrec.ops.dplr_ssm` takes."""

    a: Complex[Tensor, "d n"]
    p: Complex[Tensor, "d n r"]
    q: Complex[Tensor, "d n r"]
    b: Complex[Tensor, "d n"]
    c: Complex[Tensor, "d n"]


class S4(Mixer):
    """x_t = Abar x_{t-1} + Bbar u_t, y_t = 2 Re(C x_t) + D u_t with A normal plus low rank, then GELU and W.

    Trained as a convolution and streamed as a recurrence, which are the same numbers: `mode` chooses. After
    the bilinear transform Abar is diagonal plus low rank again, and `linrec.ops.dplr_ssm` runs it: a step
    costs N numbers a channel, and the kernel, exact for any length, is the one that
    `linrec.ops.cauchy_kernel` makes from its spectrum. With "zoh" Abar is a whole matrix, and
    `linrec.ops.dense_ssm` runs it.

    The state is kept as real numbers, the real parts of all entries and then the imaginary ones. In these, A
    has the symmetric part diag(Re Lambda) - 2 P P^T, which is negative: A and every discretisation are stable
    whatever is learned.

    | the paper's ablation | argument |
    |---|---|
    | A, B and the steps stay where they start | `learn_transition=False` |

    A and B start as HiPPO's, in the basis where its normal part is diagonal; C is normal with variance 1, D
    normal, and steps are log-uniform. A, B and the steps are marked as group "transition" without weight
    decay.

    Args:
        d_model: width of the sequence, and channels.
        d_state: N, numbers of the real state of each channel; even.
        init: measure of HiPPO that A and B start from, "legs", "legt" or "fout".
        discretization: "bilinear" or "zoh".
        dt_min: smallest step size when training starts.
        dt_max: largest step size when training starts.
        learn_transition: whether A, B and the steps are learned.
        activation: whether y goes through GELU.
        output: "linear", "glu" or "none", what mixes the channels at the end. Later releases have "glu".
        mode: "auto", "convolution" or "recurrent".

    Raises:
        ValueError: an unknown name, a `d_state` that is odd or not positive, or a step size that is not
            positive.

    Source:
        S4 (Gu, Goel and Ré, 2022); SaShiMi (Goel et al., 2022) for the stable form; How to Train Your HiPPO
        (Gu, Johnson, Timalsina, Rudra and Ré, 2022) for "legt" and "fout".

    Example:
        >>> import torch
        >>> mixer = S4(16, d_state=8)
        >>> y, state = mixer(torch.zeros(2, 50, 16))
        >>> y.shape, state.shape, state.dtype
        (torch.Size([2, 50, 16]), torch.Size([2, 16, 8]), torch.float32)
    """

    dt_log: Tensor
    A_log: Tensor
    A_imag: Tensor
    P: Tensor
    B: Tensor

    def __init__(
        self,
        d_model: int,
        *,
        d_state: int = 64,
        init: Measure = "legs",
        discretization: Discretization = "bilinear",
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        learn_transition: bool = True,
        activation: bool = True,
        output: Output = "linear",
        mode: str = "auto",
    ) -> None:
        super().__init__(d_model)
        # `dense_ssm` has the same modes
        OPERATOR.check_mode(mode)
        if init not in ("legs", "legt", "fout"):
            raise unknown("initialisation `init`", init, ["legs", "legt", "fout"])
        if discretization not in ("bilinear", "zoh"):
            raise unknown("discretization", discretization, ["bilinear", "zoh"])
        if d_state < 1 or d_state % 2:
            raise ValueError(
                f"`d_state` must be a positive even number, of conjugate pairs; got {d_state}. "
                f"Pass {max(2, d_state + d_state % 2)}."
            )
        self.discretization, self.mode = discretization, mode
        self.activation, self.output = activation, output

        steps = log_steps(d_model, dt_min, dt_max)
        Lambda, P, B, _ = normal_plus_low_rank(init, d_state)
        of_all_channels = {
            "A_log": (-Lambda.real).clamp(min=SMALLEST_DECAY).log(),
            "A_imag": Lambda.imag,
            "P": torch.view_as_real(P),
            "B": torch.view_as_real(B),
        }
        start = {"dt_log": steps} | {
            name: tensor.to(steps.dtype).expand(d_model, *tensor.shape).clone()
            for name, tensor in of_all_channels.items()
        }
        for name, tensor in start.items():
            if learn_transition:
                self.register_parameter(name, nn.Parameter(tensor))
                mark(self, name, group="transition", weight_decay=False)
            else:
                self.register_buffer(name, tensor)
        self.keep_float32(*start)
        # of variance 1, half in either part
        self.C = nn.Parameter(torch.randn(*self.B.shape) / math.sqrt(2))
        # of single channels, not a matrix
        mark(self, "C", group="channel", weight_decay=True)
        self.D = nn.Parameter(torch.randn(d_model))
        self.out = make_output(output, d_model, d_model)

    def forward(
        self,
        x: Float[Tensor, "b t d_model"],
        state: State = None,
        *,
        reset: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b t d_model"], Tensor]:
        """Mix `x` over time; see `Mixer.forward`. The state is x of the equations, (b, d_model, N), real."""
        self.check_input(x, reset, state)
        y, state = self._run(x, state, reset)
        y = y + self.D.to(y.dtype) * x
        o = position_wise(y, self.out, output=self.output, activation=self.activation)
        return o, state

    def discrete(self) -> tuple[Float[Tensor, "d n n"], Float[Tensor, "d n"], Float[Tensor, "d n"]]:
        """Abar, Bbar and 2 C of the real system x_t = Abar x_{t-1} + Bbar u_t, y_t = 2 C x_t."""
        dtype = self._state_dtype()
        real, imaginary = (torch.diag_embed(x.to(dtype)) for x in (-self.A_log.exp(), self.A_imag))
        normal = torch.cat([torch.cat([real, -imaginary], -1), torch.cat([imaginary, real], -1)], -2)
        # P^* x of both entries of a pair is twice the real part of one
        P = torch.cat(self.P.to(dtype).unbind(-1), 1)
        A = normal - 2 * P @ P.mT
        B = torch.cat(self.B.to(dtype).unbind(-1), -1)
        C_real, C_imag = self.C.to(dtype).unbind(-1)
        Abar, Bbar = discretize(StateSpace(A, B), self.dt_log.to(dtype).exp(), self.discretization)
        return Abar, Bbar, 2 * torch.cat([C_real, -C_imag], -1)

    def low_rank(self) -> LowRank:
        """Abar = diag(a) - p q^T, Bbar = b and 2 C = c of the bilinear transform, one of each conjugate pair.

        With E = I - dt/2 diag(Lambda), Woodbury's identity has

            (I - dt/2 A)^-1 = E^-1 - E^-1 P (2/dt I + P^* E^-1 P)^-1 P^* E^-1     Abar = 2 (I - dt/2 A)^-1 - I
        """
        dtype = self._state_dtype()
        P, B, C = (torch.view_as_complex(x.to(dtype)) for x in (self.P, self.B, self.C))
        dt = self.dt_log.to(dtype).exp()
        Lambda = torch.complex(-self.A_log.to(dtype).exp(), self.A_imag.to(dtype))
        a, b = discretize_diagonal(Lambda, B, dt[:, None], "bilinear")
        left, right = (x / (1 - dt[:, None, None] / 2 * Lambda[..., None]) for x in (P, P.conj()))
        # P^* x of both entries of a pair is twice the real part of one
        inner = 2 * (P.conj()[..., None] * left[:, :, None]).sum(1).real
        inner = inner + torch.diag_embed((2 / dt)[:, None].expand(-1, P.shape[-1]))
        # the inverse on the right of E^-1 P, by a sum that autocast does not round
        left = (left[..., None] * torch.linalg.inv_ex(inner).inverse[:, None]).sum(-2)
        b = b - dt[:, None] * (left * 2 * (right * B[..., None]).sum(1, keepdim=True).real).sum(-1)
        return LowRank(a, 2 * left, 2 * right, b, 2 * C)

    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> Tensor:
        """Zeros (batch, d_model, N)."""
        device = self.D.device if device is None else device
        shape = (batch, self.d_model, 2 * self.A_log.shape[1])
        return torch.zeros(shape, dtype=self._state_dtype(), device=device)

    @property
    def state_size(self) -> int:
        """Numbers of x: d_model N."""
        return 2 * self.A_log.numel()

    def token_mixing(
        self, x: Float[Tensor, "b t d_model"], *, reset: Bool[Tensor, "b t"] | None = None
    ) -> Float[Tensor, "b t t"]:
        """Mean over channels of |K_(n - m)|, of the kernel without D."""
        impulse = torch.zeros(1, x.shape[1], self.d_model, dtype=self._state_dtype(), device=x.device)
        impulse[:, :1] = 1
        kernel, _ = self._run(impulse, None, None)
        return kernel_mixing(kernel[0].mT, x, reset)

    def _run(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, Tensor]:
        if self.discretization == "zoh":
            # an exponential of A is not diagonal plus low rank
            Abar, Bbar, C = self.discrete()
            y, state = dense_ssm(x, Abar, Bbar, C[:, None], state=state, reset=reset, mode=self.mode)
            return y.squeeze(-1), state
        if state is not None:
            state = torch.complex(*state.to(self._state_dtype()).chunk(2, -1))
        y, state = dplr_ssm(x, *self.low_rank(), state=state, reset=reset, mode=self.mode)
        return y, torch.cat([state.real, state.imag], -1)
