"""Texts to train on: sources of text, and memory-mapped token files."""

from linrec.lab.corpora.corpus import default_cache, tokenised
from linrec.lab.corpora.rows import DatasetRows
from linrec.lab.corpora.shards import Shards, TextCounts
from linrec.lab.corpora.texts import TextFiles, Texts

__all__ = [
    "DatasetRows",
    "Shards",
    "TextCounts",
    "TextFiles",
    "Texts",
    "default_cache",
    "tokenised",
]
