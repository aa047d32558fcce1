import pytest

from linrec.lab.corpora import TextFiles
from linrec.text import DataError

MEBIBYTE = 2**20


def stream(texts, split="train"):
    return "".join(texts.stream(split, lambda read: None))


def documents(texts, split="train"):
    return ["".join(blocks) for blocks in texts.documents(split, lambda read: None)]


def test_a_file_is_training_text_whatever_its_name(write):
    texts = TextFiles(write(test__csv="line\r\nanother") / "test.csv")
    assert texts.splits == ("train",) and stream(texts) == "line\r\nanother"


def test_files_of_a_folder_come_in_the_order_of_their_paths(write):
    texts = TextFiles(write(b__txt="b", a__txt="a\n", sub___c__MD="ç", other__py="no", empty__txt=""))
    assert documents(texts) == ["a\n", "b", "ç"]
    # a newline parts files, but only where there is none
    assert stream(texts) == "a\nb\nç"
    assert texts.size("train") == 5


@pytest.mark.parametrize(
    "names",
    [
        ("train__txt", "validation__txt", "test__txt"),
        ("wiki__train__tokens", "wiki__valid__tokens", "wiki__test__tokens"),
        ("train___x__txt", "valid___x__txt", "test___x__txt"),
        ("my-train-0__txt", "my-valid-0__txt", "my-test-0__txt"),
    ],
)
def test_names_of_files_or_folders_are_splits(write, names):
    folder = write(**dict(zip(names, "abc", strict=True)), README__md="left out")
    texts = TextFiles(folder)
    assert [stream(texts, split) for split in ("train", "validation", "test")] == ["a", "b", "c"]


def test_words_that_only_contain_the_names_are_none(write):
    texts = TextFiles(write(contest__txt="a", strain__txt="b", invalid__txt="c"))
    assert documents(texts) == ["a", "c", "b"]


def test_a_glob_takes_any_name_and_knows_splits_too(write):
    folder = write(a__py="a", sub___b__py="b", c__txt="c")
    assert documents(TextFiles(folder / "*.py")) == ["a"]
    assert documents(TextFiles(folder / "**" / "*.py")) == ["a", "b"]
    folder = write(train___d__log="d", test___e__log="e")
    assert TextFiles(folder / "*" / "*.log").splits == ("test", "train")


def test_long_files_are_read_in_blocks_that_split_no_character(write):
    # characters of three bytes cannot all lie within blocks of 2^20
    text = "€" * (MEBIBYTE // 2)
    reads = []
    blocks = list(TextFiles(write(a__txt=text)).stream("train", reads.append))
    assert len(blocks) == 2 and "".join(blocks) == text
    assert sum(reads) == 3 * (MEBIBYTE // 2)


@pytest.mark.parametrize(
    ("content", "place", "reason"),
    [
        (b"ab\xff", 2, "invalid start byte"),
        (b"ab\xc3", 2, "unexpected end of data"),
        # a character that begins at the end of one block and goes wrong in the next
        (b"a" * (MEBIBYTE - 1) + b"\xe2\x82a", MEBIBYTE - 1, "invalid continuation byte"),
    ],
)
def test_what_is_no_utf_8_is_named_with_its_place(write, content, place, reason):
    texts = TextFiles(write(a__txt="fine", b__txt=content))
    with pytest.raises(DataError, match=rf"b\.txt is not UTF-8: {reason} at byte {place}\."):
        stream(texts)


def test_the_identity_changes_with_the_text_and_not_with_its_place(write, tmp_path):
    folder = write(a__txt="a", b__txt="b")
    before = TextFiles(folder).identity()
    moved = folder.rename(tmp_path / "elsewhere")
    assert TextFiles(moved).identity() == before
    (moved / "b.txt").write_text("c")
    assert TextFiles(moved).identity() != before


def test_large_files_are_known_without_being_read(write, monkeypatch):
    monkeypatch.setattr("linrec.lab.corpora.texts.HASHED", 3)
    file = write(a__txt="long") / "a.txt"
    before = TextFiles(file).identity()
    assert before == {"train": [[str(file), 4, file.stat().st_mtime_ns]]}
    file.write_text("longer")
    assert TextFiles(file).identity() != before


def test_what_holds_no_text(write, tmp_path):
    with pytest.raises(DataError, match=r"`path` = .*nowhere\.txt does not exist\."):
        TextFiles(tmp_path / "nowhere.txt")
    with pytest.raises(DataError, match=r"`path` = .*/\*\.py matches no file\."):
        TextFiles(tmp_path / "*.py")
    folder = write(a__py="print")
    with pytest.raises(
        DataError, match=r"has no text: no file in it ends in \.txt, .* Name other files by a glob"
    ):
        TextFiles(folder)
    with pytest.raises(DataError, match="has no text: its files are empty"):
        TextFiles(write(b__txt=""))
    with pytest.raises(DataError, match=r"has no text to train on, only test\.txt, valid\.txt\."):
        TextFiles(write(test__txt="a", valid__txt="b"))
