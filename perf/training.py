"""`python -m perf training`: tokens per second of language models in the training step of `linrec train`."""

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from rich.console import Console
from torch import Tensor, nn

from linrec.lab.train import LoopConfig, OptimConfig, get_recipe
from linrec.lab.train.config import complete_mixer_args
from linrec.lab.train.fabric import (
    Fabric,
    deterministic,
    make_fabric,
    matmul_precision,
    seed_all,
    uses_compile,
)
from linrec.lab.train.optim import make_optimizers, set_learning_rate
from linrec.lab.train.step import Objective, train_step
from linrec.mixers.attention import Attention
from linrec.models import LanguageModel, ModelConfig, SequenceClassifier, preset
from linrec.models.compilation import EAGER_STEPS, CapturedStep, compiling
from linrec.models.config import spelled
from perf.encoders import MIXER_ARGUMENTS
from perf.engine import Options, RefusedError, Report, attempt, bench_of, check_profile, large_product, say
from perf.kernels import profile_of
from perf.sizes import FLA_PACKAGES, MODELS, QUICK, Model, Size, fla_model, sized
from perf.table import gib, show_profiles, show_reasons, show_table
from perf.timing import Bench, UnsuitedError

M = TypeVar("M", LanguageModel, SequenceClassifier)

FLOPS = (
    "per token 6 for each parameter but those of an embedding that is only looked up, and with softmax "
    "attention 6 for each step of the sequence, layer and channel of its heads; recurrences count nothing"
)
FLA = "flash-linear-attention, its fused norms, SwiGLU and loss, in a plain loop: autocast, AdamW, clipping"
# HGRN, table 16
OPTIM = get_recipe("wikitext103-hgrn").optim


@dataclass(frozen=True)
class TrainingOptions(Options):
    """Tokens per second of training language models, on random tokens: the step that `linrec train` makes.

    With `--models`, measurements are added to those of earlier calls, and a picture is drawn of all.

    Args:
        presets: models, by the names of `linrec.models.preset_names()`.
        mixers: mixers to put into each of them; by default the preset's own.
        models: in place of presets, models of one size that differ in their mixers alone, by the names of
            `perf.sizes.MODELS`; "all" takes every model.
        size: size of `models`, by the names of `perf.sizes.SIZES`.
        peers: also measure flash-linear-attention's model of the same size, where there is one.
        batch: sequences of a step.
        length: tokens of a sequence.
        document: tokens of a document, for packed documents with a reset between them; by default every
            sequence is one document.
        precision: bfloat16 autocast over float32 parameters, or float32 throughout.
        matmul_precision: torch's setting for float32 matrix products; "high", as in the recipes for text,
            allows TensorFloat32.
        deterministic: prefer algorithms that give the same bits each time; the recipes for text do not.
        accumulate: pieces that each batch is taken in.
        recompute: compute each block again in the backward pass.
        compile: compile the model, and on CUDA replay each step as one graph; "auto" does so on CUDA alone.
        profile: tell where the device's time goes; CUDA alone.
        out: folder for DEVICE.json.
    """

    presets: tuple[str, ...] = ("wikitext103-hgrn",)
    mixers: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    size: str = "374M"
    peers: bool = False
    batch: int = 128
    length: int = 512
    document: int | None = None
    precision: Literal["32-true", "bf16-mixed"] = "bf16-mixed"
    matmul_precision: Literal["highest", "high"] = "high"
    deterministic: bool = False
    accumulate: int = 1
    recompute: bool = False
    compile: Literal["auto", "on", "off"] = "auto"
    profile: bool = False
    out: Path = Path("results/training")


@dataclass(frozen=True)
class Job:
    """A model to train: names of preset or size and of mixer, and the sized model of `--models`."""

    preset: str
    mixer: str
    config: ModelConfig
    sized: tuple[Model, Size] | None = None


@dataclass(frozen=True)
class Protocol:
    """How a training step of sequences of `length` tokens is measured.

    Every `document` tokens start a document by a reset; None resets nothing.
    """

    loop: LoopConfig
    length: int
    bench: Bench
    document: int | None = None
    profile: bool = False

    def tokens(self, vocab_size: int) -> tuple[Tensor, Tensor]:
        """Return random inputs and targets."""
        shape = self.loop.batch_size, self.length + 1
        tokens = torch.randint(vocab_size, shape, device=self.bench.device)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def timed(self, call: Callable[[], Any], model: nn.Module) -> dict[str, Any]:
        """Return the speed and the memory of a step of the model."""
        found = self.bench.steps(call, warm=EAGER_STEPS)
        return {
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "first_seconds": found.first_seconds,
            "tokens_per_second": found.rate.tokens(self.loop.batch_size * self.length),
            "steps_per_window": found.rate.calls,
            "step_ms": 1e3 / found.rate.median,
            "peak_bytes": found.peak_bytes,
        }

    def timed_forward(self, call: Callable[[], Any], model: nn.Module) -> dict[str, Any]:
        """Return the speed and the memory of a forward pass, without gradients."""
        return attempt(lambda: self.timed(torch.no_grad()(call), model))


def training(options: TrainingOptions, command: str) -> int:
    """Measure the models, write, draw and print the results; return the exit status."""
    jobs, loop, bench = _jobs(options), _loop(options), bench_of(options)
    length = 16 if options.quick else options.length
    protocol = Protocol(loop, length, bench, options.document, options.profile)
    report = Report(
        options,
        command,
        f"-{options.size}-{loop.batch_size}x{length}" if options.models else "",
        FLA_PACKAGES if options.peers else (),
        protocol={
            "length": length,
            "document": options.document,
            "loop": dataclasses.asdict(loop),
            "optim": dataclasses.asdict(OPTIM),
            "flops": FLOPS,
            "fla": FLA,
        },
        matmul=_matmul(options, bench),
        models=[],
    )
    results = report.results
    known = _known(report) if options.models else {}
    source = {name: results[name] for name in ("command", "commit", "dirty")}
    source["windows"] = dataclasses.asdict(bench.windows)
    for job in jobs:
        say(f"{job.preset}, {job.mixer}")
        entry = {"preset": job.preset, "mixer": job.mixer, **source, "config": dataclasses.asdict(job.config)}
        entry |= measure_training(job.config, protocol)
        if "missing" not in entry:
            rate = entry["tokens_per_second"]["median"] * entry["flops_per_token"]
            entry |= {"flops_per_second": rate, "share_of_matmul": rate / results["matmul"]["rate"]}
        # a peer stays when its model is measured again without it
        peer = known.get(job.mixer, {}).get("fla")
        if options.peers and job.sized is not None:
            say(f"{job.preset}, {job.mixer}, flash-linear-attention")
            peer = source | measure_fla(*job.sized, protocol)
        if peer is not None:
            entry["fla"] = peer
            if "forward" in peer:
                entry["forward"] = measure_forward(job.config, protocol)
        if options.models:
            known[job.mixer] = entry
            results["models"] = [known[mixer] for mixer in MODELS if mixer in known]
            report.write()
        else:
            report.add("models", entry)
    if options.models:
        print(f"\nwrote {draw(results, report.path.with_suffix('.png'))}")
    return report.finish(show)


def _known(report: Report) -> dict[str, dict[str, Any]]:
    """Return the entries of earlier calls by model; refuse another device or protocol."""
    if not report.path.exists():
        return {}
    earlier = json.loads(report.path.read_text())
    for name in ("device", "protocol"):
        if earlier[name] != json.loads(json.dumps(report.results[name])):
            raise RefusedError(
                f"{report.path} holds measurements with another {name}; remove the file, or choose another "
                "--out."
            )
    return {entry["mixer"]: entry for entry in earlier["models"]}


def _jobs(options: TrainingOptions) -> list[Job]:
    check_profile(options.profile, options.device)
    if options.models and options.mixers:
        raise RefusedError("--mixers is for presets; with --models, name the mixers there.")
    if options.peers and not options.models:
        raise RefusedError("--peers compares models of one size; name them by --models.")
    try:
        if options.models:
            models, size = sized(options.models, options.size)
            size = QUICK if options.quick else size
            return [
                Job(options.size, name, model.config(size), (model, size)) for name, model in models.items()
            ]
        configs = [
            (name, model_config(name, mixer, quick=options.quick))
            for name in options.presets
            for mixer in options.mixers or (None,)
        ]
    except ValueError as error:
        raise RefusedError(error) from error
    return [Job(name, spelled(config.mixer_pattern), config) for name, config in configs]


def _loop(options: TrainingOptions) -> LoopConfig:
    for name in ("length", "document"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise RefusedError(f"--{name} must be at least 1; got {value}.")
    try:
        return LoopConfig(
            batch_size=2 if options.quick else options.batch,
            accumulate=options.accumulate,
            recompute=options.recompute,
            precision=options.precision,
            matmul_precision=options.matmul_precision,
            deterministic=options.deterministic,
            compile=options.compile,
            device=options.device,
        )
    except ValueError as error:
        raise RefusedError(error) from error


def _matmul(options: TrainingOptions, bench: Bench) -> dict[str, Any]:
    """Return the rate of a large product in the precision of most of the model's products."""
    dtype = torch.bfloat16 if options.precision == "bf16-mixed" else torch.float32
    with matmul_precision(options.matmul_precision):
        size, rate = large_product(bench, dtype, quick=options.quick)
    return {"size": size, "dtype": str(dtype), "rate": rate}


def model_config(name: str, mixer: str | None, *, quick: bool = False) -> ModelConfig:
    """Return a preset, with another mixer where one is named; `quick` makes it tiny."""
    config = preset(name)
    if mixer is not None and mixer != config.mixer:
        config = dataclasses.replace(config, mixer=mixer, mixer_args=dict(MIXER_ARGUMENTS.get(mixer, {})))
    if quick:
        config = dataclasses.replace(
            config,
            vocab_size=32,
            n_outputs=None,
            d_model=16,
            n_layers=max(len(config.mixer_pattern), len(config.channel_mixing_pattern)),
            d_channel_mixing=32,
        )
    return dataclasses.replace(config, mixer_args=complete_mixer_args(config.mixer, config.mixer_args))


def flops_per_token(model: LanguageModel, length: int) -> int:
    """Return the floating-point operations of training per token.

    Matrix products count once forward and twice backward, also where they are computed again: 6 operations
    for each parameter in a product. Causal scores and values of softmax attention count 2 * 2 * (length / 2)
    for each channel of a head, three times.

    Source:
        Kaplan and others, Scaling Laws for Neural Language Models (2020), section 2.1, which counts causal
        scores in full.
    """
    config = model.config
    weights = sum(parameter.numel() for parameter in model.parameters())
    if not config.tie_embeddings:
        weights -= model.embedding.weight.numel()
    # the state of softmax attention is a key and a value for each step
    scores = sum(mixer.state_size for mixer in model.mixers if isinstance(mixer, Attention)) // 2
    return 6 * weights + 6 * length * scores


def number_of_parameters(model: nn.Module) -> int:
    """Return the number of a model's parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


@contextmanager
def as_training(loop: LoopConfig) -> Iterator[None]:
    """Compute within the context with the loop's precision and determinism, and compile as training does."""
    with deterministic(loop.deterministic), matmul_precision(loop.matmul_precision), compiling():
        yield


def make_step(make: Callable[[], M], optim: OptimConfig, loop: LoopConfig) -> tuple[M, Callable[..., None]]:
    """Return the model, and a step over (inputs, targets, reset) that trains it as `linrec train` does."""
    fabric, model, objective = _make_objective(make, loop)
    optimizers = make_optimizers(model, optim)
    steppers: Any = [fabric.setup_optimizers(optimizer) for optimizer in optimizers]
    step: Callable[..., None] = functools.partial(
        train_step,
        fabric=fabric,
        objective=objective,
        optimizers=steppers,
        window=torch.zeros(4, device=fabric.device),
        accumulate=loop.accumulate,
        clip_norm=optim.clip_norm,
    )
    if uses_compile(loop, fabric.device) and fabric.device.type == "cuda":
        step = CapturedStep(step)

    def scheduled(inputs: Tensor, targets: Tensor, reset: Tensor | None = None) -> None:
        set_learning_rate(optimizers, 1.0)
        step(inputs, targets, reset)

    return model, scheduled


def _make_objective(make: Callable[[], M], loop: LoopConfig) -> tuple[Fabric, M, Any]:
    fabric = make_fabric(loop)
    seed_all(loop.seed)
    with fabric.device:
        model = make()
    if isinstance(model, LanguageModel):
        model.recompute = loop.recompute
    objective: Any = Objective(model)
    if uses_compile(loop, fabric.device):
        torch.compiler.reset()
        objective.compile()
    return fabric, model, fabric.setup_module(objective)


def measure_training(config: ModelConfig, protocol: Protocol) -> dict[str, Any]:
    """Measure training of a language model on random tokens; return its numbers, or "missing"."""
    loop, device = protocol.loop, protocol.bench.device
    protocol.bench.release()

    def measured() -> dict[str, Any]:
        model, step = make_step(functools.partial(LanguageModel, config), OPTIM, loop)
        reset = None
        if protocol.document is not None:
            starts = torch.arange(protocol.length, device=device) % protocol.document == 0
            reset = starts.repeat(loop.batch_size, 1)
        call = functools.partial(step, *protocol.tokens(config.vocab_size), reset)
        found = protocol.timed(call, model)
        found["flops_per_token"] = flops_per_token(model, protocol.length)
        if protocol.profile:
            found["profile"] = profile_of(call, device)
        return found

    with deterministic(loop.deterministic), matmul_precision(loop.matmul_precision), compiling():
        return attempt(measured)


def measure_forward(config: ModelConfig, protocol: Protocol) -> dict[str, Any]:
    """Measure the forward pass and the loss, without gradients; see `measure_training`."""
    loop = protocol.loop
    protocol.bench.release()
    with deterministic(loop.deterministic), matmul_precision(loop.matmul_precision), compiling():
        _, model, objective = _make_objective(functools.partial(LanguageModel, config), loop)
        call = functools.partial(objective, *protocol.tokens(config.vocab_size))
        return protocol.timed_forward(call, model)


def measure_fla(model: Model, size: Size, protocol: Protocol) -> dict[str, Any]:
    """Measure flash-linear-attention's model; "forward" has the forward pass if it refuses to train."""
    protocol.bench.release()
    made: nn.Module | None = None

    def trained() -> dict[str, Any]:
        nonlocal made
        with matmul_precision(protocol.loop.matmul_precision), protocol.bench.device:
            whole = fla_model(model, size)
        step = make_fla_step(whole, OPTIM, protocol.loop)
        made = whole
        return protocol.timed(functools.partial(step, *protocol.tokens(size.vocab_size)), whole)

    found = attempt(trained)
    if "missing" in found and made is not None:
        made.zero_grad()
        forward = functools.partial(fla_loss, made, *protocol.tokens(size.vocab_size))
        found["forward"] = protocol.timed_forward(forward, made)
    return found


def make_fla_step(model: nn.Module, optim: OptimConfig, loop: LoopConfig) -> Callable[..., None]:
    """Return a step over (inputs, targets, reset) that trains a model of flash-linear-attention."""
    if loop.accumulate > 1 or loop.recompute or loop.precision != "bf16-mixed":
        raise UnsuitedError("is measured in bfloat16 autocast, without --accumulate and --recompute")
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay, fused=True
    )

    def step(inputs: Tensor, targets: Tensor, reset: Tensor | None = None) -> None:
        if reset is not None:
            raise UnsuitedError("is measured without --document")
        fla_loss(model, inputs, targets).backward()
        if optim.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), optim.clip_norm)
        optimizer.step()
        optimizer.zero_grad()

    return step


def fla_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the loss; the model shifts the labels by a step itself, and does not train the last target."""
    with torch.autocast(inputs.device.type, torch.bfloat16):
        loss: Tensor = model(input_ids=inputs, labels=inputs).loss
    return loss


def show(console: Console, results: dict[str, Any]) -> None:
    """Print speeds, then profiles, then the reasons of missing measurements."""
    loop, matmul = results["protocol"]["loop"], results["matmul"]
    measured = [model for model in results["models"] if "missing" not in model]
    show_table(
        console,
        f"{loop['batch_size']} x {results['protocol']['length']} tokens a step, {loop['precision']}; "
        f"% of {matmul['rate'] / 1e12:.3g} TFLOP/s, those of a {matmul['dtype'].removeprefix('torch.')} "
        f"product of {matmul['size']} x {matmul['size']}",
        ("preset", "mixer", "params", "tokens/s", "lowest", "ms/step", "GiB", "%"),
        [
            [
                model["preset"],
                model["mixer"],
                f"{model['parameters'] / 1e6:.1f}M",
                f"{model['tokens_per_second']['median']:,.0f}",
                f"{model['tokens_per_second']['lowest']:,.0f}",
                f"{model['step_ms']:.3g}",
                gib(model["peak_bytes"], ".3g"),
                f"{100 * model['share_of_matmul']:.3g}",
            ]
            for model in measured
        ],
        left=2,
        wrap=("preset", "mixer"),
    )
    if any("fla" in model for model in measured):
        pairs = [(model, model["fla"]) for model in measured if "fla" in model]
        _show_beside(console, "flash-linear-attention beside it; x: linrec's tokens/s over its", pairs)
    refused = [model for model in measured if "forward" in model]
    if refused:
        pairs = [(model | model["forward"], model["fla"]["forward"]) for model in refused]
        _show_beside(console, "forward alone, where it refuses to train", pairs)
    show_profiles(console, measured, "preset", "mixer")
    show_reasons(console, results["models"], "preset", "mixer")


def _show_beside(console: Console, title: str, pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    lines = []
    for model, fla in pairs:
        if "tokens_per_second" not in fla:
            continue
        mine, other = (found["tokens_per_second"]["median"] for found in (model, fla))
        peaks = [found["peak_bytes"] for found in (model, fla)]
        lines.append(
            [
                model["mixer"],
                f"{fla['parameters'] / 1e6:.1f}M",
                f"{other:,.0f}",
                gib(fla["peak_bytes"], ".3g"),
                f"{fla['first_seconds']:.0f}",
                f"{model['first_seconds']:.0f}",
                f"{mine / other:.2f}",
                "" if None in peaks else f"{peaks[0] / peaks[1]:.2f}",
            ]
        )
    headings = ("model", "params", "tokens/s", "GiB", "first s", "linrec's", "x", "GiB x")
    show_table(console, title, headings, lines, wrap=("model",))


def draw(results: dict[str, Any], path: Path) -> Path:
    """Draw the tokens per second of models of one size, fastest first, beside flash-linear-attention's."""
    # imported here: matplotlib is needed for the picture alone
    from matplotlib.lines import Line2D

    from linrec.lab.report import style

    measured = [model for model in results["models"] if "missing" not in model]
    measured.sort(key=lambda model: model["tokens_per_second"]["median"])
    figure = style.make_figure(1.2 + 0.34 * max(3, len(measured)))
    axes = figure.subplots()
    handles: list[Line2D] = []
    bars = {
        "linrec": [(place, model) for place, model in enumerate(measured)],
        "flash-linear-attention": [
            (place, model["fla"])
            for place, model in enumerate(measured)
            if "tokens_per_second" in model.get("fla", {})
        ],
    }
    paired = {place for place, _ in bars["flash-linear-attention"]}
    for number, (name, found) in enumerate(bars.items()):
        for place, model in found:
            rate = model["tokens_per_second"]["median"] / 1000
            middle = place + (0.19, -0.19)[number] if place in paired else place
            axes.barh(middle, rate, 0.36, color=style.colour(number), zorder=3)
            memory = "" if model["peak_bytes"] is None else f", {gib(model['peak_bytes'], '.1f')} GiB"
            text = axes.annotate(
                f"{rate:.0f}{memory}",
                (rate, middle),
                (4, 0),
                textcoords="offset points",
                va="center",
                fontsize=style.LETTERS - 3,
            )
            # over the lines of the grid
            text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1})
            # beside a bar that is long by far, the number stays in the room at the right
            text.set_in_layout(False)
        # no legend for a side without bars
        if found or number == 0:
            handles.append(Line2D([], [], color=style.colour(number), linewidth=6, label=name))
    for model in measured:
        if model["mixer"] == "transformer":
            rate = model["tokens_per_second"]["median"] / 1000
            handles.append(axes.axvline(rate, color="black", linewidth=0.8, label="linrec's transformer"))
    axes.set_yticks(range(len(measured)), [model["mixer"] for model in measured])
    loop, length = results["protocol"]["loop"], results["protocol"]["length"]
    style.finish_axes(axes, x=f"thousand tokens/s, {loop['batch_size']} x {length:,} tokens a step")
    # room for the numbers beside the bars
    axes.set_xlim(0, 1.25 * axes.get_xlim()[1])
    style.add_legend(figure, handles)
    return style.save(figure, path)
