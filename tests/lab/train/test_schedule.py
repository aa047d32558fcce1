import itertools
import math

import pytest

from linrec.lab.train import OptimConfig
from linrec.lab.train.optim import cut_warmup, schedule_factor

WARMUP, TOTAL = 10, 110
COSINE = OptimConfig(lr=0.01, warmup_steps=WARMUP)


def test_warmup_is_linear_and_reaches_the_peak_at_its_last_step() -> None:
    factors = [schedule_factor(step, COSINE, TOTAL) for step in range(WARMUP)]
    assert factors == [(step + 1) / WARMUP for step in range(WARMUP)]


@pytest.mark.parametrize(
    ("step", "expected"), [(10, 1.0), (35, (1 + math.sqrt(0.5)) / 2), (60, 0.5), (110, 0.0)]
)
def test_cosine_values(step: int, expected: float) -> None:
    assert schedule_factor(step, COSINE, TOTAL) == pytest.approx(expected, abs=1e-12)


def test_cosine_ends_at_the_final_learning_rate() -> None:
    config = OptimConfig(lr=0.01, min_lr=0.001, warmup_steps=WARMUP)
    assert schedule_factor(TOTAL, config, TOTAL) == pytest.approx(0.1)
    assert schedule_factor(60, config, TOTAL) == pytest.approx(0.55)


def test_cosine_never_rises_after_warmup() -> None:
    factors = [schedule_factor(step, COSINE, TOTAL) for step in range(WARMUP, TOTAL)]
    assert all(earlier >= later > 0 for earlier, later in itertools.pairwise(factors))


def test_constant_stays_at_the_peak_after_warmup() -> None:
    config = OptimConfig(schedule="constant", warmup_steps=4)
    assert [schedule_factor(step, config, 8) for step in (1, 3, 4, 7)] == [0.5, 1.0, 1.0, 1.0]


def test_inverse_sqrt_values() -> None:
    config = OptimConfig(schedule="inverse-sqrt", warmup_steps=4)
    factors = [schedule_factor(step, config, 100) for step in (0, 3, 15, 63)]
    assert factors == [0.25, 1.0, 0.5, 0.25]
    with pytest.raises(ValueError, match="at least 1 with `schedule="):
        OptimConfig(schedule="inverse-sqrt")


def test_no_warmup_starts_at_the_peak() -> None:
    assert schedule_factor(0, OptimConfig(), 10) == 1.0


@pytest.mark.parametrize(("warmup_steps", "total", "left"), [(159, 159, 15), (10_000, 159, 15), (9, 5, 1)])
def test_a_warmup_longer_than_the_run_is_cut_with_a_notice(warmup_steps: int, total: int, left: int) -> None:
    with pytest.warns(UserWarning, match=rf"`optim.warmup_steps` = {warmup_steps} .* cut to {left} steps"):
        cut = cut_warmup(OptimConfig(lr=0.01, warmup_steps=warmup_steps), total)
    assert cut == OptimConfig(lr=0.01, warmup_steps=left)
    factors = [schedule_factor(step, cut, total) for step in range(total)]
    assert max(factors) == 1 and all(0 < factor <= 1 for factor in factors)


def test_a_warmup_shorter_than_the_run_stays() -> None:
    config = OptimConfig(warmup_steps=158)
    assert cut_warmup(config, 159) is config
