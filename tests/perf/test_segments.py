import dataclasses
import io
import json

import pytest
import torch
from rich.console import Console

from linrec.models import LanguageModel
from perf.__main__ import main
from perf.commands.segments import show
from perf.kernels import KINDS
from perf.segments import BASE, QUICK, make, variants
from tests.tiers import thorough


@thorough
def test_everything_runs(tmp_path, capsys):
    arguments = ["segments", "--device", "cpu", "--quick", "--peers", "--out", str(tmp_path)]
    installed = main(arguments) == 0
    (path,) = tmp_path.glob("*.json")
    results = json.loads(path.read_text())
    assert [found["model"] for found in results["models"]] == [*variants(QUICK), "x-transformers"]
    for found in results["models"][:-1]:
        rate = found["tokens_per_second"]
        assert 0 < rate["lowest"] <= rate["median"] <= rate["highest"]
        assert found["step_ms"] == pytest.approx(12e3 / rate["median"])
        # nobody counts the bytes of a CPU
        assert found["peaks"] == {"1": None, "10": None, "100": None}
        whole = make(found["model"], QUICK)
        assert found["parameters"] == sum(parameter.numel() for parameter in whole.parameters())
    last = results["models"][-1]
    assert installed == ("missing" not in last)
    assert installed or last["missing"] == "is not installed"
    shown = capsys.readouterr().out.splitlines()
    assert sum(line.split()[:1] == ["transformer_xl"] for line in shown) == 1


@pytest.mark.parametrize("name", variants(QUICK))
def test_a_step_reads_the_memory_of_the_step_before(name):
    model = make(name, QUICK)
    assert isinstance(model, LanguageModel)
    tokens = torch.randint(9, (2, QUICK.segment))
    logits, state = model(tokens)
    assert (model(tokens, state)[0] - logits).abs().max() > 1e-4


@pytest.mark.parametrize("name", variants(BASE))
def test_a_layer_of_the_base_shape_has_its_width(name):
    with torch.device("meta"):
        model = make(name, dataclasses.replace(BASE, n_layers=1))
    assert isinstance(model, LanguageModel)
    assert model.embedding.weight.shape == (BASE.vocab_size, BASE.d_model)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_memory_does_not_grow_with_the_segments(tmp_path):
    arguments = ["segments", "--device", "cuda", "--quick", "--profile", "--out", str(tmp_path)]
    assert main([*arguments, "--models", "transformer_xl", "recurrent_memory"]) == 0
    (path,) = tmp_path.glob("*.json")
    for found in json.loads(path.read_text())["models"]:
        assert 0 < found["peaks"]["10"] == found["peaks"]["100"]
        assert "kinds" in found["profile"]


def test_profiles_are_shown_and_failures_named():
    def found(profile):
        rate = {"median": 4e5, "lowest": 3e5, "highest": 5e5}
        return {
            "model": "transformer_xl",
            "way": "captured",
            "parameters": 40_000_000,
            "first_seconds": 2.0,
            "tokens_per_second": rate,
            "step_ms": 38.0,
            "peak_bytes": 2**32,
            "profile": profile,
        }

    kinds = {kind: {"share": 0.25 if kind == "attention" else 0.0} for kind in KINDS}
    profiles = [{"kinds": kinds, "idle": 0.1}, {"missing": "out of memory"}]
    text = io.StringIO()
    protocol = {"shape": dataclasses.asdict(QUICK)}
    show(Console(file=text, width=80), {"protocol": protocol, "models": [found(each) for each in profiles]})
    lines = [line.split() for line in text.getvalue().splitlines()]
    assert ["attention", "25.0"] in lines
    assert ["idle", "10.0"] in lines
    assert "transformer_xl: out of memory" in text.getvalue()


def test_errors(capsys):
    assert main(["segments", "--device", "cpu", "--models", "transformerxl"]) == 2
    assert "did you mean 'transformer_xl'" in capsys.readouterr().err
    assert main(["segments", "--device", "cpu", "--profile"]) == 2
    assert "--profile is for CUDA" in capsys.readouterr().err
