"""Beam search: the likeliest continuations, of several that are kept side by side."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor

from linrec.generation.decoding import pending
from linrec.generation.prefill import prefill
from linrec.generation.prompts import checked_vocabulary
from linrec.generation.state import GenerationState
from linrec.models import LanguageModel
from linrec.models.ragged import rows_of
from linrec.rules import at_least

__all__ = ["Beams", "beam_search"]


class Beams(NamedTuple):
    """The result of `beam_search`, the best continuation first.

    Attributes:
        tokens: continuations without the prompt, (b, k, n). Behind the end token of a continuation, there are
            end tokens alone.
        scores: log-probability over the length penalty, (b, k); -inf where fewer than k were found.
    """

    tokens: Int64[Tensor, "b k n"]
    scores: Float[Tensor, "b k"]


@torch.no_grad()
def beam_search(
    model: LanguageModel,
    tokens: Int[Tensor, "b t"] | None = None,
    *,
    n_tokens: int,
    end: int,
    n_beams: int = 4,
    length_penalty: float = 0.6,
    state: GenerationState | None = None,
) -> Beams:
    """Return the continuations Y with the largest scores that a search with n beams finds.

        score(Y) = log p(Y | prompt) / ((5 + |Y|) / 6)^length_penalty

    Each step keeps the n likeliest continuations that have not ended. |Y| counts the end token. The search of
    a row is over where no continuation can beat its best n anymore. Continuations that have not ended after
    `n_tokens` tokens count too.

    Args:
        model: a model in evaluation mode whose outputs are logits of tokens; an `EncoderDecoder` begins with
            the `state` of its source.
        tokens: the prompts, (b, t), all of one length; with `state`, they follow the tokens of the state.
        n_tokens: tokens of a continuation at most, at least 1.
        end: the token that ends a continuation.
        n_beams: continuations that are kept; 1 is a greedy search.
        length_penalty: 0 compares log-probabilities; larger numbers prefer longer continuations.
        state: state of an earlier generation to continue; None starts from an empty state.

    Returns:
        The best `n_beams` continuations of each row, and their scores.

    Raises:
        ValueError: a number is out of range, or the arguments are not those of `generate`.
        TypeError: `tokens` is not an integer tensor.

    Source:
        Wu and others, Google's Neural Machine Translation System (2016), section 7: the length penalty.

    Example:
        >>> from linrec.models import ModelConfig
        >>> model = LanguageModel(ModelConfig(vocab_size=5, d_model=8, n_layers=1)).eval()
        >>> found = beam_search(model, torch.tensor([[1, 2, 3]]), n_tokens=6, end=0, n_beams=3)
        >>> found.tokens.shape[:2], found.scores.shape
        (torch.Size([1, 3]), torch.Size([1, 3]))
    """
    at_least(1, n_tokens=n_tokens, n_beams=n_beams)
    at_least(0, length_penalty=length_penalty)
    at_least(0, most=checked_vocabulary(model, None) - 1, end=end)
    device = next(model.parameters()).device
    prompt, reset, layers = pending(model, tokens, None, state, device)
    before, last = (None, None) if reset is None else (reset[:, :-1], reset[:, -1:])
    layers = prefill(model, prompt[:, :-1], before, layers, "32-true")
    batch = len(prompt)
    rows = torch.arange(batch, device=device)[:, None]
    # of the only beam at the start, and its token
    layers, now = rows_of(layers, rows.flatten()), prompt[:, -1:]
    alive = torch.zeros(batch, 1, dtype=torch.float64, device=device)
    text = prompt.new_zeros(batch, 1, 0)
    ended = Beams(prompt.new_full((batch, n_beams, 0), end), alive.new_full((batch, n_beams), -torch.inf))
    for step in range(1, n_tokens + 1):
        x, layers = model.hidden(now, layers, reset=last)
        last = None
        log_p = model.head(x[:, -1]).double().log_softmax(-1).unflatten(0, alive.shape)
        scores = (alive[..., None] + log_p).flatten(1)
        # half of 2 n continuations at least do not end
        best, place = scores.topk(min(2 * n_beams, scores.shape[1]))
        beam, token = place // log_p.shape[-1], place % log_p.shape[-1]
        text = torch.cat([text[rows, beam], token[..., None]], -1)
        over = token == end
        penalty = ((5 + step) / 6) ** length_penalty
        ended = _kept(ended, text, (best / penalty).masked_fill(~over, -torch.inf), end)
        alive, chosen = best.masked_fill(over, -torch.inf).topk(min(n_beams, best.shape[1]))
        text, beam, now = text[rows, chosen], beam[rows, chosen], token[rows, chosen].flatten()[:, None]
        # log-probabilities fall, and the penalty grows at most to that of all tokens
        bound = alive[:, 0] / ((5 + n_tokens) / 6) ** length_penalty
        if (ended.scores[:, -1] >= bound).all():
            return ended
        width = log_p.shape[1]
        layers = rows_of(layers, (rows * width + beam).flatten())
    return _kept(ended, text, alive / penalty, end)


def _kept(ended: Beams, text: Tensor, scores: Tensor, end: int) -> Beams:
    """Return the best of the continuations that have ended and others, which may be a token longer."""
    missing = text.shape[-1] - ended.tokens.shape[-1]
    padding = ended.tokens.new_full((*ended.tokens.shape[:2], missing), end)
    tokens = torch.cat([torch.cat([ended.tokens, padding], -1), text], 1)
    best, place = torch.cat([ended.scores, scores], 1).topk(ended.scores.shape[1])
    return Beams(tokens.take_along_dim(place[..., None], 1), best)
