"""Numbers that the released code of papers computed once, and that our mixers must reproduce.

A case is two files of this folder. CASE.safetensors holds the numbers, CASE.json says where they are from:

    mixer       name of the mixer here
    repository  owner/name of the released code
    commit      the commit that ran
    path        the file of that repository
    layer       the class or function that ran, with its arguments
    error       bound of the relative error of float64 outputs, a power of ten
    arguments   of the mixer here; with `d_model`, the general test below runs the case
    d_model     width
    test        the file of the test, for cases that compare something else, such as initial values
    note        optional: what else a reader should know, one sentence

The general test loads the tensors `weights.NAME` into the mixer, applies it to `x`, with irregular steps if
there is a `dt`, and compares with `y`.

Where no code was released, or none that can be run, MIXER.json has `mixer` and `without`, a sentence that
says so and what the mixer is compared with instead.
"""

import json
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from linrec import mixers

FOLDER = Path(__file__).parent
KEYS = {"mixer", "repository", "commit", "path", "layer", "error"}


def cases() -> dict[str, dict[str, Any]]:
    """What the JSON files say, by the case's name, sorted."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}


def read(case: str) -> dict[str, Tensor]:
    """The numbers of a case in float64; integers and truth values as they are."""
    tensors = safetensors.torch.load_file(FOLDER / f"{case}.safetensors")
    return {name: x.double() if x.is_floating_point() else x for name, x in tensors.items()}


def error(found: Tensor, expected: Tensor) -> float:
    """The largest difference over the largest magnitude."""
    return float((found - expected).abs().max() / expected.abs().max())


def difference(case: str) -> float:
    """The relative error of a mixer with the weights of the released layer."""
    about, numbers = cases()[case], read(case)
    mixer = mixers.build(about["mixer"], about["d_model"], **about["arguments"]).double().eval()
    prefix = "weights."
    mixer.load_state_dict({n.removeprefix(prefix): x for n, x in numbers.items() if n.startswith(prefix)})
    with torch.no_grad():
        times = {name: numbers[name] for name in ("dt",) if name in numbers}
        return error(mixer(numbers["x"], **times)[0], numbers["y"])


def save(case: str, about: dict[str, Any], numbers: dict[str, Tensor]) -> None:
    """Write the two files of a case."""
    (FOLDER / f"{case}.json").write_text(json.dumps(about, indent=2) + "\n")
    tensors = {name: x.detach().contiguous().clone() for name, x in numbers.items()}
    safetensors.torch.save_file(tensors, FOLDER / f"{case}.safetensors")
