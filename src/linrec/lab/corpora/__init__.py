"""Texts to train on: sources of text, and memory-mapped token files."""

from linrec.lab.corpora.corpus import default_cache, tokenised
from linrec.lab.corpora.files import TextFiles
from linrec.lab.corpora.pieces import TextCounts
from linrec.lab.corpora.rows import DatasetRows
from linrec.lab.corpora.shards import Shards
from linrec.lab.corpora.texts import Texts

__all__ = [
    "DatasetRows",
    "Shards",
    "TextCounts",
    "TextFiles",
    "Texts",
    "default_cache",
    "tokenised",
]
