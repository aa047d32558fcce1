"""The Muon optimiser, batched over matrices of equal shape."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

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
        params: matrices, or parameter groups of matrices.
        lr: learning rate, a number or a scalar tensor.
        momentum: decay rate mu of the averaged gradient.
        weight_decay: decoupled weight decay wd.

    Raises:
        ValueError: a parameter is not a real matrix.

    Source:
        Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024).

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2, 3))
        >>> weight.grad = torch.tensor([[0.0, 5.0, 0.0], [1e-2, 0.0, 0.0]])
        >>> Muon([weight], lr=0.1).step()
        >>> weight.detach().abs().amax(dim=1) > 0.06
        tensor([True, True])
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
        torch._foreach_lerp_(means, gradients, 1 - group["momentum"])
        directions = torch._foreach_lerp(gradients, means, group["momentum"])
        directions = orthogonalized(torch.stack(directions)) * (scale * group["lr"])
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_sub_(parameters, list(directions.unbind()))


def orthogonalized(matrices: Tensor) -> Tensor:
    """Return matrices (..., n, m) with singular values close to 1, by five Newton-Schulz iterations.

    X <- a X + (b X X^T + c (X X^T)^2) X, starting from matrices of Frobenius norm 1. An iteration maps each
    singular value s to a s + b s^3 + c s^5.

    Example:
        >>> orthogonalized(torch.diag(torch.tensor([3.0, 1.0]))).diagonal().sub(1).abs() < 0.33
        tensor([True, True])
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
