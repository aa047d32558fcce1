"""`python -m perf serving`: many streams at once in the engine, beside `generate` for as many rows."""

import itertools
import resource
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from linrec.generation import stream
from linrec.generation.precision import with_weights_cast
from linrec.generation.state import named
from linrec.literals import Precision
from linrec.models import LanguageModel, ModelConfig
from linrec.models.compilation import EAGER_STEPS
from linrec.serve import Engine
from perf.command import Command, RefusedError
from perf.decoding import LIMIT, bytes_of_a_step
from perf.engine import Record, attempt
from perf.sizes import QUICK, sized
from perf.table import Part, Table, reasons
from perf.timing import Bench, Windows, share
from perf.training import number_of_parameters


@dataclass(frozen=True)
class Serving(Command):
    """Tokens per second of requests that come at the same time, and how long each waits for its tokens.

    Args:
        models: names of `perf.sizes.MODELS`; "all" takes every model.
        size: size of the models, by the names of `perf.sizes.SIZES`.
        streams: numbers of requests that run at once, one measurement each.
        waves: requests for each slot of the engine; with 2, half of them wait for a slot.
        length: tokens of each prompt.
        tokens: tokens of each answer.
    """

    models: tuple[str, ...] = ("gla",)
    size: str = "374M"
    streams: tuple[int, ...] = (1, 64, 256, 1024, 4096)
    waves: int = 1
    length: int = 512
    tokens: int = 256

    key = "models"
    windows = Windows(seconds=0.2)

    @property
    def suffix(self) -> str:
        return f"-{self.size}" + (f"-{self.waves}-waves" if self.waves > 1 else "")

    def chosen(self) -> Mapping[str, tuple[str, int]]:
        if min(*self.streams, self.waves, self.length, self.tokens) < 1:
            raise RefusedError("--streams, --waves, --length and --tokens must be at least 1.")
        rows = itertools.product(sized(self.models, self.size)[0], self.streams)
        return {f"{name}, {streams}": (name, streams) for name, streams in rows}

    def about(self, bench: Bench) -> tuple[Bench, Record]:
        precision: Precision = "bf16-mixed" if self.device == "cuda" else "32-true"
        protocol: Record = {"precision": precision, "limit": LIMIT}
        for name in ("length", "tokens", "waves"):
            protocol[name] = 4 if self.quick and name != "waves" else getattr(self, name)
        bench, yardstick = bench.with_copy(quick=self.quick)
        return bench, {**yardstick, "protocol": protocol}

    @torch.no_grad()
    def measure(self, bench: Bench, row: tuple[str, int]) -> Record:
        name, streams = row
        models, size = sized((name,), self.size)
        bench.release()
        config = models[name].config(QUICK if self.quick else size)
        return {"model": name, "streams": streams, **attempt(lambda: self.served(bench, config, streams))}

    def served(self, bench: Bench, config: ModelConfig, streams: int) -> Record:
        """Return the speed of the engine and of `generate`, and the times of the requests."""
        protocol = self.about(bench)[1]["protocol"]
        length, precision = protocol["length"], protocol["precision"]
        with torch.device(bench.device):
            model = LanguageModel(config).eval()
        prompts = torch.randint(config.vocab_size, (streams * self.waves, length), device=bench.device)
        alone, n_bytes, state_bytes = generated(bench, model, prompts[:streams], precision)
        engine = Engine(
            model,
            slots=streams,
            max_waiting=len(prompts),
            prompt_tokens=32_768 if bench.device.type == "cuda" else 4096,
            snapshots=0,
            precision=precision,
        )
        # compiles kernels
        engine.submit(prompts[0].tolist(), n_tokens=4).result()
        arrived: dict[int, list[float]] = {}
        requests = [
            engine.submit(
                prompt,
                n_tokens=protocol["tokens"],
                seed=seed,
                listener=lambda request: arrived.setdefault(id(request), []).append(time.monotonic()),
            )
            for seed, prompt in enumerate(prompts.tolist())
        ]
        full: list[float] = []
        begun = time.monotonic()
        while True:
            before, running = time.monotonic(), engine.open_requests
            if not engine.step():
                break
            if running["running"] == streams == engine.open_requests["running"]:
                full.append(time.monotonic() - before)
        spent = time.monotonic() - begun
        first = torch.tensor([r.times["first"] - r.times["submitted"] for r in requests])
        # the last call of a listener tells of the end
        between = torch.cat(
            [torch.tensor(times[:-1], dtype=torch.float64).diff() for times in arrived.values()]
        )
        found = {
            "parameters": number_of_parameters(model),
            "generate_tokens_per_second": alone * streams,
            "tokens_per_second": len(requests) * protocol["tokens"] / spent,
            "first_seconds": {"p50": first.quantile(0.5).item(), "p99": first.quantile(0.99).item()},
            "state_bytes": state_bytes // streams,
            "peak_bytes": bench.peak_bytes(),
            # the most that the process has had so far
            "process_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        if len(between):
            found["between_ms"] = {f"p{p}": 1e3 * between.quantile(p / 100).item() for p in (50, 99)}
        if full:
            step = sorted(full)[len(full) // 2]
            found["decode_tokens_per_second"] = streams / step
            found["share_of_generate"] = 1 / step / alone
            if bench.copy is not None:
                found["share_of_limit"] = share(n_bytes, bench.copy, 1e3 * step)
        return found

    @staticmethod
    def show(results: Record) -> Iterator[Part]:
        protocol = results["protocol"]
        measured = [model for model in results["models"] if "missing" not in model]
        yield Table(
            f"{protocol['waves']} x streams requests at once, prompts of {protocol['length']} tokens, "
            f"{protocol['tokens']} new ones, {protocol['precision']}; all: reading included",
            "model {model} | streams {streams} | all tok/s {tokens_per_second:,.0f} | "
            "tok/s {decode_tokens_per_second:,.0f} | / generate {share_of_generate:.2f} | "
            "% of limit {share_of_limit:.3g %} | KiB a stream {state_bytes:.0f KiB}",
            measured,
            wrap=("model",),
        )
        yield Table(
            "the time to the first token, and between tokens",
            "model {model} | streams {streams} | s, median {first_seconds[p50]:.2f} | "
            "s, 99% {first_seconds[p99]:.2f} | ms, median {between_ms[p50]:.3g} | "
            "ms, 99% {between_ms[p99]:.3g} | GPU GiB {peak_bytes:.2f GiB} | "
            "process GiB {process_bytes:.2f GiB}",
            measured,
            wrap=("model",),
        )
        yield from reasons(results["models"], "model", "streams")


def generated(
    bench: Bench, model: LanguageModel, prompts: torch.Tensor, precision: Precision
) -> tuple[float, int, int]:
    """Return the steps per second of `generate`, the fewest bytes of a step, and the bytes of the state."""
    numbers = stream(model, prompts, precision=precision)
    for _ in range(2 * EAGER_STEPS):
        next(numbers)
    bench.wait()
    steps = bench.calls_per_second(lambda: next(numbers)).median
    layers = numbers.state.layers
    state = sum(part.nbytes for part in named(layers, "layers").values())
    return steps, bytes_of_a_step(with_weights_cast(model, precision), layers), state
