"""An inspection, from a run folder to its page, its pictures and its numbers."""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from linrec.files import make_subfolder, write_text
from linrec.inspection.collect import Layer, inspect_model
from linrec.inspection.page import draw, render_page
from linrec.inspection.statistics import BINS, forgetting, histogram, reach, time_scales
from linrec.inspection.tokens import InspectedTokens, choose_tokens
from linrec.models.pattern import spelled
from linrec.tasks import SplitName
from linrec.train import ConfigError, Run, RunFolderError
from linrec.train.provenance import provenance
from linrec.train.run import write_json

__all__ = ["Inspection", "write_inspection"]

FOLDER = "inspection"
PAGE = "inspection.html"
JSON = "inspection.json"
N_TOKENS = 256
# of token-mixing matrices: numbers that grow with the square of it, and more than a screen has pixels
MOST = 1024


@dataclass(frozen=True)
class Inspection:
    """What `write_inspection` found, and where it wrote it.

    Args:
        tokens: what the model was inspected on.
        layers: what its mixers told.
        page: the page, with pictures and numbers beside it.
        missing: what could not be shown, a sentence each.
    """

    tokens: InspectedTokens
    layers: tuple[Layer, ...]
    page: Path
    missing: tuple[str, ...]


def write_inspection(
    run: Run,
    *,
    prompt: str | None = None,
    path: str | os.PathLike[str] | None = None,
    split: SplitName | None = None,
    n_tokens: int = N_TOKENS,
    matrices: bool = True,
    out: str | os.PathLike[str] | None = None,
    device: torch.device | str = "cpu",
    command: str | None = None,
) -> Inspection:
    """Inspect a trained model on a text, and write a page about it.

    The page is `inspection.html`, which holds its pictures inside itself: histograms.png, token_mixing.png,
    transitions.png, and text.png, the transitions over the first tokens by name. `inspection.json` has the
    numbers. Files of the same names are replaced.

    Args:
        run: the run, as `linrec.train.load_run` reads it.
        prompt: the text; see `choose_tokens`, also for the next three.
        path: a text file, a folder or a glob.
        split: which split of a text or a task.
        n_tokens: how many tokens to take.
        matrices: whether to make token-mixing matrices, which is possible up to 1,024 tokens.
        out: folder to write to; None is "inspection" in the run folder.
        device: where to compute.
        command: the command line to record, where there is one.

    Returns:
        What was found, and where the page is.

    Raises:
        ConfigError: too many or too few tokens, a mixer that tells nothing, or what `choose_tokens` raises.
        DataError: the text cannot be used.
        RunFolderError: the run has no checkpoint yet, or the folder cannot be written to.
        CheckpointError: no checkpoint is usable.

    Example:
        >>> import tempfile
        >>> from linrec.models import ModelConfig
        >>> from linrec.tasks import MemoryHorizon
        >>> from linrec.train import LoopConfig, TrainConfig, fit, load_run
        >>> task = MemoryHorizon(length=8, n_resets=1, n_samples=20, n_validation=4, n_test=4)
        >>> model = ModelConfig(vocab_size=6, d_model=8, n_layers=1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     loop = LoopConfig(batch_size=4, device="cpu")
        ...     _ = fit(TrainConfig("tiny", task, model, loop=loop), f"{folder}/run")
        ...     page = write_inspection(load_run(f"{folder}/run")).page
        ...     sorted(path.name for path in page.parent.iterdir())
        ['histograms.png', 'inspection.html', 'inspection.json', 'text.png', 'token_mixing.png']
    """
    if matrices and n_tokens > MOST:
        raise ConfigError(
            f"--tokens must be at most {MOST:,} for token-mixing matrices, which grow with its square; "
            f"got {n_tokens:,}. Pass fewer tokens, or --no-matrices to leave the matrices out."
        )
    tokens = choose_tokens(run, n_tokens, prompt=prompt, path=path, split=split)
    model = run.model(device)
    reset = None if tokens.reset is None else tokens.reset.to(device)
    layers = inspect_model(model, tokens.tokens.to(device), reset=reset, token_mixing=matrices)
    mixer = spelled(run.config.model.mixer_pattern)
    if all(layer.magnitude is None and layer.mixing is None for layer in layers):
        cure = "" if matrices else " Leave --no-matrices out to see its token-mixing matrices."
        raise ConfigError(f"nothing can be shown of the mixer {mixer!r}: it has no transitions.{cure}")
    folder = run.path / FOLDER if out is None else Path(out)
    try:
        if out is None:
            make_subfolder(run.path, FOLDER)
        folder.mkdir(parents=True, exist_ok=True)
        pictures, missing = draw(layers, tokens, folder)
        write_text(folder / PAGE, render_page(run, tokens, layers, pictures, missing, command))
    except OSError as error:
        raise RunFolderError(f"could not write to {folder}: {error.strerror or error}.") from error
    content = {
        "run": str(run.path),
        "recipe": run.config.name,
        "mixer": mixer,
        "source": tokens.source,
        "tokens": tokens.tokens[0].tolist(),
        "text": tokens.text,
        "bin_edges": [index / BINS for index in range(BINS + 1)],
        "layers": [_numbers(layer) for layer in layers],
        "command": command,
        **provenance(torch.device(device)),
    }
    write_json(folder / JSON, content)
    return Inspection(tokens, layers, folder / PAGE, tuple(missing))


def _numbers(layer: Layer) -> dict[str, Any]:
    """What `inspection.json` says of a layer; None stands for what is infinite or not there."""
    found, forget = forgetting(layer), None
    if found is not None:
        scales = [scale if math.isfinite(scale) else None for scale in time_scales(layer).tolist()]
        forget = {**found.to_dict(), "histogram": histogram(layer).tolist(), "time_scales": scales}
    phase: str | list[float] | None = None
    if layer.phase is not None:
        # constants are few enough to be listed
        phase = layer.phase.tolist() if layer.phase.dim() == 1 else "changes"
    return {"name": layer.name, "forget": forget, "phase": phase, "reach": reach(layer)}
