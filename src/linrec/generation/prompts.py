"""Prompts: batches of several lengths, and checks of tokens."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int, Int64
from torch import Tensor

from linrec.models import LanguageModel

__all__ = ["Prompts", "pad_prompts"]


class Prompts(NamedTuple):
    """Left-padded prompts as rows of a batch.

    Attributes:
        tokens: the prompts, left-padded with 0, (b, t).
        reset: true at the first token of each prompt, (b, t).
    """

    tokens: Int64[Tensor, "b t"]
    reset: Bool[Tensor, "b t"]


def pad_prompts(prompts: Sequence[Int[Tensor, "_"]]) -> Prompts:
    """Left-pad prompts of several lengths to a batch, for `generate(model, tokens, reset=reset, ...)`.

    The reset at the start of each prompt keeps the padding from affecting it, so every prompt is continued as
    if it were alone.

    Args:
        prompts: prompts of at least one token each, at least one prompt, all on the same device.

    Returns:
        Tokens and resets, with the length of the longest prompt.

    Raises:
        ValueError: `prompts` is empty or contains an empty prompt.

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


def checked_vocabulary(model: LanguageModel, vocab_size: int | None) -> int:
    """Return the number of tokens to choose from, after checking the model."""
    if model.training:
        raise ValueError("`model` must be in evaluation mode; got training mode. Call `model.eval()`.")
    known, n_outputs = model.config.vocab_size, model.config.n_outputs
    if n_outputs not in (None, known):
        raise ValueError(
            f"`model` must have an output for each of the {known} tokens; got {n_outputs} outputs. It is "
            "not a language model."
        )
    if vocab_size is None:
        return known
    if not 1 <= vocab_size <= known:
        raise ValueError(
            f"`vocab_size` must be in 1 .. {known}, the model's vocabulary size; got {vocab_size}."
        )
    return vocab_size


def check_range(tokens: Tensor, vocab_size: int) -> None:
    """Raise a ValueError unless all tokens are in 0 .. vocab_size - 1."""
    outside = tokens[(tokens < 0) | (tokens >= vocab_size)]
    if len(outside):
        raise ValueError(
            f"`tokens` must be in 0 .. {vocab_size - 1}, the model's vocabulary; got {outside[0].item()}. "
            "Encode the text with the model's own tokenizer."
        )
