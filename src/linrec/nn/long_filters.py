"""Causal filters of channels as layers: by taps as many as steps, or by modes, with a state of fixed size."""

from abc import ABC, abstractmethod

import torch
from jaxtyping import Bool, Complex, Float
from torch import Tensor, nn
from torch.nn import functional

from linrec.nn.mixer import State
from linrec.nn.parameters import Float32Module, mark
from linrec.ops.diagonal_ssm import diagonal_ssm
from linrec.ops.long_conv import long_conv, vandermonde_kernel
from linrec.rules import at_least

__all__ = ["Filter", "LongFilter", "ModalFilter"]

# of a mode's logarithm: slower ones do not fade in float32, faster ones are gone after one step
SLOWEST, FASTEST = 1e-6, 50.0


class Filter(Float32Module, ABC):
    """y = K * u: every channel filtered causally by its own taps, with a state of past inputs.

    Args:
        channels: d.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels

    @abstractmethod
    def forward(
        self, u: Float[Tensor, "b t d"], state: State = None, *, reset: Bool[Tensor, "b t"] | None = None
    ) -> tuple[Float[Tensor, "b t d"], State]:
        """Return y (b, t, d) and the state, of `u` (b, t, d), a state and resets as of a `Mixer`."""

    @abstractmethod
    def kernel(self, length: int) -> Float[Tensor, "d length"]:
        """Return the first taps K, the tap of the current step first, in float32 or better."""

    @abstractmethod
    def init_state(
        self, batch: int, *, dtype: torch.dtype, device: torch.device | str | None = None
    ) -> Tensor:
        """Return the state at the start of `batch` sequences, in the precision of `dtype`."""

    @property
    @abstractmethod
    def state_size(self) -> int:
        """Elements of the state per sequence; where the state grows, elements per step kept."""


class LongFilter(Filter):
    """y_t = sum_{l < length} K_l u_{t-l}, whose taps `taps` makes: by FFT, with the past inputs as the state.

    The state grows with every step, up to the last `length` - 1 inputs, since no step sees further back. A
    step has the cost of making and summing so many taps. `linrec.lab.distillation` turns the filter into a
    recurrence.

    Args:
        channels: d.
        length: how many taps there are at most.
        decay: the factor from each tap to the next tap, if all taps have a common factor.

    Raises:
        ValueError: a `length` below 1.
    """

    def __init__(self, channels: int, length: int, *, decay: float | None = None) -> None:
        super().__init__(channels)
        at_least(1, length=length, cure="A single tap is no memory at all.")
        self.length, self.decay = length, decay

    def forward(
        self, u: Float[Tensor, "b t d"], state: State = None, *, reset: Bool[Tensor, "b t"] | None = None
    ) -> tuple[Float[Tensor, "b t d"], Float[Tensor, "b s d"]]:
        """Return y, and the last inputs (b, s, d), s < `length`."""
        past = 0 if state is None else state.shape[1]
        taps = self.taps(min(self.length, past + u.shape[1]), device=u.device)
        y, inputs = long_conv(u, taps, state=state, reset=reset)
        unseen = max(0, inputs.shape[1] - (self.length - 1))
        # a copy, for a view would keep all steps as long as the state
        return y, inputs[:, unseen:].to(self.state_dtype, copy=True)

    @abstractmethod
    def taps(self, length: int, *, device: torch.device | None = None) -> Float[Tensor, "d length"]:
        """Return the first taps in float32 or better.

        Args:
            length: number of taps, at most as many as there are.
            device: where the taps are used; None is where the parameters live.
        """

    def kernel(self, length: int) -> Float[Tensor, "d length"]:
        """Return the first taps, and zeros after the last."""
        taps = self.taps(min(length, self.length))
        return functional.pad(taps, (0, length - taps.shape[1]))

    def init_state(
        self, batch: int, *, dtype: torch.dtype, device: torch.device | str | None = None
    ) -> Float[Tensor, "b s d"]:
        """Return no inputs, (batch, 0, d)."""
        state: Tensor = long_conv.empty_state(batch, 0, self.channels, dtype=dtype, device=device)
        return state

    @property
    def state_size(self) -> int:
        """Elements per step that is kept, of which there are at most `length` - 1: d."""
        return self.channels

    def extra_repr(self) -> str:
        """Return the text that `print` shows."""
        return f"channels={self.channels}, length={self.length}"


class ModalFilter(Filter):
    """x_t = a * x_{t-1} + u_t, y_t = Re(sum_n R_n x_tn) + D u_t: a filter in modal form, as a recurrence.

    Its taps are K_l = Re(sum_n R_n a_n^l), and D more for the current step. Parameters are real,
    a = exp(-exp(decay_log) + i phase), so that the filter stays stable during training.

    Args:
        poles: a (d, n); poles on the unit circle or outside of it are moved just inside.
        residues: R (d, n).
        skip: D (d,).

    Source:
        Laughing Hyena Distillery (Massaroli and others, 2023), its modal form.

    Example:
        >>> import torch
        >>> half = torch.full((1, 1), 0.5 + 0j)
        >>> ModalFilter(half, torch.ones_like(half), torch.ones(1)).kernel(3)
        tensor([[2.0000, 0.5000, 0.2500]], grad_fn=<CatBackward0>)
    """

    def __init__(
        self, poles: Complex[Tensor, "d n"], residues: Complex[Tensor, "d n"], skip: Float[Tensor, "d"]
    ) -> None:
        super().__init__(len(poles))
        self.d_entries = poles.shape[1]
        self.decay_log = nn.Parameter((-poles.abs().log()).clamp(SLOWEST, FASTEST).log())
        self.phase = nn.Parameter(poles.angle())
        mark(self, "decay_log", "phase")
        self.residues = nn.Parameter(torch.view_as_real(residues).clone())
        # of single channels, not a matrix
        mark(self, "residues", group="channel", weight_decay=True)
        self.D = nn.Parameter(skip.clone())
        # large residues cancel each other, and D in the first tap
        self.keep_float32("decay_log", "phase", "residues", "D")

    def forward(
        self, u: Float[Tensor, "b t d"], state: State = None, *, reset: Bool[Tensor, "b t"] | None = None
    ) -> tuple[Float[Tensor, "b t d"], Complex[Tensor, "b d n"]]:
        """Return y, and x of the equations (b, d, n)."""
        a, R = self._modes()
        # modes and D cancel each other in the first tap, so only their sum is rounded
        wide = u.to(R.real.dtype)
        y, state = diagonal_ssm(wide, a, torch.ones_like(a), R, state=state, reset=reset)
        return (y + self.D.to(y.dtype) * wide).to(u.dtype), state

    def kernel(self, length: int) -> Float[Tensor, "d length"]:
        """Return the taps of the modes, with D in the first."""
        if length == 0:
            return self.D[:, None][:, :0]
        taps = vandermonde_kernel(*self._modes(), length)
        return torch.cat([taps[:, :1] + self.D.to(taps.dtype)[:, None], taps[:, 1:]], 1)

    def init_state(
        self, batch: int, *, dtype: torch.dtype, device: torch.device | str | None = None
    ) -> Complex[Tensor, "b d n"]:
        """Return zeros (batch, d, n), complex."""
        sizes = self.channels, self.d_entries
        state: Tensor = diagonal_ssm.empty_state(batch, *sizes, dtype=dtype.to_complex(), device=device)
        return state

    @property
    def state_size(self) -> int:
        """Elements of x: d n, counting a complex number once."""
        return self.channels * self.d_entries

    def _modes(self) -> tuple[Complex[Tensor, "d n"], Complex[Tensor, "d n"]]:
        """Return a and R, in the precision of states."""
        dtype = self.state_dtype
        magnitude = torch.exp(-self.decay_log.to(dtype).exp())
        return torch.polar(magnitude, self.phase.to(dtype)), torch.view_as_complex(self.residues.to(dtype))

    def extra_repr(self) -> str:
        """Return the text that `print` shows."""
        return f"channels={self.channels}, modes={self.d_entries}"
