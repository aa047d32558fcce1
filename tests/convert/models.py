"""Comparison of a model of transformers with what its checkpoint is converted to, and checks of refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from linrec.convert import ConversionError, from_hugging_face, to_hugging_face
from linrec.models import LanguageModel
from linrec.testing import generator


def randomize(model: torch.nn.Module) -> None:
    """Give every parameter numbers of its own, those that start as zeros, ones or a sequence too."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator(parameter.numel())))


def check_conversion(
    model: Any,
    folder: Path,
    *,
    time: int = 13,
    changed: tuple[str, ...] = (),
    **saved: Any,
) -> LanguageModel:
    """Save a model of transformers, convert it, and compare logits: of one pass, and of a prefix and steps.

    The converted model is written back, and compared again.

    Args:
        model: a causal language model of transformers, in float32.
        folder: where to save it.
        time: steps of the sequences.
        changed: ends of names of tensors that are written back with other values, for the same logits.
        saved: further arguments of `save_pretrained`.

    Returns:
        The converted model.
    """
    randomize(model)
    model.save_pretrained(folder, **saved)
    tokens = torch.randint(model.config.vocab_size, (2, time), generator=generator())
    before = torch.get_rng_state()
    converted = from_hugging_face(folder)
    assert torch.equal(torch.get_rng_state(), before)
    for parameter in converted.parameters():
        # trainable, and no view of a file
        assert parameter.requires_grad and parameter.dtype == torch.float32
        assert parameter.untyped_storage().nbytes() == 4 * parameter.numel()
    with torch.no_grad():
        expected = model.eval()(tokens).logits
        logits, _ = converted(tokens)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        prefix, state = converted(tokens[:, : time // 2])
        pieces = [prefix]
        for step in tokens[:, time // 2 :].split(1, dim=1):
            logits, state = converted(step, state)
            pieces.append(logits)
    torch.testing.assert_close(torch.cat(pieces, 1), expected, rtol=1e-4, atol=1e-4)
    _check_back(model, converted, folder, tokens, changed)
    # what has no effect would agree too
    assert expected.std(dim=1).min() > 0.01
    return converted


def _check_back(
    model: Any, converted: LanguageModel, folder: Path, tokens: torch.Tensor, changed: tuple[str, ...]
) -> None:
    """Write the converted model as a checkpoint, and compare its tensors and logits with the original."""
    back = folder.parent / f"{folder.name}-back"
    to_hugging_face(converted, back, like=folder)
    assert (back / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    again = type(model).from_pretrained(back).eval()
    # not `model`: some models of transformers rescale their weights in place when they run
    theirs = dict(type(model).from_pretrained(folder).named_parameters())
    for name, parameter in again.named_parameters():
        if not name.endswith(changed):
            torch.testing.assert_close(
                parameter, theirs[name], rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )
    with torch.no_grad():
        torch.testing.assert_close(again(tokens).logits, model(tokens).logits, rtol=1e-4, atol=1e-4)


def with_options(folder: Path, *left_out: str, **options: Any) -> None:
    """Change options in the config.json of a checkpoint folder.

    Args:
        folder: the checkpoint.
        left_out: names of options to remove.
        options: values to set, None for null.
    """
    path = folder / "config.json"
    kept = {name: value for name, value in json.loads(path.read_text()).items() if name not in left_out}
    path.write_text(json.dumps(kept | options))


def check_refused(folder: Path, message: str) -> None:
    """Check that a checkpoint is not converted, and that one line with this message says why."""
    with pytest.raises(ConversionError) as error:
        from_hugging_face(folder)
    assert message in str(error.value) and "\n" not in str(error.value)
