"""`python -m perf serving`: many streams at once in the engine, beside `generate` for as many rows."""

import contextlib
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
from linrec.serve import Engine, EngineFull, Request
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
        overload: measure clients that come at random instead, at so many times the rate that the engine can
            carry. Half of them are short: an eighth of the prompt and of the answer. As many requests as the
            engine has slots may wait; it refuses more.
        clients: number of these clients.
    """

    models: tuple[str, ...] = ("gla",)
    size: str = "374M"
    streams: tuple[int, ...] = (1, 64, 256, 1024, 4096)
    waves: int = 1
    length: int = 512
    tokens: int = 256
    overload: float = 0.0
    clients: int = 1000

    key = "models"
    windows = Windows(seconds=0.2)

    @property
    def suffix(self) -> str:
        waves = f"-{self.waves}-waves" if self.waves > 1 else ""
        return f"-{self.size}{waves}" + (f"-overload-{self.overload:g}" if self.overload else "")

    def chosen(self) -> Mapping[str, tuple[str, int]]:
        if min(*self.streams, self.waves, self.length, self.tokens, self.clients) < 1:
            raise RefusedError("--streams, --waves, --length, --tokens and --clients must be at least 1.")
        rows = itertools.product(sized(self.models, self.size)[0], self.streams)
        return {f"{name}, {streams}": (name, streams) for name, streams in rows}

    def about(self, bench: Bench) -> tuple[Bench, Record]:
        precision: Precision = "bf16-mixed" if self.device == "cuda" else "32-true"
        protocol: Record = {"precision": precision, "limit": LIMIT, "overload": self.overload}
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
        measured = self.overloaded if self.overload else self.served
        return {"model": name, "streams": streams, **attempt(lambda: measured(bench, config, streams))}

    def served(self, bench: Bench, config: ModelConfig, streams: int) -> Record:
        """Return the speed of the engine and of `generate`, and the times of the requests."""
        protocol = self.about(bench)[1]["protocol"]
        length, precision = protocol["length"], protocol["precision"]
        with torch.device(bench.device):
            model = LanguageModel(config).eval()
        prompts = torch.randint(config.vocab_size, (streams * self.waves, length), device=bench.device)
        alone = generated(bench, model, prompts[:streams], precision)
        # its states lie in memory no longer
        bench.release()
        n_bytes, state_bytes = sizes(model, prompts[:1], precision, streams)
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
            "tokens_per_second": len(requests) * protocol["tokens"] / spent,
            "first_seconds": {"p50": first.quantile(0.5).item(), "p99": first.quantile(0.99).item()},
            "state_bytes": state_bytes,
            "peak_bytes": bench.peak_bytes(),
            # the most that the process has had so far
            "process_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        if len(between):
            found["between_ms"] = {f"p{p}": 1e3 * between.quantile(p / 100).item() for p in (50, 99)}
        if full:
            step = sorted(full)[len(full) // 2]
            found["decode_tokens_per_second"] = streams / step
            if alone is not None:
                found["generate_tokens_per_second"] = alone * streams
                found["share_of_generate"] = 1 / step / alone
            if bench.copy is not None:
                found["share_of_limit"] = share(n_bytes, bench.copy, 1e3 * step)
        return found

    def overloaded(self, bench: Bench, config: ModelConfig, slots: int) -> Record:
        """Return how long short and long requests take when more come than the engine can carry."""
        protocol = self.about(bench)[1]["protocol"]
        with torch.device(bench.device):
            model = LanguageModel(config).eval()
        engine = Engine(
            model,
            slots=slots,
            max_waiting=slots,
            snapshots=0,
            prompt_tokens=4096,
            precision=protocol["precision"],
        )
        sizes = {
            "short": (max(1, protocol["length"] // 8), max(1, protocol["tokens"] // 8)),
            "long": (protocol["length"], protocol["tokens"]),
        }

        def submit(kind: str, seed: int) -> Request:
            length, tokens = sizes[kind]
            prompt = torch.randint(config.vocab_size, (length,)).tolist()
            return engine.submit(prompt, n_tokens=tokens, seed=seed)

        def finish(requests: list[Request]) -> float:
            begun = time.monotonic()
            while engine.step():
                pass
            return (time.monotonic() - begun) / len(requests)

        kinds = [*sizes]
        finish([submit("short", 0)])
        alone = {kind: finish([submit(kind, 1)]) for kind in kinds}
        # of an engine whose slots are full all the time
        carried = finish([submit(kinds[seed % 2], seed) for seed in range(2 * slots)])
        clients = 8 if self.quick else self.clients
        gaps = torch.empty(clients, dtype=torch.float64).exponential_(self.overload / carried)
        times, chosen = gaps.cumsum(0).tolist(), [kinds[n] for n in torch.randint(2, (clients,)).tolist()]
        requests: dict[str, list[Request]] = {kind: [] for kind in kinds}
        begun, came = time.monotonic(), 0
        while came < clients or any(engine.open_requests.values()):
            while came < clients and time.monotonic() - begun >= times[came]:
                with contextlib.suppress(EngineFull):
                    requests[chosen[came]].append(submit(chosen[came], came))
                came += 1
            if not engine.step() and came < clients:
                time.sleep(max(0.0, times[came] - (time.monotonic() - begun)))
        found: Record = {"parameters": number_of_parameters(model), "carried_per_second": 1 / carried}
        for kind, mine in requests.items():
            first = torch.tensor([r.times["first"] - r.times["submitted"] for r in mine])
            whole = torch.tensor([r.times["ended"] - r.times["submitted"] for r in mine])
            found[kind] = {
                "tokens": sizes[kind],
                "refused": 1 - len(mine) / chosen.count(kind),
                "first_seconds": {f"p{p}": first.quantile(p / 100).item() for p in (50, 99)},
                "alone_seconds": alone[kind],
                "slower": whole.median().item() / alone[kind],
            }
        return found

    @staticmethod
    def show(results: Record) -> Iterator[Part]:
        protocol = results["protocol"]
        if protocol.get("overload"):
            yield Table(
                f"clients at {protocol['overload']:g} times the rate that the engine can carry; times "
                "slower: the median time of a request over its time alone",
                "model {model} | slots {streams} | requests {kind} | carried/s {carried_per_second:.3g} | "
                "% refused {refused:.3g %} | first token, s, median {first_seconds[p50]:.2f} | "
                "s, 99% {first_seconds[p99]:.2f} | times slower {slower:.2f}",
                [
                    model | {"kind": kind} | model[kind]
                    for model in results["models"]
                    for kind in ("short", "long")
                    if "missing" not in model
                ],
                wrap=("model", "first token, s, median"),
            )
            yield from reasons(results["models"], "model", "streams")
            return
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
) -> float | None:
    """Return the steps per second of `generate`, None if its states do not fit into memory."""
    try:
        numbers = stream(model, prompts, precision=precision)
        for _ in range(2 * EAGER_STEPS):
            next(numbers)
        bench.wait()
        return bench.calls_per_second(lambda: next(numbers)).median
    except torch.OutOfMemoryError:
        return None


def sizes(model: LanguageModel, prompt: torch.Tensor, precision: Precision, rows: int) -> tuple[int, int]:
    """Return the fewest bytes of a step of so many rows, and the bytes of the state of a row."""
    numbers = stream(model, prompt, precision=precision)
    next(numbers)
    layers, cast = numbers.state.layers, with_weights_cast(model, precision)
    weights = bytes_of_a_step(cast, ())
    state = sum(part.nbytes for part in named(layers, "layers").values())
    return weights + rows * (bytes_of_a_step(cast, layers) - weights), state
