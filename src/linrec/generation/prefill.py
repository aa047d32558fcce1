"""The prefill: prompts are processed in parallel, in pieces that bound the memory."""

import torch
from torch import Tensor

from linrec.generation.precision import autocast
from linrec.literals import Precision
from linrec.mixers import State
from linrec.models import LanguageModel
from linrec.models.compilation import compiling
from linrec.trees import leaves

# tokens of a piece, summed over the batch; with few tokens, a GPU waits for the launches of kernels
PIECE, PIECE_ON_GPU = 4096, 32_768
# of a compiled piece, with the most steps: compiled kernels fit one length
COMPILED_PIECE, COMPILED_STEPS = 8192, 1024


@torch.no_grad()
def prefill(
    model: LanguageModel,
    tokens: Tensor,
    reset: Tensor | None,
    layers: tuple[State, ...] | None,
    precision: Precision,
    *,
    mask: Tensor | None = None,
    compiled: LanguageModel | None = None,
) -> tuple[State, ...]:
    """Return the model's state after tokens (b, t), without computing logits.

    Args:
        model: the model.
        tokens: the prompts.
        reset: (b, t), true where a document begins.
        layers: the state before the tokens; None is the initial state.
        precision: of the computation.
        mask: (b, t), false at steps to leave out; None leaves out no steps.
        compiled: the model with its parts compiled. It processes pieces of a constant length; `model`
            processes the rest, and everything where the state grows.
    """
    batch = max(1, len(tokens))
    layers = model.init_state(len(tokens)) if layers is None else layers
    done = 0
    with autocast(precision, tokens.device):
        if compiled is not None and not _grows(layers):
            length = max(1, min(COMPILED_STEPS, COMPILED_PIECE // batch))
            done = tokens.shape[1] // length * length
            with compiling():
                layers = _in_pieces(compiled, tokens, reset, mask, layers, range(0, done, length), length)
        length = max(1, (PIECE_ON_GPU if tokens.is_cuda else PIECE) // batch)
        return _in_pieces(model, tokens, reset, mask, layers, range(done, tokens.shape[1], length), length)


def _in_pieces(
    model: LanguageModel,
    tokens: Tensor,
    reset: Tensor | None,
    mask: Tensor | None,
    layers: tuple[State, ...],
    starts: range,
    length: int,
) -> tuple[State, ...]:
    for start in starts:
        now = slice(start, start + length)
        begins, kept = (None if x is None else x[:, now] for x in (reset, mask))
        _, layers = model.hidden(tokens[:, now], layers, reset=begins, mask=kept)
    return layers


def _grows(layers: tuple[State, ...]) -> bool:
    """Return whether the state of no steps, or of few, holds a cache that grows with each step."""
    return any(tensor.numel() == 0 for tensor in leaves(layers))
