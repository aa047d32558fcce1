"""Inspection: show in numbers and pictures which parts of a text a model remembers and forgets."""

from linrec.lab.inspection.collect import (
    Forgetting,
    Layer,
    forgetting,
    histogram,
    inspect_model,
    reach,
    time_scales,
)
from linrec.lab.inspection.figures import draw_histograms, draw_over_text, draw_token_mixing
from linrec.lab.inspection.write import InspectedTokens, Inspection, choose_tokens, write_inspection

__all__ = [
    "Forgetting",
    "InspectedTokens",
    "Inspection",
    "Layer",
    "choose_tokens",
    "draw_histograms",
    "draw_over_text",
    "draw_token_mixing",
    "forgetting",
    "histogram",
    "inspect_model",
    "reach",
    "time_scales",
    "write_inspection",
]
