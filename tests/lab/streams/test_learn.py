"""`linrec learn`: what it writes, and that a run that ends at any time goes on with the same numbers."""

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


@thorough
def test_a_run_that_is_killed_at_any_time_goes_on_with_the_same_bits(tmp_path):
    words = [
        "learn",
        "delay-copy",
        "--stream-args",
        "every=200",
        "--d-model",
        "8",
        "--steps",
        "4000",
        "--window",
        "100",
    ]
    words += ["--checkpoint-every", "150"]
    assert run([*words, "--out", str(tmp_path / "whole")]) == 0
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    killed, command = tmp_path / "killed", [sys.executable, "-m", "linrec"]
    rest = ["learn", "--resume", str(killed), "--steps", "4000"]
    next_words = [*words, "--out", str(killed)]
    kills = 0
    while kills < 3:
        process = subprocess.Popen([*command, *next_words], env=environment, stderr=subprocess.DEVNULL)
        while not (killed / "checkpoint.safetensors").exists() and process.poll() is None:
            time.sleep(0.05)
        time.sleep(4 + 0.37 * kills)
        if process.poll() is not None:
            break
        process.send_signal(signal.SIGKILL)
        process.wait()
        kills, next_words = kills + 1, rest
    assert kills
    assert run(rest) == 0
    assert_same_run(tmp_path / "whole", killed)


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


def test_code_of_others_is_not_run(tmp_path):
    learn(SMALL, tmp_path / "run", steps=8)
    path = tmp_path / "run/config.json"
    stored = json.loads(path.read_text())
    stored["config"]["mixer"] = "stranger.payload:Mixer"
    stored.pop("checksum", None)
    path.write_text(json.dumps(stored))
    assert run(["learn", "--resume", str(tmp_path / "run")]) == 2
