import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from linrec.lab.tasks import MemoryHorizon
from linrec.lab.train import LoopConfig, TrainConfig
from linrec.lab.train.checkpoint import Checkpoint, save_checkpoint
from linrec.lab.train.config import config_to_dict
from linrec.lab.train.run import write_json
from linrec.models import LanguageModel, ModelConfig

TASK = MemoryHorizon(length=80, n_resets=2, n_samples=40, n_validation=4, n_test=8)


class RunMaker:
    """Writes run folders as training does, with made-up numbers."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __call__(
        self,
        name: str,
        *,
        seed: int = 0,
        recipe: str = "small",
        right_to_span: int = 10,
        steps: tuple[int, ...] = (10, 20, 30),
        loss: float = 3.0,
        finished: bool = True,
        checkpoint: bool = True,
        command: str | None = None,
        loop: dict[str, Any] | None = None,
        task: MemoryHorizon = TASK,
        mixer: str | tuple[str, ...] = "gate_loop",
        **mixer_args: Any,
    ) -> Path:
        sizes = {"vocab_size": 6, "d_model": 8, "n_layers": 2, "d_channel_mixing": 8}
        config = TrainConfig(
            name=recipe,
            task=task,
            model=ModelConfig(**sizes, mixer=mixer, mixer_args=mixer_args),
            loop=dataclasses.replace(LoopConfig(seed=seed), **(loop or {})),
        )
        folder = self.root / name
        folder.mkdir(parents=True)
        about = {
            "command": command,
            "commit": "0123456789abcdef",
            "dirty": False,
            "versions": {"torch": "2.13.0"},
            "device": {"type": "cpu", "name": "a processor", "threads": 1},
        }
        write_json(folder / "config.json", {"recipe": recipe, **about, "config": config_to_dict(config)})
        records = [
            {"step": step, "split": split, "loss": loss - 0.01 * step, "accuracy": 0.01 * step}
            for step in steps
            for split in ("train", "validation")
        ]
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
        torch.manual_seed(seed)
        model = LanguageModel(config.model)
        if finished:
            scores = {}
            for name in ("test", "validation"):
                split = task.split(name)
                wrong = (split.targets + 1) % task.modulus
                predictions = torch.where(split.group <= right_to_span, split.targets, wrong)
                scores[name] = task.score(predictions, split)
            parameters = sum(p.numel() for p in model.parameters())
            speed = {"parameters": parameters, "steps": 30, "seconds": 90.0, "steps_per_second": 12.5}
            write_json(folder / "result.json", {**scores, **speed, **about})
        if checkpoint:
            tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
            save_checkpoint(folder, Checkpoint(tensors, {"step": 30}))
        return folder


@pytest.fixture
def make_run(tmp_path: Path) -> RunMaker:
    return RunMaker(tmp_path / "runs")


@pytest.fixture(scope="module")
def make_run_once(tmp_path_factory: pytest.TempPathFactory) -> RunMaker:
    return RunMaker(tmp_path_factory.mktemp("runs"))
