import pytest
import torch

from linrec.nn.token_shift import TokenShift, token_shift
from linrec.testing import check_empty, check_reset, check_split, check_steps, generator

X = torch.randn(2, 5, 3, generator=generator())
LAST = torch.randn(2, 3, generator=generator(1))


def test_every_step_sees_the_one_before():
    reset = torch.tensor([[False, True, False, False, True], [True, False, False, False, False]])
    before, last = token_shift(X, LAST, reset=reset)
    for b in range(2):
        for t in range(5):
            source = X[b, t - 1] if t else LAST[b]
            assert torch.equal(before[b, t], torch.zeros(3) if reset[b, t] else source)
    assert torch.equal(last, X[:, -1])
    assert not token_shift(X)[0][:, 0].any()


def test_laws():
    for law in (check_split, check_steps, check_reset, check_empty):
        law(token_shift, X)


def test_the_state_is_exact_and_wide_and_no_view():
    before, last = token_shift(X.bfloat16(), LAST)
    assert before.dtype == torch.bfloat16 and torch.equal(before[:, 0], LAST.bfloat16())
    assert last.dtype == torch.float32 and torch.equal(last.bfloat16(), X[:, -1].bfloat16())
    assert token_shift(X.double())[1].dtype == torch.float64
    assert token_shift(X)[1].untyped_storage().nbytes() == 2 * 3 * 4


def test_a_rank_below_1_is_refused():
    with pytest.raises(ValueError, match=r"`rank`.*1; got 0"):
        TokenShift(4, 2, rank=0)
