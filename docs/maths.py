"""Hook of MkDocs: turn the formulas of pages into MathML, which browsers render without scripts.

`pymdownx.arithmatex` finds `$...$` and `$$...$$` outside of code. This hook converts what it found.
"""

import html
import re

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)
BLOCK = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', re.DOTALL)
# the converter writes names of functions as operators, which browsers set with wide spaces
NAME = re.compile(r"<mo>([A-Za-z]{2,})</mo>")


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the content with MathML for its formulas."""
    try:
        content = BLOCK.sub(lambda found: f'<div class="formula">{mathml(found[1], "block")}</div>', content)
        return INLINE.sub(lambda found: mathml(found[1], "inline"), content)
    except ValueError as error:
        raise PluginError(f"{page.file.src_uri}: {error}") from error


def mathml(latex: str, display: str) -> str:
    r"""Return a formula of LaTeX as MathML.

    Args:
        latex: the formula as HTML, so `<` is `&lt;`.
        display: "inline" or "block".

    Raises:
        ValueError: the formula has a command that the converter does not know.

    Example:
        >>> mathml("a &lt; b", "inline").endswith("<mrow><mi>a</mi><mo>&#x0003C;</mo><mi>b</mi></mrow></math>")
        True
    """
    latex = html.unescape(latex).strip()
    # the converter knows the environment `split`, which has the same meaning
    made = NAME.sub(r"<mi>\1</mi>", convert(latex.replace("{aligned}", "{split}"), display=display))
    if unknown := re.search(r"\\[A-Za-z]+|>&<", made):
        raise ValueError(f"no MathML for {unknown[0]!r} in the formula {latex!r}")
    return made
