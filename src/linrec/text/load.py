"""Loading of tokenizers by name, by path, or from the folder where they were saved."""

import os
from pathlib import Path

from linrec.errors import DataError
from linrec.files import inside, parse_json, reason
from linrec.text.hugging_face import HuggingFaceTokenizer
from linrec.text.tokenizer import FILE, ByteTokenizer, CharacterTokenizer, Tokenizer, WordTokenizer

__all__ = ["load_tokenizer", "read_tokenizer"]


def load_tokenizer(name_or_path: str | os.PathLike[str]) -> Tokenizer:
    """Return a tokenizer by name or path.

    Args:
        name_or_path: "bytes"; the path of a `tokenizer.json`; the path of a folder with a `tokenizer.json`,
            such as a run folder; or a name on the Hugging Face hub, such as "gpt2".

    Returns:
        The tokenizer.

    Raises:
        DataError: the tokenizer does not exist, cannot be loaded, or needs a package that is missing.

    Example:
        >>> load_tokenizer("bytes").vocab_size
        257
    """
    name = os.fspath(name_or_path)
    if name == ByteTokenizer.name:
        return ByteTokenizer()
    if name in (CharacterTokenizer.name, WordTokenizer.name):
        raise DataError(
            f"the tokenizer {name!r} is made from the {name} of a training text. Train with it, and pass the "
            "run folder to use the same tokenizer again."
        )
    path = Path(name).expanduser()
    if path.is_dir() and (path / FILE).is_file():
        return read_tokenizer(path)
    if path.is_file():
        return _read(path)
    if (path.suffix == ".json" or path.is_absolute() or name.startswith(".")) and not path.exists():
        raise DataError(f"there is no tokenizer {name}: no such file or folder.")
    return HuggingFaceTokenizer.from_pretrained(str(path) if path.is_dir() else name)


def read_tokenizer(folder: str | os.PathLike[str]) -> Tokenizer:
    """Return the tokenizer that `Tokenizer.save` wrote into a folder.

    Args:
        folder: the folder, such as a run folder.

    Returns:
        A tokenizer with the same fingerprint.

    Raises:
        DataError: the folder has no `tokenizer.json`, or the file cannot be read.

    Example:
        >>> import tempfile
        >>> from linrec.text import CharacterTokenizer
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     CharacterTokenizer("abc").save(Path(folder))
        ...     read_tokenizer(folder).decode([2, 0, 1])
        'cab'
    """
    path = Path(folder) / FILE
    if not path.is_file():
        raise DataError(f"there is no tokenizer in {folder}: it has no {FILE}.")
    try:
        return _read(inside(path))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {reason(error)}.") from error


def _read(path: Path) -> Tokenizer:
    try:
        content = path.read_bytes()
        stored = parse_json(content, verify=content.endswith(b"\n"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not a readable tokenizer: {error}.") from error
    kind = stored.get("kind") if isinstance(stored, dict) else None
    if kind == ByteTokenizer.kind:
        return ByteTokenizer()
    if kind == CharacterTokenizer.kind:
        if not isinstance(stored.get("characters"), str):
            raise DataError(f"{path} is not a readable tokenizer: `characters` must be a text.")
        return CharacterTokenizer(stored["characters"])
    if kind == WordTokenizer.kind:
        words = stored.get("words")
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise DataError(f"{path} is not a readable tokenizer: `words` must be a list of texts.")
        return WordTokenizer(words)
    return HuggingFaceTokenizer.from_file(path)
