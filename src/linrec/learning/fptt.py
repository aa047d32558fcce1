"""Forward propagation through time: updates with a regulariser in place of the rest of the sequence."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from linrec.learning.windows import TBPTT
from linrec.rules import at_least, require

__all__ = ["FPTT"]


class FPTT(TBPTT):
    """Forward propagation through time: truncated gradients with a regulariser per parameter.

        minimise l_t(theta) - <theta, lam> + alpha / 2 |theta - m|^2    by one step of the optimiser
        lam <- lam - alpha (theta - m),    m <- (1 - beta) m + beta theta - beta / alpha lam

    m is a running mean of the parameters, and lam an estimate of the gradient of l_t at the new parameters.
    If the minimisation is exact, lam is this gradient. At the start, m is theta, and lam is 0. Each update is
    a part of the sequence; gradients do not pass its start.

    m and lam are in the optimiser's state of each parameter, as "fptt_mean" and "fptt_dual", so that a
    checkpoint has them. `means()` and `duals()` return them.

    Args:
        alpha: strength of the regulariser; 0 disables it, as the released loop for the adding problem does.
        beta: share of the new parameters in m, in (0, 1].

    The other arguments are those of `TBPTT`.

    Source:
        Kag and Saligrama, Training Recurrent Neural Networks via Forward Propagation Through Time (2021), in
        the form of the released code. Equation 75 of the survey has 1 / (2 alpha) for 1 / alpha.

    Example:
        >>> from linrec import mixers
        >>> mixer = mixers.build("lstm", 4)
        >>> learner = FPTT(mixer, torch.optim.Adam(mixer.parameters()))
        >>> learner.chunk(torch.ones(1, 6, 4), torch.ones(1, 6, 4)).updated
        True
        >>> learner.duals()["rnn.bias_hh_l0"].shape
        torch.Size([16])
    """

    name: ClassVar[str] = "fptt"

    def __init__(self, *args: Any, alpha: float = 0.5, beta: float = 0.5, **options: Any) -> None:
        super().__init__(*args, **options)
        at_least(0, alpha=alpha, cure="0 disables the regulariser.")
        require(0 < beta <= 1, f"`beta` must be in (0, 1]; got {beta}. 1 forgets the mean.")
        self.alpha, self.beta = alpha, beta

    @override
    def options(self) -> dict[str, Any]:
        return super().options() | {"alpha": self.alpha, "beta": self.beta}

    def means(self) -> dict[str, Tensor]:
        """Return m of each parameter by its name."""
        return {name: self._kept(p).get("fptt_mean", p.detach().clone()) for name, p in self._named.items()}

    def duals(self) -> dict[str, Tensor]:
        """Return lam of each parameter by its name."""
        return {name: self._kept(p).get("fptt_dual", torch.zeros_like(p)) for name, p in self._named.items()}

    @override
    def before_update(self) -> None:
        self._means, self._duals = self.means(), self.duals()
        for name, p in self._named.items():
            if p.grad is not None and self.alpha:
                p.grad += self.alpha * (p.detach() - self._means[name]) - self._duals[name]

    @override
    @torch.no_grad()
    def after_update(self) -> None:
        for name, p in self._named.items():
            # an optimiser of a parameter without a gradient starts later, where its state is empty
            if p.grad is None or not self.alpha:
                continue
            mean = self._means[name]
            dual = self._duals[name] - self.alpha * (p - mean)
            state = next(optimizer for optimizer in self.optimizers if _has(optimizer, p)).state[p]
            state["fptt_dual"] = dual
            state["fptt_mean"] = (1 - self.beta) * mean + self.beta * (p - dual / self.alpha)

    def _kept(self, p: nn.Parameter) -> dict[str, Any]:
        """Return the state that an optimiser has of a parameter."""
        return next((of.state[p] for of in self.optimizers if p in of.state), {})


def _has(optimizer: Optimizer, p: nn.Parameter) -> bool:
    return any(p is other for group in optimizer.param_groups for other in group["params"])
