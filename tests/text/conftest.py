from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from linrec.text import HuggingFaceTokenizer

TEXT = "the cat sat on the mat, and the dog sat on the log. Zoë said “so what?” 😀 to both\n" * 3


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep caches of all kinds in the test's own folder; return linrec's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return tmp_path / "caches" / "linrec"


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes text files, given by name, into the test's folder, which it returns."""

    def make(**files: str | bytes) -> Path:
        folder = tmp_path / "texts"
        for name, content in files.items():
            # two underscores are a dot, three part a folder from what is in it
            path = folder / name.replace("___", "/").replace("__", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return folder

    return make


def byte_pairs(text: str) -> Any:
    """A backend of `tokenizers`: byte-level BPE like GPT-2's, trained on a text."""
    tokenizers = pytest.importorskip("tokenizers", reason='the extra "text" is not installed')
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([text], trainer)
    return backend


@pytest.fixture(scope="session")
def bpe_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A `tokenizer.json`: byte-level BPE like GPT-2's, trained on a few sentences."""
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    byte_pairs(TEXT).save(str(path))
    return path


@pytest.fixture
def bpe(bpe_file: Path) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer.from_file(bpe_file)
