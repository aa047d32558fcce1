"""Checks of what `dplr_ssm` takes."""

from torch import Tensor, complex64, promote_types

from linrec.ops.long_conv.inputs import check_factor, check_sequence, check_state
from linrec.ops.precision import accumulation


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
    channels = u.shape[-1]
    if a.ndim != 2 or len(a) != channels or a.shape[1] == 0:
        raise ValueError(
            f"`a` must have shape (d, n) = ({channels}, n), n at least 1; got {tuple(a.shape)}. "
            "Pass n transitions for each channel of `u`."
        )
    shape = (channels, a.shape[1])
    if p.ndim != 3 or p.shape[:2] != shape or p.shape[2] == 0:
        raise ValueError(
            f"`p` must have shape (d, n, r) = ({channels}, {a.shape[1]}, r), r at least 1; got "
            f"{tuple(p.shape)}. Pass the rank's factors as columns; of rank 0, `diagonal_ssm` has less to do."
        )
    for name, tensor, expected in (("q", q, tuple(p.shape)), ("b", b, shape), ("c", c, shape)):
        if tensor.shape != expected:
            raise ValueError(f"`{name}` must have shape {expected}; got {tuple(tensor.shape)}.")
    wide = promote_types(accumulation(u.dtype), complex64)
    for name, tensor in (("a", a), ("p", p), ("q", q), ("b", b), ("c", c)):
        check_factor(name, tensor, u, (wide,))
    check_state(state, u, shape, (wide,))
