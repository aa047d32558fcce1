"""Models of other libraries' checkpoints.

An architecture is a file of this folder that is called as `model_type` in its config.json, and found by that
name. It has two functions, which are all there is to write for another one:

    config(options: Options) -> ModelConfig
    weights(tensors: Tensors, config: ModelConfig) -> dict[str, Tensor]

The first reads config.json; the second takes every tensor of the checkpoint, and returns the `state_dict` of
the `LanguageModel` of that configuration. `linrec.convert.mamba2` is the pattern.
"""

import importlib
import pkgutil
from pathlib import Path

import torch

from linrec.convert.checkpoint import ConversionError, Options, Tensors, open_checkpoint
from linrec.errors import unknown
from linrec.models import LanguageModel

__all__ = ["ConversionError", "Options", "Tensors", "from_hugging_face", "model_types"]


def model_types() -> list[str]:
    """What `model_type` in config.json may be, sorted.

    Example:
        >>> "mamba2" in model_types()
        True
    """
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "checkpoint")


def from_hugging_face(folder: str | Path) -> LanguageModel:
    """Make the model of a checkpoint in the layout of Hugging Face transformers, with its weights.

    Read are `config.json` and `model.safetensors`, or the files that `model.safetensors.index.json` lists, as
    `save_pretrained` writes them; transformers itself is not needed. Nothing is unpickled and no code of the
    checkpoint is run. Every tensor has to have its place in the model, and every parameter its tensor.

    Args:
        folder: the checkpoint, of a causal language model of one of `model_types()`.

    Returns:
        The model on the CPU, in float32 whatever the checkpoint is in, in evaluation mode. No random numbers
        are drawn.

    Raises:
        ConversionError: a folder, file, option or tensor is missing, not what it should be, or not known.

    Example:
        >>> from_hugging_face("no/such/folder")
        Traceback (most recent call last):
        linrec.convert.checkpoint.ConversionError: there is no folder no/such/folder; ...
    """
    with open_checkpoint(Path(folder)) as (options, tensors):
        model_type = options.read("model_type", str)
        if model_type not in model_types():
            raise ConversionError(f"{options.path}: {unknown('`model_type`', model_type, model_types())}")
        architecture = importlib.import_module(f"{__name__}.{model_type}")
        config = architecture.config(options)
        weights = architecture.weights(tensors, config)
        tensors.check_all_taken()
    # without memory or first weights, which take minutes to draw in large models
    with torch.device("meta"):
        model = LanguageModel(config)
    # copies: what has been read still lies in the files
    copies = {name: tensor.to(torch.float32, copy=True) for name, tensor in weights.items()}
    model.load_state_dict(copies, assign=True)
    if config.tie_embeddings:
        model.head.weight = model.embedding.weight
    return model.eval()
