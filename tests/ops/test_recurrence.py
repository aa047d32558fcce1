"""The forms of recurrences that torch.export gets, against loops over time."""

import pytest
import torch

from linrec.ops.core.loop import loop, matrix_product, recurrence
from linrec.testing import assert_agree

LENGTHS = (2, 3, 17, 64, 1000, 5000)


@pytest.mark.parametrize("time", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_recurrence_is_the_loop(time, dtype):
    torch.manual_seed(0)
    a = torch.randn(2, time, 3, dtype=dtype).clamp(-1, 1) if dtype.is_floating_point else None
    if a is None:
        a = torch.polar(torch.rand(2, time, 3), 9 * torch.randn(2, time, 3))
    # nothing passes a zero
    a[torch.rand(2, time, 3) < 0.05] = 0
    x, state = torch.randn(2, time, 3, dtype=dtype), torch.randn(2, 3, dtype=dtype)
    value, expected = state.to(torch.complex128), []
    for t in range(time):
        value = a[:, t] * value + x[:, t]
        expected.append(value)
    expected = torch.stack(expected, 1)
    y = recurrence(a, x, state)
    assert y.dtype == dtype
    assert_agree(y, expected if dtype.is_complex else expected.real)


@pytest.mark.parametrize("time", (2, 17, 1000))
def test_recurrence_of_matrices_is_the_loop(time):
    torch.manual_seed(0)
    a = torch.linalg.qr(torch.randn(2, time, 3, 4, 4))[0]
    x, state = torch.randn(2, time, 3, 4), torch.randn(2, 3, 4)
    value, expected = state.double(), []
    for t in range(time):
        value = (a[:, t].double() @ value[..., None])[..., 0] + x[:, t]
        expected.append(value)
    assert_agree(recurrence(a, x, state, product=matrix_product), torch.stack(expected, 1))


@pytest.mark.parametrize("time", LENGTHS)
def test_recurrence_of_maxima_is_the_loop(time):
    torch.manual_seed(0)
    fall, x, state = -torch.rand(2, time, 3), torch.randn(2, time, 3), torch.full((2, 3), -torch.inf)
    fall[torch.rand(2, time, 3) < 0.05] = -torch.inf
    largest, expected = state, []
    for t in range(time):
        largest = torch.maximum(fall[:, t] + largest, x[:, t])
        expected.append(largest)
    y = recurrence(fall, x, state, product=torch.add, plus=torch.maximum, zero=-torch.inf)
    assert_agree(y, torch.stack(expected, 1))


def test_loop_leaves_out_what_is_none():
    def step(state, x, cut):
        assert cut is None
        h, count = state
        return (h + x, count + 1), (h, x)

    x = torch.arange(6.0).reshape(3, 2)
    (h, count), (before, same) = loop(step, (torch.zeros(2), torch.tensor(0)), [x, None], axis=0)
    assert h.tolist() == [6.0, 9.0] and count == 3
    assert before.tolist() == [[0.0, 0.0], [0.0, 1.0], [2.0, 4.0]]
    assert torch.equal(same, x)
