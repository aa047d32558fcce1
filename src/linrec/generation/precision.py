"""Autocast for generation: weights are cast once instead of at every step."""

import copy
from contextlib import AbstractContextManager

import torch
from torch import nn

from linrec.errors import unknown
from linrec.literals import Precision
from linrec.models import LanguageModel
from linrec.nn import Head
from linrec.nn.float32 import Float32Module
from linrec.nn.projections import join
from linrec.nn.row_linear import RowLinear


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager:
    """Return the autocast context of a step, in bfloat16 or disabled."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16-mixed")


def with_weights_cast(model: LanguageModel, precision: Precision) -> LanguageModel:
    """Return the model, or a copy with the weights already cast that autocast would cast at every step.

    The cast tensors are the weights and biases of plain linear layers. Under autocast these layers compute
    in bfloat16, unless a `Float32Module` keeps their tensors in float32. The copy shares all other tensors
    with the model. A step for a single sequence reads every weight once, so casting at every step would cost
    more than bfloat16 saves. The plain linear layers of the copy are `linrec.nn.row_linear.RowLinear`.

    Args:
        model: the model, which is not modified.
        precision: "32-true" returns the model itself; "bf16-mixed" returns the copy.

    Raises:
        ValueError: `precision` is unknown.
    """
    if precision not in ("32-true", "bf16-mixed"):
        raise unknown("`precision`", precision, ["32-true", "bf16-mixed"])
    if precision == "32-true":
        return model
    tensors = [*model.parameters(), *model.buffers()]
    shared = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    kept = {
        id(tensor)
        for module in shared.modules()
        if isinstance(module, Float32Module)
        for tensor in module.kept_in_float32()
    }
    for module in shared.modules():
        # exact types, because other subclasses may compute in their own precision, as GateLinear does
        if type(module) in (nn.Linear, Head):
            for name, parameter in list(module.named_parameters(recurse=False)):
                if id(parameter) not in kept:
                    cast = nn.Parameter(parameter.detach().bfloat16(), requires_grad=False)
                    setattr(module, name, cast)
    for module in list(shared.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear:
                setattr(module, name, RowLinear(child))
    for module in shared.modules():
        # a step of few sequences takes as long for one product as for several
        if names := getattr(module, "of_one_input", ()):
            join([getattr(module, name) for name in names])
    return shared
