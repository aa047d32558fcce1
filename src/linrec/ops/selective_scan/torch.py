"""The recurrence in torch operations, a chunk of steps at a time.

Within a chunk, every entry of the state is a channel of the blocked scan of `linrec.ops.scan.torch`, which
materialises the states of its steps. Only a single chunk's states are in memory at a time. The state before
each chunk is saved, and the adjoint recomputes the others from it. States are (n, c) here, as in the kernels.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linrec.ops.core.ambient import exporting
from linrec.ops.core.kernel import NOTHING, Differentiable, Memory, Space, by_autograd, kernel_op, like
from linrec.ops.core.precision import wide
from linrec.ops.scan import torch as scan

CHUNK = 64


class Selective(NamedTuple):
    """Canonical inputs of the operator.

    Attributes:
        x: (b, t, c).
        dt: (b, t, c).
        A: (c, n).
        B: (b, t, groups, n).
        C: (b, t, groups, n).
        D: (c,) or None.
        state: (b, c, n) in the accumulation dtype.
        reset: (b, t) bool, or None.
    """

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    state: Tensor | None
    reset: Tensor | None


class Group(NamedTuple):
    """Inputs of a backend: a single group of channels, with channels as the last axis.

    Attributes:
        x: (b, t, c).
        dt: (b, t, c).
        A: (1 or b, n, c) in the accumulation dtype.
        B: (b, t, n).
        C: (b, t, n).
        D: (1 or b, c) in the accumulation dtype.
        state: (b, n, c) in the accumulation dtype.
        reset: (b, t) bool, or None.
    """

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor
    state: Tensor
    reset: Tensor | None


class Outputs(NamedTuple):
    """Outputs of a backend on a single group: y (b, t, c), the last state, and the states before chunks.

    The states before chunks (b, chunks, n, c) are saved for the adjoint; without it there are no chunks.
    """

    y: Tensor
    last: Tensor
    starts: Tensor


def outputs(given: Group, chunks: int, states: int, y: torch.dtype) -> tuple[Space, Space, Space]:
    """Return the memory of a kernel's outputs: y of a dtype, and the states before `chunks` chunks."""
    batch, _, channels = given.state.shape
    starts = Memory((batch, chunks, states, channels), given.state.dtype)
    return like(given.x, y), like(given.state), starts


def gradients(given: Group, kept: Outputs, d: Outputs, needs: Sequence[bool]) -> list[Space]:
    """Return the memory of a kernel's gradients, all in the accumulation dtype."""
    return [*(like(x, d.last.dtype) for x in given[:7]), NOTHING]


def forward(given: Group, keep: bool) -> Outputs:
    """Run the recurrence; y has the accumulation dtype."""
    x, dt, A, B, C, D, state, cut = given
    starts, ys = [], []
    # an exported program must work for any number of steps, so it computes all states at once
    for piece in [slice(None)] if exporting() else _chunks(x):
        if keep:
            starts.append(state)
        x_, dt_, B_, C_ = (wide(tensor[:, piece]) for tensor in (x, dt, B, C))
        h = _states(x_, dt_, A, B_, state, None if cut is None else cut[:, piece])[1]
        # the last of several states must not keep the memory of all
        state = h[:, -1].clone() if keep or h.shape[1] > 1 else h[:, -1]
        ys.append(torch.matmul(C_[:, :, None], h)[:, :, 0] + D[:, None] * x_)
    kept = torch.stack(starts, dim=1) if keep else state.new_empty(state.shape[0], 0, *state.shape[1:])
    return Outputs(ys[0] if len(ys) == 1 else torch.cat(ys, dim=1), state, kept)


def adjoint(given: Group, kept: Outputs, d: Outputs, needs: Sequence[bool]) -> list[Any]:
    """Return the gradients of all inputs except `reset`, in the accumulation dtype.

    With g_t = C_t dy_t + a_{t+1} g_{t+1} and w_t = a_t h_{t-1}: dC = sum_c dy h, dB = sum_c g dt x,
    dx = dt sum_n g B + D dy, ddt = x sum_n g B + sum_n g A w, dA = sum_t g dt w.
    """
    x, dt, A, B, C, D, _, cut = given
    pieces: list[tuple[Tensor, ...]] = []
    dA = torch.zeros_like(kept.starts[:, 0])
    dD = torch.zeros_like(dA[:, 0])
    carry = d.last
    for chunk, piece in reversed(list(enumerate(_chunks(x)))):
        x_, dt_, B_, C_, dy = (wide(tensor[:, piece]) for tensor in (x, dt, B, C, d.y))
        before, cut_ = kept.starts[:, chunk], None if cut is None else cut[:, piece]
        a, h = _states(x_, dt_, A, B_, before, cut_)
        seen = dy[:, :, None] * C_[..., None]
        scanned = scan.Scan(a.flatten(2), h, before.flatten(1), cut_, False)
        of_h = scan.Values(seen.flatten(2), carry.flatten(1))
        da, g, carry, *_ = scan.adjoint(scanned, scan.Values(h.flatten(2), carry), of_h, (True,))
        carry, g, gw = carry.view_as(before), g.view_as(h), da.view_as(h) * a
        gB = torch.einsum("btnc,btn->btc", g, B_)
        ddt = x_ * gB + torch.sum(gw * A[:, None], dim=2)
        dB = torch.einsum("btnc,btc->btn", g, dt_ * x_)
        dC = torch.einsum("btnc,btc->btn", h, dy)
        pieces.append((dt_ * gB + D[:, None] * dy, ddt, dB, dC))
        dA = dA + torch.einsum("btnc,btc->bnc", gw, dt_)
        dD = dD + torch.sum(dy * x_, dim=1)
    dx, ddt, dB, dC = (torch.cat(steps[::-1], dim=1) for steps in zip(*pieces, strict=True))
    return [dx, ddt, dA.sum_to_size(A.shape), dB, dC, dD.sum_to_size(D.shape), carry, None]


def _chunks(x: Tensor) -> list[slice]:
    return [slice(begin, begin + CHUNK) for begin in range(0, x.shape[1], CHUNK)]


def _states(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, state: Tensor, cut: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return a_t = exp(dt_t A) and h_t for the steps of a chunk, (b, t, n, c)."""
    a = torch.exp(dt[:, :, None] * A[:, None])
    added = B[..., None] * (dt * x)[:, :, None]
    if x.shape[1] == 1:
        before = state[:, None] if cut is None else state[:, None].masked_fill(cut[..., None, None], 0)
        return a, torch.addcmul(added, a, before)
    h = scan.forward(scan.Scan(a.flatten(2), added.flatten(2), state.flatten(1), cut, False)).y
    return a, h.view_as(added)


def _plain(given: Group) -> tuple[Tensor, Tensor]:
    return forward(given, False)[:2]


again = by_autograd(_plain)
_KEPT = ("starts",)
chunkwise = Differentiable(Group, Outputs, forward, adjoint, again=again, kept=_KEPT)
kernel = partial(
    kernel_op,
    inputs=Group,
    outputs=Outputs,
    gradients=gradients,
    again=again,
    batch="x",
    kept=_KEPT,
    follows={"last": "state"},
)
"""Returns the kernels of a backend as a function; see `linrec.ops.core.kernel.kernel_op`."""
