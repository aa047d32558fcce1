"""Tasks whose data are files: where they are said to be, and what is said where they are missing."""

import dataclasses

import pytest

# now, for doctests leave their last result among the builtins, which tyro cannot be imported with
import tyro  # noqa: F401

from linrec.cli import main
from linrec.lab.bench import Entry, make_jobs, make_rows
from linrec.lab.bench.jobs import write_job
from linrec.lab.bench.rows import make_row
from linrec.lab.bench.worker import run_job
from linrec.lab.report.records import read_table
from linrec.lab.train import ConfigError
from tests.lab.bench.test_running import TINY
from tests.tiers import thorough

TEXT = "a rose is a rose is a rose. " * 20


def text_entry(cache, **task):
    return Entry(
        "text",
        "shakespeare-char-cpu",
        task={"length": 8, "cache": cache, "validation_share": 0.2, "test_share": 0.2, **task},
        model=TINY.model,
        optim=TINY.optim,
        loop=TINY.loop,
    )


@thorough
def test_a_task_without_data_is_said_to_be_so_while_others_go_on(tmp_path, capsys, monkeypatch, here):
    suite = {"tiny": (text_entry(tmp_path / "cache"), TINY)}
    monkeypatch.setattr("linrec.lab.bench.suites.SUITES", suite)
    here(run_job)
    monkeypatch.setattr("linrec.lab.bench.worker.speed_by_length", lambda *_, **__: [])
    out, file = tmp_path / "out", tmp_path / "rose.txt"
    words = ["bench", "tiny", "--mixers", "gla", "--seeds", "0", "--out", str(out)]
    assert main(words) == 1
    text, copying = (make_row(job) for job in read_table(out))
    assert (copying["status"], text["status"], text["parameters"]) == ("done", "no data", None)
    cure = "In a suite, --data text=PATH says where the files are."
    assert text["message"].endswith(cure) and cure in (out / "report.html").read_text()
    assert "text/gla/seed-0: no data, exactly one of `path`" in " ".join(capsys.readouterr().out.split())
    # with a path that is none too
    assert main([*words, "--data", f"text={file}"]) == 1
    assert f"`path` = {file} does not exist" in (out / "rows.jsonl").read_text()
    # and it goes on once the file is there
    file.write_text(TEXT)
    assert main([*words, "--data", f"text={file}"]) == 0
    told = capsys.readouterr().out
    assert "1 of 2 jobs are already done" in told
    text, _ = (make_row(job) for job in read_table(out))
    # a uniform guess among the characters
    assert (text["status"], text["metric"], text["chance"]) == ("done", "perplexity", len({*TEXT}))
    assert text["trivial_score"] is None and 1 < text["score"] < 2 * len({*TEXT})
    assert text["config"]["model"]["vocab_size"] == len({*TEXT}) and f"--data text={file}" in text["command"]


def test_widths_are_those_for_the_vocabulary_of_the_text(tmp_path):
    (tmp_path / "rose.txt").write_text(TEXT)
    entry = text_entry(tmp_path).reading(tmp_path / "rose.txt")
    (job,) = make_jobs([entry], ["lru"], [0], parameters=3000)
    assert job.config.model.vocab_size == len({*TEXT})
    assert job.sizes.parameters == pytest.approx(3000, rel=0.05)


def test_a_text_without_a_test_split_is_scored_on_validation(tmp_path):
    (tmp_path / "rose.txt").write_text(TEXT)
    entry = text_entry(tmp_path, test_share=0.0).reading(tmp_path / "rose.txt")
    (job,) = make_jobs([entry], ["lru"], [0])
    folder = write_job(job, tmp_path, {"command": ""})
    assert run_job(folder) == "done"
    (row,) = make_rows([folder])
    assert row["test"] == {} and row["scored_on"] == "validation" and row["score"] > 1


def test_a_job_whose_files_are_missing_says_so(tmp_path):
    entry = Entry("images", "sequential-fashion-mnist", loop=TINY.loop)
    (job,) = make_jobs([entry.reading(tmp_path / "nowhere")], ["lru"], [0])
    folder = write_job(job, tmp_path, {"command": ""})
    assert run_job(folder) == "no data"
    (row,) = make_rows([folder])
    assert row["status"] == "no data" and str(tmp_path / "nowhere") in row["message"]
    assert row["message"].endswith("--data images=PATH says where the files are.")


@thorough
def test_a_model_of_known_size_waits_for_its_files_too(tmp_path):
    entry = Entry("retrieval", "lra-retrieval", task={"length": 12}, model=TINY.model, loop=TINY.loop)
    entry = dataclasses.replace(entry, optim=TINY.optim)
    (job,) = make_jobs([entry], ["lru"], [0])
    assert job.sizes.parameters > 0 and job.config.model.pairs
    folder = write_job(job, tmp_path, {"command": ""})
    assert run_job(folder) == "no data"
    for part, n in (("train", 8), ("eval", 3), ("test", 3)):
        lines = [f"{i % 2}\ta\tb\t{part} {i}\tother\n" for i in range(n)]
        (tmp_path / f"new_aan_pairs.{part}.tsv").write_text("".join(lines))
    (job,) = make_jobs([entry.reading(tmp_path)], ["lru"], [0])
    # in the folder of the job that lacked them
    assert write_job(job, tmp_path, {"command": ""}) == folder and run_job(folder) == "done"
    (row,) = make_rows([folder])
    assert row["chance"] == 0.5 and 0 <= row["score"] <= 1
    # both sequences of a pair have such lengths
    assert [speed["length"] for speed in row["speed_by_length"]] == [3, 12, 48]
    other = make_jobs([entry.reading(tmp_path / "other")], ["lru"], [0])[0]
    with pytest.raises(ConfigError, match="has a job of another configuration"):
        write_job(other, tmp_path, {"command": ""})


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        ("copying=x", "`path` is for tasks that read files; copying generates its samples"),
        ("copyin=x", "called 'copyin'; did you mean 'copying'"),
        ("copying", "`--data` must be TASK=PATH, such as shakespeare-char=input.txt; got 'copying'"),
    ],
)
def test_data_that_no_task_can_have_are_refused(tmp_path, capsys, data, complaint):
    words = ["bench", "smoke", "--mixers", "gla", "--out", str(tmp_path), "--data", data]
    assert main(words) == 2
    assert complaint in capsys.readouterr().err
