"""Checks of what `selective_scan` takes."""

import torch
from torch import Tensor

from linrec.ops.precision import accumulation
from linrec.ops.stability import check_rates, check_steps

_SUPPORTED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    state: Tensor | None,
    reset: Tensor | None,
) -> None:
    """Raise unless the arguments of `selective_scan` fit together."""
    if x.dtype not in _SUPPORTED:
        raise TypeError(
            f"`x` of `selective_scan` must be float16, bfloat16, float32 or float64; got {_name(x.dtype)}. "
            "Cast it, for example with `.float()`."
        )
    if x.ndim != 3:
        raise ValueError(
            f"`x` must have shape (b, t, c); got {tuple(x.shape)}. "
            "Add the missing axes, or flatten heads into channels."
        )
    batch, time, channels = x.shape
    if dt.shape != x.shape:
        raise ValueError(
            f"`dt` must have the shape of `x`, (b, t, c) = {tuple(x.shape)}; got {tuple(dt.shape)}. "
            "Pass one step size per step and channel; `expand` what channels share."
        )
    if A.ndim != 2 or len(A) != channels or A.shape[1] == 0:
        raise ValueError(
            f"`A` must have shape (c, n) = ({channels}, n), n at least 1; got {tuple(A.shape)}. "
            "Pass one number per channel and state."
        )
    for name, tensor in (("B", B), ("C", C)):
        _check_shared(name, tensor, x, A.shape[1])
    if _groups(B) != _groups(C):
        raise ValueError(
            f"`B` and `C` must have the same groups; got {_groups(B)} and {_groups(C)}. `expand` one of them."
        )
    if D is not None and D.shape != (channels,):
        raise ValueError(f"`D` must have shape (c,) = ({channels},); got {tuple(D.shape)}.")
    shape = (batch, channels, A.shape[1])
    if state is not None and state.shape != shape:
        raise ValueError(
            f"`state` must have shape (b, c, n) = {shape}; got {tuple(state.shape)}. "
            "Pass the state that the previous call returned, or None for zeros."
        )
    if reset is not None and reset.shape != (batch, time):
        raise ValueError(f"`reset` must have shape (b, t) = {(batch, time)}; got {tuple(reset.shape)}.")
    given = {"dt": dt, "A": A, "B": B, "C": C, "D": D, "state": state, "reset": reset}
    _check_dtypes(x, given)
    for name, other in given.items():
        if other is not None and other.device != x.device:
            raise ValueError(
                f"`{name}` must be on x's device {str(x.device)!r}; got {str(other.device)!r}. "
                f"Move it with .to({str(x.device)!r})."
            )
    check_rates("A", A)
    check_steps("dt", dt)


def _check_shared(name: str, tensor: Tensor, x: Tensor, n: int) -> None:
    """Raise unless B or C is (b, t, n), or (b, t, g, n) with groups that divide the channels."""
    batch, time, channels = x.shape
    fits = tensor.ndim in (3, 4) and tensor.shape[:2] == (batch, time) and tensor.shape[-1] == n
    if not fits:
        raise ValueError(
            f"`{name}` must have shape (b, t, n) or (b, t, groups, n) with (b, t, n) = {(batch, time, n)}; "
            f"got {tuple(tensor.shape)}."
        )
    groups = _groups(tensor)
    if groups == 0 or channels % groups:
        raise ValueError(
            f"`{name}` must have a number of groups that divides the channels, {channels}; got {groups}."
        )


def _groups(tensor: Tensor) -> int:
    return 1 if tensor.ndim == 3 else tensor.shape[2]


def _check_dtypes(x: Tensor, given: dict[str, Tensor | None]) -> None:
    wide = accumulation(x.dtype)
    allowed = _name(wide) if x.dtype == wide else f"{_name(x.dtype)} (as `x`) or {_name(wide)}"
    for name, tensor in given.items():
        if tensor is None:
            continue
        if name == "reset":
            if tensor.dtype != torch.bool:
                raise TypeError(f"`reset` must be bool; got {_name(tensor.dtype)}. Pass `reset != 0`.")
        elif name == "state":
            if tensor.dtype not in _SUPPORTED:
                raise TypeError(f"`state` must be {_name(wide)}; got {_name(tensor.dtype)}. Cast it.")
        elif tensor.dtype not in (x.dtype, wide):
            raise TypeError(f"`{name}` must be {allowed}; got {_name(tensor.dtype)}. Cast it.")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
