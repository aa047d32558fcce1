"""linrec's models as models of Hugging Face transformers: load, generate, evaluate, fine-tune, publish.

Importing this package registers the classes with the Auto classes of transformers. `linrec.lab.publishing`
writes the folder of a run for others, and runs tasks of lm-eval.
"""

from linrec.extras import check_version, import_extra

import_extra("transformers", "`linrec.hf`", extra="hf")
check_version("transformers", "5.13", "`linrec.hf`", extra="hf")

from linrec.hf.cache import Snapshot, StateCache  # noqa: E402
from linrec.hf.config import LinrecConfig  # noqa: E402
from linrec.hf.exchange import from_hugging_face, to_hugging_face  # noqa: E402
from linrec.hf.model import (  # noqa: E402
    LinrecForCausalLM,
    LinrecForSequenceClassification,
    LinrecModel,
)

__all__ = [
    "LinrecConfig",
    "LinrecForCausalLM",
    "LinrecForSequenceClassification",
    "LinrecModel",
    "Snapshot",
    "StateCache",
    "from_hugging_face",
    "to_hugging_face",
]
