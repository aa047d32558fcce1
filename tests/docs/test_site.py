"""The site in a real browser, opened from disk: formulas, search, pictures, narrow screens."""

import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.browser import browser_page, in_a_browser
from tests.markdown import ROOT
from tests.tiers import thorough

pytest.importorskip("material", reason="needs the documentation's tools: pip install 'linrec[docs]'")
pytest.importorskip("latex2mathml", reason="needs the documentation's tools: pip install 'linrec[docs]'")
pytestmark = [thorough, *in_a_browser]
# the theme, the extensions and the search of the site, without the pages that are made from the code
CONFIG = """
INHERIT: {root}/mkdocs.yml
docs_dir: {docs}
site_dir: {site}
hooks: [{root}/docs/maths.py]
plugins: [search, offline]
nav: [{{Home: index.md}}, {{Approximation: hippo.md}}, {{Operators: [delta: operators/delta_rule.md]}}]
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site of three pages in a browser, and every request for the network and every complaint."""
    folder = tmp_path_factory.mktemp("site")
    docs, made = folder / "docs", folder / "site"
    (docs / "operators").mkdir(parents=True)
    for part in ("assets", "images"):
        shutil.copytree(ROOT / "docs" / part, docs / part)
    shutil.copy(ROOT / "docs/style.css", docs)
    (docs / "index.md").write_text("# Home\n\nThe price is $5, and a code of `$HOME` is no formula.\n")
    for page in ("hippo.md", "operators/delta_rule.md"):
        # the other pages are not here
        text = re.sub(r"\]\(\S+\.md\S*\)|\]\[linrec\S+\]", "]", (ROOT / "docs" / page).read_text())
        (docs / page).write_text(text)
    (folder / "mkdocs.yml").write_text(CONFIG.format(root=ROOT, docs=docs, site=made))
    subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"], check=True, cwd=folder)
    with browser_page() as (page, complaints):
        yield SimpleNamespace(page=page, folder=made, complaints=complaints)


def opened(site, name, width=1280):
    """Return the page of the browser with a file of the site in it."""
    site.page.set_viewport_size({"width": width, "height": 900})
    site.page.goto((site.folder / name).as_uri())
    return site.page


def test_search_from_disk_finds_a_page(site):
    page = opened(site, "index.html")
    # the search listens to keys
    page.locator("input.md-search__input").press_sequentially("triangular system")
    result = page.locator(".md-search-result__link").first
    result.wait_for()
    assert "delta_rule" in result.inner_text()
    result.click()
    page.wait_for_url("**/operators/delta_rule.html*")
    assert site.complaints == []


def test_formulas_are_rendered_and_no_dollar_is_left(site):
    page = opened(site, "operators/delta_rule.html")
    sizes = page.locator("math").evaluate_all("all => all.map(x => x.getBoundingClientRect().height)")
    assert len(sizes) > 40 and min(sizes) > 5
    # a subscript is below its base
    base, script = page.locator("math msub").first.evaluate(
        "x => [...x.children].map(y => y.getBoundingClientRect().bottom)"
    )
    assert script > base
    assert "$" not in page.locator("article").inner_text()
    assert opened(site, "index.html").locator("math").count() == 0


@pytest.mark.parametrize("name", ["index.html", "hippo.html", "operators/delta_rule.html"])
@pytest.mark.parametrize("width", [1280, 400])
def test_nothing_is_wider_than_the_screen(site, name, width):
    page = opened(site, name, width)
    assert page.evaluate("document.documentElement.scrollWidth") == width


def test_pages_have_titles_and_an_icon(site):
    page = opened(site, "hippo.html")
    assert page.title() == "Approximation - linrec"
    icon = page.locator("link[rel=icon]").evaluate("link => link.href")
    assert icon == (site.folder / "assets/favicon.svg").as_uri()
