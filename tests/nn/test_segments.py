"""The driver of segments, with a memory that is a decaying sum and a step that adds what came before."""

import re

import pytest
import torch

from linrec.nn.segments import SegmentState, Sight, by_segments, check_detach, first_state
from linrec.testing import assert_agree, reset_mask

LENGTH, DECAY = 4, 0.5
START = 3.0


def read(x, memory, segment, sight):
    """y_t = memory * x_t + the visible steps of the segment."""
    steps = torch.cat([segment, x], 1)
    seen = sight.steps
    if seen is None:
        seen = torch.ones(1, x.shape[1], x.shape[1], dtype=torch.bool).tril()
    memory = memory[:, None].expand(-1, x.shape[1], -1)
    if sight.memory is not None:
        memory = torch.where(sight.memory[..., None], memory, START)
    return memory * x + seen.to(x.dtype) @ steps, steps


def write(memory, segment, alive):
    return DECAY * memory + segment.sum(1)


def start(batch, position=0):
    zeros = torch.zeros(batch, 0, 1, dtype=torch.float64)
    return first_state(zeros.new_full((batch, 1), START), zeros, length=LENGTH, position=position)


def run(x, state=None, *, reset=None, detach="never"):
    state = start(len(x)) if state is None else state
    fresh = x.new_full((len(x), 1), START)
    y, state = by_segments(
        "sums", read, write, x[..., None], state, length=LENGTH, fresh=fresh, reset=reset, detach=detach
    )
    return y[..., 0], state


def one_by_one(x, reset, position=0):
    """The same of one row, as a loop over steps."""
    memory, steps, outputs = START, [], []
    for n, value in enumerate(x.tolist(), start=position):
        if reset[n - position]:
            memory, steps = START, []
        steps.append(value)
        outputs.append(memory * value + sum(steps))
        if (n + 1) % LENGTH == 0:
            memory, steps = DECAY * memory + sum(steps), []
    return torch.tensor(outputs, dtype=torch.float64)


def inputs(time, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, time, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("position", [0, 3, 6])
@pytest.mark.parametrize("pieces", [[14], [1] * 14, [3, 1, 9, 0, 1], [4, 8, 2]])
def test_segments_equal_a_loop_over_steps_for_any_pieces_resets_and_positions(pieces, position):
    x, reset = inputs(14), reset_mask(3, 14, rate=0.25)
    expected = torch.stack([one_by_one(*row, position) for row in zip(x, reset, strict=True)])
    state, found = start(3, position), []
    for now, cut in zip(x.split(pieces, 1), reset.split(pieces, 1), strict=True):
        y, state = run(now, state, reset=cut)
        found.append(y)
    assert_agree(torch.cat(found, 1), expected)
    assert state.position.tolist() == [position + 14] * 3
    assert state.alive.shape == (3, (position + 14) % LENGTH)


def test_without_resets_no_mask_is_made_for_whole_segments():
    x = inputs(9)
    expected = torch.stack([one_by_one(row, [False] * 9) for row in x])
    assert_agree(run(x)[0], expected)


REACH = {"never": [0, 4, 8, 12], "segment": [12], 1: [12], 2: [8, 12], 3: [12]}


@pytest.mark.parametrize("detach", REACH)
@pytest.mark.parametrize("pieces", [[16], [5, 11], [1] * 16])
def test_gradients_stop_at_the_boundaries_that_detach_names(detach, pieces):
    """Of the last segment, which begins at step 12; every second boundary is at 8, every third at 12."""
    x, state, found = inputs(16).requires_grad_(), start(3), []
    for now in x.split(pieces, 1):
        y, state = run(now, state, detach=detach)
        found.append(y)
    (gradient,) = torch.autograd.grad(torch.cat(found, 1)[:, 12:].sum(), x)
    reached = (gradient != 0).all(0).tolist()
    assert [n for n in range(0, 16, LENGTH) if any(reached[n : n + LENGTH])] == REACH[detach]


def test_gradients_through_memories_are_finite_differences():
    x, reset = inputs(10)[:2].requires_grad_(), reset_mask(2, 10, rate=0.2)

    def function(x, memory):
        y, state = run(x, start(2)._replace(memory=memory), reset=reset)
        return y, state.memory

    memory = torch.ones(2, 1, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(function, (x, memory))


def test_dead_steps_stay_dead_in_a_call_without_steps():
    none = torch.zeros(3, 0, dtype=torch.bool)
    _, state = run(inputs(0), start(3, 2), reset=none)
    assert state.alive.tolist() == [[False, False]] * 3


def test_rows_of_several_streams_are_cut_on_their_own():
    x = inputs(LENGTH)[:2].requires_grad_()
    state = start(2)._replace(position=torch.tensor([0, LENGTH]))
    _, state = run(x, state, detach=2)
    (gradient,) = torch.autograd.grad(state.memory.sum(), x)
    assert gradient[0].all() and not gradient[1].any()


def test_a_detached_memory_keeps_no_graph():
    """So training segment by segment takes memory that does not depend on the number of segments."""
    x = inputs(8).requires_grad_()
    _, state = run(x, detach="segment")
    assert state.memory.grad_fn is None
    assert run(x, detach="never")[1].memory.grad_fn is not None


def test_nothing_of_a_row_before_its_reset_is_left():
    x, reset = inputs(7), torch.zeros(3, 7, dtype=torch.bool)
    reset[1, 6] = True
    x[1, :6] = torch.nan
    y, state = run(x, reset=reset)
    assert y[1, :6].isnan().all() and y[[0, 2]].isfinite().all()
    assert_agree(y[1, 6], (START + 1) * x[1, 6])
    assert state.memory[1] == START
    assert_agree(state.segment[1], x[1, 4:7, None].nan_to_num())
    assert state.alive.tolist() == [[True] * 3, [False, False, True], [True] * 3]


def test_a_state_of_longer_segments_is_refused():
    alive, position = torch.ones(1, 5, dtype=torch.bool), torch.zeros(1, dtype=torch.int64)
    longer = SegmentState(torch.zeros(1, 1), torch.zeros(1, 5, 1), alive, position)
    message = "`state` must hold less than one segment of 4 steps; got 5 steps. Pass a state of a `sums`"
    with pytest.raises(ValueError, match=re.escape(message)):
        run(torch.zeros(1, 2), longer)


@pytest.mark.parametrize("detach", [0, -1, "always", True, 1.5, None])
def test_an_unknown_place_to_detach_is_refused(detach):
    with pytest.raises(ValueError, match=r"`detach`.*1; got .*at most n - 1 segments"):
        check_detach(detach)


def test_a_position_before_the_stream_is_refused():
    with pytest.raises(ValueError, match=r"`position`.*0; got -1"):
        start(1, -1)


@pytest.mark.parametrize("position", [0, 3])
@pytest.mark.parametrize("pieces", [[14], [1] * 14, [3, 1, 9, 0, 1]])
def test_an_element_is_given_for_each_boundary(pieces, position):
    """Each boundary writes the inputs at its last step, in place of the memory."""
    x, state = inputs(14), start(3, position)
    for now in x.split(pieces, 1):
        given = now[:, LENGTH - 1 - state.alive.shape[1] :: LENGTH, None]
        _, state = by_segments(
            "given",
            read,
            lambda memory, segment, alive, end: end,
            now[..., None],
            state,
            length=LENGTH,
            fresh=None,
            given=given,
        )
        boundary = (int(state.position[0]) // LENGTH) * LENGTH - position
        expected = x[:, boundary - 1, None] if boundary > 0 else torch.full((3, 1), START)
        assert_agree(state.memory, expected.double())


def test_a_window_counts_the_steps_of_the_memory_and_of_the_segment():
    alive, cut = torch.tensor([[False, True, True]]), torch.tensor([[True, False]])
    assert Sight(None, None).of(alive, 2, window=3).int().tolist() == [[[0, 1, 1, 1, 0], [0, 0, 1, 1, 1]]]
    own = torch.eye(2, dtype=torch.bool)[None]
    assert Sight(cut, own).of(alive, 2, window=2).int().tolist() == [[[0, 0, 1, 1, 0], [0, 0, 0, 0, 1]]]
