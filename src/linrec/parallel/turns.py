"""Turns: any function with a state runs on one rank after another.

Rank r waits for the state of rank r - 1, runs its steps, and sends its state on. Backward, the gradients of
the states go the opposite way. This is exact for every recurrence, and as slow as one process, because all
other ranks wait. The layers around it still run in parallel.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from linrec.parallel.meeting import Meeting, meet, refuse_second_derivatives
from linrec.parallel.ranks import Ranks
from linrec.trees import Tree, leaves, map_tree

__all__ = ["in_turn"]


def in_turn(
    ranks: Ranks, name: str, run: Callable[[Tree], tuple[Tree, Tree]], state: Tree, given: Iterable[Any]
) -> tuple[Tree, Tree]:
    """Run a function on the steps of every rank, one rank after another.

    Args:
        ranks: the ranks that share the sequence.
        name: the function's name, for errors.
        run: returns the outputs of this rank's steps and the state after them, from the state before them. It
            runs on ranks without steps too.
        state: the state before the whole sequence, as `run` takes it, with at least one tensor.
        given: the function's other tensors; parameters that `run` alone knows may be missing.

    Returns:
        The outputs of this rank's steps, and the state after the whole sequence.
    """
    # `run` may know parameters, so all ranks record gradients wherever these are enabled
    has_gradient = torch.is_grad_enabled()
    meeting = meet(ranks, name, leaves(state)[0], 0, tensors=(), state=state, has_gradient=has_gradient)
    token = torch.zeros((), requires_grad=has_gradient)
    if ranks.rank > 0:
        start, device = leaves(state), leaves(state)[0].device
        state = ranks.receive(ranks.rank - 1, device)
        token, *entered = _Entered.apply(meeting, token, _floats(state), start, *start, *given)
        state = _refilled(state, entered)
    outputs, last = run(state)
    if ranks.rank + 1 < ranks.size:
        ranks.send(last, ranks.rank + 1)
    final = ranks.spread(last, ranks.size - 1)
    if has_gradient:
        n = len(_floats(outputs)), len(_floats(final))
        joined = _Left.apply(meeting, n, token, *_floats(outputs), *_floats(final), *_floats(last))
        outputs, final = _refilled(outputs, joined[: n[0]]), _refilled(final, joined[n[0] :])
    return outputs, final


class _Entered(torch.autograd.Function):
    """Return a state from the rank before; backward, send its gradient there.

    Call: token, *state = _Entered.apply(meeting, token, state, start, *start, *given)

    Autograd knows no path from the state of another process to `given` and the token, so they are arguments.
    `_Left` depends on the returned token, so that this function runs backward in any case.
    """

    @staticmethod
    def forward(
        ctx: Any, meeting: Meeting, token: Tensor, state: list[Tensor], start: list[Tensor], *given: Any
    ) -> tuple[Tensor, ...]:
        """Return the token and the state."""
        ctx.meeting, ctx.n_start, ctx.n_given = meeting, len(start), len(given)
        ctx.save_for_backward(*start)
        return token, *state

    @staticmethod
    def backward(ctx: Any, _: Tensor, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Send the gradients to the rank before."""
        ranks = ctx.meeting.ranks
        ranks.send(list(gradients), ranks.rank - 1)
        # the given state has its gradient on the first rank
        elsewhere = [torch.zeros_like(x) for x in ctx.saved_tensors]
        return None, None, None, None, *elsewhere, *[None] * (ctx.n_given - ctx.n_start)


class _Left(torch.autograd.Function):
    """Return outputs and final state; backward, receive the gradient of the last state from the rank after.

    Call: (*outputs, *final) = _Left.apply(meeting, (n_outputs, n_final), token, *outputs, *final, *last)
    """

    @staticmethod
    def forward(
        ctx: Any, meeting: Meeting, n: tuple[int, int], token: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the outputs and the final state."""
        ctx.meeting, ctx.n = meeting, n
        # with a saved tensor, a checkpoint that runs the call again does not stop before it
        ctx.save_for_backward(token)
        return tensors[: sum(n)]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the outputs and of the last state."""
        refuse_second_derivatives()
        (token,), ranks, n_outputs = ctx.saved_tensors, ctx.meeting.ranks, ctx.n[0]
        ranks.agree(ctx.meeting.call._replace(backward=1), gradients[0].device)
        # every rank returned the final state, and its loss may use it
        of_last = [ranks.total(x) for x in gradients[n_outputs:]]
        if ranks.rank + 1 < ranks.size:
            of_last = ranks.receive(ranks.rank + 1, gradients[0].device)
        nothing = [None] * ctx.n[1]
        return None, None, torch.zeros_like(token), *gradients[:n_outputs], *nothing, *of_last


def _floats(tree: Tree) -> list[Tensor]:
    """Return the tensors of a tree that may have gradients."""
    return [x for x in leaves(tree) if x.is_floating_point() or x.is_complex()]


def _refilled(tree: Tree, floats: Sequence[Tensor]) -> Tree:
    """Return a tree with other tensors in place of `_floats`."""
    rest = iter(floats)
    return map_tree(lambda x: next(rest) if x.is_floating_point() or x.is_complex() else x, tree)
