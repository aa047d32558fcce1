import json
import time

import pytest
import torch

from linrec.models import LanguageModel, ModelConfig
from perf import decoding
from perf.__main__ import main
from perf.decoding import bytes_of_a_step
from perf.kernels import Kernel
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


def test_a_peer_is_shown_beside_it(tmp_path, monkeypatch, capsys):
    class Peer(torch.nn.Module):
        def generate(self, prompt, *, max_new_tokens, min_new_tokens, **options):
            assert prompt.shape == (3, 4) and max_new_tokens == min_new_tokens
            # 64 tokens more must take some time
            time.sleep(max_new_tokens / 1000)
            asked.append(max_new_tokens)

    asked = []
    monkeypatch.setattr(decoding, "fla_model", lambda model, size, use_cache: Peer())
    arguments = ["decoding", "--device", "cpu", "--quick", "--no-compile", "--batches", "3", "--peers"]
    assert main([*arguments, "--models", "gla", "transformer", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*-374M.json")
    gla, transformer = json.loads(path.read_text())["models"]
    assert "tokens_per_second" in gla["fla"] and "fla" not in transformer
    assert asked == [8, 72, 72, 8]
    monkeypatch.setattr(decoding, "fla_model", lambda model, size, use_cache: 1 / 0)
    main([*arguments, "--out", str(tmp_path)])
    assert "gla, 3, flash-linear-attention: ZeroDivisionError" in capsys.readouterr().out


def test_a_profile_is_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("perf.kernels.profiled", lambda *rest: [Kernel("forward", 0, 300)])
    measure = decoding.measure_decoding
    monkeypatch.setattr(
        "perf.commands.decoding.measure_decoding",
        lambda *rest, **named: measure(*rest, **{**named, "profile": True}),
    )
    arguments = ["decoding", "--device", "cpu", "--quick", "--no-compile", "--batches", "1"]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*-374M.json")
    (found,) = json.loads(path.read_text())["models"]
    assert found["profile"]["kinds"]["recurrence"]["share"] == 1.0
    assert ["recurrence", "100.0"] in [line.split() for line in capsys.readouterr().out.splitlines()]


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


def test_a_cache_of_attention_is_read_and_a_step_is_written():
    config = ModelConfig(vocab_size=5, d_model=4, n_layers=1, mixer="attention", mixer_args={"n_heads": 2})
    model = LanguageModel(config)
    with torch.no_grad():
        _, state = model(torch.zeros(3, 10, dtype=torch.int64))
    # keys and values, and the position of each row
    cache, positions = 4 * 3 * 10 * 2 * 4, 8 * 3
    assert bytes_of_a_step(model, state) - bytes_of_a_step(model, ()) == cache + cache // 10 + 2 * positions


def test_errors(capsys):
    assert main(["decoding", "--device", "cpu", "--batches", "0"]) == 2
    assert "must be at least 1" in capsys.readouterr().err
    assert main(["decoding", "--device", "cpu", "--profile"]) == 2
    assert "--profile is for CUDA" in capsys.readouterr().err
    assert main(["decoding", "--device", "cpu", "--models", "glaa"]) == 2
    assert "did you mean 'gla'" in capsys.readouterr().err
