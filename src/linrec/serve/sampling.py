"""The choice of the next tokens of rows, each with its own distribution and its own random numbers."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from linrec.generation.sampling import Candidates, Sampling, candidates, draw
from linrec.serve.request import Request

__all__ = ["choose", "choose_plain"]


def choose(
    logits: Float[Tensor, "b k v"], requests: Sequence[Request], *, ahead: int = 0
) -> Int64[Tensor, "b k"]:
    """Return the tokens that `generate` chooses for each request from these logits.

    Args:
        logits: logits of k successive tokens of each request.
        requests: the request of each row.
        ahead: index of the first of these tokens, from the next token of the requests on.
    """
    (batch, k), alike = logits.shape[:2], dict[Sampling, list[int]]()
    for row, request in enumerate(requests):
        alike.setdefault(request.options.sampling, []).append(row)
    chosen = torch.empty(batch, k, dtype=torch.int64, device=logits.device)
    for sampling, rows in alike.items():
        # the usual case needs no copy
        of_rows = logits if len(rows) == batch else logits[rows]
        found = candidates(of_rows.flatten(0, 1), sampling)
        if sampling.greedy:
            tokens = found.ids[:, 0]
        else:
            u = [requests[row].uniform(ahead + place) for row in rows for place in range(k)]
            p = found.probabilities
            tokens = draw(found, torch.tensor(u, dtype=p.dtype, device=p.device)[:, None])
        chosen[rows] = tokens.view(len(rows), k)
    return chosen


def choose_plain(
    logits: Float[Tensor, "b v"], temperature: Float[Tensor, "b 1"], uniform: Float[Tensor, "b 1"]
) -> Int64[Tensor, "b"]:
    """Return the tokens of `choose` for one token of rows without filters, by operations of one shape.

    Args:
        logits: logits of the rows.
        temperature: temperature of each row, float64; 0 is greedy.
        uniform: the random number of each row, float64.
    """
    wide, greedy = logits.double(), temperature == 0
    p = ((wide - wide.amax(-1, keepdim=True)) / torch.where(greedy, 1.0, temperature)).softmax(-1)
    ids = torch.arange(logits.shape[-1], device=logits.device).expand_as(logits)
    return torch.where(greedy[:, 0], logits.argmax(-1), draw(Candidates(ids, p), uniform))
