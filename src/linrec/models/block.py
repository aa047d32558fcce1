"""The residual block of every model: time mixing, then channel mixing."""

from typing import Literal, TypeAlias

from jaxtyping import Bool, Float
from torch import Tensor, nn

from linrec.errors import unknown
from linrec.mixers import Mixer, State
from linrec.nn.norms import Norm, make_norm

__all__ = ["Block", "NormPosition"]

NormPosition: TypeAlias = Literal["pre", "post"]


class Block(nn.Module):
    """Time mixing, then channel mixing, each with a skip connection and a norm.

    | `norm_position` | each sublayer f        |
    |-----------------|------------------------|
    | "pre"           | x = x + f(norm(x))     |
    | "post"          | x = norm(x + f(x))     |

    The paper lists skip connections and layer normalisation and does not say where the norm stands.

    Args:
        mixer: the time mixing.
        channel_mixing: maps (..., d_model) to (..., d_model), each step alone.
        norm: "layer" or "rms".
        norm_position: "pre" or "post".
        dropout: probability, on the output of each sublayer.

    Source:
        GateLoop (Katsch, 2023), appendix C and figure 9.

    Example:
        >>> import torch
        >>> from linrec.mixers import build
        >>> from linrec.nn import FeedForward
        >>> block = Block(build("gate_loop", 8), FeedForward(8, 16))
        >>> y, state = block(torch.zeros(2, 5, 8))
        >>> y.shape
        torch.Size([2, 5, 8])
    """

    def __init__(
        self,
        mixer: Mixer,
        channel_mixing: nn.Module,
        *,
        norm: Norm = "layer",
        norm_position: NormPosition = "pre",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if norm_position not in ("pre", "post"):
            raise unknown("`norm_position`", norm_position, ["pre", "post"])
        self.norm_position = norm_position
        self.mixer_norm = make_norm(norm, mixer.d_model)
        self.mixer = mixer
        self.channel_mixing_norm = make_norm(norm, mixer.d_model)
        self.channel_mixing = channel_mixing
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Float[Tensor, "b *time d_model"],
        state: State = None,
        *,
        reset: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b *time d_model"], State]:
        """Apply the block to `x`; arguments and results are those of `Mixer.forward`."""
        if self.norm_position == "post":
            y, state = self.mixer(x, state, reset=reset)
            x = self.mixer_norm(x + self.dropout(y))
            return self.channel_mixing_norm(x + self.dropout(self.channel_mixing(x))), state
        y, state = self.mixer(self.mixer_norm(x), state, reset=reset)
        x = x + self.dropout(y)
        x = x + self.dropout(self.channel_mixing(self.channel_mixing_norm(x)))
        return x, state
