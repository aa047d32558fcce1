"""Run folders of others: no code of theirs runs unasked, and what is wrong with them is said in one line."""

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from linrec.cli import main
from linrec.convert import ConversionError
from linrec.convert.checkpoint import write_checkpoint
from linrec.errors import TrainError, printable
from linrec.lab.bench import get_suite, make_jobs, make_rows, run_jobs
from linrec.lab.bench.jobs import write_job
from linrec.lab.bench.worker import run_job
from linrec.lab.corpora import TextFiles
from linrec.lab.corpora.rows import load_splits
from linrec.lab.report import compare_runs, write_report
from linrec.lab.tasks import LanguageModeling
from linrec.lab.train import (
    CheckpointError,
    ConfigError,
    LoopConfig,
    OptimConfig,
    RunFolderError,
    TrainConfig,
    UntrustedCodeError,
    fit,
    load_run,
)
from linrec.lab.train.records import MetricsLog, read_metrics
from linrec.models import ModelConfig
from linrec.text import DataError, load_tokenizer, read_tokenizer
from tests.tiers import thorough, tiered

CODE = """
import pathlib
pathlib.Path("ran").touch()
from linrec.mixers.min_gru import MinGRU
class Mine(MinGRU):
    pass
"""
MINE = "foreign_code:Mine"
DEEP = "[" * 100_000


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of a tiny language model."""
    place = tmp_path_factory.mktemp("trained")
    (place / "text").write_text("a rose is a rose is a rose. " * 40)
    task = LanguageModeling(place / "text", tokenizer="bytes", length=8, cache=place / "cache")
    model = ModelConfig(vocab_size=1, d_model=8, n_layers=1, mixer="min_gru")
    loop = LoopConfig(steps=2, batch_size=2, log_every=1, device="cpu")
    fit(TrainConfig("text", task, model, loop=loop), place / "run")
    return place / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of the run, called "run", in the folder where the test is."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained, "run")
    return Path("run")


@pytest.fixture
def foreign(run: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a run whose mixer is code outside of linrec, which leaves a file "ran" when it is imported."""
    Path("foreign_code.py").write_text(CODE)
    monkeypatch.syspath_prepend(Path.cwd())
    edit(run, lambda config: config["model"].update(mixer=MINE))
    yield run
    sys.modules.pop("foreign_code", None)


def edit(run: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    stored = json.loads((run / "config.json").read_text())
    change(stored["config"])
    (run / "config.json").write_text(json.dumps(stored))


def complaint(words: list[str], status: int, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that must fail with one line on standard error; returns the line."""
    assert main(words) == status
    said = capsys.readouterr().err
    assert said.startswith("linrec: ") and said.count("\n") == 1, said
    return said


COMMANDS = [
    ["generate", "run", "--prompt", "a", "--tokens", "2", "--device", "cpu"],
    ["eval", "run", "--lengths", "8", "--device", "cpu"],
    ["inspect", "run", "--prompt", "a rose", "--device", "cpu"],
    ["report", "run"],
    ["train", "--resume", "run"],
]
FURTHER = [
    ["publish", "run", "published"],
    ["report", "run", "--collect", "--out", "table"],
    ["convert", "run", "--out", "converted"],
    [
        *("train", "lm", "--init-from", "run", "--data.path", "foreign_code.py", "--data.length", "8"),
        *("--loop.steps", "1", "--loop.batch-size", "2", "--optim.warmup-steps", "0"),
        *("--loop.device", "cpu", "--data.cache", "cache"),
    ],
]


# where a configuration names a mixer by an import path
NAMED: dict[str, dict[str, Any]] = {
    "alone": {},
    "second": {"mixer": ["min_gru", MINE], "mixer_args": {}, "n_layers": 2},
    "in an argument": {"mixer": "block_state", "mixer_args": {"ssm": MINE}},
    "in an argument of the second": {
        "mixer": ["min_gru", "block_state"],
        "mixer_args": {"block_state": {"ssm": "block_state", "ssm_args": {"ssm": MINE}}},
        "n_layers": 2,
    },
}


@thorough
@pytest.mark.parametrize("words", [*COMMANDS, *FURTHER], ids=lambda words: words[0])
@pytest.mark.parametrize("named", NAMED)
def test_code_of_others_runs_only_where_it_is_trusted(
    words: list[str], named: str, foreign: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(foreign, lambda config: config["model"].update(NAMED[named]))
    said = complaint(words, 2, capsys)
    assert f"run/config.json: the mixer '{MINE}' is code outside of linrec" in said and "--trust-code" in said
    assert not Path("ran").exists()
    # the weights are of a model with one mixer
    if named == "alone":
        assert main([*words, "--trust-code"]) == 0
        assert Path("ran").exists()


def test_a_mixer_on_the_command_line_needs_no_option(
    foreign: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "memory-horizon-demo", "--loop.device", "cpu", "--task.n-samples", "40"]
    words += ["--task.n-validation", "4", "--task.n-test", "4", "--task.length", "8", "--task.n-resets", "1"]
    words += ["--loop.steps", "1", "--optim.warmup-steps", "0", "--model.d-model", "8", "--out", "own"]
    assert main([*words, "--model.mixer", MINE]) == 0
    capsys.readouterr()
    assert "--trust-code" in complaint(["train", "--resume", "own"], 2, capsys)
    assert main(["train", "--resume", "own", "--trust-code"]) == 0


def test_python_has_the_same_rule(foreign: Path) -> None:
    for refused in (
        load_run,
        lambda folder: write_report([folder], "out"),
        lambda folder: compare_runs([folder], []),
    ):
        with pytest.raises(UntrustedCodeError, match="trust_code=True"):
            refused(foreign)
    with pytest.raises(UntrustedCodeError):
        load_run(foreign, trust_code=["other:Mixer"])
    assert not Path("ran").exists()
    assert load_run(foreign, trust_code=[MINE]).config.model.mixer == MINE
    write_report([foreign], "out", trust_code=True)
    compare_runs([foreign], [], trust_code=True)


def test_a_resumed_run_trusts_what_its_caller_names(foreign: Path) -> None:
    config = load_run(foreign, trust_code=True).config
    assert fit(config, foreign, resume=True).steps == 2
    edit(foreign, lambda stored: stored["model"].update(mixer="another_one:Mine"))
    with pytest.raises(UntrustedCodeError, match="another_one:Mine"):
        fit(config, foreign, resume=True)


def test_rows_of_a_baseline_run_no_code(run: Path, foreign: Path) -> None:
    stored = json.loads((foreign / "config.json").read_text())
    scores = {"test": {"loss": 1.0}, "validation": {"loss": 1.0}}
    row = {"folder": "foreign", "config": stored["config"], "result": scores}
    Path("rows.jsonl").write_text(json.dumps(row) + "\n")
    edit(foreign, lambda config: config["model"].update(mixer="min_gru"))
    with pytest.raises(ConfigError, match="no run of the baseline has the configuration"):
        compare_runs([run], ["rows.jsonl"])
    assert not Path("ran").exists()


@thorough
def test_a_suite_runs_and_lists_the_mixers_of_its_command(foreign: Path) -> None:
    (job,) = make_jobs(get_suite("smoke")[:1], [MINE], [0])
    folder = write_job(job, Path("suite"), {"command": "linrec bench"})
    # as in the process of a job, and in a later command that was not given the mixer
    sys.modules.pop("foreign_code")
    (folder / "run").mkdir()
    assert run_job(folder) == "done"
    sys.modules.pop("foreign_code")
    Path("ran").unlink()
    (row,) = make_rows([folder])
    assert row["status"] == "done" and row["score"] is not None
    assert not Path("ran").exists()


WRONG: list[tuple[str, str, Any, str]] = [
    ("optim", "lr", "fast", "`optim.lr` must be a number; got 'fast'"),
    ("optim", "lr", None, "`optim.lr` must be a number; got None"),
    ("optim", "lr", True, "`optim.lr` must be a number; got True"),
    ("optim", "lr", float("nan"), "`lr` must be a finite number; got nan"),
    ("optim", "lr", float("inf"), "`lr` must be a finite number; got inf"),
    ("optim", "betas", [0.9], "`optim.betas` must be a list of 2 (a number); got (0.9,)"),
    ("optim", "betas", {}, "`optim.betas` must be a list of 2 (a number)"),
    ("optim", "name", "sgd", "`optim.name` must be 'adamw' or 'muon'; got 'sgd'"),
    ("loop", "steps", 1e30, "`loop.steps` must be an integer or null; got 1e+30"),
    ("loop", "steps", 10**30, "`loop.steps` must be an integer of 64 bits"),
    ("loop", "seed", [1], "`loop.seed` must be an integer; got (1,)"),
    ("loop", "compile", 1, "`loop.compile` must be 'auto' or 'on' or 'off'; got 1"),
    ("loop", "colour", 1, "colour"),
    ("model", "d_model", "wide", "`model.d_model` must be an integer; got 'wide'"),
    ("model", "mixer", 5, "`model.mixer` must be a text without control characters or a list"),
    ("model", "mixer", ["min_gru", None], "`model.mixer` must be"),
    ("model", "mixer", "min\x1b[31mgru", r"got 'min\x1b[31mgru'"),
    ("model", "mixer_args", [], "`model.mixer_args` must be an object; got ()"),
    ("model", "mixer_args", {"normalize": "x"}, "called 'normalize'"),
    ("model", "norm_eps", float("nan"), "`norm_eps` must be above 0; got nan"),
    ("model", "logit_cap", "high", "`model.logit_cap` must be a number or null; got 'high'"),
    ("task", "name", 3, "`task.name` must be a text"),
    ("task", "length", "long", "`task.length` must be an integer"),
    ("task", "path", 7, "`task.path` must be a text"),
]


@pytest.mark.parametrize(("section", "field", "value", "message"), WRONG)
def test_a_value_of_another_type_names_its_field(
    section: str, field: str, value: Any, message: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(run, lambda config: config[section].update({field: value}))
    for words in (["generate", "run", "--prompt", "a"], ["train", "--resume", "run"]):
        said = complaint(words, 2, capsys)
        assert message in said and "run/config.json" in said, said


@pytest.mark.parametrize("missing", ["task", "model", "optim", "loop", "name"])
def test_a_configuration_without_a_section_says_which(missing: str, run: Path) -> None:
    edit(run, lambda config: config.pop(missing))
    with pytest.raises(RunFolderError, match=rf"it has no '{missing}'"):
        load_run(run)
    edit(run, lambda config: config.update({missing: 3}))
    with pytest.raises(RunFolderError, match=rf"`{missing}` must be"):
        load_run(run)


def test_an_argument_of_a_mixer_has_the_type_of_its_signature(run: Path) -> None:
    edit(run, lambda config: config["model"].update(mixer="gla", mixer_args={"n_heads": "two"}))
    with pytest.raises(RunFolderError, match=r"`gla\.n_heads` must be an integer"):
        load_run(run)


@pytest.mark.parametrize(
    "name", ["config.json", "metrics.jsonl", "result.json", "tokenizer.json", "perplexity.json"]
)
def test_json_that_is_nested_too_deeply_is_one_line(
    name: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / name).write_text(DEEP + "\n")
    words = ["report", "run"] if name == "perplexity.json" else ["generate", "run", "--prompt", "a"]
    assert name.partition(".")[0] in complaint(words, 2, capsys)
    with pytest.raises((RunFolderError, DataError, ValueError)):
        write_report(["run"], "out")
        read_tokenizer("run")


@pytest.mark.parametrize("depth", [300, 600, 900])
def test_a_configuration_that_is_nested_less_deeply_is_one_line_too(depth: int, run: Path) -> None:
    text = (
        (run / "config.json")
        .read_text()
        .replace('"betas": [', '"betas": [' + "[" * depth + "]" * depth + ",")
    )
    (run / "config.json").write_text(text)
    with pytest.raises(RunFolderError, match=r"config\.json") as caught:
        load_run(run)
    assert len(str(caught.value)) < 500


def test_a_tokenizer_file_that_is_nested_too_deeply_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(DEEP)
    with pytest.raises(DataError, match="nested too deeply"):
        load_tokenizer(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("line", ["[]", "{}", '{"step": "x", "split": "train"}', "3"])
def test_metrics_that_are_no_records_are_one_line(
    line: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "metrics.jsonl").write_text(line + "\n")
    (run / "result.json").unlink()
    assert "line 1 of metrics.jsonl must be an object" in complaint(["train", "--resume", "run"], 2, capsys)


def test_weights_of_another_configuration_are_one_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "result.json").unlink()
    edit(run, lambda config: config["model"].update(d_model=16))
    for words in (["generate", "run", "--prompt", "a"], ["eval", "run"], ["train", "--resume", "run"]):
        said = complaint([*words], 1, capsys)
        assert "the weights in run do not match its config.json: for `" in said
        assert "has the shape (" in said
    edit(run, lambda config: config["model"].update(d_model=8, n_layers=2))
    with pytest.raises(CheckpointError, match="has no such tensor and the configuration needs the shape"):
        load_run(run).model()
    edit(run, lambda config: config["model"].update(n_layers=1, channel_mixing="none"))
    with pytest.raises(CheckpointError, match="and the configuration needs no such tensor"):
        load_run(run).model()


def test_a_checkpoint_that_the_configuration_cannot_go_on_from_is_one_line(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from linrec.lab.train.checkpoint import load_checkpoint, save_checkpoint

    checkpoint = load_checkpoint(run)
    (run / "result.json").unlink()
    save_checkpoint(run, type(checkpoint)(checkpoint.tensors, {**checkpoint.about, "step": 1000}))
    said = complaint(["train", "--resume", "run"], 1, capsys)
    assert "the checkpoint in run is of step 1000, and its configuration has" in said
    save_checkpoint(run, checkpoint)
    edit(run, lambda config: config["optim"].update(name="muon"))
    said = complaint(["train", "--resume", "run"], 1, capsys)
    assert "the optimiser state in run does not match its config.json: for `" in said
    assert "the configuration needs momentum" in said


def test_a_run_that_starts_again_reads_no_damaged_metrics(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 2, "spl\n')
    with MetricsLog(tmp_path, step=0) as log:
        log.append({"step": 1, "split": "train", "loss": 0.5})
    assert [record["step"] for record in read_metrics(tmp_path)] == [1]


FIELDS = [
    ("config.json", lambda stored: stored["device"].update(name=0), "`device.name` must be a text"),
    ("config.json", lambda stored: stored.update(command=5), "`command` must be a text"),
    ("result.json", lambda stored: stored.update(seconds=None), "`seconds` must be a number; got None"),
    ("result.json", lambda stored: stored.update(test="x"), "`test` must be an object; got 'x'"),
]


@pytest.mark.parametrize(("name", "change", "message"), FIELDS)
def test_a_field_of_another_type_is_named_wherever_it_stands(
    name: str, change: Callable[[Any], Any], message: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = json.loads((run / name).read_text())
    change(stored)
    (run / name).write_text(json.dumps(stored))
    for words in (["report", "run"], ["train", "--resume", "run"]):
        said = complaint(words, 2, capsys)
        assert message in said and f"run/{name}" in said, said


def test_a_folder_name_that_is_no_utf_8_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--loop.device", "cpu", "--out", str(tmp_path / os.fsdecode(b"run\xff"))]
    assert "must be UTF-8" in complaint(["train", "memory-horizon-demo", *out], 2, capsys)
    assert not os.listdir(tmp_path)


def test_a_link_that_is_not_followed_is_named(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TrainError, match=r"could not write .*tensorboard at step 0: is a symbolic link"):
        MetricsLog(tmp_path, step=0)


def test_whole_numbers_of_a_file_are_numbers_for_adamw() -> None:
    assert OptimConfig(betas=(0, 0.9)).betas == (0.0, 0.9)
    assert all(isinstance(beta, float) for beta in OptimConfig(betas=(0, 0.9)).betas)


def test_weights_alone_are_no_checkpoint_to_go_on_from(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from linrec.lab.train.checkpoint import load_checkpoint, save_checkpoint

    checkpoint = load_checkpoint(run)
    (run / "result.json").unlink()
    save_checkpoint(run, type(checkpoint)(checkpoint.tensors, {"step": 1}))
    said = complaint(["train", "--resume", "run"], 1, capsys)
    assert "the checkpoint in run cannot be resumed: it has no seconds, python_random." in said


ALLOCATOR = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory:"
FAILED = [
    (RuntimeError(f"{ALLOCATOR} you tried to allocate 4000 bytes. Error code 12"), "allocate 4000 bytes"),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore."), "allocate 2 GiB."),
    (RuntimeError("Storage size calculation overflowed with sizes=[9, 9]"), "sizes=[9, 9]"),
    (MemoryError("Unable to allocate 4 TiB for an array"), "Unable to allocate 4 TiB"),
]


@pytest.mark.parametrize(("error", "message"), FAILED)
@pytest.mark.parametrize(
    ("words", "cure"),
    [
        (COMMANDS[0], "Pass a shorter prompt"),
        (COMMANDS[1], "--batch-tokens"),
        (COMMANDS[2], "Pass fewer --tokens"),
        (COMMANDS[4], "--loop.batch-size"),
    ],
)
def test_memory_that_runs_out_is_one_line_with_a_cure(
    error: Exception,
    message: str,
    words: list[str],
    cure: str,
    run: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    (run / "result.json").unlink()
    monkeypatch.setattr("linrec.models.block.Block.forward", fails)
    assert main(words) == 1
    # after what shows the progress
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("linrec: memory ran out: ") and message in said and cure in said


def test_an_allocation_that_really_fails_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "memory-horizon-demo", "--loop.device", "cpu", "--out", str(tmp_path / "run")]
    said = complaint([*words, "--model.d-model", str(10**6)], 1, capsys)
    assert "memory ran out" in said and "--model.d-model" in said


def test_other_errors_are_bugs_and_keep_their_traceback(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("linrec.models.block.Block.forward", fails)
    with pytest.raises(RuntimeError, match="a bug"):
        main(COMMANDS[0])


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain é 漢 🙂\n\tas it is", "plain é 漢 🙂\n\tas it is"),
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("over\rwritten\x08", r"over\rwritten\x08"),
        ("\x9b31m\x7f\0", r"\x9b31m\x7f\x00"),
        ("a\u202eb", r"a\u202eb"),
        ("\udcff", r"\udcff"),
    ],
)
def test_control_characters_are_spelt_out(text: str, shown: str) -> None:
    assert printable(text) == shown


EVIL = "run\x1b]0;title\x07\x1b[31m[bold]"


@thorough
@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_no_command_prints_the_control_characters_of_a_folder(
    words: list[str], run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run.rename(EVIL)
    assert main([EVIL if word == "run" else word for word in words]) == 0
    said = "".join(capsys.readouterr())
    assert not {"\x1b", "\x07"} & {*said}
    if words[0] != "generate":
        assert r"run\x1b]0;title\x07\x1b[31m[bold]" in said.replace("\n", "")
    # in complaints too
    shutil.rmtree(EVIL)
    Path(EVIL).touch()
    assert main([EVIL if word == "run" else word for word in words]) == 2
    assert not {"\x1b", "\x07"} & {*"".join(capsys.readouterr())}


def test_a_folder_whose_name_is_no_utf_8_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = os.fsdecode(b"run\xff")
    run.rename(name)
    said = complaint(["train", "--resume", name], 1, capsys)
    assert r"run\udcff/checkpoint.safetensors is not usable" in said


class Terminal:
    """Standard output that says that it is a terminal."""

    def __init__(self) -> None:
        self.written = ""

    def write(self, text: str) -> None:
        self.written += text

    def flush(self) -> None:
        """Do nothing."""

    def isatty(self) -> bool:
        return True


def test_generated_text_steers_no_terminal_and_is_whole_for_programs(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "linrec.text.tokenizer.ByteTokenizer._decode", lambda self, ids: "\x1b[31m" * len(ids)
    )
    assert main(COMMANDS[0]) == 0
    assert "\x1b[31m" in capsys.readouterr().out
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    assert main(COMMANDS[0]) == 0
    assert r"\x1b[31m" in terminal.written and "\x1b" not in terminal.written


AS_MODULE, AS_SCRIPT = ["-m", "linrec"], ["-c", "from linrec.cli import main; raise SystemExit(main())"]


@pytest.mark.parametrize(
    ("command", "after"),
    tiered(
        [],
        [(AS_MODULE, 0.3), (AS_SCRIPT, 0.7)],
        itertools.product((AS_MODULE, AS_SCRIPT), (0.05, 0.3, 0.7, 1.2)),
    ),
)
def test_ctrl_c_while_modules_are_imported_is_one_line(command: list[str], after: float, run: Path) -> None:
    words = [sys.executable, "-X", "importtime", *command, *COMMANDS[4], "--loop.steps", "7"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            # the first module of the command line is there; those that take a second follow
            if "linrec.cli.main" in line:
                break
        time.sleep(after)
        process.send_signal(signal.SIGINT)
        said = [line for line in process.stderr if not line.startswith("import time:")]
    if process.returncode != 2:
        assert (process.returncode, said) == (130, ["linrec: stopped.\n"])


@pytest.mark.parametrize(
    ("compile", "after", "between"),
    tiered(
        [],
        [("off", 0.0, 0.02), ("on", 0.5, 0.5)],
        [("off", 0.0, 0.5), ("on", 0.5, 0.02), ("on", 3.0, 0.02), ("on", 3.0, 0.5)],
    ),
)
def test_ctrl_c_twice_before_the_first_step_is_one_line(
    compile: str, after: float, between: float, tmp_path: Path
) -> None:
    run, out = tmp_path / "run", ["--out", str(tmp_path / "run")]
    small = [
        "memory-horizon-demo",
        "--loop.device",
        "cpu",
        "--model.d-model",
        "8",
        "--loop.log-every",
        "1000",
    ]
    words = [sys.executable, "-m", "linrec", "train", *small, "--loop.compile", compile, *out]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "compiled")}
    with subprocess.Popen(
        words, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as process:
        while not (run / "config.json").exists():
            time.sleep(0.01)
        time.sleep(after)
        # the terminal signals every process of its foreground
        for _ in range(2):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGINT)
            time.sleep(between)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and said.startswith("linrec: stopped") and said.count("\n") == 1
    assert not list(tmp_path.rglob("*.partial"))
    # what is there is the beginning of a run, which the command starts again
    assert load_run(run).result is None
    if not (run / "checkpoint.safetensors").exists():
        assert main(["train", *small, "--loop.steps", "1", "--optim.warmup-steps", "0", *out]) == 0


def test_ctrl_c_within_exec_has_the_exit_status_of_ctrl_c(tmp_path: Path) -> None:
    # as while a command makes a dataclass; only programs that `python -m` starts end by the signal
    program = """
import sys
from types import SimpleNamespace
from linrec.cli import dispatch, main
def run(given, words):
    exec("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
dispatch.COMMANDS["stop"] = "stop"
sys.modules["linrec.cli.stop"] = SimpleNamespace(run=run)
sys.exit(main(["stop"]))
"""
    (tmp_path / "stopping.py").write_text(program)
    ended = subprocess.run(
        [sys.executable, "-m", "stopping"], cwd=tmp_path, stderr=subprocess.PIPE, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (130, "linrec: stopped.\n")


NUMBERS = [
    (["--optim.lr", "nan"], "`lr` must be a finite number; got nan"),
    (["--optim.lr", "1e39"], "`optim.lr` must be at most 3.403e+38 in magnitude"),
    (
        ["--model.mixer-args.gate-bias-init", "1e39"],
        "`model.mixer_args.gate_bias_init` must be at most 3.403e+38",
    ),
    (["--optim.lr", "inf"], "`lr` must be a finite number; got inf"),
    (["--optim.weight-decay", "nan"], "`weight_decay` must be a finite number; got nan"),
    (["--optim.min-lr", "inf"], "`min_lr` must be a finite number; got inf"),
    (["--loop.steps", "1e30"], "--loop.steps"),
    (["--loop.steps", "1" + "0" * 30], "`loop.steps` must be an integer of 64 bits"),
    (["--loop.seed", "1" + "0" * 30], "`loop.seed` must be an integer of 64 bits"),
    (["--task.length", "1" + "0" * 30], "`task.length` must be an integer of 64 bits"),
    (["--task.max-number", "1" + "0" * 30], "`vocab_size` must be at least 1 and at most 2,147,483,648"),
    (["--model.d-model", "1" + "0" * 30], "`d_model` must be at least 1 and at most 1,048,576"),
    (["--model.n-layers", "1000000000"], "`n_layers` must be at least 1 and at most 10,000"),
    (["--model.mixer-args.gate-bias-init", "nan"], "`model.mixer_args.gate_bias_init` must be a number"),
    (
        ["--model.mixer", "s4d", "--model.mixer-args.dt-min", "nan"],
        "`model.mixer_args.dt_min` must be a number",
    ),
    (["--model.mixer", "lssl", "--model.mixer-args.dt-min", "1e-60"], "which would underflow"),
]


@pytest.mark.parametrize(("words", "message"), NUMBERS, ids=lambda value: str(value)[:40])
def test_numbers_that_no_run_can_hold_are_one_line(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--loop.device", "cpu", "--out", str(tmp_path / "run")]
    assert message in complaint(["train", "memory-horizon-demo", *words, *out], 2, capsys)
    assert not (tmp_path / "run").exists()


LINKED = {
    "eval": ("perplexity.json", "perplexity.json.partial", "perplexity.png"),
    "report": ("report.html", "report.html.partial", "learning_curves.png"),
    "inspect": ("inspection/inspection.html", "inspection/inspection.json", "inspection/text.png"),
}


@thorough
@pytest.mark.parametrize("command", LINKED)
def test_no_command_writes_through_a_link(command: str, run: Path) -> None:
    Path("precious").write_text("mine")
    (run / "inspection").mkdir()
    for name in LINKED[command]:
        (run / name).symlink_to(Path("precious").absolute())
    words = next(words for words in COMMANDS if words[0] == command)
    assert main(words) == 0
    assert Path("precious").read_text() == "mine"
    assert not [name for name in LINKED[command] if (run / name).is_symlink()]


@thorough
def test_the_folder_of_an_inspection_is_no_link(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("elsewhere").mkdir()
    (run / "inspection").symlink_to(Path("elsewhere").absolute())
    assert "is a symbolic link, which is not followed" in complaint(COMMANDS[2], 2, capsys)
    assert not any(Path("elsewhere").iterdir())
    # the user's own link is the user's
    assert main([*COMMANDS[2], "--out", "run/inspection"]) == 0


def test_jobs_of_a_suite_write_through_no_link(run: Path) -> None:
    jobs = make_jobs(get_suite("smoke")[:1], ["min_gru"], [0, 1])
    folder = write_job(jobs[0], Path("suite"), {"command": "linrec bench"})
    Path("precious").write_text("mine")
    (folder / "log.txt").symlink_to(Path("precious").absolute())
    with pytest.raises(OSError, match="is a symbolic link"):
        run_jobs([folder])
    assert Path("precious").read_text() == "mine"
    shutil.rmtree(folder.parent)
    Path("elsewhere").mkdir()
    folder.parent.symlink_to(Path("elsewhere").absolute())
    with pytest.raises(OSError, match="is a symbolic link"):
        write_job(jobs[1], Path("suite"), {"command": "linrec bench"})
    assert not any(Path("elsewhere").iterdir())


LINKS = [
    ("config.json", "report"),
    ("result.json", "report"),
    ("perplexity.json", "report"),
    ("extra-distillation.json", "report"),
    ("tokenizer.json", "publish"),
    ("tasks.json", "publish"),
    ("checkpoint.safetensors", "publish"),
]


@pytest.mark.parametrize(("name", "command"), LINKS)
def test_a_file_of_a_run_that_is_a_link_to_a_file_of_the_user_is_not_read(
    name: str, command: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("precious").write_bytes((run / name).read_bytes() if (run / name).exists() else b"{}")
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(Path("precious").absolute())
    words = next(words for words in FURTHER if words[0] == command)
    # a checkpoint that cannot be used is an error of training, any other file an error of the caller
    said = complaint(words, 1 if name.endswith(".safetensors") else 2, capsys)
    assert name in said and "is a symbolic link that leaves its folder" in said
    assert not Path("table").exists() and not Path("published").exists()


def test_links_within_a_folder_and_to_blobs_of_the_hub_are_read(run: Path) -> None:
    (run / "other").write_bytes((run / "config.json").read_bytes())
    (run / "config.json").unlink()
    (run / "config.json").symlink_to("other")
    assert load_run(run).config.name == "text"
    blobs = Path("models/blobs")
    blobs.mkdir(parents=True)
    (run / "other").rename(blobs / "1f")
    Path("models/snapshots").mkdir()
    run.rename("models/snapshots/main")
    linked = Path("models/snapshots/main/config.json")
    linked.unlink()
    linked.symlink_to("../../blobs/1f")
    assert load_run(linked.parent).config.name == "text"
    # the folder that the user names may be a link
    Path("mine").symlink_to("models/snapshots/main")
    assert load_run("mine").config.name == "text"


def test_texts_that_are_links_out_of_their_folder_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("precious")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").write_text("a rose")
    (tmp_path / "texts/b.txt").symlink_to(tmp_path / "key")
    for path in (tmp_path / "texts", tmp_path / "texts/*.txt"):
        with pytest.raises(DataError, match=r"b\.txt cannot be read: is a symbolic link that leaves"):
            TextFiles(path)
    assert TextFiles(tmp_path / "texts/b.txt").size("train") == 8
    with pytest.raises(DataError, match="is a symbolic link that leaves"):
        load_splits(str(tmp_path / "texts"))


def test_a_checkpoint_that_is_like_another_gets_no_files_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("precious")
    (tmp_path / "like").mkdir()
    (tmp_path / "like/config.json").write_text("{}")
    (tmp_path / "like/copy.json").symlink_to("config.json")
    write_checkpoint(tmp_path / "one", {"x": torch.zeros(1)}, tmp_path / "like")
    assert (tmp_path / "one/copy.json").read_text() == "{}"
    # the weights have the mode of the other files
    assert len({path.stat().st_mode for path in (tmp_path / "one").iterdir()}) == 1
    (tmp_path / "like/key").symlink_to(tmp_path / "key")
    with pytest.raises(ConversionError, match=r"like/key cannot be used: it is a symbolic link that leaves"):
        write_checkpoint(tmp_path / "two", {"x": torch.zeros(1)}, tmp_path / "like")
    assert not (tmp_path / "two").exists()


MARKED = "<img src=x> /home/me/text.txt"


@thorough
@pytest.mark.parametrize("command", ["report", "inspect", "suite"])
def test_fields_of_others_are_plain_text_in_pages(command: str, run: Path) -> None:
    stored = json.loads((run / "config.json").read_text())
    stored |= {"command": MARKED, "commit": MARKED, "versions": {MARKED: MARKED}, "recipe": MARKED}
    stored["device"]["name"] = MARKED
    stored["config"]["name"] = MARKED
    if command == "suite":
        (job,) = make_jobs(get_suite("smoke")[:1], ["min_gru"], [0])
        folder = write_job(job, Path("suite"), {"command": "linrec bench"})
        about = json.loads((folder / "job.json").read_text()) | dict.fromkeys(
            ("task", "mixer", "command"), MARKED
        )
        (folder / "job.json").write_text(json.dumps(about))
        outcome = {"status": MARKED, "message": MARKED, "peak_bytes": None}
        (folder / "outcome.json").write_text(json.dumps(outcome))
        assert main(["report", "suite", "--out", "page"]) == 0
    else:
        (run / "config.json").write_text(json.dumps(stored))
        words = ["report", "run"] if command == "report" else ["inspect", "run", "--prompt", "a rose"]
        assert main([*words, "--out", "page"]) == 0
    (page,) = Path("page").glob("*.html")
    assert "&lt;img src=x&gt; text.txt" in page.read_text()
    assert "<img src=x" not in page.read_text() and "/home/me" not in page.read_text()
    # pictures have names of their own
    assert not Path("home").exists() and all(
        path.parent.name in ("page", "pictures") for path in Path("page").rglob("*.png")
    )
