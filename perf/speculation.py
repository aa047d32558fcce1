"""`python -m perf speculation`: speculative decoding of a trained model, beside plain decoding."""

import itertools
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from tyro.conf import Positional

from linrec.errors import RunFolderError
from linrec.lab.train import load_run
from linrec.lab.train.run import tokenizer_of
from linrec.models import LanguageModel
from linrec.serve import Draft, Engine, ModelDraft, NGramDraft
from perf.command import Command, RefusedError
from perf.engine import Record
from perf.sizes import MODELS, QUICK
from perf.table import Part, Table
from perf.timing import Bench
from perf.training import number_of_parameters


@dataclass(frozen=True)
class Speculation(Command):
    """Tokens per second of one request at a time, with and without guesses by n-grams and by a smaller model.

    On the CPU, these are seconds of processor time.

    Args:
        runs: run folders of a language model and, optionally, of a smaller one with the same tokens.
        texts: files whose last tenths have the prompts.
        temperatures: temperatures of sampling; 0 is greedy.
        prompts: number of prompts of each text, at equal distances.
        length: tokens of each prompt.
        tokens: tokens of each answer.
        n_grams: number of tokens that n-grams guess at a time.
        guesses: number of tokens that the smaller model guesses at a time.
    """

    runs: Positional[tuple[Path, ...]] = ()
    texts: tuple[Path, ...] = ()
    temperatures: tuple[float, ...] = (0.0, 0.5, 1.0)
    prompts: int = 8
    length: int = 256
    tokens: int = 128
    n_grams: int = 7
    guesses: int = 4

    @property
    def folder(self) -> str:
        return "serving"

    @property
    def suffix(self) -> str:
        return "-speculation"

    def chosen(self) -> Mapping[str, tuple[Path, float]]:
        if not self.quick and not (1 <= len(self.runs) <= 2 and self.texts):
            raise RefusedError("name the run folder of a model, perhaps of a smaller one, and --texts.")
        texts = (Path("random"),) if self.quick else self.texts
        rows = itertools.product(texts, self.temperatures)
        return {name_of(*row): row for row in rows}

    def about(self, bench: Bench) -> tuple[Bench, Record]:
        protocol = {
            name: getattr(self, name) for name in ("prompts", "length", "tokens", "n_grams", "guesses")
        }
        if self.quick:
            protocol |= {"prompts": 1, "length": 8, "tokens": 8}
        sizes = [number_of_parameters(model) for model in self.models(bench.device)]
        return bench, {"protocol": protocol, "parameters": sizes}

    def models(self, device: torch.device) -> list[LanguageModel]:
        if self.quick:
            return [LanguageModel(MODELS["gla"].config(QUICK)).eval() for _ in range(2)]
        try:
            return [load_run(folder).model(device) for folder in self.runs]
        except RunFolderError as error:
            raise RefusedError(error) from error

    def measure(self, bench: Bench, row: tuple[Path, float]) -> Record:
        text, temperature = row
        protocol = self.about(bench)[1]["protocol"]
        length, count = protocol["length"], protocol["prompts"]
        if self.quick:
            tokens = torch.randint(QUICK.vocab_size, (100,)).tolist()
        else:
            encoded = tokenizer_of(load_run(self.runs[0])).encode(text.read_text(encoding="utf-8"))
            tokens = encoded[-(len(encoded) // 10) :].tolist()
        model, *smaller = self.models(bench.device)
        drafts: dict[str, Draft | None] = {"plain": None, "n_grams": NGramDraft(self.n_grams)}
        if smaller:
            drafts["smaller"] = ModelDraft(smaller[0], self.guesses)
        engines = {name: Engine(model, draft=draft, snapshots=0) for name, draft in drafts.items()}
        # other programs may use the processor too
        clock = time.perf_counter if bench.on_cuda else time.process_time
        spent, made = dict.fromkeys(drafts, 0.0), dict.fromkeys(drafts, 0)
        answers: dict[tuple[str, int], list[int]] = {}
        for place in range(-1, count):
            start = max(0, place) * (len(tokens) - length) // count
            for name, engine in engines.items():
                request = engine.submit(
                    tokens[start : start + length],
                    n_tokens=protocol["tokens"],
                    temperature=temperature,
                    seed=place + 1,
                )
                while not request.generated:
                    engine.step()
                first, begun = len(request.generated), clock()
                answers[name, place] = request.result()
                if place < 0:
                    # kernels have been compiled
                    engine.counts.clear()
                    continue
                spent[name] += clock() - begun
                made[name] += len(request.generated) - first
        found: Record = {"name": name_of(*row)}
        for name, engine in engines.items():
            speed, counts = made[name] / spent[name], engine.counts
            found[name] = {"tokens_per_second": speed, "ratio": speed * spent["plain"] / made["plain"]}
            if counts["proposed"]:
                found[name]["accepted"] = counts["accepted"] / counts["proposed"]
                found[name]["tokens_per_call"] = counts["generated"] / (
                    counts["generated"] - counts["accepted"]
                )
                same = [answers[name, place] == answers["plain", place] for place in range(count)]
                found[name]["same_answers"] = sum(same) / count
        return found

    @staticmethod
    def show(results: Record) -> Iterator[Part]:
        sizes = " and ".join(f"{size / 1e6:.3g}M" for size in results["parameters"])
        yield Table(
            f"one request at a time, models of {sizes} parameters; accepted: share of the guesses",
            "text, temperature {name} | tokens/s {plain[tokens_per_second]:.3g} | "
            "n-grams: times as fast {n_grams[ratio]:.2f} | accepted {n_grams[accepted]:.0%} | "
            "a smaller model: times as fast {smaller[ratio]:.2f} | accepted {smaller[accepted]:.0%}",
            results["rows"],
            width=16,
        )


def name_of(text: Path, temperature: float) -> str:
    return f"{text.name}, {temperature:g}"
