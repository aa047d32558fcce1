"""Replace long convolutions by recurrences: copy a model with its filters in modal form."""

import copy
from typing import Literal, TypeVar

import torch
from jaxtyping import Bool, Complex, Float
from torch import Tensor, nn

from linrec.errors import unknown
from linrec.lab.distillation.modes import exact_modes, fit_modes
from linrec.nn.long_filters import Filter, LongFilter
from linrec.nn.mixer import State
from linrec.nn.parameters import mark
from linrec.ops.diagonal_ssm import diagonal_ssm
from linrec.ops.long_conv import vandermonde_kernel

__all__ = ["ModalFilter", "distill"]

Method = Literal["fit", "exact"]
M = TypeVar("M", bound=nn.Module)

# amplitude of the first repetition after the last tap, for filters without exponential decay
REPEATED = 0.01
# of a mode's logarithm: slower ones do not fade in float32, faster ones are gone after one step
SLOWEST, FASTEST = 1e-6, 50.0


def distill(model: M, modes: int = 16, *, method: Method = "fit", length: int | None = None) -> M:
    """Return a copy of a model or a mixer in which recurrences replace long convolutions.

        y_t = sum_{l<L} K_l u_{t-l}    becomes    x_t = a * x_{t-1} + u_t, y_t = Re(R x_t) + D u_t

    The state has constant size: `modes` complex numbers per filter and channel at any length. Memory and time
    per step are constant too. Long inputs are still processed by FFT (`linrec.ops.diagonal_ssm`), and their
    final state is exact. Everything else in the model is unchanged; the copy can be trained further.

    | method | modes | the filter |
    |---|---|---|
    | "fit" | any number | nearly equal for smooth kernels: `linrec.lab.distillation.fit_modes` |
    | "exact" | ceil(length / 2) | equal on `length` taps: `linrec.lab.distillation.exact_modes` |

    A filter of L taps ignores older steps. A fit nearly does the same, because the zeros after the last tap
    are fitted as well. An exact recurrence repeats the filter after `length` steps, damped.

    The copy's parameters have different names. To load its weights, distil a model of the same configuration
    in the same way, and load them into this copy.

    Args:
        model: a module that contains mixers with long convolutions: "hyena", "sgconv" or "tnn".
        modes: complex numbers of state per filter and channel, with "fit"; "exact" ignores it and uses
            ceil(`length` / 2).
        method: "fit" or "exact".
        length: number of taps to keep, for example the training length if the filters are longer; None keeps
            all.

    Returns:
        The copy, in the dtype and on the device of `model`.

    Raises:
        ValueError: `method` is unknown, `modes` or `length` is below 1, or the model has no long convolution.

    Source:
        Laughing Hyena Distillery (Massaroli and others, 2023) for the modal form; Qin and Zhong (2023) for
        the exact conversion.

    Example:
        >>> import torch
        >>> from linrec import mixers
        >>> mixer = mixers.build("hyena", 8, length=64)
        >>> y, state = distill(mixer, 8)(torch.zeros(1, 50, 8))
        >>> [modes.shape for modes in state.filters]
        [torch.Size([1, 8, 8]), torch.Size([1, 8, 8])]
    """
    if method not in ("fit", "exact"):
        raise unknown("`method` of distillation", method, ["fit", "exact"])
    if modes < 1 or (length is not None and length < 1):
        raise ValueError(f"`modes` and `length` must be at least 1; got {modes} and {length}.")
    if not any(isinstance(module, LongFilter) for module in model.modules()):
        raise ValueError(
            f"`model` must have long convolutions; {type(model).__name__} has none. "
            'Distil a model with the mixer "hyena", "sgconv" or "tnn"; other mixers are recurrences already.'
        )
    copied = copy.deepcopy(model)
    for module in [*copied.modules()]:
        for name, child in [*module.named_children()]:
            if isinstance(child, LongFilter):
                setattr(module, name, _modal(child, modes, method, length))
    return copied


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


@torch.no_grad()
def _modal(of: LongFilter, modes: int, method: Method, length: int | None) -> ModalFilter:
    length = of.length if length is None else min(length, of.length)
    kernel = of.taps(length)
    if method == "fit":
        poles, residues, skip = fit_modes(kernel, modes)
    else:
        poles, residues, skip = exact_modes(kernel, of.decay or REPEATED ** (1 / length))
    parameter = next(of.parameters())
    return ModalFilter(poles, residues, skip).to(parameter.device, parameter.dtype).train(of.training)
