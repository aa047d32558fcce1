"""The registry of recipes by name."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from linrec.errors import unknown
from linrec.lab import tasks
from linrec.lab.tasks import Task
from linrec.lab.train.config import LoopConfig, OptimConfig, TrainConfig, model_type
from linrec.models import ModelConfig, SequenceClassifierConfig

_RECIPES: dict[str, Callable[[], TrainConfig]] = {}


def recipe(make: Callable[[], TrainConfig]) -> Callable[[], TrainConfig]:
    """Register a recipe under its function's name, with hyphens for underscores."""
    register(make.__name__, make)
    return make


def register(name: str, make: Callable[[], TrainConfig]) -> None:
    """Register a recipe under a name, with hyphens for underscores."""
    _RECIPES[name.replace("_", "-")] = make


def recipe_names() -> list[str]:
    """Return the names of all recipes.

    Example:
        >>> "memory-horizon" in recipe_names()
        True
    """
    return list(_RECIPES)


def recipe_summary(name: str) -> str:
    """Return the first line of a recipe's docstring."""
    return (_RECIPES[name].__doc__ or "").split("\n")[0]


def like(
    recipe: TrainConfig,
    name: str,
    task: Task,
    *,
    model: Mapping[str, Any] = {},
    optim: Mapping[str, Any] = {},
    loop: Mapping[str, Any] = {},
) -> TrainConfig:
    """Return a recipe with another name, another task, and other values of some fields."""
    return TrainConfig(
        name,
        task,
        dataclasses.replace(recipe.model, **model),
        dataclasses.replace(recipe.optim, **optim),
        dataclasses.replace(recipe.loop, **loop),
    )


def classifier(**given: Any) -> SequenceClassifierConfig:
    """Return a bidirectional classifier, whose numbers of features and outputs are the task's."""
    return SequenceClassifierConfig(n_features=1, n_outputs=1, **given)


def causal(**given: Any) -> SequenceClassifierConfig:
    """Return a causal classifier, whose numbers of features and outputs are the task's."""
    return classifier(bidirectional=False, **given)


def language_model(**given: Any) -> ModelConfig:
    """Return a language model, whose vocabulary is the task's."""
    return ModelConfig(vocab_size=1, **given)


def long_loop(**given: Any) -> LoopConfig:
    """Return the loop of a long run: TensorFloat32, no deterministic kernels, the best model is kept."""
    return LoopConfig(**{"matmul_precision": "high", "deterministic": False, "keep": "best", **given})


def gate_loops(width: int) -> dict[str, Any]:
    """Return two layers of GateLoop and SwiGLU, as arguments of a model."""
    mixing = {"d_channel_mixing": 2 * width, "channel_mixing": "swiglu"}
    return {"d_model": width, "n_layers": 2, "mixer": "gate_loop", **mixing}


def small(name: str) -> Callable[[], TrainConfig]:
    """Return the recipe of a task without its own: a small model, and settings that suit many tasks."""
    task = tasks.get(name)

    def make() -> TrainConfig:
        of = task()
        model: ModelConfig | SequenceClassifierConfig = language_model(**gate_loops(128))
        if model_type(of) is SequenceClassifierConfig:
            model = causal(**gate_loops(128), pooling="last" if of.per_sequence else "none")
        return TrainConfig(
            name=task.__name__ if ":" in name else name.replace("_", "-"),
            task=of,
            model=model,
            optim=OptimConfig(lr=0.001, betas=(0.9, 0.98), weight_decay=0.1, warmup_steps=200, clip_norm=1.0),
            loop=LoopConfig(steps=5000, batch_size=64, matmul_precision="high", keep="best"),
        )

    make.__doc__ = (task.__doc__ or "").split("\n")[0]
    return make


def get_recipe(name: str) -> TrainConfig:
    """Return the configuration of a recipe.

    Args:
        name: a name from `recipe_names()`; hyphens and underscores are equivalent. Or the import path of a
            task of your own, as in "my_package.my_module:MyTask", which gets the recipe of generated tasks;
            the import runs the module's code.

    Raises:
        ValueError: the recipe or the task does not exist; the message gives the nearest match.

    Example:
        >>> get_recipe("memory-horizon").loop.epochs
        300
    """
    make = small(name) if ":" in name else _RECIPES.get(name.replace("_", "-"))
    if make is None:
        raise unknown("recipe", name, _RECIPES)
    return make()
