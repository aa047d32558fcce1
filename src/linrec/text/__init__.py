"""Text for language models: tokenizers, text sources, and memory-mapped token files."""

from linrec.errors import DataError
from linrec.text.corpus import default_cache, tokenised
from linrec.text.files import TextFiles
from linrec.text.hugging_face import HuggingFaceTokenizer
from linrec.text.load import load_tokenizer, read_tokenizer
from linrec.text.pieces import TextCounts
from linrec.text.rows import DatasetRows
from linrec.text.shards import Shards
from linrec.text.texts import Texts
from linrec.text.tokenizer import ByteTokenizer, CharacterTokenizer, StreamDecoder, Tokenizer

__all__ = [
    "ByteTokenizer",
    "CharacterTokenizer",
    "DataError",
    "DatasetRows",
    "HuggingFaceTokenizer",
    "Shards",
    "StreamDecoder",
    "TextCounts",
    "TextFiles",
    "Texts",
    "Tokenizer",
    "default_cache",
    "load_tokenizer",
    "read_tokenizer",
    "tokenised",
]
