"""Drafts of the next tokens for speculative decoding."""

import abc
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from linrec.generation.prompts import checked_vocabulary
from linrec.mixers import State
from linrec.models import LanguageModel
from linrec.models.ragged import joined, rows_of
from linrec.rules import at_least
from linrec.serve.request import Request
from linrec.serve.rows import Rows, Runner
from linrec.serve.sampling import Step, choose

__all__ = ["Draft", "DraftedRows", "ModelDraft", "NGramDraft"]


# tokens of a prompt whose n-grams are indexed
INDEXED = 4096
# tokens of a prompt that are read together
PIECE = 256
# tokens that a model reads in about the time of one
WIDTH = 8


class Draft(abc.ABC):
    """Proposes tokens that the model then reads in one call; a wrong proposal costs time and changes nothing.

    Args:
        n_tokens: number of tokens k of a proposal.

    Attributes:
        vocab_size: number of tokens that it proposes from; None where it has no vocabulary of its own.
    """

    vocab_size: int | None = None

    def __init__(self, n_tokens: int) -> None:
        at_least(1, n_tokens=n_tokens)
        self.n_tokens = n_tokens

    @abc.abstractmethod
    def propose(self, requests: Sequence[Request], n: int) -> Tensor:
        """Return n <= k proposed tokens after `request.tokens` of each request, (b, n) int64 on the CPU."""

    def forget(self, request: Request) -> None:  # noqa: B027
        """Drop the records of a request that has ended."""


class NGramDraft(Draft):
    """The tokens that followed the last n tokens when they came before, for the largest n that was seen.

    Args:
        n_tokens: number of tokens k of a proposal.
        longest: the largest n.

    Of a prompt, the last 4,096 tokens count.

    Source: Saxena, Prompt Lookup Decoding (2023); Yang and others, Inference with Reference (2023,
    arXiv:2304.04487).
    """

    def __init__(self, n_tokens: int = 8, *, longest: int = 4) -> None:
        super().__init__(n_tokens)
        at_least(1, longest=longest)
        self.longest = longest
        # of each request the number of tokens seen, and where each of their n-grams ended last
        self._seen: weakref.WeakKeyDictionary[Request, tuple[int, dict[tuple[int, ...], int]]]
        self._seen = weakref.WeakKeyDictionary()

    def propose(self, requests: Sequence[Request], n: int) -> Tensor:
        """Return the tokens after the last occurrence of the newest n-gram, or copies of the last token."""
        return torch.tensor([self._proposed(request)[:n] for request in requests])

    def forget(self, request: Request) -> None:
        """Drop the n-grams of a request."""
        self._seen.pop(request, None)

    def _proposed(self, request: Request) -> list[int]:
        tokens = request.tokens
        seen, ends = self._seen.get(request, (0, {}))
        if seen >= len(tokens):
            # after a rollback
            seen, ends = 0, {}
        # an n-gram counts once a token has followed it
        for end in range(max(seen, 1, len(tokens) - INDEXED), len(tokens)):
            for n in range(1, min(self.longest, end) + 1):
                ends[tuple(tokens[end - n : end])] = end
        self._seen[request] = len(tokens), ends
        sizes = range(min(self.longest, len(tokens)), 0, -1)
        found = (ends.get(tuple(tokens[-n:])) for n in sizes)
        start = next((end for end in found if end is not None), len(tokens) - 1)
        period = len(tokens) - start
        return [tokens[start + place % period] for place in range(self.n_tokens)]


class ModelDraft(Draft):
    """The tokens of a smaller model, drawn with the random numbers of the request.

    The draw with the same number makes the two models agree as often as their distributions overlap.

    Args:
        model: the smaller model, in evaluation mode, with the same tokens.
        n_tokens: number of tokens k of a proposal.

    Source: Leviathan, Kalman and Matias, Fast Inference from Transformers via Speculative Decoding (2023).
    """

    def __init__(self, model: LanguageModel, n_tokens: int = 4) -> None:
        super().__init__(n_tokens)
        checked_vocabulary(model, None)
        self.model, self.vocab_size = model, model.config.vocab_size
        # of each request the number of tokens read, and the state after them
        self._states: weakref.WeakKeyDictionary[Request, tuple[int, State]] = weakref.WeakKeyDictionary()

    def propose(self, requests: Sequence[Request], n: int) -> Tensor:
        """Return n tokens that the model draws one after another."""
        device = next(self.model.parameters()).device
        for request in requests:
            self._read_prompt(request)
        kept = [self._kept(request) for request in requests]
        new = [torch.tensor(request.tokens[read:]) for request, (read, _) in zip(requests, kept, strict=True)]
        tokens = pad_sequence(new, batch_first=True).to(device)
        counts = torch.tensor([len(some) for some in new])
        mask = torch.arange(tokens.shape[1]) < counts[:, None]
        state = joined((torch.tensor([row]), state) for row, (_, state) in enumerate(kept))
        x, state = self.model.hidden(tokens, state, mask=None if mask.all() else mask.to(device))
        for row, request in enumerate(requests):
            self._states[request] = len(request.tokens), rows_of(state, torch.tensor([row]))
        found: list[Tensor] = []
        for ahead in range(n):
            if found:
                x, state = self.model.hidden(found[-1], state)
            logits = self.model.head(x[:, -1:])
            found.append(choose(logits, requests, ahead=ahead))
        return torch.cat(found, 1).cpu()

    def forget(self, request: Request) -> None:
        """Drop the state of a request."""
        self._states.pop(request, None)

    def _read_prompt(self, request: Request) -> None:
        """Read the tokens of a long prompt alone, in pieces."""
        read, state = self._kept(request)
        device = next(self.model.parameters()).device
        while len(request.tokens) - read > PIECE:
            tokens = torch.tensor([request.tokens[read : read + PIECE]], device=device)
            _, state = self.model.hidden(tokens, state)
            read += PIECE
            self._states[request] = read, state

    def _kept(self, request: Request) -> tuple[int, State]:
        """Return the tokens read and the state, from before the tokens that a rollback took."""
        kept = self._states.get(request)
        if kept is None or kept[0] >= len(request.tokens):
            return 0, self.model.init_state(1)
        return kept


class DraftedRows(Rows):
    """Rows that read the tokens of a draft with the newest token, and generate a token for each right one.

    The state of a row moves only if all tokens of a step are right. Otherwise the row reads its right tokens
    again in the next step, before the next proposal, so that a step is one call of the model. A proposal has
    room for what such tokens leave of a step.

    Args:
        runner: the model.
        draft: proposes the tokens.
    """

    def __init__(self, runner: Runner, draft: Draft) -> None:
        super().__init__(runner)
        self.draft, self._width = draft, max(WIDTH, draft.n_tokens + 1)

    def step(self) -> Step:
        """Read the tokens of each row that its state has not read, and those that the draft proposes."""
        known = [request.tokens[request.read :] for request in self.requests]
        room = [self._width - len(right) for right in known]
        n = min(self.draft.n_tokens, max(room))
        proposed = self.draft.propose(self.requests, n).tolist() if n else [[]] * len(self)
        guesses = [guess[:most] for guess, most in zip(proposed, room, strict=True)]
        given = [torch.tensor(right + guess) for right, guess in zip(known, guesses, strict=True)]
        tokens = pad_sequence(given, batch_first=True)
        if self.runner.deterministic:
            # bits depend on the number of tokens
            tokens = functional.pad(tokens, (0, self._width - tokens.shape[1]))
        x, after = self._after(tokens)
        # a row with fewer guesses repeats its last place
        ahead = torch.arange(1 + self.draft.n_tokens)
        places = (torch.tensor([[len(right) - 1] for right in known]) + ahead).clamp(max=x.shape[1] - 1)
        step = self._chosen(torch.take_along_dim(x, places[..., None].to(x.device), 1), guesses)
        whole: dict[bool, list[int]] = {True: [], False: []}
        for row, (request, right) in enumerate(zip(self.requests, known, strict=True)):
            is_whole = len(right) + len(step.tokens.get(request, ())) > x.shape[1]
            whole[is_whole].append(row)
            request.read += x.shape[1] if is_whole else 0
        if not whole[False]:
            self.state = after
        elif whole[True]:
            rows = [torch.tensor(whole[right], device=x.device) for right in (True, False)]
            states = zip(rows, (after, self.state), strict=True)
            self.state = joined((some, rows_of(state, some)) for some, state in states)
        return step
