"""AdamW and Muon over parameter groups: who gets which learning rate, and who decays."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from linrec.nn.parameters import groups_of
from linrec.train.config import OptimConfig
from linrec.train.muon import Muon
from linrec.train.sharding import whole


def parameter_groups(model: nn.Module, config: OptimConfig) -> list[dict[str, Any]]:
    """Sort the parameters of a model into the optimisers' groups.

    Algorithm: AdamW; with `config.name` "muon", Muon for the matrices that carry no mark of another group
    (`linrec.nn.parameters.mark`), which leaves embeddings, the head, transitions, taps of convolutions,
    biases and norms to AdamW.
    Peak learning rate: `transition_lr` for parameters that are marked "transition" (GateLoop, appendix C.2),
    `muon_lr` for Muon's, `lr` for all others. Weight decay: none for parameters that are marked so, as those
    of transitions are, and none for those of fewer than two dimensions (biases, norms, constants per
    channel); `weight_decay` for all others, which are matrices and embeddings.

    Args:
        model: the model, its parameters marked or not.
        config: algorithm, learning rates and weight decay.

    Returns:
        One dictionary per group that is not empty: "params", "algorithm", "peak_lr", "weight_decay".

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
    """Return the optimisers of `parameter_groups`, one per algorithm, ready to be captured in a CUDA graph.

    Learning rates are tensors on the parameters' device: a captured step reads their present value.

    Args:
        model: the model, on the device that it will be trained on.
        config: algorithm, learning rates, betas and weight decay.
    """
    groups = parameter_groups(model, config)
    for group in groups:
        # groups on one peak share one tensor, so that changing it is one launch
        same = (other["lr"] for other in groups if "lr" in other and other["peak_lr"] == group["peak_lr"])
        group["lr"] = next(same, None)
        if group["lr"] is None:
            group["lr"] = torch.tensor(group["peak_lr"], device=group["params"][0].device)
    parameters = list(model.parameters())
    on_cuda = parameters[0].device.type == "cuda"
    # complex parameters have no fused kernel
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
    """Return the Euclidean norm of all gradients taken as one vector, on their device: a scalar."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return whole(torch.nn.utils.get_total_norm(gradients))
