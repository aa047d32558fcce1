"""Extension of Griffe, which reads the docstrings for the reference: our section names in its words."""

import re
from typing import Any

import griffe


class Sections(griffe.Extension):
    """Renames sections that Griffe does not know, and links to the tables that docstrings get at import."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Change one docstring."""
        if obj.docstring is None:
            return
        text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
        # a named tuple's fields are its arguments, but Griffe sees no signature that has them
        if isinstance(obj, griffe.Class) and "NamedTuple" in map(str, obj.bases):
            text = re.sub(r"^Args:$", "Attributes:", text, flags=re.MULTILINE)
        # the page of an operator has the table in a section of its own
        text = text.replace("{backends}", "[Backends](#backends) lists the pairs of mode and backend.")
        obj.docstring.value = text
