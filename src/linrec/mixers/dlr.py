"""DLR: Simplifying and Understanding State Space Models with Diagonal Linear RNNs (Gupta and others, 2022).

    lambda_n = exp(-r_n^2 + i theta_n)
    x_t = lambda * x_{t-1} + u_t     y_t = Re(sum_n w_n x_tn) + D u_t
    o_t = W GELU(y_t) + b

u input of a channel, x its state, y its output, o output of the layer, t time; lambda is the same for all
channels, w a row and D a number per channel. Nothing is discretised: it is a linear recurrent network as it
stands. As a convolution, y = K * u + D u with K_l = Re(z_l), z_l = sum_n w_n lambda_n^l. The variant DLR-prod
has K_l = Re(z_l) Im(z_l).
"""

import math
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from linrec.errors import unknown
from linrec.nn.mixer import Mixer, State, Transitions
from linrec.nn.parameters import mark
from linrec.nn.state_space import log_steps
from linrec.ops.diagonal_ssm import OPERATOR, diagonal_ssm
from linrec.ops.inspection import kernel_mixing
from linrec.ops.long_conv import vandermonde_kernel

__all__ = ["DLR"]

Kernel = Literal["real", "prod"]
Angles = Literal["even", "normal"]

# complex numbers of a state, and what keeps products of pairs of them as few
STATES = {"real": 256, "prod": 22}


class DLR(Mixer):
    """x_t = lambda * x_{t-1} + u_t, y_t = Re(w x_t) + D u_t per channel, then GELU and a projection.

    Entries of lambda start next to the unit circle, evenly around it: -log |lambda| = dt / 2 with dt
    log-uniform, and angles 2 pi n / N, the frequencies of Fourier's transform of N steps. So N is also about
    how many steps the taps of a kernel can be chosen freely over: the released code has 1024, and 4096 for
    very long sequences. Parts of w are normal with deviation 1 / N, and D is normal. No |lambda| gets above
    1, whatever is learned.

    | the paper's variant | argument |
    |---|---|
    | DLR, DLR-prod | `kernel="real"`, "prod" |
    | angles at random | `angles="normal"` |

    With "prod", Re(z_l) Im(z_l) = Im(z_l^2) / 2 is a sum over pairs of entries with the powers of
    lambda_n lambda_m, so that the recurrence has N (N + 1) / 2 complex numbers for each channel.

    Lambda is marked as group "transition", and neither it nor w has weight decay.

    Args:
        d_model: width of the sequence, and channels.
        d_state: N. None is 256, and 22 with "prod", whose states have 253 then.
        kernel: "real" or "prod".
        angles: where theta starts, "even" or "normal".
        dt_min: smallest dt when training starts.
        dt_max: largest dt when training starts.
        mode: "auto", "convolution", "recurrent" or "scan"; see `linrec.ops.diagonal_ssm`.

    Raises:
        ValueError: an unknown name, a `d_state` below 1, or step sizes without 0 < dt_min <= dt_max.

    Source:
        Gupta, Mehta and Berant (2022); where lambda and w start, and what has no weight decay, is the
        released code's.

    Example:
        >>> import torch
        >>> mixer = DLR(16, d_state=8)
        >>> y, state = mixer(torch.zeros(2, 50, 16))
        >>> y.shape, state.shape, state.dtype
        (torch.Size([2, 50, 16]), torch.Size([2, 16, 8]), torch.complex64)
    """

    def __init__(
        self,
        d_model: int,
        *,
        d_state: int | None = None,
        kernel: Kernel = "real",
        angles: Angles = "even",
        dt_min: float = 0.0001,
        dt_max: float = 0.1,
        mode: str = "auto",
    ) -> None:
        super().__init__(d_model)
        OPERATOR.check_mode(mode)
        if kernel not in STATES:
            raise unknown("`kernel`", kernel, STATES)
        if angles not in ("even", "normal"):
            raise unknown("`angles`", angles, ["even", "normal"])
        d_state = STATES[kernel] if d_state is None else d_state
        if d_state < 1:
            raise ValueError(f"`d_state` must be at least 1; got {d_state}.")
        self.kernel, self.mode = kernel, mode
        self.r = nn.Parameter(torch.sqrt(log_steps(d_state, dt_min, dt_max).exp() / 2))
        circle = 2 * math.pi * torch.arange(d_state, dtype=self.r.dtype) / d_state
        self.theta = nn.Parameter(circle if angles == "even" else torch.randn(d_state))
        for name in ("r", "theta"):
            mark(self, name, group="transition", weight_decay=False)
        self.keep_float32("r", "theta")
        self.w = nn.Parameter(torch.randn(d_model, d_state, 2) / d_state)
        # of single channels, not a matrix
        mark(self, "w", group="channel", weight_decay=False)
        self.D = nn.Parameter(torch.randn(d_model))
        self.out = nn.Linear(d_model, d_model)

    def forward(
        self,
        x: Float[Tensor, "b t d_model"],
        state: State = None,
        *,
        reset: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b t d_model"], Tensor]:
        """Mix `x` over time; see `Mixer.forward`.

        The state is x of the equations, (b, d_model, N); with "prod" that of pairs, N (N + 1) / 2.
        """
        self.check_input(x, reset, state)
        a, w = self._discrete()
        y, state = diagonal_ssm(x, a, torch.ones_like(a), w, state=state, reset=reset, mode=self.mode)
        y = y + self.D.to(y.dtype) * x
        return self.out(functional.gelu(y)), state

    def _discrete(self) -> tuple[Tensor, Tensor]:
        """What x is multiplied by at each step, (1, n), and what by for the output, (d_model, n).

        These are lambda and w; with "prod", products of pairs n <= m, lambda_n lambda_m and, as Im(z^2) / 2
        has it, -i w_n w_m, one half of that where n = m.
        """
        dtype = self._state_dtype()
        lam = torch.polar(torch.exp(-self.r.to(dtype).square()), self.theta.to(dtype))
        w = torch.view_as_complex(self.w.to(dtype))
        if self.kernel == "prod":
            n, m = torch.triu_indices(len(lam), len(lam), device=lam.device)
            lam, w = lam[n] * lam[m], w[:, n] * w[:, m] * torch.where(n == m, -0.5j, -1j).to(w)
        return lam[None], w

    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> Tensor:
        """Zeros (batch, d_model, n), complex."""
        device = self.D.device if device is None else device
        shape = (batch, self.d_model, self.state_size // self.d_model)
        return torch.zeros(shape, dtype=self._state_dtype().to_complex(), device=device)

    @property
    def state_size(self) -> int:
        """Elements of the state, d_model n, counting a complex number once: n is N, or N (N + 1) / 2."""
        N = len(self.r)
        return self.d_model * (N if self.kernel == "real" else N * (N + 1) // 2)

    def transitions(self, x: Float[Tensor, "b t d_model"]) -> Transitions:
        """Lambda, or its products, of all channels, constant in time; see `Mixer.transitions`."""
        a, w = self._discrete()
        a = a.expand_as(w).flatten()
        return Transitions(a.abs(), a.angle())

    def token_mixing(
        self, x: Float[Tensor, "b t d_model"], *, reset: Bool[Tensor, "b t"] | None = None
    ) -> Float[Tensor, "b t t"]:
        """Mean over channels of |K_(n - m)|, without D."""
        a, w = self._discrete()
        return kernel_mixing(vandermonde_kernel(a.expand_as(w), w, x.shape[1]), x, reset)
