"""Long convolutions as recurrences: a copy of a model whose filters are in modal form."""

import copy
from typing import Literal, TypeVar

import torch
from torch import nn

from linrec.distillation.modes import exact_modes, fit_modes
from linrec.errors import unknown
from linrec.nn.long_filters import LongFilter, ModalFilter

__all__ = ["distill"]

Method = Literal["fit", "exact"]
M = TypeVar("M", bound=nn.Module)

# what is left of the first repetition after the last tap, of filters that have no decay of their own
REPEATED = 0.01


def distill(model: M, modes: int = 16, *, method: Method = "fit", length: int | None = None) -> M:
    """Return a copy of a model, or of a mixer, whose long convolutions are recurrences.

        y_t = sum_{l<L} K_l u_{t-l}    becomes    x_t = a * x_{t-1} + u_t, y_t = Re(R x_t) + D u_t

    The state no longer grows: it is `modes` complex numbers for each filter and channel, at any length, and
    so are memory and time of a step. Long inputs are still read by FFT (`linrec.ops.diagonal_ssm`), and the
    state after them is exact. All else in the model is as it was; the copy can be trained further.

    | method | modes | the filter |
    |---|---|---|
    | "fit" | any number | nearly the same, where the kernel is smooth: `linrec.distillation.fit_modes` |
    | "exact" | ceil(length / 2) | the same for `length` taps: `linrec.distillation.exact_modes` |

    A filter of L taps sees nothing older. A fit does the same, nearly, for the zeros behind the last tap are
    fitted as well; an exact recurrence starts over after `length` steps, weaker.

    The copy's weights have names of their own. To load them, distil a model of the same configuration in the
    same way, and load them into that.

    Args:
        model: a module that holds mixers with long convolutions: "hyena", "sgconv" or "tnn".
        modes: complex numbers of the state for each filter and channel, with "fit"; "exact" needs as many
            as `length` says.
        method: "fit" or "exact".
        length: taps to keep, such as the length of training's sequences if that is less than the filters
            have; None is all of them.

    Returns:
        The copy, in the dtype and on the device of `model`.

    Raises:
        ValueError: an unknown method, a `modes` or `length` below 1, or a model without long convolutions.

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
            'Distil a model with the mixer "hyena", "sgconv" or "tnn"; others are recurrences already.'
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
