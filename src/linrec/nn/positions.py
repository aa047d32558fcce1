"""Steps of a sequence counted from its start, over resets and pieces."""

import torch
from jaxtyping import Bool, Int
from torch import Tensor

__all__ = ["positions"]


def positions(
    seen: Int[Tensor, "b"], time: int, *, reset: Bool[Tensor, "b t"] | None = None
) -> tuple[Int[Tensor, "b t"], Int[Tensor, "b"]]:
    """Return the position of every step, 0 where its sequence starts, and the steps seen after the last one.

    Args:
        seen: steps of each sequence before the first (b,), int64.
        time: steps t.
        reset: (b, t) bool; true where a new sequence starts.

    Returns:
        Positions (b, t) and the next step's position (b,), int64.

    Example:
        >>> reset = torch.tensor([[False, False, True, False]])
        >>> position, seen = positions(torch.tensor([5]), 4, reset=reset)
        >>> position.tolist(), seen.tolist()
        ([[5, 6, 0, 1]], [2])
    """
    step = torch.arange(time, device=seen.device)
    begin = -seen[:, None].expand(-1, time)
    if reset is not None:
        begin = torch.where(reset, step, begin).cummax(1).values
    position = step - begin
    return position, torch.cat([seen[:, None] - 1, position], 1)[:, -1] + 1
