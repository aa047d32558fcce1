"""Training: configuration, recipes, the loop, run folders."""

from linrec.errors import (
    CheckpointError,
    ConfigError,
    DivergedError,
    InterruptedRunError,
    RunFolderError,
    TrainError,
    UntrustedCodeError,
)
from linrec.lab.train.config import LoopConfig, OptimConfig, TrainConfig
from linrec.lab.train.learner import LearnerConfig
from linrec.lab.train.loop import fit
from linrec.lab.train.progress import Progress
from linrec.lab.train.recipes import get_recipe, recipe_names
from linrec.lab.train.records import Result
from linrec.lab.train.run import Run, load_run

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DivergedError",
    "InterruptedRunError",
    "LearnerConfig",
    "LoopConfig",
    "OptimConfig",
    "Progress",
    "Result",
    "Run",
    "RunFolderError",
    "TrainConfig",
    "TrainError",
    "UntrustedCodeError",
    "fit",
    "get_recipe",
    "load_run",
    "recipe_names",
]
