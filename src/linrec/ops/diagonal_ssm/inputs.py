"""Checks of what `diagonal_ssm` takes."""

from torch import Tensor, complex64, promote_types

from linrec.ops.long_conv.inputs import SUPPORTED, check_device, check_sequence, name_of
from linrec.ops.precision import accumulation, real_dtype


def check(u: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor | None, reset: Tensor | None) -> None:
    """Raise where shapes, dtypes or devices of the arguments do not fit together."""
    check_sequence(u, reset)
    batch, _, channels = u.shape
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
    for name, tensor in (("a", a), ("b", b), ("c", c)):
        if tensor.dtype not in (wide, promote_types(wide, complex64)):
            raise TypeError(
                f"`{name}` must be {name_of(wide)}, or complex of that precision, beside `u` in "
                f"{name_of(u.dtype)}; got {name_of(tensor.dtype)}. Cast it."
            )
        check_device(name, tensor, u)
    if state is None:
        return
    if state.shape != (batch, *shape):
        raise ValueError(
            f"`state` must have shape (b, d, n) = {(batch, *shape)}; got {tuple(state.shape)}. "
            "Pass the state that the previous call returned, or None for zeros."
        )
    if not (state.is_floating_point() or state.is_complex()) or real_dtype(state.dtype) not in SUPPORTED:
        raise TypeError(f"`state` must be {name_of(wide)} or complex; got {name_of(state.dtype)}. Cast it.")
    if state.is_complex() and not (a.is_complex() or b.is_complex()):
        raise TypeError(
            f"`state` must be real where `a` and `b` are; got {name_of(state.dtype)}. Pass its real part."
        )
    check_device("state", state, u)
