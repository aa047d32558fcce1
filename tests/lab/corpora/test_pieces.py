import itertools
import random

import numpy as np
import pytest

from linrec.lab.corpora import TextCounts
from linrec.lab.corpora.shards import Counter, Piece, batches, pieces
from tests.text.conftest import TEXT


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr("linrec.lab.corpora.shards.PIECE", 50)
    monkeypatch.setattr("linrec.lab.corpora.shards.LOOK_BACK", 20)


def test_pieces_are_the_documents_again(small):
    documents = [["a"], [TEXT, TEXT], ["x" * 171], ["one ", "two"]]
    found = list(pieces(documents))
    assert all(0 < len(piece.text) <= 50 for piece in found)
    texts, current = [], ""
    for piece in found:
        assert piece.begins == (current == "")
        current += piece.text
        if piece.ends:
            texts.append(current)
            current = ""
    assert texts == ["".join(blocks) for blocks in documents] and current == ""
    assert list(pieces([[], [""]])) == []


def test_pieces_are_cut_before_a_single_space_between_words(small):
    found = [piece.text for piece in pieces([[TEXT]])]
    assert len(found) > 3
    for left, right in itertools.pairwise(found):
        assert right[0] == " " and not right[1].isspace() and not left[-1].isspace()
    # two spaces, or a space at the end of a line, are no place
    text = "x" * 38 + " y" + "  z" * 2 + " \n" + "w" * 30
    assert [piece.text for piece in pieces([[text]])] == [text[:38], text[38:]]
    assert [piece.text for piece in pieces([["  " * 40]])] == ["  " * 25, "  " * 15]


def test_tokens_of_pieces_are_those_of_the_whole(bpe, monkeypatch):
    # long enough for a place to cut at in every one
    monkeypatch.setattr("linrec.lab.corpora.shards.PIECE", 200)
    monkeypatch.setattr("linrec.lab.corpora.shards.LOOK_BACK", 150)
    rng = random.Random(0)
    words = TEXT.split()
    text = "".join(
        rng.choice(words) + rng.choice([" ", " ", " ", "\n", "  ", ", ", " \n "]) for _ in range(2000)
    )
    found = [piece.text for piece in pieces([[text]])]
    assert len(found) > 40
    assert np.concatenate(bpe.encode_batch(found)).tolist() == bpe.encode(text).tolist()


def test_batches_keep_order_and_are_bounded(monkeypatch):
    monkeypatch.setattr("linrec.lab.corpora.shards.BATCH_CHARACTERS", 10)
    monkeypatch.setattr("linrec.lab.corpora.shards.BATCH_PIECES", 4)
    found = [Piece("x" * n, True, True) for n in (3, 3, 3, 3, 1, 1, 1, 1, 12, 2)]
    grouped = list(batches(found))
    assert [[len(piece.text) for piece in batch] for batch in grouped] == [[3, 3, 3, 3], [1] * 4, [12], [2]]
    assert list(itertools.chain(*grouped)) == found


def test_counts_are_those_of_the_whole_text_however_it_is_cut():
    rng = random.Random(0)
    for _ in range(300):
        text = "".join(rng.choices("ab \n\t\x1c\x1f.é\u00a0\u3000😀", k=rng.randint(1, 40)))
        edges = sorted({0, len(text), *(rng.randrange(len(text)) for _ in range(3))})
        counter = Counter()
        for start, stop in itertools.pairwise(edges):
            counter.add(Piece(text[start:stop], start == 0, stop == len(text)))
        assert counter.counts(tokens=7) == TextCounts(
            tokens=7,
            documents=1,
            characters=len(text),
            bytes=len(text.encode()),
            words=len(text.split()),
            # as many as there are lines in an editor
            lines=len(text.removesuffix("\n").split("\n")),
        )


def test_documents_do_not_run_into_each_other():
    counter = Counter()
    for text in ("one", "two\n", "three"):
        counter.add(Piece(text, True, True))
    counts = counter.counts(tokens=0)
    assert (counts.documents, counts.words, counts.lines) == (3, 3, 3)
