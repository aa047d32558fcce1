import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from linrec.lab.tasks import MemoryHorizon
from linrec.lab.train import LoopConfig, OptimConfig, TrainConfig
from linrec.models import ModelConfig

# small enough that a run takes a fraction of a second: 3 epochs of 5 batches
TASK = MemoryHorizon(length=8, n_resets=1, modulus=5, n_samples=28, n_validation=4, n_test=3)
MODEL = ModelConfig(vocab_size=6, d_model=8, n_layers=2, d_channel_mixing=8, dropout=0.1)
LOOP = LoopConfig(epochs=3, batch_size=4, eval_every=4, checkpoint_every=100, log_every=2, device="cpu")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models of this size only lose by waiting for a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tiny() -> Callable[..., TrainConfig]:
    """Return a maker of tiny configurations; its arguments change fields of the sections."""

    def make(*, optim: dict[str, Any] | None = None, **loop: Any) -> TrainConfig:
        changed = OptimConfig(**{"lr": 0.01, "warmup_steps": 3, **(optim or {})})
        return TrainConfig("tiny", TASK, MODEL, changed, dataclasses.replace(LOOP, **loop))

    return make
