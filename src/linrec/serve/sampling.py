"""The choice of the next tokens of rows, each with its own distribution and its own random numbers."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from linrec.generation.sampling import Candidates, Sampling, candidates, draw
from linrec.rules import require
from linrec.serve.request import Request

__all__ = ["Step", "accepted", "choose", "choose_plain", "processed"]


class Step(NamedTuple):
    """The tokens that a step of rows generates.

    Attributes:
        logits: logits (v) of the token after the newest one of each row, and after each guess; the next step
            may overwrite them.
        tokens: the new tokens of each request that goes on.
        errors: the errors of the other requests.
        proposed: number of tokens that a draft proposed.
    """

    logits: Float[Tensor, "b k v"]
    tokens: dict[Request, list[int]]
    errors: dict[Request, Exception]
    proposed: int = 0


def processed(
    logits: Float[Tensor, "b k v"], requests: Sequence[Request]
) -> tuple[Float[Tensor, "b k v"], dict[Request, Exception]]:
    """Return the logits that `process` of each request makes of those of its next token.

    Also returns the errors of requests whose `process` failed.
    """
    errors: dict[Request, Exception] = {}
    rows = [row for row, request in enumerate(requests) if request.options.process is not None]
    if rows:
        # the log probabilities are those of the model itself
        logits = logits.clone()
    for row in rows:
        request = requests[row]
        assert request.options.process is not None
        try:
            found = request.options.process(request.tokens, logits[row, 0])
            require(
                bool(torch.isfinite(found).any() and (found < math.inf).all()),
                "`process` must leave a token to choose, and no NaN; got logits without one.",
            )
            logits[row, 0] = found
        except Exception as error:
            errors[request] = error
    return logits, errors


def accepted(
    requests: Sequence[Request],
    logits: Float[Tensor, "b k v"],
    valid: Sequence[int],
    chosen: Sequence[Sequence[int]],
    errors: dict[Request, Exception],
    guesses: Sequence[Sequence[int]],
) -> Step:
    """Return the step of rows.

    Args:
        requests: the request of each row.
        logits: the logits of each row.
        valid: number of tokens of each row that are from finite logits.
        chosen: the choice after the newest token of each row, and after each guess.
        errors: errors of requests so far.
        guesses: the guesses of each row.
    """
    new: dict[Request, list[int]] = {}
    for request, n, found, guessed in zip(requests, valid, chosen, guesses, strict=True):
        if n == 0:
            errors[request] = ValueError("its logits are not finite. Use other weights or precision.")
        elif request not in errors:
            new[request] = request.accepted(found, guessed, n)
    return Step(logits, new, errors, sum(map(len, guesses)))


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
