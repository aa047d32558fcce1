"""Halos: operators that read the last n inputs receive these inputs from earlier segments.

The map of a segment is "the last n of (halo, inputs), with zeros for all before the last reset". A segment of
fewer than n steps passes on a part of what it received, so every rank composes the maps of all ranks.
"""

import torch
from torch import Tensor

from linrec.ops.short_conv.torch import last_inputs
from linrec.parallel.meeting import meet
from linrec.parallel.ranks import Ranks

__all__ = ["halo"]


def halo(ranks: Ranks, x: Tensor, state: Tensor, reset: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the n inputs before this rank's first step, and the last n inputs of the whole sequence.

    Args:
        ranks: the ranks that share the sequence.
        x: this rank's inputs (b, t, c).
        state: the n inputs before the whole sequence (b, n, c), oldest first.
        reset: None or (b, t).
    """
    n = state.shape[1]
    if not n:
        return state, state
    meeting = meet(ranks, "the last inputs", state, x.shape[1], tensors=(x, state), state=state, reset=reset)
    nothing = x.new_zeros(state.shape)
    own = last_inputs(torch.cat([nothing, x], 1), nothing, reset)
    gathered = meeting.gather([x, state], own, meeting.cuts(reset, x))
    passed = before = state
    for rank, (tail, cut) in enumerate(gathered):
        if rank == ranks.rank:
            before = passed
        m = min(meeting.steps[rank], n)
        kept = torch.cat([passed[:, m:], passed.new_zeros(passed[:, :m].shape)], 1)
        passed = kept.masked_fill(cut[:, None, None] != 0, 0) + tail
    return meeting.tied(before, gathered, state), passed
