import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from linrec.files import read_json
from linrec.lab.train import RunFolderError, TrainConfig, TrainError, fit, load_run
from linrec.lab.train.records import MetricsLog, read_metrics
from linrec.lab.train.run import read_result, write_json


def test_what_is_no_run_folder_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text('{"recipe": ')
    (tmp_path / "list").mkdir()
    (tmp_path / "list" / "config.json").write_text("[]")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.json").write_text('{"recipe": "x", "config": {}}')
    for name, reason in {
        "absent": "there is no run folder",
        "file": "there is no run folder",
        "empty": "it has no config.json",
        "broken": "cannot be read",
        "list": "is not a JSON object",
        "old": "does not fit this version of linrec",
    }.items():
        with pytest.raises(RunFolderError, match=reason) as caught:
            load_run(tmp_path / name)
        assert name in str(caught.value) and "\n" not in str(caught.value)


def test_a_misspelt_run_folder_names_the_nearest(tiny: Callable[..., TrainConfig], tmp_path: Path) -> None:
    fit(tiny(), tmp_path / "fixed-1")
    with pytest.raises(RunFolderError, match=r"did you mean .*/fixed-1\?"):
        load_run(tmp_path / "fixde-1")


def test_a_run_without_checkpoint_has_no_model(tiny: Callable[..., TrainConfig], tmp_path: Path) -> None:
    fit(tiny(), tmp_path)
    (tmp_path / "checkpoint.safetensors").unlink()
    with pytest.raises(RunFolderError, match="no checkpoint yet"):
        load_run(tmp_path).model()


def test_damaged_metrics_and_results_are_refused(tiny: Callable[..., TrainConfig], tmp_path: Path) -> None:
    fit(tiny(), tmp_path)
    (tmp_path / "result.json").write_text("{}")
    with pytest.raises(RunFolderError, match="it has no 'test'"):
        read_result(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("nonsense\n")
    with pytest.raises(RunFolderError, match="metrics"):
        load_run(tmp_path)


@pytest.mark.parametrize(
    ("record", "named"),
    [
        ('{"step": 1.5, "split": "train"}', "`step`"),
        ('{"step": 1}', "`split`"),
        ('{"step": 1, "split": "train", "loss": "low"}', "`loss`"),
        ('{"step": 1, "split": "train", "loss": 1' + 20 * "0" + "}", "`loss`.*64 bits"),
    ],
)
def test_records_of_other_fields_are_refused(record: str, named: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(record + "\n")
    with pytest.raises(ValueError, match=named):
        read_metrics(tmp_path)


def test_metrics_are_whole_lines_and_a_line_cut_off_is_left_out(tmp_path: Path) -> None:
    with MetricsLog(tmp_path, step=0) as log:
        for step in (1, 2, 3):
            log.append({"step": step, "split": "train", "loss": 0.5})
            assert len(read_metrics(tmp_path)) == step
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "spl')
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 3]


def test_records_after_the_step_to_resume_from_are_dropped(tmp_path: Path) -> None:
    for start, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        with MetricsLog(tmp_path, step=start) as log:
            for step in steps:
                log.append({"step": step, "split": "train", "loss": float(start)})
    assert [(r["step"], r["loss"]) for r in read_metrics(tmp_path)] == [
        (1, 0.0),
        (2, 0.0),
        (3, 2.0),
        (4, 2.0),
    ]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_under_the_metrics_is_one_line(tmp_path: Path) -> None:
    with MetricsLog(tmp_path, step=0) as log, open("/dev/full", "w") as full:
        log._file.close()
        log._file = full
        with pytest.raises(TrainError, match=r"No space left on device.*--resume") as caught:
            log.append({"step": 1, "split": "train", "loss": 0.5})
        # what is buffered cannot be written at closing either
        with pytest.raises(OSError, match=str(errno.ENOSPC)):
            full.close()
    assert "\n" not in str(caught.value)


def test_json_files_are_whole_or_not_there(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"x": 1})
    assert read_json(tmp_path / "a.json") == {"x": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    with pytest.raises(TrainError, match="could not write"):
        write_json(tmp_path / "no" / "a.json", {})


def test_a_folder_that_may_not_be_entered_is_one_line(
    tmp_path: Path, tiny: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    # by hand, since those who may do everything may enter every folder
    stat = Path.stat

    def refuse(self: Path, **options: bool) -> object:
        if self.is_relative_to(tmp_path / "closed"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return stat(self, **options)

    monkeypatch.setattr(Path, "stat", refuse)
    for use in (
        load_run,
        lambda folder: fit(tiny(), folder),
        lambda folder: fit(tiny(), folder, resume=True),
    ):
        with pytest.raises(RunFolderError, match="closed cannot be read: Permission denied") as caught:
            use(tmp_path / "closed")
        assert "\n" not in str(caught.value)


def test_a_neighbour_that_may_not_be_entered_does_not_hide_a_misspelling(
    tiny: Callable[..., TrainConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(tiny(), tmp_path / "fixed-1")
    (tmp_path / "fixed-2").mkdir()
    stat = os.stat

    def refuse(path: Any, **options: Any) -> os.stat_result:
        if "fixed-2" in str(path):
            raise PermissionError(errno.EACCES, "Permission denied")
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", refuse)
    with pytest.raises(RunFolderError, match=r"there is no run folder .*did you mean .*/fixed-1\?"):
        load_run(tmp_path / "fixed-3")


def test_a_log_that_cannot_be_opened_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(TrainError, match="at step 7: No space left on device; make room and continue with"):
        MetricsLog(tmp_path, step=7)


def test_closing_the_log_does_not_hide_the_error_on_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for error, expected in ((KeyError("first"), "first"), (None, "No space left on device")):
        log = MetricsLog(tmp_path, step=0)
        monkeypatch.setattr(log._board, "close", full)
        with pytest.raises((KeyError, TrainError), match=expected), log:
            if error is not None:
                raise error
