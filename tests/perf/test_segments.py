import json

import pytest
import torch

from linrec.models import LanguageModel
from perf.__main__ import main
from perf.segments import QUICK, make, variants


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


def test_errors(capsys):
    assert main(["segments", "--device", "cpu", "--models", "transformerxl"]) == 2
    assert "did you mean 'transformer_xl'" in capsys.readouterr().err
