"""Extension of Griffe, which reads the docstrings for the reference: our section names in its words."""

import importlib
import re
from typing import Any

import griffe

from linrec.ops.core.backends import table


class Sections(griffe.Extension):
    """Renames sections that Griffe does not know, and fills in the tables that docstrings get at import."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Change one docstring."""
        if obj.docstring is None:
            return
        text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
        # a named tuple's fields are its arguments, but Griffe sees no signature that has them
        if isinstance(obj, griffe.Class) and "NamedTuple" in map(str, obj.bases):
            text = re.sub(r"^Args:$", "Attributes:", text, flags=re.MULTILINE)
        if "\n{backends}\n" in text:
            # Griffe reads files and does not import them
            function = getattr(importlib.import_module(obj.module.path), obj.name)
            text = text.replace("{backends}", table(function.operator.backends, indent=""))
        obj.docstring.value = text
