import math

import pytest
import torch

from linrec.nn.positions import BucketBias, positions
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


@pytest.mark.parametrize("options", [{"buckets": 1}, {"buckets": 32, "max_distance": 16}])
def test_buckets_that_do_not_exist_are_refused(options):
    with pytest.raises(ValueError, match="must be at least"):
        BucketBias(2, **options)


def test_buckets_of_distances_are_those_of_t5():
    """Worked by hand: 16 + 16 log(n / 16) / log(8), rounded down, from 16 on."""
    bias = BucketBias(2).double()
    buckets = bias.bucket(torch.arange(300))
    edges = (buckets.diff().nonzero().flatten() + 1).tolist()
    expected = [math.ceil(16 * 8 ** (j / 16) - 1e-9) for j in range(1, 16)]
    assert edges == [*range(1, 17), *expected]
    assert bias(0, 5).shape == (1, 2, 0, 5)
    scores = bias(3, 5)
    assert scores.shape == (1, 2, 3, 5)
    for i in range(3):
        for j in range(5):
            assert torch.equal(scores[0, :, i, j], bias.w[:, max(0, i + 2 - j)])
