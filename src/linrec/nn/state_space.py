"""What state-space mixers share: spectra, step sizes, and a diagonal model per channel."""

import math
from typing import Literal, TypeAlias

import torch
from jaxtyping import Bool, Float, Inexact
from torch import Tensor, nn

from linrec.errors import unknown
from linrec.hippo import diagonal
from linrec.nn.float32 import Float32Module
from linrec.nn.mixer import State, Transitions
from linrec.nn.parameters import mark
from linrec.ops.diagonal_ssm import OPERATOR, diagonal_ssm
from linrec.ops.long_conv import Discretization, discretize_diagonal, vandermonde_kernel

__all__ = ["SPECTRA", "DiagonalSSM", "Spectrum", "log_steps", "spectrum"]

Spectrum: TypeAlias = Literal["lin", "inv", "legs", "real"]
SPECTRA: tuple[Spectrum, ...] = ("lin", "inv", "legs", "real")


def spectrum(init: Spectrum, d_state: int) -> tuple[Inexact[Tensor, "n"], Inexact[Tensor, "n"]]:
    """Return A and B that a diagonal state-space model x' = A x + B u starts from, in double precision.

    | init | A_n | n |
    |---|---|---|
    | "lin" | -1/2 + i pi n | 0 .. N/2 - 1 |
    | "inv" | -1/2 + i N/pi (N / (2n + 1) - 1) | 0 .. N/2 - 1 |
    | "legs" | eigenvalues of the normal part of HiPPO-LegS, those above the real axis | N/2 |
    | "real" | -(n + 1) | 0 .. N - 1 |

    Of conjugate pairs, one each is returned. B is one, but that of "legs", which is HiPPO's in the basis of
    the eigenvectors.

    Args:
        init: "lin", "inv", "legs" or "real".
        d_state: N, numbers of the real state; even but for "real".

    Returns:
        A (n,), complex but for "real", and B (n,), real.

    Raises:
        ValueError: an unknown name, or an N that is odd or not positive.

    Source:
        S4D (Gu, Gupta, Goel and Ré, 2022), its definitions of S4D-Lin, S4D-Inv, S4D-LegS and S4D-Real.

    Example:
        >>> spectrum("lin", 6)[0].imag
        tensor([0.0000, 3.1416, 6.2832], dtype=torch.float64)
        >>> spectrum("real", 3)[0]
        tensor([-1., -2., -3.], dtype=torch.float64)
    """
    if init not in SPECTRA:
        raise unknown("initialisation `init`", init, SPECTRA)
    if d_state < 1 or (init != "real" and d_state % 2):
        raise ValueError(
            f"`d_state` must be a positive even number, of conjugate pairs; got {d_state}. "
            f'Pass {max(2, d_state + d_state % 2)}, or `init="real"`.'
        )
    if init == "real":
        A = -torch.arange(1, d_state + 1, dtype=torch.float64)
        return A, torch.ones_like(A)
    n = torch.arange(d_state // 2, dtype=torch.float64)
    if init == "legs":
        A, B, _ = diagonal("legs", d_state)
        return A, B.real
    imaginary = math.pi * n if init == "lin" else d_state / math.pi * (d_state / (2 * n + 1) - 1)
    return torch.complex(torch.full_like(n, -0.5), imaginary), torch.ones_like(n)


def log_steps(channels: int, dt_min: float, dt_max: float) -> Float[Tensor, "channels"]:
    """Draw logarithms of step sizes, uniform between those of two sizes.

    Args:
        channels: how many.
        dt_min: smallest step, above zero.
        dt_max: largest step.

    Raises:
        ValueError: step sizes without 0 < dt_min <= dt_max < infinity, or one that underflows to zero.

    Source:
        S4 (Gu, Goel and Ré, 2022), whose steps start between 0.001 and 0.1.

    Example:
        >>> log_steps(3, 1.0, 1.0).tolist()
        [0.0, 0.0, 0.0]
    """
    if not 0 < dt_min <= dt_max < math.inf:
        raise ValueError(
            f"`dt_min` and `dt_max` must be step sizes with 0 < dt_min <= dt_max; got {dt_min} and {dt_max}. "
            "A step of zero never moves; S4's are 0.001 and 0.1."
        )
    least = torch.finfo(torch.get_default_dtype()).tiny
    if dt_min < least:
        raise ValueError(
            f"`dt_min` must be at least {least:.3g}, the smallest normal number of "
            f"{str(torch.get_default_dtype()).removeprefix('torch.')}; got {dt_min}, which would underflow."
        )
    return torch.empty(channels).uniform_(math.log(dt_min), math.log(dt_max))


class DiagonalSSM(Float32Module):
    """A diagonal state-space model for every channel, with S4D's parameters: x' = A x + B u, y = C x + D u.

    Parameters are real: A = -exp(A_log) + i A_imag, so that models are stable whatever is learned; steps are
    exp(dt_log); complex B and C are pairs of real and imaginary part. A, B and the steps are marked as group
    "transition" without weight decay: they are what the papers train with a smaller learning rate.

    Args:
        channels: d, each with a model of its own.
        d_state: N, numbers of the real state of each: N / 2 conjugate pairs, or N real ones.
        init: where A starts; see `linrec.nn.state_space.spectrum`.
        discretization: "zoh", "bilinear" or "euler"; see `linrec.ops.long_conv.discretize_diagonal`.
        dt_min: smallest step when training starts.
        dt_max: largest step when training starts.
        learn_b: whether B is learned, or stays where it starts.
        mode: that of `linrec.ops.diagonal_ssm`.

    Raises:
        ValueError: unknown names, an odd or no `d_state`, a step size that is not positive, or one whose
            discretisation is unstable.

    Source:
        S4D (Gu, Gupta, Goel and Ré, 2022).

    Example:
        >>> import torch
        >>> ssm = DiagonalSSM(8, d_state=4)
        >>> y, state = ssm(torch.zeros(2, 50, 8))
        >>> y.shape, state.shape
        (torch.Size([2, 50, 8]), torch.Size([2, 8, 2]))
    """

    def __init__(
        self,
        channels: int,
        *,
        d_state: int = 64,
        init: Spectrum = "lin",
        discretization: Discretization = "zoh",
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        learn_b: bool = True,
        mode: str = "auto",
    ) -> None:
        super().__init__()
        OPERATOR.check_mode(mode)
        if discretization not in ("zoh", "bilinear", "euler"):
            raise unknown("discretization", discretization, ["zoh", "bilinear", "euler"])
        # numbers that are looked at, whatever device parameters are made on: "meta" has none
        with torch.device("cpu"):
            A, B = spectrum(init, d_state)
        self.dt_log = nn.Parameter(log_steps(channels, dt_min, dt_max))
        largest = float(discretize_diagonal(A, B, dt_max, discretization)[0].abs().max())
        if largest > 1:
            raise ValueError(
                f"`discretization={discretization!r}` must have transitions of at most 1 to be stable; with "
                f"`init={init!r}` and `dt_max={dt_max}` the largest is {largest:.4g}. "
                'Use "zoh" or "bilinear", or smaller steps.'
            )
        self.channels, self.discretization, self.mode = channels, discretization, mode
        self.d_entries, self.is_complex = len(A), A.is_complex()
        shape = (channels, len(A))
        self.A_log = nn.Parameter((-A.real).log().to(self.dt_log).expand(shape).clone())
        self.A_imag: nn.Parameter | None = None
        C = torch.randn(shape)
        if A.is_complex():
            self.A_imag = nn.Parameter(A.imag.to(self.dt_log).expand(shape).clone())
            B = torch.stack([B, torch.zeros_like(B)], -1)
            # of variance 1, half in either part
            C = torch.randn(*shape, 2) / math.sqrt(2)
        B = B.to(self.dt_log).expand(C.shape).clone()
        if learn_b:
            self.B = nn.Parameter(B)
        else:
            self.register_buffer("B", B)
        self.C = nn.Parameter(C)
        self.D = nn.Parameter(torch.randn(channels))
        sensitive = [name for name in ("dt_log", "A_log", "A_imag", "B") if getattr(self, name) is not None]
        self.keep_float32(*sensitive)
        for name in sensitive:
            if isinstance(getattr(self, name), nn.Parameter):
                mark(self, name, group="transition", weight_decay=False)
        # taps of single channels, not a matrix
        mark(self, "C", group="channel", weight_decay=True)

    def forward(
        self, u: Float[Tensor, "b t d"], state: State = None, *, reset: Bool[Tensor, "b t"] | None = None
    ) -> tuple[Float[Tensor, "b t d"], Inexact[Tensor, "b d n"]]:
        """Filter every channel; arguments and results as those of `linrec.ops.diagonal_ssm`."""
        a, b, c = self.discrete()
        y, state = diagonal_ssm(u, a, b, c, state=state, reset=reset, mode=self.mode)
        return y + self.D.to(y.dtype) * u, state

    def discrete(self) -> tuple[Inexact[Tensor, "d n"], Inexact[Tensor, "d n"], Inexact[Tensor, "d n"]]:
        """a, b and c of x_t = a x_{t-1} + b u_t, y_t = Re(sum_n c_n x_tn), in float32 or better.

        Where entries stand for conjugate pairs, c is 2 C.
        """
        dtype = torch.promote_types(self.A_log.dtype, torch.float32)
        A, B, C = -self.A_log.to(dtype).exp(), self.B.to(dtype), self.C.to(dtype)
        if self.A_imag is not None:
            A = torch.complex(A, self.A_imag.to(dtype))
            B, C = torch.view_as_complex(B), 2 * torch.view_as_complex(C)
        a, b = discretize_diagonal(A, B, self.dt_log.to(dtype).exp()[:, None], self.discretization)
        return a, b, C

    def kernel(self, length: int) -> Float[Tensor, "d length"]:
        """Taps of the convolution that the model is, without D."""
        a, b, c = self.discrete()
        return vandermonde_kernel(a, c * b, length)

    def init_state(
        self, batch: int, *, dtype: torch.dtype, device: torch.device | str | None = None
    ) -> Inexact[Tensor, "b d n"]:
        """Return zeros (batch, d, n), complex where entries stand for pairs, in the precision of `dtype`."""
        dtype = dtype.to_complex() if self.is_complex else dtype
        return diagonal_ssm.empty_state(batch, self.channels, self.d_entries, dtype=dtype, device=device)

    def transitions(self) -> Transitions:
        """a of all entries of the state, (d n,)."""
        a = self.discrete()[0].flatten()
        return Transitions(a.abs(), a.angle())
