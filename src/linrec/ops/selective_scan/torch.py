"""The recurrence in torch operations, a chunk of steps at a time.

Within a chunk every entry of the state is a channel of the blocked scan of `linrec.ops.scan.torch`, which
needs the states of its steps; no more than those of one chunk are there at a time. The state before each
chunk is kept, from which the adjoint makes the others again. Here states are (n, c), as the kernels have
them.
"""

import torch
from torch import Tensor

from linrec.ops.dispatch import exporting
from linrec.ops.precision import widened
from linrec.ops.scan import torch as scan

CHUNK = 64

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def forward(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    state: Tensor,
    cut: Tensor | None,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the recurrence.

    Args:
        x: (b, t, c), at least one step.
        dt: (b, t, c).
        A: (1 or b, n, c), in the accumulation dtype.
        B: (b, t, n).
        C: (b, t, n).
        D: (1 or b, c), in the accumulation dtype.
        state: h_0 (b, n, c), in the accumulation dtype.
        cut: None, or (b, t), true where nothing comes from the step before.
        keep: whether the states before the chunks are wanted.

    Returns:
        y (b, t, c) in the dtype of x, the last state, and the states before the chunks
        (b, chunks, n, c), of which there are none without `keep`.
    """
    if exporting():
        # of any number of steps: the states of all of them at once
        x_, dt_, B_, C_ = widened(x, dt, B, C)
        h = _states(x_, dt_, A, B_, state, cut)[1]
        y = torch.einsum("btnc,btn->btc", h, C_) + D[:, None] * x_
        return y.to(x.dtype), h[:, -1].clone(), state.new_empty(state.shape[0], 0, *state.shape[1:])
    outputs, starts = [], []
    for begin in range(0, x.shape[1], CHUNK):
        if keep:
            starts.append(state)
        x_, dt_, B_, C_ = _chunk(begin, x, dt, B, C)
        h = _states(x_, dt_, A, B_, state, _cut(begin, cut))[1]
        state = h[:, -1].clone()
        outputs.append(torch.einsum("btnc,btn->btc", h, C_) + D[:, None] * x_)
    y = torch.cat(outputs, dim=1)
    kept = torch.stack(starts, dim=1) if keep else state.new_empty(state.shape[0], 0, *state.shape[1:])
    return y if y.dtype == x.dtype else y.to(x.dtype), state, kept


def backward(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    state: Tensor,
    cut: Tensor | None,
    starts: Tensor,
    dy: Tensor,
    dlast: Tensor,
) -> Gradients:
    """Return the gradients of all inputs but `cut`, in the accumulation dtype.

    With g_t = C_t dy_t + a_{t+1} g_{t+1} and w_t = a_t h_{t-1}: dC = sum_c dy h, dB = sum_c g dt x,
    dx = dt sum_n g B + D dy, ddt = x sum_n g B + sum_n g A w, dA = sum_t g dt w.
    """
    pieces: list[tuple[Tensor, ...]] = []
    dA = torch.zeros_like(starts[:, 0])
    dD = torch.zeros_like(dA[:, 0])
    carry = dlast
    for begin in reversed(range(0, x.shape[1], CHUNK)):
        x_, dt_, B_, C_, dy_ = _chunk(begin, x, dt, B, C, dy)
        before, cut_ = starts[:, begin // CHUNK], _cut(begin, cut)
        a, h = _states(x_, dt_, A, B_, before, cut_)
        seen = dy_[:, :, None] * C_[..., None]
        given = scan.Scan(a.flatten(2), h, before.flatten(1), cut_, False)
        d = scan.Values(seen.flatten(2), carry.flatten(1))
        da, g, carry, *_ = scan.adjoint(given, scan.Values(h.flatten(2), carry), d, (True,))
        carry, g, gw = carry.view_as(before), g.view_as(h), da.view_as(h) * a
        gB = torch.einsum("btnc,btn->btc", g, B_)
        ddt = x_ * gB + torch.sum(gw * A[:, None], dim=2)
        dB = torch.einsum("btnc,btc->btn", g, dt_ * x_)
        dC = torch.einsum("btnc,btc->btn", h, dy_)
        pieces.append((dt_ * gB + D[:, None] * dy_, ddt, dB, dC))
        dA = dA + torch.einsum("btnc,btc->bnc", gw, dt_)
        dD = dD + torch.sum(dy_ * x_, dim=1)
    dx, ddt, dB, dC = (torch.cat(steps[::-1], dim=1) for steps in zip(*pieces, strict=True))
    return dx, ddt, dA.sum_to_size(A.shape), dB, dC, dD.sum_to_size(D.shape), carry


def _chunk(begin: int, *tensors: Tensor) -> list[Tensor]:
    return widened(*(tensor[:, begin : begin + CHUNK] for tensor in tensors))


def _cut(begin: int, cut: Tensor | None) -> Tensor | None:
    return None if cut is None else cut[:, begin : begin + CHUNK]


def _states(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, state: Tensor, cut: Tensor | None
) -> tuple[Tensor, Tensor]:
    """a_t = exp(dt_t A) and h_t for the steps of a chunk, (b, t, n, c)."""
    a = torch.exp(dt[:, :, None] * A[:, None])
    added = B[..., None] * (dt * x)[:, :, None]
    h, _ = scan.forward(scan.Scan(a.flatten(2), added.flatten(2), state.flatten(1), cut, False), True)
    return a, h.view_as(added)
