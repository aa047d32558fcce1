"""The token shift of RWKV: every step sees the input of the step before."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from linrec.ops import splitting

__all__ = ["token_shift"]


def token_shift(
    x: Float[Tensor, "b t d"],
    last: Float[Tensor, "b d"] | None = None,
    *,
    reset: Bool[Tensor, "b t"] | None = None,
) -> tuple[Float[Tensor, "b t d"], Float[Tensor, "b d"]]:
    """Return x_{t-1} for every t, with x_0 = last, and the input of the last step to go on from.

    Args:
        x: input (b, t, d).
        last: x_0 (b, d), in any precision; None means zeros.
        reset: (b, t) bool; where it is true, zeros are seen in place of the step before.

    Returns:
        x_{t-1} (b, t, d) in the dtype of `x`, and x_t of the last step (b, d) in float32 (float64 for double
        inputs); `last` for zero-length time.

    Raises:
        ValueError: the steps of a sequence are split over processes.

    Source:
        Peng and others, RWKV: Reinventing RNNs for the Transformer Era (2023), token shift.

    Example:
        >>> x = torch.tensor([1.0, 2.0, 3.0]).reshape(1, 3, 1)
        >>> before, last = token_shift(x)
        >>> before.flatten().tolist(), last.item()
        ([0.0, 1.0, 2.0], 3.0)
    """
    # the first step of a part comes after the last one of another process
    splitting.refuse("token_shift")
    wide = torch.promote_types(x.dtype, torch.float32)
    if last is None:
        last = torch.zeros_like(x[:, 0]) if x.shape[1] else x.new_zeros(len(x), x.shape[2])
    inputs = torch.cat([last[:, None].to(x.dtype), x], 1)
    before = inputs[:, :-1]
    if reset is not None:
        before = before.masked_fill(reset[..., None], 0)
    # a view would keep all inputs as long as the state
    return before, inputs[:, -1].to(wide, copy=True)
