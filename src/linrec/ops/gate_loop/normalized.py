"""The running normaliser: one more value of one, whose outputs are the sums of the weights of the others."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from linrec.ops.gate_loop.inputs import check_precision


def check_floor(floor: Tensor | float, q: Tensor) -> None:
    """Raise unless `floor` is a number > 0, or real (b, t, h) and as precise as `q` or the accumulation."""
    if isinstance(floor, Tensor):
        if floor.shape != q.shape[:3]:
            raise ValueError(
                f"`floor` must be a number, or have shape (b, t, h) = {tuple(q.shape[:3])}; "
                f"got {tuple(floor.shape)}. Pass one per step and head."
            )
        check_precision("floor", floor, q)
    elif not 0 < floor < math.inf:
        raise ValueError(
            f"`floor` must be positive and finite; got {floor}. It keeps a denominator from being zero."
        )


def check_state(state: Tensor | None, q: Tensor, v: Tensor) -> None:
    """Raise unless `state` is None or (b, h, dk, dv + 1)."""
    b, _, h, dk = q.shape
    shape = (b, h, dk, v.shape[-1] + 1)
    if state is not None and state.shape != shape:
        raise ValueError(
            f"`state` must have shape (b, h, dk, dv + 1) = {shape}, with the normaliser as its last column; "
            f"got {tuple(state.shape)}. Pass the state that an earlier call returned, or None."
        )


def with_one(v: Tensor) -> Tensor:
    """Values (b, t, h, dv) and a one behind them."""
    return functional.pad(v, (0, 1), value=1.0)


def in_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    phase: Tensor | None,
    bonus: Tensor | None,
    state: Tensor | None,
) -> tuple[Any, ...]:
    """Arguments of `gate_loop` with dk = 1 and dv = 2 as those with h heads more and dv = 1."""

    def repeated(x: Tensor | None) -> Tensor | None:
        # heads come first where there is no time
        return x if x is None else x.repeat_interleave(2, dim=2 if x.ndim > 2 else 0)

    if state is not None:
        state = state.flatten(1)[..., None, None]
    gates = (repeated(x) for x in (log_decay, phase, bonus))
    return repeated(q), repeated(k), v.flatten(2)[..., None], *gates, state


def divided(y: Tensor, floor: Tensor | float, signed: bool) -> Tensor:
    """Divide outputs (b, t, h, dv + 1) by the last of them, brought to a magnitude of at least `floor`."""
    numerator, total = y[..., :-1], y[..., -1:]
    least = floor[..., None].to(y.dtype) if isinstance(floor, Tensor) else floor
    size = total.abs().clamp(min=least)
    return numerator / (torch.where(total < 0, -size, size) if signed else size)
