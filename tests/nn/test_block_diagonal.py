import pytest
import torch

from linrec.nn.block_diagonal import BlockDiagonalLinear, widened
from linrec.testing import assert_agree, generator
from tests.tiers import thorough


def test_it_is_the_block_diagonal_matrix():
    torch.manual_seed(0)
    projection = BlockDiagonalLinear(6, 3, std=1.0).double()
    x = torch.randn(2, 5, 6, generator=generator(), dtype=torch.float64)
    assert_agree(projection(x), x @ torch.block_diag(*projection.weight).T)


@pytest.mark.parametrize("exact", [True, False])
def test_a_bias_starts_at_zero_and_is_added(exact):
    projection = BlockDiagonalLinear(6, 3, std=1.0, bias=True, exact=exact).double()
    x = torch.randn(2, 5, 6, generator=generator(), dtype=torch.float64)
    without = x @ torch.block_diag(*projection.weight).T
    assert_agree(projection(x), without)
    bias = torch.randn(6, generator=generator(1), dtype=torch.float64)
    torch.nn.init.zeros_(projection.bias).data.add_(bias)
    assert_agree(projection(x), without + bias)


def test_weights_have_the_standard_deviation_that_is_asked_for():
    torch.manual_seed(0)
    weight = BlockDiagonalLinear(256, 4, std=0.3).weight
    assert weight.shape == (4, 64, 64)
    assert weight.std().item() == pytest.approx(0.3, rel=0.03)
    assert weight.mean().item() == pytest.approx(0.0, abs=0.01)


@pytest.mark.parametrize("exact", [True, False])
def test_exact_ones_stay_in_float32(exact):
    torch.manual_seed(0)
    projection = BlockDiagonalLinear(6, 3, std=1.0, exact=exact)
    x = torch.randn(4, 6, generator=generator())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = projection(x)
    assert torch.allclose(y.float(), projection(x), rtol=0, atol=1e-6) == exact


@pytest.mark.parametrize("n_blocks", [0, 4])
def test_argument_errors(n_blocks):
    message = (
        f"`n_blocks` of a block-diagonal projection must be a positive divisor of its width 6; got {n_blocks}"
    )
    with pytest.raises(ValueError, match=message):
        BlockDiagonalLinear(6, n_blocks, std=1.0)


@thorough
@pytest.mark.parametrize(
    ("n", "size", "wide"), [(64, 4, 64), (6, 4, 24), (7, 16, 16), (2, 40, 40), (1, 4, 4)]
)
def test_small_blocks_side_by_side_are_the_same_matrix(n, size, wide):
    weight = torch.randn(n, size, size, generator=generator())
    # in one graph, because models are compiled
    found = torch.compile(widened, fullgraph=True, backend="eager")(weight)
    assert found.shape == (n * size // wide, wide, wide)
    assert torch.equal(torch.block_diag(*found), torch.block_diag(*weight))
