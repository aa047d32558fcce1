"""Keeps NaN and infinity within their documents, where a reset is a product with zero.

Forms that weigh pairs of steps multiply the values behind a reset by zero, and zero times NaN is NaN, forward
and in gradients. So the form gets zeros for the steps that are not finite. Afterwards the outputs that these
steps reach become NaN. The backward pass replaces the gradients of these outputs, and gradients that are not
finite, by zeros. If one of the replaced gradients was not zero, all gradients of its document become NaN.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from linrec.ops.core.kernel import differentiated


class Isolation:
    """Takes the inputs of a form, and returns its outputs, of the documents of a batch.

    Args:
        document: (b, n), equal numbers for the steps of a document, which follow each other.

    Example:
        >>> v = torch.tensor([[torch.nan, 1.0, 2.0]])[..., None]
        >>> isolation = Isolation(torch.tensor([[0, 1, 1]]))
        >>> isolation.leave(isolation.enter(v, begin=0).cumsum(1), begin=0).flatten()
        tensor([nan, 1., 3.])
    """

    def __init__(self, document: Tensor) -> None:
        self.document = document
        self.carried = self.own = torch.zeros_like(document, dtype=torch.bool)
        self.mark = torch.zeros(document.shape, device=document.device)

    def enter(
        self, x: Tensor, *, begin: int | None = None, carried: bool = True, decays: bool = False
    ) -> Tensor:
        """Return an input with zeros for the steps that are not finite.

        Args:
            x: (b, m, ..), or (1, 1, ..) where it is constant.
            begin: the first of its m steps; None is a constant, which all steps share.
            carried: whether later outputs depend on the input too.
            decays: whether -inf is allowed, the logarithm of a decay of zero.
        """
        run = _Enter.apply if differentiated(x) else _Enter.forward
        x, *rows = run(x, decays)
        if begin is not None:
            around = begin, self.document.shape[1] - begin - x.shape[1]
            rows = [functional.pad(row, around) for row in rows]
        bad, mark = rows
        self.mark = self.mark + mark
        if carried:
            self.carried = self.carried | bad
        else:
            self.own = self.own | bad
        return x

    def leave(self, y: Tensor, *, begin: int, window: int | None = None, causal: bool = True) -> Tensor:
        """Return an output with NaN for the steps that inputs reach which are not finite.

        Args:
            y: (b, m, ..).
            begin: the first of its m steps.
            window: steps that an input reaches, its own included; None is all of its document.
            causal: whether inputs reach steps on one side alone.
        """
        reached = _reached(self.carried, self.document, window)
        if not causal:
            reached = reached | _reached_backwards(self.carried, self.document, window)
        hidden = (reached | self.own)[:, begin : begin + y.shape[1]]
        run = _Leave.apply if differentiated(y, self.mark) else _Leave.forward
        left: Tensor = run(y, self.mark, hidden, self.document, begin)
        return left


def isolated(run: Callable[[Any], tuple[Tensor, Tensor]]) -> Callable[[Any], tuple[Tensor, Tensor]]:
    """Return a backend that keeps NaN and infinity within documents where there are resets.

    Its inputs are a named tuple of tensors (b or 1, t or 1, ..) with `q`, which only the own step depends on,
    `log_decay`, `state` and `reset`.
    """

    @functools.wraps(run)
    def wrapper(given: Any) -> tuple[Tensor, Tensor]:
        if given.reset is None:
            return run(given)
        state, reset = given.state, given.reset
        time = reset.shape[1]
        # the state is a step of its own, before the first
        isolation = Isolation(functional.pad(reset.cumsum(1), (1, 0)))
        entered = {"state": isolation.enter(entering(state, reset)[:, None], begin=0)[:, 0]}
        for name, x in given._asdict().items():
            if isinstance(x, Tensor) and name not in ("state", "reset"):
                begin = 1 if x.shape[1] == time else None
                entered[name] = isolation.enter(
                    x, begin=begin, carried=name != "q", decays=name == "log_decay"
                )
        y, last = run(given._replace(**entered))
        return isolation.leave(y, begin=1), isolation.leave(last[:, None], begin=time)[:, 0]

    return wrapper


def entering(state: Tensor, reset: Tensor | None) -> Tensor:
    """Return the state (b, ..) with zeros for the rows that a reset at the first step parts from it.

    So it has no part in the gradients of what all documents share.

    Example:
        >>> entering(torch.tensor([[torch.inf], [2.0]]), torch.tensor([[True, False], [False, True]]))
        tensor([[0.],
                [2.]])
    """
    return state if reset is None or reset.shape[1] == 0 else _filled(state, reset[:, 0], 0.0)


class _Enter(torch.autograd.Function):
    """cleared, bad, mark = _Enter.apply(x, decays).

    The gradient of the mark, zeros (b, m), says which steps get NaN for their gradient.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, decays: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Clear steps that are not finite."""
        good = x < torch.inf if decays else x.isfinite()
        bad = ~good.flatten(2).all(-1)
        return _filled(x, bad, 0.0), bad, torch.zeros(bad.shape, device=x.device)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, bool], output: tuple[Tensor, Tensor, Tensor]) -> None:
        """Keep nothing."""
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, dx: Tensor, _: Tensor, dmark: Tensor) -> tuple[Tensor, None]:
        """Give NaN to the marked steps."""
        return _filled(dx, dmark > 0, torch.nan), None


class _Leave(torch.autograd.Function):
    """y = _Leave.apply(y, mark, hidden, document, begin)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(y: Tensor, mark: Tensor, hidden: Tensor, document: Tensor, begin: int) -> Tensor:
        """Give NaN to the hidden steps."""
        return _filled(y, hidden, torch.nan)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep the documents."""
        *tensors, ctx.begin = inputs
        ctx.save_for_backward(*tensors[2:])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Clear steps whose gradient is not finite, and mark their documents."""
        hidden, document = ctx.saved_tensors
        flat = dy.flatten(2)
        bad = ~flat.isfinite().all(-1) | (hidden & (flat != 0).any(-1))
        around = ctx.begin, document.shape[1] - ctx.begin - bad.shape[1]
        marked = _in_document(functional.pad(bad, around), document)
        return _filled(dy, bad, 0.0), marked.float(), None, None, None


# autograd asks for them at every call
_Enter.forward.__signature__ = inspect.signature(_Enter.forward)  # type: ignore[attr-defined]
_Leave.forward.__signature__ = inspect.signature(_Leave.forward)  # type: ignore[attr-defined]


def _filled(x: Tensor, rows: Tensor, value: float) -> Tensor:
    return x.masked_fill(rows.reshape(*rows.shape, *[1] * (x.ndim - rows.ndim)), value)


def _reached(bad: Tensor, document: Tensor, window: int | None) -> Tensor:
    """Whether one of the last `window` steps of the same document is bad, up to each step."""
    step = torch.arange(bad.shape[1], device=bad.device)
    begins = functional.pad(document[:, 1:] != document[:, :-1], (1, 0), value=True)
    first = torch.where(begins, step, 0).cummax(1).values
    if window is not None:
        first = torch.maximum(first, step - (window - 1))
    return torch.where(bad, step, -1).cummax(1).values >= first


def _reached_backwards(bad: Tensor, document: Tensor, window: int | None) -> Tensor:
    """Whether one of the next `window` steps of the same document is bad, from each step on."""
    return _reached(bad.flip(1), document.flip(1), window).flip(1)


def _in_document(bad: Tensor, document: Tensor) -> Tensor:
    """Whether any step of the same document is bad."""
    return _reached(bad, document, None) | _reached_backwards(bad, document, None)
