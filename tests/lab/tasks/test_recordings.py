import dataclasses
import json
import math
import wave

import numpy as np
import pytest
import torch

from linrec.lab.tasks import Task, judged_by
from linrec.lab.tasks.audio import from_mu_law, mu_law, read_wav, write_wav
from linrec.lab.tasks.recordings import Recordings
from linrec.lab.train import fit, get_recipe, load_run
from linrec.lab.train.config import config_from_dict, config_to_dict
from linrec.testing import assert_agree
from linrec.text import DataError

RATE, LENGTH = 800, 32


def write(path, samples, *, rate=RATE, width=2, channels=1):
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(np.asarray(samples, "<i2").tobytes())


def sound(number, n):
    return (9000 * np.sin(np.arange(n) * (0.2 + 0.05 * number))).astype(np.int16)


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "sounds"
    (folder / "more").mkdir(parents=True)
    write(folder / "a.wav", sound(0, 10 * LENGTH + 5))
    both = np.stack([sound(1, 6 * LENGTH), sound(2, 6 * LENGTH)], 1)
    write(folder / "b.WAV", both, channels=2)
    write(folder / "more/c.wav", sound(3, 4 * LENGTH))
    return folder


def test_pieces_of_all_files_in_order(folder):
    task: Task = Recordings(path=folder, length=LENGTH, validation_share=0.1, test_share=0.2)
    means = (sound(1, 6 * LENGTH).astype(float) + sound(2, 6 * LENGTH)) / 2
    whole = np.concatenate([sound(0, 10 * LENGTH), means, sound(3, 4 * LENGTH)]) / 2**15
    expected = mu_law(torch.from_numpy(whole)).reshape(20, LENGTH)
    splits = [task.split(name) for name in ("train", "validation", "test")]
    assert [len(split) for split in splits] == [14, 2, 4] and judged_by(task) == "perplexity"
    batch = splits[2].rows(torch.tensor([3, 0]))
    assert_agree(batch.targets, expected[[19, 16]].long())
    assert_agree(batch.inputs[:, 1:], batch.targets[:, :-1])
    assert batch.inputs[:, 0].tolist() == [256, 256]
    assert torch.equal(torch.cat([split.values for split in splits]), expected)
    majority = splits[0].values.flatten().bincount().argmax()
    assert task.trivial_score == pytest.approx((splits[2].values == majority).double().mean().item())


def test_the_mu_law_is_inverted_up_to_its_steps():
    values = torch.arange(256)
    assert torch.equal(mu_law(from_mu_law(values)).long(), values)
    x = torch.linspace(-1, 1, 501, dtype=torch.float64)
    # half a step on the scale of logarithms
    error = (from_mu_law(mu_law(x)) - x).abs()
    assert (error <= (x.abs() + 1 / 255) * (256 ** (1 / 255) - 1)).all()


def test_a_file_that_is_written_is_read(tmp_path):
    x = torch.tensor([0.0, 0.5, -1.0, 1.0])
    write_wav(tmp_path / "x.wav", x, rate=123)
    samples, rate = read_wav(tmp_path / "x.wav")
    assert rate == 123 and samples.tolist() == [[0], [16384], [-32767], [32767]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda folder: write(folder / "d.wav", [0, 0], width=1),
            r"d.wav must have samples of 16 bits; it has 8",
        ),
        (
            lambda folder: write(folder / "d.wav", sound(0, 99), rate=44),
            r"of one rate; it has \[44, 800\] Hz",
        ),
        (lambda folder: (folder / "d.wav").write_bytes(b"no sound"), r"d.wav is not a wav file"),
        (
            lambda folder: (folder / "a.wav").write_bytes((folder / "a.wav").read_bytes()[:-9]),
            r"a.wav must have 650 bytes of samples; it has 641. It is truncated",
        ),
    ],
)
def test_other_files_are_refused(folder, change, message):
    change(folder)
    with pytest.raises(DataError, match=message):
        Recordings(path=folder, length=LENGTH).prepared()


def test_few_pieces_and_shares_out_of_range_are_refused(folder, tmp_path):
    with pytest.raises(DataError, match="has 2 pieces of 192 samples, too few"):
        Recordings(path=folder, length=6 * LENGTH).prepared()
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="must have wav files in it or below it; it has none"):
        Recordings(path=tmp_path / "empty").prepared()
    with pytest.raises(ValueError, match=r"above 0, below 1 together; got \(0.5, 0.5\)"):
        Recordings(validation_share=0.5, test_share=0.5)


def tiny(folder):
    """The recipe with two blocks in each of its three tiers."""
    recipe = get_recipe("recordings")
    assert config_from_dict(json.loads(json.dumps(config_to_dict(recipe)))) == recipe
    model = dataclasses.replace(recipe.model, d_model=8, d_channel_mixing=8, n_layers=6)
    model = dataclasses.replace(model, mixer_args={**model.mixer_args, "d_state": 8})
    loop = dataclasses.replace(
        recipe.loop, device="cpu", precision="32-true", batch_size=7, steps=60, log_every=20
    )
    optim = dataclasses.replace(recipe.optim, lr=0.03, warmup_steps=2)
    task = Recordings(path=folder, length=LENGTH)
    return dataclasses.replace(recipe, task=task, model=model, optim=optim, loop=loop)


def test_the_recipe_trains(folder, tmp_path):
    fit(tiny(folder), tmp_path / "run")
    losses = [record["loss"] for record in load_run(tmp_path / "run").metrics if record["split"] == "train"]
    assert losses[-1] < 0.8 * losses[0] < math.log(257)
