"""The fixtures of the tests of tokenizers: texts, a small tokenizer, caches in the test's own folder."""

from tests.text.conftest import bpe, bpe_file, cache, write  # noqa: F401
