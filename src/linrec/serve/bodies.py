"""The bodies of OpenAI's completions, as far as the server has them; all other fields are refused."""

from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from linrec.serve.request import Process

__all__ = ["Body", "ChatBody", "CompletionBody"]


class Body(BaseModel):
    """The fields that both kinds of completions have."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = None
    stream_options: dict[Literal["include_usage"], bool] | None = None
    stop: Annotated[str, Field(max_length=100)] | list[Annotated[str, Field(max_length=100)]] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: (
        dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]] | None
    ) = None
    user: str | None = None

    @property
    def stops(self) -> list[str]:
        """Texts that end an answer."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def tokens(self) -> int | None:
        """The most tokens of an answer; None for as many as fit."""
        raise NotImplementedError

    def process(self, n_prompt: int) -> Process | None:
        """Return the change of logits by penalties and biases; None without them.

        Args:
            n_prompt: number of tokens of the prompt, which penalties do not count.
        """
        presence, frequency = self.presence_penalty or 0.0, self.frequency_penalty or 0.0
        bias = {int(token): value for token, value in (self.logit_bias or {}).items()}
        if not (presence or frequency or bias):
            return None

        def changed(tokens: Sequence[int], logits: Tensor) -> Tensor:
            counts = torch.bincount(torch.tensor(tokens[n_prompt:], dtype=torch.int64), minlength=len(logits))
            counts = counts[: len(logits)].to(logits)
            logits = logits - frequency * counts - presence * (counts > 0)
            for token, value in bias.items():
                if 0 <= token < len(logits):
                    logits[token] += value
            return logits

        return changed


class CompletionBody(Body):
    """A body of `/v1/completions`; prompts are texts or token ids."""

    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: Annotated[int, Field(ge=1)] | None = 16
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: bool | None = None

    @property
    def tokens(self) -> int | None:
        """The most tokens of an answer."""
        return self.max_tokens


class Part(BaseModel):
    """A part of a message, which must be text."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A message of a chat."""

    model_config = ConfigDict(extra="forbid", strict=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]
    name: str | None = None


class ChatBody(Body):
    """A body of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None

    @property
    def tokens(self) -> int | None:
        """The most tokens of an answer."""
        return self.max_completion_tokens or self.max_tokens
