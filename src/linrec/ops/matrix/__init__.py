"""Checks of the inputs that operators with matrix states share, and the inputs of their kernels."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linrec.ops.core.backends import Backend
from linrec.ops.core.call import Operator, Space
from linrec.ops.core.checks import check_axes, check_precision, check_shape, check_supported, name_of
from linrec.ops.core.kernel import Differentiable, Gradients, In, Memory, by_autograd, kernel_op, like
from linrec.ops.core.precision import COMPLEX, accumulation, real_dtype


class Matrix(NamedTuple):
    """Inputs of the kernels for matrix states.

    They are those of `delta_rule` with `beta`, of `generalized_delta_rule` with `r` and `w`, and of
    `gate_loop` without them.

    Attributes:
        q: (b, t, h, dk), real, like all tensors here.
        k: (b, t, h, dk).
        v: (b, t, h, dv).
        beta: None or (b, t, h).
        log_decay: log a, None or (b or 1, t or 1, h, dk or 1).
        state: S_0 (b, h, dk, dv).
        reset: None, or (b, t), true if the state is cleared before a step.
        phase: None, or phases (b or 1, t or 1, h, dk / 2 or 1) by which the frame of
            `linrec.ops.gate_loop.variants.real_form` rotates. The
            kernel does not read them, but computes their gradient.
        wide: whether y has the accumulation dtype instead of the dtype of v.
        r: None or (b, t, h, dk).
        w: None or (b, t, h, dk).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor | None
    log_decay: Tensor | None
    state: Tensor
    reset: Tensor | None
    phase: Tensor | None = None
    wide: bool = False
    r: Tensor | None = None
    w: Tensor | None = None


class Values(NamedTuple):
    """Outputs of the kernels for matrix states: y, the last state, and a tensor saved for the adjoint."""

    y: Tensor
    last: Tensor
    kept: Tensor


def matrix_operator(
    name: str, inputs: type[In], canonical: Callable[[In], In], backends: Sequence[Backend[In]], *,
    columns: int = 0, wide: bool = False, **options: Any
) -> Operator[In]:  # fmt: skip
    """Return an operator whose output is like `v` and whose state has `columns` more columns than `v`.

    With `wide`, the output has the accumulation dtype.
    """
    turns = "phase" in inputs._fields  # type: ignore[attr-defined]

    def output(given: Any) -> Space:
        return given.v.shape, accumulation(given.v.dtype) if wide else given.v.dtype

    def state(given: Any) -> Space:
        (b, _, h, dk), dtype = given.q.shape, accumulation(given.v.dtype)
        is_complex = turns and (given.phase is not None or given.k.is_complex())
        return (b, h, dk, given.v.shape[-1] + columns), COMPLEX[dtype] if is_complex else dtype

    def is_empty(given: Any) -> bool:
        return 0 in given.q.shape

    axes = f"(b, h, dk, dv + {columns})" if columns else "(b, h, dk, dv)"
    return Operator(
        name, inputs, "q", canonical, output, axes, state, backends,
        is_empty=is_empty,
        empty=lambda batch, h, dk, dv, **like: torch.zeros(batch, h, dk, dv + columns, **like), **options,
    )  # fmt: skip


def kernel(
    name: str,
    inputs: type[In],
    twin: Callable[[In], tuple[Tensor, Tensor]],
    kept: Callable[[In, bool], Memory],
    forward: Callable[[Any, In], None],
    adjoint: Callable[[Gradients, In, Any, Any], None],
    *,
    outputs: type[Any] = Values,
    output: Callable[[Any], Memory | Tensor] = lambda given: like(given.v),
) -> Differentiable[In, Any]:
    """Return a kernel of matrix states and its adjoint as a function; see `kernel_op`.

    `outputs` are y, the last state, and tensors that are saved for the adjoint. `kept` returns the memory of
    each saved tensor, and `output` the memory of y.
    """
    saved = outputs._fields[2:]

    def memory(given: Any, keep: bool) -> tuple[Memory | Tensor, ...]:
        return output(given), like(given.state), *[kept(given, keep)] * len(saved)

    return kernel_op(
        name, inputs, outputs, memory, forward, adjoint,
        again=by_autograd(twin), batch="q", kept=saved, follows={"last": "state"},
    )  # fmt: skip


def check_queries_and_keys(q: Tensor, k: Tensor) -> torch.dtype:
    """Return the real dtype that `q` and `k`, both (b, t, h, dk), share; raise if they differ."""
    check_axes("q", q, "(b, t, h, dk)", "Use `unflatten(-1, (h, dk))` to split channels into heads.")
    precision = check_supported("q", q, complex_too=True)
    check_like_queries("k", k, q)
    return precision


def check_like_queries(name: str, x: Tensor, q: Tensor) -> None:
    """Raise unless `x` has the shape and the precision of `q`."""
    check_shape(name, x, "(b, t, h, dk), that of `q`,", q.shape, "Give both the same heads and channels.")
    _check_same_precision(name, x, q)


def check_values(v: Tensor, q: Tensor) -> None:
    """Raise unless `v` is real (b, t, h, dv) with the batch, time, heads and precision of `q`."""
    if v.ndim != 4 or v.shape[:3] != q.shape[:3]:
        raise ValueError(
            f"`v` must have shape (b, t, h, dv) with (b, t, h) = {tuple(q.shape[:3])} as `q` has; "
            f"got {tuple(v.shape)}."
        )
    if v.is_complex():
        cure = "Pass its real and its imaginary part as two values, along dv."
        raise TypeError(f"`v` must be real; got {name_of(v.dtype)}. {cure}")
    _check_same_precision("v", v, q)


def _check_same_precision(name: str, x: Tensor, q: Tensor) -> None:
    precision = real_dtype(q.dtype)
    if check_supported(name, x, complex_too=True) != precision:
        expected = f"the real precision of `q`, {name_of(precision)}"
        raise TypeError(f"`{name}` must have {expected}; got {name_of(x.dtype)}. Cast one of them.")


def canonical_gate(name: str, gate: Tensor | None, q: Tensor) -> Tensor | None:
    """Return `gate` as (b or 1, t or 1, h, dk or 1).

    Args:
        name: name of the argument, for errors.
        gate: None, (h,), (h, dk), (b, t, h) or (b, t, h, dk), where dk may be 1, in the precision of `q` or
            in the accumulation dtype.
        q: queries (b, t, h, dk), already checked.

    Returns:
        The gate with four axes that broadcast against `q`, or None.
    """
    if gate is None:
        return None
    # only shapes of equal length are compared: a program that torch.export makes for all batches and lengths
    # must not compare a batch size with a number of heads
    if gate.ndim == 4 and gate.shape == q.shape and gate.dtype == q.dtype and not q.is_complex():
        return gate
    b, t, h, dk = q.shape
    shape = {1: (h,), 2: (h, dk), 3: (b, t, h), 4: (b, t, h, dk)}.get(gate.ndim)
    per_channel = gate.ndim in (2, 4)
    if shape is None or gate.shape not in ((shape, (*shape[:-1], 1)) if per_channel else (shape,)):
        raise ValueError(
            f"`{name}` must have shape (h,), (h, dk), (b, t, h) or (b, t, h, dk) = "
            f"{(h,)}, {(h, dk)}, {(b, t, h)} or {(b, t, h, dk)}; got {tuple(gate.shape)}. "
            "Pass one value per head or per key channel; a last axis of 1 broadcasts over the channels."
        )
    check_precision(name, gate, q, "q")
    # (h,) and (b, t, h) hold a value per head, which all channels share
    gate = gate if per_channel else gate[..., None]
    return gate if gate.ndim == 4 else gate[None, None]
