"""Snapshots in files, so that conversations go on from their states after a restart.

    layers.N...    the state of one row, as `linrec.generation.state_file` writes it
    tokens         the tokens that led to the state, (n)
    salt           as JSON, the salt of the requests that share the snapshot

A file has a checksum, the fingerprint of the model and the precision, and is never unpickled. Its owner alone
may read a file, which holds the tokens of prompts and answers.
"""

import hashlib
from pathlib import Path

import torch

from linrec.generation.state import named
from linrec.generation.state_file import StateFileError, fingerprint, read_parts, state_of, write_parts
from linrec.literals import Precision
from linrec.models import LanguageModel
from linrec.serve.prefixes import PrefixTree

__all__ = ["load_snapshots", "save_snapshots"]

SUFFIX = ".snapshot"


def save_snapshots(
    tree: PrefixTree, folder: Path, model: LanguageModel, *, precision: Precision = "32-true"
) -> int:
    """Write the snapshots of a tree into a folder, and remove the files of others; return their number.

    Raises:
        OSError: a file cannot be written; the files before it are whole, and no file is removed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written, made_by = set(), f"{fingerprint(model)} {precision}"
    for salt, tokens, state in tree.snapshots():
        packed = torch.tensor(tokens)
        name = hashlib.sha256(salt.encode() + b"\0" + packed.numpy().tobytes()).hexdigest()[:32] + SUFFIX
        write_parts(folder / name, named(state, "layers") | {"tokens": packed}, {"salt": salt}, made_by)
        (folder / name).chmod(0o600)
        written.add(name)
    for path in folder.glob(f"*{SUFFIX}"):
        if path.name not in written:
            path.unlink()
    return len(written)


def load_snapshots(
    tree: PrefixTree, folder: Path, model: LanguageModel, *, precision: Precision = "32-true"
) -> list[str]:
    """Put the snapshots of a folder into a tree.

    Returns:
        A sentence for each file that is damaged or of another model, which is left out.
    """
    refused, made_by = [], f"{fingerprint(model)} {precision}"
    # the snapshots used last were written last
    for path in sorted(folder.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime_ns):
        try:
            tensors, about = read_parts(path, made_by)
            tokens, salt = tensors.pop("tokens", None), about.get("salt")
            if tokens is None or tokens.dtype != torch.int64 or tokens.dim() != 1 or not len(tokens):
                raise StateFileError(f"{path} is damaged: it has no `tokens` of shape (n) and dtype int64.")
            if not isinstance(salt, str):
                raise StateFileError(f"{path} is damaged: it has no `salt`.")
            tree.put(tokens.tolist(), state_of(tensors, 1, model, path), salt=salt)
        except StateFileError as error:
            refused.append(str(error))
    return refused
