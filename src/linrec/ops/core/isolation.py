"""Confine NaN and infinity to their documents in algorithms that implement resets by multiplying by zero.

Algorithms on pairs of steps multiply values before a reset by zero. Zero times NaN is NaN, in the forward
pass and in gradients. So non-finite steps of the inputs are replaced by zeros, and then all outputs that
depend on these steps are set to NaN. The backward pass replaces the gradients of these outputs, and
non-finite gradients, by zeros. If a replaced gradient was not zero, all gradients of its document become NaN.
Numbers above `LARGEST`, such as 3e38, count as non-finite here: their products with others overflow.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from linrec.ops.core.kernel import Differentiable, In

# sums of products with numbers up to 2^27 do not overflow below; what overflows must not meet a zero
LARGEST = {
    torch.float16: torch.finfo(torch.float16).max,
    torch.bfloat16: 2.0**100,
    torch.float32: 2.0**100,
    torch.float64: 2.0**996,
}


class Isolation:
    """Filter for the inputs and outputs of an algorithm on a batch of packed documents.

    Args:
        document: (b, n), a number for each step; the steps of a document have equal numbers and are adjacent.
    """

    def __init__(self, document: Tensor) -> None:
        self.document = document
        self.carried = self.own = torch.zeros_like(document, dtype=torch.bool)
        self.mark = torch.zeros(document.shape, device=document.device)

    def enter(
        self, x: Tensor, *, begin: int | None = None, carried: bool = True, decays: bool = False
    ) -> Tensor:
        """Return an input in which non-finite steps are replaced by zeros.

        Args:
            x: (b, m, ..), or (1, 1, ..) if constant.
            begin: index of the first of the m steps; None for a constant, which all steps share.
            carried: whether outputs of later steps depend on the input too.
            decays: whether -inf is allowed, as the logarithm of a zero decay.
        """
        x, *rows = _ENTER(_Entering(x, decays))
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

    def entered(self, inputs: dict[str, Any], *, begin: int) -> dict[str, Any]:
        """Apply `enter` to the tensors among named inputs.

        Args:
            inputs: `q`, which affects only the output of its own step, `log_decay`, and other inputs, of
                shape (b or 1, t or 1, ..).
            begin: index of the first of the t steps.
        """
        time, found = self.document.shape[1] - begin, {}
        for name, x in inputs.items():
            if isinstance(x, Tensor):
                first = begin if x.shape[1] == time else None
                found[name] = self.enter(x, begin=first, carried=name != "q", decays=name == "log_decay")
        return found

    def leave(self, y: Tensor, *, begin: int, window: int | None = None, causal: bool = True) -> Tensor:
        """Return an output with NaN at the steps that depend on non-finite inputs.

        Args:
            y: (b, m, ..).
            begin: index of the first of the m steps.
            window: number of steps that an input affects, including its own; None means its whole document.
            causal: whether an input affects later steps only.
        """
        reached = _reached(self.carried, self.document, window, causal)
        hidden = (reached | self.own)[:, begin : begin + y.shape[1]]
        return _LEAVE(_Leaving(y, self.mark, hidden, self.document, begin)).y


def documents(reset: Tensor, *, past: int = 0) -> Tensor:
    """Return the document number of each step: the number of resets up to and including the step.

    Args:
        reset: (b, t) bool, true where a document begins.
        past: number of steps to prepend, which belong to document 0.
    """
    return functional.pad(reset.cumsum(1), (past, 0))


def isolated(run: Callable[[In], tuple[Tensor, Tensor]]) -> Callable[[In], tuple[Tensor, Tensor]]:
    """Return a backend that confines NaN and infinity to their documents if there are resets.

    The inputs are a named tuple of tensors (b or 1, t or 1, ..): `q`, which affects only the output of its
    own step, `log_decay`, `state`, `reset` and others.
    """

    @functools.wraps(run)
    def wrapper(given: Any) -> tuple[Tensor, Tensor]:
        if given.reset is None:
            return run(given)
        state, reset = given.state, given.reset
        # the initial state counts as a step before the first
        isolation = Isolation(documents(reset, past=1))
        entered = {"state": isolation.enter(entering(state, reset)[:, None], begin=0)[:, 0]}
        others = {name: x for name, x in given._asdict().items() if name not in ("state", "reset")}
        y, last = run(given._replace(**entered, **isolation.entered(others, begin=1)))
        return isolation.leave(y, begin=1), isolation.leave(last[:, None], begin=reset.shape[1])[:, 0]

    return wrapper


def entering(state: Tensor, reset: Tensor | None) -> Tensor:
    """Return the state (b, ..) with zeros in rows that have a reset at the first step.

    A discarded state then does not affect the gradients of parameters that documents share.
    """
    return state if reset is None or reset.shape[1] == 0 else _filled(state, reset[:, 0], 0.0)


Gradients = tuple[Tensor | None, ...]


class _Entering(NamedTuple):
    x: Tensor
    decays: bool


class _Entered(NamedTuple):
    """An input with zeros at non-finite steps, a mask of these steps, and a marker of zeros (b, m).

    The gradient of the marker is positive at the steps whose gradient must become NaN.
    """

    cleared: Tensor
    bad: Tensor
    mark: Tensor


def _enter(given: _Entering, keep: bool) -> _Entered:
    x, decays = given
    good = x <= LARGEST[x.dtype] if decays else _small(x)
    bad = ~good.flatten(2).all(-1)
    return _Entered(_filled(x, bad, 0.0), bad, torch.zeros(bad.shape, device=x.device))


def _small(x: Tensor) -> Tensor:
    parts = torch.view_as_real(x) if x.is_complex() else x
    small = parts.abs() <= LARGEST[parts.dtype]
    return small.all(-1) if x.is_complex() else small


def _enter_adjoint(
    given: _Entering, kept: _Entered, d: _Entered, needs: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    return _filled(d.cleared, d.mark > 0, torch.nan), None


class _Leaving(NamedTuple):
    y: Tensor
    mark: Tensor
    hidden: Tensor
    document: Tensor
    begin: int


class _Left(NamedTuple):
    y: Tensor


def _leave(given: _Leaving, keep: bool) -> _Left:
    return _Left(_filled(given.y, given.hidden, torch.nan))


def _leave_adjoint(
    given: _Leaving, kept: _Left, d: _Left, needs: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Replace non-finite gradients of steps by zeros, and mark their documents."""
    flat = d.y.flatten(2)
    bad = ~_small(flat).all(-1) | (given.hidden & (flat != 0).any(-1))
    around = given.begin, given.document.shape[1] - given.begin - bad.shape[1]
    marked = _reached(functional.pad(bad, around), given.document, None, causal=False)
    return _filled(d.y, bad, 0.0), marked.float(), None, None, None


_ENTER = Differentiable(_Entering, _Entered, _enter, _enter_adjoint, kept=("bad",), saves=())
_LEAVE = Differentiable(_Leaving, _Left, _leave, _leave_adjoint, saves=("hidden", "document"))


def beside(flags: Tensor, x: Tensor) -> Tensor:
    """Reshape flags to broadcast against the axes of x that follow theirs."""
    return flags.reshape(*flags.shape, *[1] * (x.ndim - flags.ndim))


def _filled(x: Tensor, rows: Tensor, value: float) -> Tensor:
    return x.masked_fill(beside(rows, x), value)


def _reached(bad: Tensor, document: Tensor, window: int | None, causal: bool = True) -> Tensor:
    """Return whether any of the last (if not causal, or next) `window` steps of the document is bad."""
    step = torch.arange(bad.shape[1], device=bad.device)
    begins = functional.pad(document[:, 1:] != document[:, :-1], (1, 0), value=True)
    first = torch.where(begins, step, 0).cummax(1).values
    if window is not None:
        first = torch.maximum(first, step - (window - 1))
    reached = torch.where(bad, step, -1).cummax(1).values >= first
    return reached if causal else reached | _reached(bad.flip(1), document.flip(1), window).flip(1)
