"""FNet: Mixing Tokens with Fourier Transforms (Lee-Thorp and others, 2021).

    y = Re(F_seq(F_hidden(x)))

x input, F discrete Fourier transforms over the channels and over the steps of a sequence, not normalised.
There are no parameters. Every output depends on every input, and on the number of inputs: there is no causal
form.
"""

import torch
from torch import Tensor

from linrec.nn.mixer import Mixer, State
from linrec.nn.seen_steps import SeenSteps

__all__ = ["FNet"]


class FNet(Mixer):
    """y = Re(F_seq(F_hidden(x))): Fourier transforms over channels and steps in place of attention.

    The mixer sees its whole document, from one reset to the next, and has no state. It is for encoders, such
    as `SequenceClassifier`. Outputs grow with sqrt(t d_model); the paper's blocks normalise after the skip
    connection, `norm_position="post"`. Time is t log t, and quadratic in the length with resets.

    Args:
        d_model: width of the sequence.

    Raises:
        ValueError: a `state` is given.

    Source:
        FNet (Lee-Thorp, Ainslie, Eckstein and Ontanon, 2021), section 3.2, eq. 3.

    Example:
        >>> y, state = FNet(8)(torch.zeros(2, 10, 8))
        >>> y.shape, state
        (torch.Size([2, 10, 8]), None)
    """

    def __init__(self, d_model: int) -> None:
        super().__init__(d_model)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return y and None."""
        if 0 in x.shape:
            return x.clone(), None
        dtype = torch.promote_types(x.dtype, torch.float32)
        if reset is None:
            return torch.fft.fft2(x.to(dtype)).real.to(x.dtype), None
        none = reset.new_zeros(x.shape[0], 0, dtype=torch.int64)
        seen = SeenSteps(none, x.shape[1], reset=reset, causal=False)
        hidden = torch.fft.fft(seen.entered(x).to(dtype))
        C, S = self._waves(seen, dtype)
        # the real part of e^(-i angle) z
        return seen.left((C @ hidden.real + S @ hidden.imag).to(x.dtype)), None

    def _waves(self, seen: SeenSteps, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of F_seq for the documents of a batch, (b, t, t)."""
        n, length = seen.new, seen.visible.sum(-1, keepdim=True)
        # integers, so that large angles are exact
        turns = (n[:, :, None] * n[:, None] % length).to(dtype) / length
        angle = 2 * torch.pi * turns
        hidden = ~seen.visible
        return angle.cos().masked_fill(hidden, 0), angle.sin().masked_fill(hidden, 0)

    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> State:
        """Return None: there is no state."""

    @property
    def is_causal(self) -> bool:
        """False: every output depends on the whole sequence."""
        return False
