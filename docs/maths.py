"""Hook of MkDocs: turn the formulas of pages into MathML.

Browsers render MathML without scripts and without a network.

`pymdownx.arithmatex` finds `$...$` and `$$...$$` outside of code. This hook converts them.
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
# a letter after the name of a function needs a thin space
CALL = re.compile(r"(?<!<msub>)(?<!<msup>)(<mi>[A-Za-z]{2,}</mi>)(?=<(?:mi|mn|mrow|mfrac|mover|msu[bp]+)>)")
# bars without a `\left` or `\right` keep the height of a letter
BAR = re.compile("<mo>(&#x0007C;|&#x02016;)</mo>")


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
        ValueError: the converter does not know a command of the formula, or cannot read it.

    Example:
        >>> mathml("a &lt; b", "inline").count("<mi>")
        2
    """
    latex = html.unescape(latex).strip()
    try:
        # the converter knows the environment `split`, which has the same meaning
        made = convert(latex.replace("{aligned}", "{split}"), display=display)
    except Exception as error:
        # its errors have no common base
        raise ValueError(f"{type(error).__name__} in the formula {latex!r}") from error
    made = NAME.sub(r"<mi>\1</mi>", made)
    made = CALL.sub(r'\1<mspace width="0.167em" />', made)
    made = BAR.sub(r'<mo stretchy="false" lspace="0" rspace="0">\1</mo>', made)
    if unknown := re.search(r"\\[A-Za-z]+|>&<", made):
        raise ValueError(f"no MathML for {unknown[0]!r} in the formula {latex!r}")
    return made
