"""The model as a loop over its states, and as a convolution.

The low-rank feedback s_t = Re(q^T x_{t-1}) is a signal: given u and s, the model is diagonal. Let k_xy be the
taps Re(x a^l y) of diagonal models, and z a delay by a step. Then

    s = (1 + z k_qp)^-1 z k_qb * u    y = k_cb * u - k_cp * s

This is Woodbury's identity for power series in z, truncated to the length of the sequence, so no power of the
whole matrix is needed for the outputs. States are computed only between blocks of about sqrt(t) steps. They
use a single such power of the matrix, which comes from the same identity with fewer terms.

The coefficients of the series are small matrices. A series is the impulse response of a causal filter: a
product of series is a composition of filters, and 1 / (1 + z f) is delayed feedback through f. Series have
the shape (r, s, d, t): r x s matrices for each of d channels and t powers of z.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from linrec.ops.core.ambient import exporting
from linrec.ops.core.kernel import Differentiable
from linrec.ops.core.precision import in_double, wide
from linrec.ops.core.stationary import Values, convolved, states
from linrec.ops.dense_ssm.torch import DenseSSM, any_length
from linrec.ops.long_conv import long_conv
from linrec.ops.long_conv.cauchy import turning
from linrec.ops.long_conv.powers import powers, sums_of_powers
from linrec.ops.long_conv.torch import transform_size


class DPLRSSM(NamedTuple):
    """Canonical inputs; all factors are complex.

    Attributes:
        u: (b, t, d).
        a: (d, n).
        p: (d, n, r).
        q: (d, n, r).
        b: (d, n).
        c: (d, n).
        state: (b, d, n), or None for zeros.
        reset: (b, t) bool, or None.
    """

    u: Tensor
    a: Tensor
    p: Tensor
    q: Tensor
    b: Tensor
    c: Tensor
    state: Tensor | None
    reset: Tensor | None


def recurrence(given: DPLRSSM) -> Values:
    """Compute the states step by step, then all outputs at once."""
    u, a, p, q, b, c, state, reset = given
    x, last = states(b * u[..., None], state, reset, lambda x: _step(x, a, p, q))
    return (c * x).sum(-1).real, last


def convolution(given: DPLRSSM, backend: str) -> Values:
    """Compute y = K * u + the response of the initial state; states are computed between blocks of time."""
    u, a, p, q, b, c, state, reset = given
    inputs, time = wide(u), u.shape[1]
    if exporting():
        before = None if state is None else _real(state)
        y, x = any_length(DenseSSM(inputs, *_real_form(a, p, q, b, c), before, reset))
        return y[..., 0], torch.complex(*x.chunk(2, -1))
    # taps are small differences of large numbers, which would cancel in single precision
    a, p, q, b, c = map(in_double, (a, p, q, b, c))
    # input and output vectors as rows (1 + r, d, n)
    into, out = (torch.cat([x[None], y.movedim(-1, 0)]) for x, y in ((b, p), (c, q)))
    tables = powers(a, time)
    taps = sums_of_powers(tables, out[:, None] * into)
    back = fed_back(taps[1:, 1:])
    of_u, of_s = times(back, taps[1:, :1]), taps[:1, 1:]
    kernel = (taps[:1, :1] - delayed(times(of_s, of_u))).flatten(0, 2).to(inputs)
    y, _ = long_conv(u, kernel, reset=reset, mode="convolution", backend=backend)

    stretch, size = _stretch(tables.near, into, out, back, of_u, of_s), tables.near.shape[-1]
    through = _power(a, stretch, size).to(inputs)

    def last(u: Tensor) -> Tensor:
        # zero-padded at the start of the first block
        blocks = functional.pad(u.mT, (-time % size, 0)).unflatten(-1, (-1, size))
        first, *parts = torch.einsum("bdfl,dnl->fdbn", blocks, stretch.inputs.flip(-1).to(u))
        x = first
        for part in parts:
            x = torch.baddbmm(part, x, through)
        return _complex(x)

    def response(state: Tensor) -> Values:
        # a single step, then whole blocks
        starts = [_real(_step(state.to(a), a, p, q).to(state)).transpose(0, 1)]
        whole, rest = divmod(time - 1, size)
        for _ in range(whole):
            starts.append(starts[-1] @ through)
        outputs = torch.einsum("fdbn,dnl->bfld", torch.stack(starts), stretch.outputs.to(inputs))
        x = starts[-1] if rest == 0 else starts[-1] @ _power(a, stretch, rest).to(inputs)
        return outputs.flatten(1, 2)[:, :time], _complex(x)

    return convolved(y, given, last, response)


def _real_form(a: Tensor, p: Tensor, q: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return A (d, 2 n, 2 n), B (d, 2 n) and C (d, 1, 2 n) of the model, with states as (real, imaginary)."""
    taken = _real(p, -2) @ _conjugate(q, -2).mT
    return turning(a) - taken, _real(b), _conjugate(c)[:, None]


class _Stretch(NamedTuple):
    """A^l B, C A^l, q^T A^l and p a^l for the steps l of a block, with real states, (.., d, 2 n, l)."""

    inputs: Tensor
    outputs: Tensor
    taken: Tensor
    given: Tensor
    diagonal: Tensor


def _stretch(near: Tensor, into: Tensor, out: Tensor, back: Tensor, of_u: Tensor, of_s: Tensor) -> _Stretch:
    size = near.shape[-1]
    back, of_u, of_s = (matrices(series, size) for series in (back, of_u, of_s))
    columns, rows = _real(into[..., None] * near, -2), _conjugate(out[..., None] * near, -2)
    taken = torch.einsum("sdnl,rsdlm->rdnm", rows[1:], back)
    outputs = rows[0] - delayed(torch.einsum("sdnl,rsdlm->rdnm", taken, of_s))[0]
    inputs = columns[0] - delayed(torch.einsum("sdnl,srdlm->rdnm", columns[1:], of_u))[0]
    return _Stretch(inputs, outputs, taken, columns[1:], near)


def _power(a: Tensor, stretch: _Stretch, steps: int) -> Tensor:
    """Return A^steps transposed, (d, 2 n, 2 n), for 1 up to the number of steps in a block."""
    diagonal = turning(a * stretch.diagonal[..., steps - 1]).mT
    given = stretch.given[..., :steps].flip(-1)
    return diagonal - torch.einsum("rdml,rdnl->dmn", stretch.taken[..., :steps], given)


def _step(x: Tensor, a: Tensor, p: Tensor, q: Tensor) -> Tensor:
    taken = (q * x[..., None]).sum(-2, keepdim=True).real
    return a * x - (p * taken).sum(-1)


def _real(x: Tensor, dim: int = -1) -> Tensor:
    return torch.cat([x.real, x.imag], dim)


def _conjugate(x: Tensor, dim: int = -1) -> Tensor:
    return torch.cat([x.real, -x.imag], dim)


def _complex(x: Tensor) -> Tensor:
    """Return complex states (b, d, n) from real states (d, b, 2 n)."""
    return torch.complex(*x.transpose(0, 1).chunk(2, -1))


def delayed(series: Tensor) -> Tensor:
    """Return z f, with as many terms as f."""
    return functional.pad(series, (1, 0))[..., :-1]


def times(f: Tensor, g: Tensor) -> Tensor:
    """Return f g for f (r, s, d, t) and g (s, k, d, t)."""
    length = f.shape[-1]
    size = transform_size(2 * length - 1)
    return torch.fft.irfft(_product(torch.fft.rfft(f, size), torch.fft.rfft(g, size)), size)[..., :length]


def matrices(f: Tensor, length: int) -> Tensor:
    """Return matrices M with g M = f g for rows g of `length` terms: (.., t) to (.., length, length)."""
    return functional.pad(f[..., :length], (length - 1, 0)).unfold(-1, length, 1).flip(-2)


class Series(NamedTuple):
    """A series f (r, r, d, t)."""

    f: Tensor


class Inverse(NamedTuple):
    """The inverse v = (1 + z f)^-1, in the shape of f."""

    v: Tensor


def fed_back(f: Tensor) -> Tensor:
    """Return (1 + z f)^-1 for f (r, r, d, t), by Newton's iteration on the leading terms."""
    return _fed_back(Series(f)).v


def _inverse(given: Series, keep: bool) -> Inverse:
    """Double the number of correct terms in each iteration: v <- v - v ((1 + z f) v - 1)."""
    f = given.f
    time = f.shape[-1]
    identity = torch.eye(len(f), dtype=f.dtype, device=f.device)[..., None, None]
    h = torch.cat([identity.expand_as(f[..., :1]), f[..., : time - 1]], -1)
    lengths = [time]
    while lengths[-1] > 1:
        lengths.append((lengths[-1] + 1) // 2)
    v = h[..., :1]
    for length in reversed(lengths[:-1]):
        known = v.shape[-1]
        # circular wrap-around only affects the leading terms, which are already known
        size = transform_size(length)
        spectrum = torch.fft.rfft(v, size)
        error = torch.fft.irfft(_product(torch.fft.rfft(h[..., :length], size), spectrum), size)
        error = functional.pad(error[..., known:length], (known, 0))
        change = torch.fft.irfft(_product(spectrum, torch.fft.rfft(error, size)), size)
        v = torch.cat([v, -change[..., known:length]], -1)
    return Inverse(v)


def _adjoint(given: Series, kept: Inverse, d: Inverse, needs: Sequence[bool]) -> tuple[Tensor]:
    """Return df from dv = -v z df v, by products with time reversed."""
    v = kept.v.transpose(0, 1)
    dh = -times(times(v, d.v.flip(-1)), v).flip(-1)
    return (functional.pad(dh[..., 1:], (0, 1)),)


_fed_back = Differentiable(Series, Inverse, _inverse, _adjoint, saves=("v",))


def _product(f: Tensor, g: Tensor) -> Tensor:
    # an explicit sum, because matmul is slow for matrices with one or two rows
    return (f[:, :, None] * g[None]).sum(1)
