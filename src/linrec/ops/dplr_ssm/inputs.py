"""Checks of what `dplr_ssm` takes."""

from torch import Tensor, complex64, promote_types

from linrec.ops.long_conv.inputs import SUPPORTED, check_device, check_sequence, name_of
from linrec.ops.precision import accumulation, real_dtype


def check(
    u: Tensor,
    a: Tensor,
    p: Tensor,
    q: Tensor,
    b: Tensor,
    c: Tensor,
    state: Tensor | None,
    reset: Tensor | None,
) -> None:
    """Raise where shapes, dtypes or devices of the arguments do not fit together."""
    check_sequence(u, reset)
    batch, _, channels = u.shape
    if a.ndim != 2 or len(a) != channels or a.shape[1] == 0:
        raise ValueError(
            f"`a` must have shape (d, n) = ({channels}, n), n at least 1; got {tuple(a.shape)}. "
            "Pass n transitions for each channel of `u`."
        )
    shape = tuple(a.shape)
    if p.ndim != 3 or p.shape[:2] != shape or p.shape[2] == 0:
        raise ValueError(
            f"`p` must have shape (d, n, r) = ({channels}, {shape[1]}, r), r at least 1; got "
            f"{tuple(p.shape)}. Pass the rank's factors as columns; of rank 0, `diagonal_ssm` has less to do."
        )
    for name, tensor, expected in (("q", q, tuple(p.shape)), ("b", b, shape), ("c", c, shape)):
        if tensor.shape != expected:
            raise ValueError(f"`{name}` must have shape {expected}; got {tuple(tensor.shape)}.")
    wide = promote_types(accumulation(u.dtype), complex64)
    for name, tensor in (("a", a), ("p", p), ("q", q), ("b", b), ("c", c)):
        if tensor.dtype != wide:
            raise TypeError(
                f"`{name}` must be {name_of(wide)} beside `u` in {name_of(u.dtype)}; "
                f"got {name_of(tensor.dtype)}. Cast it."
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
        raise TypeError(f"`state` must be {name_of(wide)}; got {name_of(state.dtype)}. Cast it.")
    check_device("state", state, u)
