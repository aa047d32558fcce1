"""The page of an inspection: a table, figures, and the text."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

import linrec
from linrec.lab.inspection.collect import Layer
from linrec.lab.inspection.figures import NAMED, draw_histograms, draw_over_text, draw_token_mixing
from linrec.lab.inspection.statistics import forgetting, reach
from linrec.lab.inspection.tokens import InspectedTokens
from linrec.lab.report import markup, style
from linrec.lab.report.markup import Picture
from linrec.lab.train import Run
from linrec.models.config import spelled

__all__ = ["draw", "render_page", "table"]

FORGETTING = (
    "Forget values are the magnitudes |a| of the state transitions. A channel's time scale is the number of "
    "steps after which its state has decayed to 1/e."
)
REACH = (
    "Reach is the mean distance between a token and the tokens that it depends on, in tokens, weighted by "
    "the token-mixing matrix."
)
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


def draw(layers: Sequence[Layer], tokens: InspectedTokens, folder: Path) -> tuple[list[Picture], list[str]]:
    """Draw the figures of all layers into PNG files.

    Args:
        layers: the layers that `inspect_model` returns.
        tokens: the inspected tokens.
        folder: output folder.

    Returns:
        The pictures in order, and a sentence for each picture that could not be drawn.
    """
    labels, n_tokens = tokens.labels, len(tokens.labels)
    parts = [
        ("histograms", "Forget values", HISTOGRAMS, draw_histograms(layers)),
        ("token_mixing", "Token mixing", MIXING, draw_token_mixing(layers, labels)),
    ]
    if n_tokens > NAMED:
        parts.append(("transitions", "State transitions", OVER_TEXT, draw_over_text(layers)))
    first = "" if n_tokens <= NAMED else f" The first {NAMED} tokens."
    text = draw_over_text(layers, labels, n_steps=NAMED)
    parts.append(("text", "State transitions, token by token", OVER_TEXT + first, text))
    pictures = [
        Picture(style.save(figure, folder / f"{name}.png"), title, caption)
        for name, title, caption, figure in parts
        if figure is not None
    ]
    return pictures, _missing(layers, changing=text is not None)


def render_page(
    run: Run,
    tokens: InspectedTokens,
    layers: Sequence[Layer],
    pictures: Sequence[Picture],
    missing: Sequence[str],
    command: str | None,
) -> str:
    """Return the page as HTML.

    Args:
        run: the run that was inspected.
        tokens: the inspected tokens.
        layers: the inspected layers.
        pictures: pictures in order; they are embedded in the page.
        missing: a sentence for each item that could not be shown.
        command: the command line; None omits it.
    """
    name, mixer = run.config.name, spelled(run.config.model.mixer_pattern)
    n_tokens, blocks = len(tokens.labels), run.config.model.n_layers
    what = f"{tokens.source}, its first {n_tokens:,} of {tokens.of:,} tokens"
    if n_tokens == tokens.of:
        what = f"{tokens.source}, {n_tokens:,} tokens"
    head, rows = table(layers)
    notes = [FORGETTING] * ("mean" in head) + [REACH] * ("reach" in head)
    parts = [
        f"<h1>{markup.text(name)}: what it remembers</h1>",
        f'<p class="soft">{blocks} layers of {markup.text(mixer)} on {markup.text(what)} · written by linrec '
        f"{markup.text(linrec.__version__)}</p>",
        markup.missing(missing),
        "<h2>Layers</h2>",
        markup.table(head, rows, numbers=range(1, len(head))),
        f'<p class="soft">{markup.text(" ".join(notes))}</p>',
        *map(markup.picture, pictures),
        f"<h2>{'Tokens' if tokens.text is None else 'Text'}</h2>",
        f"<pre>{escape(' '.join(tokens.labels) if tokens.text is None else tokens.text)}</pre>",
        "" if command is None else f"<h2>Command</h2><pre>{markup.text(command)}</pre>",
    ]
    return markup.document(f"{name} – linrec inspect", parts)


def table(layers: Sequence[Layer]) -> tuple[list[str], list[list[str]]]:
    """Return the statistics of each layer as text: the header of a table, and its rows.

    Args:
        layers: the layers that `inspect_model` returns.

    Source: HGRN (Qin, Yang and Zhong, 2023), table 12.

    Example:
        >>> import torch
        >>> table([Layer("1", torch.tensor([[[0.5, 0.75]]]))])[1]
        [['1', '2', '0.625', '0.625', '0.0%', '0.0%', '2.5', '3.5']]
    """
    head, rows = ["layer"], [[layer.name] for layer in layers]
    if any(layer.magnitude is not None for layer in layers):
        head += ["channels", "mean", "median", "above 0.9", "above 0.99", "time scale", "longest"]
        for row, layer in zip(rows, layers, strict=True):
            found = forgetting(layer)
            if found is None:
                row += ["–"] * 7
                continue
            row += [str(found.channels), f"{found.mean:.3f}", f"{found.median:.3f}"]
            row += [f"{found.above_090:.1%}", f"{found.above_099:.1%}"]
            row += [_steps(found.time_scale), _steps(found.longest)]
    if any(layer.mixing is not None for layer in layers):
        head.append("reach")
        for row, layer in zip(rows, layers, strict=True):
            distance = reach(layer)
            row.append("–" if distance is None else _steps(distance))
    return head, rows


def _steps(value: float) -> str:
    if value == float("inf"):
        return "∞"
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _missing(layers: Sequence[Layer], *, changing: bool) -> list[str]:
    said = []
    if all(layer.magnitude is None for layer in layers):
        said.append("The mixer has no state transitions, so there are no forget values.")
    elif not changing:
        said.append(
            "The transitions are the same at every token, so there is no picture of them over the text."
        )
    if all(layer.mixing is None for layer in layers):
        said.append("There are no token-mixing matrices.")
    return said
