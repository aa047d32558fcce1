"""Marks on parameters that the optimiser reads: which learning rate they take, and whether they decay.

A module says where it makes a parameter what that parameter is; `linrec.train` turns the marks into the
optimiser's groups. Nothing is decided from parameter names.
"""

from dataclasses import dataclass
from typing import TypeVar

from torch import nn

__all__ = ["ParameterGroup", "group_of", "mark"]

Markable = TypeVar("Markable", bound=nn.Parameter | nn.Module)


@dataclass(frozen=True)
class ParameterGroup:
    """What the optimiser has to know about a parameter.

    Args:
        name: the group whose learning rate and algorithm apply: "default", "transition", or "vocabulary" for
            embeddings and heads, whose rows are tokens rather than directions.
        weight_decay: False where weight decay must not apply.
    """

    name: str = "default"
    weight_decay: bool = True


DEFAULT = ParameterGroup()


def mark(target: Markable, *, group: str = "transition", weight_decay: bool = False) -> Markable:
    """Put a parameter, or every parameter of a module, into a group of the optimiser.

    The mark is an attribute of the parameter itself. It stays through `.to(...)`, training and loading of
    weights, but `copy.deepcopy` makes new parameters without it: build the optimiser from the model that
    was constructed, not from a copy.

    Args:
        target: a parameter, or a module whose parameters are all marked.
        group: the name of the group.
        weight_decay: whether weight decay applies to the parameters.

    Returns:
        `target` itself, so that marking can stand where the parameter is made.

    Source:
        GateLoop (Katsch, 2023), C.2: "We apply a smaller learning [rate] to the projections which
        control the state transition. Moreover, no weight decay is applied to these parameters."

    Example:
        >>> from torch import nn
        >>> projection = mark(nn.Linear(4, 4))
        >>> group_of(projection.weight)
        ParameterGroup(name='transition', weight_decay=False)
    """
    parameters = target.parameters() if isinstance(target, nn.Module) else [target]
    for parameter in parameters:
        parameter.linrec_group = ParameterGroup(group, weight_decay)  # type: ignore[attr-defined]
    return target


def group_of(parameter: nn.Parameter) -> ParameterGroup:
    """The group that `mark` gave to a parameter, or the default group.

    Example:
        >>> import torch
        >>> group_of(torch.nn.Parameter(torch.zeros(2)))
        ParameterGroup(name='default', weight_decay=True)
    """
    return getattr(parameter, "linrec_group", DEFAULT)
