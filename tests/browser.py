"""A browser without a window, for tests of pages that are opened from disk."""

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium")
in_a_browser = [
    pytest.mark.skipif(CHROMIUM is None, reason="needs the browser chromium: apt-get install chromium"),
    # the tests share a browser
    pytest.mark.xdist_group("browser"),
]


@contextlib.contextmanager
def browser_page() -> Iterator[tuple[Any, list[str]]]:
    """Yield a page of the browser, and the list of its complaints and of its requests to the network."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    with playwright.sync_playwright() as started:
        # a container has no namespaces to lock the browser in, and nothing but our own pages are opened
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        complaints: list[str] = []
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "request", lambda request: complaints.append(request.url) if request.url[:4] == "http" else None
        )
        yield page, complaints
        browser.close()
