"""Tiny random checkpoints in the layouts of released code, with the logits that this code computed once.

A case is a folder:

    model.safetensors    the checkpoint; a layout that is published as pickles alone is pickled by the test
    config.json          where the layout has one
    numbers.safetensors  `tokens` (b, t), and `logits` (b, t, vocabulary) of them
    about.json           repository, commit, path, layer (the class that ran), error (bound of that of a
                         logit), and reader, the function of `linrec.convert`
"""

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
KEYS = {"repository", "commit", "path", "layer", "error", "reader"}


def cases() -> dict[str, dict[str, Any]]:
    """What about.json of each case says, by the name of its folder."""
    return {path.parent.name: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*/about.json"))}
