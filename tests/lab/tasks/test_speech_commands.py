import dataclasses
import json
import math
import os
import wave

import numpy as np
import pytest
import torch

from linrec.lab.tasks import ProbedTask, ScoredTask, Source, Task
from linrec.lab.tasks.audio import mfcc, mu_law
from linrec.lab.tasks.signals import DIGITS, WORDS, Sc09, SpeechCommands
from linrec.lab.train import LoopConfig, TrainConfig, fit, get_recipe
from linrec.lab.train.config import config_from_dict, config_to_dict
from linrec.text import DataError

SECOND = 16_000
# clips of each word: how many train, validate and test, and which of them is short
OF_SPLIT = {"train": 3, "validation": 1, "test": 2}
LISTED = ["train", "test", "train", "validation", "train", "test"]
SHORT, LENGTH = 2, 9_000


def write_wav(path, samples, *, channels=1, width=2, rate=SECOND):
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(samples.astype("<i2").tobytes())


def sound(word, number):
    """The samples of a clip: words differ in loudness, and the beginning is quiet."""
    random = np.random.default_rng([WORDS[35].index(word), number])
    envelope = np.linspace(1, 100 + 10 * WORDS[35].index(word), SECOND)
    samples = (random.standard_normal(SECOND) * envelope).round().astype(np.int64)
    return samples[:LENGTH] if number == SHORT else samples


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("speech_commands_v0.02")
    lists = {"validation": [], "test": []}
    for word in WORDS[35]:
        (path / word).mkdir()
        for number, split in enumerate(LISTED):
            write_wav(path / word / f"{number}_nohash_0.wav", sound(word, number))
            lists.get(split, []).append(f"{word}/{number}_nohash_0.wav")
    (path / "validation_list.txt").write_text("\n".join(lists["validation"]) + "\n")
    (path / "testing_list.txt").write_text("\n".join(lists["test"]) + "\n")
    (path / "_background_noise_").mkdir()
    (path / "_background_noise_" / "running_tap.wav").write_bytes(b"not for this task")
    (path / "README.md").write_text("# Speech Commands Data Set v0.02\n")
    return path


@pytest.fixture
def task(folder, tmp_path):
    return SpeechCommands(path=folder, cache=tmp_path / "kept")


def everything(split):
    return split.rows(torch.arange(len(split)))


def padded(word, number):
    samples = np.zeros(SECOND)
    samples[: len(sound(word, number))] = sound(word, number)
    return samples / 2**15


def normalised(clips, training):
    """What the formula makes of clips, given as (word, number)."""
    known = np.stack([padded(*clip) for clip in training])
    mean, std = known.mean(0), known.std(0)
    return np.stack([(padded(*clip) - mean) / (std + 1e-5) for clip in clips])


def clips_of(name):
    return [(word, n) for word in WORDS[35] for n, split in enumerate(LISTED) if split == name]


def test_35_words_are_split_by_the_lists_padded_and_normalised_at_each_step(task):
    for name in OF_SPLIT:
        batch = everything(task.split(name))
        clips = clips_of(name)
        assert batch.targets.tolist() == [WORDS[35].index(word) for word, _ in clips]
        assert len(clips) == 35 * OF_SPLIT[name] and batch.lengths is batch.reset is None
        assert batch.inputs.shape == (len(clips), SECOND, 1) and batch.inputs.dtype == torch.float32
        expected = normalised(clips[:20], clips_of("train"))
        np.testing.assert_allclose(batch.inputs[:20, :, 0], expected, rtol=1e-4, atol=1e-4)
    # 16 bits a sample until a batch needs it
    assert task.split("train").values.dtype == torch.int16


@pytest.fixture(scope="module")
def ten(tmp_path_factory):
    """Ten words of 20 quiet clips, and one that is too short; no lists."""
    path = tmp_path_factory.mktemp("ten")
    for place, word in enumerate(WORDS[10]):
        (path / word).mkdir()
        for number in range(20 + (place == 0)):
            samples = np.zeros(SECOND - (number == 20))
            samples[:2] = place, number
            write_wav(path / word / f"{number}.wav", samples)
    return path


def test_10_words_are_cut_by_the_seed_without_short_clips_and_without_lists(ten, tmp_path):
    def numbers(seed):
        task = SpeechCommands(path=ten, n_words=10, seed=seed, cache=tmp_path)
        splits = [task.split(name).values[:, :2, 0] for name in OF_SPLIT]
        assert task.words == ("yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go")
        for name, split in zip(OF_SPLIT, splits, strict=True):
            assert torch.equal(task.split(name).labels, split[:, 0].long())
        assert [len(split) for split in splits] == [140, 30, 30]
        for split in splits:
            # the same share of every word
            assert split[:, 0].bincount().tolist() == [len(split) // 10] * 10
        assert len(torch.unique(torch.cat(splits), dim=0)) == 200
        return [split.tolist() for split in splits]

    np.random.seed(5)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    assert numbers(0) == numbers(0) != numbers(1)
    assert torch.equal(before[0], torch.get_rng_state()) and (before[1] == np.random.get_state()[1]).all()


def test_probes_are_the_test_split_at_lower_rates(task):
    assert isinstance(task, ProbedTask) and list(task.probes) == ["8000"]
    whole, half = everything(task.split("test")), everything(task.probes["8000"])
    assert torch.equal(half.inputs, whole.inputs[:, ::2]) and torch.equal(half.targets, whole.targets)
    slow = dataclasses.replace(task, every=3, test_every=(1, 7))
    assert torch.equal(everything(slow.split("train")).inputs, everything(task.split("train")).inputs[:, ::3])
    assert {name: p.values.shape[1] for name, p in slow.probes.items()} == {"16000": 16000, "2286": 2286}


def test_another_version_of_the_reader_reads_again(ten, tmp_path, monkeypatch):
    SpeechCommands(path=ten, n_words=10, cache=tmp_path).prepared()
    older = set(tmp_path.iterdir())
    monkeypatch.setattr(SpeechCommands, "version", SpeechCommands.version + 1)
    SpeechCommands(path=ten, n_words=10, cache=tmp_path).prepared()
    assert len(set(tmp_path.iterdir()) - older) == len(older) == 1


def test_files_are_read_once_and_again_where_one_has_changed(folder, tmp_path):
    def read():
        return SpeechCommands(path=folder, cache=tmp_path / "kept").split("test").values

    first = read()
    clip = folder / "bed" / "1_nohash_0.wav"
    content, about = clip.read_bytes(), clip.stat()
    try:
        write_wav(clip, np.full(SECOND, 7))
        # as if nothing had happened
        os.utime(clip, ns=(about.st_atime_ns, about.st_mtime_ns))
        assert torch.equal(read(), first)
        os.utime(clip, ns=(about.st_atime_ns, about.st_mtime_ns + 10))
        changed = read()
        assert (changed[2] == 7).all() and torch.equal(changed[3:], first[3:])
    finally:
        clip.write_bytes(content)
        os.utime(clip, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert len(list((tmp_path / "kept").glob("speechcommands-*.safetensors"))) == 2


def test_it_is_a_task_and_says_what_needs_no_model(task):
    checked: Task = task
    source: Source = checked.split("test")
    assert isinstance(task, ScoredTask) and len(source) == 70 and task.prepared() is task
    assert (task.vocab_size, task.n_features, task.n_outputs, task.chance) == (None, 1, 35, 1 / 35)
    assert task.trivial_score == pytest.approx(1 / 35)
    assert task.score(task.split("test").labels, task.split("test"))["accuracy"] == 1
    assert source.of_epoch(seed=1, epoch=2) is source
    assert source.to("meta").rows(torch.tensor([3])).inputs.device.type == "meta"


@pytest.fixture
def broken(folder, tmp_path):
    """A folder with the same files, of which single ones can be put in other places."""
    path = tmp_path / "broken"
    path.mkdir()
    for entry in folder.iterdir():
        (path / entry.name).symlink_to(entry)
    (path / "bed").unlink()
    (path / "bed").mkdir()
    for entry in (folder / "bed").iterdir():
        (path / "bed" / entry.name).symlink_to(entry)
    return path


def replaced(name, write):
    def damage(path):
        (path / name).unlink()
        write(path / name)

    return damage


def cut_off(name, n):
    def damage(path):
        content = (path / name).read_bytes()
        (path / name).unlink()
        (path / name).write_bytes(content[:-n])

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda p: (p / "zero").unlink(),
            "must have a folder for each of 35 words; the folder 'zero' cannot be",
        ),
        (
            lambda p: (p / "zero").unlink(),
            r"Download http://.*speech_commands_v0.02.tar.gz, .* --data.path\.",
        ),
        (replaced("zero", lambda p: p.mkdir()), "zero has no wav files. Download http"),
        (lambda p: (p / "testing_list.txt").unlink(), "testing_list.txt cannot be read: No such file"),
        (
            replaced("testing_list.txt", lambda p: p.touch()),
            "has 0 names, of which 0 do not exist, such as none",
        ),
        (
            lambda p: (p / "bed" / "5_nohash_0.wav").unlink(),
            "has 70 names, of which 1 do not exist, such as bed/5_nohash_0.wav",
        ),
        (
            replaced("bed/0_nohash_0.wav", lambda p: p.write_bytes(b"RIFF")),
            "is not a wav file, or it is damaged: it ends too soon",
        ),
        (replaced("bed/0_nohash_0.wav", lambda p: p.write_bytes(bytes(99))), "damaged: file does not start"),
        (cut_off("bed/0_nohash_0.wav", 999), "have 32000 bytes of samples; it has 31001. It is truncated"),
        (
            replaced("bed/0_nohash_0.wav", lambda p: write_wav(p, np.zeros(9), rate=8000)),
            "must have 1 channel of 16 bits at 16000 Hz; it has 1 of 16 bits at 8000 Hz",
        ),
        (
            replaced("bed/0_nohash_0.wav", lambda p: write_wav(p, np.zeros(8), channels=2)),
            "it has 2 of 16 bits",
        ),
        (
            replaced("bed/0_nohash_0.wav", lambda p: write_wav(p, np.zeros(SECOND + 1))),
            "must have at most 16000 samples, a second; it has 16001",
        ),
    ],
)
def test_folders_that_cannot_be_used_are_refused_in_one_line(broken, tmp_path, damage, message):
    damage(broken)
    with pytest.raises(DataError, match=message) as caught:
        SpeechCommands(path=broken, cache=tmp_path / "kept").prepared()
    assert "\n" not in str(caught.value)


def test_missing_folders_and_fields_out_of_range_are_refused(folder, tmp_path):
    with pytest.raises(DataError, match=r"got None. Download http://download.tensorflow.org/.*--data.path"):
        SpeechCommands().prepared()
    with pytest.raises(DataError, match=r"README\.md is not a folder"):
        SpeechCommands(path=folder / "README.md").prepared()
    with pytest.raises(DataError, match="has no clip for the split 'validation'"):
        SpeechCommands(path=folder, n_words=10, cache=tmp_path).prepared()
    with pytest.raises(ValueError, match="`n_words` must be 10 or 35; got 12"):
        SpeechCommands(n_words=12)
    with pytest.raises(ValueError, match="`every` must be at least 1; got 0"):
        SpeechCommands(every=0)
    with pytest.raises(ValueError, match=r"`test_every` must have factors of at least 1; got \(2, 0\)"):
        SpeechCommands(test_every=(2, 0))


def test_the_recipe_trains_and_survives_json(ten, tmp_path):
    recipe = get_recipe("speech-commands")
    assert config_from_dict(json.loads(json.dumps(config_to_dict(recipe)))) == recipe
    assert recipe.model.bidirectional and recipe.model.n_outputs == 35
    task = SpeechCommands(path=ten, n_words=10, every=400, test_every=(800,), cache=tmp_path / "kept")
    model = dataclasses.replace(recipe.model, d_model=4, mixer_args={"d_state": 4}, n_layers=1)
    loop = LoopConfig(device="cpu", batch_size=20, steps=2)
    result = fit(TrainConfig("tiny", task, model, loop=loop), tmp_path / "run")
    assert 0 <= result.test["accuracy"] <= 1 and result.probes.keys() == {"20"}


def mel(frequency):
    return 2595 * math.log10(1 + frequency / 700)


def written_out(x, window):
    """The coefficients of the window that is centred on sample 100 * window, by the definition."""
    places = range(100 * window - 100, 100 * window + 100)
    reflected = [x[abs(p)] if p < len(x) else x[2 * (len(x) - 1) - p] for p in places]
    weighted = np.array(reflected) * (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(200) / 200))
    i, f = np.arange(200), np.arange(101)[:, None]
    power = np.abs((weighted * np.exp(-2j * np.pi * f * i / 200)).sum(1)) ** 2
    # corners of the triangles in hertz
    corners = [700 * (10 ** (mel(8000) * n / 65 / 2595) - 1) for n in range(66)]
    logs = []
    for low, centre, high in zip(corners[:-2], corners[1:-1], corners[2:], strict=True):
        weights = [
            max(0.0, min((h - low) / (centre - low), (high - h) / (high - centre)))
            for h in 80.0 * np.arange(101)
        ]
        logs.append(math.log(float(np.dot(weights, power)) + 1e-6))
    cosines = [[math.cos(math.pi * (m + 0.5) * k / 64) for m in range(64)] for k in range(20)]
    scale = [math.sqrt((1 if k == 0 else 2) / 64) for k in range(20)]
    return np.array(scale) * (np.array(cosines) @ np.array(logs))


def test_coefficients_are_those_of_the_definition():
    x = np.random.default_rng(0).standard_normal((2, 1050)) / 4
    found = mfcc(torch.from_numpy(x), rate=SECOND)
    assert found.shape == (2, 11, 20)
    for row in range(2):
        for window in (0, 1, 5, 10):
            np.testing.assert_allclose(found[row, window], written_out(x[row], window), rtol=1e-9, atol=1e-9)


def test_the_coefficients_of_clips_are_normalised_by_the_training_split(ten, tmp_path):
    task = SpeechCommands(path=ten, n_words=10, mfcc=True, cache=tmp_path)
    assert (task.n_features, task.probes) == (20, {})
    raw = SpeechCommands(path=ten, n_words=10, cache=tmp_path)
    batch = everything(task.split("test"))
    assert batch.inputs.shape == (30, 161, 20)
    assert torch.equal(batch.targets, everything(raw.split("test")).targets)
    clips = {name: mfcc(raw.split(name).values[..., 0] / 2**15, rate=SECOND) for name in ("train", "test")}
    mean, std = clips["train"].mean((0, 1)), clips["train"].flatten(0, 1).std(0, correction=0)
    torch.testing.assert_close(batch.inputs, (clips["test"] - mean) / (std + 1e-5), rtol=1e-3, atol=1e-3)
    with pytest.raises(ValueError, match="`mfcc` needs `every` = 1; got 2"):
        SpeechCommands(mfcc=True, every=2)


def test_digits_are_predicted_sample_by_sample(folder, tmp_path):
    task: Task = Sc09(path=folder, cache=tmp_path)
    assert not isinstance(task, ScoredTask) and task.words == DIGITS
    for name in OF_SPLIT:
        batch = everything(task.split(name))
        clips = [(word, n) for word in DIGITS for n, split in enumerate(LISTED) if split == name]
        assert batch.targets.shape == (len(clips), SECOND)
        for row, clip in zip(batch.targets[:3], clips, strict=False):
            x = padded(*clip)
            scaled = np.sign(x) * np.log(1 + 255 * np.abs(x)) / np.log(256)
            # within rounding at the edges of the levels
            assert np.abs(row.numpy() - np.floor((scaled + 1) / 2 * 255 + 0.5)).sum() <= 2
        assert batch.inputs[:, 0].eq(256).all() and torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])
    assert mu_law(torch.tensor([-1.0, 1.0])).tolist() == [0, 255]
    # short clips are padded with silence, which is level 128
    assert 0 < task.trivial_score < 0.5
    short = Sc09(path=folder, cache=tmp_path, length=20).split("test")
    assert torch.equal(short.values, task.split("test").values[:, :20])
    with pytest.raises(ValueError, match="`length` must be at most 16000, a second; got 16001"):
        Sc09(length=SECOND + 1)
    recipe = get_recipe("sc09")
    assert config_from_dict(json.loads(json.dumps(config_to_dict(recipe)))) == recipe
