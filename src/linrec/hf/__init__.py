"""linrec's models as models of Hugging Face transformers: load, generate, evaluate, fine-tune, publish.

Importing this package registers the classes with the Auto classes of transformers.
"""

from linrec.extras import import_extra

import_extra("transformers", "`linrec.hf`")

from linrec.hf.cache import StateCache  # noqa: E402
from linrec.hf.config import LinrecConfig  # noqa: E402
from linrec.hf.model import (  # noqa: E402
    LinrecForCausalLM,
    LinrecModel,
    from_hugging_face,
    to_hugging_face,
)

__all__ = [
    "LinrecConfig",
    "LinrecForCausalLM",
    "LinrecModel",
    "StateCache",
    "from_hugging_face",
    "to_hugging_face",
]
