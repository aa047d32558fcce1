import numpy as np
import pytest
import torch

from linrec.generation.noise import BLOCK, Noise, check_seed, uniforms


def test_any_piece_is_a_part_of_the_whole():
    whole = uniforms(5, 2, 0, 40)
    for start in range(10):
        for n in (0, 1, 5, 30):
            assert (uniforms(5, 2, start, n) == whole[start : start + n]).all()


def test_it_is_what_numpy_draws():
    key = np.array([2**64 - 1, 3], dtype=np.uint64)
    expected = np.random.Generator(np.random.Philox(key=key)).random(100)
    assert (uniforms(2**64 - 1, 3, 0, 100) == expected).all()


def test_rows_and_seeds_have_numbers_of_their_own():
    n = 20_000
    drawn = [uniforms(seed, row, 0, n) for seed, row in ((0, 0), (0, 1), (1, 0), (1, 1))]
    # correlations of independent uniforms have a deviation of 1 / sqrt(n)
    off_diagonal = np.corrcoef(drawn)[np.triu_indices(4, 1)]
    assert (np.abs(off_diagonal) < 4 / np.sqrt(n)).all()
    # and none is far from the straight line of their distribution (Kolmogorov and Smirnov)
    for numbers in drawn:
        assert np.abs(np.sort(numbers) - (np.arange(n) + 0.5) / n).max() < 2 / np.sqrt(n)


@pytest.mark.parametrize("start", [0, 3, BLOCK + 1])
def test_columns_go_on_over_the_ends_of_blocks(start):
    noise = Noise(7, 2, start=start, device=torch.device("cpu"))
    columns = []
    for _ in range(BLOCK + 5):
        noise.advance()
        columns.append(noise.column())
    expected = [uniforms(7, row, start, BLOCK + 5) for row in range(2)]
    assert (torch.cat(columns, dim=1).numpy() == expected).all()
    assert noise.drawn == start + BLOCK + 5


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_out_of_range(seed):
    with pytest.raises(ValueError, match=f"`seed`.*0 .. 2\\^64 - 1; got {seed}."):
        check_seed(seed)
