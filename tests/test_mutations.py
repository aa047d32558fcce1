"""The mistakes of `tests.mutations` can be made in the source as it is."""

import ast

import pytest

from tests import tiers
from tests.mutations import MUTATIONS, ROOT, changed, source
from tests.mutations.drawn import statements
from tests.mutations.plugin import plain


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.breaks.split(":")[0])
def test_a_mutation_fits_the_source(mutation):
    text = source(mutation).read_text()
    # a file that is no Python would be noticed by any test
    assert ast.dump(ast.parse(changed(mutation, text))) != ast.dump(ast.parse(text))
    for argument in mutation.tests:
        assert not argument.endswith(".py") or (ROOT / argument).exists()


def test_drawn_mistakes_change_the_source_and_are_python():
    path = ROOT / "src/linrec/nn/slstm_steps/torch.py"
    text = path.read_bytes()
    mistakes = [mistake for statement in statements(ROOT, path) for mistake in statement.mistakes]
    assert len(mistakes) > 30
    for mistake in mistakes:
        assert ast.dump(ast.parse(mistake.applied(text))) != ast.dump(ast.parse(text))


def test_the_group_is_no_part_of_the_name_of_a_test():
    assert plain("tests/test_a.py::test_b[1@2]") == "tests/test_a.py::test_b[1@2]"
    assert plain("tests/test_a.py::test_b[1@2]@tests/test_a.py") == "tests/test_a.py::test_b[1@2]"
    assert plain("tests/test_a.py::test_b@two processes") == "tests/test_a.py::test_b"


def test_the_files_of_the_tiers_exist():
    assert all((ROOT / file).exists() for file in tiers.SECOND + tiers.FIRST)
