"""Checks of what `long_conv` takes."""

import torch
from torch import Tensor

from linrec.ops.precision import accumulation

SUPPORTED = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
COMPLEX = (torch.complex64, torch.complex128)


def check(u: Tensor, kernel: Tensor, state: Tensor | None, reset: Tensor | None) -> None:
    """Raise where shapes, dtypes or devices of the arguments do not fit together."""
    check_sequence(u, reset)
    batch, time, channels = u.shape
    if kernel.ndim != 2 or len(kernel) != channels:
        raise ValueError(
            f"`kernel` must have shape (d, length) = ({channels}, length); got {tuple(kernel.shape)}. "
            "Pass one row of taps per channel, that of the current step first."
        )
    wide = accumulation(u.dtype)
    if kernel.dtype not in (u.dtype, wide):
        allowed = name_of(wide) if u.dtype == wide else f"{name_of(u.dtype)} (as `u`) or {name_of(wide)}"
        raise TypeError(f"`kernel` must be {allowed}; got {name_of(kernel.dtype)}. Cast it.")
    past = 0
    if state is not None:
        if state.ndim != 3 or (state.shape[0], state.shape[2]) != (batch, channels):
            raise ValueError(
                f"`state` must have shape (b, s, d) = ({batch}, s, {channels}), s steps; "
                f"got {tuple(state.shape)}. Pass the state that the previous call returned, or None."
            )
        if state.dtype not in SUPPORTED:
            raise TypeError(f"`state` must be {name_of(u.dtype)}; got {name_of(state.dtype)}. Cast it.")
        past = state.shape[1]
    if kernel.shape[1] > past + time:
        raise ValueError(
            f"`kernel` must have at most as many taps as there are inputs, s + t = {past} + {time}; "
            f"got {kernel.shape[1]}. Cut it to `kernel[:, :{past + time}]`: no input reaches further taps."
        )
    for name, tensor in (("kernel", kernel), ("state", state)):
        if tensor is not None:
            check_device(name, tensor, u)


def check_sequence(u: Tensor, reset: Tensor | None) -> None:
    """Raise unless `u` is a real (b, t, d), and `reset` flags for its steps."""
    if u.ndim != 3:
        raise ValueError(
            f"`u` must have shape (batch, time, channels); got {tuple(u.shape)}. "
            "Add the missing axes, or flatten heads into channels."
        )
    if u.dtype not in SUPPORTED:
        raise TypeError(
            f"`u` must be one of {', '.join(map(name_of, SUPPORTED))}; got {name_of(u.dtype)}. "
            "Convert it, e.g. with .to(torch.float32)."
        )
    if reset is None:
        return
    if reset.dtype != torch.bool:
        raise TypeError(f"`reset` must be bool; got {name_of(reset.dtype)}. Pass `reset != 0`.")
    if reset.shape != u.shape[:2]:
        raise ValueError(f"`reset` must have shape (b, t) = {tuple(u.shape[:2])}; got {tuple(reset.shape)}.")
    check_device("reset", reset, u)


def check_factor(name: str, tensor: Tensor, u: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """Raise unless a factor of a state-space model is where `u` is, in one of the dtypes that fit `u`."""
    if tensor.dtype not in dtypes:
        raise TypeError(
            f"`{name}` must be {' or '.join(map(name_of, dtypes))} beside `u` in {name_of(u.dtype)}; "
            f"got {name_of(tensor.dtype)}. Cast it."
        )
    check_device(name, tensor, u)


def check_state(
    state: Tensor | None, u: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]
) -> None:
    """Raise unless the state of state-space models is (b, d, n), in any precision of one of the dtypes."""
    if state is None:
        return
    expected = (u.shape[0], *shape)
    if state.shape != expected:
        raise ValueError(
            f"`state` must have shape (b, d, n) = {expected}; got {tuple(state.shape)}. "
            "Pass the state that the previous call returned, or None for zeros."
        )
    is_complex = any(dtype.is_complex for dtype in dtypes)
    if state.dtype not in SUPPORTED + (COMPLEX if is_complex else ()):
        raise TypeError(
            f"`state` must be {' or '.join(map(name_of, dtypes))}; got {name_of(state.dtype)}. Cast it."
        )
    check_device("state", state, u)


def check_device(name: str, tensor: Tensor, u: Tensor) -> None:
    """Raise unless the tensor is where `u` is."""
    if tensor.device != u.device:
        raise ValueError(
            f"`{name}` must be on u's device {str(u.device)!r}; got {str(tensor.device)!r}. "
            f"Move it with .to({str(u.device)!r})."
        )


def name_of(dtype: torch.dtype) -> str:
    """Return the dtype's name as errors give it.

    Example:
        >>> name_of(torch.float32)
        'float32'
    """
    return str(dtype).removeprefix("torch.")
