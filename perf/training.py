"""`python -m perf training`: tokens per second of language models in the training step of `linrec train`."""

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
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
from perf.command import Command, RefusedError, Report, check_profile, say
from perf.engine import Record, attempt
from perf.kernels import profile_of
from perf.sizes import FLA_PACKAGES, MIXER_ARGUMENTS, MODELS, QUICK, Model, Size, fla_model, sized
from perf.table import Part, Table, profiles, reasons
from perf.timing import Bench, UnsuitedError, share

M = TypeVar("M", LanguageModel, SequenceClassifier)

FLOPS = (
    "per token 6 for each parameter but those of an embedding that is only looked up, and with softmax "
    "attention 6 for each step of the sequence, layer and channel of its heads; recurrences count nothing"
)
FLA = "flash-linear-attention, its fused norms, SwiGLU and loss, in a plain loop: autocast, AdamW, clipping"
# HGRN, table 16
OPTIM = get_recipe("wikitext103-hgrn").optim


@dataclass(frozen=True)
class Job:
    """A model to train: names of preset or size and of mixer, and the sized model of `--models`."""

    preset: str
    mixer: str
    config: ModelConfig
    sized: tuple[Model, Size] | None = None


@dataclass(frozen=True)
class Training(Command):
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

    packages = FLA_PACKAGES
    key = "models"

    @property
    def suffix(self) -> str:
        return f"-{self.size}-{self.loop.batch_size}x{self.steps}" if self.models else ""

    @property
    def steps(self) -> int:
        return 16 if self.quick else self.length

    @property
    def loop(self) -> LoopConfig:
        return LoopConfig(
            batch_size=2 if self.quick else self.batch,
            accumulate=self.accumulate,
            recompute=self.recompute,
            precision=self.precision,
            matmul_precision=self.matmul_precision,
            deterministic=self.deterministic,
            compile=self.compile,
            device=self.device,
        )

    def chosen(self) -> Mapping[str, Job]:
        check_profile(self)
        if self.models and self.mixers:
            raise RefusedError("--mixers is for presets; with --models, name the mixers there.")
        if self.peers and not self.models:
            raise RefusedError("--peers compares models of one size; name them by --models.")
        for name in ("length", "document"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise RefusedError(f"--{name} must be at least 1; got {value}.")
        # refuses options that do not fit together
        _ = self.loop
        if self.models:
            models, size = sized(self.models, self.size)
            size = QUICK if self.quick else size
            jobs = [Job(self.size, name, model.config(size), (model, size)) for name, model in models.items()]
        else:
            pairs = itertools.product(self.presets, self.mixers or (None,))
            configs = [(name, model_config(name, mixer, quick=self.quick)) for name, mixer in pairs]
            jobs = [Job(name, spelled(config.mixer_pattern), config) for name, config in configs]
        return {f"{job.preset}, {job.mixer}": job for job in jobs}

    def about(self, bench: Bench) -> tuple[Bench, Record]:
        # the precision of most of the model's products
        dtype = torch.bfloat16 if self.precision == "bf16-mixed" else torch.float32
        with matmul_precision(self.matmul_precision):
            bench, product = bench.with_product(dtype, quick=self.quick)
        protocol = {
            "length": self.steps,
            "document": self.document,
            "loop": dataclasses.asdict(self.loop),
            "optim": dataclasses.asdict(OPTIM),
            "flops": FLOPS,
            "fla": FLA,
        }
        return bench, {"protocol": protocol, "matmul": product}

    def run(self, rows: Mapping[str, Job], line: str) -> int:
        """Measure the models; those of one size replace their records of earlier calls."""
        bench, fields = self.about(self.bench())
        report = Report(self, line, **fields)
        records = report.results["models"]
        records += earlier_records(report) if self.models else ()
        source = {name: report.results[name] for name in ("command", "commit", "dirty")}
        source["windows"] = bench.windows._asdict()

        def measure(job: Job) -> Record:
            earlier = [record for record in records if self.models and record["mixer"] == job.mixer]
            entry = {"preset": job.preset, "mixer": job.mixer, **source}
            entry |= {"config": dataclasses.asdict(job.config), **self.trained(bench, job.config)}
            # a peer stays when its model is measured again without it
            peer = earlier[0].get("fla") if earlier else None
            if self.peers and job.sized is not None:
                say(f"{job.preset}, {job.mixer}, flash-linear-attention")
                peer = source | self.trained_fla(bench, *job.sized)
            if peer is not None:
                entry["fla"] = peer
                if "forward" in peer:
                    entry["forward"] = self.forward(bench, job.config)
            records[:] = [record for record in records if record not in earlier]
            return entry

        report.measure(rows, measure)
        if self.models:
            records.sort(key=lambda record: [*MODELS].index(record["mixer"]))
            report.write()
        return report.finish()

    def trained(self, bench: Bench, config: ModelConfig) -> Record:
        """Measure training of a language model on random tokens; return its numbers, or "missing"."""
        bench.release()

        def measured() -> Record:
            model, step = make_step(partial(LanguageModel, config), OPTIM, self.loop)
            call = partial(step, *self.tokens(bench, config.vocab_size), self.reset(bench))
            found = self.timed(bench, call, model)
            flops = flops_per_token(model, self.steps)
            rate = found["tokens_per_second"]["median"] * flops
            if self.profile:
                found["profile"] = profile_of(call, bench.device)
            of_product = share(rate, bench.product, 1e3)
            return found | {"flops_per_token": flops, "flops_per_second": rate, "share_of_matmul": of_product}

        with as_training(self.loop):
            return attempt(measured)

    def forward(self, bench: Bench, config: ModelConfig) -> Record:
        """Measure the forward pass and the loss, without gradients; see `trained`."""
        bench.release()
        with as_training(self.loop):
            _, model, objective = make_objective(partial(LanguageModel, config), self.loop)
            call = torch.no_grad()(partial(objective, *self.tokens(bench, config.vocab_size)))
            return attempt(partial(self.timed, bench, call, model))

    def trained_fla(self, bench: Bench, model: Model, size: Size) -> Record:
        """Measure flash-linear-attention's model; "forward" has the forward pass if it refuses to train."""
        bench.release()
        made: nn.Module | None = None

        def measured() -> Record:
            nonlocal made
            if self.accumulate > 1 or self.recompute or self.precision != "bf16-mixed":
                raise UnsuitedError("is measured in bfloat16 autocast, without --accumulate and --recompute")
            if self.document is not None:
                raise UnsuitedError("is measured without --document")
            with matmul_precision(self.matmul_precision), bench.device:
                whole = fla_model(model, size)
            step = make_fla_step(whole, OPTIM)
            made = whole
            return self.timed(bench, partial(step, *self.tokens(bench, size.vocab_size)), whole)

        found = attempt(measured)
        if "missing" in found and made is not None:
            made.zero_grad()
            call = torch.no_grad()(partial(fla_loss, made, *self.tokens(bench, size.vocab_size)))
            found["forward"] = attempt(partial(self.timed, bench, call, made))
        return found

    def tokens(self, bench: Bench, vocab_size: int) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(vocab_size, (self.loop.batch_size, self.steps + 1), device=bench.device)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def reset(self, bench: Bench) -> Tensor | None:
        """Return where documents start; None with one document in each sequence."""
        if self.document is None:
            return None
        starts = torch.arange(self.steps, device=bench.device) % self.document == 0
        return starts.repeat(self.loop.batch_size, 1)

    def timed(self, bench: Bench, call: Callable[[], Any], model: nn.Module) -> Record:
        """Return the speed and the memory of a step of the model."""
        found = bench.steps(call, warm=EAGER_STEPS)
        return {
            "parameters": number_of_parameters(model),
            "first_seconds": found.first_seconds,
            "tokens_per_second": found.rate.tokens(self.loop.batch_size * self.steps),
            "steps_per_window": found.rate.calls,
            "step_ms": 1e3 / found.rate.median,
            "peak_bytes": found.peak_bytes,
        }

    @staticmethod
    def show(results: Record) -> Iterator[Part]:
        loop, matmul = results["protocol"]["loop"], results["matmul"]
        measured = [model for model in results["models"] if "missing" not in model]
        yield Table(
            f"{loop['batch_size']} x {results['protocol']['length']} tokens a step, {loop['precision']}; "
            f"% of {matmul['rate'] / 1e12:.3g} TFLOP/s, those of a {matmul['dtype'].removeprefix('torch.')} "
            f"product of {matmul['size']} x {matmul['size']}",
            "preset {preset} | mixer {mixer} | params {parameters:.1f M}M | "
            "tokens/s {tokens_per_second[median]:,.0f} | lowest {tokens_per_second[lowest]:,.0f} | "
            "ms/step {step_ms:.3g} | GiB {peak_bytes:.3g GiB} | % {share_of_matmul:.3g %}",
            measured,
            left=2,
            wrap=("preset", "mixer"),
        )
        pairs = [(model, model["fla"]) for model in measured if "fla" in model]
        yield beside("flash-linear-attention beside it; x: linrec's tokens/s over its", pairs)
        refused = [model for model in measured if "forward" in model]
        pairs = [(model | model["forward"], model["fla"]["forward"]) for model in refused]
        yield beside("forward alone, where it refuses to train", pairs)
        yield from profiles(measured, "preset", "mixer")
        yield from reasons(results["models"], "preset", "mixer")

    def draw(self, results: Record, path: Path) -> Path | None:
        return draw_models(results, path) if self.models else None


def earlier_records(report: Report) -> list[Record]:
    """Return the records of earlier calls; refuse another device or protocol."""
    if not report.path.exists():
        return []
    earlier = json.loads(report.path.read_text())
    for name in ("device", "protocol"):
        if earlier[name] != json.loads(json.dumps(report.results[name])):
            raise RefusedError(
                f"{report.path} holds measurements with another {name}; remove the file, or choose another "
                "--out."
            )
    records: list[Record] = earlier["models"]
    return records


def beside(title: str, pairs: Sequence[tuple[Record, Record]]) -> Table:
    records = []
    for model, fla in pairs:
        if "tokens_per_second" not in fla:
            continue
        peaks = [found["peak_bytes"] for found in (model, fla)]
        ratio = model["tokens_per_second"]["median"] / fla["tokens_per_second"]["median"]
        of_peaks = None if None in peaks else peaks[0] / peaks[1]
        records.append({"linrec": model, "fla": fla, "ratio": ratio, "of_peaks": of_peaks})
    return Table(
        title,
        "model {linrec[mixer]} | params {fla[parameters]:.1f M}M | "
        "tokens/s {fla[tokens_per_second][median]:,.0f} | GiB {fla[peak_bytes]:.3g GiB} | "
        "first s {fla[first_seconds]:.0f} | linrec's {linrec[first_seconds]:.0f} | x {ratio:.2f} | "
        "GiB x {of_peaks:.2f}",
        records,
        wrap=("model",),
    )


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
    return sum(parameter.numel() for parameter in model.parameters())


@contextmanager
def as_training(loop: LoopConfig) -> Iterator[None]:
    """Compute within the context with the loop's precision and determinism, and compile as training does."""
    with deterministic(loop.deterministic), matmul_precision(loop.matmul_precision), compiling():
        yield


def make_step(make: Callable[[], M], optim: OptimConfig, loop: LoopConfig) -> tuple[M, Callable[..., None]]:
    """Return the model, and a step over (inputs, targets, reset) that trains it as `linrec train` does."""
    fabric, model, objective = make_objective(make, loop)
    optimizers = make_optimizers(model, optim)
    steppers: Any = [fabric.setup_optimizers(optimizer) for optimizer in optimizers]
    step: Callable[..., None] = partial(
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


def make_objective(make: Callable[[], M], loop: LoopConfig) -> tuple[Fabric, M, Any]:
    """Return the model, and the model with its loss as Fabric runs it, compiled if the loop compiles."""
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


def make_fla_step(model: nn.Module, optim: OptimConfig) -> Callable[..., None]:
    """Return a step over (inputs, targets) that trains a model of flash-linear-attention."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay, fused=True
    )

    def step(inputs: Tensor, targets: Tensor) -> None:
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


def draw_models(results: Record, path: Path) -> Path:
    """Draw the tokens per second of models of one size, fastest first, beside flash-linear-attention's."""
    # imported here: matplotlib is needed for the picture alone
    from linrec.lab import style

    measured = [model for model in results["models"] if "missing" not in model]
    measured.sort(key=lambda model: model["tokens_per_second"]["median"])
    figure = style.make_figure(1.2 + 0.34 * max(3, len(measured)))
    axes = figure.subplots()
    paired = ["tokens_per_second" in model.get("fla", {}) for model in measured]
    sides = {"linrec": dict(enumerate(measured))}
    if any(paired):
        sides["flash-linear-attention"] = {n: measured[n]["fla"] for n, pair in enumerate(paired) if pair}
    handles: list[Any] = []
    for number, (name, found) in enumerate(sides.items()):
        places = [place + (0.19, -0.19)[number] if paired[place] else place for place in found]
        rates = [model["tokens_per_second"]["median"] / 1000 for model in found.values()]
        peaks = [model["peak_bytes"] for model in found.values()]
        memory = ["" if peak is None else f", {peak / 2**30:.1f} GiB" for peak in peaks]
        bars = axes.barh(places, rates, 0.36, color=style.colour(number), label=name, zorder=3)
        labels = [f"{rate:.0f}{more}" for rate, more in zip(rates, memory, strict=True)]
        for text in axes.bar_label(bars, labels, padding=4, fontsize=style.LETTERS - 3):
            # over the lines of the grid
            text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1})
            # beside a bar that is long by far, the number stays in the room at the right
            text.set_in_layout(False)
        handles.append(bars)
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
