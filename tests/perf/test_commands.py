"""Every command as users run it: rows, files and tables; wrong command lines; committed results."""

import io
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from linrec.models import LanguageModel, ModelConfig
from perf import operations
from perf.__main__ import COMMANDS, main
from perf.models import Models
from perf.table import print_parts
from tests.perf.conftest import wrong
from tests.tiers import thorough, tiered

ROOT = Path(__file__).parents[2]
# command line, end of the file's name, key and number of the records, the last record, a line of the tables
FAST = [
    ("steps --peers", "-steps", "rows", 5, "gated_delta-f32-2x1x2x8", "gated_delta-f32-2x1x2x8"),
    ("loops", "", "rows", 1, "b2-d4-f32", "b2-d4-f32 fwd lstm"),
    (
        *("training --presets wikitext103-hgrn wikitext103 --mixers hgru gate_loop", "", "models", 4),
        *("wikitext103 gate_loop", "wikitext103 gate_loop"),
    ),
    ("decoding --no-compile --batches 1 3 --models gla hybrid", "-374M", "models", 4, "hybrid 3", "hybrid 3"),
    ("segments --models transformer_xl memformer", "", "models", 2, "memformer eager", "memformer eager"),
]
FURTHER = [
    ("ops --peers --without hop", "", "rows", 5, "conv-f32-2x64x16", "other numbers, each to be at most"),
    ("ops --grow --longest 2100", "-growth", "rows", 2, "scan-f32-1x2048x64", "scan-f32-1x2048x64"),
    ("matrix --peers", "-matrix", "rows", 5, "gated_delta-f32-2x70x2x8", "gated_delta-f32-2x70x2x8"),
    ("matrix --heads", "-heads", "rows", 6, "delta-bf16-1x70x1x16x32", "forward: largest step between"),
    ("nonlinear", "", "rows", 2, "lem-n4-t20", "lem-n4-t20 newton x3"),
    ("cells --models cornn unicornn", "", "rows", 5, "unicornn-reversible-eager-t80", "unicornn-reversible"),
    ("learners --bias --rows 2-lru-t16", "-bias", "rows", 1, "2-lru-t16", "2-lru-t16 0."),
    ("learners --rows lru-b1-t8 lru-b1-t1", "", "rows", 2, "lru-b1-t1", "lru-b1-t1"),
    ("loss --peers", "", "rows", 1, "12x8x20", "12x8x20 logits in one piece"),
    (
        "serving --models gla hybrid --streams 1 3 --waves 2",
        "-374M-2-waves",
        "models",
        4,
        "hybrid 3",
        "hybrid",
    ),
    (
        "serving --models gla --streams 3 --overload 2",
        "-374M-overload-2",
        "models",
        1,
        "gla 3",
        "gla 3 short",
    ),
    ("speculation", "-speculation", "rows", 3, "random, 1", "random, 1"),
    ("models", "", "points", 16, "LRU inference eager 48", "inference, times as fast as the Transformer"),
    ("tasks --rows mqar adding lra-pathfinder", "", "rows", 3, "lra-pathfinder", "mqar"),
]


def name_of(record):
    keys = ("name", "preset", "model", "mixer", "batch", "streams", "pass", "way", "length")
    return record["name"] if "name" in record else " ".join(str(record[key]) for key in keys if key in record)


def every(value, key):
    """Yield the values of a key anywhere in a record."""
    if isinstance(value, dict):
        if key in value:
            yield value[key]
        value = list(value.values())
    for part in value if isinstance(value, list) else ():
        yield from every(part, key)


@pytest.mark.parametrize(("line", "suffix", "key", "count", "last", "shown"), tiered(FAST, FURTHER))
def test_a_command_measures_its_rows_and_shows_them(line, suffix, key, count, last, shown, run, tmp_path):
    status, results, printed = run(*line.split())
    assert status == 0
    (path,) = tmp_path.glob("out/*.json")
    assert path.stem.endswith(suffix)
    assert results["device"]["type"] == "cpu" and results["device"]["name"]
    assert results["commit"] is None or len(results["commit"]) == 40
    assert {"torch", "numba", "python"} <= set(results["versions"])
    assert results["command"].startswith(f"python -m perf {line.split()[0]} --device cpu --quick")
    lines = printed.splitlines()
    assert all(len(text) <= 80 for text in lines if not text.startswith("wrote "))
    assert not any("…" in text for text in lines)
    assert any(" ".join(text.split()).startswith(shown) for text in lines)
    if key:
        found = [name_of(record) for record in results[key]]
        assert len(set(found)) == len(found) == count and found[-1] == last
        assert not any("error" in record for record in results[key])
    for ms in [*every(results, "ms"), *every(results, "called_ms")]:
        assert 0 < ms["p20"] <= ms["median"] <= ms["p80"]
    for key in ("tokens_per_second", "steps_per_second", "calls_per_second"):
        for rate in every(results, key):
            if isinstance(rate, dict):
                assert 0 < rate["lowest"] <= rate["median"] <= rate["highest"]
    # the memory of the CPU is not counted
    for key in ("peak_bytes", "held_bytes", "bytes_per_step"):
        assert set(every(results, key)) <= {None}
    for peers in every(results, "peers"):
        assert all(entry.keys() & {"about", "ms", "missing"} for entry in peers.values())
    for picture in tmp_path.glob("out/*.png"):
        assert picture.read_bytes().startswith(b"\x89PNG")
    assert bool(list(tmp_path.glob("out/*.png"))) == (line == "models" or "--grow" in line)


def test_a_command_runs_in_a_process_of_its_own(tmp_path):
    command = [sys.executable, "-m", "perf", "ops", "--device", "cpu", "--quick", "--rows", "accuracy"]
    finished = subprocess.run([*command, "--out", str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    (path,) = tmp_path.glob("*.json")
    results = json.loads(path.read_text())
    (line,) = results["lines"]
    assert line["met"] == (line["value"] <= line["target"])
    assert isinstance(results["keeps_freed_memory"], bool)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("ops --rows scan-f32-8x4096x51", "did you mean 'scan-f32-8x4096x512'?"),
        ("ops --grow --rows accuracy", "leave --rows out"),
        ("ops --grow --longest 100", "at least 512 steps; got 100"),
        ("ops --longest 1000", "--longest is the greatest length of --grow"),
        ("matrix --rows heads-f32-1x4096x4x64", "did you mean 'head-f32-1x4096x4x64'"),
        ("matrix --without fla", "--without leaves peers out"),
        ("steps --peers --without flo", "did you mean 'fla'"),
        ("loss --rows 16384x1024x3200", "did you mean '16384x1024x32000'"),
        ("cells --models unicorn", "did you mean 'unicornn'"),
        ("cells --models lem gla", "got 'gla', a mixer without it"),
        ("cells --lengths 1000 32", "above 32, up to which torch.compile unrolls loops; got 32"),
        ("iterations nowhere", "there is no run folder"),
        ("models --models HGRNN", "did you mean 'HGRN'?"),
        ("models --lengths 0 8", "--lengths must be at least 1; got 0."),
        ("training --mixers gate_lop", "did you mean 'gate_loop'?"),
        ("training --profile", "--profile is for CUDA"),
        ("training --batch 10 --accumulate 3", "must divide `batch_size` = 10"),
        ("training --document 0", "--document must be at least 1; got 0."),
        ("training --models gla --size 375M", "did you mean '374M'"),
        ("training --models gla --mixers lru", "--mixers is for presets"),
        ("training --peers", "name them by --models"),
        ("decoding --batches 0", "must be at least 1"),
        ("serving --waves 0", "must be at least 1"),
        ("speculation nowhere --texts a", "there is no run folder"),
        ("speculation --texts a", "name the run folder of a model"),
        ("decoding --models glaa", "did you mean 'gla'"),
        ("segments --models transformerxl", "did you mean 'transformer_xl'"),
        ("tasks --rows mqa", "did you mean 'mqar'"),
    ],
)
def test_a_wrong_command_line_is_told_in_one_line(line, told, capsys, tmp_path):
    assert main([*line.split(), "--device", "cpu", "--out", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert told in message and len(message.strip().splitlines()) <= 1 + ("measuring" in message)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_missing_device_is_told(capsys):
    assert main(["ops", "--device", "cuda"]) == 2
    assert "there is no CUDA device here; pass --device cpu." in capsys.readouterr().err


@pytest.mark.parametrize("words", [["opps"], [], ["--quick", "ops"]])
def test_an_unknown_command_gets_the_list_of_commands(words, capsys):
    assert main(words) == 2
    assert f"usage: python -m perf {{{','.join(COMMANDS)}}} ..." in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], *([command] for command in COMMANDS)])
def test_help_is_no_error(words):
    assert main([*words, "--help"]) == 0


# endings of the names of files in results/ops
BY_ENDING = {"-matrix": "matrix", "-heads": "matrix", "-steps": "steps", "-speculation": "speculation"}


def committed():
    for path in sorted(ROOT.glob("results/*/*.json")):
        folder = path.parent.name
        # files of whole runs are no results of `perf`
        if folder in COMMANDS and "growth" not in path.stem:
            command = COMMANDS[next((name for end, name in BY_ENDING.items() if end in path.stem), folder)]
            yield pytest.param(path, command, id=f"{folder}/{path.stem}")


@pytest.mark.parametrize(("path", "command"), committed())
def test_committed_results_are_shown_at_80_columns(path, command):
    results, text = json.loads(path.read_text()), io.StringIO()
    print_parts(Console(file=text, width=80), command.show(results))
    shown = text.getvalue()
    assert max(map(len, shown.splitlines())) <= 80
    records = [*results.get("rows", ()), *results.get("lines", ())]
    assert all(record["name"] in shown for record in records if len(record["name"]) < 60)


def test_a_wrong_output_is_no_point_of_growth(monkeypatch, run, tmp_path):
    monkeypatch.setattr(operations, "scan", wrong(operations.scan))
    status, results, printed = run("ops", "--grow")
    assert status == 1 and not any("passes" in row for row in results["rows"])
    assert "scan-f32-1x512x64: linrec: wrong, so not timed: y" in " ".join(printed.split())
    assert not list(tmp_path.glob("out/*.png"))


@thorough
def test_an_interrupted_run_shows_its_points(monkeypatch, run, tmp_path):
    measure = Models.measure

    def stopped(self, bench, row):
        if (row.model, row.one, row.length) == ("LRU", "training", 24):
            signal.raise_signal(signal.SIGINT)
        return measure(self, bench, row)

    monkeypatch.setattr(Models, "measure", stopped)
    status, results, printed = run("models", "--models", "Transformer", "LRU")
    assert status == 1
    places = [(point["model"], point["pass"], point["length"]) for point in results["points"]]
    both = [("Transformer", one, n) for one in ("training", "inference") for n in (24, 48)]
    assert places == [*both, ("LRU", "training", 24)]
    # one cell of two, and no cell in the other pass
    shown = [line.split() for line in printed.splitlines()]
    assert [len(words) for words in shown if words[:1] == ["LRU"]] == [2, 1, 2, 1]
    assert len(list(tmp_path.glob("out/*.png"))) == 1


def test_presets_are_recorded_with_their_rates(run):
    _, results, _ = run("training", "--mixers", "attention")
    (model,) = results["models"]
    loop = results["protocol"]["loop"]
    assert loop["precision"] == "bf16-mixed" and not loop["deterministic"]
    # 2 sequences of 16 tokens
    rate = model["tokens_per_second"]["median"]
    assert model["step_ms"] == pytest.approx(32e3 / rate)
    assert model["flops_per_second"] == pytest.approx(rate * model["flops_per_token"])
    assert model["share_of_matmul"] == pytest.approx(model["flops_per_second"] / results["matmul"]["rate"])
    config = ModelConfig(**model["config"])
    assert model["parameters"] == sum(p.numel() for p in LanguageModel(config).parameters())
