"""The modules of `docs` are no package: MkDocs loads them from their folder."""

import sys

from tests.markdown import ROOT

sys.path.insert(0, str(ROOT / "docs"))
