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


# tensors with other values for the same function: RetNet's norm has no weight here, and dt has a single bias
CHANGED = {
    "retnet_fla": ("g_norm.weight", "g_norm_swish_gate.weight", "o_proj.weight"),
    "mamba2_options_state_spaces": ("dt_bias", "in_proj.bias"),
}


# without a configuration there is no layout to write
@pytest.mark.parametrize("case", [case for case, about in CASES.items() if about["reader"] != "from_rwkv_lm"])
def test_a_model_is_written_back(case, tmp_path):
    folder, back = released.FOLDER / case, tmp_path / "back"
    model = convert.from_hugging_face(folder)
    convert.to_hugging_face(model, back, like=folder)
    theirs, found = load_file(folder / "model.safetensors"), load_file(back / "model.safetensors")
    for name, tensor in found.items():
        if not name.endswith(CHANGED.get(case, ())):
            torch.testing.assert_close(tensor, theirs[name].float(), rtol=1e-5, atol=1e-5)
    # a tied head is stored once
    assert theirs.keys() - found.keys() <= {"lm_head.weight"}
    numbers = load_file(released.FOLDER / case / "numbers.safetensors")
    again = convert.from_hugging_face(back)
    with torch.no_grad():
        torch.testing.assert_close(again(numbers["tokens"])[0], model(numbers["tokens"])[0])


def test_lower_bounds_are_shared_and_written_once(tmp_path):
    folder, back = released.FOLDER / "hgrn2_fla", tmp_path / "back"
    model = convert.from_hugging_face(folder)
    bounds = [block.mixer.bounds.gamma for block in model.blocks]
    assert all(gamma is bounds[0] for gamma in bounds)
    with torch.no_grad():
        bounds[0].add_(1.0)
    convert.to_hugging_face(model, back, like=folder)
    before, after = (load_file(path / "model.safetensors")["model.lower_bounds"] for path in (folder, back))
    torch.testing.assert_close(after, before.float() + 1)


@pytest.mark.parametrize("case", CASES)
def test_a_case_is_complete_and_small(case):
    about = CASES[case]
    assert about.keys() - {"note"} == released.KEYS
    assert len(about["commit"]) == 40 and about["error"] <= 1e-4
    assert sum(file.stat().st_size for file in (released.FOLDER / case).iterdir()) < LIMIT
