"""Checks of arguments. An error names the argument, the expected value, the actual value and a cure."""

from collections.abc import Iterator, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, TypeAlias, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from linrec.ops.core.precision import COMPLEX, REAL, accumulation
from linrec.torch_private import transforms_active

State: TypeAlias = Any
"""Type of the field `state` of a named tuple: optional in arguments, always a tensor for backends."""

Field = tuple[int, str, tuple[type, ...]]
"""Index and name of a named tuple's field, and the types that it accepts besides tensors."""

_FLOATS = tuple(dict.fromkeys(REAL.values()))
_ALL = tuple(REAL)


def tensor_fields(kind: type) -> list[Field]:
    """Return the fields of a named tuple that hold tensors, required fields first."""
    fields = []
    for place, (name, hint) in enumerate(get_type_hints(kind).items()):
        if name == "state" and hint is State:
            hint = Tensor | None
        # a tuple of tensors is checked one by one; the arguments of other types are no alternatives
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType, tuple) else (hint,)
        if Tensor in kinds:
            others = tuple(other for other in kinds if other not in (Tensor, ...))
            fields.append((place, name, (*others, int) if float in others else others))
    return sorted(fields, key=lambda field: len(field[2]))


def option_fields(kind: type) -> dict[str, Any]:
    """Return the types of a named tuple's fields that are numbers, flags or words, by name."""
    plain, hints = {bool, int, float, str, NoneType}, get_type_hints(kind).items()
    return {name: hint for name, hint in hints if {*(get_args(hint) or (hint,))} <= plain}


def are_tensors(**given: object) -> None:
    """Raise TypeError unless every argument is a tensor."""
    for name, x in given.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"`{name}` must be a tensor; got {x!r:.40}. Pass `torch.as_tensor({name})`.")


def check_tensors(
    inputs: Any, fields: Sequence[Field], sequence: str, beside: Tensor | None = None
) -> Tensor:
    """Return the tensor `sequence`; raise unless all tensors of a named tuple are dense and on its device.

    Args:
        inputs: the arguments of an operator.
        fields: the fields that hold tensors, from `tensor_fields`.
        sequence: name of the argument with batch and time axes.
        beside: the tensor of that name if it is not among `inputs`.
    """
    first = getattr(inputs, sequence) if beside is None else beside
    home = first.device if isinstance(first, Tensor) else None
    for name, x, others in _each(inputs, fields):
        if not isinstance(x, Tensor):
            if isinstance(x, others):
                continue
            kinds = "".join(f" or {'None' if other is type(None) else other.__name__}" for other in others)
            got = "None" if x is None else type(x).__name__
            raise TypeError(
                f"`{name}` must be a tensor{kinds}; got {got}. Pass `torch.as_tensor(...)` of it."
            )
        if x.layout != torch.strided:
            raise TypeError(f"`{name}` must be a dense tensor; got {x.layout}. Pass `{name}.to_dense()`.")
        if home is not None and x.device != home:
            device = str(home)
            raise ValueError(
                f"`{name}` must be on the device of `{sequence}`, {device!r}; got {str(x.device)!r}. "
                f"Move it with .to({device!r})."
            )
    return first


def _each(inputs: Any, fields: Sequence[Field]) -> Iterator[tuple[str, Any, tuple[type, ...]]]:
    """Yield the name, the value and the other types of each tensor, those of a tuple one by one."""
    for place, name, others in fields:
        value = inputs[place]
        for x in value if type(value) is tuple else (value,):
            yield name, x, others


def check_reset(reset: Tensor | None, sequence: Tensor) -> None:
    """Raise unless `reset` is None or a bool tensor (b, t)."""
    if reset is None:
        return
    if str(reset.dtype) != "torch.bool":
        raise TypeError(f"`reset` must be bool; got {name_of(reset.dtype)}. Pass `reset != 0`.")
    if reset.shape != sequence.shape[:2]:
        raise ValueError(
            f"`reset` must have shape (b, t) = {tuple(sequence.shape[:2])}; got {tuple(reset.shape)}. "
            "Pass one flag per sequence and step."
        )


def check_shape(name: str, x: Tensor | None, axes: str, shape: Sequence[int | str], cure: str) -> None:
    """Raise unless a tensor is None or has the shape; a string in the shape allows any size."""
    if x is None or x.shape == shape:
        return
    sizes = [actual if isinstance(size, str) else size for actual, size in zip(x.shape, shape, strict=False)]
    if x.ndim != len(shape) or list(x.shape) != sizes:
        expected = str(tuple(shape)).replace("'", "")
        raise ValueError(f"`{name}` must have shape {axes} = {expected}; got {tuple(x.shape)}. {cure}")


def check_axes(name: str, x: Tensor, axes: str, cure: str) -> None:
    """Raise unless a tensor has the number of axes in `axes`, such as "(b, t, c)"."""
    if x.ndim != axes.count(",") + 1:
        raise ValueError(f"`{name}` must have shape {axes}; got {tuple(x.shape)}. {cure}")


def check_supported(name: str, x: Tensor, *, complex_too: bool = False) -> torch.dtype:
    """Return the dtype of the real part; raise for integers, and for complex numbers unless allowed."""
    check_dtype(name, x, _ALL if complex_too else _FLOATS)
    return REAL[x.dtype]


def check_factors(u: Tensor, factors: Mapping[str, Tensor], kinds: Sequence[str]) -> torch.dtype:
    """Return the accumulation dtype of u; raise unless u is a real (b, t, d) and the factors' dtypes match.

    Args:
        u: the input of a state-space model.
        factors: the other tensors of the model by name, in the accumulation dtype.
        kinds: allowed kinds of factors: "real", "complex" or both.
    """
    check_axes("u", u, "(batch, time, channels)", "Add the missing axes, or flatten heads into channels.")
    check_supported("u", u)
    sums = accumulation(u.dtype)
    allowed = [{"real": sums, "complex": COMPLEX[sums]}[kind] for kind in kinds]
    for name, x in factors.items():
        check_dtype(name, x, allowed, f" beside `u` in {name_of(u.dtype)}")
    return sums


def check_dtype(name: str, x: Tensor, allowed: Sequence[torch.dtype], beside: str = "") -> None:
    """Raise unless a tensor has an allowed dtype."""
    if x.dtype not in allowed:
        kinds = ", ".join(map(name_of, allowed[:-1])) + " or " * (len(allowed) > 1) + name_of(allowed[-1])
        raise TypeError(f"`{name}` must be {kinds}{beside}; got {name_of(x.dtype)}. Cast it.")


def check_precision(name: str, x: Tensor | None, like: Tensor, beside: str) -> None:
    """Raise unless a tensor is None, or real with the precision of `like` or of its accumulation dtype.

    Args:
        name: name of the tensor.
        x: the tensor.
        like: the tensor to compare with.
        beside: name of `like`.
    """
    precision = REAL[like.dtype]
    total = accumulation(precision)
    if x is not None and x.dtype not in (precision, total):
        allowed = name_of(total)
        if precision != total:
            allowed = f"{name_of(precision)} (as `{beside}`) or {allowed}"
        raise TypeError(f"`{name}` must be {allowed}; got {name_of(x.dtype)}. Cast it.")


def check_state(state: Tensor, axes: str, shape: Sequence[int], dtype: torch.dtype) -> None:
    """Raise unless an initial state has the shape, and is real if the recurrence is real.

    Args:
        state: the state.
        axes: names of its axes, such as "(b, c)".
        shape: expected shape.
        dtype: the accumulation dtype.
    """
    check_shape(
        "state", state, axes, shape, "Pass the state that an earlier call returned, or None for zeros."
    )
    if state.dtype not in REAL:
        raise TypeError(f"`state` must be {name_of(dtype)}; got {name_of(state.dtype)}. Cast it.")
    if state.is_complex() and not dtype.is_complex:
        raise TypeError(
            f"`state` must be real ({name_of(dtype)}) for a real recurrence; got {name_of(state.dtype)}. "
            "Pass its real part."
        )


def check_rates(name: str, A: Tensor) -> None:
    """Raise if x' = A x with diagonal A would grow; values are only checked if reading them is free."""
    if A.numel() and visible(A) and (largest := float(A.detach().real.max())) > 0:
        be = "have real parts of" if A.is_complex() else "be"
        raise ValueError(
            f"`{name}` must {be} at most 0, or states grow without bounds; got values up to {largest:.4g}. "
            f"Pass `-torch.exp({name}_log)`{' as real parts' if A.is_complex() else ''}."
        )


def check_steps(name: str, dt: Tensor) -> None:
    """Raise if a step size is negative; zero leaves the state unchanged."""
    if dt.numel() and visible(dt) and (smallest := float(dt.detach().min())) < 0:
        raise ValueError(
            f"`{name}` must be at least 0; got values down to {smallest:.4g}. Pass `softplus(...)` of them."
        )


def visible(x: Tensor) -> bool:
    """Return whether values can be read without waiting for a device and without a graph break."""
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return not transforms_active()


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype as errors show it."""
    return str(dtype).removeprefix("torch.")
