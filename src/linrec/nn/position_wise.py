"""What state-space layers and long convolutions end with, at every step for itself: GELU, a map, a GLU."""

from typing import Literal, TypeAlias

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from linrec.rules import choice

Output: TypeAlias = Literal["linear", "glu", "none"]


def make_output(output: Output, d_in: int, d_model: int) -> nn.Module:
    """Return the map W that `position_wise` takes, of twice the width for a GLU; "none" has none.

    Args:
        output: "linear", "glu" or "none".
        d_in: channels of what comes in.
        d_model: channels of what goes out.

    Raises:
        ValueError: an unknown name.

    Example:
        >>> make_output("glu", 8, 8)
        Linear(in_features=8, out_features=16, bias=True)
    """
    choice(Output, output=output)
    if output == "none":
        return nn.Identity()
    return nn.Linear(d_in, 2 * d_model if output == "glu" else d_model)


def position_wise(
    y: Float[Tensor, "b t d_in"], out: nn.Module, *, output: Output, activation: bool
) -> Float[Tensor, "b t d_model"]:
    """W GELU(y), or with "glu" its first half times the sigmoid of its second; see `make_output`.

    Example:
        >>> import torch
        >>> out = make_output("none", 2, 2)
        >>> position_wise(torch.zeros(1, 1, 2), out, output="none", activation=True)
        tensor([[[0., 0.]]])
    """
    o = out(functional.gelu(y) if activation else y)
    return functional.glu(o) if output == "glu" else o
