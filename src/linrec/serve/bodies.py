"""The bodies of OpenAI's completions, as far as the server has them, and refusals of all others.

A check ends at the first fault: a body of a megabyte of faults must not make a list of them.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, FailFast, Field, PlainValidator, model_validator
from starlette.exceptions import HTTPException
from torch import Tensor

from linrec.serve.engine import EngineError, EngineFull
from linrec.serve.request import Process

__all__ = ["Body", "ChatBody", "Checked", "CompletionBody", "Refused", "error_object", "refusing"]

# entries of fields that hold several
MOST = {"logit_bias": 300, "messages": 10_000, "content": 1000, "stop": 100, "stream_options": 1}


class Checked(BaseModel):
    """A body of which unknown fields and long lists are refused before anything else."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _first_fault(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        if unknown := next((name for name in values if name not in cls.model_fields), None):
            raise ValueError(f"`{unknown[:80]}` is not supported by this server. Leave it out.")
        for name, most in MOST.items():
            given = values.get(name)
            if isinstance(given, (dict, list)) and len(given) > most:
                raise ValueError(f"`{name}` must have at most {most} entries; got {len(given):,}.")
        return values


def _stops(given: Any) -> list[str]:
    """Return the texts that end an answer."""
    texts = [given] if isinstance(given, str) else given or []
    if not isinstance(texts, list) or any(
        type(text) is not str or not 0 < len(text) <= 100 for text in texts
    ):
        raise ValueError("`stop` must be a text of 1 to 100 characters, or a list of such texts.")
    return texts


class Body(Checked):
    """The fields that both kinds of completions have."""

    model: str
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = None
    stream_options: dict[Literal["include_usage"], bool] | None = None
    stop: Annotated[list[str], PlainValidator(_stops)] = []
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    user: str | None = None

    @property
    def tokens(self) -> int | None:
        """The most tokens of an answer; None for as many as fit."""
        raise NotImplementedError

    def process(self, n_prompt: int, vocab_size: int) -> Process | None:
        """Return the change of logits by penalties and biases; None without them.

        Args:
            n_prompt: number of tokens of the prompt, which penalties do not count.
            vocab_size: number of tokens.

        Raises:
            ValueError: a key of `logit_bias` is not a token.
        """
        presence, frequency = self.presence_penalty or 0.0, self.frequency_penalty or 0.0
        bias = {int(token): value for token, value in (self.logit_bias or {}).items() if token.isdecimal()}
        if len(bias) != len(self.logit_bias or {}) or any(token >= vocab_size for token in bias):
            raise ValueError(f"`logit_bias` must have token ids in 0 .. {vocab_size - 1} as keys, each once.")
        if not (presence or frequency or bias):
            return None
        biased, values = torch.tensor([*bias], dtype=torch.int64), torch.tensor([*bias.values()])
        counts, counted = torch.zeros(vocab_size), n_prompt

        def changed(tokens: Sequence[int], logits: Tensor) -> Tensor:
            nonlocal counted
            # the tokens since the last call
            new = torch.tensor(tokens[counted:], dtype=torch.int64)
            counts.index_add_(0, new, torch.ones(len(new)))
            counted = len(tokens)
            seen = counts.to(logits)
            logits = logits - frequency * seen - presence * (seen > 0)
            return logits.index_add(0, biased.to(logits.device), values.to(logits))

        return changed


def _prompts(given: Any) -> list[str | list[int]]:
    """Return the prompts of a body, texts or token ids."""
    if isinstance(given, str) or (isinstance(given, list) and given and type(given[0]) is int):
        given = [given]
    if not isinstance(given, list):
        raise ValueError("`prompt` must be a text, token ids, or a list of them.")
    for each in given:
        if not isinstance(each, str) and not (
            isinstance(each, list) and all(type(token) is int for token in each)
        ):
            raise ValueError("`prompt` must be a text, token ids, or a list of them.")
    return given


class CompletionBody(Body):
    """A body of `/v1/completions`; prompts are texts or token ids."""

    prompt: Annotated[list[str | list[int]], PlainValidator(_prompts)]
    max_tokens: Annotated[int, Field(ge=1)] | None = 16
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: bool | None = None

    @property
    def tokens(self) -> int | None:
        """The most tokens of an answer."""
        return self.max_tokens


def _content(given: Any) -> str:
    """Return the text of a message, which may come in parts."""
    if isinstance(given, str):
        return given
    texts = []
    for part in given if isinstance(given, list) else [None]:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise ValueError("`content` must be a text, or a list of parts of the type 'text'.")
        texts.append(text)
    return "".join(texts)


class Message(Checked):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, PlainValidator(_content)]
    name: str | None = None


class ChatBody(Body):
    """A body of `/v1/chat/completions`."""

    messages: Annotated[list[Message], FailFast(), Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None

    @property
    def tokens(self) -> int | None:
        """The most tokens of an answer."""
        return self.max_completion_tokens or self.max_tokens


class Refused(HTTPException):
    """An error of OpenAI's form."""

    def __init__(self, status: int, message: str, *, param: str | None = None) -> None:
        super().__init__(status, message)
        self.param = param


def error_object(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """Return the body of an error."""
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Turn refusals of the engine into answers with a status."""
    try:
        yield
    except EngineFull as error:
        raise Refused(429, str(error)) from error
    except EngineError as error:
        raise Refused(503, str(error)) from error
    except ValueError as error:
        raise Refused(400, str(error)) from error
