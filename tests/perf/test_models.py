"""`models`, `training`, `decoding` and `segments`, beyond what every command does."""

import dataclasses
import functools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from linrec.lab.train import LoopConfig
from linrec.models import LanguageModel, ModelConfig, SequenceClassifier
from perf import decoding, models, segments, training
from perf.decoding import bytes_of_a_step
from perf.kernels import Kernel
from perf.models import BASELINE, ENCODERS, PASSES, QUICK_SHAPE, best_points, config_of
from perf.segments import QUICK as SEGMENT
from perf.sizes import MODELS, sized
from perf.timing import Bench
from perf.training import flops_per_token
from tests.tiers import thorough


def point(model, length, rate=None, *, name="training", way="eager", missing=None):
    place = {"model": model, "pass": name, "way": way, "length": length}
    if missing is not None:
        return {**place, "missing": missing}
    rates = {"median": rate, "lowest": rate, "highest": rate, "calls": 1}
    return {**place, "first_seconds": 0.1, "calls_per_second": rates, "peak_bytes": 2**30}


def parameters_of(model):
    return sum(parameter.numel() for parameter in model.parameters())


@thorough
def test_each_length_is_compiled_for_itself(run, monkeypatch):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(nn.Module, "compile", functools.partialmethod(nn.Module.compile, backend=backend))
    arguments = ["--models", "LRU", "--ways", "compiled", "--lengths", "20", "30", "40"]
    status, results, _ = run("models", *arguments)
    assert status == 0 and all(point["way"] == "compiled" for point in results["points"])
    assert [point["length"] for point in results["points"]] == 2 * [20, 30, 40]
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
    loop = LoopConfig(batch_size=2, device="cpu")
    tokens, classes = torch.zeros(2, 10, dtype=torch.int64), torch.tensor([0, 1])
    for name, moves in (("training", True), ("inference", False)):
        step = models.step_of(config_of("HGRN", QUICK_SHAPE), name, loop)
        model = made.pop()
        assert model.training == moves
        before = [parameter.detach().clone() for parameter in model.parameters()]
        step(tokens, classes)
        after = list(model.parameters())
        assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)) == moves
        assert all((parameter.grad is not None) == moves for parameter in after)


@thorough
def test_encoders_without_memory_or_with_an_error_are_told_and_the_rest_goes_on(run, monkeypatch):
    class Large(SequenceClassifier):
        def __init__(self, config):
            if config.mixer == "hgru" and torch.get_default_device().type != "meta":
                raise RuntimeError("no such kernel\nand much more")
            super().__init__(config)

        def forward(self, x, *, lengths=None, dt=None):
            if self.config.mixer == "attention" and x.shape[1] > 24:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
            return super().forward(x, lengths=lengths)

    monkeypatch.setattr(models, "SequenceClassifier", Large)
    status, results, printed = run("models", "--models", BASELINE, "LRU")
    # too little memory is a result
    assert status == 0
    assert [p.get("missing") for p in results["points"]] == 2 * [None, "out of memory"] + 4 * [None]
    shown = [line.split() for line in printed.splitlines()]
    # in the cells of two speeds and two ratios
    assert sum(words[-2:] == ["out", "of"] for words in shown) == 4 and shown.count(["memory"]) == 4
    status, results, printed = run("models", "--models", "HGRN", "LRU", "--lengths", "8")
    assert status == 1
    assert [p.get("missing") for p in results["points"]] == 2 * ["RuntimeError: no such kernel"] + 2 * [None]
    assert "HGRN, inference, eager, 8: RuntimeError: no such kernel" in printed


def test_the_faster_way_counts():
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
    told = {(name, length): point for (name, _, length), point in found.items()}
    assert told[BASELINE, 1024]["way"] == "compiled" and told["HGRN", 1024]["way"] == "eager"
    assert models.speed(told["HGRN", 2048]) == 5
    assert told["HGRN", 4096]["missing"] == "RuntimeError: no"


def test_encoders_are_equal_but_for_their_mixers():
    configs = [config_of(name, QUICK_SHAPE) for name in ENCODERS]
    assert [config.mixer for config in configs] == ["attention", "hgru", "gate_loop", "lru"]
    for name in ("n_layers", "d_model", "d_channel_mixing", "channel_mixing", "dropout", "vocab_size"):
        assert len({getattr(config, name) for config in configs}) == 1
    assert not configs[0].mixer_args["causal"]
    _, fields = models.Models("cpu", quick=True).about(Bench(torch.device("cpu")))
    counts = [model["parameters"] for model in fields["models"]]
    assert counts == [parameters_of(SequenceClassifier(config)) for config in configs]


@thorough
@pytest.mark.parametrize("wanted", PASSES)
def test_a_pass_without_numbers_is_an_empty_picture(wanted, tmp_path):
    points = [point("HGRN", n, 5.0, name=wanted) for n in (1024, 2048)]
    points += [
        point("HGRN", n, missing="out of memory", name=p) for p in PASSES if p != wanted for n in (8, 9)
    ]
    protocol = {"lengths": [1024, 2048]}
    for shown in (points, points[:2]):
        results = {"protocol": protocol, "models": [{"name": "HGRN"}], "points": shown}
        picture = models.draw_points(results, tmp_path / "drawn.png")
        assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def fla(monkeypatch):
    """Put a small layer, trained by no step, in the place of flash-linear-attention's model."""
    made = training.fla_model
    monkeypatch.setattr(
        training, "fla_model", lambda model, size: nn.Linear(3, 5) if model.fla else made(model, size)
    )
    monkeypatch.setattr(training, "make_fla_step", lambda *rest: lambda *batch: None)


@thorough
def test_measurements_of_models_are_added_to_earlier_ones(run, tmp_path, fla):
    _, first, printed = run("training", "--models", "hgrn2", "gla", "--peers")
    assert all(model["fla"]["parameters"] == 20 for model in first["models"])
    assert all(model["fla"]["tokens_per_second"]["median"] > 0 for model in first["models"])
    assert "flash-linear-attention beside it" in printed
    status, first, printed = run("training", "--models", "lru", "--peers")
    assert status == 0 and "374M, lru, flash-linear-attention: has no such model" in printed
    places = [(entry["preset"], entry["mixer"]) for entry in first["models"]]
    assert places == [("374M", "gla"), ("374M", "hgrn2"), ("374M", "lru")]
    _, second, _ = run("training", "--models", "gla")
    before, after = ({entry["mixer"]: entry for entry in found["models"]} for found in (first, second))
    # measured again, and its peer not
    assert before["gla"]["step_ms"] != after["gla"]["step_ms"] and after["gla"]["fla"] == before["gla"]["fla"]
    assert after["lru"] == before["lru"] and after["gla"]["command"] != after["lru"]["command"]
    (picture,) = tmp_path.glob("out/*.png")
    assert picture.stat().st_size > 5000
    status, _, printed = run("training", "--models", "gla", "--matmul-precision", "highest")
    assert status == 2 and "holds measurements with another protocol; remove the file" in printed


@thorough
def test_a_peer_that_refuses_to_train_is_measured_forward(run, monkeypatch, fla):
    passes = []

    def refuse(*batch):
        raise RuntimeError("wrong gradients on this device")

    monkeypatch.setattr(training, "make_fla_step", lambda *rest: refuse)
    monkeypatch.setattr(training, "fla_loss", lambda *batch: passes.append(torch.is_grad_enabled()))
    status, results, printed = run("training", "--models", "gla", "--peers")
    (model,) = results["models"]
    assert status == 0 and "wrong gradients" in model["fla"]["missing"]
    assert passes and not any(passes)
    for found in (model["forward"], model["fla"]["forward"]):
        assert found["tokens_per_second"]["median"] > 0
    assert "forward alone, where it refuses to train" in printed and "wrong gradients" in printed


@thorough
@pytest.mark.parametrize("name", MODELS)
def test_every_model_of_a_size_builds(name):
    found, size = sized((name,), "374M")
    with torch.device("meta"):
        count = parameters_of(LanguageModel(found[name].config(size)))
    assert count / 374e6 == pytest.approx(1, abs=0.3)


def test_flops_are_six_for_each_parameter_in_a_product():
    config = ModelConfig(vocab_size=11, n_outputs=7, d_model=8, n_layers=2, d_channel_mixing=12)
    model = LanguageModel(config)
    assert flops_per_token(model, 100) == 6 * (parameters_of(model) - 11 * 8)
    # the head's product counts once, though the embedding shares its matrix
    tied = LanguageModel(dataclasses.replace(config, n_outputs=None, tie_embeddings=True))
    assert flops_per_token(tied, 100) == 6 * parameters_of(tied)
    attention = LanguageModel(dataclasses.replace(config, mixer="attention"))
    weights = 6 * (parameters_of(attention) - 11 * 8)
    # half of 2 * 2 * 100 * 8 for scores and for values, three times, in 2 layers
    assert flops_per_token(attention, 100) == weights + 2 * 3 * (2 * 2 * 100 * 8) // 2


def test_documents_are_cut_at_their_first_tokens(run, monkeypatch):
    seen = []

    class Watched(LanguageModel):
        def hidden(self, *given, reset=None, **options):
            seen.append(reset)
            return super().hidden(*given, reset=reset, **options)

    monkeypatch.setattr(training, "LanguageModel", Watched)
    run("training", "--document", "6")
    assert [reset.nonzero()[:, 1].tolist() for reset in seen] == len(seen) * [2 * [0, 6, 12]]
    seen.clear()
    run("training")
    assert seen and all(reset is None for reset in seen)


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        (training, ["training", "--mixers", "lru", "hgru"]),
        (decoding, ["decoding", "--no-compile", "--batches", "1", "2"]),
        (segments, ["segments", "--models", "transformer_xl", "memformer"]),
    ],
)
def test_a_profile_is_shown_and_a_failing_one_costs_no_speed(module, arguments, run, monkeypatch):
    kernels = [Kernel("forward", 0, 300), Kernel("Memset (Device)", 300, 375)]
    found = iter([lambda: kernels, lambda: 1 / 0])
    monkeypatch.setattr("perf.kernels.profiled", lambda *rest: next(found)())
    monkeypatch.setattr(module, "check_profile", lambda *rest: None)
    monkeypatch.setattr(segments, "SEGMENTS", (1, 3))
    status, results, printed = run(*arguments, "--profile")
    first, second = results["models"]
    assert status == 1
    assert first["profile"]["kinds"]["recurrence"]["share"] == 0.8
    assert second["profile"] == {"missing": "ZeroDivisionError: division by zero"}
    assert second["tokens_per_second"]["median"] > 0
    shown = [line.split() for line in printed.splitlines()]
    assert ["recurrence", "80.0"] in shown and ["copies", "20.0"] in shown and ["idle", "0.0"] in shown
    assert ": ZeroDivisionError: division by zero" in printed


def test_a_peer_of_decoding_is_shown_beside_it(run, monkeypatch):
    class Peer(nn.Module):
        def generate(self, prompt, *, max_new_tokens, min_new_tokens, **options):
            assert prompt.shape == (3, 4) and max_new_tokens == min_new_tokens
            asked.append(max_new_tokens)

    # a clock by which a token takes two milliseconds
    asked = []
    monkeypatch.setattr(decoding, "time", SimpleNamespace(perf_counter=lambda: sum(asked) / 500))
    monkeypatch.setattr(decoding, "fla_model", lambda model, size, use_cache: Peer())
    arguments = ["decoding", "--no-compile", "--batches", "3", "--peers"]
    _, results, _ = run(*arguments, "--models", "gla", "transformer")
    gla, transformer = results["models"]
    assert gla["fla"]["tokens_per_second"] == pytest.approx(3 * 500) and "fla" not in transformer
    assert gla["step_ms"] == pytest.approx(3e3 / gla["tokens_per_second"]["median"])
    assert asked == [8, 72, 72, 8]
    monkeypatch.setattr(decoding, "fla_model", lambda model, size, use_cache: 1 / 0)
    _, _, printed = run(*arguments)
    assert "gla, 3, flash-linear-attention: ZeroDivisionError" in printed


@pytest.mark.parametrize("tied", [False, True])
def test_a_step_reads_its_weights_and_moves_its_state_twice(tied):
    config = ModelConfig(vocab_size=5, d_model=4, n_layers=1, mixer="min_gru", tie_embeddings=tied)
    model = LanguageModel(config)
    weights = parameters_of(model) - (0 if tied else 20)
    state = model.init_state(3)
    assert bytes_of_a_step(model, state) == 4 * weights + 2 * 4 * 3 * 4
    model.head.weight = nn.Parameter(model.head.weight.bfloat16())
    assert bytes_of_a_step(model, ()) == 4 * weights - 2 * 20


def test_a_cache_of_attention_is_read_and_a_step_is_written():
    config = ModelConfig(vocab_size=5, d_model=4, n_layers=1, mixer="attention", mixer_args={"n_heads": 2})
    model = LanguageModel(config)
    with torch.no_grad():
        _, state = model(torch.zeros(3, 10, dtype=torch.int64))
    # keys and values, and the position of each row
    cache, positions = 4 * 3 * 10 * 2 * 4, 8 * 3
    assert bytes_of_a_step(model, state) - bytes_of_a_step(model, ()) == cache + cache // 10 + 2 * positions


@pytest.mark.parametrize("name", segments.variants(SEGMENT))
def test_a_step_reads_the_memory_of_the_step_before(name):
    model = segments.make(name, SEGMENT)
    assert isinstance(model, LanguageModel)
    tokens = torch.randint(9, (2, SEGMENT.segment))
    logits, state = model(tokens)
    assert (model(tokens, state)[0] - logits).abs().max() > 1e-4


@thorough
def test_every_model_of_segments_is_measured_and_the_peer_is_told(run, monkeypatch):
    monkeypatch.setattr(segments, "SEGMENTS", (1, 3))
    status, results, printed = run("segments", "--peers")
    assert [found["model"] for found in results["models"]] == [*segments.variants(SEGMENT), segments.PEER]
    for found in results["models"][:-1]:
        assert found["step_ms"] == pytest.approx(12e3 / found["tokens_per_second"]["median"])
        assert found["peaks"] == {"1": None, "3": None}
        assert found["parameters"] == parameters_of(segments.make(found["model"], SEGMENT))
    last = results["models"][-1]
    assert (status == 0) == ("missing" not in last)
    assert status == 0 or "x-transformers, eager: is not installed" in printed


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_memory_does_not_grow_with_the_segments(run):
    _, results, _ = run(
        "segments", "--device", "cuda", "--profile", "--models", "transformer_xl", "recurrent_memory"
    )
    for found in results["models"]:
        assert 0 < found["peaks"]["10"] == found["peaks"]["100"]
        assert "kinds" in found["profile"]
