"""Serving: many requests at once, in the rows of one batch that requests join and leave.

`Engine` answers requests with the tokens that `linrec.generation.generate` gives each of them alone. A prefix
tree of states saves the reading of prefixes that earlier requests share, and drafts save steps of the model.
"""

from linrec.serve.drafts import Draft, ModelDraft, NGramDraft
from linrec.serve.engine import Engine, EngineError, EngineFull
from linrec.serve.prefixes import Hit, PrefixTree
from linrec.serve.request import LogProb, Request, RequestError

__all__ = [
    "Draft",
    "Engine",
    "EngineError",
    "EngineFull",
    "Hit",
    "LogProb",
    "ModelDraft",
    "NGramDraft",
    "PrefixTree",
    "Request",
    "RequestError",
]
