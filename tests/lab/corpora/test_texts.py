import pytest

from linrec.lab.corpora import TextFiles
from linrec.lab.corpora.texts import Part, Texts, WithoutSpaces, documents_of, parts_of
from linrec.text import DataError


def none(read):
    pass


def cut(texts, *, documents=False, **shares):
    parts = parts_of(texts, documents=documents, shares=shares, advance=none)
    found = {
        name: documents_of(texts, part, documents=documents, advance=none) for name, part in parts.items()
    }
    return {name: ["".join(blocks) for blocks in several] for name, several in found.items()}


@pytest.mark.parametrize("n", [10, 13, 999])
def test_a_stream_is_cut_where_the_usual_split_of_shakespeare_is(write, n):
    text = "".join(chr(97 + place % 26) for place in range(n))
    texts = TextFiles(write(a__txt=text) / "a.txt")
    assert cut(texts, validation=0.1, test=0.0) == {
        "train": [text[: int(n * 0.9)]],
        "validation": [text[int(n * 0.9) :]],
    }


def test_three_splits_are_contiguous_and_shares_are_decimal(write):
    # in binary 1000 (1 - 0.05 - 0.05) is 899.99...
    text = "".join(chr(97 + place % 26) for place in range(1000))
    parts = cut(TextFiles(write(a__txt=text) / "a.txt"), validation=0.05, test=0.05)
    assert parts == {"train": [text[:900]], "validation": [text[900:950]], "test": [text[950:]]}


def test_documents_are_cut_whole_and_empty_ones_do_not_count(write):
    folder = write(**{f"{place:02d}__txt": "x" * place for place in range(11)})
    parts = cut(TextFiles(folder), documents=True, validation=0.2, test=0.1)
    assert {name: [len(text) for text in texts] for name, texts in parts.items()} == {
        "train": [1, 2, 3, 4, 5, 6, 7],
        "validation": [8, 9],
        "test": [10],
    }


def test_splits_that_are_there_are_not_cut(write):
    texts = TextFiles(write(train__txt="abcdefghij", valid__txt="valid"))
    assert cut(texts, validation=0.5, test=0.2) == {
        "train": ["abcdefgh"],
        "validation": ["valid"],
        "test": ["ij"],
    }


def test_cuts_do_not_depend_on_blocks(write, monkeypatch):
    texts = TextFiles(write(a__txt="abcdefghij" * 5, b__txt="klm"))
    whole = cut(texts, validation=0.3, test=0.1)
    for block in (1, 7, 50):
        monkeypatch.setattr("linrec.lab.corpora.texts.BLOCK", block)
        assert cut(texts, validation=0.3, test=0.1) == whole


def test_nothing_is_read_to_cut_nothing(write):
    texts = TextFiles(write(a__txt=b"\xff") / "a.txt")
    parts = parts_of(texts, documents=False, shares={"validation": 0.0}, advance=none)
    assert parts == {"train": Part("train")}


def test_an_edge_that_is_no_whole_number_is_moved_down(write):
    parts = cut(TextFiles(write(a__txt="abcdefg") / "a.txt"), validation=0.1, test=0.1)
    assert parts == {"train": ["abcde"], "validation": ["f"], "test": ["g"]}


@pytest.mark.parametrize(
    ("documents", "total", "share", "cure"),
    [
        (True, "2 documents", 0.6, "Pass other shares, .*, or read it as one stream instead of documents"),
        (False, "2 characters", 0.9, "Pass other shares, or text that comes with splits"),
    ],
)
def test_text_that_is_too_short_to_be_cut(write, documents, total, share, cure):
    texts = TextFiles(write(a__txt="abc\n", b__txt="def") if documents else write(c__txt="ab"))
    message = rf"the text has {total}, too few .* train, validation: train would be empty\. {cure}\."
    with pytest.raises(DataError, match=message):
        cut(texts, documents=documents, validation=share)


def test_without_spaces_splits_documents_and_shares_are_those_of_the_rest(write):
    texts = WithoutSpaces(TextFiles(write(train__txt=" a _ b \n c \n", valid__txt="d e")))
    assert texts.splits == ("train", "validation") and isinstance(texts, Texts)
    assert cut(texts, validation=0.5) == {"train": ["a_b\nc\n"], "validation": ["de"]}
    folder = write(a__txt=" 0 1 2 3 4 5 6 7 8 9", b__txt=" ", c__txt="x y")
    texts = WithoutSpaces(TextFiles(folder / "a.txt"))
    assert cut(texts, validation=0.2, test=0.1) == {"train": ["0123456"], "validation": ["78"], "test": ["9"]}
    # a file of spaces alone is an empty document
    texts = WithoutSpaces(TextFiles(folder / "?.txt"))
    assert cut(texts, documents=True, validation=0.5) == {"train": ["0123456789"], "validation": ["xy"]}
    assert texts.identity() != TextFiles(folder / "?.txt").identity() and texts.size("train") == 24
