import dataclasses
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from linrec.train import InterruptedRunError, TrainConfig, fit, load_run
from linrec.train.step import EAGER_STEPS, CapturedStep

from .test_regression import ADDING, config_of
from .test_resume import assert_same_run, stop_at

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex"),
    pytest.mark.filterwarnings(r"ignore:\s*Online softmax is disabled"),
]


def test_a_captured_step_does_what_the_step_does() -> None:
    total = torch.zeros(3, device="cuda")
    calls = []

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        calls.append(1)
        total.add_(x * y)

    captured = CapturedStep(step)
    expected = torch.zeros(3)
    for n in range(8):
        x, y = torch.full((3,), float(n)), torch.arange(3.0)
        captured(x.cuda(), y.cuda())
        expected += x * y
        assert torch.equal(total.cpu(), expected)
    # the calls as they are, and one that is recorded
    assert len(calls) == EAGER_STEPS + 1


def test_a_captured_step_is_captured_again_for_other_shapes() -> None:
    total = torch.zeros((), device="cuda")
    captured = CapturedStep(lambda x: total.add_(x.sum()))
    for n in [*[3] * (EAGER_STEPS + 2), *[5] * (EAGER_STEPS + 2), 3]:
        captured(torch.ones(n, device="cuda"))
    assert total.item() == (EAGER_STEPS + 2) * 8 + 3


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_compiled_and_captured_agrees_with_eager(
    precision: str, tiny: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    for mode in ("off", "on"):
        config = tiny(device="cuda", compile=mode, precision=precision, optim={"clip_norm": 0.5})
        fit(without_dropout(config), tmp_path / mode)
    losses = [[record["loss"] for record in load_run(tmp_path / mode).metrics] for mode in ("off", "on")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3 if precision == "32-true" else 0.05)


def test_a_long_loop_within_compiled_and_captured_steps_agrees_with_eager(
    tiny: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    for mode in ("off", "on"):
        config = without_dropout(tiny(device="cuda", compile=mode, log_every=1))
        config = dataclasses.replace(
            config,
            task=dataclasses.replace(config.task, length=100),
            model=dataclasses.replace(config.model, mixer="lem", mixer_args={}),
        )
        fit(config, tmp_path / mode)
    losses = [[record["loss"] for record in load_run(tmp_path / mode).metrics] for mode in ("off", "on")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_a_regression_captured_agrees_with_eager(tmp_path: Path) -> None:
    for mode in ("off", "on"):
        fit(config_of(ADDING, device="cuda", compile=mode, accumulate=7, log_every=1), tmp_path / mode)
    losses = [[record["loss"] for record in load_run(tmp_path / mode).metrics] for mode in ("off", "on")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.parametrize("mode", ["off", "on"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_resume_is_exact_to_the_last_bit(
    mode: str, accumulate: int, tiny: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    config = tiny(device="cuda", compile=mode, accumulate=accumulate, log_every=1)
    fit(config, tmp_path / "straight")
    with pytest.raises(InterruptedRunError):
        fit(config, tmp_path / "pieces", progress=stop_at(6, signal.SIGTERM))
    fit(config, tmp_path / "pieces", resume=True)
    assert_same_run(tmp_path / "straight", tmp_path / "pieces")


def without_dropout(config: TrainConfig) -> TrainConfig:
    return dataclasses.replace(config, model=dataclasses.replace(config.model, dropout=0.0))
