"""Hugging Face tokenizers: from a `tokenizer.json`, or by any name that `transformers` can load."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linrec.errors import DataError
from linrec.extras import import_extra, one_line
from linrec.field_types import check_types
from linrec.files import WRONG, checksum, read_json, write_json, write_text
from linrec.text.tokenizer import FILE, Tokenizer

__all__ = ["HuggingFaceTokenizer"]

# Hugging Face's file beside `tokenizer.json`, which names the end-of-text token
CONFIG_FILE = "tokenizer_config.json"
# member of this file: the checksum of `tokenizer.json`, whose format is not linrec's to extend
SEAL = "tokenizer_checksum"
# common end-of-text tokens, for tokenizers without this file
USUAL_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer of the package `tokenizers`.

    Encoding neither adds special tokens around a text nor truncates it. A special token that is spelt out in
    a text, such as "<|endoftext|>", is encoded as this token. Decoding omits all special tokens.

    Args:
        backend: a `tokenizers.Tokenizer`; its truncation and padding are disabled.
        name: name of the tokenizer in messages and files.
        end: the end-of-document token as text; None searches the vocabulary for a common token.

    Attributes:
        end: the end-of-document token as text; None without such a token.

    Raises:
        DataError: the vocabulary is empty.
    """

    def __init__(self, backend: Any, *, name: str, end: str | None = None) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.name = name
        # token ids may have gaps, so the number of tokens may be too small
        vocabulary = backend.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise DataError(f"the tokenizer {name!r} has no tokens. Train it before saving it.")
        self.vocab_size = max(vocabulary.values()) + 1
        ends = USUAL_ENDS if end is None else (end,)
        self.end = next((token for token in ends if token in vocabulary), None)
        self.end_of_document = None if self.end is None else vocabulary[self.end]

    @classmethod
    def from_file(cls, path: Path, *, name: str | None = None) -> "HuggingFaceTokenizer":
        """Read a `tokenizer.json`, and the `tokenizer_config.json` beside it if it exists.

        Args:
            path: the file.
            name: name of the tokenizer; None takes the name in `tokenizer_config.json`, or else the path.

        Raises:
            DataError: the package `tokenizers` is missing, or the file is not a valid tokenizer.
        """
        tokenizers = import_extra("tokenizers", f"the tokenizer {path}")
        beside = path.parent / CONFIG_FILE
        try:
            about = read_json(beside) if beside.is_file() else {}
            check_types({CONFIG_FILE: dict}, {CONFIG_FILE: about})
            check_types({"eos_token": str | dict | None, "name_or_path": str | None}, about)
            end = about.get("eos_token")
            # transformers stores a token with options as an object
            spelt = end.get("content") if isinstance(end, dict) else end
            check_types({"eos_token.content": str | None}, {"eos_token.content": spelt})
            content = path.read_bytes()
            if about.get(SEAL, checksum(content)) != checksum(content):
                raise ValueError(
                    f"{WRONG}; restore it, or remove `{SEAL}` from {CONFIG_FILE} if you edited it"
                )
            backend = tokenizers.Tokenizer.from_buffer(content)
        # the package raises bare exceptions
        except Exception as error:
            raise DataError(f"{path} is not a readable tokenizer: {one_line(error)}.") from error
        return cls(backend, name=name or about.get("name_or_path") or str(path), end=spelt)

    @classmethod
    def from_pretrained(cls, name: str) -> "HuggingFaceTokenizer":
        """Load a tokenizer by its name on the Hugging Face hub, or from a folder without `tokenizer.json`.

        Raises:
            DataError: the package `transformers` is missing, the tokenizer does not exist, the hub cannot be
                reached, or the tokenizer has no fast version.
        """
        transformers = import_extra("transformers", f"the Hugging Face tokenizer {name!r}")
        try:
            loaded = transformers.AutoTokenizer.from_pretrained(name, use_fast=True, trust_remote_code=False)
        # the package raises many types of exceptions for the same few reasons
        except Exception as error:
            raise DataError(
                f"the tokenizer {name!r} cannot be loaded: {one_line(error)}. Check the name and the "
                "network, or pass the path of a tokenizer.json. Built-in tokenizers: 'bytes', 'characters'."
            ) from error
        if not loaded.is_fast:
            raise DataError(
                f"the tokenizer {name!r} has no fast version, so no tokenizer.json. Pass another one."
            )
        return cls(loaded.backend_tokenizer, name=name, end=loaded.eos_token)

    def encode(self, text: str) -> NDArray[np.unsignedinteger]:
        """Return the tokens of a text, uint32."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.unsignedinteger]]:
        """Return the tokens of several texts, uint32; uses all processor cores."""
        try:
            encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        # the package raises bare exceptions
        except Exception as error:
            raise DataError(f"the tokenizer {self.name!r} cannot encode: {one_line(error)}.") from error
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def save(self, folder: Path) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json`, in Hugging Face's format."""
        definition = self.backend.to_str()
        write_text(folder / FILE, definition)
        about = {"name_or_path": self.name, "eos_token": self.end, SEAL: checksum(definition.encode())}
        write_json(folder / CONFIG_FILE, about)

    def _decode(self, ids: list[int]) -> str:
        decoded: str = self.backend.decode(ids, skip_special_tokens=True)
        return decoded

    def _definition(self) -> dict[str, object]:
        return {"tokenizer": json.loads(self.backend.to_str()), "end_of_document": self.end_of_document}
