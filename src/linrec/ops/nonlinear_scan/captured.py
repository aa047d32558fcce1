"""Loops over time on a GPU, whose steps are captured as a CUDA graph and replayed.

A step in Python takes longer than its kernels. So `STEPS` steps are captured once per call and replayed for
the rest of the sequence. A graph lives as long as its call: it reads the parameters where they are, and
nothing that a cell holds can change between capture and replay.
"""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from linrec.ops.core.garbage import uncollected
from linrec.ops.core.kernel import needs_dispatcher

STEPS = 16
# the capture pays for itself after as many replays
REPLAYS = 4

Run = Callable[..., Tensor]
Piece = Callable[[], None]


def capturable(inputs: Sequence[Tensor]) -> bool:
    """Return whether the steps of inputs (b, t, ..) are captured: long sequences in eager calls on CUDA.

    Steps within the capture of a whole training step are part of its graph.
    """
    first = inputs[0]
    if not first.is_cuda or first.shape[1] < (REPLAYS + 1) * STEPS or needs_dispatcher(inputs):
        return False
    with torch.cuda.device_of(first):
        return not torch.cuda.is_current_stream_capturing()


def replayed(run: Run, state: Tensor, inputs: Sequence[Tensor]) -> Tensor:
    """Return run(state, *inputs), where steps are captured and replayed if they can be.

    Args:
        run: function of a state and of inputs (b, k, ..) that returns k states (b, k, ..).
        state: (b, ..).
        inputs: (b, t, ..).

    Returns:
        The states of all steps (b, t, ..).
    """
    if not capturable(inputs):
        return run(state, *inputs)
    time = inputs[0].shape[1]
    first = time % STEPS or STEPS
    h = state.new_empty(len(state), time, *state.shape[1:])
    h[:, :first] = run(state, *(part[:, :first] for part in inputs))
    # the memory that every replay reads and writes
    now, steps = h[:, first - 1].clone(), h[:, :STEPS].clone()
    given = [part[:, first : first + STEPS].clone() for part in inputs]

    def before() -> None:
        run(now, *(part[:, :1] for part in given))

    def piece() -> None:
        steps.copy_(run(now, *given))
        now.copy_(steps[:, -1])

    with torch.cuda.device_of(state):
        replay = _captured(piece, before)
    for begin in range(first, time, STEPS):
        for static, part in zip(given, inputs, strict=True):
            static.copy_(part[:, begin : begin + STEPS])
        replay()
        h[:, begin : begin + STEPS] = steps
    return h


@functools.cache
def _aside(current: torch.cuda.Stream) -> tuple[torch.cuda.Stream, torch.cuda.CUDAGraph]:
    """Return the stream of the captures whose graphs run on a stream one by one, and their first graph."""
    stream, first = torch.cuda.Stream(current.device), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        # a graph without kernels warns
        first.capture_begin(capture_error_mode="thread_local")
        torch.zeros(1, device=stream.device)
        first.capture_end()
    # as long as this graph lives, its pool keeps the memory of graphs that are gone for the next graph
    return stream, first


def _captured(piece: Piece, before: Piece) -> Piece:
    """Return the replay of a CUDA graph of a piece."""
    current = torch.cuda.current_stream()
    (stream, first), graph = _aside(current), torch.cuda.CUDAGraph()
    stream.wait_stream(current)
    with uncollected(), torch.cuda.stream(stream):
        # libraries allocate their workspaces at the first call on a stream
        before()
        # other threads may allocate meanwhile
        graph.capture_begin(pool=first.pool(), capture_error_mode="thread_local")
        try:
            piece()
        finally:
            graph.capture_end()
    current.wait_stream(stream)
    return graph.replay
