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
from torch import Tensor, nn
from torch.nn import functional

from linrec.nn.mixer import Mixer, State
from linrec.nn.parameters import mark
from linrec.nn.state_space import add_transition, log_steps
from linrec.ops.diagonal_ssm import diagonal_ssm
from linrec.rules import at_least

__all__ = ["DLR"]

Kernel = Literal["real", "prod"]
Angles = Literal["even", "normal"]

# complex numbers of a state; "prod" has fewer, since its states are products of pairs
STATES = {"real": 256, "prod": 22}


class DLR(Mixer):
    """x_t = lambda * x_{t-1} + u_t, y_t = Re(w x_t) + D u_t per channel, then GELU and a projection.

    Entries of lambda start next to the unit circle, evenly around it: -log |lambda| = dt / 2 with dt
    log-uniform, and angles 2 pi n / N, the frequencies of Fourier's transform of N steps. The taps of a
    kernel are free over about N steps. The released code has N = 1024, and 4096 for very long sequences.
    Parts of w are normal with deviation 1 / N, and D is normal. |lambda| never exceeds 1.

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
        Gupta, Mehta and Berant (2022); the initial lambda and w, and the parameters without weight decay,
        come from the released code.

    Example:
        >>> mixer = DLR(16, d_state=8)
        >>> y, state = mixer(torch.zeros(2, 50, 16))
        >>> y.shape, state.shape, state.dtype
        (torch.Size([2, 50, 16]), torch.Size([2, 16, 8]), torch.complex64)
    """

    recurrence = "diagonal_ssm"

    r: Tensor
    theta: Tensor

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
        diagonal_ssm.operator.check_mode(mode)
        at_least(1, d_state=d_state, or_none=True)
        N = STATES[kernel] if d_state is None else d_state
        self.d_state = N if kernel == "real" else N * (N + 1) // 2
        self.kernel, self.mode = kernel, mode
        r = torch.sqrt(log_steps(N, dt_min, dt_max).exp() / 2)
        circle = 2 * math.pi * torch.arange(N, dtype=r.dtype) / N
        add_transition(self, r=r, theta=circle if angles == "even" else torch.randn(N))
        self.w = nn.Parameter(torch.randn(d_model, N, 2) / N)
        # of single channels, not a matrix
        mark(self, "w", group="channel", weight_decay=False)
        self.D = nn.Parameter(torch.randn(d_model))
        self.out = nn.Linear(d_model, d_model)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return o, and x of the equations (b, d_model, N), complex; with "prod", x of pairs of entries."""
        u, dtype = x, self.state_dtype
        lam = torch.polar(torch.exp(-self.r.to(dtype).square()), self.theta.to(dtype))
        w = torch.view_as_complex(self.w.to(dtype))
        if self.kernel == "prod":
            # Im(z^2) / 2 = Re(-i z^2 / 2), whose sum has every pair n < m twice
            n, m = torch.triu_indices(len(lam), len(lam), device=lam.device)
            lam, w = lam[n] * lam[m], w[:, n] * w[:, m] * torch.where(n == m, -0.5j, -1j).to(w)
        lam = lam[None]
        y, state = diagonal_ssm(u, lam, torch.ones_like(lam), w, state=state, reset=reset, mode=self.mode)
        y = y + self.D.to(y.dtype) * u
        return self.out(functional.gelu(y)), state
