"""Results of every operator and mixer stay as they were; `tests.goldens` says how they are made."""

import pytest

from tests import goldens
from tests.mixers import variants

CURE = "if this is meant, run `python -m tests.goldens` and commit what it writes"


def same(kind, name, found):
    expected = goldens.read(kind)
    if expected["torch"] != goldens.VERSION:
        pytest.skip(f"made with torch {expected['torch']}, whose random numbers may differ")
    assert name in expected and goldens.differences(found, expected[name]) == [], CURE


@pytest.mark.parametrize("case", goldens.operator_cases(), ids=" | ".join)
def test_operators(case):
    same("operators", " | ".join(case), goldens.of_operator(*case))


@pytest.mark.parametrize(("name", "variant"), variants.tiered())
def test_mixers(name, variant):
    same("mixers", f"{name} | {variant}", goldens.of_mixer(name, variant))


@pytest.mark.parametrize("case", variants.cases(), ids=" | ".join)
def test_parameters_keep_their_names_and_shapes(case):
    assert goldens.of_parameters(*case) == goldens.read("parameters").get(" | ".join(case)), CURE


def test_defaults_stay():
    expected = goldens.read("defaults")
    del expected["torch"]
    assert goldens.of_defaults() == expected, CURE


def test_every_case_is_there():
    names = {" | ".join(case) for case in goldens.operator_cases()}
    assert goldens.read("operators").keys() == names | {"torch"}, CURE
    for kind in ("mixers", "parameters"):
        assert goldens.read(kind).keys() == {" | ".join(case) for case in variants.cases()} | {"torch"}, CURE
