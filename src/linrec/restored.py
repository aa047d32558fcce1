"""Modules that restore what no checkpoint holds: constants, and parameters that several modules share."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

__all__ = ["RestoredModule"]

ModuleT = TypeVar("ModuleT", bound="RestoredModule")


class _Place(NamedTuple):
    """A parameter, the module that holds it, and its name there."""

    owner: nn.Module
    name: str
    parameter: nn.Parameter


class RestoredModule(nn.Module):
    """Base class of modules with constants, or with parameters that several of their modules share.

    A module built on the device "meta" gets its tensors from `to_empty` and `load_state_dict`, or from
    `load_state_dict(assign=True)`. Neither has the values of buffers that no checkpoint holds, and both give
    every module that shares a parameter a parameter of its own. After each move and each load, this class

    - computes its constants again, the buffers that a subclass returns from `constants` and registers by
      `add_constants`;
    - makes all modules within it that shared a parameter share it again. If a load assigned them different
      tensors, they share the last, whose values a copying load would have left, too.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        # of a further base class, such as `nn.Linear`
        super().__init__(*arguments, **named)
        self._shared: list[list[_Place]] = []
        self.register_load_state_dict_post_hook(_after_loading)

    def constants(self) -> dict[str, Tensor]:
        """Return the constants by name, in the highest precision; they are computed on the CPU."""
        return {}

    def add_constants(self, like: Tensor | None = None) -> None:
        """Register the constants as buffers that no checkpoint holds.

        Args:
            like: a tensor of their dtype and device; None is their own dtype and the default device.
        """
        for name, value in self._computed().items():
            placed = value.to(torch.get_default_device()) if like is None else value.to(like)
            self.register_buffer(name, placed, persistent=False)

    def _computed(self) -> dict[str, Tensor]:
        with torch.device("cpu"):
            return self.constants()

    def _restore_constants(self, *, loaded: bool = False) -> None:
        """Compute the constants again; those that a load has left on "meta", where the weights are."""
        weights = [*self.parameters()]
        weight = next((weight for weight in weights if not weight.is_meta), None)
        for name, value in self._computed().items():
            buffer = getattr(self, name)
            device, dtype = buffer.device, buffer.dtype
            if buffer.is_meta and weight is not None:
                device = weight.device
                # weights of another dtype may have been assigned; half precision is too coarse for constants
                if dtype.is_floating_point:
                    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
            elif buffer.is_meta and loaded and not weights:
                device = torch.get_default_device()
            if device.type != "meta":
                setattr(self, name, value.to(device, dtype))

    def _apply(self: ModuleT, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ModuleT:
        shared = _shared(self)
        super()._apply(fn, recurse)
        _share(shared)
        self._restore_constants()
        return self

    def _load_from_state_dict(self, *arguments: Any) -> None:
        # before the modules within load
        self._shared = _shared(self)
        super()._load_from_state_dict(*arguments)


def _after_loading(module: RestoredModule, incompatible: Any) -> None:
    shared, module._shared = module._shared, []
    _share(shared)
    module._restore_constants(loaded=True)


def _shared(module: nn.Module) -> list[list[_Place]]:
    """Return the places of each parameter that several places of a module hold."""
    found: dict[int, list[_Place]] = {}
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            found.setdefault(id(parameter), []).append(_Place(owner, name, parameter))
    return [places for places in found.values() if len(places) > 1]


def _share(shared: list[list[_Place]]) -> None:
    """Let places that held one parameter hold one again: the last new one of them."""
    for places in shared:
        held = [getattr(place.owner, place.name) for place in places]
        new = [now for now, place in zip(held, places, strict=True) if now is not place.parameter]
        for place in places if new else ():
            setattr(place.owner, place.name, new[-1])
