"""Every mixer reproduces its paper's released code, or says why there is nothing to compare with."""

import pytest
import torch

from linrec import mixers
from tests import released
from tests.markdown import ROOT
from tests.tiers import thorough

CASES = released.cases()
COMPARED = {name: about for name, about in CASES.items() if "without" not in about}
LAYERS = [name for name, about in COMPARED.items() if "arguments" in about]
LIMIT = 64 * 1024  # bytes of a case


@pytest.mark.parametrize("case", LAYERS)
def test_a_mixer_with_the_released_weights_gives_the_released_outputs(case):
    assert released.difference(case) < CASES[case]["error"]


@thorough
@pytest.mark.parametrize("case", LAYERS)
def test_the_comparison_notices_a_weight_that_changes(case, monkeypatch):
    numbers = released.read(case)
    changed = {name: 1.01 * x + 0.01 if name.startswith("weights.") else x for name, x in numbers.items()}
    monkeypatch.setattr(released, "read", lambda _: changed)
    with torch.no_grad():
        assert released.difference(case) > 100 * CASES[case]["error"]


@pytest.mark.parametrize("case", CASES)
def test_a_case_is_complete_and_small(case):
    about = CASES[case]
    assert about["mixer"] in mixers.names()
    files = [released.FOLDER / f"{case}.safetensors"]
    if case in COMPARED:
        optional = {"arguments", "d_model"} if case in LAYERS else {"test"}
        assert about.keys() - {"note"} == released.KEYS | optional
        assert len(about["commit"]) == 40
        assert files[0].stat().st_size < LIMIT
        assert case in LAYERS or f'"{case}"' in (ROOT / about["test"]).read_text()
    else:
        assert about.keys() == {"mixer", "without"}
        assert case == about["mixer"] and not files[0].exists()


@pytest.mark.parametrize("mixer", mixers.names())
def test_every_mixer_is_compared_or_says_why_not(mixer):
    mine = [name for name, about in CASES.items() if about["mixer"] == mixer]
    assert mine
    assert len({"without" in CASES[name] for name in mine}) == 1
