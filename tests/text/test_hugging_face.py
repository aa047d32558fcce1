import json
import sys

import pytest

from linrec.text import DataError, HuggingFaceTokenizer, StreamDecoder, load_tokenizer, read_tokenizer
from tests.text.conftest import TEXT


def test_a_tokenizer_json_encodes_as_its_package_does(bpe, bpe_file):
    from tokenizers import Tokenizer

    expected = Tokenizer.from_file(str(bpe_file)).encode(TEXT).ids
    assert bpe.encode(TEXT).tolist() == expected
    assert len(expected) < len(TEXT.encode()) / 1.5
    assert [ids.tolist() for ids in bpe.encode_batch(["the", "", TEXT])][1:] == [[], expected]
    assert bpe.decode(expected) == TEXT
    assert bpe.vocab_size == 300


def test_the_end_of_a_document_is_found_and_stands_for_no_text(bpe):
    assert bpe.end_of_document == bpe.backend.token_to_id("<|endoftext|>")
    assert bpe.decode([*bpe.encode("a"), bpe.end_of_document, *bpe.encode("b")]) == "ab"


def test_truncation_padding_and_tokens_around_the_text_are_left_out(bpe_file):
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    backend = Tokenizer.from_file(str(bpe_file))
    plain = backend.encode(TEXT).ids
    backend.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", backend.token_to_id("<|endoftext|>"))]
    )
    backend.enable_truncation(5)
    backend.enable_padding(length=500)
    assert HuggingFaceTokenizer(backend, name="other").encode(TEXT).tolist() == plain


def test_saved_and_read_again_it_is_the_same(bpe, tmp_path):
    odd = HuggingFaceTokenizer(bpe.backend, name="odd/one", end="Z")
    assert odd.end_of_document == bpe.backend.token_to_id("Z")
    for tokenizer in (bpe, odd):
        tokenizer.save(tmp_path)
        again = read_tokenizer(tmp_path)
        assert (again.name, again.vocab_size) == (tokenizer.name, 300)
        assert again.end_of_document == tokenizer.end_of_document
        assert again.fingerprint == tokenizer.fingerprint
        assert again.encode(TEXT).tolist() == tokenizer.encode(TEXT).tolist()
    assert bpe.fingerprint != odd.fingerprint


def test_paths_of_files_and_folders_load(bpe, bpe_file):
    for path in (bpe_file, bpe_file.parent, str(bpe_file)):
        assert load_tokenizer(path).fingerprint == bpe.fingerprint


def test_a_stream_gives_characters_whole(bpe):
    ids = bpe.encode("Zoë 🦊 to both")
    stream = StreamDecoder(bpe)
    pieces = [stream.feed(int(token)) for token in ids]
    assert "".join(pieces) + stream.finish() == "Zoë 🦊 to both"
    assert not any("\ufffd" in piece for piece in pieces)
    assert "" in pieces


def test_numbers_may_have_gaps(tmp_path):
    tokenizers = pytest.importorskip("tokenizers", reason='the extra "text" is not installed')
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 7}))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = HuggingFaceTokenizer(words, name="words")
    assert tokenizer.vocab_size == 8 and tokenizer.end_of_document is None
    assert tokenizer.encode("b a").tolist() == [7, 0]
    with pytest.raises(DataError, match=r"'words'.*WordLevel"):
        tokenizer.encode("a c")
    with pytest.raises(DataError, match="the tokenizer 'none' has no tokens"):
        HuggingFaceTokenizer(tokenizers.Tokenizer(tokenizers.models.BPE()), name="none")


def test_a_file_that_is_no_tokenizer(bpe_file, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"model": "none"}))
    with pytest.raises(DataError, match="is not a readable tokenizer"):
        load_tokenizer(path)


def test_names_go_to_transformers(bpe, bpe_file, tmp_path):
    """A folder in the form of `save_pretrained` stands for the hub, which takes the same way."""
    transformers = pytest.importorskip("transformers", reason='the extra "text" is not installed')
    fast = transformers.PreTrainedTokenizerFast(tokenizer_file=str(bpe_file), eos_token="<|endoftext|>")
    fast.save_pretrained(tmp_path)
    loaded = HuggingFaceTokenizer.from_pretrained(str(tmp_path))
    assert loaded.encode(TEXT).tolist() == bpe.encode(TEXT).tolist()
    assert loaded.end_of_document == bpe.end_of_document


def test_without_network_the_error_says_what_to_do(monkeypatch):
    pytest.importorskip("transformers", reason='the extra "text" is not installed')
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"'gpt-none'") as error:
        load_tokenizer("gpt-none")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("package", ["tokenizers", "transformers"])
def test_a_missing_extra_is_named(package, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / "tokenizer.json").write_text("{}")
    name = "gpt2" if package == "transformers" else str(tmp_path)
    with pytest.raises(DataError, match=rf"'{package}'.*'linrec\[text\]'"):
        load_tokenizer(name)
