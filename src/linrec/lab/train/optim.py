"""AdamW and Muon with parameter groups for learning rates and weight decay."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from linrec.lab.train.config import OptimConfig
from linrec.lab.train.muon import Muon
from linrec.lab.train.sharding import whole
from linrec.nn.parameters import groups_of


def parameter_groups(model: nn.Module, config: OptimConfig) -> list[dict[str, Any]]:
    """Sort the parameters of a model into the optimisers' parameter groups.

    Algorithm: AdamW. With `config.name` "muon", Muon updates the matrices that `linrec.nn.parameters.mark`
    did not assign to another group; AdamW updates embeddings, the head, transitions, convolution kernels,
    biases and norms.

    Peak learning rate: `transition_lr` for parameters marked "transition" (GateLoop, appendix C.2), `muon_lr`
    for the parameters of Muon, and `lr` for all other parameters.

    Weight decay: 0 for parameters marked as not decaying, such as transitions, and for parameters of fewer
    than two dimensions (biases, norms, constants per channel); `weight_decay` for all other parameters, which
    are matrices and embeddings.

    Args:
        model: the model, with or without marks on its parameters.
        config: algorithm, learning rates and weight decay.

    Returns:
        A dictionary for each non-empty group: "params", "algorithm", "peak_lr", "weight_decay".

    Example:
        >>> model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 3))
        >>> [(g["weight_decay"], len(g["params"])) for g in parameter_groups(model, OptimConfig())]
        [(0.05, 2), (0.0, 1)]
    """
    groups: dict[tuple[str, float, float], list[nn.Parameter]] = {}
    marks = groups_of(model)
    for name, parameter in model.named_parameters():
        group = marks[name]
        muon = config.name == "muon" and group.name == "default" and parameter.ndim == 2
        peak = config.muon_lr if muon else config.lr
        if group.name == "transition" and config.transition_lr is not None:
            peak = config.transition_lr
        decays = group.weight_decay and parameter.ndim >= 2
        key = ("muon" if muon else "adamw", peak, config.weight_decay if decays else 0.0)
        groups.setdefault(key, []).append(parameter)
    return [
        {"params": params, "algorithm": algorithm, "peak_lr": peak, "weight_decay": decay}
        for (algorithm, peak, decay), params in groups.items()
    ]


def make_optimizers(model: nn.Module, config: OptimConfig) -> list[torch.optim.Optimizer]:
    """Return an optimiser for each algorithm of `parameter_groups`, ready for capture in a CUDA graph.

    Learning rates are tensors on the parameters' device, so a captured step reads their current values.

    Args:
        model: the model, on the device of training.
        config: algorithm, learning rates, betas and weight decay.
    """
    groups = parameter_groups(model, config)
    for group in groups:
        # groups with equal peaks share a tensor, so that setting it takes a single kernel launch
        same = (other["lr"] for other in groups if "lr" in other and other["peak_lr"] == group["peak_lr"])
        group["lr"] = next(same, None)
        if group["lr"] is None:
            group["lr"] = torch.tensor(group["peak_lr"], device=group["params"][0].device)
    parameters = list(model.parameters())
    on_cuda = parameters[0].device.type == "cuda"
    # AdamW has no fused kernel for complex parameters
    fused = all(parameter.is_floating_point() for parameter in parameters)
    of = {name: [group for group in groups if group["algorithm"] == name] for name in ("adamw", "muon")}
    optimizers: list[torch.optim.Optimizer] = []
    if of["adamw"]:
        optimizers.append(torch.optim.AdamW(of["adamw"], betas=config.betas, fused=fused, capturable=on_cuda))
    if of["muon"]:
        optimizers.append(Muon(of["muon"], momentum=config.muon_momentum))
    return optimizers


def set_learning_rate(optimizers: Sequence[torch.optim.Optimizer], factor: float) -> None:
    """Set every group's learning rate to `factor` times its peak."""
    done: set[int] = set()
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        if id(group["lr"]) not in done:
            group["lr"].fill_(factor * group["peak_lr"])
            done.add(id(group["lr"]))


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return the Euclidean norm of all gradients as a scalar tensor on their device."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return whole(torch.nn.utils.get_total_norm(gradients))
