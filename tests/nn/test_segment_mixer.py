import torch

from linrec.nn.segment_mixer import PastSteps, last_steps


def test_steps_leave_and_enter_without_keeping_other_memory():
    memory = PastSteps.empty(2, 3, 1)
    h, alive = torch.arange(10.0).reshape(2, 5, 1), torch.tensor([[True] * 5, [False] * 2 + [True] * 3])
    old, new = memory.evicting(PastSteps.of(h, alive))
    assert old.h[..., 0].tolist() == [[0, 0, 0, 0, 1], [0, 0, 0, 5, 6]]
    assert old.alive.tolist() == [[False] * 3 + [True] * 2, [False] * 5]
    assert new.h[..., 0].tolist() == [[2, 3, 4], [7, 8, 9]]
    assert new.alive.all()
    for part in (*old, *new):
        assert part.untyped_storage().nbytes() == part.nbytes


def test_the_last_steps_have_the_dtype_of_the_new_ones():
    old, new = torch.arange(3.0)[None], torch.arange(3.0, 8.0, dtype=torch.bfloat16)[None]
    for steps in range(6):
        found = last_steps(old, new[:, :steps])
        assert found[0].tolist() == list(range(steps, steps + 3))
        assert found.dtype == torch.bfloat16
        assert found.untyped_storage().nbytes() == found.nbytes
