"""The page of the server: answers that are watched, forked and rolled back, and the states of layers."""

import copy
import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from importlib import resources
from typing import Annotated, Any

import torch
from fastapi import APIRouter, Depends
from fastapi.responses import HTMLResponse
from pydantic import Field
from torch import Tensor, nn

from linrec.mixers import Mixer, State
from linrec.models import LanguageModel
from linrec.models.ragged import RaggedState
from linrec.ops import inspection
from linrec.ops.core.call import Call, recording
from linrec.serve.bodies import Checked, Refused, refusing
from linrec.serve.engine import Engine
from linrec.serve.request import Request
from linrec.text import Tokenizer
from linrec.trees import leaves

__all__ = ["Watch", "make_router"]

# answers that can be looked at, and tokens of each whose layers are shown
KEPT, SHOWN = 64, 400


class AnswerBody(Checked):
    """A prompt to continue."""

    prompt: str
    max_tokens: Annotated[int, Field(ge=1, le=4096)] = 200
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0


class ForkBody(Checked):
    """The seed of a fork."""

    seed: Annotated[int, Field(ge=0, lt=2**63)]


class RollbackBody(Checked):
    """The number of tokens to take back."""

    n_tokens: Annotated[int, Field(ge=1)]


class Watch:
    """The states of the layers at each token of an answer, for `Engine.submit(observer=watch)`.

    For each layer: `decay`, the mean magnitude of the factors of its state at the token, or None without
    factors; `size`, the root mean square of its state; and `moved`, |S_n - S_{n-1}| / |S_n|, or None where
    the state grew.

    Args:
        model: the model of the engine.
    """

    def __init__(self, model: LanguageModel) -> None:
        # the engine's own modules must not get hooks; the tensors are shared
        tensors = [*model.parameters(), *model.buffers()]
        self.model = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
        self.tokens: weakref.WeakKeyDictionary[Request, list[list[dict[str, Any]]]]
        self.tokens = weakref.WeakKeyDictionary()
        self._before: weakref.WeakKeyDictionary[Request, tuple[int, State]] = weakref.WeakKeyDictionary()

    def __call__(self, request: Request, state: State) -> None:
        """Take the state after the newest token that the request has read."""
        seen = self.tokens.setdefault(request, [])
        del seen[max(0, len(request.generated) - 1) :]
        read, before = self._before.get(request, (-1, None))
        self._before[request] = request.read, state
        decays: list[float | None] = [None] * len(self.model.mixers)
        if read == request.read - 1 and before is not None:
            decays = self._decays(request.tokens[read], before)
        found = []
        for number, (mixer, decay) in enumerate(zip(self.model.mixers, decays, strict=True)):
            now, last = self._layer(state, number), self._layer(before, number)
            moved = None
            if last is not None and now is not None and last.shape == now.shape:
                moved = float((now - last).norm() / now.norm().clamp(min=1e-30))
            size = None if now is None or not len(now) else float(now.square().mean().sqrt())
            found.append({"mixer": type(mixer).__name__, "decay": decay, "size": size, "moved": moved})
        seen.append(found)

    def _layer(self, state: State, number: int) -> Tensor | None:
        """Return the numbers of a layer's state in one row, or None without a state of its own."""
        if type(state) is not tuple or len(state) != len(self.model.mixers) or isinstance(state, RaggedState):
            return None
        parts = [part for part in leaves(state[number]) if part.is_floating_point() or part.is_complex()]
        reals = [torch.view_as_real(part) if part.is_complex() else part for part in parts]
        return torch.cat([part.double().flatten() for part in reals]) if reals else None

    def _decays(self, token: int, state: State) -> list[float | None]:
        """Return the mean |a| of each layer in a step from a state."""
        found: list[float | None] = []

        def begin(mixer: nn.Module, given: Any, calls: list[Call]) -> None:
            calls.clear()

        def end(mixer: Mixer, given: Any, out: Any, calls: list[Call], notes: dict[str, Tensor]) -> None:
            own = [call for call in calls if call.operator.name == mixer.recurrence]
            factors = inspection.transitions(own[-1] if own else None, notes) if own or notes else None
            found.append(None if factors is None else float(factors[0].mean()))
            notes.clear()

        hooks = []
        with recording() as calls, inspection.noting() as notes:
            for mixer in self.model.mixers:
                hooks.append(mixer.register_forward_pre_hook(partial(begin, calls=calls)))
                hooks.append(mixer.register_forward_hook(partial(end, calls=calls, notes=notes)))
            try:
                self.model.hidden(torch.tensor([[token]], device=self.model.embedding.weight.device), state)
            finally:
                for hook in hooks:
                    hook.remove()
        return found


def make_router(engine: Engine, tokenizer: Tokenizer, salt_of: Callable[..., Any]) -> APIRouter:
    """Return the routes of the page.

    | address | content |
    |---|---|
    | `GET /` | the page |
    | `POST /linrec/answers` | begins an answer; returns its `id` |
    | `GET /linrec/answers/ID` | its tokens so far, and the layers at each of the last 400 |
    | `POST /linrec/answers/ID/fork`, `rollback`, `cancel` | as in the engine |
    """
    router, watch = APIRouter(), Watch(engine.model)
    answers: OrderedDict[int, tuple[str, Request]] = OrderedDict()
    Salt = Annotated[str, Depends(salt_of)]

    def kept(request: Request, salt: str) -> dict[str, int]:
        number = next(reversed(answers), 0) + 1
        answers[number] = salt, request
        while len(answers) > KEPT:
            _, (_, oldest) = answers.popitem(last=False)
            engine.cancel(oldest)
        return {"id": number}

    def found(number: int, salt: str) -> Request:
        owner, request = answers.get(number, (None, None))
        if request is None or owner != salt:
            raise Refused(404, f"there is no answer {number}; the last {KEPT} are kept.")
        return request

    @router.get("/", response_class=HTMLResponse)
    async def page() -> str:
        return resources.files("linrec.serve").joinpath("page.html").read_text(encoding="utf-8")

    @router.post("/linrec/answers")
    async def begin(body: AnswerBody, salt: Salt) -> dict[str, int]:
        end = tokenizer.end_of_document
        with refusing():
            request = engine.submit(
                tokenizer.encode(body.prompt).tolist() or ([] if end is None else [end]),
                n_tokens=body.max_tokens,
                temperature=body.temperature,
                seed=body.seed,
                stop=() if end is None else (end,),
                observer=watch,
                salt=salt,
            )
        return kept(request, salt)

    @router.get("/linrec/answers/{number}")
    async def look(number: int, salt: Salt) -> dict[str, Any]:
        request = found(number, salt)
        tokens = request.generated
        return {
            "text": tokenizer.decode(token for token in tokens if token != tokenizer.end_of_document),
            "tokens": [tokenizer.decode([token]) for token in tokens[-SHOWN:]],
            "generated": len(tokens),
            "prompt": request.n_prompt,
            "cached": request.cached,
            "ended": request.ended,
            "layers": watch.tokens.get(request, [])[-SHOWN:],
        }

    @router.post("/linrec/answers/{number}/fork")
    async def fork(number: int, body: ForkBody, salt: Salt) -> dict[str, int]:
        parent = found(number, salt)
        with refusing():
            child = engine.fork(parent, seed=body.seed)
        watch.tokens.setdefault(child, [*watch.tokens.get(parent, ())])
        return kept(child, salt)

    @router.post("/linrec/answers/{number}/rollback")
    async def rollback(number: int, body: RollbackBody, salt: Salt) -> dict[str, int]:
        with refusing():
            engine.rollback(found(number, salt), body.n_tokens)
        return {"id": number}

    @router.post("/linrec/answers/{number}/cancel")
    async def cancel(number: int, salt: Salt) -> dict[str, int]:
        engine.cancel(found(number, salt))
        return {"id": number}

    return router
