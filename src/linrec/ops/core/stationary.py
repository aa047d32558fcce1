"""Time-invariant state-space models: as a loop, as a convolution, and in blocks for torch.export.

`stationary` is a convolution within blocks of steps and a recurrence over blocks. So no transform has a size
that depends on the length, and only the states between blocks are materialised.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linrec.ops.core.backends import WITHOUT_RESET, Backend, always, few, never
from linrec.ops.core.call import Operator
from linrec.ops.core.isolation import documents, entering
from linrec.ops.core.loop import blocks, joined, matrix_product, recurrence
from linrec.ops.core.precision import wide

BLOCK = 32
"""Number of steps per block, a power of two."""


class Tables(NamedTuple):
    """Tables of x_t = A x_{t-1} + B u_t and y_t = C x_t, for l = 0 .. BLOCK - 1; d is 1 or the channels.

    Args:
        powers: A, A^2, A^4 .. A^BLOCK, each (d, n) for diagonal A, or (d, n, n).
        columns: A^l B, (d, n, l).
        rows: C A^(l+1), (d, m, l, n).
        taps: C A^l B, (d, m, l), real.
    """

    powers: list[Tensor]
    columns: Tensor
    rows: Tensor
    taps: Tensor


Values = tuple[Tensor, Tensor]
Run = Callable[..., Values]


# zeros=False: the convolution skips the response to a zero state
model = partial(
    Operator, sequence="u", output=lambda given: (given.u.shape, given.u.dtype), axes="(b, d, n)",
    state=lambda given: ((given.u.shape[0], *given.c.shape), given.c.dtype), zeros=False,
)  # fmt: skip
"""Makes the operator of a model from `name`, `inputs`, `canonical` and `backends`."""


def backends(recurrence: Run, convolution: Run, reference: Run) -> tuple[Backend, ...]:
    """Return the table of a model: a loop for short inputs, else the convolution."""
    loop = Backend("recurrent", "torch", recurrence, "a loop for the states alone", auto=is_short)
    return (loop, *convolutions(convolution), oracle(reference))


def convolutions(run: Run, auto: Callable[[Any], bool] = always) -> tuple[Backend, Backend]:
    """Return the convolution entries of a model; `run(inputs, backend=...)` computes it by `long_conv`."""
    entry = partial(Backend, "convolution", auto=auto, widen=False)
    about = "`linrec.ops.long_conv` with taps by torch"
    return (
        entry("triton", partial(run, backend="triton"), f"{about}; without `reset`", **WITHOUT_RESET),
        entry("torch", partial(run, backend="torch"), f"{about}; no states of all steps are formed"),
    )


def oracle(run: Run) -> Backend:
    """Return the entry of the reference backend."""
    return Backend("recurrent", "reference", run, "a loop over time: the oracle, slow", auto=never)


def is_short(given: Any) -> bool:
    """Return whether the time is so short that a loop is faster than a convolution."""
    return few(given.u.shape[1], 16)


def states(
    added: Tensor, state: Tensor | None, reset: Tensor | None, step: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Return all states x_t = step(x_{t-1}) + added_t, and the last state.

    Args:
        added: (b, t, d, n).
        state: initial state (b, d, n), or None for zeros.
        reset: None or (b, t) bool.
        step: the linear map from a state to the next.
    """
    x = torch.zeros_like(added[:, 0]) if state is None else state
    made = []
    # unbind, because the gradient of indexing in a loop would allocate a full-length tensor at every step
    starts = [None] * added.shape[1] if reset is None else list(reset[:, :, None, None].unbind(1))
    for added_t, start in zip(added.unbind(1), starts, strict=True):
        x = step(x if start is None else x.masked_fill(start, 0)) + added_t
        made.append(x)
    return torch.stack(made, 1), x


def convolved(
    y: Tensor, given: Any, last: Callable[[Tensor], Tensor], response: Callable[[Tensor], Values]
) -> Values:
    """Return the outputs and the last state of a model, given its outputs K * u from a zero initial state.

    Args:
        y: K * u, (b, t, ..).
        given: the inputs of the model: u (b, t, d), state (b, d, n) or None, and reset (b, t) or None.
        last: maps u to the last state from a zero initial state.
        response: maps an initial state to its contributions to the outputs, as y, and to the last state.
    """
    u, state, reset = wide(given.u), given.state, given.reset
    if reset is None:
        x = last(u)
    else:
        # the last state depends only on inputs after the last reset
        document = documents(reset)
        x = last(u.masked_fill((document < document[:, -1:])[..., None], 0))
    if state is None:
        return y, x
    outputs, through = response(entering(state, reset))
    if reset is not None:
        begun = document > 0
        outputs = outputs.masked_fill(begun.view(*begun.shape, *[1] * (y.ndim - 2)), 0)
        through = through.masked_fill(begun[:, -1, None, None], 0)
    return y + outputs, x + through


def stationary(given: Any, tables: Tables) -> Values:
    """Return the outputs and the last state of a model, computed in blocks.

    Args:
        given: the inputs of the model: u (b, t, d), any number of steps, state (b, d, n) or None, and reset
            (b, t) or None.
        tables: the tables of the model, in the accumulation dtype.

    Returns:
        y (b, t, d, m) and the last state, in the dtype of the tables.
    """
    u, state, reset = wide(given.u), given.state, given.reset
    pieces, columns, through = blocks(u, BLOCK, 1), tables.columns, tables.powers[-1]
    if state is None:
        state = u.new_zeros(u.shape[0], u.shape[2], columns.shape[1], dtype=columns.dtype)
    step = torch.arange(BLOCK, device=u.device)
    lag = step[:, None] - step
    weights = tables.taps[..., lag.clamp(min=0)].masked_fill(lag < 0, 0)
    kept, document = pieces, None
    passing = through.expand(*pieces.shape[:2], u.shape[2], *through.shape[1:])
    if reset is None:
        y = torch.einsum("dmij,bcjd->bcidm", weights, pieces)
    else:
        # number of resets so far in the block: the block's initial state belongs to document 0
        document = blocks(reset.long(), BLOCK, 1).cumsum(2)
        apart = document[:, :, :, None] != document[:, :, None]
        seen = pieces[:, :, None].masked_fill(apart[..., None], 0)
        y = torch.einsum("dmij,bcijd->bcidm", weights, seen)
        kept = seen[:, :, -1]
        ended = document[:, :, -1] > 0
        passing = passing.masked_fill(ended.reshape(*ended.shape, *[1] * (passing.dim() - 2)), 0)
    added = torch.einsum("dnj,bcjd->bcdn", columns.flip(-1), kept.to(columns.dtype))
    product = None if through.dim() == 2 else matrix_product
    after = recurrence(passing, added, state, product=product)
    before = torch.cat([state[:, None], after], dim=1)[:, :-1]
    response = torch.einsum("dmin,bcdn->bcidm", tables.rows, before)
    if document is not None:
        response = response.masked_fill((document > 0)[..., None, None], 0)
    last = _last(pieces, u.shape[1], tables, before, document)
    return joined(y + response, u.shape[1], 1), last


def _last(pieces: Tensor, time: int, tables: Tables, before: Tensor, document: Tensor | None) -> Tensor:
    """Return the last state, from the inputs of its block and the state before the block."""
    final = torch.arange(time - 1, time, device=pieces.device)
    u, x = (part.index_select(1, final // BLOCK)[:, 0] for part in (pieces, before))
    age = final % BLOCK - torch.arange(BLOCK, device=u.device)
    kept = age >= 0
    if document is not None:
        document = document.index_select(1, final // BLOCK)[:, 0]
        current = document.index_select(1, final % BLOCK)
        kept, x = kept & (document == current), x.masked_fill(current[..., None] > 0, 0)
    for bit, power in enumerate(tables.powers):
        x = torch.where((final % BLOCK + 1 >> bit) & 1 > 0, _applied(power, x), x)
    u = u.where(kept[..., None], 0).to(tables.columns.dtype)
    return x + torch.einsum("dnj,bjd->bdn", tables.columns.index_select(2, age.clamp(min=0)), u)


def _applied(power: Tensor, x: Tensor) -> Tensor:
    return power * x if power.dim() == 2 else (power @ x[..., None])[..., 0]
