"""Tokenizers of language models, as files without code."""

from linrec.errors import DataError
from linrec.text.hugging_face import HuggingFaceTokenizer
from linrec.text.load import load_tokenizer, read_tokenizer
from linrec.text.tokenizer import (
    ByteTokenizer,
    CharacterTokenizer,
    StreamDecoder,
    Tokenizer,
    WordTokenizer,
)

__all__ = [
    "ByteTokenizer",
    "CharacterTokenizer",
    "DataError",
    "HuggingFaceTokenizer",
    "StreamDecoder",
    "Tokenizer",
    "WordTokenizer",
    "load_tokenizer",
    "read_tokenizer",
]
