import random

import numpy as np
import pytest
import torch

from linrec.text import (
    ByteTokenizer,
    CharacterTokenizer,
    DataError,
    StreamDecoder,
    WordTokenizer,
    load_tokenizer,
    read_tokenizer,
)
from tests.text.conftest import TEXT

BYTES = ByteTokenizer()


def test_bytes_are_those_of_utf_8():
    assert BYTES.encode(TEXT).tolist() == list(TEXT.encode())
    assert BYTES.decode(BYTES.encode(TEXT)) == TEXT
    assert (BYTES.vocab_size, BYTES.end_of_document) == (257, 256)
    assert BYTES.decode(torch.tensor([97, 256, 98])) == "ab"
    assert BYTES.decode([0xC3, 0x28]) == "\ufffd("
    assert BYTES.encode("").shape == (0,)


def test_characters_are_numbered_in_the_order_of_their_code_points():
    tokenizer = CharacterTokenizer.of(iter(["hello", " wörld 😀"]))
    assert tokenizer.characters == " dehlorwö😀"
    assert tokenizer.vocab_size == 10 and tokenizer.end_of_document is None
    assert tokenizer.encode("lo 😀").tolist() == [4, 5, 0, 9]
    assert tokenizer.decode(np.array([4, 5, 0, 9])) == "lo 😀"


@pytest.mark.parametrize(
    ("text", "named"),
    [("hex", "'x' (U+0078)"), ("h\x00", "'\\x00' (U+0000)"), ("eh😀", "'😀' (U+1F600)")],
)
def test_an_unknown_character_is_named(text, named):
    with pytest.raises(DataError) as error:
        CharacterTokenizer("eh").encode(text)
    assert str(error.value).startswith(
        f"the character {named} is not among the 2 of the tokenizer 'characters'"
    )


@pytest.mark.parametrize("characters", ["ba", "aab", ""])
def test_characters_that_make_no_vocabulary_are_refused(characters):
    with pytest.raises(DataError, match="characters"):
        CharacterTokenizer(characters)


@pytest.mark.parametrize("token", [257, -1])
def test_tokens_out_of_range_are_refused(token):
    with pytest.raises(ValueError, match=rf"'bytes'.*0 .. 256; got {token}\."):
        BYTES.decode([65, token])


def test_text_that_is_no_unicode_is_refused():
    with pytest.raises(DataError, match="cannot be encoded as UTF-8: surrogates not allowed at character 1"):
        BYTES.encode("a\udcff")
    with pytest.raises(DataError, match=r"U\+DCFF"):
        CharacterTokenizer("a").encode("a\udcff")


def test_words_are_numbered_by_their_frequency_and_lines_end_with_a_token():
    tokenizer = WordTokenizer.of([" the cat saw <unk> dogs \n the cat", " ran \n the end \n"])
    assert tokenizer.words == ("<eos>", "the", "cat", "<unk>", "dogs", "end", "ran", "saw")
    ids = tokenizer.encode(" the horse ran \n \n cat ")
    assert ids.tolist() == [1, 3, 6, 0, 0, 2]
    assert tokenizer.decode(ids) == "the <unk> ran\n\ncat"
    # both are in every vocabulary
    assert WordTokenizer.of(["a"]).encode("b\n").tolist() == [2, 1]
    stream = StreamDecoder(tokenizer)
    assert [stream.feed(token) for token in ids] == ["the", " <unk>", " ran", "\n", "\n", "cat"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["<eos>", "<unk>", "a", "a"], "`words` must be distinct"),
        (["<eos>", "<unk>", "a b"], "without white space"),
        (["<eos>", "a"], "`words` must have <eos> and <unk>"),
    ],
)
def test_words_that_make_no_vocabulary_are_refused(words, message):
    with pytest.raises(DataError, match=message):
        WordTokenizer(words)


@pytest.mark.parametrize(
    "tokenizer",
    [BYTES, CharacterTokenizer.of([TEXT]), WordTokenizer.of([TEXT])],
    ids=["bytes", "characters", "words"],
)
def test_saved_and_read_again_it_is_the_same(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    for again in (
        read_tokenizer(tmp_path),
        load_tokenizer(tmp_path),
        load_tokenizer(tmp_path / "tokenizer.json"),
    ):
        assert type(again) is type(tokenizer)
        assert again.fingerprint == tokenizer.fingerprint and again.name == tokenizer.name
        assert again.encode(TEXT).tolist() == tokenizer.encode(TEXT).tolist()


def test_fingerprints_tell_tokenizers_apart():
    several = [BYTES, CharacterTokenizer("ab"), CharacterTokenizer("abc")]
    assert len({tokenizer.fingerprint for tokenizer in several}) == 3
    # stored in run folders, so that it must not change from version to version
    assert BYTES.fingerprint == ByteTokenizer().fingerprint == "eb929771327edd99"


def streamed(tokenizer, ids):
    stream = StreamDecoder(tokenizer)
    return [stream.feed(int(token)) for token in ids], stream.finish()


def test_a_stream_gives_each_character_with_its_last_byte():
    pieces, rest = streamed(BYTES, "aé😀b".encode())
    assert pieces == ["a", "", "é", "", "", "", "😀", "b"] and rest == ""


def test_a_stream_of_any_bytes_adds_up_to_the_text_of_all():
    rng = random.Random(0)
    for _ in range(200):
        # half of it from characters of several bytes, so that some are whole
        ids = [
            b
            for _ in range(20)
            for b in (rng.choice("é😀a").encode() if rng.random() < 0.5 else rng.randbytes(1))
        ]
        pieces, rest = streamed(BYTES, ids)
        assert "".join(pieces) + rest == BYTES.decode(ids)


def test_a_stream_lets_go_of_what_never_becomes_a_character():
    pieces, rest = streamed(BYTES, [0xFF] * 1000 + [0xC3])
    assert "".join(pieces).count("\ufffd") > 900
    assert "".join(pieces) + rest == "\ufffd" * 1001


def test_a_stream_ends_with_what_is_left():
    assert streamed(BYTES, "é".encode()[:1]) == ([""], "\ufffd")
    assert streamed(BYTES, []) == ([], "")


def test_a_stream_of_several_tokens_that_mean_something_together():
    class Spaced(ByteTokenizer):
        """Writes a space between tokens, as some tokenizers do between words: none before the first."""

        def _decode(self, ids):
            return " ".join(chr(token) for token in ids)

    assert streamed(Spaced(), [97, 98, 99]) == (["a", " b", " c"], "")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("characters", "is made from the characters of a training text"),
        ("words", "is made from the words of a training text"),
        ("/nowhere/tokenizer.json", "no tokenizer /nowhere/tokenizer.json: no such file or folder"),
        ("./nowhere", "no tokenizer ./nowhere: no such file or folder"),
    ],
)
def test_names_that_no_tokenizer_has(name, message):
    with pytest.raises(DataError, match=message):
        load_tokenizer(name)


def test_a_folder_without_a_tokenizer(tmp_path):
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        read_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match="is not a readable tokenizer"):
        read_tokenizer(tmp_path)
