"""The examples run, say what they say, and stay short."""

import datetime
import json
import random
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient

from linrec.generation import generate
from linrec.hf import to_hugging_face
from linrec.hf.tokenizer import fast_tokenizer, make_room
from linrec.lab.tasks import LanguageModeling
from linrec.lab.tasks.audio import read_wav, write_wav
from linrec.lab.tasks.ett import SERIES
from linrec.lab.tasks.recordings import Recordings
from linrec.lab.train import LoopConfig, TrainConfig, fit
from linrec.models import LanguageModel, ModelConfig
from linrec.text import ByteTokenizer
from tests.tiers import thorough

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
MAX_LINES = 80


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run an example as its reader does, in a folder of its own; returns what it printed."""

    def run(name: str, *arguments: str) -> str:
        (path,) = (example for example in EXAMPLES if example.stem == name)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [str(path), *arguments])
        # the examples seed the global generators, which other tests may rely on
        before = torch.get_rng_state(), random.getstate()
        try:
            runpy.run_path(str(path), run_name="__main__")
        finally:
            torch.set_rng_state(before[0])
            random.setstate(before[1])
        return capsys.readouterr().out

    return run


def test_every_example_is_tested_here():
    tested = {
        "audio",
        "distillation",
        "forecasting",
        "hugging_face",
        "online_approximation",
        "own_mixer",
        "ray_serve",
        "streaming",
        "time_parallel",
        "token_mixing_matrix",
        "train_in_forty_lines",
    }
    assert {path.stem for path in EXAMPLES} == tested


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_short_and_tell_how_to_run_them(path):
    text = path.read_text()
    assert len(text.splitlines()) < MAX_LINES
    assert f"python examples/{path.name}" in text


def test_streaming(run):
    # the comparisons are assertions inside the example
    out = run("streaming")
    assert out.count("largest difference") == 3
    assert "64 complex numbers per sequence" in out


def test_own_mixer(run):
    out = run("own_mixer")
    assert "MovingAverage obeys the laws" in out
    assert "Centred breaks a law" in out


def test_token_mixing_matrix(run, tmp_path):
    out = run("token_mixing_matrix")
    # a fixed decay never forgets all; forgetting at step 45 leaves what comes from there on
    assert [line.split("hears back to ")[1] for line in out.splitlines()[:3]] == [
        "step 0",
        "step 45",
        "step 45",
    ]
    assert (tmp_path / "runs/token_mixing_matrix.png").read_bytes().startswith(b"\x89PNG")


@thorough
def test_online_approximation(run, tmp_path):
    out = run("online_approximation")
    errors = [float(line.split("error ")[1].split()[0]) for line in out.splitlines()[:4]]
    # the whole past, a window by polynomials, one by waves that jump where its ends differ, a fading past
    assert max(errors) < 0.15 and errors[1] < 0.005
    assert out.count("from 64 numbers") == 4
    assert (tmp_path / "runs/online_approximation.png").read_bytes().startswith(b"\x89PNG")


def test_audio(run, tmp_path):
    (tmp_path / "sounds").mkdir()
    write_wav(tmp_path / "sounds/rose.wav", torch.linspace(0, 400, 16 * 64).sin() / 2, rate=16_000)
    model = ModelConfig(vocab_size=1, mixer="s4d", d_model=8, n_layers=2, pool=(4,))
    task = Recordings(path=tmp_path / "sounds", length=64)
    loop = LoopConfig(steps=4, batch_size=8, device="cpu")
    fit(TrainConfig("rose", task, model, loop=loop), tmp_path / "runs/rose")
    files = run("audio", "runs/rose", "40").splitlines()
    sounds = [read_wav(tmp_path / file) for file in files]
    assert [(len(samples), rate) for samples, rate in sounds] == [(40, 16_000)] * 4
    assert not any(np.array_equal(sounds[0][0], samples) for samples, _ in sounds[1:])


@thorough
def test_distillation(run, tmp_path):
    text = tmp_path / "rose.txt"
    text.write_text("".join(f"a rose is {'a rose is ' * (n % 3)}a rose\n" for n in range(200)))
    task = LanguageModeling(path=text, tokenizer="characters", length=16, cache=tmp_path / "tokens")
    # without a short convolution, all memory is the filters'
    filters = {"length": 16, "conv_size": None, "d_filter": 8, "omega": 3.0}
    model = ModelConfig(vocab_size=1, mixer="hyena", mixer_args=filters, d_model=16, n_layers=1)
    loop = LoopConfig(steps=100, batch_size=16, device="cpu")
    fit(TrainConfig("rose", task, model, loop=loop), tmp_path / "runs/rose")
    out = run("distillation", "runs/rose", "6")
    found = json.loads((tmp_path / "runs/rose/extra-distillation.json").read_text())
    forgetful, fitted, exact = found["copies"]
    for copy in found["copies"]:
        assert copy["loss"] == pytest.approx(copy["loss_at_once"], rel=1e-5)
        assert f"loss {copy['loss']:.4f}, {100 * (copy['ratio'] - 1):+.2f}%" in out
    assert forgetful["ratio"] > 1.05 and forgetful["filter_error"] == pytest.approx(1)
    assert abs(fitted["ratio"] - 1) < 0.01 and fitted["filter_error"] < 0.2
    assert exact["ratio"] == pytest.approx(1, rel=1e-5) and exact["filter_error"] < 1e-4


@thorough
def test_forecasting(run, tmp_path):
    # two periods of a day each, and noise
    step = np.arange(20 * 30 * 24)
    waves = np.sin(step[:, None] * 2 * np.pi / 24 * np.arange(1, 8) / 3)
    noise = np.random.default_rng(0).normal(size=waves.shape)
    start = datetime.datetime(2016, 7, 1)
    lines = [",".join(["date", *SERIES])]
    for n, row in enumerate(waves + 0.1 * noise):
        lines.append(",".join([str(start + datetime.timedelta(hours=n)), *(f"{x:.4f}" for x in row)]))
    (tmp_path / "ETTh1.csv").write_text("\n".join(lines) + "\n")
    out = run("forecasting", "ETTh1.csv", "30")
    forecast, repeated = (float(part.split()[-1]) for part in out.splitlines()[-1].split(";"))
    assert forecast < 0.5 * repeated


@pytest.mark.thorough
def test_hugging_face(run):
    for package in ("transformers", "peft", "lm_eval"):
        pytest.importorskip(package)
    out = run("hugging_face")
    assert "roses acc,none 1.0000" in re.sub(" +", " ", out)
    assert "\na rose is a rose is a\n" in out and "trainable params" in out


@pytest.mark.thorough
def test_ray_serve(tmp_path):
    # the application of a replica; Ray itself is not installed
    torch.manual_seed(0)
    model, tokenizer = LanguageModel(ModelConfig(vocab_size=256, d_model=16)).eval(), ByteTokenizer()
    published, spelled = to_hugging_face(model), fast_tokenizer(tokenizer)
    make_room(published, spelled)
    for part in (published, spelled):
        part.save_pretrained(tmp_path / "folder")
    (path,) = (example for example in EXAMPLES if example.stem == "ray_serve")
    replica = runpy.run_path(str(path))["replica"]
    body = {"model": "folder", "prompt": "a rose", "max_tokens": 8, "temperature": 0}
    with TestClient(replica(tmp_path / "folder", slots=2)) as client:
        answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    alone, _ = generate(model, torch.tensor([list(b"a rose")]), n_tokens=8, temperature=0)
    assert answer.json()["choices"][0]["text"] == tokenizer.decode(alone[0].tolist())


def test_train_in_forty_lines(run):
    out = run("train_in_forty_lines")
    losses = [float(line.split()[-1]) for line in out.splitlines() if line.startswith("step")]
    assert losses[-1] < 0.7 * losses[0]
    (scores,) = (line for line in out.splitlines() if line.startswith("test accuracy"))
    accuracy, trivial = float(scores.split()[2].rstrip(";")), float(scores.split()[-1])
    assert accuracy > 1.5 * trivial


def test_time_parallel(run):
    # with two processes it runs in tests/parallel
    out = run("time_parallel")
    assert "4096 tokens of one sequence, 1 x" in out
    in_one, in_parts = (line.split()[-3] for line in out.splitlines() if "tokens/s" in line)
    assert in_one == in_parts
    assert "sent by each process: 0 bytes" in out
