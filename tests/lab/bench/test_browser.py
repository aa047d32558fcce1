"""The page in a real browser, without a window: what a parser of HTML can't tell."""

from types import SimpleNamespace

import pytest

from linrec.lab.bench import write_page
from tests.browser import browser_page, in_a_browser
from tests.lab.bench.test_page import row
from tests.tiers import thorough

pytestmark = [thorough, *in_a_browser]
LABEL = f"my_package.my_module:{'Long' * 10}(n_heads=2, d_v=8)"


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """The page, opened from its file, and all that it complained about."""
    rows = [
        row("gla", score=0.09),
        row("gla", 1, score=0.13),
        row(LABEL, score=0.7, state_size=2000, message="m" * 200),
        row("lru", status="diverged", message="x" * 300),
        row("gla", task="adding", metric="mse", score=1e-5, probes={}, curve=[[1, 0.3, None]]),
    ]
    file = write_page(rows, tmp_path_factory.mktemp("suite"), title="a suite")
    with browser_page() as (page, complaints):
        page.goto(file.as_uri())
        yield SimpleNamespace(page=page, complaints=complaints)


def column(page, number):
    """The cells of a column, of the rows that are shown."""
    return page.locator(f"tbody tr:visible td:nth-child({number})").all_inner_texts()


def test_a_heading_sorts_and_the_filter_hides(opened):
    page = opened.page
    assert column(page, 3) == ["0.110", "0.700", "diverged", "0.000010"]
    page.get_by_role("button", name="score").click()
    # by value, and what has none comes last
    assert column(page, 3) == ["0.000010", "0.110", "0.700", "diverged"]
    page.get_by_role("button", name="score").click()
    assert column(page, 3) == ["0.700", "0.110", "0.000010", "diverged"]
    assert page.locator("th[aria-sort=descending]").all_inner_texts() == ["score"]
    page.get_by_role("button", name="mixer").click()
    assert column(page, 2) == ["gla", "gla", "lru", LABEL]
    page.get_by_role("searchbox").fill("GLA cop")
    assert column(page, 1) == ["copying"]
    page.get_by_role("searchbox").fill("")
    assert len(column(page, 1)) == 4
    told = page.locator("summary").first
    told.click()
    assert "linrec bench smoke --mixers gla" in page.locator("pre:visible").inner_text()
    # what it says of a row is below that row, and not in the width of a column
    top = told.bounding_box()["y"]
    assert abs(page.locator("tbody td").first.bounding_box()["y"] - top) < 20
    assert page.locator("pre:visible").bounding_box()["width"] > 900
    told.click()
    assert opened.complaints == []


def test_the_whole_table_is_on_paper(opened):
    page = opened.page
    # as wide as A4 is between its margins
    page.set_viewport_size({"width": 718, "height": 1000})
    page.emulate_media(media="print")
    assert not page.get_by_role("searchbox").is_visible()
    table = page.locator("table").bounding_box()
    assert table["x"] >= 0 and table["x"] + table["width"] <= 718
    page.emulate_media(media="screen")


@pytest.mark.parametrize("width", [1280, 400])
def test_every_picture_is_seen_and_nothing_is_wider_than_the_screen(opened, width):
    page = opened.page
    page.set_viewport_size({"width": width, "height": 900})
    pictures = page.locator("img, svg").all()
    assert len(pictures) == 6
    for picture in pictures:
        box = picture.bounding_box()
        assert picture.is_visible() and box["width"] > 200 and box["height"] > 100
        assert box["x"] >= 0 and box["x"] + box["width"] <= width
        assert picture.evaluate("image => image.naturalWidth") > 500
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert opened.complaints == []
