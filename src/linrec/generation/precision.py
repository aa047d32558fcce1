"""Autocast for generation: weights are cast once instead of at every step."""

import copy
from contextlib import AbstractContextManager
from typing import cast

import torch
from torch import nn

from linrec.errors import unknown
from linrec.literals import Precision
from linrec.models import LanguageModel
from linrec.nn import Head
from linrec.nn.parameters import Float32Module
from linrec.nn.projections import join
from linrec.nn.row_linear import RowLinear


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager:
    """Return the autocast context of a step, in bfloat16 or disabled."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16-mixed")


def with_weights_cast(model: LanguageModel, precision: Precision) -> LanguageModel:
    """Return the model, or a copy with the weights already cast that autocast would cast at every step.

    The cast tensors are the weights and biases of plain linear layers. Under autocast these layers compute
    in bfloat16, unless a `Float32Module` keeps their tensors in float32. A step for a single sequence reads
    every weight once, so casting at every step would cost more than bfloat16 saves. The plain linear layers
    of the copy are `linrec.nn.row_linear.RowLinear`. Layers that compute more than their class says, such as
    layers with hooks or with pruned or normalised weights, are the model's own: autocast casts for them.

    Args:
        model: the model, which is not modified. The copy shares all other tensors, hooks, and modules without
            plain linear layers with it.
        precision: "32-true" returns the model itself; "bf16-mixed" returns the copy.
    """
    if precision not in ("32-true", "bf16-mixed"):
        raise unknown("`precision`", precision, ["32-true", "bf16-mixed"])
    if precision == "32-true":
        return model
    kept = {
        id(tensor)
        for module in model.modules()
        if isinstance(module, Float32Module)
        for tensor in module.kept_in_float32()
    }
    made: dict[nn.Module, nn.Module] = {}
    shared = _cast(model, kept, made)
    for module in made.values():
        # a step of few sequences takes as long for one product as for several
        layers = [getattr(module, name) for name in getattr(module, "of_one_input", ())]
        if layers and all(layer is None or isinstance(layer, RowLinear) for layer in layers):
            join(layers)
    return cast(LanguageModel, shared)


def _cast(module: nn.Module, kept: set[int], made: dict[nn.Module, nn.Module]) -> nn.Module:
    """Return a module with cast weights, or the module itself if there is no plain linear layer in it.

    Args:
        module: the module.
        kept: identities of the tensors that stay as they are.
        made: results by module, which modules that are shared have once.
    """
    if module in made:
        return made[module]
    found = module
    if _is_plain(module):
        found = _copied(module)
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in kept:
                setattr(found, name, nn.Parameter(parameter.detach().bfloat16(), requires_grad=False))
        if type(found) is nn.Linear:
            found = RowLinear(found)
    else:
        parts = {name: _cast(part, kept, made) for name, part in module.named_children()}
        parts = {name: part for name, part in parts.items() if part is not getattr(module, name)}
        if parts:
            found = _copied(module)
            found._modules.update(parts)
    made[module] = found
    return found


def _copied(module: nn.Module) -> nn.Module:
    found = copy.copy(module)
    # a shallow copy shares the dictionaries
    found._modules, found._parameters = dict(module._modules), dict(module._parameters)
    return found


def _is_plain(module: nn.Module) -> bool:
    """Return whether a module computes W x + b from two parameters, and nobody listens or takes its place."""
    return (
        # exact types, because other subclasses may compute in their own precision, as GateLinear does
        type(module) in (nn.Linear, Head)
        and "forward" not in vars(module)
        and not module._forward_pre_hooks
        and not module._forward_hooks
    )
