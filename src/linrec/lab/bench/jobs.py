"""Jobs: an entry of a suite, a mixer and a seed, at the width at which models have equal parameters."""

import dataclasses
import functools
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from linrec.errors import unknown
from linrec.field_types import read_content
from linrec.files import make_subfolder
from linrec.lab.bench.suites import LEARNERS, Entry, StreamEntry
from linrec.lab.bench.variants import Variant, folder_name, parse_variant
from linrec.lab.report.records import JOB, OUTCOME, RUN, JobRecord, learns
from linrec.lab.streams.learn import LearnConfig
from linrec.lab.tasks.base import judged_by
from linrec.lab.train import ConfigError, TrainConfig
from linrec.lab.train.config import config_from_dict, config_to_dict, make_model
from linrec.lab.train.run import write_json
from linrec.mixers import Mixer
from linrec.models import (
    ModelConfig,
    SequenceClassifierConfig,
    StackMemory,
)
from linrec.text import DataError

__all__ = ["Job", "make_jobs", "make_stream_jobs", "write_job"]

NO_DATA = "no data"
FAILED = "failed"
NAMED = ("task", "mixer", "seed", "trial", "parameters", "state_size", "metric")
"""The fields of a job that its row repeats, beside the configuration."""
STEP = 8
"""Widths are multiples of this, so that heads and groups divide them."""

COARSE = 64
"""Step of the coarse search: along its multiples, parameters grow with the width.

At other widths they may not, for mixers whose number of blocks is a divisor of the width.
"""

WIDEST = 4096

TOLERANCE = 0.05
"""Largest relative difference between two numbers of parameters that count as equal."""


Model: TypeAlias = ModelConfig | SequenceClassifierConfig


class Sizes(NamedTuple):
    """The parameters of a model, the state elements per sequence, and their part that is elements per step.

    The state is that of all mixers and of a memory across them. A cache counts its elements per step.
    """

    parameters: int
    state: int
    grows: int


@dataclass(frozen=True)
class Job:
    """A model to train and score in a process of its own.

    Args:
        task: name of the suite's entry.
        mixer: label of the mixer's variant: the mixer's name with its explicit arguments. On a stream, label
            of the learner.
        seed: seed of initialisation, batch order and dropout; the data are the same for all seeds. On a
            stream, seed of the stream too.
        config: the training configuration.
        sizes: sizes of the model; None if the model cannot be built or depends on missing data.
        trial: name of the learning rate that is tried; "" outside a learning rate sweep.
        ended: status and message of a job that cannot start for lack of data or of a model; None otherwise.
        steps: steps of the stream; None for a job that trains.
    """

    task: str
    mixer: str
    seed: int
    config: TrainConfig | LearnConfig
    sizes: Sizes | None
    trial: str = ""
    ended: tuple[str, str] | None = None
    steps: int | None = None

    @property
    def folder(self) -> Path:
        """Path of the job's folder, relative to the folder of the suite."""
        return (
            Path(self.task)
            / folder_name(self.mixer)
            / "-".join(filter(None, (f"seed-{self.seed}", self.trial)))
        )

    @property
    def described(self) -> dict[str, Any]:
        """The values of the fields in `NAMED`."""
        if isinstance(self.config, LearnConfig):
            metric = "loss" if self.config.make_stream().vocab_size else "mse"
        else:
            metric = judged_by(self.config.task)
        found = (*(self.sizes[:2] if self.sizes else (None, None)), metric)
        named = dict(zip(NAMED, (self.task, self.mixer, self.seed, self.trial, *found), strict=True))
        return named if self.steps is None else named | {"steps": self.steps}

    @property
    def d_model(self) -> int:
        """Width of the model."""
        return self.config.d_model if isinstance(self.config, LearnConfig) else self.config.model.d_model

    @property
    def lr(self) -> float:
        """The learning rate."""
        return self.config.lr if isinstance(self.config, LearnConfig) else self.config.optim.lr

    def at(self, lr: float) -> "Job":
        """Return a copy of the job with another learning rate, as a trial of a sweep."""
        config, trial = self.config, f"lr-{lr:g}"
        if isinstance(config, LearnConfig):
            return replace(self, config=replace(config, lr=lr), trial=trial)
        factor = lr / config.optim.lr
        # parameters with their own learning rate keep its ratio to the common rate
        transition_lr = None if config.optim.transition_lr is None else config.optim.transition_lr * factor
        optim = replace(config.optim, lr=lr, transition_lr=transition_lr)
        return replace(self, config=replace(config, optim=optim), trial=trial)


def make_jobs(
    entries: Sequence[Entry], mixers: Sequence[str], seeds: Sequence[int], *, parameters: int | None = None
) -> list[Job]:
    """Return the jobs of all entries, mixers and seeds, beginning with all jobs of the first seed.

    On each task, all models have the same number of parameters, as nearly as widths that are multiples of 8
    allow: by default the parameters of the first mixer's model at the width of the recipe. If the vocabulary
    depends on missing data, or if a mixer's model cannot be built for the task, the job has no sizes and is
    marked as ended, with a message.

    Args:
        entries: entries of the suite.
        mixers: names or import paths of mixers, optionally with arguments, or patterns of mixers over depth;
            see `parse_variant`.
        seeds: integers of at least 0.
        parameters: number of parameters of every model, instead of the first mixer's number.

    Raises:
        ConfigError: a mixer does not exist, cannot be built for any task, or is given twice.

    Example:
        >>> from linrec.lab.bench import get_suite
        >>> jobs = make_jobs(get_suite("smoke")[:1], ["gla", "lru"], [0, 1])
        >>> [str(job.folder) for job in jobs]
        ['copying/gla/seed-0', 'copying/lru/seed-0', 'copying/gla/seed-1', 'copying/lru/seed-1']
        >>> [job.mixer for job in make_jobs(get_suite("smoke")[:1], ["gla", "gla(n_heads=2)"], [0])]
        ['gla', 'gla(n_heads=2)']
    """
    variants = _variants(mixers)
    jobs: list[Job] = []
    unfit: dict[str, list[Exception]] = {variant.label: [] for variant in variants}
    for entry in entries:
        recipe, missing = _prepared(entry)
        wanted = parameters
        for variant in variants:
            try:
                across: dict[str, Any] = {} if variant.memory is None else {"memory": variant.memory}
                model = replace(
                    recipe.sequence_model, mixer=variant.mixer, mixer_args=dict(variant.mixer_args), **across
                )
            except (TypeError, ValueError) as error:
                raise ConfigError(f"{variant.label} on {entry.name}: {error}") from error
            found, ended = None, (NO_DATA, missing) if missing else None
            if not missing:
                try:
                    if wanted is not None:
                        model = with_parameters(model, wanted)
                    found = sizes(model)
                    wanted = wanted or found.parameters
                except Exception as error:
                    unfit[variant.label].append(error)
                    ended = (FAILED, _unbuilt(error))
            for seed in seeds:
                config = replace(recipe, model=model, loop=replace(recipe.loop, seed=seed))
                jobs.append(Job(entry.name, variant.label, seed, config, found, ended=ended))
    for label, errors in unfit.items():
        # a mixer that fits no task is a user error, better reported before the suite starts
        if errors and len(errors) == len(entries):
            raise ConfigError(f"{label} on {entries[0].name}: {_unbuilt(errors[0])}") from errors[0]
    return sorted(jobs, key=lambda job: seeds.index(job.seed))


def make_stream_jobs(
    entries: Sequence[StreamEntry], learners: Sequence[str], seeds: Sequence[int], steps: int | None = None
) -> list[Job]:
    """Return the jobs of all streams, learners and seeds, beginning with all jobs of the first seed.

    Args:
        entries: entries of the suite.
        learners: labels of learners, keys of `LEARNERS`; none is all.
        seeds: integers of at least 0.
        steps: steps of each stream; None is as the entries say.

    Raises:
        ConfigError: a label does not exist.

    Example:
        >>> from linrec.lab.bench import STREAMS
        >>> [str(job.folder) for job in make_stream_jobs(STREAMS[:1], ["rtrl"], [0, 1])]
        ['add-memory/rtrl/seed-0', 'add-memory/rtrl/seed-1']
    """
    for label in learners:
        if label not in LEARNERS:
            raise ConfigError(str(unknown("learner of the suite called", label, [*LEARNERS])))
    jobs = []
    for seed in seeds:
        for entry in entries:
            for label in dict.fromkeys(learners or LEARNERS):
                config = entry.config(label, seed)
                found = sizes(config.encoder(config.make_stream()))
                jobs.append(Job(entry.name, label, seed, config, found, steps=steps or entry.steps))
    return jobs


def first_line(error: BaseException) -> str:
    """Return the type and the first line of an error's message."""
    return ": ".join([type(error).__name__, *str(error).splitlines()[:1]])


def without_data(task: str, error: DataError) -> str:
    """Return the message of missing data, with the option that names their path."""
    return f"{error} In a suite, --data {task}=PATH says where the files are."


def _unbuilt(error: Exception) -> str:
    return f"its model cannot be built: {first_line(error)}"


def _is_same(stored: dict[str, Any], wanted: dict[str, Any], *, trusted: Collection[str]) -> bool:
    """Return whether a stored job is the wanted job; fields that the stored job lacks have their defaults."""
    try:
        of = stored["config"]
        config = _plain(LearnConfig(**of) if learns(of) else config_from_dict(of, trust_code=trusted))
    except (ConfigError, TypeError):
        return False
    described = {**stored, "config": json.loads(json.dumps(config))}
    return all(described.get(name) == wanted[name] for name in wanted)


def _plain(config: TrainConfig | LearnConfig) -> dict[str, Any]:
    return dataclasses.asdict(config) if isinstance(config, LearnConfig) else config_to_dict(config)


def write_job(job: Job, out: Path, about: dict[str, Any]) -> Path:
    """Create and return the folder of a job; raise ConfigError if it has another configuration."""
    folder = out / job.folder
    # the round trip through JSON turns tuples into lists, as in the stored file
    wanted = json.loads(json.dumps({**job.described, "config": _plain(job.config)}))
    # a job that never started may be overwritten: its configuration may change once its data or model exist
    never_began = (folder / OUTCOME).exists() and not (folder / RUN).exists()
    stored = None if never_began else read_content(folder / JOB, JobRecord)
    if stored is not None:
        if not _is_same(stored, wanted, trusted=job.config.import_paths):
            raise ConfigError(
                f"{folder} has a job of another configuration; give another --out, or remove this folder."
            )
        return folder
    make_subfolder(out, job.folder)
    write_json(folder / JOB, {**wanted, **about})
    if job.ended:
        status, message = job.ended
        write_json(folder / OUTCOME, {"status": status, "message": message, "peak_bytes": None})
    return folder


def _prepared(entry: Entry) -> tuple[TrainConfig, str]:
    """Return an entry's configuration with the vocabulary of its data, and a message if data are missing."""
    config = entry.config()
    if config.task.vocab_size is None and config.task.n_features is None:
        try:
            return replace(config, task=config.task.prepared()), ""
        except DataError as error:
            return config, without_data(entry.name, error)
    return config, ""


def _variants(mixers: Sequence[str]) -> list[Variant]:
    found: dict[str, Variant] = {}
    for mixer in mixers:
        try:
            variant = parse_variant(mixer)
        except (TypeError, ValueError) as error:
            raise ConfigError(str(error)) from error
        if variant.label in found:
            raise ConfigError(f"mixers must be different; {variant.label!r} is given twice.")
        found[variant.label] = variant
    return [*found.values()]


def sizes(config: Model) -> Sizes:
    """Return the sizes of a configuration's model, built on the meta device if its mixer supports it."""
    with torch.random.fork_rng(devices=[]):
        try:
            with torch.device("meta"):
                model = make_model(config)
        except ValueError:
            raise
        except Exception:
            # a user's mixer may read parameter values, which the meta device does not have
            model = make_model(config)
    stateful = _stateful(model)
    return Sizes(
        sum(parameter.numel() for parameter in model.parameters()),
        sum(module.state_size for module in stateful),
        sum(module.state_size for module in stateful if isinstance(module, Mixer) and module.state_grows),
    )


def _stateful(module: nn.Module) -> list[Mixer | StackMemory]:
    """Return mixers and memories that have a state, without those whose states are parts of another state."""
    if isinstance(module, (Mixer, StackMemory)) and module.state_size:
        return [module]
    return [found for child in module.children() for found in _stateful(child)]


def equally_many(parameters: int, other: int) -> bool:
    """Return whether two numbers of parameters are close enough for a fair comparison of models."""
    return abs(parameters - other) <= TOLERANCE * max(parameters, other)


def with_parameters(config: Model, n: int) -> Model:
    """Return the configuration whose number of parameters, embeddings and head included, is nearest to n.

    First, the model width is set to the multiple of 8 that comes nearest to n, with the hidden width of the
    channel mixer at a fixed ratio to the model width. Then the hidden width alone is adjusted to come nearer
    to n. Widths that the mixer does not support are skipped; without any, the mixer's own error is raised.
    """
    ratio = config.d_channel_mixing / config.d_model

    def of(width: int) -> Model:
        return replace(config, d_model=width, d_channel_mixing=max(1, round(ratio * width)))

    @functools.cache
    def parameters(width: int) -> int | None:
        try:
            return sizes(of(width)).parameters
        except Exception:
            # any exception: users' mixers may use `assert` to check that the heads divide the width
            return None

    # the nearest width is between the first of these with enough parameters and the one before it
    narrowest, widest = STEP, WIDEST
    for width in (STEP, *range(COARSE, WIDEST + 1, COARSE)):
        count = parameters(width)
        if count is not None and count >= n:
            widest = width
            break
        if count is not None:
            narrowest = width
    between = range(narrowest, widest + 1, STEP)
    possible = [width for width in reversed(between) if parameters(width) is not None]
    if not possible:
        sizes(of(STEP))
    nearest = of(min(possible, key=lambda width: abs((parameters(width) or 0) - n)))
    count = sizes(nearest).parameters

    def hidden(units: int) -> Model:
        return replace(nearest, d_channel_mixing=max(1, nearest.d_channel_mixing + units))

    of_a_unit = sizes(hidden(1)).parameters - count
    return hidden(round((n - count) / of_a_unit)) if of_a_unit else nearest
