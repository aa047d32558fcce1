"""Run a recurrence over segments of time: exchange the states between segments, and their gradients.

Segment r maps states by S_r = A_r S_{r-1} + B_r (see `recurrences`). This is an elementwise recurrence whose
steps are segments. Every rank computes its own A_r and B_r, all ranks exchange them and compute all S_r, and
each rank runs its own steps from S_{r-1}. The gradients G_r of S_r follow the adjoint recurrence
G_{r-1} = conj(A_r) G_r + C_r, in the opposite order.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from linrec.ops.core.call import unhandled
from linrec.ops.scan import scan
from linrec.parallel.meeting import Meeting, refuse_second_derivatives
from linrec.parallel.ranks import Call, Ranks
from linrec.parallel.recurrences import Recurrence


def run(
    meeting: Meeting, recurrence: Recurrence, tensors: tuple[Any, ...], state: Tensor | None, start: Tensor
) -> tuple[Tensor, Tensor]:
    """Run a recurrence on this rank's segment of the steps.

    Args:
        meeting: the call of all ranks.
        recurrence: the operator.
        tensors: its inputs without the state, `reset` last.
        state: initial state of the whole sequence, as the caller passed it.
        start: the same state in the operator's accumulation dtype.

    Returns:
        The outputs of this segment, and the final state of the whole sequence.
    """
    part = Part(meeting.ranks, meeting.call, meeting.order, recurrence)
    if not part.order:
        return recurrence.run(tensors, state)
    with torch.no_grad():
        entering, final, through = part.forward(tensors, start)
    # only the first rank receives the gradient of `state`, so that a sum over ranks counts it once
    y, last = recurrence.run(tensors, state if part.place == 0 else entering)
    if not meeting.call.has_gradient:
        return y, final
    return Joined.apply(part, y, last, final, through, state, *tensors)


@dataclass(frozen=True)
class Part:
    """This rank's segment of the steps, among the segments of all ranks.

    Args:
        ranks: the ranks of all segments.
        call: this rank's call.
        order: the ranks that have steps, in the order in which the recurrence visits them.
        recurrence: the operator.
    """

    ranks: Ranks
    call: Call
    order: list[int]
    recurrence: Recurrence

    @property
    def place(self) -> int | None:
        """Index of this rank in `order`; None if the rank has no steps."""
        return self.order.index(self.ranks.rank) if self.ranks.rank in self.order else None

    def forward(self, tensors: tuple[Any, ...], start: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return this segment's initial state, the final state, and all A (b, segments, rows, 1)."""
        zeros = torch.zeros_like(_flat(start))
        numbers = [zeros[..., :1], zeros]
        if self.place is not None:
            through, added = (_flat(x) for x in self.recurrence.summary(tensors))
            # infinite, not zero: in the backward pass, zero times NaN is NaN
            numbers = [self._sealed(through, tensors[-1], math.inf), self._sealed(added, tensors[-1])]
        gathered = self.ranks.gather(torch.cat(numbers, -1))
        through, added = self._ordered(gathered).split([1, zeros.shape[-1]], -1)
        states, final = _over_parts(through, added, start, reverse=False)
        entering = start if not self.place else states[:, self.place - 1].view_as(start)
        return entering, final, through

    def backward(self, through: Tensor, tensors: tuple[Any, ...], dy: Tensor, dfinal: Tensor) -> Tensor:
        """Return the gradient of this segment's last state from all later segments."""
        last = _flat(dfinal)
        share = torch.zeros_like(last)
        if self.place is not None:
            share = _flat(self.recurrence.adjoint(tensors, dy))
        gathered = self.ranks.gather(torch.cat([share, last], -1))
        # every rank returned the final state, and its loss may use it
        dfinal = torch.stack([both.chunk(2, -1)[1] for both in gathered]).sum(0).view_as(dfinal)
        shares, _ = self._ordered(gathered).chunk(2, -1)
        gradients, _ = _over_parts(through.conj(), shares, dfinal, reverse=True)
        if self.place is None or self.place == len(self.order) - 1:
            return dfinal
        dlast = self._sealed(gradients[:, self.place + 1], tensors[-1])
        return dlast.view_as(dfinal)

    def _ordered(self, gathered: list[Tensor]) -> Tensor:
        return torch.stack([gathered[rank] for rank in self.order], 1)

    def _sealed(self, leaving: Tensor, reset: Tensor | None, value: float = 0) -> Tensor:
        """Replace what leaves this segment (b, rows, columns) if a reset separates the next segment.

        Only needed in reverse: forward in time, the next segment contains the reset and discards the state.
        """
        if reset is None or not self.call.reverse or self.place == len(self.order) - 1:
            return leaving
        return leaving.masked_fill(reset[:, :1, None], value)


class Joined(torch.autograd.Function):
    """Pass on y and the final state, and exchange the gradients of states between ranks in the backward pass.

    Call: y, final = Joined.apply(part, y, last, final, through, state, *tensors)

    Backward, this function runs before the operator's own backward, and provides the gradient of the last
    state of this segment. `through` and `tensors` are saved for that. They are arguments so that the function
    runs on every rank on which any input requires a gradient: the ranks wait for each other.
    """

    @staticmethod
    def forward(
        ctx: Any,
        part: Part,
        y: Tensor,
        last: Tensor,
        final: Tensor,
        through: Tensor,
        state: Tensor | None,
        *tensors: Any,
    ) -> tuple[Tensor, Tensor]:
        """Return y and the final state."""
        ctx.part = part
        ctx.save_for_backward(through, state, *tensors)
        return y, final

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dfinal: Tensor) -> tuple[Tensor | None, ...]:
        """Exchange the gradients of the states between the parts."""
        refuse_second_derivatives()
        part: Part = ctx.part
        through, state, *tensors = ctx.saved_tensors
        part.ranks.agree(part.call._replace(backward=1), dfinal.device)
        with unhandled():
            dlast = part.backward(through, tuple(tensors), dy, dfinal)
        elsewhere = None if state is None or part.place == 0 else torch.zeros_like(state)
        return (None, dy, dlast, None, None, elsewhere, *(None for _ in tensors))


def _flat(state: Tensor) -> Tensor:
    """Reshape a state (b, c) to (b, c, 1), or (b, h, dk, columns) to (b, h dk, columns)."""
    return state.reshape(len(state), math.prod(state.shape[1:3]), math.prod(state.shape[3:]))


def _over_parts(a: Tensor, x: Tensor, state: Tensor, *, reverse: bool) -> tuple[Tensor, Tensor]:
    """Return all S_r = A_r S_{r-1} + B_r of (b, segments, rows, 1 or columns), and the last S as a state."""
    # zero times NaN is NaN, so an infinite A marks a reset, and the scan restarts there
    cut = a.isinf().flatten(2).all(-1)
    a, start = a.masked_fill(a.isinf(), 0), state.flatten(1)
    if reverse:
        # in reverse, a reset cuts the link to the previous segment instead of the link to the state
        start = start.masked_fill(cut[:, -1:], 0)
        cut = cut.roll(1, 1)
    states, last = scan(a.expand_as(x).flatten(2), x.flatten(2), state=start, reset=cut, reverse=reverse)
    return states.view_as(x), last.view_as(state)
