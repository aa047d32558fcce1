"""Spectra, step sizes, transition tensors and diagonal models, which state-space mixers share."""

import math
from typing import Literal, TypeAlias

import torch
from jaxtyping import Bool, Float, Inexact
from torch import Tensor, nn

from linrec.hippo import diagonal, normal_plus_low_rank
from linrec.hippo.forms import NormalPlusLowRank
from linrec.nn.parameters import Float32Module, mark
from linrec.ops.diagonal_ssm import diagonal_ssm
from linrec.ops.long_conv import Discretization, discretize_diagonal, vandermonde_kernel
from linrec.ops.scan import scan
from linrec.rules import COUNT, at_least, choice, divisor, require

__all__ = [
    "DiagonalSSM",
    "Measure",
    "Spectrum",
    "Start",
    "add_transition",
    "log_steps",
    "per_channel",
    "released_start",
    "spectrum",
]

Spectrum: TypeAlias = Literal["lin", "inv", "legs", "real"]
Measure: TypeAlias = Literal["legs", "legt", "fout"]
Start: TypeAlias = Literal["paper", "released"]

# bound of the imaginary part of B in the released code of S4
LARGEST_B = 2.0


def spectrum(
    init: Spectrum, d_state: int, *, start: Start = "paper"
) -> tuple[Inexact[Tensor, "n"], Inexact[Tensor, "n"]]:
    """Return A and B that a diagonal state-space model x' = A x + B u starts from, in double precision.

    | init | A_n | n |
    |---|---|---|
    | "lin" | -1/2 + i pi n | 0 .. N/2 - 1 |
    | "inv" | -1/2 + i N/pi (N / (2n + 1) - 1) | 0 .. N/2 - 1 |
    | "legs" | eigenvalues above the real axis of the normal part of HiPPO-LegS | N/2 |
    | "real" | -(n + 1) | 0 .. N - 1 |

    The result has an entry for each conjugate pair. B is one; with "legs", B is HiPPO's in the basis of the
    eigenvectors.

    Args:
        init: "lin", "inv", "legs" or "real".
        d_state: N, numbers of the real state; even but for "real".
        start: "paper", or "released" for the B of `released_start` with "legs". The phases of B are left out.

    Returns:
        A (n,), complex but for "real", and B (n,), real.

    Source:
        S4D (Gu, Gupta, Goel and Ré, 2022), its definitions of S4D-Lin, S4D-Inv, S4D-LegS and S4D-Real.
    """
    choice(Spectrum, init=init)
    choice(Start, start=start)
    require(
        d_state >= 1 and (init == "real" or d_state % 2 == 0),
        f"`d_state` must be a positive even number, of conjugate pairs; got {d_state}. "
        f'Pass {max(2, d_state + d_state % 2)}, or `init="real"`.',
    )
    require(d_state <= 2**20, f"`d_state` must be at most {2**20:,}; got {d_state}.")
    if init == "real":
        A = -torch.arange(1, d_state + 1, dtype=torch.float64)
        return A, torch.ones_like(A)
    n = torch.arange(d_state // 2, dtype=torch.float64)
    if init == "legs":
        A, B, _ = diagonal("legs", d_state)
        return A, B.real if start == "paper" else released_start("legs", d_state).B.abs()
    imaginary = math.pi * n if init == "lin" else d_state / math.pi * (d_state / (2 * n + 1) - 1)
    return torch.complex(torch.full_like(n, -0.5), imaginary), torch.ones_like(n)


def released_start(measure: Measure, d_state: int) -> NormalPlusLowRank:
    """Return the initial A and B of S4's released code, in the form of `linrec.hippo.normal_plus_low_rank`.

    It differs from HiPPO's A and B in two ways. A and B of "legt" and "fout" are halved, so that windows are
    twice as long. The imaginary part of B is clipped to [-2, 2], in the basis of the eigenvectors whose first
    entry is real: with N = 64, the largest entry of B is near 2 in place of 41 with "legs".

    Args:
        measure: "legs", "legt" or "fout".
        d_state: N, numbers of the real state; even.

    Source:
        Released code of S4 (Gu, Goel and Ré, 2022), its functions `transition` and `nplr`.
    """
    Lambda, P, B, V = normal_plus_low_rank(measure, d_state)
    if measure != "legs":
        Lambda, P, B = Lambda / 2, P / math.sqrt(2), B / 2
    if measure != "fout":
        # B of "fout" is real, and the first entries of its eigenvectors are zeros
        turn = torch.sgn(V[0])
        turned = turn * B
        B = turn.conj() * torch.complex(turned.real, turned.imag.clamp(-LARGEST_B, LARGEST_B))
    return NormalPlusLowRank(Lambda, P, B, V)


def log_steps(channels: int, dt_min: float, dt_max: float) -> Float[Tensor, "channels"]:
    """Draw logarithms of step sizes, uniform between log(dt_min) and log(dt_max).

    Args:
        channels: number of step sizes.
        dt_min: smallest step, above zero.
        dt_max: largest step.

    Source:
        S4 (Gu, Goel and Ré, 2022), whose steps start between 0.001 and 0.1.
    """
    require(
        0 < dt_min <= dt_max < math.inf,
        f"`dt_min` and `dt_max` must be step sizes with 0 < dt_min <= dt_max; got {dt_min} and {dt_max}. "
        "A step of zero never moves; S4's are 0.001 and 0.1.",
    )
    least = torch.finfo(torch.get_default_dtype()).tiny
    require(
        dt_min >= least,
        f"`dt_min` must be at least {least:.3g}, the smallest normal number of "
        f"{str(torch.get_default_dtype()).removeprefix('torch.')}; got {dt_min}, which would underflow.",
    )
    return torch.empty(channels).uniform_(math.log(dt_min), math.log(dt_max))


def add_transition(module: Float32Module, *, learn: bool = True, **start: Tensor) -> None:
    """Add tensors of the transition to a module, which keeps them in float32.

    Args:
        module: the module that gets the tensors.
        learn: whether the tensors are parameters, of group "transition" without weight decay, or buffers.
        start: where the tensors start, by name.
    """
    for name, tensor in start.items():
        if learn:
            setattr(module, name, nn.Parameter(tensor))
            mark(module, name)
        else:
            module.register_buffer(name, tensor)
    module.keep_float32(*start)


def per_channel(channels: int, *systems: Tensor) -> tuple[Tensor, ...]:
    """Repeat tensors of n systems for all channels, of which channel c has system c mod n.

    Args:
        channels: d, a multiple of n.
        systems: tensors (n, ...). Tensors of d systems are returned as they are.
    """
    return tuple(x if len(x) == channels else torch.cat([x] * (channels // len(x))) for x in systems)


class DiagonalSSM(Float32Module):
    """S4D's parameters of a diagonal state-space model for every channel: x' = A x + B u, y = C x + D u.

    Parameters are real: A = -exp(A_log) + i A_imag, so that models stay stable during training; steps are
    exp(dt_log); complex B and C are pairs of real and imaginary part. A, B and the steps are marked as group
    "transition" without weight decay: the papers train them with a smaller learning rate.

    Args:
        channels: d, each with a model of its own.
        d_state: N, numbers of the real state of each: N / 2 conjugate pairs, or N real ones.
        init: where A starts; see `linrec.nn.state_space.spectrum`.
        discretization: "zoh", "bilinear" or "euler"; see `linrec.ops.long_conv.discretize_diagonal`.
        dt_min: smallest step when training starts.
        dt_max: largest step when training starts.
        learn_b: whether B is learned, or stays where it starts.
        mode: a mode of `linrec.ops.diagonal_ssm`, which the caller passes on.
        n_ssm: how many A and B there are; None is d. Channel c has the A and B of index c mod `n_ssm`.
        n_outputs: outputs of each channel. Outputs have a C and a D of their own, and share the rest.
        start: where B starts with "legs", "paper" or "released"; see `linrec.nn.state_space.released_start`.
        skip: whether there is a D.

    Source:
        S4D (Gu, Gupta, Goel and Ré, 2022).
    """

    dt_log: Tensor
    A_log: Tensor
    A_imag: Tensor | None
    B: Tensor

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
        n_ssm: int | None = None,
        n_outputs: int = 1,
        start: Start = "paper",
        skip: bool = True,
    ) -> None:
        super().__init__()
        diagonal_ssm.operator.check_mode(mode)
        choice(("zoh", "bilinear", "euler"), discretization=discretization)
        divisor("channels", channels, n_ssm=n_ssm, or_none=True)
        at_least(1, most=COUNT, n_outputs=n_outputs)
        # the check below needs values, which parameters on "meta" do not have
        with torch.device("cpu"):
            A, B = spectrum(init, d_state, start=start)
        dt_log = log_steps(channels, dt_min, dt_max)
        largest = float(discretize_diagonal(A, B, dt_max, discretization)[0].abs().max())
        require(
            largest <= 1,
            f"`discretization={discretization!r}` must have transitions of at most 1 to be stable; with "
            f"`init={init!r}` and `dt_max={dt_max}` the largest is {largest:.4g}. "
            'Use "zoh" or "bilinear", or smaller steps.',
        )
        self.channels, self.discretization, self.mode = channels * n_outputs, discretization, mode
        self.d_entries, self.is_complex = len(A), A.is_complex()
        systems = channels if n_ssm is None else n_ssm
        shape = (self.channels, len(A))
        add_transition(self, dt_log=dt_log, A_log=(-A.real).log().to(dt_log).repeat(systems, 1))
        self.A_imag = None
        # complex entries draw it too, so that a seed keeps giving the same parameters
        C = torch.randn(shape)
        if self.is_complex:
            add_transition(self, A_imag=A.imag.to(dt_log).repeat(systems, 1))
            B = torch.stack([B, torch.zeros_like(B)], -1)
            # of variance 1, half in either part
            C = torch.randn(*shape, 2) / math.sqrt(2)
        add_transition(self, learn=learn_b, B=torch.stack([B.to(dt_log)] * systems))
        self.C = nn.Parameter(C)
        # taps of single channels, not a matrix
        mark(self, "C", group="channel", weight_decay=True)
        self.D: nn.Parameter | None = None
        if skip:
            self.D = nn.Parameter(torch.randn(self.channels))

    def forward(
        self, step_rescale: float | Float[Tensor, "*steps 1"] = 1.0
    ) -> tuple[
        Inexact[Tensor, "*steps d n"],
        Inexact[Tensor, "*steps d n"],
        Inexact[Tensor, "d n"],
        Float[Tensor, "d"] | None,
    ]:
        """Return Abar, Bbar, C and D of x_t = Abar * x_{t-1} + Bbar u_t, y_t = Re(C x_t) + D u_t.

        The tensors are in float32 or better. D is None without a skip.

        With several outputs, the first rows are for the first output of every channel, the next rows for the
        second output. Each output has a state. Where entries stand for conjugate pairs, C is twice the
        parameter. Step sizes are multiplied by `step_rescale`, a number, or a tensor that has one for each
        irregular step.
        """
        dtype = self.state_dtype
        A, B, C = -self.A_log.to(dtype).exp(), self.B.to(dtype), self.C.to(dtype)
        if self.A_imag is not None:
            A = torch.complex(A, self.A_imag.to(dtype))
            B, C = torch.view_as_complex(B), 2 * torch.view_as_complex(C)
        A, B, dt_log = per_channel(self.channels, A, B, self.dt_log.to(dtype))
        dt = step_rescale * dt_log.exp()
        Abar, Bbar = discretize_diagonal(A, B, dt[..., None], self.discretization)
        return Abar, Bbar, C, self.D

    def discrete(
        self, step_rescale: float | Float[Tensor, "*steps 1"] = 1.0
    ) -> tuple[Inexact[Tensor, "*steps d n"], Inexact[Tensor, "*steps d n"], Inexact[Tensor, "d n"]]:
        """Return Abar, Bbar and C."""
        Abar, Bbar, C, _ = self(step_rescale)
        return Abar, Bbar, C

    def irregular(
        self,
        u: Float[Tensor, "b t d"],
        dt: Float[Tensor, "b t"],
        *,
        state: Inexact[Tensor, "b d n"] | None = None,
        reset: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b t d"], Inexact[Tensor, "b d n"]]:
        """Run the model with step sizes multiplied by `dt`, as a recurrence with Abar and Bbar of every step.

        y has D u in it, if there is a D.

        The tensors Abar, Bbar u and x of all steps, (b, t, d, n), are in memory.
        """
        require(
            self.mode != "convolution",
            "`dt` must be None in mode 'convolution', whose kernel has one step size; got a tensor. Use "
            '`mode="auto"`, which runs irregular steps as a recurrence.',
        )
        Abar, Bbar, C, D = self(dt.to(self.state_dtype)[..., None])
        start = None if state is None else state.flatten(1)
        inputs = (Bbar * u[..., None]).flatten(2)
        x, last = scan(Abar.flatten(2), inputs, state=start, reset=reset, mode=self.mode)
        y = (C * x.unflatten(2, C.shape)).sum(-1).real.to(u.dtype)
        return y if D is None else y + D.to(y.dtype) * u, last.unflatten(1, C.shape)

    def kernel(self, length: int) -> Float[Tensor, "d length"]:
        """Return the first taps of y = K * u, the tap of the current step first, without D."""
        Abar, Bbar, C = self.discrete()
        return vandermonde_kernel(Abar, C * Bbar, length)
