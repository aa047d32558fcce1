"""Checks of what `short_conv` takes."""

import torch
from torch import Tensor

from linrec.ops.precision import accumulation

_SUPPORTED = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def check(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, reset: Tensor | None) -> None:
    """Raise where shapes, dtypes or devices of the arguments do not fit together."""
    if x.ndim != 3:
        raise ValueError(
            f"`x` must have shape (batch, time, channels); got {tuple(x.shape)}. "
            "Add the missing axes, or flatten heads into channels."
        )
    if x.dtype not in _SUPPORTED:
        raise TypeError(
            f"`x` must be one of {', '.join(map(_name, _SUPPORTED))}; got {_name(x.dtype)}. "
            "Convert it, e.g. with .to(torch.float32)."
        )
    batch, time, channels = x.shape
    if weight.ndim != 2 or len(weight) != channels or weight.shape[1] == 0:
        raise ValueError(
            f"`weight` must have shape (c, width) = ({channels}, width), width at least 1; "
            f"got {tuple(weight.shape)}. "
            "Of a torch.nn.Conv1d with one group per channel, pass `conv.weight[:, 0].flip(-1)`."
        )
    if bias is not None and bias.shape != (channels,):
        raise ValueError(f"`bias` must have shape (c,) = {(channels,)}; got {tuple(bias.shape)}.")
    shape = (batch, weight.shape[1] - 1, channels)
    if state is not None and state.shape != shape:
        raise ValueError(
            f"`state` must have shape (b, width - 1, c) = {shape}; got {tuple(state.shape)}. "
            "Pass the state that the previous call returned, or None for zeros."
        )
    if reset is not None and reset.shape != (batch, time):
        raise ValueError(f"`reset` must have shape (b, t) = {(batch, time)}; got {tuple(reset.shape)}.")
    _check_dtypes(x, weight, bias, state, reset)
    for name, tensor in (("weight", weight), ("bias", bias), ("state", state), ("reset", reset)):
        if tensor is not None and tensor.device != x.device:
            raise ValueError(
                f"`{name}` must be on x's device {str(x.device)!r}; got {str(tensor.device)!r}. "
                f"Move it with .to({str(x.device)!r})."
            )


def _check_dtypes(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, reset: Tensor | None
) -> None:
    wide = accumulation(x.dtype)
    allowed = _name(wide) if x.dtype == wide else f"{_name(x.dtype)} (as `x`) or {_name(wide)}"
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype not in (x.dtype, wide):
            raise TypeError(f"`{name}` must be {allowed}; got {_name(tensor.dtype)}. Cast it.")
    if state is not None and state.dtype not in _SUPPORTED:
        raise TypeError(f"`state` must be {_name(wide)}; got {_name(state.dtype)}. Cast it.")
    if reset is not None and reset.dtype != torch.bool:
        raise TypeError(f"`reset` must be bool; got {_name(reset.dtype)}. Pass `reset != 0`.")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
