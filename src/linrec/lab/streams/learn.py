"""Learn from a stream without end: `linrec learn`."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias, get_type_hints

import torch
from torch import Tensor, nn

from linrec.errors import CheckpointError, ConfigError, InterruptedRunError, RunFolderError
from linrec.field_types import check_types
from linrec.files import read_json, reason
from linrec.lab.streams import get, names
from linrec.lab.streams.base import Stream
from linrec.lab.streams.given import GivenStream
from linrec.lab.streams.prequential import Prequential, forgotten, recoveries
from linrec.lab.tasks import NO_TARGET
from linrec.lab.train.checkpoint import Checkpoint, load_checkpoint, packed, save_checkpoint, unpacked
from linrec.lab.train.config import check_trusted, lists_to_tuples
from linrec.lab.train.learner import flat_memory, whole_memory
from linrec.lab.train.progress import Interrupt
from linrec.lab.train.records import MetricsLog, provenance
from linrec.lab.train.run import CONFIG, RESULT, lock_run_folder, write_json, writing
from linrec.learning import Learner, build_learner
from linrec.learning import get as get_learner
from linrec.models import (
    LanguageModel,
    ModelConfig,
    SequenceClassifier,
    SequenceClassifierConfig,
    StackConfig,
)
from linrec.rules import at_least
from linrec.trees import leaves, map_tree

__all__ = ["LearnConfig", "Learning", "learn"]

# the errors of a checkpoint that another configuration wrote
FOREIGN = (AttributeError, LookupError, RuntimeError, StopIteration, TypeError, ValueError)
AnyStream: TypeAlias = Stream | GivenStream


@dataclass(frozen=True)
class LearnConfig:
    """Configuration of `linrec learn`; all values are plain.

    Args:
        stream: name of a stream, a file, or "-" for standard input.
        stream_args: arguments of the stream.
        follow: wait for more at the end of a file.
        learner: name of the learner.
        learner_args: arguments of the learner.
        mixer: name of the mixer of every block.
        mixer_args: arguments of the mixer.
        d_model: width of the model.
        n_layers: number of blocks.
        model_args: further fields of the `SequenceClassifierConfig`, such as channel_mixing="none"; all
            arguments of the network of a learner that brings its own.
        language_model: fields of a `ModelConfig`, for a language model in place of a new encoder of the
            `mixer`; None for an encoder.
        chunk: steps that are learnt at a time.
        lr: learning rate.
        momentum: None takes Adam; a number takes SGD with this Nesterov momentum.
        clip_norm: maximum norm of the gradients.
        rows: number of rows of the stream, each a stream of its own.
        seed: seed of the stream, and of the model's initial values.
        window: steps of a point of the curve, and of a record in metrics.jsonl.
        checkpoint_every: steps between checkpoints.
    """

    stream: str
    stream_args: Mapping[str, Any] = field(default_factory=dict)
    follow: bool = False
    learner: str = "rtrl"
    learner_args: Mapping[str, Any] = field(default_factory=dict)
    mixer: str = "lru"
    mixer_args: Mapping[str, Any] = field(default_factory=dict)
    d_model: int = 32
    n_layers: int = 1
    model_args: Mapping[str, Any] = field(default_factory=dict)
    language_model: Mapping[str, Any] | None = None
    chunk: int = 8
    lr: float = 3e-3
    momentum: float | None = None
    clip_norm: float | None = 1.0
    rows: int = 1
    seed: int = 0
    window: int = 1000
    checkpoint_every: int = 10_000

    def __post_init__(self) -> None:
        at_least(1, chunk=self.chunk, window=self.window, checkpoint_every=self.checkpoint_every)

    @property
    def import_paths(self) -> set[str]:
        """The import paths that building the model would import; see `StackConfig`."""
        if self.language_model is not None:
            return self._language_model().import_paths
        return StackConfig(mixer=self.mixer, mixer_args=dict(self.mixer_args)).import_paths

    def continuing(self, model: LanguageModel) -> "LearnConfig":
        """Return the configuration with a language model in place of the encoder."""
        return replace(self, language_model=asdict(model.config) | {"memory": None})

    def make_stream(self) -> AnyStream:
        """Return the stream at its start."""
        path = None if self.stream == "-" else Path(self.stream)
        if path is None or (path.is_file() and self.stream not in names()):
            return GivenStream(path=path, follow=self.follow)
        with naming(f"stream_args` of `{self.stream}"):
            return get(self.stream)(rows=self.rows, seed=self.seed, **self.stream_args)

    def make_model(self, stream: AnyStream) -> nn.Module:
        """Return a model of the stream with its initial values."""
        torch.manual_seed(self.seed)
        if (network := get_learner(self.learner).network) is not None:
            with naming("model_args"):
                return network(
                    stream.n_features, stream.n_outputs, vocab_size=stream.vocab_size, **self.model_args
                )
        if self.language_model is not None:
            return LanguageModel(self._language_model())
        return SequenceClassifier(self.encoder(stream))

    def encoder(self, stream: AnyStream) -> SequenceClassifierConfig:
        """Return the configuration of a new encoder of the stream."""
        with naming("model_args"):
            return SequenceClassifierConfig(
                n_outputs=stream.n_outputs,
                vocab_size=stream.vocab_size,
                n_features=stream.n_features,
                d_model=self.d_model,
                n_layers=self.n_layers,
                mixer=self.mixer,
                mixer_args=dict(self.mixer_args),
                bidirectional=False,
                pooling="none",
                **self.model_args,
            )

    def _language_model(self) -> ModelConfig:
        fields: dict[str, Any] = lists_to_tuples(dict(self.language_model or {}))
        # a learner refuses a memory across the stack
        fields.pop("memory", None)
        return ModelConfig(**fields)


@contextmanager
def naming(arguments: str) -> Iterator[None]:
    """Turn errors of unknown arguments into errors of the configuration."""
    try:
        yield
    except TypeError as error:
        raise ConfigError(f"`{arguments}`: {error}.") from error


class Learning:
    """A stream, a model with its learner, and their scores: all that a run carries from step to step.

    Args:
        config: the configuration.
        model: a trained model of that configuration; None is a new model.
        device: where the model lives.
    """

    def __init__(
        self, config: LearnConfig, model: nn.Module | None = None, device: torch.device | str = "cpu"
    ) -> None:
        self.config, self.device = config, torch.device(device)
        self.stream = config.make_stream()
        if model is not None:
            self._check_model(model)
        self.model = (config.make_model(self.stream) if model is None else model).to(self.device)
        optimizer: torch.optim.Optimizer = torch.optim.Adam(self.model.parameters(), lr=config.lr)
        if config.momentum is not None:
            optimizer = torch.optim.SGD(
                self.model.parameters(), lr=config.lr, momentum=config.momentum, nesterov=config.momentum > 0
            )
        self.learner: Learner = build_learner(
            config.learner, self.model, optimizer, clip_norm=config.clip_norm, **config.learner_args
        )
        self.scores = Prequential(config.window)
        self.seconds = 0.0
        self.first_loss: float | None = None

    @property
    def steps(self) -> int:
        """Number of steps that the learner has seen."""
        return self.learner.steps

    @property
    def memory_bytes(self) -> int:
        """Bytes that the learner carries from step to step."""
        return sum(leaf.numel() * leaf.element_size() for leaf in leaves(self.learner.memory))

    def _check_model(self, trained: nn.Module) -> None:
        """Raise ConfigError unless a trained model takes the stream's inputs and predicts its targets."""
        if not isinstance(trained, SequenceClassifier | LanguageModel):
            raise ConfigError(f"`{self.config.learner}` has a network of its own; leave --init-from out.")
        of = trained.config
        n_outputs = of.vocab_size if of.n_outputs is None else of.n_outputs
        stream = (self.stream.vocab_size, self.stream.n_features, self.stream.n_outputs)
        model = (of.vocab_size, getattr(of, "n_features", None), n_outputs)
        if model != stream:
            raise ConfigError(
                "the model must have the stream's (vocab_size, n_features, n_outputs) = "
                f"{stream}; it has {model}. Start from a model of such a stream, or of bytes."
            )

    def advance(self, n: int) -> bool:
        """Learn the next n steps, or fewer at the end of the stream; return whether there were any."""
        begin = time.perf_counter()
        piece = self.stream.read(n)
        if piece is None:
            return False
        piece = map_tree(lambda tensor: tensor.to(self.device), piece)
        counts = piece.targets != NO_TARGET
        if piece.targets.is_floating_point():
            counts = ~piece.targets.isnan().any(2)
        weight = None if counts.all() else counts.to(torch.float32)
        step = self.learner.chunk(*piece._replace(weight=weight))
        loss = step.loss.float().cpu()
        self.scores.add(loss, counts.cpu())
        if self.first_loss is None and counts.any():
            self.first_loss = float(loss[counts.cpu()].mean())
        self.seconds += time.perf_counter() - begin
        return True

    def result(self) -> dict[str, Any]:
        """Return the scores so far, as JSON values."""
        scores, regimes = self.scores, self.stream.regimes(self.steps)
        untrained = math.log(self.stream.n_outputs) if self.stream.vocab_size else self.first_loss or math.nan
        return {
            "steps": self.steps,
            "loss": scores.mean,
            "fading": scores.fading,
            "width": scores.width,
            "curve": scores.curve,
            "regimes": [list(regime) for regime in regimes],
            "recoveries": recoveries(scores.curve, scores.width, regimes),
            "forgotten": forgotten(scores.curve, scores.width, regimes, untrained),
            "bounds": dict(self.stream.bounds),
            "memory_bytes": self.memory_bytes,
            "microseconds_per_step": self.seconds / max(1, self.steps) * 1e6,
        }

    def checkpoint(self) -> Checkpoint:
        """Return all that a run needs to go on."""
        tensors: dict[str, Tensor] = {}
        learner = self.learner.state_dict()
        learner["memory"] = flat_memory(learner["memory"])
        state = {
            "learner": learner,
            "stream": self.stream.state_dict(),
            "scores": self.scores.state_dict(),
            "seconds": self.seconds,
            "first_loss": self.first_loss,
            "random": torch.get_rng_state(),
        }
        return Checkpoint(tensors, {"step": self.steps, "state": packed(state, tensors)})

    def restore(self, checkpoint: Checkpoint) -> None:
        """Resume at a checkpoint.

        Raises:
            CheckpointError: the checkpoint is not of this configuration.
        """
        try:
            self._restore(checkpoint)
        except FOREIGN as error:
            raise CheckpointError(
                f"the checkpoint does not fit the run's configuration: {error}. Use files of a single run."
            ) from error

    def _restore(self, checkpoint: Checkpoint) -> None:
        state = unpacked(checkpoint.about["state"], checkpoint.tensors)
        learner = state["learner"]
        learner["memory"] = whole_memory(self.learner, learner["memory"], learner["rows"])
        self.learner.load_state_dict(map_tree(lambda tensor: tensor.to(self.device), learner))
        self.stream.load_state_dict(state["stream"])
        self.scores.load_state_dict(state["scores"])
        self.seconds, self.first_loss = state["seconds"], state["first_loss"]
        torch.set_rng_state(state["random"])


def learn(
    config: LearnConfig,
    folder: Path,
    *,
    steps: int | None = None,
    resume: bool = False,
    model: nn.Module | None = None,
    device: torch.device | str = "cpu",
    command: str = "",
    told: Callable[[Learning], None] | None = None,
) -> dict[str, Any]:
    """Learn from a stream into a run folder; return the scores, which result.json holds too.

    The folder has config.json, metrics.jsonl and TensorBoard events with a record per window, and a
    checkpoint. A run that is killed at any time resumes from its checkpoint, and reaches the same numbers.

    Args:
        config: the configuration.
        folder: the run folder; a new one unless `resume`.
        steps: number of steps in all, up to whole chunks; None goes on until the stream ends, or the run is
            stopped.
        resume: whether to go on from the folder's checkpoint.
        model: a trained model to start from.
        device: where to compute.
        command: the command line to record.
        told: called after each window.
    """
    learning = Learning(config, model, device)
    if not resume:
        if (folder / CONFIG).exists():
            raise RunFolderError(f"{folder} already holds a run; pass another --out, or --resume {folder}.")
        with writing(f"create the folder {folder}", RunFolderError):
            folder.mkdir(parents=True, exist_ok=True)
    with lock_run_folder(folder), Interrupt() as interrupt:
        if resume:
            found = load_checkpoint(folder, set_aside=True)
            if found is None:
                raise CheckpointError(f"{folder} has no checkpoint; start again with another --out.")
            learning.restore(found)
        else:
            about = {"command": command, **provenance(torch.device(device))}
            save_checkpoint(folder, learning.checkpoint())
            # written last, because this file makes the folder a run folder
            write_json(folder / CONFIG, about | {"config": asdict(config)})
        with MetricsLog(folder, step=learning.steps, command="learn") as metrics:
            while steps is None or learning.steps < steps:
                before, points = learning.steps, len(learning.scores.curve)
                # whole chunks, whatever `steps` is: where a run stops changes no update
                if not learning.advance(config.chunk):
                    break
                if len(learning.scores.curve) != points:
                    metrics.append(_record(learning))
                    if told is not None:
                        told(learning)
                passed = before // config.checkpoint_every != learning.steps // config.checkpoint_every
                if passed or interrupt.requested:
                    save_checkpoint(folder, learning.checkpoint())
                if interrupt.requested:
                    raise InterruptedRunError(
                        f"stopped at step {learning.steps}; continue with `linrec learn --resume {folder}`."
                    )
        save_checkpoint(folder, learning.checkpoint())
        result = learning.result()
        write_json(folder / RESULT, result)
    return result


def stored_config(folder: Path, *, trust_code: bool = False) -> LearnConfig:
    """Return the configuration of a run of `linrec learn`."""
    try:
        stored = read_json(folder / CONFIG)["config"]
        check_types(get_type_hints(LearnConfig), stored)
        config = LearnConfig(**stored)
        paths = config.import_paths
    except (AttributeError, OSError, ValueError, TypeError, KeyError) as error:
        raise RunFolderError(f"{folder} is not a run of `linrec learn`: {reason(error)}.") from error
    check_trusted("mixer", paths, trust_code)
    return config


def trained_model(folder: Path, config: LearnConfig) -> nn.Module:
    """Return the model of a run of `linrec learn` as its newest checkpoint has it."""
    found = load_checkpoint(folder)
    if found is None:
        raise RunFolderError(f"{folder} has no checkpoint.")
    model = config.make_model(config.make_stream())
    model.load_state_dict(unpacked(found.about["state"], found.tensors)["learner"]["model"])
    return model


def _record(learning: Learning) -> dict[str, Any]:
    return {
        "step": learning.steps,
        "split": "stream",
        "loss": learning.scores.curve[-1],
        "fading": learning.scores.fading,
        "seconds": round(learning.seconds, 3),
        "memory_bytes": learning.memory_bytes,
    }
