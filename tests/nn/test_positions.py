import torch

from linrec.nn.positions import positions
from linrec.testing import reset_mask


def test_positions_are_counted_one_by_one_over_resets_and_pieces():
    reset, seen = reset_mask(3, 20, rate=0.2), torch.tensor([0, 4, 9])
    count, expected = seen.tolist(), torch.zeros(3, 20, dtype=torch.int64)
    for t in range(20):
        for row in range(3):
            count[row] = 0 if reset[row, t] else count[row]
            expected[row, t] = count[row]
            count[row] += 1
    found, last = positions(seen, 20, reset=reset)
    assert found.tolist() == expected.tolist() and last.tolist() == count
    first, middle = positions(seen, 7, reset=reset[:, :7])
    rest, last = positions(middle, 13, reset=reset[:, 7:])
    assert torch.cat([first, rest], 1).tolist() == expected.tolist() and last.tolist() == count


def test_without_steps_nothing_is_seen():
    found, last = positions(torch.tensor([3, 0]), 0, reset=torch.zeros(2, 0, dtype=torch.bool))
    assert found.shape == (2, 0) and last.tolist() == [3, 0]
    assert positions(torch.tensor([3]), 2)[0].tolist() == [[3, 4]]
