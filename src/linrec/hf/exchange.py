"""linrec's models as models of transformers, and back."""

from __future__ import annotations

import dataclasses
from os import PathLike
from pathlib import Path
from typing import Any

from transformers.utils import CONFIG_NAME

from linrec.hf.config import LinrecConfig
from linrec.hf.model import LinrecForCausalLM
from linrec.models import EncoderDecoder, LanguageModel
from linrec.rules import require

__all__ = ["from_hugging_face", "to_hugging_face"]


def to_hugging_face(model: LanguageModel, folder: str | PathLike[str] | None = None) -> LinrecForCausalLM:
    """Return a model of linrec as a model of transformers, with equal logits.

    Args:
        model: a model whose outputs are logits of its tokens, such as `load_run(folder).model()`.
        folder: where `save_pretrained` writes weights and configuration; None writes nothing.
            `linrec publish` writes the tokenizer and a model card too.

    Raises:
        ValueError: the model's outputs are not logits of its tokens, or it is an `EncoderDecoder`.

    Example:
        >>> import torch
        >>> from linrec.models import ModelConfig
        >>> model = LanguageModel(ModelConfig(vocab_size=5, d_model=8, n_layers=1))
        >>> tokens = torch.tensor([[1, 2, 3]])
        >>> torch.equal(to_hugging_face(model)(tokens).logits, model(tokens)[0])
        True
    """
    config = model.config
    require(
        not isinstance(model, EncoderDecoder),
        "`model` must be a language model of one sequence; got an `EncoderDecoder`, whose source the models "
        "here do not take. Keep its `state_dict()`.",
    )
    if config.n_outputs not in (None, config.vocab_size):
        raise ValueError(
            f"`model` must have one output per token of its vocabulary, {config.vocab_size}; got "
            f"`n_outputs` = {config.n_outputs}. Language models have equal numbers."
        )
    made = LinrecForCausalLM(LinrecConfig(dataclasses.asdict(config)))
    # the dtype of the embedding, which no model keeps in float32
    made = made.to(model.embedding.weight).train(model.training)
    made.load_state_dict({hf_name(name): tensor for name, tensor in model.state_dict().items()})
    if folder is not None:
        made.save_pretrained(Path(folder))
        # safetensors makes files that only their owner can read
        for weights in Path(folder).glob("*.safetensors"):
            weights.chmod((Path(folder) / CONFIG_NAME).stat().st_mode)
    return made


def from_hugging_face(model: LinrecForCausalLM | str | PathLike[str]) -> LanguageModel:
    """Return linrec's model of a model of transformers, with equal logits.

    Args:
        model: the model, or a folder of `save_pretrained` or `publish`. Checkpoints of other architectures
            are for `linrec.convert.from_hugging_face`.

    Raises:
        ValueError: the model has a tuned initial state, which `LanguageModel` takes as an argument.
    """
    loaded: Any = model
    if not isinstance(model, LinrecForCausalLM):
        loaded = LinrecForCausalLM.from_pretrained(model)
    if loaded.config.tuned_state:
        raise ValueError(
            "`model` must have no tuned state; its `model.initial_state` is a `linrec.models.InitialState`. "
            "Set `config.tuned_state = False` and `model.initial_state = None` to leave it out."
        )
    made = LanguageModel(loaded.config.model_config()).to(loaded.model.body.embedding.weight)
    names = {hf_name(name): name for name in made.state_dict()}
    made.load_state_dict({names[name]: tensor for name, tensor in loaded.state_dict().items()})
    return made.train(loaded.training)


def hf_name(name: str) -> str:
    """Return the name in checkpoints of transformers of a tensor of a `LanguageModel`."""
    return name.replace("head.", "lm_head.", 1) if name.startswith("head.") else f"model.body.{name}"
