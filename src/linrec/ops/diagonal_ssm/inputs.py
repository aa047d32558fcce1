"""Checks of what `diagonal_ssm` takes."""

from torch import Tensor, complex64, promote_types

from linrec.ops.long_conv.inputs import check_factor, check_sequence, check_state, name_of
from linrec.ops.precision import accumulation


def check(u: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor | None, reset: Tensor | None) -> None:
    """Raise where shapes, dtypes or devices of the arguments do not fit together."""
    check_sequence(u, reset)
    channels = u.shape[-1]
    if a.ndim != 2 or len(a) not in (1, channels) or a.shape[1] == 0:
        raise ValueError(
            f"`a` must have shape (d, n) = ({channels}, n) or (1, n), n at least 1; got {tuple(a.shape)}. "
            "Pass n transitions for each channel of `u`, or for all of them."
        )
    if b.shape != a.shape:
        raise ValueError(f"`b` must have the shape of `a`, {tuple(a.shape)}; got {tuple(b.shape)}.")
    shape = (channels, a.shape[1])
    if c.shape != shape:
        raise ValueError(f"`c` must have shape (d, n) = {shape}; got {tuple(c.shape)}.")
    wide = accumulation(u.dtype)
    dtypes = (wide, promote_types(wide, complex64))
    for name, tensor in (("a", a), ("b", b), ("c", c)):
        check_factor(name, tensor, u, dtypes)
    check_state(state, u, shape, dtypes)
    if state is not None and state.is_complex() and not (a.is_complex() or b.is_complex()):
        raise TypeError(
            f"`state` must be real where `a` and `b` are; got {name_of(state.dtype)}. Pass its real part."
        )
