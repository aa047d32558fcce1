"""OpenAI's completions over HTTP: an application of FastAPI around an engine.

Every body is checked, and fields that the server does not have are refused by name. Errors have the form of
OpenAI's, an object `error` with a sentence as `message`.
"""

import asyncio
import contextlib
import hashlib
import hmac
import json
import secrets
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from starlette.exceptions import HTTPException

from linrec.serve.answers import Choice, Written
from linrec.serve.bodies import Body, ChatBody, CompletionBody, Refused, error_object, refusing
from linrec.serve.connections import BodyLimit
from linrec.serve.engine import Engine
from linrec.serve.request import Request as Answer
from linrec.serve.workbench import make_router
from linrec.text import Tokenizer

__all__ = ["Limits", "make_app"]

FAILED = "the answer failed, since its logits were not finite or the engine stopped. Ask again."
# seconds between looks at whether a client is still there
PATIENCE = 0.25


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a request.

    Args:
        body: bytes of a body.
        choices: answers of a request, over all its prompts.
        stops: stop strings of a request, of at most 100 characters each.
        seconds: the most time of an answer.
        patience: seconds that a body may take to come.
    """

    body: int = 1_000_000
    choices: int = 16
    stops: int = 8
    seconds: float = 600.0
    patience: float = 30.0


def make_app(
    engine: Engine,
    tokenizer: Tokenizer,
    *,
    name: str,
    chat_template: str | None = None,
    specials: Mapping[str, str] = {},
    keys: Iterable[str] = (),
    limits: Limits = Limits(),
    grace: float = 30.0,
) -> FastAPI:
    """Return the application; from its start to its end, a thread runs the engine.

    | address | content |
    |---|---|
    | `POST /v1/completions`, `/v1/chat/completions` | OpenAI's, with `stream` |
    | `GET /v1/models` | the model's name |
    | `GET /health` | 200 while requests are taken, else 503 |
    | `GET /metrics` | counters for Prometheus, without any text |
    | `GET /` | a page that watches answers; see `linrec.serve.workbench` |

    Args:
        engine: the engine.
        tokenizer: the model's tokenizer.
        name: name of the model, which requests must give.
        chat_template: Jinja template of a chat, as in Hugging Face's folders; None refuses chats.
        specials: texts of tokens that the template names, such as "bos_token".
        keys: API keys, of which each request needs one; without keys, everybody may ask.
        limits: limits of a request.
        grace: seconds that open requests have at the end.
    """
    service = _Service(engine, tokenizer, name, chat_template, specials, limits)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        # the first call compiles kernels, and nobody shall wait for it
        engine.submit([0], n_tokens=2, salt="warm").result()
        engine.start()
        yield
        await asyncio.to_thread(engine.stop, grace=grace)

    app = FastAPI(title="linrec", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(BodyLimit, most=limits.body, seconds=limits.patience)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _refused)
    known = [key.encode() for key in keys]

    async def salt_of(request: Request) -> str:
        """Return the salt of the client's key, after checking the key."""
        given = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
        # all are compared, so that the time tells nothing
        if known and not any([hmac.compare_digest(given, key) for key in known]):
            raise Refused(401, "the API key is missing or wrong. Send `Authorization: Bearer KEY`.")
        return hashlib.sha256(given).hexdigest() if known else ""

    Salt = Annotated[str, Depends(salt_of)]

    app.include_router(make_router(engine, tokenizer, salt_of))

    @app.post("/v1/completions", response_model=None)
    async def completions(body: CompletionBody, request: Request, salt: Salt) -> Response:
        return await service.answer(body, request, salt, service.prompts(body), chat=False)

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(body: ChatBody, request: Request, salt: Salt) -> Response:
        return await service.answer(body, request, salt, [service.rendered(body)], chat=True)

    @app.get("/v1/models")
    async def models(salt: Salt) -> dict[str, Any]:
        return {"object": "list", "data": [service.about]}

    @app.get("/v1/models/{wanted:path}")
    async def model(wanted: str, salt: Salt) -> dict[str, Any]:
        if wanted != name:
            raise Refused(404, f"there is no model {wanted!r}; this server has {name!r}.", param="model")
        return service.about

    @app.get("/health", response_model=None)
    async def health() -> Response:
        return Response(status_code=200 if engine.accepts else 503)

    @app.get("/metrics", response_model=None)
    async def metrics() -> Response:
        return Response(generate_latest(service.registry), media_type="text/plain; version=0.0.4")

    return app


class _Service:
    """Answers of one engine."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        name: str,
        chat_template: str | None,
        specials: Mapping[str, str],
        limits: Limits,
    ) -> None:
        self.engine, self.tokenizer, self.name, self.limits = engine, tokenizer, name, limits
        self.specials = {"bos_token": "", "eos_token": getattr(tokenizer, "end", None) or "", **specials}
        self.about = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "linrec"}
        self.template = None
        if chat_template is not None:
            # a template comes with a model, from anywhere
            sandbox = ImmutableSandboxedEnvironment(
                trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
            )
            sandbox.globals["raise_exception"] = _raise
            self.template = sandbox.from_string(chat_template)
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.first = Histogram(
            "linrec_first_token_seconds",
            "Time from a request to its first token",
            registry=self.registry,
            buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100),
        )

    def collect(self) -> Iterable[Any]:
        """Yield the counters of the engine, as `prometheus_client` asks."""
        ends = CounterMetricFamily("linrec_requests", "Requests that ended", labels=["reason"])
        tokens = CounterMetricFamily("linrec_tokens", "Tokens", labels=["kind"])
        for kind, count in sorted(self.engine.counts.items()):
            is_token = kind in ("read", "cached", "generated", "proposed", "accepted")
            (tokens if is_token else ends).add_metric([kind], count)
        sizes = GaugeMetricFamily("linrec_open_requests", "Requests by what they do", labels=["state"])
        for state, number in self.engine.open_requests.items():
            sizes.add_metric([state], number)
        snapshots = GaugeMetricFamily("linrec_snapshot_bytes", "Bytes of snapshots")
        snapshots.add_metric([], self.engine.prefixes.nbytes)
        reserved = GaugeMetricFamily("linrec_reserved_state_bytes", "Bytes reserved for states of requests")
        reserved.add_metric([], self.engine.reserved_bytes)
        return [ends, tokens, sizes, snapshots, reserved]

    def prompts(self, body: CompletionBody) -> list[list[int]]:
        """Return the tokens of each prompt."""
        return [self._encoded(each) if isinstance(each, str) else each for each in body.prompt]

    def rendered(self, body: ChatBody) -> list[int]:
        """Return the tokens of a chat."""
        if self.template is None:
            raise Refused(400, "this model has no chat template. Use /v1/completions.")
        messages = [message.model_dump(exclude_none=True) for message in body.messages]
        try:
            text = self.template.render(messages=messages, add_generation_prompt=True, **self.specials)
        except Exception as error:
            raise Refused(400, f"the chat template refuses `messages`: {error}", param="messages") from error
        return self._encoded(text)

    def _encoded(self, text: str) -> list[int]:
        try:
            found: list[int] = self.tokenizer.encode(text).tolist()
        except ValueError as error:
            raise Refused(400, f"the prompt cannot be encoded: {error}", param="prompt") from error
        return found

    async def answer(
        self, body: Body, request: Request, salt: str, prompts: list[list[int]], *, chat: bool
    ) -> Response:
        """Return the answer of a body, at once or as a stream."""
        if body.model != self.name:
            raise Refused(
                404, f"there is no model {body.model!r}; this server has {self.name!r}.", param="model"
            )
        told: asyncio.Queue[int] = asyncio.Queue()
        choices = self._submitted(body, salt, prompts, told)
        written = Written(chat=chat, model=self.name)
        pieces = self._pieces(choices, told, request)
        if body.stream:
            usage = bool(body.stream_options and body.stream_options.get("include_usage"))
            events = self._events(written, choices, pieces, usage=usage)
            return StreamingResponse(events, media_type="text/event-stream")
        async for choice, text in pieces:
            choice.text += text
        for choice in choices:
            if choice.answer.ended == "error":
                raise Refused(500, FAILED)
        return JSONResponse(written.whole(choices) | {"usage": self._usage(choices)})

    def _submitted(
        self, body: Body, salt: str, prompts: Sequence[Sequence[int]], told: asyncio.Queue[int]
    ) -> list[Choice]:
        """Ask the engine for all answers of a body, or for none."""
        count, stops = len(prompts) * (body.n or 1), body.stop
        if not 1 <= count <= self.limits.choices:
            raise Refused(
                400, f"`n` times the prompts must be 1 to {self.limits.choices}; got {count}.", param="n"
            )
        if len(stops) > self.limits.stops:
            raise Refused(400, f"`stop` must have at most {self.limits.stops} texts.", param="stop")
        logprobs, echo = getattr(body, "logprobs", None), bool(getattr(body, "echo", None))
        if body.stream_options is not None and not body.stream:
            raise Refused(400, "`stream_options` needs `stream`.", param="stream_options")
        if body.stream and (logprobs is not None or echo):
            raise Refused(400, "`logprobs` and `echo` are not supported with `stream`.", param="stream")
        loop, end = asyncio.get_running_loop(), self.tokenizer.end_of_document
        # without a seed, every answer is another
        seed = secrets.randbits(63) if body.seed is None else body.seed
        choices: list[Choice] = []

        def tell(index: int, answer: Answer) -> None:
            loop.call_soon_threadsafe(told.put_nowait, index)

        try:
            for index in range(count):
                number, repeat = divmod(index, body.n or 1)
                prompt = prompts[number]
                with refusing():
                    answer = self.engine.submit(
                        prompt,
                        n_tokens=self.engine.room(len(prompt)) if body.tokens is None else body.tokens,
                        temperature=1.0 if body.temperature is None else body.temperature,
                        top_k=body.top_k,
                        top_p=body.top_p,
                        seed=seed + repeat,
                        stop=() if end is None else (end,),
                        seconds=self.limits.seconds,
                        process=body.process(len(prompt), self.engine.vocab_size),
                        logprobs=logprobs,
                        echo=echo,
                        salt=salt,
                        listener=partial(tell, index),
                    )
                choices.append(Choice(index, number, answer, self.tokenizer, stops))
        except Exception:
            self._left(choices)
            raise
        return choices

    async def _pieces(
        self, choices: Sequence[Choice], told: asyncio.Queue[int], request: Request
    ) -> AsyncGenerator[tuple[Choice, str], None]:
        """Yield the text of choices as it comes; a client that goes away frees its slots."""
        is_open, looked = {choice.index for choice in choices}, time.monotonic()
        try:
            while is_open:
                with contextlib.suppress(asyncio.TimeoutError):
                    choice = choices[await asyncio.wait_for(told.get(), PATIENCE)]
                    text = choice.take() if choice.index in is_open else ""
                    if choice.reason is not None:
                        is_open.discard(choice.index)
                        self.engine.cancel(choice.answer)
                    if text or choice.reason is not None:
                        yield choice, text
                if time.monotonic() - looked > PATIENCE:
                    looked = time.monotonic()
                    if await request.is_disconnected():
                        return
        finally:
            self._left(choices)

    def _left(self, choices: Sequence[Choice]) -> None:
        for choice in choices:
            if "first" in choice.answer.times and choice.answer.ended is not None:
                times = choice.answer.times
                self.first.observe(times["first"] - times["submitted"])
            self.engine.cancel(choice.answer)

    async def _events(
        self,
        written: Written,
        choices: Sequence[Choice],
        pieces: AsyncGenerator[tuple[Choice, str], None],
        *,
        usage: bool,
    ) -> AsyncIterator[str]:
        """Yield server-sent events."""
        async with contextlib.aclosing(pieces):
            async for choice, text in pieces:
                if choice.answer.ended == "error":
                    yield _event(error_object(500, FAILED))
                    break
                yield _event(written.piece(choice, text))
        if usage:
            yield _event(written.usage(self._usage(choices)))
        yield "data: [DONE]\n\n"

    def _usage(self, choices: Sequence[Choice]) -> dict[str, Any]:
        # several answers to one prompt count it once
        first = {choice.prompt: choice.answer for choice in reversed(choices)}
        read = sum(answer.n_prompt for answer in first.values())
        cached = sum(answer.cached for answer in first.values())
        new = sum(choice.count for choice in choices)
        return {
            "prompt_tokens": read,
            "completion_tokens": new,
            "total_tokens": read + new,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


async def _invalid(request: Request, error: Exception) -> Response:
    """Answer a body of another form: one sentence that names the field."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = ""
    for part in first["loc"]:
        # the names of types stand between a field and its parts
        if part != "body" and isinstance(part, int):
            name += f"[{part}]"
        elif part != "body" and (not name or name.endswith("]")):
            name += f".{part}" if name else str(part)
    message = f"{first['msg'][:1].lower()}{first['msg'][1:]}"
    what = {"missing": f"`{name}` is missing.", "json_invalid": "the body is not JSON."}.get(
        first["type"], f"`{name}` is wrong: {message}."
    )
    if first["type"] == "value_error":
        # of our own checks, which name the field
        what = str(first["ctx"]["error"])
        if "[" in name:
            what = f"`{name}`: {what}"
    if not name and first["type"] not in ("json_invalid", "value_error"):
        what = "the body must be a JSON object. Send it with `Content-Type: application/json`."
    return JSONResponse(error_object(400, what, name or None), 400)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = (
        error.detail if isinstance(error, Refused) or error.status_code != 400 else "the body is not JSON."
    )
    headers = {"retry-after": "1"} if error.status_code in (429, 503) else None
    content = error_object(error.status_code, message, getattr(error, "param", None))
    return JSONResponse(content, error.status_code, headers)


class _Generation(Extension):
    """The tag `generation`, which marks the texts of the model for training."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> Any:
        """Return the content of the tag."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _event(content: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


def _raise(message: str) -> None:
    raise ValueError(message)
