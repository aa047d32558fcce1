"""`python -m perf decoding`: tokens per second of generation, and the speed that the memory allows."""

import dataclasses
import itertools
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from linrec.generation import stream
from linrec.generation.precision import with_weights_cast
from linrec.generation.prefill import prefill
from linrec.literals import Precision
from linrec.models import LanguageModel, ModelConfig
from linrec.models.compilation import EAGER_STEPS, with_parts_compiled
from linrec.ops.attention import AttentionCache
from linrec.trees import leaves
from perf.engine import Options, RefusedError, Report, attempt, bench_of, check_profile
from perf.kernels import profile_of
from perf.sizes import FLA_PACKAGES, QUICK, Model, Size, fla_model, sized
from perf.table import show_profiles, show_reasons, show_table
from perf.timing import Bench, Windows

# tokens that a peer generates in the measured time
PEER_TOKENS = 64
PRECISION: Precision = "bf16-mixed"
LIMIT = (
    "bytes of a step: every weight but the embedding's is read once, in the dtype that the step reads it in, "
    "and the state is read once and written once, but for caches of attention, to which a step is written; "
    "the limit is these bytes over the rate of a copy on the device"
)


@dataclass(frozen=True)
class DecodingOptions(Options):
    """Tokens per second of generating text with models of one size that differ in their mixers alone.

    Args:
        models: names of `perf.sizes.MODELS`; "all" takes every model.
        size: size of the models, by the names of `perf.sizes.SIZES`.
        batches: sequences that are generated at once, one measurement each.
        length: tokens of the prompt.
        compile: compile the steps; without, they are replayed as they are.
        peers: also measure `generate` of flash-linear-attention's model of the same size, where there is one.
        profile: tell where the device's time goes; CUDA alone.
        out: folder for DEVICE-SIZE.json.
    """

    models: tuple[str, ...] = ("gla",)
    size: str = "374M"
    batches: tuple[int, ...] = (1, 64)
    length: int = 2048
    compile: bool = True
    peers: bool = False
    profile: bool = False
    out: Path = Path("results/decoding")


def decoding(options: DecodingOptions, command: str) -> int:
    """Measure the models, write and print the results; return the exit status."""
    if min(options.batches, default=1) < 1 or options.length < 1:
        raise RefusedError("--batches and --length must be at least 1.")
    check_profile(options.profile, options.device)
    try:
        models, size = sized(options.models, options.size)
    except ValueError as error:
        raise RefusedError(error) from error
    bench, length = bench_of(options, windows=Windows(seconds=0.2)), 4 if options.quick else options.length
    bench, fields = bench.with_copy(quick=options.quick)
    report = Report(
        options,
        command,
        f"-{options.size}",
        FLA_PACKAGES if options.peers else (),
        **fields,
        protocol={
            "length": length,
            "precision": PRECISION,
            "compile": options.compile,
            "windows": dataclasses.asdict(bench.windows),
            "limit": LIMIT,
        },
    )

    def measure(row: tuple[str, int]) -> dict[str, Any]:
        name, batch = row
        config = models[name].config(QUICK if options.quick else size)
        found = measure_decoding(
            bench, config, batch, length, compile=options.compile, profile=options.profile
        )
        if "missing" not in found and bench.copy is not None:
            found["share_of_limit"] = found["bytes"] / bench.copy / found["step_ms"] * 1e3
        if options.peers and models[name].fla is not None:
            found["fla"] = measure_fla_decoding(bench, models[name], size, batch, length)
        return {"model": name, "batch": batch, **found}

    rows = itertools.product(models, options.batches)
    report.measure({f"{name}, {batch}": (name, batch) for name, batch in rows}, measure, key="models")
    return report.finish(show)


@torch.no_grad()
def measure_decoding(
    bench: Bench, config: ModelConfig, batch: int, length: int, *, compile: bool, profile: bool = False
) -> dict[str, Any]:
    """Measure generation after a prompt of random tokens; return its numbers, or "missing"."""
    device = bench.device
    bench.release()
    # compilations of earlier models count against a limit
    torch.compiler.reset()

    def measured() -> dict[str, Any]:
        with torch.device(device):
            model = LanguageModel(config).eval()
        prompt = torch.randint(config.vocab_size, (batch, length), device=device)
        begun = time.perf_counter()
        numbers = stream(model, prompt, precision=PRECISION, compile=compile)
        for _ in range(2 * EAGER_STEPS):
            next(numbers)
        bench.wait()
        first = time.perf_counter() - begun
        steps = bench.calls_per_second(lambda: next(numbers))
        cast = with_weights_cast(model, PRECISION)
        parts = with_parts_compiled(cast) if compile else None
        prompts = bench.calls_per_second(lambda: prefill(cast, prompt, None, None, PRECISION, compiled=parts))
        found = {
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "captured": numbers.captured,
            "prefill_tokens_per_second": prompts.median * batch * length,
            "first_seconds": first,
            "tokens_per_second": steps.tokens(batch),
            "step_ms": 1e3 / steps.median,
            "bytes": bytes_of_a_step(cast, numbers.state.layers),
            "peak_bytes": bench.peak_bytes(),
        }
        return found | {"profile": profile_of(lambda: next(numbers), device)} if profile else found

    return attempt(measured)


@torch.no_grad()
def measure_fla_decoding(bench: Bench, model: Model, size: Size, batch: int, length: int) -> dict[str, Any]:
    """Return tokens per second of `generate` of flash-linear-attention's model, or "missing"."""
    device = bench.device
    bench.release()

    def measured() -> dict[str, Any]:
        with torch.device(device):
            made: Any = fla_model(model, size, use_cache=True).to(torch.bfloat16).eval()
        prompt = torch.randint(size.vocab_size, (batch, length), device=device)

        def seconds(tokens: int) -> float:
            begun = time.perf_counter()
            made.generate(
                prompt, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=True, pad_token_id=0
            )
            bench.wait()
            return time.perf_counter() - begun

        few = 8
        # the first calls compile and tune
        seconds(few)
        seconds(few + PEER_TOKENS)
        spent = seconds(few + PEER_TOKENS) - seconds(few)
        return {"tokens_per_second": batch * PEER_TOKENS / spent}

    return attempt(measured)


def bytes_of_a_step(model: LanguageModel, state: Any) -> int:
    """Return the fewest bytes that a step moves; see `LIMIT`."""
    weights = {id(parameter): parameter for parameter in model.parameters()}
    # a cast head no longer shares the embedding's weight
    if model.head.weight is not model.embedding.weight:
        del weights[id(model.embedding.weight)]
    read = sum(weight.nbytes for weight in weights.values())
    read += sum(part.nbytes for part in leaves(state))
    return read + _bytes_written(state)


def _bytes_written(state: Any) -> int:
    if isinstance(state, AttentionCache):
        return sum(part.nbytes // state.k.shape[1] for part in leaves(state))
    if isinstance(state, tuple):
        return sum(map(_bytes_written, state))
    return sum(part.nbytes for part in leaves(state))


def show(console: Console, results: dict[str, Any]) -> None:
    """Print the speeds, then profiles, then the reasons of missing measurements."""
    protocol = results["protocol"]
    lines = []
    for found in results["models"]:
        if "missing" in found:
            continue
        of_fla = found.get("fla", {}).get("tokens_per_second")
        lines.append(
            [
                found["model"],
                str(found["batch"]),
                f"{found['tokens_per_second']['median']:,.0f}",
                f"{found['step_ms']:.3g}",
                f"{100 * found['share_of_limit']:.3g}" if "share_of_limit" in found else "",
                f"{found['prefill_tokens_per_second']:,.0f}",
                f"{found['first_seconds']:.1f}",
                "" if of_fla is None else f"{of_fla:,.0f}",
            ]
        )
    show_table(
        console,
        f"prompts of {protocol['length']} tokens, {protocol['precision']}; % of the speed at which "
        "the fewest bytes of a step move at the rate of a copy",
        ("model", "batch", "tokens/s", "ms/step", "%", "prompt tokens/s", "first s", "fla's"),
        lines,
        wrap=("model",),
    )
    show_profiles(console, results["models"], "model", "batch")
    show_reasons(console, results["models"], "model", "batch")
