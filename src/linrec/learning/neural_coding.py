"""The network of P-TNCN: two layers of states, which predict each other and the next input."""

import torch
from jaxtyping import Bool, Float, Num
from torch import Tensor, nn
from torch.nn import functional

from linrec.rules import at_least, positive

__all__ = ["PTNCNNetwork"]


class PTNCNNetwork(nn.Module):
    """The network of P-TNCN, in row vectors; y1 and y2 are the corrected states of the last step.

        z2 = y2 V2 + y1 M2,    f2 = tanh(z2)
        z1 = x M1 + y1 V1 + y2 U1,    f1 = tanh(z1),    prediction = f1 W1

    Layer 2 predicts layer 1 by f2 W2; E1 and E2 carry errors back. A call without targets takes f1 and f2 as
    the next states. All weights start Gaussian.

    Args:
        n_features: number of inputs, if they are numbers.
        n_outputs: number of predictions.
        vocab_size: number of tokens, if inputs are tokens; they become one-hot.
        hidden: width H of both layers.
        skip: whether there are M2 and U1, between the layers.
        std: standard deviation of the weights at the start.

    Source:
        Ororbia, Mali, Giles and Kifer, Continual Learning of Recurrent Neural Networks by Locally Aligning
        Distributed Representations (2020), and the released code.
    """

    M1: Tensor
    M2: Tensor
    U1: Tensor
    V1: Tensor
    V2: Tensor
    W1: Tensor

    def __init__(
        self,
        n_features: int | None,
        n_outputs: int,
        *,
        vocab_size: int | None = None,
        hidden: int = 128,
        skip: bool = True,
        std: float = 0.05,
    ) -> None:
        super().__init__()
        at_least(1, hidden=hidden)
        positive(std=std)
        self.vocab_size, self.hidden, self.skip = vocab_size, hidden, skip
        width = vocab_size or n_features or 0
        shapes = {"M1": (width, hidden), "W1": (hidden, n_outputs), "E1": (n_outputs, hidden)}
        shapes |= {name: (hidden, hidden) for name in ("V1", "V2", "W2", "E2")}
        shapes |= {name: (hidden, hidden) for name in ("U1", "M2") if skip}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(std * torch.randn(shape)))

    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> dict[str, Tensor]:
        """Return zeros y1 and y2 (batch, hidden)."""
        return {name: self.V1.new_zeros(batch, self.hidden, device=device) for name in ("y1", "y2")}

    def forward(
        self,
        x: Num[Tensor, "b t *n"],
        state: dict[str, Tensor] | None = None,
        *,
        reset: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b t o"], dict[str, Tensor]]:
        """Return predictions before their output function, and the states."""
        state = self.init_state(len(x), device=x.device) if state is None else state
        outputs = []
        for t in range(x.shape[1]):
            if reset is not None:
                state = {name: torch.where(reset[:, t, None], 0, y) for name, y in state.items()}
            _, z1, z2 = self.predict(x[:, t], state)
            state = {"y1": z1.tanh(), "y2": z2.tanh()}
            outputs.append(state["y1"] @ self.W1)
        return torch.stack(outputs, 1), state

    def predict(self, x: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return x as numbers, z1 and z2 of a step."""
        if self.vocab_size:
            x = functional.one_hot(x, self.vocab_size).to(self.M1.dtype)
        z1, z2 = x @ self.M1 + state["y1"] @ self.V1, state["y2"] @ self.V2
        if self.skip:
            z1, z2 = z1 + state["y2"] @ self.U1, z2 + state["y1"] @ self.M2
        return x, z1, z2
