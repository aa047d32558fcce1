"""Inspect a run folder: write a page, pictures and numbers."""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from linrec.files import make_subfolder, write_text
from linrec.lab.inspection.collect import Layer, inspect_model
from linrec.lab.inspection.page import draw, render_page
from linrec.lab.inspection.statistics import BINS, forgetting, histogram, reach, time_scales
from linrec.lab.inspection.tokens import InspectedTokens, choose_tokens
from linrec.lab.tasks import SplitName
from linrec.lab.train import ConfigError, Run, RunFolderError
from linrec.lab.train.records import provenance
from linrec.lab.train.run import write_json
from linrec.models.pattern import spelled

__all__ = ["Inspection", "write_inspection"]

FOLDER = "inspection"
PAGE = "inspection.html"
JSON = "inspection.json"
N_TOKENS = 256
# limit for token-mixing matrices: their size grows quadratically, and a screen has fewer pixels
MOST = 1024


@dataclass(frozen=True)
class Inspection:
    """Result of `write_inspection`.

    Args:
        tokens: the inspected tokens.
        layers: the inspected layers.
        page: path of the page; pictures and numbers are in the same folder.
        missing: a sentence for each item that could not be shown.
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

    The page, `inspection.html`, embeds its pictures. They are also written as histograms.png,
    token_mixing.png, transitions.png, and text.png, which shows the transitions over the first tokens with
    their names. `inspection.json` contains the numbers. Existing files of these names are replaced.

    Args:
        run: the run, as `linrec.lab.train.load_run` returns it.
        prompt: the text; for this and the next three arguments see `choose_tokens`.
        path: a text file, a folder or a glob.
        split: name of the split of a text or a task.
        n_tokens: maximal number of tokens.
        matrices: whether to compute token-mixing matrices, for at most 1,024 tokens.
        out: output folder; None means "inspection" in the run folder.
        device: device of the computation.
        command: the command line to record; None omits it.

    Returns:
        The inspected tokens and layers, and the path of the page.

    Raises:
        ConfigError: too many or too few tokens, a mixer without transitions and matrices, or an error of
            `choose_tokens`.
        DataError: the text cannot be used.
        RunFolderError: the run has no checkpoint yet, or the folder is not writable.
        CheckpointError: no checkpoint is usable.

    Example:
        >>> import tempfile
        >>> from linrec.models import ModelConfig
        >>> from linrec.lab.tasks import MemoryHorizon
        >>> from linrec.lab.train import LoopConfig, TrainConfig, fit, load_run
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
            f"--tokens must be at most {MOST:,} for token-mixing matrices, whose size grows quadratically; "
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
    """Return the numbers of a layer for `inspection.json`; None means infinite or missing."""
    found, forget = forgetting(layer), None
    if found is not None:
        scales = [scale if math.isfinite(scale) else None for scale in time_scales(layer).tolist()]
        forget = {**found.to_dict(), "histogram": histogram(layer).tolist(), "time_scales": scales}
    phase: str | list[float] | None = None
    if layer.phase is not None:
        # constant phases are few enough to list
        phase = layer.phase.tolist() if layer.phase.dim() == 1 else "changes"
    return {"name": layer.name, "forget": forget, "phase": phase, "reach": reach(layer)}
