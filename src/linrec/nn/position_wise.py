"""The end of state-space layers and long convolutions at every step: GELU, and a map of the channels."""

from typing import Literal, TypeAlias

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from linrec.rules import choice, require

__all__ = ["Output", "PositionWise"]

Output: TypeAlias = Literal["linear", "glu", "none"]


class PositionWise(nn.Module):
    """o = W GELU(y) + b, where W mixes all outputs of all channels.

    | `output` | o |
    |---|---|
    | "linear" | W GELU(y) + b |
    | "glu" | the first half of W GELU(y) + b, times the sigmoid of the second half |
    | "none" | GELU(y) |

    Args:
        d_model: channels of o.
        output: "linear", "glu" or "none".
        n_outputs: outputs of each channel; y has n_outputs d_model channels.
        activation: whether there is the GELU.

    Raises:
        ValueError: an unknown name, or several outputs with "none".

    Example:
        >>> import torch
        >>> PositionWise(4, output="glu", n_outputs=2)(torch.zeros(2, 10, 8)).shape
        torch.Size([2, 10, 4])
    """

    def __init__(
        self, d_model: int, *, output: Output = "linear", n_outputs: int = 1, activation: bool = True
    ) -> None:
        super().__init__()
        choice(Output, output=output)
        require(
            n_outputs == 1 or output != "none",
            f'`n_outputs` must be 1 with `output="none"`; got {n_outputs}. Pass "linear" or "glu".',
        )
        self.output, self.activation = output, activation
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        if output != "none":
            linear = nn.Linear(n_outputs * d_model, 2 * d_model if output == "glu" else d_model)
            self.weight, self.bias = linear.weight, linear.bias

    def forward(self, y: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch d_model"]:
        """Return o (..., d_model) of `y` (..., n_outputs d_model)."""
        o = functional.gelu(y) if self.activation else y
        if self.weight is not None:
            o = functional.linear(o, self.weight, self.bias)
        return functional.glu(o) if self.output == "glu" else o

    def extra_repr(self) -> str:
        """Return the form, which `print` shows."""
        return f"output={self.output!r}, activation={self.activation}"
