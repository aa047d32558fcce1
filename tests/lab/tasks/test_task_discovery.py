import dataclasses
import importlib
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from linrec.cli import main
from linrec.lab import tasks
from linrec.lab.train import (
    ConfigError,
    LoopConfig,
    TrainConfig,
    UntrustedCodeError,
    fit,
    get_recipe,
    load_run,
)
from linrec.lab.train.config import config_from_dict, config_to_dict
from linrec.models import ModelConfig
from tests.lab.tasks.own_tasks import Shifted
from tests.tiers import thorough

OWN = "tests.lab.tasks.own_tasks:Shifted"


def test_every_task_is_found_by_its_name_and_states_what_needs_no_model():
    assert "memory_horizon" in tasks.names()
    for name in tasks.names():
        task = tasks.get(name)()
        assert tasks.name_of(type(task)) == name
        assert task.section in ("task", "data")
        # what only the data can tell is not known yet
        if task.vocab_size is not None:
            assert task.vocab_size > 1 and task.n_outputs > 1
            assert 0 < task.chance < 1


def test_every_class_of_a_task_is_in_the_table():
    in_files = set()
    for path in Path(tasks.__file__).parent.glob("*.py"):
        module = importlib.import_module(f"linrec.lab.tasks.{path.stem}")
        in_files |= {
            f"{path.stem}:{name}"
            for name, kind in vars(module).items()
            if inspect.isclass(kind) and kind.__module__ == module.__name__
            # fields, and the interface of tasks; bases are abstract
            if dataclasses.is_dataclass(kind) and hasattr(kind, "objective") and not inspect.isabstract(kind)
        }
    assert in_files <= {*tasks.TASKS.values()}, "add the class to `TASKS` in src/linrec/lab/tasks/__init__.py"


def test_hyphens_and_underscores_are_equal():
    assert tasks.get("memory-horizon") is tasks.get("memory_horizon") is tasks.MemoryHorizon


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("memory-horizn", "memory_horizon"),
        ("language-model", "language_modeling"),
    ],
)
def test_an_unknown_name_gives_the_nearest_match(name, nearest):
    with pytest.raises(ValueError, match=f"no task '{name}'; did you mean '{nearest}'"):
        tasks.get(name)


@pytest.mark.parametrize("name", ["base", "synthetic", "linrec", ""])
def test_what_is_no_task_is_refused(name):
    with pytest.raises(ValueError, match=f"no task '{name}'.*'memory_horizon'"):
        tasks.get(name)


@thorough
def test_a_name_imports_the_file_of_its_family_alone():
    code = "import sys; from linrec.lab import tasks; tasks.get('parity'); print(*sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    files = [name.rpartition(".")[2] for name in ended.stdout.split() if name.startswith("linrec.lab.tasks.")]
    assert "automata" in files
    assert not {"copying", "dynamics", "recall", "archives"} & {*files}


@thorough
def test_a_task_from_outside_trains_by_its_path_and_is_read_where_it_is_trusted(tmp_path: Path) -> None:
    assert tasks.get(OWN) is Shifted and tasks.name_of(Shifted) == OWN
    task = Shifted(length=8, n_resets=1, n_samples=28, n_validation=4, n_test=3)
    model = ModelConfig(vocab_size=1, d_model=8, n_layers=1, mixer="min_gru")
    config = TrainConfig("own", task, model, loop=LoopConfig(steps=2, batch_size=4, device="cpu"))
    assert config.import_paths == {OWN}
    fit(config, tmp_path / "run")
    stored = json.loads((tmp_path / "run" / "config.json").read_text())
    assert stored["config"]["task"]["name"] == OWN

    with pytest.raises(UntrustedCodeError, match=re.escape(f"the task '{OWN}' is code outside of linrec")):
        load_run(tmp_path / "run")
    with pytest.raises(UntrustedCodeError):
        load_run(tmp_path / "run", trust_code=["tests.lab.tasks.own_tasks:Unfinished"])
    assert load_run(tmp_path / "run", trust_code=True).config == config
    assert load_run(tmp_path / "run", trust_code=[OWN]).config.task == task
    # the configuration of the caller says what is trusted
    assert fit(config, tmp_path / "run", resume=True).steps == 2


def test_the_command_line_trains_a_task_by_its_path(tmp_path: Path) -> None:
    recipe = get_recipe(OWN)
    assert recipe.task == Shifted() and recipe.name == "Shifted"
    words = [
        "--task.length",
        "8",
        "--task.n-resets",
        "1",
        "--task.n-samples",
        "40",
        "--task.n-validation",
        "4",
    ]
    words += ["--task.n-test", "4", "--loop.steps", "2", "--loop.batch-size", "4", "--loop.device", "cpu"]
    words += ["--optim.warmup-steps", "0", "--model.d-model", "8", "--model.d-channel-mixing", "8"]
    assert main(["train", OWN, *words, "--out", str(tmp_path / "run")]) == 0
    assert load_run(tmp_path / "run", trust_code=True).config.task.seed == 7


def test_the_code_of_an_untrusted_task_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TrainConfig("small", tasks.MemoryHorizon(), ModelConfig(vocab_size=1))
    (tmp_path / "foreign_task.py").write_text(
        f"import pathlib\npathlib.Path({str(tmp_path)!r}, 'ran').touch()"
    )
    monkeypatch.syspath_prepend(tmp_path)
    stored = config_to_dict(config)
    stored["task"]["name"] = "foreign_task:Mine"
    with pytest.raises(UntrustedCodeError, match="foreign_task:Mine"):
        config_from_dict(stored)
    assert not (tmp_path / "ran").exists()
    with pytest.raises(ConfigError, match="`Mine` in module foreign_task is not a task"):
        config_from_dict(stored, trust_code=True)
    assert (tmp_path / "ran").exists()
    sys.modules.pop("foreign_task")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module:Task", "task 'no_such_module:Task' cannot be imported: No module named"),
        (":Task", "task ':Task' cannot be imported"),
        ("tests.lab.tasks.own_tasks:Unfinished", "is not a task, .*the module has MemoryHorizon, Shifted"),
        ("tests.lab.tasks.own_tasks:Shift", "`Shift` in module tests.lab.tasks.own_tasks is not a task"),
    ],
)
def test_a_path_without_a_task_says_what_is_there(path: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tasks.get(path)
