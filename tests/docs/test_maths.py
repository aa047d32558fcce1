"""Formulas become MathML that browsers agree on."""

import re

import pytest

pytest.importorskip("mkdocs", reason="needs the documentation's tools: pip install 'linrec[docs]'")
pytest.importorskip("latex2mathml", reason="needs the documentation's tools: pip install 'linrec[docs]'")

import maths

from tests.markdown import PAGES, ROOT, prose


def formulas(page):
    """Return the formulas of a page, those of lines of their own first."""
    text = re.sub(r"`[^`\n]*`", "", prose(page))
    blocks = re.findall(r"\$\$(.*?)\$\$", text, re.DOTALL)
    return blocks + re.findall(r"\$([^$]+)\$", re.sub(r"\$\$.*?\$\$", "", text, flags=re.DOTALL))


PAGES_OF_DOCS = [page for page in PAGES if ROOT / "docs" in page.parents]


@pytest.mark.parametrize("page", PAGES_OF_DOCS, ids=lambda page: page.stem)
def test_every_formula_of_the_pages_is_known(page):
    for formula in formulas(page):
        assert maths.mathml(formula, "block").startswith("<math")


def test_most_pages_of_operators_have_many_formulas():
    counts = [len(formulas(page)) for page in (ROOT / "docs/operators").glob("*.md")]
    assert min(counts) > 5 and sum(counts) > 200


def test_names_of_functions_are_upright_and_apart():
    made = maths.mathml(r"\operatorname{diag}(a) + \log a", "inline")
    assert "<mi>diag</mi><mo" in made and '<mi>log</mi><mspace width="0.167em" /><mi>a</mi>' in made
    # a subscript stays the second child
    assert "<msub><mi>log</mi><mn>2</mn></msub>" in maths.mathml(r"\log_2 t", "inline")


def test_bars_keep_their_height():
    assert maths.mathml(r"\lVert k \rVert", "inline").count('stretchy="false"') == 2


def test_html_is_read_as_text():
    assert "&#x0003C;" in maths.mathml("a &lt; b", "inline")


@pytest.mark.parametrize("formula", [r"\unknown x", r"\begin{gather}a&b\end{gather}", "a^b^c"])
def test_an_unknown_command_is_an_error(formula):
    with pytest.raises(ValueError, match="formula"):
        maths.mathml(formula, "inline")
