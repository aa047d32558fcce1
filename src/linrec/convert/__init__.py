"""Conversion of checkpoints of other libraries into linrec models.

`from_hugging_face` reads a checkpoint folder; `from_rwkv_lm` reads the single file of an RWKV checkpoint. For
folders, each architecture is a module of this package, named after `model_type` in config.json and found by
that name. To support another architecture, write a module with two functions:

    config(options: Options) -> ModelConfig
    layout(options: Options, config: ModelConfig) -> Iterable[Piece]

`config` reads config.json. `layout` pairs every tensor of the checkpoint with parameters of the
`LanguageModel` with that configuration; see `linrec.convert.layout`. The same layout reads and writes. See
`linrec.convert.recurrent_gemma` for an example.
"""

import dataclasses
import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from linrec.convert import layout, rwkv_lm
from linrec.convert.checkpoint import (
    ConversionError,
    Options,
    Tensors,
    open_checkpoint,
    open_options,
    open_tensors,
    write_checkpoint,
)
from linrec.discovery import files_of
from linrec.errors import unknown
from linrec.models import LanguageModel, ModelConfig
from linrec.models.config import complete_mixer_args

__all__ = [
    "ConversionError",
    "Options",
    "Tensors",
    "from_hugging_face",
    "from_rwkv_lm",
    "model_types",
    "to_hugging_face",
]

# modules of this package that are not architectures of transformers
SHARED = ("checkpoint", "decoder", "flash_linear_attention", "layers", "layout", "rwkv_lm", "state_spaces")

# architectures of transformers with linear recurrences that linrec does not convert, and the reason
NO_EXPERTS = "linrec has no mixtures of experts"
REFUSED = {
    "bailing_hybrid": "linrec has no latent attention and no mixtures of experts",
    "glm5_next": "linrec has no latent attention and no mixtures of experts",
    "kimi_linear": "linrec has no latent attention and no mixtures of experts",
    "lfm2_moe": NO_EXPERTS,
    "qwen3_5": "this is a model of images and text. Load its text model by `AutoModelForCausalLM`, and save "
    "it: the `model_type` is then 'qwen3_5_text'",
    "qwen3_5_moe": NO_EXPERTS,
    "qwen3_5_moe_text": NO_EXPERTS,
    "zamba2": "linrec has no blocks of shared attention",
}


def model_types() -> list[str]:
    """Return the supported values of `model_type` in config.json, sorted.

    Example:
        >>> "mamba2" in model_types()
        True
    """
    return [name for name in files_of(__path__) if name not in SHARED]


def from_hugging_face(folder: str | Path) -> LanguageModel:
    """Load a checkpoint in the layout of Hugging Face transformers into a new model.

    The folder holds `config.json`, and `model.safetensors` or `pytorch_model.bin`, or several such files and
    their index, as `save_pretrained` writes them. transformers is not needed, and no code of the checkpoint
    runs. The tensors of the checkpoint must match the parameters of the model one to one.

    A `config.json` with `ssm_cfg` and without `model_type` belongs to state-spaces/mamba, the layout in which
    the authors of Mamba and Mamba-2 publish.

    Args:
        folder: the checkpoint of a causal language model, of a type in `model_types()` or of
            state-spaces/mamba.

    Returns:
        The model on the CPU, in evaluation mode, in float32 for any dtype of the checkpoint. No random
        numbers are drawn.

    Raises:
        ConversionError: a folder, file, option or tensor is missing, invalid or unknown.

    Example:
        >>> from_hugging_face("no/such/folder")
        Traceback (most recent call last):
        linrec.convert.checkpoint.ConversionError: there is no folder no/such/folder; ...
    """
    with open_checkpoint(Path(folder)) as (options, tensors):
        architecture = _architecture(options)
        with _naming(options):
            config = architecture.config(options)
            weights = layout.read(architecture.layout(options, config), tensors)
            tensors.check_all_taken()
            return _model(config, weights)


def to_hugging_face(
    model: LanguageModel, folder: str | Path, *, like: str | Path, dtype: torch.dtype | None = None
) -> None:
    """Write a model as a checkpoint of Hugging Face transformers, the inverse of `from_hugging_face`.

    Args:
        model: a model with the configuration that `like` describes, for example a fine-tuned model that
            `from_hugging_face` loaded.
        folder: the checkpoint to create.
        like: a checkpoint folder. Its files, except tensors, are copied: config.json, the tokenizer, and
            others. It needs config.json alone.
        dtype: dtype of the tensors; None is the dtype of the parameters.

    Raises:
        ConversionError: `like` has no valid config.json, or it describes another model; `folder` already
            exists; or a file cannot be written.

    Example:
        >>> from linrec.models import ModelConfig
        >>> model = LanguageModel(ModelConfig(vocab_size=5))
        >>> to_hugging_face(model, "new", like="no/such/folder")
        Traceback (most recent call last):
        linrec.convert.checkpoint.ConversionError: there is no folder no/such/folder; ...
    """
    options = open_options(Path(like))
    architecture = _architecture(options)
    config = architecture.config(options)
    _check_equal(model.config, config, options)
    weights = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    tensors = layout.write(architecture.layout(options, config), weights)
    write_checkpoint(Path(folder), {name: tensor.to(dtype) for name, tensor in tensors.items()}, Path(like))


def from_rwkv_lm(path: str | Path) -> LanguageModel:
    """Load a checkpoint of RWKV-LM, the layout in which its authors publish RWKV-4, 5.2, 6 and 7.

    The version and the sizes are inferred from the tensors. A file of `torch.save` is read by
    `torch.load(..., weights_only=True)`, which runs no code.

    Args:
        path: the file, .pth or .safetensors.

    Returns:
        The model, as `from_hugging_face` returns it.

    Raises:
        ConversionError: the file cannot be read, or a tensor is missing or unknown.

    Example:
        >>> from_rwkv_lm("RWKV-x060-World-1B6.pth")
        Traceback (most recent call last):
        linrec.convert.checkpoint.ConversionError: there is no RWKV-x060-World-1B6.pth; ...
    """
    with open_tensors(Path(path)) as tensors:
        config = rwkv_lm.config(tensors)
        weights = layout.read(rwkv_lm.layout(config), tensors)
        tensors.check_all_taken()
        return _model(config, weights)


@contextmanager
def _naming(options: Options) -> Iterator[None]:
    """Say which file describes a model that linrec refuses to build."""
    try:
        yield
    except ConversionError:
        raise
    except ValueError as error:
        raise ConversionError(
            f"{options.path} describes a model that linrec cannot build: {error}"
        ) from error


def _check_equal(ours: ModelConfig, theirs: ModelConfig, options: Options) -> None:
    """Refuse a model that differs from the configuration in config.json."""
    pairs = zip(_flat(ours).items(), _flat(theirs).values(), strict=True)
    for (name, own), other in pairs:
        if own != other:
            raise ConversionError(
                f"{options.path} describes another model: `{name}` is {other!r}, but the model has {own!r}. "
                "Pass the checkpoint that the model was converted from."
            )


def _flat(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of a configuration; fields with the same effect are equal."""
    arguments = complete_mixer_args(config.mixer, config.mixer_args)
    outputs = config.vocab_size if config.n_outputs is None else config.n_outputs
    return dataclasses.asdict(dataclasses.replace(config, n_outputs=outputs, mixer_args=arguments))


def _architecture(options: Options) -> Any:
    """Return the module of this package that converts the checkpoint."""
    # the authors of Mamba do not write a `model_type`
    if "model_type" not in options and "ssm_cfg" in options:
        model_type = "state_spaces"
    else:
        model_type = options.read("model_type", str)
        if model_type in REFUSED:
            raise ConversionError(f"{options.path}: `model_type` is {model_type!r}; {REFUSED[model_type]}.")
        if model_type not in model_types():
            raise ConversionError(f"{options.path}: {unknown('`model_type`', model_type, model_types())}")
    return importlib.import_module(f"{__name__}.{model_type}")


def _model(config: ModelConfig, weights: Mapping[str, Tensor]) -> LanguageModel:
    """Return the model with these weights, copied from files that may still be open."""
    # the meta device avoids allocating and drawing initial weights, which takes minutes for large models
    with torch.device("meta"):
        model = LanguageModel(config)
    # copies, because the tensors may be memory-mapped from the files
    copies = {name: tensor.to(torch.float32, copy=True) for name, tensor in weights.items()}
    model.load_state_dict(copies, assign=True)
    return model.eval()
