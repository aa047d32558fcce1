"""`linrec train RECIPE`: train a model, or resume a run."""

import dataclasses
import functools
import inspect
import math
import shlex
import signal
import sys
import typing
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from linrec import mixers
from linrec.cli.display import Display
from linrec.cli.help import train_help
from linrec.cli.options import TrainLearnerOptions
from linrec.cli.output import say
from linrec.cli.parsing import named_arguments, one_line_errors, parse, peek
from linrec.cli.stopping import CtrlC
from linrec.lab.tasks import LanguageModeling, SourcedTask, judged_by
from linrec.lab.train import (
    ConfigError,
    LearnerConfig,
    Progress,
    TrainConfig,
    fit,
    get_recipe,
    load_run,
    recipe_names,
)
from linrec.lab.train.config import model_type, values_from_task
from linrec.lab.train.fabric import program as this_program
from linrec.lab.train.start import Start, open_start
from linrec.models import EncoderConfig, EncoderDecoderConfig
from linrec.models.config import StackConfig, complete_mixer_args, mixer_parameters
from linrec.nn.channel_mixing import ChannelMixing

MOST_USED = {
    "data": ("path", "dataset", "length"),
    "task": ("path", "dataset", "length"),
    "model": ("mixer", "d_model", "n_layers"),
    "optim": ("lr", "warmup_steps"),
    "loop": ("steps", "epochs", "batch_size", "seed", "device", "precision"),
}
"""The options of each section that `linrec train RECIPE --help` shows."""
OF_SOURCE = ("vocab_size", "n_features")
"""The fields of an encoder that the task determines."""
LESS_USED = ("learner_args", "update")
"""The options without a section that it does not show."""


def run(words: list[str], _: Sequence[str]) -> int:
    """Run `linrec train`."""
    if not words:
        print(train_help(), end="", file=sys.stderr)
        return 2
    name, rest = ("", words) if words[0].startswith("-") else (words[0], words[1:])
    folder_to_resume = peek(rest, "--resume")
    if folder_to_resume == []:
        raise ConfigError("--resume needs a run folder: `linrec train --resume runs/memory-horizon`.")
    resume = None if folder_to_resume is None else folder_to_resume[0]
    if not name and resume is None:
        listed = ", ".join(recipe_names())
        raise ConfigError(f"name a recipe first, or a run folder after --resume; recipes: {listed}.")

    trust_code = "--trust-code" in rest
    given = peek(rest, "--init-from")
    if given is not None and (not given or resume is not None):
        raise ConfigError("--init-from needs a run folder or a checkpoint, and excludes --resume.")
    config = _base_config(name, resume, trust_code=trust_code)
    start = None
    if given is not None:
        start = open_start(given[0], trust_code=trust_code)
        config = _continued(config, start)
    with one_line_errors():
        options_of_mixers = options_type(
            config, peek(rest, "--model.mixer"), of_encoder=peek(rest, "--model.encoder.mixer")
        )
    program = f"linrec train {config.name}"
    if {"-h", "--help"} & {*rest}:
        print(f"The most common options; `{program} --help-all` shows every option.\n")
        options_of_mixers = most_used(options_of_mixers)
    rest = ["--help" if word == "--help-all" else word for word in rest]
    options = parse(options_of_mixers, rest, program)
    if options.resume is not None and options.out not in (None, options.resume):
        raise ConfigError("--resume continues in its own folder; leave --out out.")
    folder = options.resume or options.out or Path("runs") / config.name
    with one_line_errors():
        config = config_of(options, config.name, config.task.section)
    ctrl_c = signal.getsignal(signal.SIGINT)

    def report(progress: Progress) -> None:
        if isinstance(ctrl_c, CtrlC):
            # from the first step on, the run takes the first Ctrl-C, and hands over the second
            ctrl_c.again = True
        display.update(config.name, progress)

    with Display([config.name]) as display:
        result = fit(
            config,
            folder,
            resume=options.resume is not None,
            progress=report,
            command=shlex.join([*this_program(), "train", *words]),
            init=None if start is None else start.model,
        )
    scores = {"test": result.test, "validation": result.validation}
    told = [_told(name, of, judged_by(config.task)) for name, of in scores.items() if of]
    say(", ".join(told) or "no scores: the task has neither test nor validation data")
    best = "" if result.best_step is None else f", kept the model of step {result.best_step}"
    say(f"{result.steps} steps in {result.seconds:.0f} s{best}; all in {folder}")
    return 0


def _base_config(name: str, resume: str | None, *, trust_code: bool) -> TrainConfig:
    """Return the configuration of the recipe or the run, before command line options change it."""
    if resume is None:
        with one_line_errors():
            return get_recipe(name)
    config = load_run(resume, trust_code=trust_code).config
    if name.replace("_", "-") not in ("", config.name):
        raise ConfigError(f"{resume} was trained with the recipe {config.name!r}, not {name!r}.")
    return config


def _continued(config: TrainConfig, start: Start) -> TrainConfig:
    """Return the configuration with the model that training starts from, and with the model's tokenizer."""
    if not isinstance(config.task, LanguageModeling):
        raise ConfigError(
            f"--init-from is for language models; the recipe {config.name!r} does not train a language model."
        )
    tokenizer = start.tokenizer or config.task.tokenizer
    task = dataclasses.replace(config.task, tokenizer=tokenizer, vocab_size=start.model.config.vocab_size)
    return dataclasses.replace(config, task=task, model=start.model.config)


def _told(name: str, scores: Mapping[str, Any], by: str) -> str:
    """Format the scores of a split by the task's metric: accuracy, mean squared error, or loss."""
    score = scores.get("accuracy" if by == "accuracy" else "loss")
    if score is None:
        # of a file that linrec did not write
        return f"{name}: no score"
    if by == "accuracy":
        return f"{name} accuracy {score:.4f}"
    if by == "mse":
        # the NRMSE is None where the targets' standard deviation is 0
        share = "" if scores.get("nrmse") is None else f" (NRMSE {scores['nrmse']:.4f})"
        return f"{name} mean squared error {score:.4g}{share}"
    bleu = f", BLEU {scores['bleu']:.2f}" if "bleu" in scores else ""
    return f"{name} loss {score:.4f} (perplexity {math.exp(min(score, 700)):.2f}){bleu}"


def options_type(
    config: TrainConfig, typed: Sequence[str] | None = None, *, of_encoder: Sequence[str] | None = None
) -> type[Any]:
    """Return a dataclass of all options of `linrec train`, with the values of `config` as defaults.

    The mixer's options are the keyword-only arguments of its `__init__`. A pattern of mixers has such options
    for each mixer, under the mixer's name.

    Args:
        config: the configuration of the recipe or of the run to resume.
        typed: names of mixers that replace the mixers of `config`, with the new mixers' own default
            arguments; None keeps the mixers of `config`.
        of_encoder: names of mixers that replace the mixers of the encoder.
    """
    model_options = _model_options(config.model, typed, values_from_task(config.task), of_encoder)
    return _make(
        "Options",
        _with_arguments(
            """Train a model.

            Args:
                out: run folder to create; by default runs/RECIPE.
                resume: run folder to continue, with the configuration stored there.
                init_from: run folder or checkpoint whose model and tokenizer a new run starts from.
                trust_code: allow running the code of a task or mixer that the stored configuration names by
                    an import path.
            """,
            TrainLearnerOptions,
        ),
        [
            ("out", Path | None, None),
            ("resume", Path | None, None),
            ("init_from", Path | None, None),
            ("trust_code", bool, False),
            *_learner_fields(config.learner),
            (config.task.section, type(config.task), config.task),
            ("model", model_options, model_options()),
            ("optim", type(config.optim), config.optim),
            ("loop", type(config.loop), config.loop),
        ],
    )


def _model_options(
    config: StackConfig,
    typed: Sequence[str] | None,
    from_task: Collection[str],
    of_encoder: Sequence[str] | None = None,
) -> type[Any]:
    """Return a dataclass of the options of a model; see `options_type`."""
    arguments = config.mixer_args
    pattern = tuple(map(mixers.canonical, typed or config.mixer_pattern))
    if pattern != config.mixer_pattern:
        arguments = complete_mixer_args(_one_or_all(pattern), {})
    # import paths are trusted here: the user typed them, or the caller checked them on loading `config`
    names = typing.cast(Any, (*mixers.names(), *(typed or config.mixer_pattern)))
    shape = type(config)
    hints = typing.get_type_hints(shape)
    # a single name, or a pattern of several names
    hints["mixer"] = tuple[Literal[names], ...]  # type: ignore[valid-type]
    hints["channel_mixing"] = tuple[ChannelMixing, ...]
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(shape)}
    values["mixer"], values["channel_mixing"] = pattern, config.channel_mixing_pattern
    hints["mixer_args"] = _mixer_options(_one_or_all(pattern), arguments)
    values["mixer_args"] = hints["mixer_args"]()
    if isinstance(config, EncoderDecoderConfig):
        hints["encoder"] = _model_options(config.encoder, of_encoder, OF_SOURCE)
        values["encoder"] = hints["encoder"]()
        for name in ("second", "arn"):
            # a recipe in Python may have them
            hints[name] = Annotated[hints[name], tyro.conf.Fixed, tyro.conf.Suppress]
    fields = [(name, hints[name], value) for name, value in values.items() if name not in from_task]
    return _make("ModelOptions", _documented(shape), fields)


def _model_fields(options: Any) -> dict[str, Any]:
    """Return the fields of a configuration that parsed options of a model describe."""
    values = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
    values["mixer_args"] = dataclasses.asdict(options.mixer_args)
    return values | {"mixer": _one_or_all(options.mixer)}


def _learner_fields(config: LearnerConfig | None) -> list[tuple[str, Any, Any]]:
    """Return the options of the learner, with the values of a configuration as defaults."""
    options = TrainLearnerOptions()
    if config is not None:
        words = tuple(f"{name}={value!r}" for name, value in config.learner_args.items())
        options = TrainLearnerOptions(config.learner, words, config.chunk, config.update)
    hints = typing.get_type_hints(TrainLearnerOptions)
    return [(name, hints[name], value) for name, value in vars(options).items()]


def _learner_of(options: Any) -> LearnerConfig | None:
    """Return the learner that parsed options describe."""
    given = {field.name: getattr(options, field.name) for field in dataclasses.fields(TrainLearnerOptions)}
    if given["learner"] is None:
        others = [name for name, value in vars(TrainLearnerOptions()).items() if given[name] != value]
        if others:
            raise ConfigError(
                f"--{others[0].replace('_', '-')} is an option of learners; pass --learner NAME too, such as "
                "--learner rtrl."
            )
        return None
    return LearnerConfig(**given | {"learner_args": named_arguments("learner_args", given["learner_args"])})


def _documented(shape: type[StackConfig]) -> str:
    """Return the docstring of a model's configuration, with the arguments of the classes that it extends."""
    parents = [parent for parent in shape.__mro__[1:] if issubclass(parent, StackConfig)]
    return functools.reduce(_with_arguments, parents, inspect.getdoc(shape) or "")


def _with_arguments(doc: str, of: type[Any]) -> str:
    """Return a docstring with the arguments that another class describes after its own."""
    own, arguments = inspect.cleandoc(doc), inspect.getdoc(of) or ""
    arguments = arguments[arguments.index("Args:\n") :].split("\n\n")[0]
    return own.replace("Args:", arguments, 1)


def most_used(options: type[Any]) -> type[Any]:
    """Return a dataclass of the most common options of `options_type`, whose help fits on a screen."""
    fields: list[tuple[str, Any, Any]] = []
    for name, value in vars(options()).items():
        if not dataclasses.is_dataclass(value) and name not in LESS_USED:
            fields.append((name, typing.get_type_hints(options)[name], value))
        elif name in MOST_USED:
            hints = typing.get_type_hints(type(value))
            if "mixer" in hints:
                # a hundred names do not fit on a screen
                hints["mixer"] = Annotated[hints["mixer"], tyro.conf.arg(metavar="NAME [NAME ...]")]
            chosen = [(f, hints[f], getattr(value, f)) for f in MOST_USED[name] if hasattr(value, f)]
            doc = inspect.getdoc(type(value)) or ""
            # keep only the summary line, because tyro shows everything above the arguments
            kind = _make(name.capitalize(), f"{doc.splitlines()[0]}\n\n{doc[doc.find('Args:') :]}", chosen)
            fields.append((name, kind, kind()))
    return _make("Options", options.__doc__, fields)


def config_of(options: Any, name: str, section: str) -> TrainConfig:
    """Return the configuration of a recipe that parsed options describe; `section` is the task's."""
    task = getattr(options, section)
    model = _model_fields(options.model) | values_from_task(task)
    if isinstance(task, SourcedTask):
        of_encoder = _model_fields(options.model.encoder) | {"vocab_size": task.source_vocab_size or 1}
        model["encoder"] = EncoderConfig(**of_encoder)
    learner = _learner_of(options)
    return TrainConfig(name, task, model_type(task)(**model), options.optim, options.loop, learner)


def _one_or_all(pattern: Sequence[str]) -> str | tuple[str, ...]:
    # the arguments of a single mixer are not nested under its name
    return pattern[0] if len(pattern) == 1 else tuple(pattern)


def _mixer_options(mixer: str | tuple[str, ...], arguments: Mapping[str, Any]) -> type[Any]:
    """Return a dataclass of a mixer's arguments; for a pattern, a dataclass with a field for each mixer."""
    if isinstance(mixer, str):
        parameters = mixer_parameters(mixer)
        fields = [(name, parameters[name].annotation, value) for name, value in arguments.items()]
        return _make("MixerOptions", mixers.get(mixer).__doc__, fields)
    inner = {name: _mixer_options(name, arguments[name]) for name in dict.fromkeys(mixer)}
    return _make("PatternOptions", None, [(name, kind, kind()) for name, kind in inner.items()])


def _make(name: str, doc: str | None, fields: Sequence[tuple[str, Any, Any]]) -> type[Any]:
    # a factory, because dataclasses refuse unhashable defaults
    described = [
        (field, kind, dataclasses.field(default_factory=functools.partial(lambda kept: kept, value)))
        for field, kind, value in fields
    ]
    made = dataclasses.make_dataclass(name, described, frozen=True)
    # tyro reads the help of each option from the docstring
    made.__doc__ = doc
    return made
