"""One call on all ranks: its agreement, and exchanges of tensors with gradients.

The backward pass of an exchange is an exchange in the opposite direction, in which every rank takes part. So
the gathered tensors depend on all inputs of a rank's call, even on a rank without steps. The outputs of a
rank depend on the gathered tensors (`tied`), even on the first rank, which needs no tensor of another rank.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from linrec.ops.core.kernel import differentiated
from linrec.parallel.ranks import DTYPES, Call, Ranks

__all__ = ["Meeting", "meet", "refuse_second_derivatives"]


@dataclass(frozen=True)
class Meeting:
    """A call that all ranks make.

    Args:
        ranks: the ranks.
        call: this rank's call.
        steps: the number of steps on each rank.
        has_reset: whether any rank was given `reset`.
    """

    ranks: Ranks
    call: Call
    steps: list[int]
    has_reset: bool

    @property
    def order(self) -> list[int]:
        """The ranks that have steps, in the order in which the recurrence visits them."""
        order = [rank for rank, steps in enumerate(self.steps) if steps]
        return order[::-1] if self.call.reverse else order

    @property
    def is_first(self) -> bool:
        """Whether this rank has the first step."""
        return self.order[:1] == [self.ranks.rank]

    def gather(self, given: Iterable[Any], *tensors: Tensor) -> list[list[Tensor]]:
        """Return the tensors of every rank, with gradients, in one exchange.

        Args:
            given: all inputs of the call.
            tensors: of the same shapes on all ranks. They are sent in the dtype of the first.
        """
        flat = torch.cat([x.to(tensors[0].dtype).flatten() for x in tensors])
        gathered = _Gathered.apply(self, flat, *given)
        sizes = [x.numel() for x in tensors]
        return [
            [piece.view_as(x) for piece, x in zip(row.split(sizes), tensors, strict=True)]
            for row in gathered.unbind()
        ]

    def tied(self, outputs: Tensor, gathered: list[list[Tensor]], *given: Tensor | None) -> Tensor:
        """Return the outputs as a function of the gathered and the given tensors, with zero gradients."""
        if not self.call.has_gradient:
            return outputs
        tied: Tensor = _Tied.apply(outputs, gathered[0][0], *given)
        return tied

    def cuts(self, reset: Tensor | None, like: Tensor) -> Tensor:
        """Return which rows of this rank's steps have a reset (b,)."""
        return like.new_zeros(len(like), dtype=torch.bool) if reset is None else reset.any(1)


def meet(
    ranks: Ranks,
    operator: str,
    start: Tensor,
    steps: int,
    *,
    tensors: Any,
    state: Any = None,
    reset: Tensor | None = None,
    reverse: bool = False,
    has_gradient: bool | None = None,
) -> Meeting:
    """Compare this rank's call with the calls of the other ranks, and return what all need to know.

    Args:
        ranks: the ranks.
        operator: its name.
        start: a tensor of the shape and dtype of the state.
        steps: this rank's number of steps.
        tensors: the inputs that may require gradients.
        state: the initial state, as the caller passed it.
        reset: as the caller passed it.
        reverse: whether the recurrence runs from the last step to the first.
        has_gradient: whether gradients are asked for; None looks at the tensors.
    """
    batch, channels, d_key, d_value = (*start.shape, 1, 1, 1)[:4]
    call = Call(
        number=ranks.next_number(),
        backward=0,
        operator=operator,
        dtype=DTYPES.index(start.dtype),
        reverse=int(reverse),
        has_state=int(state is not None),
        has_gradient=int(differentiated(*tensors) if has_gradient is None else has_gradient),
        batch=batch,
        channels=channels,
        d_key=d_key,
        d_value=d_value,
        steps=steps,
        has_reset=int(reset is not None),
    )
    calls = ranks.agree(call, start.device)
    return Meeting(ranks, call, [one.steps for one in calls], any(one.has_reset for one in calls))


def refuse_second_derivatives() -> None:
    """Raise in a backward pass that is itself recorded."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "gradients through `time_parallel` cannot be differentiated again; "
            "leave out `create_graph=True`, or keep the sequence in one process."
        )


class _Gathered(torch.autograd.Function):
    """Stack a tensor of all ranks; backward, sum its gradients over the ranks."""

    @staticmethod
    def forward(ctx: Any, meeting: Meeting, x: Tensor, *given: Any) -> Tensor:
        ctx.meeting, ctx.n_given = meeting, len(given)
        return torch.stack(meeting.ranks.gather(x))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        ranks, call = ctx.meeting.ranks, ctx.meeting.call
        ranks.agree(call._replace(backward=1), gradient.device)
        return None, ranks.scatter(gradient).sum(0), *[None] * ctx.n_given


class _Tied(torch.autograd.Function):
    """Return the outputs; backward, exchange gradients even if no output depends on the gathered tensors."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, gathered: Tensor, *given: Tensor | None) -> Tensor:
        ctx.save_for_backward(*given)
        return outputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # None still runs the backward pass of the exchange, but would leave a given tensor without a gradient
        return gradient, None, *(None if x is None else torch.zeros_like(x) for x in ctx.saved_tensors)
