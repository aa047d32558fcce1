"""Generalised teacher forcing of networks that reconstruct a dynamical system."""

from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from typing_extensions import override

from linrec.learning.learner import Step
from linrec.learning.windows import BPTT
from linrec.rules import at_least, require

__all__ = ["GTF", "ShallowPLRNN"]


class ShallowPLRNN(nn.Module):
    """The shallow piecewise linear network, whose state is the observed state.

        F(z) = A * z + W_1 relu(W_2 z + h_2) + h_1,    clipped: - W_1 relu(W_2 z) more
        z_{t+1} = F(alpha x_t + (1 - alpha) z_t),    z_1 = F(x_0)

    The prediction of step t is z_{t+1}. alpha is the buffer `alpha`, 1 at the start: 1 is teacher forcing, 0
    runs freely from x_0.

    Args:
        n_features: number of observations M.
        n_outputs: the same number.
        vocab_size: None; tokens have no dynamics.
        hidden: width L.
        clipped: whether the difference of two rectifiers bounds the orbits.

    Source:
        Hess, Monfared, Brenner and Durstewitz, Generalized Teacher Forcing for Learning Chaotic Dynamics
        (2023), and the released code.
    """

    alpha: Tensor

    def __init__(
        self,
        n_features: int | None,
        n_outputs: int,
        *,
        vocab_size: int | None = None,
        hidden: int = 50,
        clipped: bool = False,
    ) -> None:
        super().__init__()
        require(
            n_features == n_outputs and vocab_size is None,
            f"`n_outputs` must be `n_features`, the observed state; got {n_outputs} and {n_features}.",
        )
        at_least(1, hidden=hidden)
        M, self.clipped = n_outputs, clipped
        self.A = nn.Parameter(torch.empty(M).uniform_(0.5, 0.9))
        self.W_1 = nn.Parameter(torch.empty(M, hidden).uniform_(-1, 1) / hidden**0.5)
        self.W_2 = nn.Parameter(torch.empty(hidden, M).uniform_(-1, 1) / M**0.5)
        self.h_1 = nn.Parameter(torch.zeros(M))
        self.h_2 = nn.Parameter(torch.empty(hidden).uniform_(-1, 1) / hidden**0.5)
        self.register_buffer("alpha", torch.ones(()))

    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> dict[str, Tensor]:
        """Return z, and whether a sequence has begun, which z_1 = F(x_0) needs."""
        z = self.A.new_zeros(batch, len(self.A), device=device)
        return {"z": z, "begun": torch.zeros(batch, dtype=torch.bool, device=device)}

    def forward(
        self,
        x: Float[Tensor, "b t m"],
        state: dict[str, Tensor] | None = None,
        *,
        reset: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b t m"], dict[str, Tensor]]:
        """Return z_{t+1} of each step, and the state."""
        state = self.init_state(len(x), device=x.device) if state is None else state
        z, begun, outputs = state["z"], state["begun"], []
        for t in range(x.shape[1]):
            begun = begun if reset is None else begun & ~reset[:, t]
            alpha = torch.where(begun[:, None], self.alpha, 1)
            z, begun = self.step(torch.lerp(z, x[:, t], alpha)), torch.ones_like(begun)
            outputs.append(z)
        return torch.stack(outputs, 1), {"z": z, "begun": begun}

    def step(self, z: Float[Tensor, "*b m"]) -> Float[Tensor, "*b m"]:
        """Return F(z)."""
        inner = z @ self.W_2.T
        rectified = (inner + self.h_2).relu() - (inner.relu() if self.clipped else 0)
        return self.A * z + rectified @ self.W_1.T + self.h_1

    def jacobians(self, z: Float[Tensor, "*b m"]) -> Float[Tensor, "*b m m"]:
        """Return dF/dz at each z."""
        inner = z @ self.W_2.T
        slopes = (inner + self.h_2 > 0).to(z.dtype) - ((inner > 0).to(z.dtype) if self.clipped else 0)
        return self.A.diag() + (self.W_1 * slopes[..., None, :]) @ self.W_2


class GTF(BPTT):
    """Generalised teacher forcing: backpropagation through time of a partly forced `ShallowPLRNN`.

    The Jacobian of a forced step is (1 - alpha) J, so that gradients of chaotic systems stay bounded. With
    `adaptive`, every `every` updates takes

        s = max over rows of the geometric mean over time of |J(x_t)|,    a = max(0, 1 - 1 / s)
        alpha <- a if a > alpha, else gamma alpha + (1 - gamma) a

    with spectral norms at the data. Each chunk is a whole sequence x_t with targets x_{t+1}. A run of the
    model itself is free if its `alpha` is 0.

    Args:
        alpha: the forcing in [0, 1]; the start of an adaptive one.
        adaptive: whether alpha follows the norms.
        gamma: decay of alpha.
        every: updates between two changes.

    The other arguments are those of `Learner`; the model is a `ShallowPLRNN`.

    Source:
        Hess and others (2023), equations 8 and 14, and the released code.

    Example:
        >>> learner = GTF(ShallowPLRNN(3, 3), alpha=0.3)
        >>> learner.chunk(torch.zeros(2, 9, 3), torch.zeros(2, 9, 3)).loss.shape
        torch.Size([2, 9])
    """

    name: ClassVar[str] = "gtf"
    network: ClassVar[type[nn.Module] | None] = ShallowPLRNN
    model: ShallowPLRNN

    def __init__(
        self,
        *args: Any,
        alpha: float = 0.3,
        adaptive: bool = False,
        gamma: float = 0.999,
        every: int = 5,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        for name, value in (("alpha", alpha), ("gamma", gamma)):
            require(0 <= value <= 1, f"`{name}` must be in [0, 1]; got {value}.")
        at_least(1, every=every)
        self.adaptive, self.gamma, self.every, self._start = adaptive, gamma, every, alpha
        self.model.alpha.fill_(alpha)
        self._inputs: Tensor | None = None

    @override
    def options(self) -> dict[str, Any]:
        own = {"alpha": self._start, "adaptive": self.adaptive, "gamma": self.gamma, "every": self.every}
        return super().options() | own

    @override
    def chunk(self, inputs: Tensor, *args: Any, **options: Any) -> Step:
        self._inputs = inputs
        return super().chunk(inputs, *args, **options)

    @override
    @torch.no_grad()
    def after_update(self) -> None:
        if not self.adaptive or (self.updates + 1) % self.every or self._inputs is None:
            return
        norms = torch.linalg.matrix_norm(self.model.jacobians(self._inputs), 2)
        s = norms.log().mean(1).max().exp()
        new, alpha = (1 - 1 / s).clamp(min=0), self.model.alpha
        alpha.copy_(torch.where(new > alpha, new, self.gamma * alpha + (1 - self.gamma) * new))
