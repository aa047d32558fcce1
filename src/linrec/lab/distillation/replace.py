"""Replace long convolutions by recurrences: copy a model with its filters in modal form."""

import copy
from typing import Literal, TypeVar

import torch
from torch import nn

from linrec.errors import unknown
from linrec.lab.distillation.modes import exact_modes, fit_modes
from linrec.nn.long_filters import LongFilter, ModalFilter

__all__ = ["distill"]

Method = Literal["fit", "exact"]
M = TypeVar("M", bound=nn.Module)

# amplitude of the first repetition after the last tap, for filters without exponential decay
REPEATED = 0.01


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
