"""Marks on parameters: the optimiser's group, weight decay, and parameters that stay in float32.

A module marks a parameter where it makes the parameter; `linrec.lab.train` turns the marks into the groups of
the optimiser. Parameter names decide nothing.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from linrec.errors import unknown
from linrec.restored import RestoredModule

__all__ = ["Float32Module", "ParameterGroup", "groups_of", "mark", "tensor_options"]

ModuleT = TypeVar("ModuleT", bound=nn.Module)
Float32T = TypeVar("Float32T", bound="Float32Module")
_NAMES, _MARKS = "_linrec_float32", "_linrec_marks"


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

    def _apply(self: Float32T, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Float32T:
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
    """
    for tensor in itertools.chain(module.parameters(), module.buffers()):
        if tensor.is_floating_point():
            return {"dtype": tensor.dtype, "device": tensor.device if device is None else device}
    default = torch.empty(0)
    return {"dtype": default.dtype, "device": default.device if device is None else device}


@dataclass(frozen=True)
class ParameterGroup:
    """The group of a parameter in the optimiser.

    Args:
        name: the group whose learning rate and algorithm apply: "default"; "transition"; "vocabulary" for
            embeddings and heads, whose rows are tokens rather than directions; or "channel" for numbers that
            belong to single channels, such as the taps of a depthwise convolution. Their tensor may have two
            axes, but is not a matrix that maps vectors.
        weight_decay: False where weight decay must not apply.
    """

    name: str = "default"
    weight_decay: bool = True


DEFAULT = ParameterGroup()


def mark(
    module: ModuleT,
    *names: str,
    group: str = "transition",
    weight_decay: bool = False,
    float32: bool = False,
) -> ModuleT:
    """Put parameters of a module into a group of the optimiser.

    The module that holds a parameter keeps the mark, under the parameter's name. So the mark survives
    `.to(...)`, loading of weights, `copy.deepcopy`, and sharding over processes.

    Args:
        module: the module that holds the parameters.
        names: names of parameters that the module itself holds; without names, all parameters in the module
            are marked. A named parameter may be None.
        group: the name of the group.
        weight_decay: whether weight decay applies to the parameters.
        float32: whether the named parameters stay in float32 in a module in half precision; see
            `linrec.nn.Float32Module`.

    Returns:
        `module` itself, so that marking can stand where the module is made.

    Raises:
        ValueError: the module holds no parameter of that name.

    Source:
        GateLoop (Katsch, 2023), C.2: "We apply a smaller learning [rate] to the projections which
        control the state transition. Moreover, no weight decay is applied to these parameters."

    Example:
        >>> from torch import nn
        >>> groups_of(mark(nn.Linear(4, 4, bias=False)))
        {'weight': ParameterGroup(name='transition', weight_decay=False)}
        >>> [group.name for group in groups_of(mark(nn.Linear(4, 4), "bias")).values()]
        ['default', 'transition']
    """
    for part in [module] if names else module.modules():
        held = [own for own, _ in part.named_parameters(recurse=False, remove_duplicate=False)]
        for name in names:
            # a name that is no attribute stands for itself
            if name not in held and getattr(part, name, name) is not None:
                raise unknown(f"parameter of {type(module).__name__}", name, held)
        marks = vars(part).setdefault(_MARKS, {})
        marks.update(dict.fromkeys(names or held, ParameterGroup(group, weight_decay)))
    if float32:
        assert isinstance(module, Float32Module)
        module.keep_float32(*names)
    return module


def groups_of(module: nn.Module) -> dict[str, ParameterGroup]:
    """Return the group of each parameter, by the names of `named_parameters`.

    Parameters without a mark are in the default group. A parameter that several modules share is in the group
    of the first module that marks it.

    Example:
        >>> from torch import nn
        >>> groups_of(nn.Linear(2, 2, bias=False))
        {'weight': ParameterGroup(name='default', weight_decay=True)}
    """
    marked: dict[nn.Parameter, ParameterGroup] = {}
    for part in module.modules():
        marks = vars(part).get(_MARKS, {})
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            if name in marks:
                marked.setdefault(parameter, marks[name])
    return {name: marked.get(parameter, DEFAULT) for name, parameter in module.named_parameters()}
