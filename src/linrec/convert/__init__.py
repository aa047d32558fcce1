"""Models of other libraries' checkpoints.

`from_hugging_face` reads folders, and `from_rwkv_lm` reads the single file of an RWKV. In a folder, an
architecture is a file of this folder that is called as `model_type` in its config.json, and found by that
name. It has two functions, which are all there is to write for another one:

    config(options: Options) -> ModelConfig
    weights(tensors: Tensors, config: ModelConfig) -> dict[str, Tensor]

The first reads config.json; the second takes every tensor of the checkpoint, and returns the `state_dict` of
the `LanguageModel` of that configuration. `linrec.convert.mamba2` is the pattern.
"""

import importlib
import pkgutil
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from linrec.convert import rwkv_lm
from linrec.convert.checkpoint import ConversionError, Options, Tensors, open_checkpoint, open_tensors
from linrec.errors import unknown
from linrec.models import LanguageModel, ModelConfig

__all__ = ["ConversionError", "Options", "Tensors", "from_hugging_face", "from_rwkv_lm", "model_types"]

# modules of this folder that are no architectures of transformers
SHARED = ("checkpoint", "flash_linear_attention", "rwkv_lm", "state_spaces")


def model_types() -> list[str]:
    """What `model_type` in config.json may be, sorted.

    Example:
        >>> "mamba2" in model_types()
        True
    """
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name not in SHARED)


def from_hugging_face(folder: str | Path) -> LanguageModel:
    """Make the model of a checkpoint in the layout of Hugging Face transformers, with its weights.

    The folder has `config.json`, and `model.safetensors` or `pytorch_model.bin`, or several such files and
    their index, as `save_pretrained` writes them. transformers is not needed. No code of the checkpoint is
    run. Every tensor has to have its place in the model, and every parameter its tensor.

    A `config.json` with `ssm_cfg` and without `model_type` is of state-spaces/mamba, in whose layout the
    authors of Mamba and Mamba-2 publish.

    Args:
        folder: the checkpoint, of a causal language model of one of `model_types()`, or of
            state-spaces/mamba.

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
        architecture = importlib.import_module(f"{__name__}.{_architecture(options)}")
        config = architecture.config(options)
        weights = architecture.weights(tensors, config)
        tensors.check_all_taken()
        return _model(config, weights)


def from_rwkv_lm(path: str | Path) -> LanguageModel:
    """Make the model of a checkpoint of RWKV-LM, in which its authors publish RWKV-4, 5.2 and 6.

    Version and sizes are those of the tensors. A file of `torch.save` is read by
    `torch.load(..., weights_only=True)`, which runs no code.

    Args:
        path: the file, .pth or .safetensors.

    Returns:
        The model, as `from_hugging_face` returns it.

    Raises:
        ConversionError: the file cannot be read, or a tensor is missing or not known.

    Example:
        >>> from_rwkv_lm("RWKV-x060-World-1B6.pth")
        Traceback (most recent call last):
        linrec.convert.checkpoint.ConversionError: there is no RWKV-x060-World-1B6.pth; ...
    """
    with open_tensors(Path(path)) as tensors:
        config = rwkv_lm.config(tensors)
        weights = rwkv_lm.weights(tensors, config)
        tensors.check_all_taken()
        return _model(config, weights)


def _architecture(options: Options) -> str:
    """Return the name of the file here that reads a checkpoint."""
    # the authors of Mamba do not write a `model_type`
    if "model_type" not in options and "ssm_cfg" in options:
        return "state_spaces"
    model_type = options.read("model_type", str)
    if model_type not in model_types():
        raise ConversionError(f"{options.path}: {unknown('`model_type`', model_type, model_types())}")
    return model_type


def _model(config: ModelConfig, weights: Mapping[str, Tensor]) -> LanguageModel:
    """Return the model with these weights, which may still lie in open files."""
    # without memory or first weights, which take minutes to draw in large models
    with torch.device("meta"):
        model = LanguageModel(config)
    # copies: what has been read still lies in the files
    copies = {name: tensor.to(torch.float32, copy=True) for name, tensor in weights.items()}
    model.load_state_dict(copies, assign=True)
    if config.tie_embeddings:
        model.head.weight = model.embedding.weight
    return model.eval()
