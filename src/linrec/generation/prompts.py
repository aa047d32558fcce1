"""Prompts of several lengths in one batch."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int, Int64
from torch import Tensor

__all__ = ["Prompts", "pad_prompts"]


class Prompts(NamedTuple):
    """Prompts as rows of one batch.

    Attributes:
        tokens: each prompt at the end of its row, 0 before it, (b, t).
        reset: true where a prompt begins, (b, t).
    """

    tokens: Int64[Tensor, "b t"]
    reset: Bool[Tensor, "b t"]


def pad_prompts(prompts: Sequence[Int[Tensor, "_"]]) -> Prompts:
    """Put prompts of several lengths into one batch, for `generate(model, tokens, reset=reset, ...)`.

    Nothing of the padding reaches the prompts, so each is continued as it would be alone.

    Args:
        prompts: at least one, each with at least one token, on one device.

    Returns:
        Tokens and resets, as long as the longest.

    Raises:
        ValueError: there is no prompt, or an empty one.

    Example:
        >>> tokens, reset = pad_prompts([torch.tensor([5, 6, 7]), torch.tensor([8])])
        >>> tokens.tolist(), reset.tolist()
        ([[5, 6, 7], [0, 0, 8]], [[True, False, False], [False, False, True]])
    """
    if not prompts or min(map(len, prompts)) == 0:
        lengths = [len(prompt) for prompt in prompts]
        raise ValueError(f"`prompts` must hold prompts of at least one token each; got lengths {lengths}.")
    longest = max(map(len, prompts))
    tokens = torch.zeros(len(prompts), longest, dtype=torch.int64, device=prompts[0].device)
    reset = torch.zeros_like(tokens, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        tokens[row, longest - len(prompt) :] = prompt
        reset[row, longest - len(prompt)] = True
    return Prompts(tokens, reset)
