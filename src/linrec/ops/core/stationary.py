"""State-space models constant in time: a loop, a convolution, and both in blocks for torch.export.

In `stationary`, the model is a convolution within blocks of steps, and a recurrence from block to block. So
there is no transform whose size the length decides, and of the states only those between blocks are formed.
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
"""Steps of a block, a power of two."""


class Tables(NamedTuple):
    """Of x_t = A x_{t-1} + B u_t and y_t = C x_t, for l = 0 .. BLOCK - 1; d is 1 or the channels.

    Args:
        powers: A, A^2, A^4 .. A^BLOCK, each (d, n) where A is diagonal, or (d, n, n).
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


# `zeros`: the convolution skips the response of a state of zeros
model = partial(
    Operator, sequence="u", output=lambda given: (given.u.shape, given.u.dtype), axes="(b, d, n)",
    state=lambda given: ((given.u.shape[0], *given.c.shape), given.c.dtype), zeros=False,
)  # fmt: skip
"""Makes the operator of a model, of `name`, `inputs`, `canonical` and `backends`."""


def backends(recurrence: Run, convolution: Run, reference: Run) -> tuple[Backend, ...]:
    """Return the table of a model: a loop for few steps, else the convolution."""
    loop = Backend("recurrent", "torch", recurrence, "a loop for the states alone", auto=is_short)
    return (loop, *convolutions(convolution), oracle(reference))


def convolutions(run: Run, auto: Callable[[Any], bool] = always) -> tuple[Backend, Backend]:
    """Return the entries of a model as a convolution, `run(inputs, backend=...)` by `long_conv`."""
    entry = partial(Backend, "convolution", auto=auto, widen=False)
    about = "`linrec.ops.long_conv` with taps by torch"
    return (
        entry("triton", partial(run, backend="triton"), f"{about}; without `reset`", **WITHOUT_RESET),
        entry("torch", partial(run, backend="torch"), f"{about}; no states of all steps are formed"),
    )


def oracle(run: Run) -> Backend:
    """Return the entry of the reference."""
    return Backend("recurrent", "reference", run, "a loop over time: the oracle, slow", auto=never)


def is_short(given: Any) -> bool:
    """Return whether there are so few steps that their states cost less than a convolution."""
    return few(given.u.shape[1], 16)


def states(
    added: Tensor, state: Tensor | None, reset: Tensor | None, step: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the states x_t = step(x_{t-1}) + added_t of all steps, and the last one.

    Args:
        added: (b, t, d, n).
        state: x before the first step (b, d, n), or None for zeros.
        reset: None or (b, t) bool.
        step: the linear map from state to state.
    """
    x = torch.zeros_like(added[:, 0]) if state is None else state
    made = []
    # unbound once: the gradient of an index in a loop would be a tensor of all steps, for every step
    starts = [None] * added.shape[1] if reset is None else list(reset[:, :, None, None].unbind(1))
    for added_t, start in zip(added.unbind(1), starts, strict=True):
        x = step(x if start is None else x.masked_fill(start, 0)) + added_t
        made.append(x)
    return torch.stack(made, 1), x


def convolved(
    y: Tensor, given: Any, last: Callable[[Tensor], Tensor], response: Callable[[Tensor], Values]
) -> Values:
    """Return the outputs and the last state of a model, from its outputs K * u without an initial state.

    Args:
        y: K * u, (b, t, ..).
        given: the inputs of the model: u (b, t, d), state (b, d, n) or None, and reset (b, t) or None.
        last: from u to the last state, without an initial state.
        response: from a state before the first step to its outputs, as y, and its part in the last state.
    """
    u, state, reset = wide(given.u), given.state, given.reset
    if reset is None:
        x = last(u)
    else:
        # the last state is of the inputs from the last reset on
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
    """Run the model.

    Args:
        given: the inputs of the model: u (b, t, d), any number of steps, state (b, d, n) or None, and reset
            (b, t) or None.
        tables: those of the model, in the accumulation dtype.

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
        # resets so far in the block: what enters it is part of document 0
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
    """The state after the last step, of its block's inputs and of the state before the block."""
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
