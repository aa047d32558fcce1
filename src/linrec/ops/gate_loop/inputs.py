"""Checks of what the matrix operators take, and its canonical form: one precision, gates of four axes."""

import torch
from torch import Tensor

from linrec.ops.precision import REAL, accumulation, real_dtype

# a table instead of the method of dtypes, which torch.compile cannot trace
_COMPLEX = {torch.float32: torch.complex64, torch.float64: torch.complex128}


def check_queries_and_keys(q: Tensor, k: Tensor) -> torch.dtype:
    """Return the real dtype that `q` and `k`, both (b, t, h, dk), share; raise where they do not."""
    if q.ndim != 4:
        raise ValueError(
            f"`q` must have shape (b, t, h, dk); got {tuple(q.shape)}. "
            "Use `unflatten(-1, (h, dk))` to split channels into heads."
        )
    if k.shape != q.shape:
        raise ValueError(
            f"`k` must have the shape of `q`, (b, t, h, dk) = {tuple(q.shape)}; got {tuple(k.shape)}."
        )
    precision = _precision("q", q)
    if _precision("k", k) != precision:
        raise TypeError(
            f"`k` must have the real precision of `q`, {_name(precision)}; got {_name(k.dtype)}. "
            "Cast one of them."
        )
    _check_device("k", k, q)
    return precision


def check_values(v: Tensor, q: Tensor) -> None:
    """Raise unless `v` is real (b, t, h, dv) with the batch, time, heads and precision of `q`."""
    if v.ndim != 4 or v.shape[:3] != q.shape[:3]:
        raise ValueError(
            f"`v` must have shape (b, t, h, dv) with (b, t, h) = {tuple(q.shape[:3])} as `q` has; "
            f"got {tuple(v.shape)}."
        )
    if v.is_complex():
        raise TypeError(
            f"`v` must be real; got {_name(v.dtype)}. Pass its real and its imaginary part as two values, "
            "along dv."
        )
    precision = real_dtype(q.dtype)
    if _precision("v", v) != precision:
        raise TypeError(
            f"`v` must have the real precision of `q`, {_name(precision)}; got {_name(v.dtype)}. "
            "Cast one of them."
        )
    _check_device("v", v, q)


def canonical_gate(name: str, gate: Tensor | None, q: Tensor) -> Tensor | None:
    """Return `gate` as (b or 1, t or 1, h, dk or 1).

    Args:
        name: the argument's name, for errors.
        gate: None, (h,), (h, dk), (b, t, h) or (b, t, h, dk), where 1 may stand for dk, in the precision of
            `q` or the accumulation's.
        q: queries (b, t, h, dk), already checked.

    Returns:
        The gate with four axes that broadcast against `q`, or None.
    """
    if gate is None:
        return None
    b, t, h, dk = q.shape
    # sizes are compared with those of as many axes alone: a program that torch.export makes for all batches
    # and lengths must not ask whether a batch is as large as a head
    shape = {1: (h,), 2: (h, dk), 3: (b, t, h), 4: (b, t, h, dk)}.get(gate.ndim)
    per_channel = gate.ndim in (2, 4)
    if shape is None or gate.shape not in ((shape, (*shape[:-1], 1)) if per_channel else (shape,)):
        raise ValueError(
            f"`{name}` must have shape (h,), (h, dk), (b, t, h) or (b, t, h, dk) = "
            f"{(h,)}, {(h, dk)}, {(b, t, h)} or {(b, t, h, dk)}; got {tuple(gate.shape)}. "
            "Pass one value per head or per key channel; a last axis of 1 broadcasts over the channels."
        )
    check_precision(name, gate, q)
    # (h,) and (b, t, h) have one value for all channels
    if gate.ndim in (1, 3):
        gate = gate[..., None]
    return gate if gate.ndim == 4 else gate[None, None]


def check_bonus(bonus: Tensor | None, q: Tensor) -> None:
    """Raise unless `bonus` is None or real (h, dk), in the precision of `q` or the accumulation's."""
    if bonus is None:
        return
    if bonus.shape != q.shape[2:]:
        raise ValueError(
            f"`bonus` must have shape (h, dk) = {tuple(q.shape[2:])}; got {tuple(bonus.shape)}. "
            "Pass one factor per head and key channel."
        )
    check_precision("bonus", bonus, q)


def canonical_state(state: Tensor | None, q: Tensor, v: Tensor, *, is_complex: bool) -> Tensor:
    """Return the initial state (b, h, dk, dv) in the accumulation dtype; zeros where it is None."""
    b, _, h, dk = q.shape
    shape = (b, h, dk, v.shape[-1])
    dtype = accumulation(real_dtype(q.dtype))
    if is_complex:
        dtype = _COMPLEX[dtype]
    if state is None:
        return torch.zeros(shape, dtype=dtype, device=q.device)
    if state.shape != shape:
        raise ValueError(
            f"`state` must have shape (b, h, dk, dv) = {shape}; got {tuple(state.shape)}. "
            "Pass the state that an earlier call returned, or None."
        )
    if not (state.is_floating_point() or state.is_complex()):
        raise TypeError(f"`state` must be {_name(dtype)}; got {_name(state.dtype)}. Cast it.")
    if state.is_complex() and not is_complex:
        raise TypeError(
            f"`state` must be {_name(dtype)} where `phase` is None and `k` is real; "
            f"got {_name(state.dtype)}. Pass `state.real`, or the phase that made it complex."
        )
    _check_device("state", state, q)
    return state.to(dtype)


def check_reset(reset: Tensor | None, q: Tensor) -> None:
    """Raise unless `reset` is None or a bool tensor (b, t)."""
    if reset is None:
        return
    if reset.shape != q.shape[:2]:
        raise ValueError(f"`reset` must have shape (b, t) = {tuple(q.shape[:2])}; got {tuple(reset.shape)}.")
    if reset.dtype != torch.bool:
        raise TypeError(f"`reset` must be bool; got {_name(reset.dtype)}. Pass `reset != 0`.")
    _check_device("reset", reset, q)


def check_precision(name: str, x: Tensor, q: Tensor) -> None:
    """Raise unless `x` is real, in the precision of `q` or the accumulation's, on the device of `q`."""
    precision = real_dtype(q.dtype)
    total = accumulation(precision)
    if x.dtype not in (precision, total):
        allowed = _name(total) if precision == total else f"{_name(precision)} (as `q`) or {_name(total)}"
        raise TypeError(f"`{name}` must be {allowed}; got {_name(x.dtype)}. Cast it.")
    _check_device(name, x, q)


def _check_device(name: str, x: Tensor, q: Tensor) -> None:
    if x.device != q.device:
        raise ValueError(
            f"`{name}` must be on the device of `q`, {str(q.device)!r}; got {str(x.device)!r}. "
            f"Move it with .to({str(q.device)!r})."
        )


def _precision(name: str, x: Tensor) -> torch.dtype:
    if x.dtype not in REAL:
        raise TypeError(
            f"`{name}` must be float16, bfloat16, float32, float64, complex64 or complex128; "
            f"got {_name(x.dtype)}. Cast it, for example with `.float()`."
        )
    return REAL[x.dtype]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
