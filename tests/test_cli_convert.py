"""`linrec convert` and `linrec train --init-from`, on a small random Mamba."""

from pathlib import Path

import pytest
import torch

from linrec.cli import main
from linrec.convert import from_hugging_face
from linrec.lab.train import load_run
from linrec.text import ByteTokenizer
from tests.tiers import thorough

transformers = pytest.importorskip("transformers", reason='the extra "text" is not installed')

TRAIN = [
    *("train", "lm", "--data.path", "rose.txt", "--data.length", "8", "--data.cache", "cache"),
    *("--loop.steps", "1", "--loop.batch-size", "2", "--loop.device", "cpu", "--optim.warmup-steps", "0"),
]
# a step that moves nothing
STILL = ["--optim.lr", "1e-12", "--optim.min-lr", "0", "--optim.weight-decay", "0"]


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rose.txt").write_text("a rose is a rose " * 20)
    config = transformers.MambaConfig(vocab_size=260, hidden_size=8, num_hidden_layers=1, state_size=2)
    torch.manual_seed(0)
    transformers.MambaForCausalLM(config).save_pretrained("checkpoint")
    ByteTokenizer().save(tmp_path)
    return Path("checkpoint")


def complaint(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(words) == 2
    said = capsys.readouterr().err
    # what is said while a text is tokenised comes before
    assert said.splitlines()[-1].startswith("linrec: ") and "Traceback" not in said, said
    return said


def same(ours: torch.nn.Module, theirs: torch.nn.Module) -> bool:
    theirs_by_name = theirs.state_dict()
    return all(torch.allclose(x, theirs_by_name[n], atol=1e-6) for n, x in ours.state_dict().items())


@thorough
def test_a_converted_checkpoint_is_a_run(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(checkpoint), "--out", "run", "--tokenizer", "bytes"]) == 0
    assert capsys.readouterr().out.endswith("parameters; all in run\n")
    run = load_run("run")
    assert same(run.model(), from_hugging_face(checkpoint))
    assert run.about["command"].endswith("linrec convert checkpoint --out run --tokenizer bytes")
    assert main(["generate", "run", "--prompt", "a rose", "--tokens", "3", "--device", "cpu"]) == 0
    assert main(["eval", "run", "--data", "rose.txt", "--lengths", "8", "--device", "cpu"]) == 0
    assert main(["inspect", "run", "--prompt", "a rose", "--no-matrices", "--device", "cpu"]) == 0


def test_a_run_is_converted_back(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(checkpoint), "--out", "run", "--tokenizer", "bytes"]) == 0
    assert main([*TRAIN, "--init-from", "run", "--out", "moved"]) == 0
    assert main(["convert", "moved", "--out", "back", "--like", str(checkpoint)]) == 0
    theirs = transformers.MambaForCausalLM.from_pretrained("back").eval()
    tokens = torch.arange(9)[None]
    expected = load_run("moved").model()(tokens)[0]
    torch.testing.assert_close(theirs(tokens).logits, expected, rtol=1e-4, atol=1e-4)
    assert (Path("back") / "config.json").read_text() == (checkpoint / "config.json").read_text()
    back = ["convert", "moved", "--out"]
    assert "already exists" in complaint([*back, "back", "--like", "checkpoint"], capsys)
    assert "no folder none" in complaint([*back, "next", "--like", "none"], capsys)
    other = transformers.MambaConfig(vocab_size=260, hidden_size=8, num_hidden_layers=2, state_size=2)
    transformers.MambaForCausalLM(other).save_pretrained("other")
    said = complaint([*back, "next", "--like", "other"], capsys)
    assert "describes another model: `n_layers` is 2, but the model has 1" in said


@thorough
@pytest.mark.parametrize("kind", ["run", "checkpoint"])
def test_training_starts_from_a_run_or_a_checkpoint(kind: str, checkpoint: Path) -> None:
    assert main(["convert", str(checkpoint), "--out", "run", "--tokenizer", "bytes"]) == 0
    assert main([*TRAIN, *STILL, "--init-from", kind, "--out", "next"]) == 0
    run = load_run("next")
    assert same(run.model(), from_hugging_face(checkpoint))
    assert run.config.model.mixer == "mamba" and run.config.model.vocab_size == 260
    assert main([*TRAIN, "--init-from", kind, "--out", "moved"]) == 0
    assert not same(load_run("moved").model(), from_hugging_face(checkpoint))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["convert", "none", "--out", "run"], "there is no folder none"),
        (["convert", "checkpoint", "--out", "run"], "the checkpoint has no tokenizer.json; pass --tokenizer"),
        (
            ["convert", "checkpoint", "--out", "checkpoint", "--tokenizer", "bytes"],
            "checkpoint already exists",
        ),
        ([*TRAIN, "--init-from", "none"], "there is no folder none"),
        ([*TRAIN, "--init-from"], "--init-from needs a run folder or a checkpoint"),
        ([*TRAIN, "--init-from", "checkpoint", "--resume", "run"], "excludes --resume"),
        (
            [*TRAIN, "--init-from", "checkpoint", "--model.d-model", "16"],
            "the model to start from has another configuration: size mismatch",
        ),
        (["train", "memory-horizon", "--init-from", "checkpoint"], "--init-from is for language models"),
    ],
)
def test_what_cannot_be_converted_is_said_in_one_line(
    words: list[str], message: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in complaint(words, capsys)
    assert not Path("run").exists()
