"""Modules that keep some of their parameters in float32 where others are cast to half precision."""

import itertools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from linrec.errors import unknown
from linrec.restored import RestoredModule

__all__ = ["Float32Module", "tensor_options"]

ModuleT = TypeVar("ModuleT", bound="Float32Module")
_NAMES = "_linrec_float32"


class Float32Module(RestoredModule):
    """Base class of modules with parameters for which half precision is too coarse.

    `.bfloat16()`, `.half()` and `.to(dtype)`, of the module or of a model that holds it, leave the tensors
    that `keep_float32` names in float32, with their gradients. `.double()` widens them, and devices, loading
    of weights and copies are as for any tensor. The module casts its results to the dtype of its input.

    Step sizes, decays, phases and spectra act once per step: the relative error of bfloat16, 2^-9, is a whole
    turn for a phase of 0.03 rad after 100,000 steps, and moves a decay of 0.999 to 1.

    Example:
        >>> from torch import nn
        >>> class Decay(Float32Module):
        ...     def __init__(self) -> None:
        ...         super().__init__()
        ...         self.rate, self.weight = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        ...         self.keep_float32("rate")
        >>> decay = Decay().bfloat16()
        >>> decay.rate.dtype, decay.weight.dtype, decay.double().rate.dtype
        (torch.float32, torch.bfloat16, torch.float64)
    """

    def keep_float32(self, *names: str) -> None:
        """Keep parameters and buffers of these names in float32, and all that submodules of these names hold.

        Raises:
            ValueError: the module has no parameter, buffer or submodule of that name.
        """
        held = [*self._parameters, *self._buffers, *self._modules]
        for name in names:
            if name not in held:
                raise unknown(f"parameter, buffer or submodule of {type(self).__name__}", name, held)
        vars(self).setdefault(_NAMES, set()).update(names)

    def kept_in_float32(self) -> list[Tensor]:
        """Return the tensors that `keep_float32` has named."""
        tensors: list[Tensor] = []
        for name in vars(self).get(_NAMES, ()):
            held = getattr(self, name)
            if isinstance(held, nn.Module):
                tensors += [*held.parameters(), *held.buffers()]
            elif held is not None:
                tensors.append(held)
        return tensors

    @property
    def state_dtype(self) -> torch.dtype:
        """The real dtype of states and of results that keep float32: float64 where the parameters are."""
        dtype: torch.dtype = tensor_options(self)["dtype"]
        return torch.promote_types(dtype, torch.float32)

    def _apply(self: ModuleT, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ModuleT:
        kept = self.kept_in_float32()
        # held on to, so that no other tensor takes the identity of a gradient
        kept += [tensor.grad for tensor in kept if tensor.grad is not None]
        identities = {id(tensor) for tensor in kept}

        def widened(tensor: Tensor) -> Tensor:
            applied = fn(tensor)
            if id(tensor) not in identities or not applied.is_floating_point():
                return applied
            dtype = torch.promote_types(applied.dtype, torch.float32)
            # from the tensor itself, which `fn` has rounded
            return applied if applied.dtype == dtype else tensor.to(applied.device, dtype)

        return super()._apply(widened, recurse)


def tensor_options(module: nn.Module, device: torch.device | str | None = None) -> dict[str, Any]:
    """Return the dtype and the device of a module: of its first floating tensor.

    A module whose layers another library has replaced may hold none, as with int8 weights on the CPU. Dtype
    and device are torch's defaults then.

    Args:
        module: the module.
        device: a device to return in place of the module's.

    Example:
        >>> tensor_options(nn.Linear(1, 1).bfloat16())
        {'dtype': torch.bfloat16, 'device': device(type='cpu')}
    """
    for tensor in itertools.chain(module.parameters(), module.buffers()):
        if tensor.is_floating_point():
            return {"dtype": tensor.dtype, "device": tensor.device if device is None else device}
    default = torch.empty(0)
    return {"dtype": default.dtype, "device": default.device if device is None else device}
