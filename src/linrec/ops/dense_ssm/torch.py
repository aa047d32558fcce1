"""The model as a loop over its states, and as a convolution.

Arguments and results as in `reference.py`; the convolution also takes None for a state of zeros.
"""

import torch
from torch import Tensor
from torch.nn import functional

from linrec.ops.core import stationary
from linrec.ops.core.isolation import entering
from linrec.ops.dispatch import exporting
from linrec.ops.long_conv import long_conv


def recurrence(
    u: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor, reset: Tensor | None
) -> tuple[Tensor, Tensor]:
    """States one after the other, then all outputs at once."""
    states = []
    # unbound once: the gradient of an index in a loop would be a tensor of all steps, for every step
    starts = [None] * u.shape[1] if reset is None else list(reset[:, :, None, None].unbind(1))
    for Bu, start in zip((B * u[..., None]).unbind(1), starts, strict=True):
        if start is not None:
            state = state.masked_fill(start, 0)
        state = _applied(A, state) + Bu
        states.append(state)
    return _applied(C, torch.stack(states, 1).movedim(1, 2)).movedim(2, 1), state


def convolution(
    u: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor | None, reset: Tensor | None, backend: str
) -> tuple[Tensor, Tensor]:
    """y = K * u + the response of the initial state; the last state is a sum over all steps."""
    if exporting():
        return any_length(u, A, B, C, state, reset)
    _, time, channels = u.shape
    # A^l = (A^c)^i A^j with l = c i + j: about sqrt(t) of each, c and their number powers of two
    near_bits = (time - 1).bit_length() // 2
    far_bits = (time - 1).bit_length() - near_bits
    squares = _squares(A, near_bits + far_bits + 1)
    # A^j B, (d, c, n), and C A^(c i), (d, f, m, n)
    near = _krylov(squares[:near_bits], B.to(squares[0])[None])[0].to(u)
    far = _krylov([square.mT for square in squares[near_bits:-1]], C.to(squares[0])[None])[0].to(u)
    squares = [square.to(u) for square in squares]

    kernel = torch.einsum("dfmn,dcn->dmfc", far, near).flatten(-2)[..., :time]
    outputs = kernel.shape[1]
    kernel = kernel.expand(channels, -1, -1).flatten(0, 1)
    y, _ = long_conv(
        u.repeat_interleave(outputs, -1), kernel, reset=reset, mode="convolution", backend=backend
    )
    y = y.unflatten(-1, (channels, outputs))

    inputs = u
    if reset is not None:
        # those from the last reset on
        later = reset.flip(1).cumsum(1).flip(1) - reset.long()
        inputs = inputs.masked_fill(later[..., None] > 0, 0)
    last = _last_state(inputs, near, squares[near_bits:-1])
    if state is None:
        return y, last
    state = entering(state, reset)
    # C A^(t+1) x, and A^t x after t steps
    after = _krylov(squares[:near_bits], _applied(A, state))
    response = torch.einsum("dfmn,bdcn->bfcdm", far.expand(channels, -1, -1, -1), after)
    response = response.flatten(1, 2)[:, :time]
    through = state
    for bit, square in enumerate(squares):
        if time >> bit & 1:
            through = _applied(square, through)
    if reset is not None:
        response = response.masked_fill(reset.cumsum(1)[..., None, None] > 0, 0)
        through = through.masked_fill(reset.any(1)[:, None, None], 0)
    return y + response, last + through


def any_length(
    u: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor | None, reset: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`convolution` for torch.export, where the number of steps is open; matrices in any precision."""
    squares = _squares(A, stationary.BLOCK.bit_length())
    B, C = B.to(squares[0]), C.to(squares[0])
    columns = _krylov(squares[:-1], B[None])[0]
    rows = _krylov([square.mT for square in squares[:-1]], (C @ squares[0])[None])[0]
    taps = torch.einsum("dmn,dln->dml", C, columns)
    made = (x.to(u) for x in (columns.mT, rows.transpose(1, 2), taps))
    tables = stationary.Tables([square.to(u) for square in squares], *made)
    return stationary.stationary(u, tables, state, reset)


def _squares(A: Tensor, count: int) -> list[Tensor]:
    """A, A^2, A^4, .., in double precision, so that a high power has the error of rounding alone."""
    squares = [A if A.device.type == "mps" else A.double()]
    for _ in range(count - 1):
        squares.append(squares[-1] @ squares[-1])
    return squares


def _krylov(squares: list[Tensor], x: Tensor) -> Tensor:
    """x, A x, .., A^(2^k - 1) x, (b, d, 2^k, .., n), of x (b, d, .., n), from A, A^2, .., A^(2^(k - 1))."""
    table = x[:, :, None]
    for square in squares:
        table = torch.cat([table, _applied(square, table)], 2)
    return table


def _last_state(u: Tensor, near: Tensor, squares: list[Tensor]) -> Tensor:
    """sum_s A^(t-1-s) B u_s, from A^j B for j < c, and A^c, A^(2 c), .."""
    # stretches of c steps each, the first filled up with zeros from the left
    c, stretches = near.shape[-2], 1 << len(squares)
    blocks = functional.pad(u.mT, (c * stretches - u.shape[1], 0)).unflatten(-1, (stretches, c))
    sums = torch.einsum("bdfc,dcn->bdfn", blocks, near.flip(-2).expand(u.shape[-1], -1, -1))
    # then neighbours together, until one is left
    for square in squares:
        sums = _applied(square, sums[:, :, 0::2]) + sums[:, :, 1::2]
    return sums.squeeze(2)


def _applied(matrix: Tensor, x: Tensor) -> Tensor:
    """Matrices (d, m, n) or (1, m, n) times vectors x (b, d, .., n)."""
    if len(matrix) == 1:
        return x @ matrix[0].mT
    return torch.einsum("dmn,bd...n->bd...m", matrix, x)
