"""The configuration of a linrec model as transformers stores it."""

import dataclasses
import sys
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from linrec.errors import UntrustedCodeError
from linrec.hf.cache import CACHE
from linrec.models import ModelConfig
from linrec.rules import check_numbers

__all__ = ["LinrecConfig"]


class LinrecConfig(PreTrainedConfig):
    """A `linrec.models.ModelConfig` as a configuration of transformers.

    The fields of the model are in `model`. `vocab_size`, `hidden_size`, `num_hidden_layers` and
    `tie_word_embeddings` repeat them under the names that transformers reads.

    Args:
        model: fields of `ModelConfig`, by name; missing fields have their defaults.
        max_position_embeddings: longest sequence that evaluations shall take; the model itself has no limit.
        use_cache: whether calls in evaluation mode return a cache.
        tuned_state: whether the model has a trained initial state; `LinrecForCausalLM.tune_state` adds it.
        kwargs: arguments of `PreTrainedConfig`, such as `eos_token_id`.

    Example:
        >>> config = LinrecConfig({"vocab_size": 10, "d_model": 16, "mixer": "gla"})
        >>> config.hidden_size, config.model_config().mixer
        (16, 'gla')
    """

    model_type = "linrec"
    # `vocab_size` has no default
    has_no_defaults_at_init = True
    keys_to_ignore_at_inference: ClassVar[list[str]] = [CACHE]

    def __init__(
        self,
        model: dict[str, Any],
        max_position_embeddings: int = 2048,
        use_cache: bool = True,
        tuned_state: bool = False,
        **kwargs: Any,
    ) -> None:
        check_numbers({"model": model})
        config = ModelConfig(**model)
        self.model = dataclasses.asdict(config)
        self.vocab_size, self.hidden_size = config.vocab_size, config.d_model
        self.num_hidden_layers = config.n_layers
        self.max_position_embeddings, self.use_cache = max_position_embeddings, use_cache
        self.tuned_state = tuned_state
        kwargs["tie_word_embeddings"] = config.tie_embeddings
        for repeated in ("vocab_size", "hidden_size", "num_hidden_layers"):
            kwargs.pop(repeated, None)
        super().__init__(**kwargs)

    def model_config(self) -> ModelConfig:
        """Return the configuration of linrec's model.

        Raises:
            UntrustedCodeError: the configuration names a mixer by an import path, at any depth, whose module
                is not imported yet.
        """
        fields: dict[str, Any] = {
            # JSON has no tuples
            name: tuple(value) if isinstance(value, list) else value
            for name, value in self.model.items()
        }
        config = ModelConfig(**fields)
        for name in sorted(config.import_paths):
            module = name.partition(":")[0]
            if module not in sys.modules:
                raise UntrustedCodeError(
                    f"the configuration names the mixer {name!r}, which is code outside of linrec. Import "
                    f"{module} first if you trust it."
                )
        return config
