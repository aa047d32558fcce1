"""AdamW and Muon, their parameter groups, and the learning rate as a pure function of the step."""

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from linrec.lab.train.config import OptimConfig
from linrec.lab.train.fabric import whole
from linrec.nn.parameters import groups_of
from linrec.torch_private import lerp_all, shrink_and_subtract

# coefficients of the odd polynomial that Muon's author published: steep at zero; five iterations map every
# singular value above 0.002 into [0.68, 1.21]
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5


class Muon(torch.optim.Optimizer):
    """M_t = mu M_{t-1} + (1 - mu) G_t,   W_t = (1 - lr wd) W_{t-1} - lr sqrt(max(1, n / m)) U_t.

    U_t is (1 - mu) G_t + mu M_t with its singular values brought close to 1, for matrices (n, m).

    The results are equal to `torch.optim.Muon`. PyTorch's class processes each matrix separately, in over a
    thousand kernel launches for a small model, and copies the learning rate to the host, which CUDA graphs do
    not allow. This class processes matrices of equal shape together, and the learning rate may stay on the
    device.

    Args:
        params: real matrices, or parameter groups of matrices.
        lr: learning rate, a number or a scalar tensor.
        momentum: decay rate mu of the averaged gradient.
        weight_decay: decoupled weight decay wd.

    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 0.02,
        *,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if parameter.ndim != 2 or parameter.is_complex():
                got = f"{parameter.dtype} of shape {tuple(parameter.shape)}"
                raise ValueError(f"`params` must be real matrices; got {got}. Use AdamW for the others.")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform an optimisation step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            of_shape: dict[torch.Size, list[tuple[Tensor, Tensor]]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    of_shape.setdefault(parameter.shape, []).append((parameter, parameter.grad))
            for shape, pairs in of_shape.items():
                parameters, gradients = ([*tensors] for tensors in zip(*pairs, strict=True))
                self._step(parameters, gradients, max(1.0, shape[0] / shape[1]) ** 0.5, group)
        return loss

    def _step(
        self, parameters: list[Tensor], gradients: list[Tensor], scale: float, group: dict[str, Any]
    ) -> None:
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["momentum"] = torch.zeros_like(parameter)
        means = [self.state[parameter]["momentum"] for parameter in parameters]
        lerp_all(means, gradients, 1 - group["momentum"], in_place=True)
        directions = lerp_all(gradients, means, group["momentum"], in_place=False)
        directions = orthogonalized(torch.stack(directions)) * (scale * group["lr"])
        shrink_and_subtract(parameters, 1 - group["lr"] * group["weight_decay"], list(directions.unbind()))


def orthogonalized(matrices: Tensor) -> Tensor:
    """Return matrices (..., n, m) with singular values close to 1, by five Newton-Schulz iterations.

    X <- a X + (b X X^T + c (X X^T)^2) X, starting from matrices of Frobenius norm 1. An iteration maps each
    singular value s to a s + b s^3 + c s^5.
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    shape, x = x.shape, functional.normalize(x.flatten(-2), dim=-1, eps=1e-7).view(-1, *x.shape[-2:])
    for _ in range(STEPS):
        square = torch.bmm(x, x.mT)
        # a third of the operations of the same in matmul and add, which cost a small model more than the sums
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    x = x.view(shape)
    return x.mT if tall else x


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

    Returns:
        A dictionary for each non-empty group: "params", "algorithm", "peak_lr", "weight_decay".
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


def schedule_factor(step: int, config: OptimConfig, total_steps: int) -> float:
    """Return the learning rate of a step as a fraction of the peak learning rate.

    The warm-up is linear. The factor of step n is

        (n + 1) / w                                        n < w
        f + (1 - f) cos(pi (n - w) / (2 (N - w)))^2        otherwise, for "cosine"
        sqrt(w / (n + 1))                                  otherwise, for "inverse-sqrt"
        1                                                  otherwise, for "constant"

    where w is `warmup_steps`, N is `total_steps`, and f is `min_lr` / `lr`. The learning rate is positive at
    the first step, and at its peak at the last step of the warm-up. The cosine would reach `min_lr` one step
    after the last step.

    Source: GateLoop (Katsch 2023), tables 3 and 4: "cosine decay (linear warm-up)"; HGRN (Qin, Yang and Zhong
    2023), table 16: "Inverse sqrt".
    """
    warmup_steps = config.warmup_steps
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if config.schedule == "constant":
        return 1.0
    if config.schedule == "inverse-sqrt":
        return math.sqrt(warmup_steps / (step + 1))
    final = config.min_lr / config.lr
    angle = math.pi / 2 * (step - warmup_steps) / (total_steps - warmup_steps)
    return final + (1 - final) * math.cos(angle) ** 2


def cut_warmup(config: OptimConfig, total_steps: int) -> OptimConfig:
    """Return the configuration; a warm-up no shorter than the run is cut to a tenth, with a warning."""
    if config.warmup_steps < total_steps:
        return config
    shorter = dataclasses.replace(config, warmup_steps=max(1, total_steps // 10))
    warnings.warn(
        f"`optim.warmup_steps` = {config.warmup_steps} is not less than the steps of the run, {total_steps}, "
        f"so the warm-up is cut to {shorter.warmup_steps} steps. Pass --optim.warmup-steps to change it.",
        stacklevel=2,
    )
    return shorter
