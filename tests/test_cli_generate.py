"""`linrec generate`, on runs of a few steps."""

import dataclasses
import io
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

from linrec.cli import main
from linrec.generation import generate, save_state
from linrec.lab.tasks import LanguageModeling, MemoryHorizon
from linrec.lab.train import LoopConfig, TrainConfig, fit, load_run
from linrec.lab.train.checkpoint import load_checkpoint, save_checkpoint
from linrec.models import ModelConfig
from linrec.text import ByteTokenizer, CharacterTokenizer, Tokenizer

TEXT = "a rose is a rose is a rosé — € — "


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs called "bytes", "characters" and "horizon"."""
    folder = tmp_path_factory.mktemp("generate")
    (folder / "text.txt").write_text(TEXT * 10)
    bytes_task = LanguageModeling(path=folder / "text.txt", length=16, cache=folder / "cache")
    tasks = {
        "bytes": bytes_task,
        "characters": dataclasses.replace(bytes_task, tokenizer="characters"),
        "horizon": MemoryHorizon(length=8, n_resets=1, n_samples=20, n_validation=4, n_test=4),
    }
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for name, task in tasks.items():
        model = ModelConfig(vocab_size=1, d_model=8, n_layers=1, mixer="hgru")
        loop = LoopConfig(steps=2, batch_size=2, device="cpu")
        fit(TrainConfig(name, task, model, loop=loop), folder / name)
    torch.set_num_threads(threads)
    return folder


@pytest.fixture(autouse=True)
def here(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in an empty folder where the runs can be found."""
    monkeypatch.chdir(tmp_path)
    for run in runs.iterdir():
        if run.is_dir():
            (tmp_path / run.name).symlink_to(run)


def generated(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, str]:
    """What a command that works writes, without the newline at the end, and what it says."""
    assert main(["generate", *words]) == 0
    said = capsys.readouterr()
    assert said.out.endswith("\n")
    return said.out[:-1], said.err


def expected(name: str, tokenizer: Tokenizer, prompt: str, n_tokens: int, **options: object) -> str:
    tokens = torch.from_numpy(tokenizer.encode(prompt).astype("int64"))[None]
    found, _ = generate(load_run(name).model(), tokens, n_tokens=n_tokens, **options)
    listed = found[0].tolist()
    if tokenizer.end_of_document in listed:
        listed = listed[: listed.index(tokenizer.end_of_document)]
    return tokenizer.decode(listed)


def test_it_writes_what_the_model_generates(capsys: pytest.CaptureFixture[str]) -> None:
    out, said = generated(
        capsys,
        *("bytes", "--prompt", "a rosé", "--tokens", "30", "--temperature", "0.7", "--top-k", "20"),
        *("--top-p", "0.9", "--seed", "3"),
    )
    assert out == expected(
        "bytes", ByteTokenizer(), "a rosé", 30, temperature=0.7, top_k=20, top_p=0.9, seed=3
    )
    # 8 complex numbers in one layer
    assert said.startswith("prompt: 7 tokens (") and said.endswith(" tokens/s); state: 64 bytes\n")
    assert "; generated: 30 tokens (" in said and said.count("\n") == 1


def test_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["characters", "--prompt", "a rose", "--tokens", "30"]
    one, again, other = (generated(capsys, *words, "--seed", seed)[0] for seed in ("1", "1", "2"))
    assert one == again != other and len(one) == 30


def test_prompts_from_files_and_from_standard_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("prompt").write_text("a rosé\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("a rosé\n".encode())))
    for source in (["--prompt-file", "prompt"], ["--prompt", "-"]):
        out, _ = generated(capsys, "bytes", *source, "--tokens", "20")
        assert out == expected("bytes", ByteTokenizer(), "a rosé\n", 20)


def test_a_prompt_longer_than_training_is_read_whole(capsys: pytest.CaptureFixture[str]) -> None:
    prompt = "a rose is a rose is a rose"
    out, said = generated(capsys, "bytes", "--prompt", prompt, "--tokens", "20")
    assert out == expected("bytes", ByteTokenizer(), prompt, 20)
    note = "linrec: the prompt has 26 tokens, more than the 16 of a training sequence; all tokens are used.\n"
    assert said.startswith(note)


def test_a_saved_state_goes_on_as_if_it_had_not_stopped(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["characters", "--seed", "5"]
    whole, _ = generated(capsys, *words, "--prompt", "a rose", "--tokens", "40")
    pieces = [generated(capsys, *words, "--prompt", "a rose", "--tokens", "15", "--save-state", "state")[0]]
    pieces += [generated(capsys, *words, "--tokens", "25", "--load-state", "state")[0]]
    assert pieces[0] + pieces[1] == whole
    # or the prompt comes in pieces
    generated(capsys, *words, "--prompt", "a r", "--tokens", "0", "--save-state", "state")
    rest = generated(capsys, *words, "--prompt", "ose", "--tokens", "40", "--load-state", "state")[0]
    assert rest == whole


def with_bias(name: str, token: int) -> Path:
    """A copy of a run whose model prefers a token by far."""
    copy = Path(f"{name}-{token}")
    shutil.copytree(name, copy)
    checkpoint = load_checkpoint(copy)
    assert checkpoint is not None
    checkpoint.tensors["model.head.bias"][token] += 100
    save_checkpoint(copy, checkpoint)
    return copy


def test_the_end_of_a_document_ends_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    out, said = generated(capsys, str(with_bias("bytes", 256)), "--prompt", "a rose")
    assert out == "" and "generated: 1 token (" in said


def test_without_a_prompt_a_document_begins(capsys: pytest.CaptureFixture[str]) -> None:
    out, said = generated(capsys, "bytes", "--tokens", "9", "--temperature", "0")
    found, _ = generate(load_run("bytes").model(), torch.tensor([[256]]), n_tokens=9, temperature=0)
    assert out == ByteTokenizer().decode(found[0].tolist())
    assert said.startswith("prompt: 1 token; generated: 9 tokens (")


def test_padding_of_the_vocabulary_is_not_text(capsys: pytest.CaptureFixture[str]) -> None:
    run = with_bias("bytes", 256)
    tokenizer = CharacterTokenizer("".join(map(chr, range(32, 127))))
    tokenizer.save(run)
    stored = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(stored | {"tokenizer": tokenizer.fingerprint}))
    out, _ = generated(capsys, str(run), "--prompt", "a rose", "--tokens", "50")
    assert len(out) == 50


def test_text_arrives_while_it_is_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[str] = []

    class Terminal(io.StringIO):
        def write(self, text: str) -> int:
            writes.append(text)
            return len(text)

    monkeypatch.setattr(sys, "stdout", Terminal())
    # the first byte of "é", again and again: what is no character yet is held back
    assert main(["generate", str(with_bias("bytes", 0xC3)), "--prompt", "a", "--tokens", "3"]) == 0
    assert writes == ["", "", "", "\ufffd" * 3 + "\n"]
    writes.clear()
    assert main(["generate", str(with_bias("bytes", 0x61)), "--prompt", "a", "--tokens", "3"]) == 0
    assert writes == ["a", "a", "a", "\n"]


def test_a_full_disk_is_no_mistake(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    words = ["generate", "bytes", "--prompt", "a", "--tokens", "2", "--save-state", "state"]
    assert main(words) == 1
    assert capsys.readouterr().err == "linrec: could not write state: No space left on device.\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "there is no run folder nowhere"),
        ([], "RUN"),
        (["bytes", "--temprature", "1"], "there is no option --temprature; did you mean --temperature?"),
        (["bytes", "--temperature", "-1"], "`temperature` must be at least 0 and finite; got -1.0."),
        (["bytes", "--top-k", "0"], "`top_k` must be at least 1, or None for all tokens; got 0."),
        (["bytes", "--top-p", "0"], "`top_p` must be in (0, 1], or None for all tokens; got 0.0."),
        (["bytes", "--top-p", "1.5"], "`top_p` must be in (0, 1], or None for all tokens; got 1.5."),
        (["bytes", "--seed", "-1"], "`seed` must be in 0 .. 2^64 - 1; got -1."),
        (["bytes", "--tokens", "-1"], "--tokens must be at least 0; got -1."),
        (["bytes", "--prompt", "a", "--prompt-file", "b"], "--prompt and --prompt-file exclude each other"),
        (["bytes", "--prompt-file", "b"], "the prompt b cannot be read: No such file or directory."),
        (["bytes", "--prompt-file", "latin"], "the prompt latin is not UTF-8: byte 3 is invalid."),
        (["bytes", "--save-state", "no/state"], "--save-state no/state: there is no folder no."),
        (["bytes", "--load-state", "no"], "the state no cannot be read: No such file or directory."),
        (["bytes", "--load-state", "latin"], "latin is not a state file"),
        (["bytes", "--load-state", "other"], "other was saved by another model"),
        (["bytes", "--load-state", "three"], "`state` must have as many sequences as `tokens`, 1; got 3."),
        (["horizon", "--prompt", "a"], "horizon is not a language model: it was trained on MemoryHorizon"),
        (["characters", "--prompt", "a Rose"], "the character 'R' (U+0052) is not among the"),
        (["characters"], "the prompt is empty, and the tokenizer 'characters' has no end-of-document token"),
        (["large"], "the tokenizer in large has 2,000 tokens, but its model has 257"),
        (["swapped"], "Restore the tokenizer that the run was trained with."),
        (["untokenised"], "there is no tokenizer in untokenised: it has no tokenizer.json."),
        (["unsaved"], "unsaved has no checkpoint yet; train it until its first checkpoint."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_answered_in_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("latin").write_bytes("rosé".encode("latin-1"))
    for name, batch in (("characters", 1), ("bytes", 3)):
        model = load_run(name).model()
        state = generate(model, torch.zeros(batch, 2, dtype=torch.int64), n_tokens=1).state
        save_state("other" if name == "characters" else "three", state, model)
    for name, gone, tokens in (
        ("large", "", 2000),
        ("swapped", "", 257),
        ("untokenised", "tokenizer.json", 0),
        ("unsaved", "checkpoint.safetensors", 0),
    ):
        if name in words:
            shutil.copytree("bytes", name)
            if gone:
                (Path(name) / gone).unlink()
            else:
                CharacterTokenizer("".join(map(chr, range(0x4000, 0x4000 + tokens)))).save(Path(name))
    assert main(["generate", *words]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("linrec: ") and said.err.count("\n") == 1 and not said.out
    assert message in said.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is such a device")
def test_a_device_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "bytes", "--device", "cuda"]) == 2
    assert "there is no cuda device here; pass --device cpu, or auto" in capsys.readouterr().err


def test_help_fits_into_half_a_screen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["generate", "--help"]) == 0
    said = capsys.readouterr()
    assert "usage: linrec generate" in said.out and "--load-state" in said.out and not said.err


def test_several_samples_are_those_of_their_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bytes", "--prompt", "a rose", "--tokens", "5", "--device", "cpu"]
    apart = [generated(capsys, *words, "--seed", str(seed))[0] for seed in (3, 4)]
    text, said = generated(capsys, *words, "--seed", "3", "--samples", "2")
    assert text == f"--- seed 3 ---\n{apart[0]}\n--- seed 4 ---\n{apart[1]}"
    assert "generated: 10 tokens" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--samples", "0"], "--samples must be at least 1; got 0."),
        (["--samples", "2", "--save-state", "s"], "--save-state saves the state of a single text"),
    ],
)
def test_samples_that_cannot_be_had(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "bytes", *words]) == 2
    assert message in capsys.readouterr().err
