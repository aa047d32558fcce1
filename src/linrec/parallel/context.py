"""The context in which operators run on segments of time."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from linrec.ops.core.call import Call as OperatorCall
from linrec.ops.core.call import Result, TimeSplit, handling, unhandled
from linrec.ops.core.precision import without_autocast
from linrec.parallel.halos import halo
from linrec.parallel.operators import OPERATORS
from linrec.parallel.ranks import Ranks
from linrec.parallel.turns import in_turn
from linrec.trees import Tree

__all__ = ["time_parallel"]


@contextlib.contextmanager
def time_parallel(group: dist.ProcessGroup | None = None) -> Iterator[Ranks]:
    """Split sequences over the ranks of a process group: each rank has consecutive steps of every sequence.

        S_r = A_r S_{r-1} + B_r

    Within this context `scan` and `gate_loop` take the steps of this rank and return their outputs. So do
    mixers and models that mix time only by these operators. The final state belongs to the whole sequence,
    and is the same on every rank. A_r is the product of the transitions of segment r, and B_r is the
    segment's final state if it starts from zero. The ranks exchange only A_r and B_r, whose sizes do not
    depend on time.

    - The order of the segments is the order of the ranks. Segments may differ in length, and may be empty;
      `linrec.parallel.part` makes them. `reset` is split like the inputs; at the first step of a segment it
      cuts the link to the previous segment. Everything without a time axis is the same on every rank: the
      batch, `state`, parameters.
    - The loss of a sequence is the sum of the ranks' losses. The gradient of a tensor that every rank has,
      such as a parameter or `state`, is the sum of the ranks' gradients.
    - All ranks make the same calls in the same order, backward too. If an output contributes to the loss on
      one rank, it must do so on every rank, if only times zero. If ranks make different calls, all ranks
      raise an error. If a rank makes no call, the others wait until the `timeout` of the process group.
    - Gradient checkpointing runs operators again in the backward pass, so call `backward` within the context.

    For groups on GPUs, add a backend for the CPU: `init_process_group("cpu:gloo,cuda:nccl")`. Ranks then
    compare their calls without waiting for the GPUs. In compiled models, operators cause graph breaks.

    Args:
        group: the processes that share the sequences; None is the default group. With a group of size 1
            nothing changes.

    Yields:
        The ranks of the group. `sent` counts the bytes that this rank has sent, in calls within this context
        and in their backward passes.

    Raises:
        ValueError: there is no process group, or this process is not in it. Operators also raise it if ranks
            make different calls, or if a layer needs the whole sequence at once, as attention does.

    Source:
        The associativity of eq. 12-13 of Katsch, GateLoop (2023), applied to segments instead of steps.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from linrec.ops import scan
        >>> from linrec.parallel import part
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> with time_parallel() as ranks:
        ...     y, state = scan(torch.tensor(0.5), part(torch.ones(1, 4, 1)))
        >>> y.flatten().tolist(), state.tolist()
        ([1.0, 1.5, 1.75, 1.875], [[1.875]])
        >>> ranks.size, ranks.sent
        (1, 0)
        >>> dist.destroy_process_group()
    """
    ranks = Ranks(group)
    if ranks.size == 1:
        yield ranks
        return
    with handling(TimeParallel(ranks)):
        yield ranks


class TimeParallel(TimeSplit):
    """Handler that runs operators on this rank's segment of the steps; see `time_parallel`."""

    operators = tuple(OPERATORS)

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def run(self, call: OperatorCall) -> Result:
        """Run a call on this rank's segment."""
        # as where operators run in one process
        with without_autocast(getattr(call.inputs, call.operator.sequence).device.type):
            return self._run(OPERATORS[call.operator.name], call)

    def halo(self, x: Tensor, state: Tensor, reset: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the inputs before this rank's first step, and before the end of the sequence."""
        return self._run(halo, x, state, reset)

    def in_turn(
        self, name: str, run: Callable[[Tree], tuple[Any, Tree]], state: Tree, given: Iterable[Any]
    ) -> tuple[Any, Tree]:
        """Run a function of the state on one rank after another."""
        return self._run(in_turn, name, run, state, given)

    def _run(self, function: Callable[..., Result], *arguments: Any) -> Result:
        run = self._unhandled
        # torch.compile would compile every call anew, because it treats the call numbers as constants.
        # Applied only while compiling, because the decorator imports the compiler, which takes seconds
        if torch.compiler.is_compiling():
            run = torch.compiler.disable(run)
        return run(function, *arguments)

    def _unhandled(self, function: Callable[..., Result], *arguments: Any) -> Result:
        with unhandled():
            return function(self._ranks, *arguments)
