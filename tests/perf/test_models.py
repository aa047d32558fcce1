import functools
import io
import json
import signal

import pytest
import torch
from rich.console import Console
from torch import nn

from linrec.models import SequenceClassifier
from perf import memory, models, models_report
from perf.__main__ import main
from perf.commands import models as command
from perf.encoders import BASELINE, ENCODERS, Size
from perf.models import PASSES, best_points, parameters
from tests.tiers import thorough

NAMES = [encoder.name for encoder in ENCODERS]


def run(folder, *arguments):
    status = main(["models", "--device", "cpu", "--quick", "--out", str(folder), *arguments])
    (path,) = folder.glob("*.json")
    return status, json.loads(path.read_text())


def point(model, length, rate=None, *, name="training", way="eager", missing=None):
    place = {"model": model, "pass": name, "way": way, "length": length}
    if missing is not None:
        return {**place, "missing": missing}
    rates = {"median": rate, "lowest": rate, "highest": rate, "calls": 1}
    return {**place, "first_seconds": 0.1, "calls_per_second": rates, "peak_bytes": 2**30}


@thorough
def test_every_encoder_is_measured_at_every_length(tmp_path, capsys):
    status, results = run(tmp_path)
    assert status == 0
    assert [model["name"] for model in results["models"]] == NAMES
    assert [model["config"]["mixer"] for model in results["models"]] == [
        "attention",
        "hgru",
        "gate_loop",
        "lru",
    ]
    # all but the mixers is equal
    for name in ("n_layers", "d_model", "d_channel_mixing", "channel_mixing", "dropout", "vocab_size"):
        assert len({model["config"][name] for model in results["models"]}) == 1
    assert not results["models"][0]["config"]["mixer_args"]["causal"]
    protocol = results["protocol"]
    assert protocol["precision"] == "bf16-mixed" and protocol["matmul_precision"] == "high"
    assert results["command"].startswith("python -m perf models --device cpu --quick")
    assert results["device"]["type"] == "cpu" and results["seconds"] > 0

    places = [(m, p, n) for m in NAMES for p in PASSES for n in protocol["lengths"]]
    assert [(p["model"], p["pass"], p["length"]) for p in results["points"]] == places
    assert all(p["way"] == "eager" and p["peak_bytes"] is None for p in results["points"])
    rates = {}
    for entry in results["points"]:
        rate = entry["calls_per_second"]
        assert 0 < rate["lowest"] <= rate["median"] <= rate["highest"]
        rates[entry["model"], entry["pass"], entry["length"]] = rate["median"]
    for entry in results["best"]:
        rate, baseline = (rates[name, entry["pass"], entry["length"]] for name in (entry["model"], BASELINE))
        assert entry["steps_per_second"] == rate and entry["ratio"] == pytest.approx(rate / baseline)
    shown = capsys.readouterr().out.splitlines()
    assert max(map(len, (line for line in shown if not line.startswith("wrote ")))) <= 80
    (picture,) = tmp_path.glob("*.png")
    assert picture.read_bytes().startswith(b"\x89PNG")


@thorough
def test_each_length_is_compiled_for_itself(tmp_path, monkeypatch):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    original = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", functools.partialmethod(original, backend=backend))
    arguments = ["--models", "LRU", "--ways", "compiled", "--lengths", "20", "30", "40"]
    status, results = run(tmp_path, *arguments)
    assert status == 0 and all(entry["way"] == "compiled" for entry in results["best"])
    assert [entry["length"] for entry in results["best"]] == 2 * [20, 30, 40]
    # training and inference, in code that knows the length
    assert len(graphs) == 2 * 3
    inputs = [node for graph in graphs for node in graph.graph.find_nodes(op="placeholder")]
    assert not any(isinstance(node.meta["example_value"], torch.SymInt) for node in inputs)


def test_training_trains_and_inference_does_not(monkeypatch):
    made = []

    class Kept(SequenceClassifier):
        def __init__(self, config):
            super().__init__(config)
            made.append(self)

    monkeypatch.setattr(models, "SequenceClassifier", Kept)
    protocol = models.Protocol(Size(batch=2, n_layers=1, d_model=8, d_channel_mixing=8), (10,))
    tokens, classes = torch.zeros(2, 10, dtype=torch.int64), torch.tensor([0, 1])
    for name, moves in (("training", True), ("inference", False)):
        step = models._STEPS[name](ENCODERS[1], "eager", protocol, torch.device("cpu"))
        model = made.pop()
        assert model.training == moves
        before = [parameter.detach().clone() for parameter in model.parameters()]
        step(tokens, classes)
        after = list(model.parameters())
        assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)) == moves
        assert all((parameter.grad is not None) == moves for parameter in after)


@thorough
def test_too_little_memory_is_told_and_the_rest_goes_on(tmp_path, monkeypatch, capsys):
    class Large(SequenceClassifier):
        def forward(self, x, *, lengths=None):
            if self.config.mixer == "attention" and x.shape[1] > 24:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
            return super().forward(x, lengths=lengths)

    monkeypatch.setattr(models, "SequenceClassifier", Large)
    status, results = run(tmp_path, "--models", BASELINE, "LRU")
    # which is a result
    assert status == 0
    assert [p.get("missing") for p in results["points"]] == 2 * [None, "out of memory"] + 4 * [None]
    best = {(entry["model"], entry["pass"], entry["length"]): entry for entry in results["best"]}
    assert best[BASELINE, "training", 48]["missing"] == "out of memory"
    assert best["LRU", "training", 48]["ratio"] is None and best["LRU", "training", 24]["ratio"] > 0
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    # in the cells of two speeds and two ratios
    assert sum(words[-2:] == ["out", "of"] for words in shown) == 4 and shown.count(["memory"]) == 4


@thorough
def test_a_failing_model_is_told_with_the_reason(tmp_path, monkeypatch, capsys):
    class Broken(SequenceClassifier):
        def __init__(self, config):
            if config.mixer == "lru" and torch.get_default_device().type != "meta":
                raise RuntimeError("no such kernel\nand much more")
            super().__init__(config)

    monkeypatch.setattr(models, "SequenceClassifier", Broken)
    status, results = run(tmp_path, "--models", "HGRN", "LRU", "--lengths", "8")
    assert status == 1
    assert [p.get("missing") for p in results["points"]] == 2 * [None] + 2 * ["RuntimeError: no such kernel"]
    assert "LRU, inference, eager, 8: RuntimeError: no such kernel" in capsys.readouterr().out


def test_the_faster_way_counts_and_ratios_are_those_of_it():
    found = best_points(
        [
            point(BASELINE, 1024, 10.0),
            point(BASELINE, 1024, 20.0, way="compiled"),
            point(BASELINE, 2048, missing="out of memory"),
            point("HGRN", 1024, 30.0),
            point("HGRN", 1024, missing="out of memory", way="compiled"),
            point("HGRN", 2048, missing="out of memory"),
            point("HGRN", 2048, 5.0, way="compiled"),
            point("HGRN", 4096, missing="RuntimeError: no"),
            point("HGRN", 4096, missing="out of memory", way="compiled"),
        ]
    )
    told = {(entry["model"], entry["length"]): entry for entry in found}
    assert told[BASELINE, 1024]["way"] == "compiled" and told[BASELINE, 1024]["ratio"] == 1
    assert told["HGRN", 1024]["way"] == "eager" and told["HGRN", 1024]["ratio"] == 1.5
    assert told["HGRN", 2048]["steps_per_second"] == 5 and told["HGRN", 2048]["ratio"] is None
    assert told["HGRN", 4096]["missing"] == "RuntimeError: no"


def test_memory_is_found_behind_the_errors_that_hide_it():
    try:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        except torch.OutOfMemoryError:
            raise RuntimeError("operation failed due to a previous error during capture") from None
    except RuntimeError as error:
        assert memory.why(error) == "out of memory"
    assert memory.why(RuntimeError("Triton Error [CUDA]: out of memory")) == "out of memory"
    assert memory.why(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED")) == "out of memory"
    assert memory.why(RuntimeError("out of resource: shared memory")) == (
        "RuntimeError: out of resource: shared memory"
    )


def test_parameters_are_those_of_the_model():
    for encoder in ENCODERS:
        size = Size(n_layers=2, d_model=16, d_channel_mixing=32)
        model = SequenceClassifier(encoder.config(size))
        assert parameters(encoder, size) == sum(p.numel() for p in model.parameters())
    # 4 d^2 without biases; and with theirs: embedding, head, and per layer two norms and a gated unit
    d, hidden = 16, 32
    unit = 3 * d * hidden + 2 * hidden + d
    assert parameters(ENCODERS[0], size) == 256 * d + 2 * (d + 1) + 2 * d + 2 * (4 * d * d + 4 * d + unit)


def test_tables_of_all_lengths_fit_80_columns():
    lengths = [1024, 2048, 3072, 4096, 5120, 8192, 16384, 32768]
    points = [point(m, n, 1234.5, name=p) for m in NAMES for p in PASSES for n in lengths[:-1]]
    points += [point(m, 32768, missing="out of memory", name=p) for m in NAMES for p in PASSES]
    size = {"n_layers": 4, "d_model": 128, "batch": 32}
    results = {
        "protocol": {"size": size, "precision": "bf16-mixed", "lengths": lengths},
        "models": [{"name": name, "parameters": 1_355_778} for name in NAMES],
        "points": points,
        "best": best_points(points),
    }
    text = io.StringIO()
    models_report.show(Console(file=text, width=80), results)
    shown = text.getvalue()
    assert max(map(len, shown.splitlines())) <= 80 and "…" not in shown
    heads = [line.split() for line in shown.splitlines() if "32K" in line]
    assert heads == 5 * [["1K", "2K", "3K", "4K", "5K", "8K", "16K", "32K"]]
    assert "1.36M" in shown and "1234" in shown and "1.00" in shown


@thorough
@pytest.mark.parametrize("wanted", PASSES)
def test_a_pass_without_numbers_is_an_empty_picture(wanted, tmp_path):
    points = [point("HGRN", n, 5.0, name=wanted) for n in (1024, 2048)]
    points += [
        point("HGRN", n, missing="out of memory", name=p) for p in PASSES if p != wanted for n in (8, 9)
    ]
    protocol = {"lengths": [1024, 2048]}
    for shown in (points, points[:2]):
        results = {"protocol": protocol, "models": [{"name": "HGRN"}], "best": best_points(shown)}
        picture = models_report.draw(results, tmp_path / "drawn.png")
        assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--models", "HGRNN"], "did you mean 'HGRN'?"),
        (["--lengths", "0", "8"], "--lengths must be at least 1; got 0."),
        (["--batch", "0"], "--batch must be at least 1; got 0."),
    ],
)
def test_what_the_user_got_wrong_is_told_in_one_line(arguments, told, capsys, tmp_path):
    assert main(["models", "--device", "cpu", "--out", str(tmp_path), *arguments]) == 2
    message = capsys.readouterr().err
    assert told in message and message.count("\n") == 1
    assert not list(tmp_path.iterdir())


@thorough
def test_an_interrupted_run_shows_what_it_has(tmp_path, monkeypatch, capsys):
    measure = command.measure_encoder

    def stopped(encoder, name, way, protocol, device):
        for place, found in enumerate(measure(encoder, name, way, protocol, device)):
            if (encoder.name, name, place) == ("LRU", "training", 0):
                signal.raise_signal(signal.SIGINT)
            yield found

    monkeypatch.setattr(command, "measure_encoder", stopped)
    status, results = run(tmp_path, "--models", BASELINE, "LRU")
    assert status == 1
    places = [(p["model"], p["pass"], p["length"]) for p in results["points"]]
    assert places == [(BASELINE, p, n) for p in PASSES for n in (24, 48)] + [("LRU", "training", 24)]
    # one cell of two, and none of the other pass
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [len(words) for words in shown if words[:1] == ["LRU"]] == [2, 1, 2, 1]
    assert len(list(tmp_path.glob("*.png"))) == 1
