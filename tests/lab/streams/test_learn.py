"""`linrec learn`: what it writes, and that a run that ends at any time goes on with the same numbers."""

import contextlib
import copy
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from linrec.cli.dispatch import run
from linrec.errors import ConfigError, RunFolderError
from linrec.lab.streams.learn import LearnConfig, learn, stored_config
from linrec.lab.train.checkpoint import load_checkpoint
from linrec.models import LanguageModel, ModelConfig
from tests.tiers import thorough

SMALL = LearnConfig("delay-copy", {"delays": (3,), "every": 130}, d_model=8, window=50, checkpoint_every=70)


def tensors(folder):
    return load_checkpoint(folder).tensors


def assert_same_run(one, other):
    a, b = tensors(one), tensors(other)
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []
    stored = [json.loads((folder / "result.json").read_text()) for folder in (one, other)]
    for result in stored:
        result.pop("microseconds_per_step"), result.pop("checksum", None)
    assert stored[0] == stored[1]
    lines = [(f / "metrics.jsonl").read_text().splitlines() for f in (one, other)]
    assert [json.loads(line)["loss"] for line in lines[0]] == [json.loads(line)["loss"] for line in lines[1]]


@pytest.mark.parametrize("learner", ["rtrl", "tbptt"])
def test_a_run_in_two_parts_is_the_run_in_one(tmp_path, learner):
    config = dataclasses.replace(SMALL, learner=learner, rows=2)
    learn(config, tmp_path / "one", steps=200)
    learn(config, tmp_path / "two", steps=120)
    learn(config, tmp_path / "two", steps=200, resume=True)
    assert_same_run(tmp_path / "one", tmp_path / "two")


def test_a_model_has_the_fields_that_are_given(tmp_path):
    fields = {"channel_mixing": "none", "norm": "none"}
    config = dataclasses.replace(
        SMALL, mixer="elman", mixer_args={"init": "orthogonal"}, model_args=fields, learner="dense_rtrl"
    )
    learn(config, tmp_path / "one", steps=24)
    learn(stored_config(tmp_path / "one"), tmp_path / "two", steps=16)
    learn(config, tmp_path / "two", steps=24, resume=True)
    assert_same_run(tmp_path / "one", tmp_path / "two")
    names = [*config.make_model(config.make_stream()).state_dict()]
    assert [name for name in names if "mixer" not in name] == ["input.weight", "head.weight", "head.bias"]


def test_the_result_says_what_was_learnt(tmp_path):
    result = learn(SMALL, tmp_path / "run", steps=400)
    assert result["steps"] == 400 and len(result["curve"]) == 8
    assert [start for start, _ in result["regimes"]] == [0, 130, 260, 390]
    assert result["bounds"]["without memory"] == pytest.approx(1.386, abs=1e-3)
    assert result["loss"] == pytest.approx(sum(result["curve"]) / 8, rel=0.05)
    assert result["forgotten"][0]["regime"] == "delay 3"
    assert result["memory_bytes"] > 0
    assert stored_config(tmp_path / "run").mixer == "lru"


def test_memory_is_the_same_after_many_steps(tmp_path):
    sizes = [learn(SMALL, tmp_path / str(n), steps=n)["memory_bytes"] for n in (16, 800)]
    assert sizes[0] == sizes[1]


def stamp(folder):
    """Return when a run wrote its newest checkpoint; None for a folder that is no run yet."""
    with contextlib.suppress(FileNotFoundError):
        (folder / "config.json").stat()
        return (folder / "checkpoint.safetensors").stat().st_mtime_ns
    return None


@thorough
def test_a_run_that_is_killed_at_any_time_goes_on_with_the_same_bits(tmp_path):
    options = "learn delay-copy --stream-args every=200 --d-model 8 --window 100 --checkpoint-every 100"
    steps = ["--steps", "5000"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert run([*options.split(), *steps, "--out", str(whole)]) == 0
    words, rest = [*options.split(), *steps, "--out", str(killed)], ["learn", "--resume", str(killed), *steps]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    for kills in range(2):
        written = stamp(killed)
        command = [sys.executable, "-m", "linrec", *(rest if kills else words)]
        process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
        # soon after a checkpoint of its own
        while stamp(killed) in (None, written) and process.poll() is None:
            time.sleep(0.005)
        time.sleep(0.1 * kills)
        process.kill()
        # the first process cannot have ended: it has written one checkpoint of fifty
        assert process.wait() == -signal.SIGKILL or kills
    assert run(rest) == 0
    assert_same_run(whole, killed)


def test_a_stopped_run_says_how_to_go_on(tmp_path):
    from linrec.errors import InterruptedRunError

    def stop(learning):
        signal.raise_signal(signal.SIGTERM)

    with pytest.raises(InterruptedRunError, match="--resume"):
        learn(SMALL, tmp_path / "run", steps=400, told=stop)
    learn(SMALL, tmp_path / "run", steps=400, resume=True)
    learn(SMALL, tmp_path / "whole", steps=400)
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_a_model_goes_on_with_another_stream(tmp_path, capsys):
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    options = ["--stream-args", "delays=(2,)", "--d-model", "8"]
    assert run(["learn", "delay-copy", "--steps", "60", "--out", first, *options]) == 0
    again = ["learn", "delay-copy", "--steps", "40", "--out", second, "--init-from", first]
    assert run([*again, "--stream-args", "delays=(3,)"]) == 0
    assert "40 steps" in capsys.readouterr().out


def test_text_from_standard_input_or_a_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("to be or not to be, that is the question. " * 5)
    assert run(["learn", str(path), "--d-model", "8", "--out", str(tmp_path / "run")]) == 0
    assert json.loads((tmp_path / "run/result.json").read_text())["steps"] == len(path.read_text()) - 1


@pytest.mark.parametrize(
    "words, said",
    [
        ([], "name a stream"),
        (["sinus"], "sines"),
        (["sines", "--learner", "rtlr"], "rtrl"),
        (["sines", "--mixer", "gru"], "dense_rtrl"),
        (["sines", "--mixer", "attention"], "blocks.0.mixer"),
        (["sines", "--chunk", "0"], "chunk"),
        (["sines", "--mixer-args", "r_min"], "name=value"),
        (["sines", "--stream-args", "evry=3"], "evry"),
        (["sines", "--model-args", "nrom=none"], "nrom"),
        (["--resume", "no-such-run"], "no-such-run"),
        (["sines", "--resume", "a"], "leave out"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(words, said, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(["learn", *words]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_another_run_is_not_replaced(tmp_path):
    learn(SMALL, tmp_path / "run", steps=8)
    with pytest.raises(RunFolderError, match="--resume"):
        learn(SMALL, tmp_path / "run", steps=8)
    with pytest.raises(ConfigError, match="vocab_size"):
        learn(LearnConfig("sines"), tmp_path / "other", steps=8, model=SMALL.make_model(SMALL.make_stream()))


@pytest.mark.parametrize(
    "changes",
    [
        {"mixer": "stranger.payload:Mixer"},
        # an argument may name a mixer too
        {"mixer": "block_state", "mixer_args": {"ssm": "stranger.payload:Mixer"}},
        {"language_model": {"vocab_size": 4, "mixer": "stranger.payload:Mixer"}},
    ],
)
def test_code_of_others_is_not_run(tmp_path, capsys, changes):
    learn(SMALL, tmp_path / "run", steps=8)
    path = tmp_path / "run/config.json"
    stored = json.loads(path.read_text())
    stored["config"] |= changes
    stored.pop("checksum", None)
    path.write_text(json.dumps(stored))
    for words in (["--resume", str(tmp_path / "run")], ["sines", "--init-from", str(tmp_path / "run")]):
        assert run(["learn", *words]) == 2
        assert "--trust-code" in capsys.readouterr().err


def test_a_run_from_another_model_is_resumed(tmp_path):
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    stream = ["learn", "delay-copy", "--stream-args", "delays=(2,)"]
    assert run([*stream, "--steps", "40", "--out", first, "--mixer", "min_gru", "--d-model", "8"]) == 0
    assert run([*stream, "--steps", "40", "--out", second, "--init-from", first]) == 0
    assert stored_config(tmp_path / "second").mixer == "min_gru"
    assert run(["learn", "--resume", second, "--steps", "80"]) == 0


def test_a_language_model_goes_on_learning_and_is_resumed(tmp_path):
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(vocab_size=256, d_model=8, n_layers=2, mixer=("lru", "min_gru")))
    path = tmp_path / "text.txt"
    path.write_bytes(b"to be or not to be, that is the question. " * 8)
    config = LearnConfig(str(path), checkpoint_every=64).continuing(model)
    twin = copy.deepcopy(model)
    learn(config, tmp_path / "whole", steps=128, model=model)
    learn(config, tmp_path / "parts", steps=64, model=twin)
    learn(stored_config(tmp_path / "parts"), tmp_path / "parts", steps=128, resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_a_checkpoint_of_another_run_is_one_line(tmp_path, capsys):
    learn(SMALL, tmp_path / "run", steps=8)
    learn(dataclasses.replace(SMALL, learner="tbptt"), tmp_path / "other", steps=8)
    name = "checkpoint.safetensors"
    (tmp_path / "run" / name).write_bytes((tmp_path / "other" / name).read_bytes())
    assert run(["learn", "--resume", str(tmp_path / "run")]) == 1
    assert capsys.readouterr().err.count("\n") == 1
