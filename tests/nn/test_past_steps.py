import torch

from linrec.nn.past_steps import PastSteps


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
