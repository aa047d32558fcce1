"""Masks, positions and packed documents of transformers, as masks and resets of linrec."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn import functional

from linrec.rules import require

__all__ = ["Reading", "check_last_piece", "reading"]

# boundaries of documents, counted over the rows one after the other
BOUNDARIES = "cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens"
# tensors for the loss
OF_LOSS = "num_items_in_batch", "shift_labels"


class Reading(NamedTuple):
    """How a model reads the steps of a call.

    Attributes:
        mask: false at steps to leave out (b, t); None leaves out no steps.
        reset: true where a document begins behind other steps of its row (b, t); None if no document does.
    """

    mask: Bool[Tensor, "b t"] | None
    reset: Bool[Tensor, "b t"] | None


def reading(
    x: Tensor,
    past: int,
    read: Tensor | int,
    mask: Tensor | None,
    positions: Tensor | None,
    others: Mapping[str, Any],
) -> Reading:
    """Return the mask and the resets of a call.

    Args:
        x: embeddings of the call (b, t, d).
        past: steps before the call, with masked steps.
        read: steps before the call, without masked steps, of all rows or of each row (b,).
        mask: 0 at steps to leave out, and 1 or the number of a document at others, (b, past + t) or (b, t).
        positions: positions (b or 1, t). A document begins at 0, and where positions do not increase.
        others: further arguments of the call by name, with the packed documents.
    """
    numbers = list(_documents(x, past, others))
    if mask is None and positions is None and not numbers:
        return Reading(None, None)
    (batch, time), given = x.shape[:2], mask
    if mask is None:
        mask = x.new_ones(batch, time, dtype=torch.int64)
    else:
        cure = "Masks of pairs of steps, such as (batch, 1, time, time), are not for recurrences."
        _check_shape("attention_mask", mask, [(batch, past + time), (batch, time)], cure)
        mask = mask.long()
    earlier = mask.shape[1] - time
    unknown = past - earlier
    real, step = mask != 0, torch.arange(mask.shape[1], device=x.device)
    # the last step before each step that is not masked
    before = functional.pad(torch.where(real, step, -1).cummax(1).values, (1, -1), value=-1)
    behind, last = before >= 0, before.clamp(min=0)
    begin = torch.zeros_like(real)
    for number in (mask, *numbers):
        begin = begin | (behind & (number != number.gather(1, last)))
    if positions is not None:
        _check_shape("position_ids", positions, [(batch, time), (1, time)], "Count each row.")
        at = functional.pad(positions.expand(batch, -1), (earlier, 0), value=-1)
        # behind masked steps, `generate` counts on from other positions
        again = functional.pad((at[:, 1:] <= at[:, :-1]) & real[:, :-1], (1, 0))
        begin = begin | again | ((at == 0) & (behind | (unknown > 0)))
    kept, reset = real[:, earlier:], (begin & real)[:, earlier:]
    if torch.compiler.is_compiling():
        return Reading(kept, reset)
    wrong = real.new_zeros(()) if given is None else ((mask < 0) | (mask != given)).any()
    other = (real[:, :earlier].sum(1) != read).any() if earlier else real.new_zeros(())
    # one wait for the device
    flags = [kept.all(), reset.any(), (mask > 1).any(), wrong, other]
    whole, packed, numbered, wrong, other = torch.stack(flags).tolist()
    require(
        not wrong and not (numbered and unknown),
        "`attention_mask` must hold 0 at steps to leave out and 1 at others, or numbers of documents for all "
        f"{past + time} steps so far; got {'other values' if wrong else f'numbers for {time} steps'}. Pass "
        "the mask of the tokenizer.",
    )
    require(
        not other,
        f"`attention_mask` must mask those of the {past} steps in the cache that were masked when the model "
        "read them; got others. A state keeps what it has read: pass the same mask, or no cache.",
    )
    return Reading(None if whole else kept, reset if packed else None)


def check_last_piece(mask: Tensor, past: int, piece: int | None) -> None:
    """Raise ValueError if the last piece of a prompt masks a whole row: no output tells the next token.

    Args:
        mask: 0 at steps to leave out (b, past + t).
        past: steps in the cache.
        piece: steps of a piece; None reads the prompt at once.
    """
    new = mask[:, past:]
    pieces = new.split(piece or max(1, new.shape[1]), dim=1)
    require(
        bool(pieces[-1].any(1).all()),
        "`attention_mask` must keep a step of each row among the last steps that are read together, "
        f"{pieces[-1].shape[1]}; got a row without them. Pad on the left, or pass `use_cache=False`.",
    )


def _documents(x: Tensor, past: int, others: Mapping[str, Any]) -> Iterator[Int[Tensor, "b t"]]:
    """Yield the document of each step, from each argument that tells it."""
    (batch, time), tensors = x.shape[:2], {name: y for name, y in others.items() if isinstance(y, Tensor)}
    for name, value in tensors.items():
        if name in OF_LOSS:
            continue
        if name not in (*BOUNDARIES, "seq_idx"):
            raise TypeError(
                f"`{name}` must not be a tensor, which linrec would ignore; got shape {tuple(value.shape)}. "
                f"Packed documents are for `position_ids`, `seq_idx`, {', '.join(BOUNDARIES)} or the mask."
            )
        require(
            not past,
            f"`{name}` must come without steps in the cache, whose documents it does not know; got {past} "
            "steps. Pass `attention_mask` with the numbers of documents, or rows of one document.",
        )
        if name == "seq_idx":
            _check_shape(name, value, [(batch, time)], "Number the steps.")
            yield value
            continue
        ends = value[1:].contiguous()
        if not torch.compiler.is_compiling():
            require(
                value.dim() == 1
                and value[:1].tolist() == [0]
                and value[-1:].tolist() == [batch * time]
                and bool((value.diff() >= 0).all()),
                f"`{name}` must rise from 0 to the {batch * time} steps of the batch; got {value.tolist()}. "
                "Pass the begin of each document, and the number of steps.",
            )
        step = torch.arange(batch * time, device=x.device, dtype=value.dtype)
        yield torch.searchsorted(ends, step, right=True).view(batch, time)


def _check_shape(name: str, x: Any, shapes: list[tuple[int, int]], cure: str) -> None:
    """Raise unless a tensor has one of some shapes."""
    found = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
    require(
        found in shapes,
        f"`{name}` must have shape {' or '.join(map(str, dict.fromkeys(shapes)))}; got {found}. {cure}",
    )
