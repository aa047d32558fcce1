"""The base class of tokenizers, and three tokenizers that need no other package: bytes, characters, words."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from linrec.errors import DataError
from linrec.files import write_json

__all__ = ["ByteTokenizer", "CharacterTokenizer", "StreamDecoder", "Tokenizer", "WordTokenizer"]

FILE = "tokenizer.json"
REPLACEMENT = "\ufffd"
# maximum number of tokens that a stream holds back, many more than the bytes of a character
HELD = 64


class Tokenizer(ABC):
    """Converts text to token ids and back.

        decode(encode(text)) = text

    Attributes:
        name: name that users type: "bytes", "characters", "words", "gpt2", or a path.
        vocab_size: size of the vocabulary; token ids are in 0 .. vocab_size - 1.
        end_of_document: the end-of-document token, which decodes to no text; None if the tokenizer has no
            end-of-document token.
    """

    name: str
    vocab_size: int
    end_of_document: int | None

    @abstractmethod
    def encode(self, text: str) -> NDArray[np.unsignedinteger]:
        """Return the tokens of a text, shape (n), uint16 or uint32, without added special tokens.

        Raises:
            DataError: the text has a character that the tokenizer does not know.
        """

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.unsignedinteger]]:
        """Return the tokens of several texts; may be faster than encoding them one by one."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of tokens; bytes that are not UTF-8 become U+FFFD.

        Raises:
            ValueError: a token is not in 0 .. vocab_size - 1.
        """
        listed = [int(token) for token in ids]
        for token in listed:
            if not 0 <= token < self.vocab_size:
                raise ValueError(
                    f"`ids` of the tokenizer {self.name!r} must be in 0 .. {self.vocab_size - 1}; "
                    f"got {token}."
                )
        return self._decode(listed)

    @property
    def fingerprint(self) -> str:
        """Hash of everything that defines how the tokenizer encodes a text: 16 hexadecimal digits."""
        defined = json.dumps(self._definition(), sort_keys=True)
        return hashlib.sha256(defined.encode()).hexdigest()[:16]

    def save(self, folder: Path) -> None:
        """Write `tokenizer.json` into a folder; `read_tokenizer` reads it."""
        write_json(folder / FILE, self._definition())

    @abstractmethod
    def _definition(self) -> dict[str, object]:
        """Return the JSON object that defines the tokenizer."""

    @abstractmethod
    def _decode(self, ids: list[int]) -> str:
        """Decode tokens that are all in the vocabulary."""


class ByteTokenizer(Tokenizer):
    """A tokenizer of UTF-8 bytes, 0 to 255, with token 256 for the end of a document.

    Example:
        >>> tokenizer = ByteTokenizer()
        >>> tokenizer.encode("né").tolist(), tokenizer.decode([110, 195, 169, 256])
        ([110, 195, 169], 'né')
    """

    name = "bytes"
    vocab_size = 257
    end_of_document = 256
    kind: ClassVar[str] = "bytes"

    def encode(self, text: str) -> NDArray[np.unsignedinteger]:
        """Return the bytes of the text, uint16."""
        try:
            encoded = text.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"the text cannot be encoded as UTF-8: {error.reason} at character {error.start}."
            ) from error
        return np.frombuffer(encoded, dtype=np.uint8).astype(np.uint16)

    def _decode(self, ids: list[int]) -> str:
        return bytes(token for token in ids if token != self.end_of_document).decode(errors="replace")

    def _definition(self) -> dict[str, object]:
        return {"kind": self.kind}


class CharacterTokenizer(Tokenizer):
    """A tokenizer of characters, numbered in the order of their code points, without end-of-document token.

    Args:
        characters: the characters, distinct and sorted.

    Raises:
        DataError: `characters` is empty, or not distinct and sorted.

    Source: nanoGPT, whose character-level Shakespeare vocabulary is built this way.

    Example:
        >>> tokenizer = CharacterTokenizer.of(["to be, ", "or not to be"])
        >>> tokenizer.vocab_size, tokenizer.encode("bento").tolist(), tokenizer.decode([4, 7])
        (8, [2, 3, 4, 7, 5], 'nt')
    """

    name = "characters"
    end_of_document = None
    kind: ClassVar[str] = "characters"

    def __init__(self, characters: str) -> None:
        if not characters:
            raise DataError("the tokenizer 'characters' needs text to take its characters from; got none.")
        if list(characters) != sorted(set(characters)):
            raise DataError(
                "`characters` must be distinct and sorted, as CharacterTokenizer.of(texts) makes them."
            )
        self.characters = characters
        self.vocab_size = len(characters)
        # a lookup table indexed by code point
        code_points = np.array([ord(character) for character in characters])
        self._table = np.full(code_points[-1] + 1, self.vocab_size, dtype=np.uint32)
        self._table[code_points] = np.arange(self.vocab_size)

    @classmethod
    def of(cls, texts: Iterable[str]) -> "CharacterTokenizer":
        """Create a tokenizer from the characters that occur in texts."""
        found: set[str] = set()
        for text in texts:
            found.update(text)
        return cls("".join(sorted(found)))

    def encode(self, text: str) -> NDArray[np.unsignedinteger]:
        """Return the token ids of the characters, uint32."""
        code_points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
        ids = self._table[np.minimum(code_points, len(self._table) - 1)]
        unknown = (ids == self.vocab_size) | (code_points >= len(self._table))
        if unknown.any():
            character = text[int(unknown.argmax())]
            raise DataError(
                f"the character {character!r} (U+{ord(character):04X}) is not among the {self.vocab_size} "
                "of the tokenizer 'characters', which are the characters of its training text. Leave it out, "
                "or train with the tokenizer 'bytes', which can encode every character."
            )
        return ids

    def _decode(self, ids: list[int]) -> str:
        return "".join(self.characters[token] for token in ids)

    def _definition(self) -> dict[str, object]:
        return {"kind": self.kind, "characters": self.characters}


class WordTokenizer(Tokenizer):
    """A tokenizer of words, which white space separates; the end of a line is the token `<eos>`.

        decode(encode(text)) = text with single spaces, and with `<unk>` for unknown words

    Args:
        words: the words, distinct and without white space, `<eos>` and `<unk>` among them.

    Raises:
        DataError: `words` has a word twice, a word with white space, or neither `<eos>` nor `<unk>`.

    Source: the word-level Penn Treebank of Mikolov and others (2010), "Recurrent neural network based
    language model": 10,000 words, with `<unk>` in the text, and a token for the end of each line.

    Example:
        >>> tokenizer = WordTokenizer.of(["the cat and the dog\\n"])
        >>> tokenizer.words, tokenizer.encode("the bird\\n").tolist(), tokenizer.decode([1, 3, 0])
        (('the', '<eos>', 'and', 'cat', 'dog', '<unk>'), [0, 5, 1], '\\ncat the')
    """

    name = "words"
    end_of_document = None
    kind: ClassVar[str] = "words"
    end_of_line: ClassVar[str] = "<eos>"
    unknown: ClassVar[str] = "<unk>"

    def __init__(self, words: Sequence[str]) -> None:
        self.words = tuple(words)
        self.vocab_size = len(self.words)
        self._ids = {word: number for number, word in enumerate(self.words)}
        if len(self._ids) < self.vocab_size or any(word.split() != [word] for word in self.words):
            raise DataError(
                "`words` must be distinct and without white space, as WordTokenizer.of makes them."
            )
        if not {self.end_of_line, self.unknown} <= {*self.words}:
            raise DataError(f"`words` must have {self.end_of_line} and {self.unknown}; add them.")

    @classmethod
    def of(cls, texts: Iterable[str]) -> "WordTokenizer":
        """Create a tokenizer from texts that do not end within a word; the most frequent words come first."""
        counts = Counter({cls.end_of_line: 0, cls.unknown: 0})
        for text in texts:
            counts.update(cls._split(text))
        return cls(sorted(counts, key=lambda word: (-counts[word], word)))

    def encode(self, text: str) -> NDArray[np.unsignedinteger]:
        """Return the token ids of the words, uint32; an unknown word is `<unk>`."""
        unknown = self._ids[self.unknown]
        return np.array([self._ids.get(word, unknown) for word in self._split(text)], dtype=np.uint32)

    @classmethod
    def _split(cls, text: str) -> list[str]:
        return text.replace("\n", f" {cls.end_of_line} ").split()

    def _decode(self, ids: list[int]) -> str:
        words = (self.words[token] for token in ids)
        text = " ".join("\n" if word == self.end_of_line else word for word in words)
        return text.replace(" \n", "\n").replace("\n ", "\n")

    def _definition(self) -> dict[str, object]:
        return {"kind": self.kind, "words": list(self.words)}


class StreamDecoder:
    """Decodes tokens one by one as they are generated; the concatenated outputs are the whole text.

    A character whose bytes are spread over several tokens is returned with the last of these tokens.

    Args:
        tokenizer: the tokenizer of the tokens.

    Example:
        >>> stream = StreamDecoder(ByteTokenizer())
        >>> [stream.feed(token) for token in "né".encode()], stream.finish()
        (['n', '', 'é'], '')
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # tokens whose text has been returned, kept as context: they may change how the next tokens decode
        self._before: list[int] = []
        self._held: list[int] = []
        self._shown = 0

    def feed(self, token: int) -> str:
        """Take the next token; return the text that this token completes, which may be empty.

        Raises:
            ValueError: the token is not in 0 .. vocab_size - 1.
        """
        text = self._tokenizer.decode([*self._before, *self._held, token])
        self._held.append(token)
        complete = text.rstrip(REPLACEMENT)
        if complete == text or len(self._held) > HELD:
            return self._release(text)
        piece = complete[self._shown :]
        self._shown += len(piece)
        return piece

    def finish(self) -> str:
        """Return the text held back: bytes that do not form a complete character, as U+FFFD."""
        return self._release(self._tokenizer.decode([*self._before, *self._held]))

    def _release(self, text: str) -> str:
        piece = text[self._shown :]
        if self._held:
            self._before, self._held = self._held, []
            self._shown = len(self._tokenizer.decode(self._before))
        return piece
