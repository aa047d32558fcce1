import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from linrec.files import read_json
from linrec.lab.corpora import Shards, TextCounts, TextFiles, default_cache, tokenised
from linrec.lab.corpora.corpus import ReadingDisplay
from linrec.lab.corpora.shards import write_shards
from linrec.text import ByteTokenizer, DataError
from tests.text.conftest import TEXT

QUIET = ReadingDisplay(Console(file=io.StringIO()))


def make(folder, tokenizer="bytes", *, documents=False, cache=None, display=QUIET, **shares):
    texts = TextFiles(folder)
    return tokenised(texts, tokenizer, documents=documents, shares=shares, cache=cache, display=display)


def test_a_stream_becomes_its_tokens(write):
    shards = make(write(a__txt=TEXT, b__txt="end"), validation=0.25)
    text = TEXT + "end"
    cut = len(text) * 3 // 4
    for split, part in (("train", text[:cut]), ("validation", text[cut:])):
        tokens = shards.tokens(split)
        assert tokens.dtype == np.uint16 and bytes(tokens.astype(np.uint8)).decode() == part
        assert shards.counts(split) == TextCounts(
            len(tokens), 1, len(part), len(part.encode()), len(part.split()), part.count("\n") + 1
        )
        assert len(shards.starts(split)) == 0
    assert shards.counts("test") == TextCounts() and shards.tokens("test").shape == (0,)


def test_documents_end_with_a_token_and_their_starts_are_stored(write):
    shards = make(write(train___a__txt="ab", train___b__txt="cde", valid__txt="f"), documents=True)
    assert shards.tokens("train").tolist() == [97, 98, 256, 99, 100, 101, 256]
    assert shards.starts("train").tolist() == [0, 3]
    assert shards.tokens("validation").tolist() == [102, 256]
    assert shards.counts("train") == TextCounts(7, 2, 5, 5, 2, 2)


def test_characters_are_those_of_the_training_text(write):
    shards = make(write(train__txt="cab", valid__txt="bb"), "characters", documents=True)
    assert shards.tokenizer.vocab_size == 3
    # no token ends a document, but where it begins is stored
    assert shards.tokens("train").tolist() == [2, 0, 1] and shards.starts("train").tolist() == [0]
    with pytest.raises(
        DataError, match=r"the character 'd' .* is not among the 3 of the tokenizer 'characters'"
    ):
        make(write(valid__txt="bd"), "characters")


def test_a_tokenizer_of_another_package(write, bpe, bpe_file):
    shards = make(write(a__txt=TEXT), str(bpe_file))
    assert shards.tokens("train").tolist() == bpe.encode(TEXT).tolist()
    assert shards.tokenizer.fingerprint == bpe.fingerprint


def test_many_tokens_need_wider_integers(write):
    text = "".join(map(chr, range(70_000))).encode(errors="ignore")
    shards = make(write(a__txt=text), "characters")
    assert shards.tokens("train").dtype == np.uint32
    assert shards.tokens("train").tolist() == list(range(shards.tokenizer.vocab_size))


def test_tokens_are_made_once(write, cache):
    folder = write(a__txt=TEXT)
    first = make(folder)
    assert first.folder.parent == cache
    index = (first.folder / "index.json").stat().st_mtime_ns
    assert make(folder).folder == first.folder
    assert (first.folder / "index.json").stat().st_mtime_ns == index


def test_what_tokens_depend_on_gets_a_folder_of_its_own(write, cache, bpe_file):
    folder = write(a__txt="one two", b__txt="three")
    several = [
        make(folder),
        make(folder, "characters"),
        make(folder, str(bpe_file)),
        make(folder, documents=True),
        make(folder, test=0.5),
        make(folder, validation=0.5),
        make(folder / "a.txt"),
        make(write(b__txt="four")),
    ]
    assert len({shards.folder for shards in several}) == len(list(cache.iterdir())) == 8


def test_a_cache_beside_the_text_is_no_text(write):
    folder = write(a__txt="a", b__txt="b")
    first = make(folder, cache=folder / "cache")
    assert make(folder, cache=folder / "cache").folder == first.folder


def test_caches(write, tmp_path, monkeypatch):
    assert make(write(a__txt="a"), cache=tmp_path / "own").folder.parent == tmp_path / "own"
    # a relative path means nothing, as the specification of the variable says
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert default_cache() == Path.home() / ".cache" / "linrec"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache() == Path.home() / ".cache" / "linrec"


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, DataError])
def test_an_interrupted_writing_leaves_nothing(write, cache, monkeypatch, interruption):
    folder = write(train__txt=TEXT, valid__txt=TEXT)
    encode, calls = ByteTokenizer.encode, []

    def failing(self, text):
        calls.append(text)
        if len(calls) == 2:
            raise interruption
        return encode(self, text)

    with monkeypatch.context() as patched:
        patched.setattr(ByteTokenizer, "encode", failing)
        with pytest.raises(interruption):
            make(folder)
    assert list(cache.iterdir()) == []
    assert make(folder).counts("validation").characters == len(TEXT)


def test_what_a_killed_process_left_is_not_taken_as_whole(write, cache):
    folder = write(a__txt=TEXT)
    whole = make(folder).folder
    # a process that is killed cannot clean up: its files have another name than the folder that is looked for
    left = whole.rename(cache / f"{whole.name}.abc.partial")
    (left / "train.ids").write_bytes(b"half")
    again = make(folder)
    assert again.folder == whole and len(again.tokens("train")) == len(TEXT.encode())


def test_of_two_processes_the_first_to_finish_wins(tmp_path):
    folder = tmp_path / "shards"
    with write_shards(folder, ByteTokenizer()) as slow:
        slow.write("train", [["same"]], mark=False)
        with write_shards(folder, ByteTokenizer()) as fast:
            fast.write("train", [["same"]], mark=False)
        first = (folder / "index.json").stat().st_ino
    assert (folder / "index.json").stat().st_ino == first
    assert [path.name for path in tmp_path.iterdir()] == ["shards"]


def complaint(folder: Path) -> str:
    with pytest.raises(DataError) as caught:
        Shards(folder)
    said = str(caught.value)
    assert said.startswith(f"the tokens in {folder} cannot be read: ") and "\n" not in said
    assert said.endswith(" Delete the folder; it will be made again.")
    return said


def test_damaged_tokens_are_found(write):
    shards = make(write(a__txt=TEXT))
    tokens, index = shards.folder / "train.ids", shards.folder / "index.json"
    content, stored = tokens.read_bytes(), read_json(index)
    tokens.write_bytes(content[:-1])
    assert f"train.ids has {len(content) - 1} bytes, not {len(content)}" in complaint(shards.folder)
    tokens.unlink()
    assert "No such file" in complaint(shards.folder)
    tokens.write_bytes(content)
    index.write_text(json.dumps({**stored, "version": 0}))
    assert "index.json is of another version" in complaint(shards.folder)
    for text, message in (("[]", ""), ("{}", "index.json lacks 'version'")):
        index.write_text(text)
        assert message in complaint(shards.folder)


def earlier(shards: Shards, **changed) -> Path:
    """Turn the index into an index without checksums, with other values."""
    index = shards.folder / "index.json"
    stored = read_json(index)
    files = {name: (shards.folder / name).stat().st_size for name in stored["files"]}
    index.write_text(json.dumps({**stored, "version": 2, "files": files, **changed}))
    return shards.folder


def test_tokens_of_earlier_versions_load_with_one_line(write):
    first = make(write(a__txt=TEXT))
    earlier(first)
    with pytest.warns(UserWarning, match=r"the tokens in .* have no checksum, .* delete the folder to make"):
        again = make(write(a__txt=TEXT))
    assert again.folder == first.folder and again.tokens("train").tolist() == first.tokens("train").tolist()


@pytest.mark.parametrize("dtype", [">u2", "<i2", "<f2", "|O", 3])
def test_tokens_of_another_dtype_are_refused(dtype, write):
    said = complaint(earlier(make(write(a__txt=TEXT)), dtype=dtype))
    assert f"`dtype` must be one of <u2, <u4; got {dtype!r}" in said


def test_tokens_that_do_not_fit_together_are_refused(write):
    shards = make(write(train__txt="abc", valid__txt="de"), documents=True)
    counts = read_json(shards.folder / "index.json")["splits"]
    for found, message in (({"tokens": 3}, "has 4 tokens"), ({"words": -1}, "integers of at least 0")):
        folder = earlier(shards, splits={**counts, "train": {**counts["train"], **found}})
        assert message in complaint(folder)
    folder = earlier(shards, splits={**counts, "test": counts["train"]})
    assert "test.ids has 0 tokens, but index.json counts 4" in complaint(folder)
    np.array([0, 5], "<i8").tofile(folder / "train.starts")
    assert "train.starts must be ascending indices of 4 tokens" in complaint(earlier(shards, splits=counts))
    np.array([97, 257, 98, 256], "<u2").tofile(folder / "train.ids")
    assert "train.ids has the token 257, but its tokenizer has 257 tokens" in complaint(folder)


def test_large_files_are_verified_once_and_again_after_a_change(write, monkeypatch):
    monkeypatch.setattr("linrec.lab.corpora.shards.SMALL", 8)
    folder = write(a__txt=TEXT)
    shards = make(folder)
    read = []
    monkeypatch.setattr("linrec.lab.corpora.shards.checksum", lambda content: read.append(len(content)) or "")
    make(folder)
    # the tokenizer has more than 8 bytes too
    assert read == []
    tokens = shards.folder / "train.ids"
    content = bytearray(tokens.read_bytes())
    content[-1] ^= 1
    tokens.write_bytes(content)
    monkeypatch.undo()
    assert "train.ids: its checksum is wrong" in complaint(shards.folder)


def test_a_cache_that_cannot_be_written(write, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"tokens cannot be written to .*/file: .* pass another `cache`\."):
        make(write(a__txt="a"), cache=tmp_path / "file")


def test_writing_to_mapped_tokens_changes_no_file(write):
    shards = make(write(a__txt="abc"))
    shards.tokens("train")[0] = 0
    assert shards.tokens("train").tolist() == [97, 98, 99]


def test_progress_is_a_bar_on_a_terminal(write):
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=60)
    make(write(a__txt=TEXT), validation=0.5, display=ReadingDisplay(console))
    shown = screen.getvalue()
    for what in ("measuring the text", "tokenising train", "tokenising validation"):
        assert what in shown
    # half of the text trains, and the bar is full then
    assert shown.count("100%") >= 3 and "0:00:00" in shown


def test_progress_is_lines_elsewhere(write):
    lines = io.StringIO()
    shards = make(write(a__txt=TEXT), "characters", display=ReadingDisplay(Console(file=lines)))
    assert lines.getvalue().splitlines() == [
        "measuring the text",
        "collecting characters",
        "tokenising train",
        f"tokens are in {shards.folder}",
    ]
