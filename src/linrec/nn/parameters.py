"""Marks on parameters that the optimiser reads: which learning rate they take, and whether they decay.

A module marks a parameter where it makes the parameter; `linrec.lab.train` turns the marks into the groups of
the optimiser. Parameter names decide nothing.
"""

from dataclasses import dataclass
from typing import TypeVar

from torch import nn

from linrec.errors import unknown
from linrec.nn.float32 import Float32Module

__all__ = ["ParameterGroup", "groups_of", "mark"]

ModuleT = TypeVar("ModuleT", bound=nn.Module)
_MARKS = "_linrec_marks"


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
