"""Answers as text, and as the objects of OpenAI's completions."""

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from linrec.serve.request import LogProb, Request
from linrec.text import StreamDecoder, Tokenizer

__all__ = ["Choice", "Written"]


@dataclass(eq=False)
class Choice:
    """An answer that is written as text.

    Attributes:
        index: its number among the answers of a body.
        prompt: the number of its prompt.
        answer: the request to the engine.
        tokenizer: makes text of its tokens.
        stops: texts that end the answer, without being part of it.
        count: number of generated tokens up to the end of the text.
        text: the text so far, where it is collected.
        reason: "stop" or "length" as soon as the answer is whole.
    """

    index: int
    prompt: int
    answer: Request
    tokenizer: Tokenizer
    stops: Sequence[str]
    count: int = 0
    text: str = ""
    reason: str | None = None
    _held: str = ""

    def __post_init__(self) -> None:
        self._decoder = StreamDecoder(self.tokenizer)
        # stops are looked for behind the prompt
        self._echo = ""
        if self.answer.options.echo:
            self._echo = self.tokenizer.decode(self.answer.tokens[: self.answer.n_prompt])

    def take(self) -> str:
        """Return the text of new tokens, but the beginning of what may be a stop."""
        ended, answer = self.answer.ended, self.answer
        for token in answer.tokens[answer.n_prompt + self.count :]:
            self.count += 1
            if token != self.tokenizer.end_of_document:
                self._held += self._decoder.feed(token)
            if self._stopped():
                return self._released(len(self._held))
        if ended is not None:
            self._held += self._decoder.finish()
            if not self._stopped():
                self.reason = "stop" if ended == "stop" else "length"
            return self._released(len(self._held))
        beginnings = (stop[:n] for stop in self.stops for n in range(1, len(stop)))
        kept = max((len(part) for part in beginnings if self._held.endswith(part)), default=0)
        return self._released(len(self._held) - kept)

    def _stopped(self) -> bool:
        """Cut the text at a stop; return whether there is one."""
        found = [place for stop in self.stops if (place := self._held.find(stop)) >= 0]
        if found:
            self.reason, self._held = "stop", self._held[: min(found)]
        return bool(found)

    def _released(self, length: int) -> str:
        text, self._held, self._echo = self._echo + self._held[:length], self._held[length:], ""
        return text

    @property
    def logprobs(self) -> dict[str, Any] | None:
        """OpenAI's log probabilities of a completion, a list entry for each token; None unless asked for."""
        answer = self.answer
        if answer.options.logprobs is None:
            return None
        tokens = answer.tokens[: answer.n_prompt + self.count]
        if not answer.options.echo:
            tokens = tokens[answer.n_prompt :]
        # nothing comes before the first token
        first: list[LogProb | None] = [None] if answer.options.echo else []
        found = (first + answer.logprobs)[: len(tokens)]
        texts = [self.tokenizer.decode([token]) for token in tokens]
        return {
            "tokens": texts,
            "token_logprobs": [each and each.value for each in found],
            "top_logprobs": [
                each and {self.tokenizer.decode([token]): value for token, value in each.top.items()}
                for each in found
            ],
            "text_offset": [0, *accumulate(map(len, texts[:-1]))],
        }


class Written:
    """OpenAI's objects of an answer.

    Args:
        chat: whether it is a chat.
        model: name of the model.
    """

    def __init__(self, *, chat: bool, model: str) -> None:
        self.chat = chat
        name = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._about = {"id": name, "created": int(time.time()), "model": model}
        self._begun: set[int] = set()

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Return the object of whole answers."""
        found = []
        for choice in choices:
            text = {"role": "assistant", "content": choice.text} if self.chat else choice.text
            found.append(self._choice(choice, "message", text))
        return self._object("chat.completion" if self.chat else "text_completion", found)

    def piece(self, choice: Choice, text: str) -> dict[str, Any]:
        """Return the object of a piece of a stream."""
        content: Any = text
        if self.chat:
            content = (
                {"content": text} if choice.index in self._begun else {"role": "assistant", "content": text}
            )
        self._begun.add(choice.index)
        found = [self._choice(choice, "delta", content)]
        return self._object("chat.completion.chunk" if self.chat else "text_completion", found)

    def usage(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        """Return the last object of a stream, which has no choices."""
        return self._object("chat.completion.chunk" if self.chat else "text_completion", []) | {
            "usage": usage
        }

    def _choice(self, choice: Choice, field: str, content: Any) -> dict[str, Any]:
        return {
            "index": choice.index,
            field if self.chat else "text": content,
            "finish_reason": choice.reason,
            "logprobs": None if self.chat else choice.logprobs,
        }

    def _object(self, kind: str, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {**self._about, "object": kind, "choices": choices}
