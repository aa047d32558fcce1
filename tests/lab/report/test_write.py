import base64
import re
from html.parser import HTMLParser

import pytest

from linrec.errors import DataError
from linrec.lab.report import write_report
from linrec.lab.tasks import MemoryHorizon
from linrec.lab.train import load_run
from tests.tiers import thorough

PNG = b"\x89PNG\r\n\x1a\n"


class Page(HTMLParser):
    """Collects rows of tables, texts and attributes, and checks that tags close in order."""

    VOID = ("meta", "img")

    def __init__(self, path):
        super().__init__()
        self.rows: list[list[str]] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if self._open and self._open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


@pytest.fixture(scope="module")
def report(make_run_once, tmp_path_factory):
    make = make_run_once
    folders = [
        make("data-0", transition="data", right_to_span=20, command="linrec train small <b>&"),
        make("data-1", transition="data", right_to_span=30, seed=1, command="linrec train small --seed 1"),
        make("fixed-0", transition="fixed", right_to_span=5),
        make("fixed-1", transition="fixed", finished=False, checkpoint=False, seed=1),
    ]
    return write_report(folders, tmp_path_factory.mktemp("out") / "new")


@thorough
def test_the_pictures_are_written_and_stored_inside_the_page(report):
    names = {"learning_curves.png", "accuracy_by_span.png", "transitions-data.png", "transitions-fixed.png"}
    assert {path.name for path in report.parent.iterdir()} == names | {"report.html"}
    stored = [
        base64.b64decode(attrs["src"].removeprefix("data:image/png;base64,"))
        for tag, attrs in Page(report).tags
        if tag == "img"
    ]
    assert set(stored) == {(report.parent / name).read_bytes() for name in names}
    assert all(data.startswith(PNG) for data in stored)


def test_the_page_needs_nothing_but_itself(report):
    page = Page(report)
    assert not {tag for tag, _ in page.tags} & {"script", "link", "iframe"}
    assert "http" not in re.sub(r"base64,[^\"]*", "", report.read_text())
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in page.tags
    assert "prefers-color-scheme: dark" in page.text
    assert all(attrs["alt"] for tag, attrs in page.tags if tag == "img")


def test_the_table_holds_mean_and_spread(report, make_run_once):
    runs = {name: load_run(make_run_once.root / name) for name in ("data-0", "data-1", "fixed-0")}
    first, second, fixed = (run.result["test"]["accuracy"] for run in runs.values())
    rows = {row[0]: row for row in reversed(Page(report).rows)}
    mean, spread = (first + second) / 2, abs(first - second) / 2**0.5
    assert rows["transition: data"][1] == f"{mean:.3f} ± {spread:.3f}"
    assert rows["transition: data"][3:] == ["seeds 0, 1", "1,586", "12.5 ± 0.0", "1.5 min"]
    assert (rows["transition: fixed"][1], rows["transition: fixed"][3]) == (f"{fixed:.3f} (1 seed)", "seed 0")
    assert "4 runs of 2 configurations" in Page(report).text
    assert rows["chance"][1] == "0.020"
    assert rows["always the most frequent answer"][1] == f"{runs['data-0'].config.task.trivial_score:.3f}"
    assert rows["model.mixer_args.transition"][1:] == ["data", "fixed"]
    assert rows["data-1"][1:3] == ["1", f"{second:.4f}"]
    assert rows["data-1"][5:] == ["1.5", "transition: data", "a processor", "0123456789"]


def test_what_users_typed_is_escaped(report):
    assert "linrec train small &lt;b&gt;&amp;\n" in report.read_text()
    assert "linrec train small <b>&\nlinrec train small --seed 1" in Page(report).text


def test_what_is_missing_is_said(report):
    text = Page(report).text
    assert "fixed-1 has no result: it has not finished." in text
    # the other run of that arm has a checkpoint
    assert "No transitions" not in text
    rows = {row[0]: row for row in Page(report).rows}
    assert rows["fixed-1"][1:6] == ["1", "–", "0.3000", "30", "–"]


@thorough
def test_the_same_runs_make_the_same_files_and_count_once(make_run, tmp_path):
    folder = make_run("a")
    once = write_report([folder], tmp_path / "once")
    twice = write_report([folder, folder / ".." / "a"], tmp_path / "twice")
    assert once.read_bytes() == twice.read_bytes()


def test_a_run_that_has_just_begun_has_a_report(make_run, tmp_path):
    folder = make_run("a", steps=(), finished=False, checkpoint=False)
    (folder / "metrics.jsonl").unlink()
    report = write_report([folder], tmp_path)
    text = Page(report).text
    for sentence in (
        "has no result",
        "no learning curves",
        f"No transitions of {folder.name} to draw: {folder.name} has no che",
    ):
        assert sentence in text
    assert not list(tmp_path.glob("*.png"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", "{", "config.json cannot be read"),
        ("config.json", '{"config": {}}', "config.json cannot be used"),
        ("result.json", '{"test"', "result.json cannot be read"),
        (
            "result.json",
            '{"test": {}, "steps": 1}',
            "lacks parameters, seconds, .*, test accuracy, validation",
        ),
        ("result.json", '{"test": null, "validation": {}}', "`test` must be an object; got None"),
        ("metrics.jsonl", "no json\n", "metrics of .* cannot be read"),
        ("metrics.jsonl", '{"loss": 1.0}\n', "line 1 of metrics.jsonl must be an object"),
    ],
)
def test_an_unreadable_run_folder_is_one_line(make_run, tmp_path, name, content, message):
    folder = make_run("a")
    (folder / name).write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        write_report([folder], tmp_path / "out")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_no_run_names_the_nearest(make_run, tmp_path):
    folder = make_run("data-0")
    with pytest.raises(ValueError, match=r"no run folder .*data0; did you mean .*data-0"):
        write_report([folder.parent / "data0"], tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"is not a run folder: it has no config\.json"):
        write_report([tmp_path / "empty"], tmp_path)
    with pytest.raises(ValueError, match="`run_dirs` must name at least one run folder; got none"):
        write_report([], tmp_path)


def test_a_place_that_cannot_be_written_to_is_one_line(make_run, tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(ValueError, match=r"could not write the report to .*taken: File exists"):
        write_report([make_run("a")], tmp_path / "taken")


@thorough
def test_a_report_needs_no_data(make_run, tmp_path, monkeypatch):
    folder = make_run("a")

    def missing(*_):
        raise DataError("there is nothing at data")

    monkeypatch.setattr(MemoryHorizon, "trivial_score", property(missing))
    monkeypatch.setattr(MemoryHorizon, "split", missing)
    page = Page(write_report([folder], tmp_path / "out"))
    assert {row[0]: row[1] for row in page.rows}["always the most frequent answer"] == "–"
    assert " to draw: there is nothing at data" in page.text
