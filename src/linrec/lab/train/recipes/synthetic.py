"""Recipes of the generated tasks without their own: all share a small model and its training settings."""

from collections.abc import Callable
from typing import Any

from linrec.lab import tasks
from linrec.lab.tasks import DrawnTask
from linrec.lab.train.config import LoopConfig, OptimConfig, TrainConfig, model_type
from linrec.lab.train.recipes.registry import recipe_names, register
from linrec.models import ModelConfig, SequenceClassifierConfig


def _synthetic(name: str) -> Callable[[], TrainConfig]:
    """Return the recipe of a generated task."""
    task = tasks.get(name)
    stack: dict[str, Any] = {
        "d_model": 128,
        "n_layers": 2,
        "mixer": "gate_loop",
        "d_channel_mixing": 256,
        "channel_mixing": "swiglu",
    }

    def make() -> TrainConfig:
        of = task()
        # the task sets vocabulary and output sizes
        model: ModelConfig | SequenceClassifierConfig = ModelConfig(vocab_size=1, **stack)
        if model_type(of) is SequenceClassifierConfig:
            model = SequenceClassifierConfig(
                n_features=1,
                n_outputs=1,
                bidirectional=False,
                pooling="last" if of.per_sequence else "none",
                **stack,
            )
        return TrainConfig(
            name=name.replace("_", "-"),
            task=of,
            model=model,
            optim=OptimConfig(lr=0.001, betas=(0.9, 0.98), weight_decay=0.1, warmup_steps=200, clip_norm=1.0),
            loop=LoopConfig(steps=5000, batch_size=64, matmul_precision="high", keep="best"),
        )

    make.__doc__ = (task.__doc__ or "").split("\n")[0]
    return make


for _name in tasks.names():
    if issubclass(tasks.get(_name), DrawnTask) and _name.replace("_", "-") not in recipe_names():
        register(_name, _synthetic(_name))
