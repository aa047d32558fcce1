"""Gated linear units: channel mixing in which one projection of a step gates another."""

from typing import TYPE_CHECKING, Literal

from jaxtyping import Float
from torch import Tensor, nn

from linrec.nn.activations import ACTIVATIONS
from linrec.nn.projections import projected
from linrec.rules import choice

__all__ = ["GLU", "GLUActivation"]

GLUActivation = Literal["sigmoid", "silu", "gelu", "gelu_tanh", "identity"]


class GLU(nn.Module):
    """y = W_3 (f(W_1 x + b_1) * (W_2 x + b_2)) + b_3, the channel mixing of HGRN.

    | `activation` | f            | called   |
    |--------------|--------------|----------|
    | "sigmoid"    | Sigmoid      | GLU      |
    | "silu"       | SiLU         | SwiGLU   |
    | "gelu"       | GELU         | GEGLU    |
    | "gelu_tanh"  | GELU by tanh | GEGLU    |
    | "identity"   | none         | Bilinear |

    HGRN names the unit without a formula, so the default is the unit of that name. The authors' released
    language models have no activation, "identity"; their models of the Long Range Arena have SiLU.
    "gelu_tanh" is the approximation z (1 + tanh(sqrt(2 / pi) (z + 0.044715 z^3))) / 2, which Gemma has.

    Args:
        d_model: width of input and output.
        d_hidden: width of the product; HGRN's language models have 2 d_model.
        activation: f, of the gate.
        bias: whether there are b_1, b_2 and b_3.

    Raises:
        ValueError: there is no such activation; the message names the nearest.

    Source:
        Shazeer, GLU Variants Improve Transformer (2020), eq. 4 and 5, with biases; HGRN (Qin, Yang and Zhong,
        2023), section 3.1 and figure 1.

    Example:
        >>> import torch
        >>> GLU(64, 128)(torch.zeros(2, 5, 64)).shape
        torch.Size([2, 5, 64])
    """

    of_one_input = "gate", "up"

    def __init__(
        self, d_model: int, d_hidden: int, *, activation: GLUActivation = "sigmoid", bias: bool = True
    ) -> None:
        super().__init__()
        choice(GLUActivation, activation=activation)
        self.activation = activation
        self.gate = nn.Linear(d_model, d_hidden, bias=bias)
        self.up = nn.Linear(d_model, d_hidden, bias=bias)
        self.down = nn.Linear(d_hidden, d_model, bias=bias)

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """Apply the function to `x` (..., d_model)."""
        gate, up = projected(x, self.gate, self.up)
        return self.down(ACTIVATIONS[self.activation](gate) * up)

    if TYPE_CHECKING:
        __call__ = forward
