"""The model as a loop over its states, and as a convolution."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from linrec.ops.core.ambient import exporting
from linrec.ops.core.precision import in_double, wide
from linrec.ops.core.stationary import BLOCK, Tables, Values, convolved, states, stationary
from linrec.ops.long_conv import long_conv


class DenseSSM(NamedTuple):
    """Canonical inputs: each matrix per channel, or with an axis of size 1 for all channels.

    Attributes:
        u: (b, t, d).
        A: (d, n, n) or (1, n, n).
        B: (d, n), or (1, n) if A is (1, n, n).
        C: (d, m, n), or (1, m, n) if A is (1, n, n); None is the identity.
        state: (b, d, n), or None for zeros.
        reset: (b, t) bool, or None.
    """

    u: Tensor
    A: Tensor
    B: Tensor
    C: Tensor | None
    state: Tensor | None
    reset: Tensor | None


def recurrence(given: DenseSSM) -> Values:
    """Compute the states step by step, then all outputs at once."""
    u, A, B, C, state, reset = given
    x, last = states(B * u[..., None], state, reset, lambda x: _applied(A, x))
    return x if C is None else _applied(C, x.movedim(1, 2)).movedim(2, 1), last


def convolution(given: DenseSSM, backend: str) -> Values:
    """Compute y = K * u + the response of the initial state; the last state is a sum over all steps."""
    if exporting():
        return any_length(given)
    u, A, B, C, _, reset = given
    u, C = wide(u), _identity(A) if C is None else C
    _, time, channels = u.shape
    # A^l = (A^c)^i A^j with l = c i + j: about sqrt(t) powers each; c and the number of i are powers of two
    near_bits = (time - 1).bit_length() // 2
    far_bits = (time - 1).bit_length() - near_bits
    squares = _squares(A, near_bits + far_bits + 1)
    # A^j B, (d, c, n), and C A^(c i), (d, f, m, n)
    near = _krylov(squares[:near_bits], B.to(squares[0])[None])[0].to(u)
    far = _krylov([square.mT for square in squares[near_bits:-1]], C.to(squares[0])[None])[0].to(u)
    squares = [square.to(u) for square in squares]

    kernel = torch.einsum("dfmn,dcn->dmfc", far, near).flatten(-2)[..., :time]
    outputs = kernel.shape[1]
    kernel, repeated = kernel.expand(channels, -1, -1).flatten(0, 1), u.repeat_interleave(outputs, -1)
    y, _ = long_conv(repeated, kernel, reset=reset, mode="convolution", backend=backend)

    def response(x: Tensor) -> Values:
        # C A^(t+1) x for all steps, and A^t x after the last step
        after = _krylov(squares[:near_bits], _applied(A, x))
        made = torch.einsum("dfmn,bdcn->bfcdm", far.expand(channels, -1, -1, -1), after).flatten(1, 2)
        for bit, square in enumerate(squares):
            if time >> bit & 1:
                x = _applied(square, x)
        return made[:, :time], x

    def last(u: Tensor) -> Tensor:
        return _last_state(u, near, squares[near_bits:-1])

    return convolved(y.unflatten(-1, (channels, outputs)), given, last, response)


def any_length(given: DenseSSM) -> Values:
    """Compute `convolution` for torch.export, for any number of steps; matrices in any precision."""
    u, A, B, C, _, _ = given
    u, C = wide(u), _identity(A) if C is None else C
    squares = _squares(A, BLOCK.bit_length())
    B, C = B.to(squares[0]), C.to(squares[0])
    columns = _krylov(squares[:-1], B[None])[0]
    rows = _krylov([square.mT for square in squares[:-1]], (C @ squares[0])[None])[0]
    taps = torch.einsum("dmn,dln->dml", C, columns)
    made = (x.to(u) for x in (columns.mT, rows.transpose(1, 2), taps))
    return stationary(given, Tables([square.to(u) for square in squares], *made))


def _identity(A: Tensor) -> Tensor:
    return torch.eye(A.shape[-1], dtype=A.dtype, device=A.device).expand_as(A)


def _squares(A: Tensor, count: int) -> list[Tensor]:
    """Return A, A^2, A^4, .., in double precision, so that high powers have only their own rounding error."""
    squares = [in_double(A)]
    for _ in range(count - 1):
        squares.append(squares[-1] @ squares[-1])
    return squares


def _krylov(squares: list[Tensor], x: Tensor) -> Tensor:
    """Return A^j x, j < 2^k, (b, d, 2^k, .., n), from x (b, d, .., n) and A, A^2, .., A^(2^(k - 1))."""
    table = x[:, :, None]
    for square in squares:
        table = torch.cat([table, _applied(square, table)], 2)
    return table


def _last_state(u: Tensor, near: Tensor, squares: list[Tensor]) -> Tensor:
    """Return sum_s A^(t-1-s) B u_s, from A^j B for j < c, and A^c, A^(2 c), .."""
    # blocks of c steps each, zero-padded at the start of the first
    c, stretches = near.shape[-2], 1 << len(squares)
    blocks = functional.pad(u.mT, (c * stretches - u.shape[1], 0)).unflatten(-1, (stretches, c))
    sums = torch.einsum("bdfc,dcn->bdfn", blocks, near.flip(-2).expand(u.shape[-1], -1, -1))
    # join neighbouring blocks until a single block is left
    for square in squares:
        sums = _applied(square, sums[:, :, 0::2]) + sums[:, :, 1::2]
    return sums.squeeze(2)


def _applied(matrix: Tensor, x: Tensor) -> Tensor:
    """Multiply vectors x (b, d, .., n) by matrices (d, m, n) or (1, m, n)."""
    if len(matrix) == 1:
        return x @ matrix[0].mT
    return torch.einsum("dmn,bd...n->bd...m", matrix, x)
