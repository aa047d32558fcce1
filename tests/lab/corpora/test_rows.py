import json
import sys

import pytest

from linrec.lab.corpora import DatasetRows
from linrec.text import DataError

datasets = pytest.importorskip("datasets", reason='the extra "text" is not installed')

ROWS = ["", " = Title = \n", "", " one line without an end", "last €\n", None]
STREAM = "\n = Title = \n\n one line without an end\nlast €\n\n"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def saved(folder, **splits):
    made = {name: datasets.Dataset.from_dict({"text": texts}) for name, texts in splits.items()}
    datasets.DatasetDict(made).save_to_disk(str(folder))
    return str(folder)


def stream(texts, split="train"):
    return "".join(texts.stream(split, lambda read: None))


def test_every_row_is_a_line_of_the_stream_and_a_document(tmp_path):
    texts = DatasetRows(saved(tmp_path / "d", train=ROWS, validation=["v"], test=["t"]))
    assert texts.splits == ("train", "validation", "test")
    assert stream(texts) == STREAM and stream(texts, "test") == "t\n"
    found = ["".join(blocks) for blocks in texts.documents("train", lambda read: None)]
    assert found == [row or "" for row in ROWS]


def test_rows_are_counted_while_they_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr("linrec.lab.corpora.rows.ROWS", 4)
    texts = DatasetRows(saved(tmp_path / "d", train=ROWS))
    reads = []
    assert "".join(texts.stream("train", reads.append)) == STREAM
    assert reads == [4, 2] and texts.size("train") == 6


@pytest.mark.parametrize("name", ["valid", "val", "dev"])
def test_validation_has_other_names_and_other_splits_are_left_out(tmp_path, name):
    texts = DatasetRows(saved(tmp_path / "d", **{"train": ["a"], name: ["v"], "unsupervised": ["u"]}))
    assert set(texts.splits) == {"train", "validation"} and stream(texts, "validation") == "v\n"


def test_files_and_folders_are_read(tmp_path):
    lines = "".join(json.dumps({"id": 1, "body": row}) + "\n" for row in ROWS)
    (tmp_path / "folder").mkdir()
    for name in ("train", "test"):
        (tmp_path / "folder" / f"{name}.jsonl").write_text(lines)
    file = DatasetRows(str(tmp_path / "folder" / "test.jsonl"), column="body")
    assert file.splits == ("train",) and stream(file) == STREAM
    folder = DatasetRows(str(tmp_path / "folder"), column="body")
    assert folder.splits == ("train", "test") and stream(folder, "test") == STREAM
    single = tmp_path / "single"
    datasets.Dataset.from_dict({"text": ROWS}).save_to_disk(str(single))
    assert stream(DatasetRows(str(single))) == STREAM


def test_the_identity_changes_with_the_rows_the_column_and_the_name(tmp_path):
    one = saved(tmp_path / "one", train=["a"])
    assert DatasetRows(one).identity() == DatasetRows(one).identity()
    other = saved(tmp_path / "other", train=["b"])
    assert DatasetRows(one).identity() != DatasetRows(other).identity()
    json.dumps(DatasetRows(one).identity())


def test_columns_are_checked(tmp_path):
    folder = str(tmp_path / "d")
    datasets.Dataset.from_dict({"text": ["a"], "label": [1], "tags": [["x"]]}).save_to_disk(folder)
    with pytest.raises(
        DataError, match=r"`text_column` of .*: there is no column 'txt'; did you mean 'text'"
    ):
        DatasetRows(folder, column="txt")
    with pytest.raises(DataError, match=r"`text_column` = 'label' of .* must hold strings; it holds .*int64"):
        DatasetRows(folder, column="label")
    with pytest.raises(DataError, match=r"`text_column` = 'tags' of .* must hold strings"):
        DatasetRows(folder, column="tags")


def test_what_cannot_be_loaded(tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    (tmp_path / "x.xyz").write_text("a")
    with pytest.raises(DataError, match=r"empty cannot be loaded: .*doesn't contain any data files"):
        DatasetRows(str(tmp_path / "empty"))
    with pytest.raises(DataError, match=r"there is no reader for data set files that end in '\.xyz'"):
        DatasetRows(str(tmp_path / "x.xyz"))
    with pytest.raises(DataError, match=r"has no split 'train', only 'test'\."):
        DatasetRows(saved(tmp_path / "d", test=["a"]))


def test_without_network_the_error_says_what_to_do(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(
        DataError, match=r"`dataset` = no-such-text cannot be loaded: .* and the network"
    ) as error:
        DatasetRows("no-such-text")
    assert "\n" not in str(error.value)


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        DataError, match=r"the data set 'wikitext' needs the package 'datasets'.*linrec\[text\]"
    ):
        DatasetRows("wikitext")
