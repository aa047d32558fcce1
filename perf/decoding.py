"""`python -m perf decoding`: tokens per second of generation, and the speed that the memory allows."""

import itertools
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from linrec.generation import stream
from linrec.generation.precision import with_weights_cast
from linrec.generation.prefill import prefill
from linrec.literals import Precision
from linrec.models import LanguageModel, ModelConfig
from linrec.models.compilation import EAGER_STEPS, with_parts_compiled
from linrec.ops.attention import AttentionCache
from linrec.trees import leaves
from perf.command import Command, RefusedError, check_profile
from perf.engine import Record, attempt
from perf.kernels import profile_of
from perf.sizes import FLA_PACKAGES, QUICK, Model, Size, fla_model, sized
from perf.table import Part, Table, profiles, reasons
from perf.timing import Bench, Windows, share
from perf.training import number_of_parameters

# tokens that a peer generates in the measured time
PEER_TOKENS = 64
PRECISION: Precision = "bf16-mixed"
LIMIT = (
    "bytes of a step: every weight but the embedding's is read once, in the dtype that the step reads it in, "
    "and the state is read once and written once, but for caches of attention, to which a step is written; "
    "the limit is these bytes over the rate of a copy on the device"
)


@dataclass(frozen=True)
class Decoding(Command):
    """Tokens per second of generating text with models of one size that differ in their mixers alone.

    Args:
        models: names of `perf.sizes.MODELS`; "all" takes every model.
        size: size of the models, by the names of `perf.sizes.SIZES`.
        batches: sequences that are generated at once, one measurement each.
        length: tokens of the prompt.
        compile: compile the steps; without, they are replayed as they are.
        peers: also measure `generate` of flash-linear-attention's model of the same size, where there is one.
        profile: tell where the device's time goes; CUDA alone.
    """

    models: tuple[str, ...] = ("gla",)
    size: str = "374M"
    batches: tuple[int, ...] = (1, 64)
    length: int = 2048
    compile: bool = True
    peers: bool = False
    profile: bool = False

    packages = FLA_PACKAGES
    key = "models"
    windows = Windows(seconds=0.2)

    @property
    def suffix(self) -> str:
        return f"-{self.size}"

    @property
    def prompt(self) -> int:
        return 4 if self.quick else self.length

    def chosen(self) -> Mapping[str, tuple[str, int]]:
        if min(self.batches, default=1) < 1 or self.length < 1:
            raise RefusedError("--batches and --length must be at least 1.")
        check_profile(self)
        rows = itertools.product(sized(self.models, self.size)[0], self.batches)
        return {f"{name}, {batch}": (name, batch) for name, batch in rows}

    def about(self, bench: Bench) -> tuple[Bench, Record]:
        protocol = {
            "length": self.prompt,
            "precision": PRECISION,
            "compile": self.compile,
            "windows": bench.windows._asdict(),
            "limit": LIMIT,
        }
        bench, yardstick = bench.with_copy(quick=self.quick)
        return bench, {**yardstick, "protocol": protocol}

    @torch.no_grad()
    def measure(self, bench: Bench, row: tuple[str, int]) -> Record:
        name, batch = row
        models, size = sized((name,), self.size)
        model = models[name]
        bench.release()
        # compilations of earlier models count against a limit
        torch.compiler.reset()
        found = attempt(lambda: self.generated(bench, model.config(QUICK if self.quick else size), batch))
        if self.peers and model.fla is not None:
            bench.release()
            found["fla"] = attempt(lambda: generated_by_fla(bench, model, size, batch, self.prompt))
        return {"model": name, "batch": batch, **found}

    def generated(self, bench: Bench, config: ModelConfig, batch: int) -> Record:
        """Return the speeds of generation after a prompt of random tokens, and of reading the prompt."""
        device = bench.device
        with torch.device(device):
            model = LanguageModel(config).eval()
        prompt = torch.randint(config.vocab_size, (batch, self.prompt), device=device)
        begun = time.perf_counter()
        numbers = stream(model, prompt, precision=PRECISION, compile=self.compile)
        for _ in range(2 * EAGER_STEPS):
            next(numbers)
        bench.wait()
        first = time.perf_counter() - begun
        steps = bench.calls_per_second(lambda: next(numbers))
        cast = with_weights_cast(model, PRECISION)
        parts = with_parts_compiled(cast) if self.compile else None
        prompts = bench.calls_per_second(lambda: prefill(cast, prompt, None, None, PRECISION, compiled=parts))
        n_bytes, step_ms = bytes_of_a_step(cast, numbers.state.layers), 1e3 / steps.median
        found = {
            "parameters": number_of_parameters(model),
            "captured": numbers.captured,
            "prefill_tokens_per_second": prompts.median * prompt.numel(),
            "first_seconds": first,
            "tokens_per_second": steps.tokens(batch),
            "step_ms": step_ms,
            "bytes": n_bytes,
            "peak_bytes": bench.peak_bytes(),
        }
        if self.profile:
            found["profile"] = profile_of(lambda: next(numbers), device)
        if bench.copy is not None:
            found["share_of_limit"] = share(n_bytes, bench.copy, step_ms)
        return found

    @staticmethod
    def show(results: Record) -> Iterator[Part]:
        protocol = results["protocol"]
        yield Table(
            f"prompts of {protocol['length']} tokens, {protocol['precision']}; % of the speed at which "
            "the fewest bytes of a step move at the rate of a copy",
            "model {model} | batch {batch} | tokens/s {tokens_per_second[median]:,.0f} | "
            "ms/step {step_ms:.3g} | % {share_of_limit:.3g %} | "
            "prompt tokens/s {prefill_tokens_per_second:,.0f} | first s {first_seconds:.1f} | "
            "fla's {fla[tokens_per_second]:,.0f}",
            [model for model in results["models"] if "missing" not in model],
            wrap=("model",),
        )
        yield from profiles(results["models"], "model", "batch")
        yield from reasons(results["models"], "model", "batch")


def generated_by_fla(bench: Bench, model: Model, size: Size, batch: int, length: int) -> Record:
    with torch.device(bench.device):
        made: Any = fla_model(model, size, use_cache=True).to(torch.bfloat16).eval()
    prompt = torch.randint(size.vocab_size, (batch, length), device=bench.device)

    def seconds(tokens: int) -> float:
        begun = time.perf_counter()
        made.generate(prompt, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=True, pad_token_id=0)
        bench.wait()
        return time.perf_counter() - begun

    few = 8
    # the first calls compile and tune
    seconds(few)
    seconds(few + PEER_TOKENS)
    spent = seconds(few + PEER_TOKENS) - seconds(few)
    return {"tokens_per_second": batch * PEER_TOKENS / spent}


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
