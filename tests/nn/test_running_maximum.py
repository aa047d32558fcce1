import pytest
import torch

from linrec.nn.running_maximum import running_maximum
from linrec.testing import assert_agree, generator, reset_mask

SHAPE = (2, 13, 3, 2)


def by_loop(x, before, log_decay, reset):
    largest = [before]
    for t in range(x.shape[1]):
        m = largest[-1] if log_decay is None else largest[-1] + log_decay.expand_as(x)[:, t]
        if reset is not None:
            m = m.masked_fill(reset[:, t, None, None], -torch.inf)
        largest.append(torch.maximum(m, x[:, t]))
    return torch.stack(largest, 1)


@pytest.mark.parametrize("starts", [0.0, -torch.inf], ids=["goes on", "starts"])
@pytest.mark.parametrize("rate", [None, 0.3, 1.0], ids=["no resets", "resets", "resets at every step"])
@pytest.mark.parametrize("decay", [None, SHAPE[2:], SHAPE], ids=["no decay", "constant", "per step"])
@pytest.mark.parametrize("time", [0, 1, 2, 8, 13])
def test_it_is_the_recurrence(time, decay, rate, starts):
    x = 3 * torch.randn(SHAPE, generator=generator(), dtype=torch.float64)[:, :time]
    before = torch.randn(2, 3, 2, generator=generator(1), dtype=torch.float64) + starts
    log_decay = None if decay is None else -torch.rand(decay, generator=generator(2), dtype=torch.float64)
    if decay == SHAPE:
        # exponential gates may be above 1
        log_decay = 0.5 + log_decay[:, :time]
    reset = None if rate is None else reset_mask(2, time, rate=rate)
    expected = by_loop(x, before, log_decay, reset)
    assert_agree(running_maximum(x, before, log_decay, reset=reset), expected)


def test_many_steps_of_steep_decays_lose_no_precision():
    # 4,096 steps of -20.5 add up to numbers whose neighbours in float32 are 0.004 apart
    x = 10 * torch.randn(1, 4096, 2, generator=generator(), dtype=torch.float64)
    before = torch.zeros(1, 2, dtype=torch.float64)
    log_decay = torch.tensor([-20.5, -1e-4], dtype=torch.float64)
    found = running_maximum(x.float(), before.float(), log_decay.float())
    assert_agree(found, by_loop(x, before, log_decay, None))


def test_nothing_passes_a_gradient():
    x = torch.randn(SHAPE, generator=generator(), requires_grad=True)
    assert not running_maximum(x, x[:, 0], -x.abs()).requires_grad
