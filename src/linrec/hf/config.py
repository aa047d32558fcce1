"""The configuration of a linrec model as transformers stores it."""

import dataclasses
import sys
from typing import Any, ClassVar, cast

import torch
from transformers import PreTrainedConfig

from linrec.errors import UntrustedCodeError
from linrec.hf.cache import CACHE
from linrec.mixers.attention import Attention
from linrec.models import ModelConfig, build_mixer
from linrec.rules import check_numbers

__all__ = ["LinrecConfig"]

# attributes that transformers reads and changes, and the fields of `ModelConfig` that they repeat
REPEATED = {
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "tie_word_embeddings": "tie_embeddings",
}


class LinrecConfig(PreTrainedConfig):
    """A `linrec.models.ModelConfig` as a configuration of transformers.

    The fields of the model are in `model`. `vocab_size`, `hidden_size`, `num_hidden_layers` and
    `tie_word_embeddings` repeat them under the names that transformers reads. To set one of these attributes,
    as `resize_token_embeddings` does, sets the field too. `num_attention_heads`, `num_key_value_heads`,
    `head_dim` and `layers_block_type`, which vLLM reads, follow from the fields.

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
        self.model = dataclasses.asdict(ModelConfig(**model))
        given = {name: kwargs.pop(name) for name in REPEATED if name in kwargs}
        for name, field in REPEATED.items():
            setattr(self, name, given.get(name, self.model[field]))
        self.max_position_embeddings, self.use_cache = max_position_embeddings, use_cache
        self.tuned_state = tuned_state
        # models of transformers read them, though its configurations need not have them
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(self, name, kwargs.pop(name, None))
        super().__init__(**kwargs, tie_word_embeddings=self.tie_word_embeddings)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, and the fields of the model that it repeats."""
        super().__setattr__(name, value)
        field = REPEATED.get(name)
        if field is None or self.model[field] == value:
            return
        changes: dict[str, Any] = {field: value}
        if name == "vocab_size" and self.model["n_outputs"] is not None:
            changes["n_outputs"] = value
        if name == "tie_word_embeddings" and self.model["head_bias"] is None:
            # the head keeps the parameters that it has
            changes["head_bias"] = not self.model[field]
        self.model = self.model | changes

    @property
    def layers_block_type(self) -> list[str]:
        """The kind of each layer, as vLLM names them: "attention" or, for all other mixers, "mamba"."""
        config = ModelConfig(**_with_tuples(self.model))
        names = (config.mixer_of(layer)[0] for layer in range(config.n_layers))
        return ["attention" if name == "attention" else "mamba" for name in names]

    @property
    def num_attention_heads(self) -> int:
        """Heads of the first layer of softmax attention; 0 without one."""
        attention = self._attention()
        return 0 if attention is None else attention.n_heads

    @property
    def num_key_value_heads(self) -> int:
        """Heads of keys and values of the first layer of softmax attention; 0 without one."""
        attention = self._attention()
        return 0 if attention is None else attention.kv_heads

    @property
    def head_dim(self) -> int:
        """Channels of a head of the first layer of softmax attention; 0 without one."""
        attention = self._attention()
        return 0 if attention is None else attention.d_head

    def _attention(self) -> Attention | None:
        """Return the first layer of softmax attention, without values."""
        if "attention" not in (kinds := self.layers_block_type):
            return None
        config = ModelConfig(**_with_tuples(self.model))
        with torch.device("meta"):
            return cast(Attention, build_mixer(config, kinds.index("attention")))

    def model_config(self) -> ModelConfig:
        """Return the configuration of linrec's model.

        Raises:
            UntrustedCodeError: the configuration names a mixer by an import path, at any depth, whose module
                is not imported yet.
        """
        config = ModelConfig(**_with_tuples(self.model))
        for name in sorted(config.import_paths):
            module = name.partition(":")[0]
            if module not in sys.modules:
                raise UntrustedCodeError(
                    f"the configuration names the mixer {name!r}, which is code outside of linrec. Import "
                    f"{module} first if you trust it."
                )
        return config


def _with_tuples(fields: dict[str, Any]) -> dict[str, Any]:
    """Return fields of JSON, which has no tuples, as `ModelConfig` takes them."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
