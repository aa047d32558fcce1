import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from linrec import tensor_files
from linrec.cli import demo, main
from linrec.cli.dispatch import COMMANDS
from linrec.lab.bench import SUITES
from linrec.lab.report import write_report
from linrec.lab.train import checkpoint as checkpoint_module
from linrec.lab.train import load_run
from tests.tiers import thorough

from .lab.train.test_checkpoint import full_disk, truncate

# a run of the demo's recipe that takes a second: 2 epochs of 5 batches
SMALL = [
    *("--task.length", "8", "--task.n-resets", "1", "--task.n-samples", "28"),
    *("--task.n-validation", "4", "--task.n-test", "4", "--model.d-model", "8", "--model.n-layers", "1"),
    *("--loop.epochs", "2", "--loop.batch-size", "4", "--loop.log-every", "1", "--optim.warmup-steps", "2"),
    *("--loop.device", "cpu"),
]
TRAIN = ["train", "memory-horizon-demo", *SMALL]
HYBRID = ["--model.n-layers", "4", "--model.mixer"]


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def complaint(words: list[str], status: int, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that must fail with one line on standard error; returns the line."""
    assert main(words) == status
    said = capsys.readouterr().err
    assert said.startswith("linrec: ") and said.count("\n") == 1, said
    return said


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["trian"], "there is no command 'trian'; did you mean 'train'?"),
        (["train", "memory-horzon"], "there is no recipe 'memory-horzon'; did you mean 'memory-horizon'?"),
        (
            ["train", "--optim.lr", "1"],
            "name a recipe first, or a run folder after --resume; recipes: memory-horizon",
        ),
        (["train", "--resume"], "--resume needs a run folder: `linrec train --resume runs/memory-horizon`."),
        ([*TRAIN, "--optim.lrr", "1"], "there is no option --optim.lrr; did you mean --optim.lr?"),
        ([*TRAIN, "--optim.lrr=1"], "there is no option --optim.lrr; did you mean --optim.lr?"),
        (
            [*TRAIN, "--model.mixer-args.transitoin", "fixed"],
            "no option --model.mixer-args.transitoin; did you mean --model.mixer-args.transition?",
        ),
        ([*TRAIN, "--model.mixer", "gate_lop"], "there is no mixer 'gate_lop'; did you mean 'gate_loop'?"),
        ([*TRAIN, "--model.mixer-args.transition", "fixd"], "'fixed')"),
        ([*TRAIN, *HYBRID, "lru", "atention"], "there is no mixer 'atention'; did you mean 'attention'?"),
        (
            [*TRAIN, *HYBRID, "lru", "gla", "--model.mixer-args.n-heads", "2"],
            "no option --model.mixer-args.n-heads; did you mean --model.mixer-args.gla.n-heads?",
        ),
        ([*TRAIN, *HYBRID, *["lru"] * 9], "`mixer` must be a pattern of 1 to 4 names"),
        ([*TRAIN, "--optim.clip-norm", "none"], "could be instantiated from ['none'].\n"),
        ([*TRAIN, "--loop.precision", "16"], "'bf16-mixed'"),
        ([*TRAIN, "--optim.lr", "fast"], "--optim.lr: could not convert string to float: 'fast'"),
        ([*TRAIN, "--optim.lr", "-1"], "`lr` must be positive and finite; got -1.0"),
        ([*TRAIN, "--optim.lr"], "--optim.lr"),
        ([*TRAIN, "--task.n-samples", "3"], "`n_samples` must exceed"),
        ([*TRAIN, "stray"], "unexpected 'stray'"),
        ([*TRAIN, "--model.final-norm", "True"], "unexpected 'True'"),
        (
            [*TRAIN, "--loop.batch-size", "21"],
            "`loop.batch_size` must be at most the number of training samples, 20;",
        ),
        ([*TRAIN, "--model.mixer-args.n-heads", "3"], "the model cannot be built: `d_qk`"),
        ([*TRAIN, "--resume", "nowhere"], "there is no run folder nowhere"),
        (["train", "--resume", "nowhere"], "there is no run folder nowhere"),
        (["report"], "name at least one run folder"),
        (["report", "nowhere"], "there is no run folder nowhere"),
        (["report", "nowhere", "--oot", "x"], "there is no option --oot; did you mean --out?"),
        (["demo", "--uot", "x"], "there is no option --uot; did you mean --out?"),
    ],
)
def test_mistakes_are_answered_in_one_line(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert expected in complaint(words, 2, capsys)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["report", "--help"], ["demo", "--help"]])
def test_help_fits_into_half_a_screen(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert main(words) == 0
    said = capsys.readouterr()
    assert "usage: linrec" in said.out and not said.err
    assert max(len(line) for line in said.out.splitlines()) <= 70


@pytest.mark.parametrize("words", [[], ["train"]])
def test_saying_nothing_shows_the_help_and_is_a_mistake(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    said = capsys.readouterr()
    assert "usage: linrec" in said.err and not said.out


def test_the_help_of_a_recipe_lists_the_arguments_of_its_mixer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["train", "memory-horizon", "--help-all"]) == 0
    said = capsys.readouterr().out
    for line in (
        "--model.mixer-args.transition {data,fixed}",
        "--model.mixer-args.magnitude-activation {sigmoid,stable_exp}",
        "--optim.warmup-steps INT",
        "(default: 10000)",
        "--task.length INT",
    ):
        assert line in said


def test_the_short_help_of_a_recipe_has_the_options_that_are_used_most(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["train", "shakespeare-char", "--help"]) == 0
    said = capsys.readouterr().out
    for option in ("--out", "--data.path", "--model.mixer", "--optim.lr", "--loop.steps", "--help-all"):
        assert option in said
    assert "--model.mixer-args" not in said and len(said.splitlines()) < 100


@thorough
@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_does_not_wait_for_pytorch(command: str) -> None:
    code = "import sys; from linrec.cli import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    words = [*([command] if command else []), "--help"]
    ended = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert ended.returncode == 0 and "usage: linrec" in ended.stdout


@pytest.mark.parametrize("words", [["generate", "run", "--tokns", "3"], ["bench", "queue", "--minutes"]])
def test_a_wrong_option_does_not_wait_for_pytorch(words: list[str]) -> None:
    code = "import sys; from linrec.cli import main; print(main(sys.argv[1:]), 'torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert ended.stdout == "2 False\n" and ended.stderr.startswith("linrec: ")


def test_the_help_of_bench_lists_the_suites(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    said = capsys.readouterr().out
    assert all(f"\n  {suite}\n" in said for suite in [*SUITES, "all"])


@pytest.mark.filterwarnings("default")
def test_a_warmup_longer_than_the_run_is_cut_with_a_notice(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TRAIN, "--optim.warmup-steps", "10"]) == 0
    said = capsys.readouterr().err
    assert said == (
        "linrec: `optim.warmup_steps` = 10 is not less than the steps of the run, 10, so the warm-up "
        "is cut to 1 steps. Pass --optim.warmup-steps to change it.\n"
    )


def test_bfloat16_is_not_announced(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*TRAIN, "--loop.precision", "bf16-mixed"]) == 0
    assert not capfd.readouterr().err


def test_train_resume_and_report(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = [*TRAIN, "--model.mixer-args.transition", "fixed", "--optim.betas", "0.8", "0.9"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "step 10/10" in said and "test accuracy 0." in said

    folder = Path("runs") / "memory-horizon-demo"
    run = load_run(folder)
    assert run.config.model.mixer_args["transition"] == "fixed"
    assert run.config.optim.betas == (0.8, 0.9)
    assert run.about["command"] == f"linrec {' '.join(words)}"

    assert "already holds a run; continue it with --resume" in complaint(words, 2, capsys)
    assert main(["train", "--resume", str(folder)]) == 0
    assert main(["train", "memory-horizon-demo", f"--resume={folder}", "--out", str(folder)]) == 0
    capsys.readouterr()
    resume = ["--resume", str(folder)]
    assert "optim.lr = 0.0" in complaint(["train", *resume, "--optim.lr", "1"], 2, capsys)
    assert "leave --out out" in complaint(["train", *resume, "--out", "other"], 2, capsys)
    assert "with the recipe 'memory-horizon-demo'" in complaint(
        ["train", "memory-horizon", *resume], 2, capsys
    )


@thorough
def test_a_hybrid_is_a_pattern_of_words(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*TRAIN, *HYBRID, "lru", "gla", "lru", "--out", "hybrid"]
    words += ["--model.mixer-args.gla.n-heads", "2", "--model.channel-mixing", "none", "ffn"]
    assert main(words) == 0
    run = load_run("hybrid")
    assert run.config.model.mixer == ("lru", "gla", "lru")
    assert run.config.model.mixer_args["gla"]["n_heads"] == 2
    assert [*run.config.model.mixer_args] == ["lru", "gla"]
    model = run.model()
    assert [type(mixer).__name__ for mixer in model.mixers] == ["LRU", "GLA", "LRU", "LRU"]
    assert [block.channel_mixing is None for block in model.blocks] == [True, False] * 2
    capsys.readouterr()
    assert main(["train", "--resume", "hybrid"]) == 0
    # named again, the pattern is the one that the run has
    again = ["train", "--resume", "hybrid", *HYBRID, "lru", "gla", "lru"]
    assert main(again) == 0
    capsys.readouterr()
    assert "model.mixer" in complaint([*again, "gla"], 2, capsys)
    assert main(["inspect", "hybrid"]) == 0
    assert "4 layers of lru gla lru" in Path("hybrid/inspection/inspection.html").read_text()


def test_a_disk_that_is_full_ends_a_run_with_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_files, "save_file", full_disk)
    assert "No space left on device; there is no earlier checkpoint" in complaint(TRAIN, 1, capsys)


@thorough
@pytest.mark.filterwarnings("default:.*is not usable")
def test_a_truncated_checkpoint_is_reported_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TRAIN, "--loop.checkpoint-every", "4", "--out", "run"]) == 0
    (Path("run") / "result.json").unlink()
    truncate(Path("run") / "checkpoint.safetensors")
    capsys.readouterr()
    assert main(["train", "--resume", "run"]) == 0
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "continuing from checkpoint.previous.safetensors" in said
    for name in ("checkpoint.safetensors", "checkpoint.previous.safetensors"):
        truncate(Path("run") / name)
    (Path("run") / "result.json").unlink()
    assert "not usable" in complaint(["train", "--resume", "run"], 1, capsys)


@thorough
def test_ctrl_c_writes_a_checkpoint_and_resume_finishes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = [*TRAIN, "--loop.epochs", "20000", "--out", "run"]
    process = subprocess.Popen(
        [sys.executable, "-m", "linrec", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size) and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert said.count(b"\n") == 1 and b"continue with: linrec train --resume run" in said
    assert checkpoint_module.load_checkpoint(tmp_path / "run") is not None

    # the rest of 100,000 steps is more than a test needs
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["config"]["loop"]["epochs"] == 20_000


@thorough
def test_the_demo_trains_both_arms_and_reports_in_place_of_an_earlier_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folders = {arm: tmp_path / "demo" / arm for arm in ("data", "fixed")}
    # what an earlier demo leaves, made without its processes, by half as much training
    for arm, folder in folders.items():
        words = ["--model.mixer-args.transition", arm, "--loop.epochs", "1", "--out", str(folder)]
        assert main([*TRAIN, *words]) == 0
    earlier = write_report(list(folders.values()), tmp_path / "demo").read_text()
    capsys.readouterr()

    report = demo.run_demo(tmp_path / "demo", options=SMALL)
    said = capsys.readouterr().out
    assert "data: step 10/10" in said and "fixed: step 10/10" in said
    assert str(report) in said and report.read_text() != earlier
    for arm, folder in folders.items():
        run = load_run(folder)
        assert run.config.model.mixer_args["transition"] == arm and run.config.loop.epochs == 2
        assert run.result is not None


@thorough
def test_a_demo_whose_arms_fail_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        demo.TrainError, match="variant of the demo ended with status 2 and wrote:\n    linrec: there is"
    ):
        demo.run_demo(Path("demo"), options=["--task.lenght", "8"])


def test_a_demo_replaces_nothing_but_demos(capsys: pytest.CaptureFixture[str]) -> None:
    precious = Path("runs") / "demo" / "data" / "precious.txt"
    precious.parent.mkdir(parents=True)
    precious.touch()
    assert "is not a run of an earlier demo" in complaint(["demo"], 2, capsys)
    assert precious.exists()


@thorough
def test_a_reader_that_leaves_is_no_error():
    command = f"{shlex.quote(sys.executable)} -m linrec train memory-horizon --help | head -n 1"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert result.returncode == 0 and "Traceback" not in result.stderr
