import json

import pytest
import torch

from linrec.models import LanguageModel, ModelConfig
from perf.__main__ import main
from perf.decoding import bytes_of_a_step
from perf.sizes import QUICK, sized


def test_everything_runs(tmp_path, capsys):
    arguments = ["decoding", "--device", "cpu", "--quick", "--no-compile", "--batches", "1", "3"]
    assert main([*arguments, "--models", "gla", "hybrid", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*-374M.json")
    results = json.loads(path.read_text())
    places = [(found["model"], found["batch"]) for found in results["models"]]
    assert places == [(name, batch) for name in ("gla", "hybrid") for batch in (1, 3)]
    for found in results["models"]:
        rate = found["tokens_per_second"]
        assert 0 < rate["lowest"] <= rate["median"] <= rate["highest"]
        assert found["step_ms"] == pytest.approx(1e3 * found["batch"] / rate["median"])
        model, _ = sized(found["model"], "374M")
        whole = LanguageModel(model.config(QUICK))
        assert found["parameters"] == sum(parameter.numel() for parameter in whole.parameters())
        assert found["prefill_tokens_per_second"] > 0 and found["bytes"] > 0
    shown = capsys.readouterr().out.splitlines()
    assert sum(line.split()[:1] in (["gla"], ["hybrid"]) for line in shown) == 4


@pytest.mark.parametrize("tied", [False, True])
def test_a_step_reads_its_weights_and_moves_its_state_twice(tied):
    config = ModelConfig(vocab_size=5, d_model=4, n_layers=1, mixer="min_gru", tie_embeddings=tied)
    model = LanguageModel(config)
    weights = sum(parameter.numel() for parameter in model.parameters()) - (0 if tied else 20)
    state = model.init_state(3)
    assert bytes_of_a_step(model, state) == 4 * weights + 2 * 4 * 3 * 4
    half = torch.nn.Parameter(model.head.weight.bfloat16())
    model.head.weight = half
    assert bytes_of_a_step(model, ()) == 4 * weights - 2 * 20


def test_errors(capsys):
    assert main(["decoding", "--device", "cpu", "--batches", "0"]) == 2
    assert "must be at least 1" in capsys.readouterr().err
    assert main(["decoding", "--device", "cpu", "--models", "glaa"]) == 2
    assert "did you mean 'gla'" in capsys.readouterr().err
