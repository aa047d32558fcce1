"""Checks of what `dense_ssm` takes, and its canonical form."""

import torch
from torch import Tensor

from linrec.ops.long_conv.inputs import check_factor, check_sequence, check_state
from linrec.ops.precision import accumulation


def check(
    u: Tensor, A: Tensor, B: Tensor, C: Tensor | None, state: Tensor | None, reset: Tensor | None
) -> None:
    """Raise where shapes, dtypes or devices of the arguments do not fit together."""
    check_sequence(u, reset)
    channels = u.shape[-1]
    n = A.shape[-1] if A.ndim else 0
    _check_matrix("A", A, u, (n, n))
    _check_matrix("B", B, u, (n,))
    if C is not None:
        _check_matrix("C", C, u, (C.shape[-2] if C.ndim > 1 else 1, n))
    check_state(state, u, (channels, n), (accumulation(u.dtype),))


def canonical(A: Tensor, B: Tensor, C: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return A, B and C with an axis for channels, of size 1 where they are the same for all."""
    if C is None:
        C = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    A, B, C = (x if x.ndim == axes else x[None] for x, axes in ((A, 3), (B, 2), (C, 3)))
    # the powers of A that they are multiplied by differ from channel to channel
    if len(A) > 1:
        B, C = B.expand(len(A), -1), C.expand(len(A), -1, -1)
    return A, B, C


def _check_matrix(name: str, matrix: Tensor, u: Tensor, shape: tuple[int, ...]) -> None:
    channels = u.shape[-1]
    if tuple(matrix.shape) not in (shape, (channels, *shape)):
        raise ValueError(
            f"`{name}` must have shape {shape}, or {(channels, *shape)} with one for each channel of `u`; "
            f"got {tuple(matrix.shape)}."
        )
    check_factor(name, matrix, u, (accumulation(u.dtype),))
