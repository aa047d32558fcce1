"""The context within which operators run on parts of time."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from linrec.ops.core.call import Call as OperatorCall
from linrec.ops.core.call import Result, TimeSplit, handling
from linrec.ops.core.kernel import differentiated
from linrec.parallel import carry
from linrec.parallel.ranks import DTYPES, OPERATORS, Call, Ranks
from linrec.parallel.recurrences import GateLoop, Recurrence, Scan

__all__ = ["time_parallel"]


@contextlib.contextmanager
def time_parallel(group: dist.ProcessGroup | None = None) -> Iterator[Ranks]:
    """Split sequences over the ranks of a process group: each rank has some consecutive steps of all of them.

        S_r = A_r S_{r-1} + B_r

    Within this context `scan` and `gate_loop`, and with them the mixers and models that mix time by nothing
    else, take the steps that this rank has and return their outputs. The final state is that of the whole
    sequence, the same on every rank. A_r is the product of the transitions of part r, and B_r the state that
    its own steps leave: these two are exchanged, and nothing that grows with time.

    - Parts follow one another in the order of the ranks. They may differ in length, and have no steps at all;
      `linrec.parallel.part` makes them. `reset` is split like the inputs; at the first step of a part it cuts
      the link to the part before. What has no time axis is the same on every rank: the batch, `state`,
      parameters.
    - The loss of the sequence is the sum of the ranks' losses. The gradient of what every rank has, such as a
      parameter or `state`, is the sum of those that the ranks get.
    - All ranks make the same calls in the same order, backward too: an output that has a part in the loss of
      one rank has one in every rank's, if only times zero. Ranks that do different things all raise an error;
      for one that does nothing the others wait, as long as the `timeout` of the process group says.
    - Gradient checkpointing runs operators again in the backward pass, which then belongs into the context.

    A group on GPUs should have a backend for the CPU as well, as `init_process_group("cpu:gloo,cuda:nccl")`
    gives it: ranks then compare what they do without waiting for the GPUs. In compiled models, operators run
    between graphs.

    Args:
        group: the processes that share the sequences; None is the default group. A group of one changes
            nothing.

    Yields:
        The ranks of the group. `sent` counts the bytes that this rank has told the others, in calls of this
        context and their backward passes.

    Raises:
        ValueError: there is no process group, or this process is not in it. Later, from operators: the ranks
            do different things, or something needs all steps of a sequence at once, as attention does.

    Source:
        The associativity behind it is eq. 12-13 of Katsch, GateLoop (2023), with parts for steps.

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
    """Runs operators on this rank's part of the steps; see `time_parallel`."""

    operators = OPERATORS

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def run(self, call: OperatorCall) -> Result:
        """Run a call in parts."""
        inputs = call.inputs
        sequence = getattr(inputs, call.operator.sequence)
        shape, dtype = call.operator.state(inputs)
        start = sequence.new_zeros(shape, dtype=dtype) if inputs.state is None else inputs.state
        recurrence: Recurrence = GateLoop(call)
        if call.operator.name == "scan":
            recurrence = Scan(call, inputs.reverse)
            tensors: tuple[Any, ...] = inputs.a, inputs.x, inputs.reset
        else:
            tensors = (*inputs[:6], inputs.reset)
        return self._run(recurrence, tensors, inputs.state, start, sequence.shape[1])

    def _run(
        self,
        recurrence: Recurrence,
        tensors: tuple[Any, ...],
        state: Tensor | None,
        start: Tensor,
        steps: int,
    ) -> tuple[Tensor, Tensor]:
        run = self._run_in_parts
        # torch.compile would make a graph for every call, since it takes their numbers for constants. Only
        # where it is at work: the decorator imports it, which takes seconds
        if torch.compiler.is_compiling():
            run = torch.compiler.disable(run)
        return run(recurrence, tensors, state, start, steps)

    def _run_in_parts(
        self,
        recurrence: Recurrence,
        tensors: tuple[Any, ...],
        state: Tensor | None,
        start: Tensor,
        steps: int,
    ) -> tuple[Tensor, Tensor]:
        batch, channels, d_key, d_value = (*start.shape, 1, 1)[:4]
        call = Call(
            number=self._ranks.next_number(),
            backward=0,
            operator=(Scan, GateLoop).index(type(recurrence)),
            dtype=DTYPES.index(start.dtype),
            reverse=int(recurrence.reverse),
            has_state=int(state is not None),
            has_gradient=int(differentiated(*tensors, state)),
            batch=batch,
            channels=channels,
            d_key=d_key,
            d_value=d_value,
            steps=steps,
        )
        return carry.run(self._ranks, recurrence, tensors, state, start.detach(), call)
