"""Inspect a run: choose tokens, and write a page, pictures and numbers."""

import functools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int64
from matplotlib import font_manager
from matplotlib.ft2font import FT2Font
from numpy.typing import NDArray
from torch import Tensor

from linrec import __version__
from linrec.files import make_subfolder, write_text
from linrec.lab.evaluation import choose_text
from linrec.lab.inspection.collect import (
    BINS,
    Layer,
    forgetting,
    histogram,
    inspect_model,
    reach,
    time_scales,
)
from linrec.lab.inspection.figures import NAMED, draw_histograms, draw_over_text, draw_token_mixing
from linrec.lab.pages import Block, Gallery, Picture, Table, Text, render
from linrec.lab.tasks import LanguageModeling, SourcedTask, SplitName
from linrec.lab.tasks.base import Task
from linrec.lab.train import ConfigError, Run, RunFolderError
from linrec.lab.train.records import provenance
from linrec.lab.train.run import language_task, tokenizer_of, write_json, writing
from linrec.models.config import spelled
from linrec.text import Tokenizer

FOLDER = "inspection"
PAGE = "inspection.html"
JSON = "inspection.json"
# limit for token-mixing matrices: their size grows quadratically, and a screen has fewer pixels
MOST = 1024
COLUMNS = ("channels", "mean", "median", "above 0.9", "above 0.99", "time scale", "longest")
# symbols for invisible characters, and for tokens without text
VISIBLE = {" ": "␣", "\n": "↵", "\t": "→", "\r": "←"}
NO_TEXT = "∎"
UNKNOWN = "\ufffd"
# longer names of tokens are truncated
LETTERS = 12
ON_COLUMNS = {
    "mean": (
        "Forget values are the magnitudes |a| of the state transitions. A channel's time scale is the number "
        "of steps after which its state has decayed to 1/e."
    ),
    "reach": (
        "Reach is the mean distance between a token and the tokens that it depends on, in tokens, weighted "
        "by the token-mixing matrix."
    ),
}
HISTOGRAMS = (
    "Histograms of the forget values over tokens and channels (HGRN, figures 2 and 3). The solid black line "
    "is the mean, the dashed line the median."
)
MIXING = (
    "Row n shows how strongly token n depends on each token m: the magnitudes of the token-mixing weights, "
    "averaged over channels or heads and divided by the sum of the row (HGRN, figure 4)."
)
OVER_TEXT = (
    "State transitions over the tokens (GateLoop, figure 8). Each line is a channel; the longest time scale "
    "is on top."
)


@dataclass(frozen=True, eq=False)
class InspectedTokens:
    """A sequence to inspect a run on.

    Args:
        tokens: shape (1, t), int64.
        reset: true where a document begins, shape (1, t), bool; None if the run does not use documents.
        labels: names of the t tokens in pictures.
        source: description of the origin of the sequence.
        text: the decoded text; None if the tokens are not text.
        of: number of tokens in the source, of which these are the first.
    """

    tokens: Int64[Tensor, "1 t"]
    reset: Bool[Tensor, "1 t"] | None
    labels: tuple[str, ...]
    source: str
    text: str | None
    of: int


def choose_tokens(
    run: Run,
    n_tokens: int,
    *,
    prompt: str | None = None,
    path: str | os.PathLike[str] | None = None,
    split: SplitName | None = None,
) -> InspectedTokens:
    """Return the first tokens of a text, or of the first sequence of a task.

    Args:
        run: the run.
        n_tokens: maximal number of tokens; at least 2.
        prompt: the text itself.
        path: a text file, a folder or a glob. Without `path` and `prompt`, the text or the task that the run
            was trained on is used.
        split: name of the split; None means a held-out split. For a text it is "test" if that exists, else
            "validation"; for other tasks it is "validation".

    Raises:
        ConfigError: fewer than 2 tokens, `prompt` together with `path` or `split`, or `prompt` or `path` for
            a run that was not trained on text.
        DataError: the text does not exist, is empty, or cannot be tokenised.
    """
    if prompt is not None and (path is not None or split is not None):
        raise ConfigError("--prompt replaces the text; leave out --data.path and --split with it.")
    if isinstance(run.config.task, SourcedTask):
        raise ConfigError(
            f"{run.path} is an encoder-decoder, whose decoder reads a source beside its tokens; `linrec "
            "inspect` shows models of one sequence. Pass a run of a language model or a classifier."
        )
    if n_tokens < 2:
        raise ConfigError(f"--tokens must be at least 2, so that one can affect another; got {n_tokens}.")
    if prompt is not None:
        language_task(run)
        tokenizer = tokenizer_of(run)
        chosen = _of_text(tokenizer, tokenizer.encode(prompt), n_tokens, "the prompt", None)
    elif path is not None or isinstance(run.config.task, LanguageModeling):
        text = choose_text(run, path=path, split=split)
        chosen = _of_text(tokenizer_of(run), text.tokens.tokens(), n_tokens, text.title, text.tokens.starts)
    else:
        chosen = _of_task(run.config.task, n_tokens, "validation" if split is None else split)
    if chosen.tokens.shape[1] < 2:
        raise ConfigError(
            f"{chosen.source} must have at least 2 tokens, so that one can affect another; got {chosen.of}. "
            "Pass a longer text."
        )
    return chosen


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
    tokens: InspectedTokens,
    *,
    matrices: bool = True,
    out: str | os.PathLike[str] | None = None,
    device: torch.device | str = "cpu",
    command: str | None = None,
) -> Inspection:
    """Inspect a trained model on a sequence, and write a page about it.

    The page, `inspection.html`, embeds its pictures. They are also written as histograms.png,
    token_mixing.png, transitions.png, and text.png, which shows the transitions over the first tokens with
    their names. `inspection.json` contains the numbers. Existing files of these names are replaced.

    Args:
        run: the run, as `linrec.lab.train.load_run` returns it.
        tokens: the sequence, from `choose_tokens`.
        matrices: whether to compute token-mixing matrices, for at most 1,024 tokens.
        out: output folder; None means "inspection" in the run folder.
        device: device of the computation.
        command: the command line to record; None omits it.

    Returns:
        The inspected tokens and layers, and the path of the page.

    Raises:
        ConfigError: too many tokens, or a mixer without transitions and matrices.
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
        ...     run = load_run(f"{folder}/run")
        ...     page = write_inspection(run, choose_tokens(run, 256)).page
        ...     sorted(path.name for path in page.parent.iterdir())
        ['histograms.png', 'inspection.html', 'inspection.json', 'text.png', 'token_mixing.png']
    """
    n_tokens = len(tokens.labels)
    if matrices and n_tokens > MOST:
        raise ConfigError(
            f"--tokens must be at most {MOST:,} for token-mixing matrices, whose size grows quadratically; "
            f"got {n_tokens:,}. Pass fewer tokens, or --no-matrices to leave the matrices out."
        )
    reset = None if tokens.reset is None else tokens.reset.to(device)
    layers = inspect_model(run.model(device), tokens.tokens.to(device), reset=reset, token_mixing=matrices)
    mixer = spelled(run.config.model.mixer_pattern)
    if all(layer.magnitude is None and layer.mixing is None for layer in layers):
        cure = "" if matrices else " Leave --no-matrices out to see its token-mixing matrices."
        raise ConfigError(f"nothing can be shown of the mixer {mixer!r}: it has no transitions.{cure}")
    folder = run.path / FOLDER if out is None else Path(out)
    with writing(f"write to {folder}", RunFolderError):
        if out is None:
            make_subfolder(run.path, FOLDER)
        folder.mkdir(parents=True, exist_ok=True)
        missing: list[str] = []
        pictures = Gallery.saved(_pictures(layers, tokens, missing), folder)
        listed = table(layers)
        some = (
            f"{n_tokens:,} tokens"
            if n_tokens == tokens.of
            else f"its first {n_tokens:,} of {tokens.of:,} tokens"
        )
        source, n_layers = f"{tokens.source}, {some}", run.config.model.n_layers
        about = f"{n_layers} layers of {mixer} on {source} · written by linrec {__version__}"
        blocks: list[Block] = [
            Text("heading", "Layers"),
            listed,
            Text("note", " ".join(told for column, told in ON_COLUMNS.items() if column in listed.head)),
            pictures,
            *(
                [Text("heading", "Tokens"), Text("lines", " ".join(tokens.labels))]
                if tokens.text is None
                else [Text("heading", "Text"), Text("verbatim", tokens.text)]
            ),
            *([] if command is None else [Text("heading", "Command"), Text("lines", command)]),
        ]
        title = run.config.name
        page = render(
            f"{title} – linrec inspect",
            about,
            blocks,
            missing=missing,
            heading=f"{title}: what it remembers",
        )
        write_text(folder / PAGE, page)
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


def table(layers: Sequence[Layer]) -> Table:
    """Return the statistics of each layer as text (HGRN, Qin, Yang and Zhong, 2023, table 12)."""
    rows: list[dict[str, str]] = []
    for layer in layers:
        row, found, distance = {"layer": layer.name}, forgetting(layer), reach(layer)
        if any(other.magnitude is not None for other in layers):
            row |= dict.fromkeys(COLUMNS, "–")
        if found is not None:
            scales = (_steps(found.time_scale), _steps(found.longest))
            shares = (f"{found.above_090:.1%}", f"{found.above_099:.1%}")
            means = (str(found.channels), f"{found.mean:.3f}", f"{found.median:.3f}")
            row |= zip(COLUMNS, (*means, *shares, *scales), strict=True)
        if any(other.mixing is not None for other in layers):
            row["reach"] = "–" if distance is None else _steps(distance)
        rows.append(row)
    return Table.of(rows)


def _pictures(layers: Sequence[Layer], tokens: InspectedTokens, missing: list[str]) -> list[Picture]:
    """Return the pictures in order, and add to `missing` a sentence for each that could not be drawn."""
    many, first = (True, f" The first {NAMED} tokens.") if len(tokens.labels) > NAMED else (False, "")
    text = draw_over_text(layers, tokens.labels, n_steps=NAMED)
    pictures = [
        Picture("histograms", "Forget values", HISTOGRAMS, draw_histograms(layers)),
        Picture("token_mixing", "Token mixing", MIXING, draw_token_mixing(layers, tokens.labels)),
        Picture("transitions", "State transitions", OVER_TEXT, draw_over_text(layers) if many else None),
        Picture("text", "State transitions, token by token", OVER_TEXT + first, text),
    ]
    if all(layer.magnitude is None for layer in layers):
        missing.append("The mixer has no state transitions, so there are no forget values.")
    elif text is None:
        missing.append(
            "The transitions are the same at every token, so there is no picture of them over the text."
        )
    if all(layer.mixing is None for layer in layers):
        missing.append("There are no token-mixing matrices.")
    return pictures


def _steps(value: float) -> str:
    if value == float("inf"):
        return "∞"
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


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


def _of_text(
    tokenizer: Tokenizer,
    ids: NDArray[np.unsignedinteger],
    n_tokens: int,
    source: str,
    starts: Tensor | None,
) -> InspectedTokens:
    listed = ids[:n_tokens].tolist()
    return InspectedTokens(
        tokens=torch.tensor([listed], dtype=torch.int64),
        reset=None if starts is None else torch.isin(torch.arange(len(listed)), starts)[None],
        labels=tuple(_label(tokenizer, token) for token in listed),
        source=source,
        text=tokenizer.decode(listed),
        of=len(ids),
    )


def _of_task(task: Task, n_tokens: int, split: SplitName) -> InspectedTokens:
    inputs, _, reset, *_ = task.split(split).rows(torch.tensor([0]))
    listed = inputs[0, :n_tokens].tolist()
    return InspectedTokens(
        tokens=inputs[:, :n_tokens],
        reset=None if reset is None else reset[:, :n_tokens],
        labels=tuple("R" if token == task.reset_token else str(token) for token in listed),
        source=f"the first {split} sequence of {type(task).__name__}",
        text=None,
        of=inputs.shape[1],
    )


def _label(tokenizer: Tokenizer, token: int) -> str:
    text = tokenizer.decode([token])
    if not text:
        return NO_TEXT
    drawn = "".join(_drawable(VISIBLE.get(character, character)) for character in text)
    return drawn if len(drawn) <= LETTERS else drawn[: LETTERS - 1] + "…"


def _drawable(character: str) -> str:
    """Return the character, or a replacement if the font of the pictures lacks it."""
    return character if ord(character) in _letters() else UNKNOWN


@functools.cache
def _letters() -> frozenset[int]:
    return frozenset(FT2Font(font_manager.findfont("DejaVu Sans")).get_charmap())
