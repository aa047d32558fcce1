"""Converted checkpoints compute the logits of the code that they were made for."""

import shutil

import pytest
import torch
from safetensors.torch import load_file

from linrec import convert

from . import released

CASES = released.cases()
LIMIT = 150 * 1024  # bytes of a folder


def read(case, folder, form):
    """The model of a case whose weights are a file of safetensors or of `torch.save`."""
    shutil.copytree(released.FOLDER / case, folder, dirs_exist_ok=True)
    path = folder / "model.safetensors"
    if form == "pickle":
        pickled = folder / "pytorch_model.bin"
        torch.save(load_file(path), pickled)
        path.unlink()
        path = pickled
    reader = getattr(convert, CASES[case]["reader"])
    return reader(path if reader is convert.from_rwkv_lm else folder)


@pytest.mark.parametrize("form", ["safetensors", "pickle"])
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_released_code(case, form, tmp_path):
    model = read(case, tmp_path, form)
    numbers, error = load_file(released.FOLDER / case / "numbers.safetensors"), CASES[case]["error"]
    tokens, expected = numbers["tokens"], numbers["logits"]
    # what has no effect would agree too
    assert expected.std(dim=1).min() > 0.01
    with torch.no_grad():
        torch.testing.assert_close(model(tokens)[0], expected, rtol=error, atol=error)
        prefix, state = model(tokens[:, :5])
        pieces = [prefix]
        for step in tokens[:, 5:].split(1, dim=1):
            logits, state = model(step, state)
            pieces.append(logits)
    torch.testing.assert_close(torch.cat(pieces, 1), expected, rtol=error, atol=error)


@pytest.mark.parametrize("case", CASES)
def test_a_case_is_complete_and_small(case):
    about = CASES[case]
    assert about.keys() - {"note"} == released.KEYS
    assert len(about["commit"]) == 40 and about["error"] <= 1e-4
    assert sum(file.stat().st_size for file in (released.FOLDER / case).iterdir()) < LIMIT
