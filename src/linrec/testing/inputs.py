"""Inputs for tests: seeded by generators of their own, independent of the global random state."""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

__all__ = [
    "delta_rule_inputs",
    "dense_ssm_inputs",
    "diagonal_ssm_inputs",
    "dplr_ssm_inputs",
    "gate_loop_inputs",
    "generator",
    "long_conv_inputs",
    "reset_mask",
    "scan_inputs",
    "selective_scan_inputs",
    "short_conv_inputs",
]


def generator(seed: int = 0, device: str = "cpu") -> torch.Generator:
    """A random generator of its own, so that inputs do not depend on the global random state."""
    return torch.Generator(device).manual_seed(seed)


def reset_mask(batch: int, time: int, *, rate: float = 0.1, seed: int = 0, device: str = "cpu") -> Tensor:
    """Resets (b, t) bool, each true with probability `rate`; different in every row.

    Example:
        >>> reset_mask(2, 4, rate=1.0).all().item()
        True
    """
    return (torch.rand(batch, time, generator=generator(seed)) < rate).to(device)


def scan_inputs(
    batch: int,
    time: int,
    channels: int,
    *,
    dtype: torch.dtype = torch.float32,
    decay: Literal["step", "head", "channel", "constant"] = "step",
    seed: int = 0,
    device: str = "cpu",
) -> dict[str, Tensor]:
    """Inputs a, x and state for `linrec.ops.scan`, with time scales 1 / (1 - |a|) from 1.05 to 1,000 steps.

    Args:
        batch: sequences b.
        time: steps t.
        channels: channels c.
        dtype: of a and x; complex ones give a any phase. The state has the accumulation dtype.
        decay: shape of a: (b, t, c), (b, t, 1), (c,) or ().
        seed: of the values.
        device: where they live.

    Example:
        >>> import torch
        >>> scan_inputs(2, 5, 3, decay="channel")["a"].shape
        torch.Size([3])
    """
    random = generator(seed)
    shape = {
        "step": (batch, time, channels),
        "head": (batch, time, 1),
        "channel": (channels,),
        "constant": (),
    }
    a = torch.exp(_log_decays(shape[decay], random)).to(
        torch.complex128 if dtype.is_complex else torch.float64
    )
    if dtype.is_complex:
        a = torch.polar(a.real, _phases(a.shape, random))
    inputs = {"a": a, "x": _normal((batch, time, channels), random, dtype)}
    inputs = {name: tensor.to(device, dtype) for name, tensor in inputs.items()}
    return inputs | {"state": _normal((batch, channels), random, dtype).to(device, _accumulation(dtype))}


def gate_loop_inputs(
    batch: int,
    time: int,
    heads: int,
    d_key: int,
    d_value: int,
    *,
    dtype: torch.dtype = torch.float32,
    log_decay: str | None = "bthk",
    phase: str | None = "bthk",
    complex_qk: bool = False,
    bonus: bool = False,
    seed: int = 0,
    device: str = "cpu",
) -> dict[str, Tensor | None]:
    """Inputs q, k, v, log_decay, phase and state for `linrec.ops.gate_loop`, and bonus where asked for.

    Args:
        batch: sequences b.
        time: steps t.
        heads: heads h.
        d_key: key channels per head.
        d_value: value channels per head.
        dtype: real dtype of v, and of the others' parts; the state has the accumulation dtype.
        log_decay: axes that it has: "bthk", "bth", "hk", "h", or None for none.
        phase: axes that it has, in radians, any.
        complex_qk: whether q and k are complex.
        bonus: whether there is one, (h, dk).
        seed: of the values.
        device: where they live.

    Example:
        >>> import torch
        >>> inputs = gate_loop_inputs(2, 5, 3, 4, 6, log_decay="h", phase=None)
        >>> inputs["log_decay"].shape, inputs["phase"], inputs["state"].shape
        (torch.Size([3]), None, torch.Size([2, 3, 4, 6]))
    """
    random = generator(seed)
    size = {"b": batch, "t": time, "h": heads, "k": d_key}
    qk_dtype = dtype.to_complex() if complex_qk else dtype
    qk_shape = (batch, time, heads, d_key)
    inputs: dict[str, Tensor | None] = {
        "q": (_normal(qk_shape, random, qk_dtype) / d_key**0.5).to(device, qk_dtype),
        "k": _normal(qk_shape, random, qk_dtype).to(device, qk_dtype),
        "v": _normal((batch, time, heads, d_value), random, dtype).to(device, dtype),
        "log_decay": None,
        "phase": None,
    }
    if log_decay is not None:
        inputs["log_decay"] = _log_decays([size[axis] for axis in log_decay], random).to(device, dtype)
    if phase is not None:
        inputs["phase"] = _phases([size[axis] for axis in phase], random).to(device, dtype)
    state_dtype = _accumulation(dtype if phase is None and not complex_qk else dtype.to_complex())
    state = _normal((batch, heads, d_key, d_value), random, state_dtype)
    inputs["state"] = state.to(device, state_dtype)
    if bonus:
        inputs["bonus"] = _normal((heads, d_key), random, dtype).to(device, dtype)
    return inputs


def delta_rule_inputs(
    batch: int,
    time: int,
    heads: int,
    d_key: int,
    d_value: int,
    *,
    dtype: torch.dtype = torch.float32,
    log_decay: str | None = "bth",
    largest_beta: float = 1.0,
    seed: int = 0,
    device: str = "cpu",
) -> dict[str, Tensor | None]:
    """Inputs q, k, v, beta, log_decay and state for `linrec.ops.delta_rule`, with keys of norm 1.

    Args:
        batch: sequences b.
        time: steps t.
        heads: heads h.
        d_key: key channels per head.
        d_value: value channels per head.
        dtype: of all but the state, which has the accumulation dtype.
        log_decay: axes that it has: "bthk", "bth", "hk", "h", or None for none.
        largest_beta: beta is uniform between zero and this; above 1, eigenvalues may be negative.
        seed: of the values.
        device: where they live.

    Example:
        >>> inputs = delta_rule_inputs(2, 5, 3, 4, 6, log_decay="h")
        >>> inputs["log_decay"].shape, inputs["beta"].shape, inputs["state"].shape
        (torch.Size([3]), torch.Size([2, 5, 3]), torch.Size([2, 3, 4, 6]))
    """
    shape = (batch, time, heads, d_key, d_value)
    inputs = gate_loop_inputs(*shape, dtype=dtype, log_decay=log_decay, phase=None, seed=seed, device=device)
    del inputs["phase"]
    random = generator(seed + 1)
    keys = torch.nn.functional.normalize(_normal(shape[:4], random, torch.float64), dim=-1)
    beta = torch.rand(shape[:3], generator=random, dtype=torch.float64) * largest_beta
    return inputs | {"k": keys.to(device, dtype), "beta": beta.to(device, dtype)}


def short_conv_inputs(
    batch: int,
    time: int,
    channels: int,
    width: int = 4,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    device: str = "cpu",
) -> dict[str, Tensor]:
    """Inputs x, weight, bias and state for `linrec.ops.short_conv`.

    Args:
        batch: sequences b.
        time: steps t.
        channels: channels c.
        width: taps of each channel.
        dtype: of all but the state, which has the accumulation dtype.
        seed: of the values.
        device: where they live.

    Example:
        >>> {name: tuple(tensor.shape) for name, tensor in short_conv_inputs(2, 5, 3).items()}
        {'x': (2, 5, 3), 'weight': (3, 4), 'bias': (3,), 'state': (2, 3, 3)}
    """
    random = generator(seed)
    shapes = {"x": (batch, time, channels), "weight": (channels, width), "bias": (channels,)}
    inputs = {name: _normal(shape, random, dtype).to(device, dtype) for name, shape in shapes.items()}
    state = _normal((batch, width - 1, channels), random, dtype)
    return inputs | {"state": state.to(device, _accumulation(dtype))}


def long_conv_inputs(
    batch: int,
    time: int,
    channels: int,
    taps: int | None = None,
    *,
    past: int = 5,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    device: str = "cpu",
) -> dict[str, Tensor]:
    """Inputs u, kernel and state for `linrec.ops.long_conv`.

    Args:
        batch: sequences b.
        time: steps t.
        channels: channels d.
        taps: length of the kernel; None is as long as may be, and at most 40.
        past: steps of the state.
        dtype: of all three.
        seed: of the values.
        device: where they live.

    Example:
        >>> {name: tuple(tensor.shape) for name, tensor in long_conv_inputs(2, 4, 3).items()}
        {'u': (2, 4, 3), 'kernel': (3, 9), 'state': (2, 5, 3)}
    """
    random = generator(seed)
    taps = min(time + past, 40) if taps is None else taps
    shapes = {"u": (batch, time, channels), "kernel": (channels, taps), "state": (batch, past, channels)}
    return {name: _normal(shape, random, dtype).to(device, dtype) for name, shape in shapes.items()}


def diagonal_ssm_inputs(
    batch: int,
    time: int,
    channels: int,
    states: int,
    *,
    dtype: torch.dtype = torch.float32,
    is_complex: bool = True,
    shared: bool = False,
    seed: int = 0,
    device: str = "cpu",
) -> dict[str, Tensor]:
    """Inputs u, a, b, c and state for `linrec.ops.diagonal_ssm`, with time scales from 1.05 to 1,000 steps.

    Args:
        batch: sequences b.
        time: steps t.
        channels: channels d.
        states: states n of each channel.
        dtype: of u; all others have the accumulation dtype, or its complex one.
        is_complex: whether all but u are complex.
        shared: whether a and b are the same for all channels.
        seed: of the values.
        device: where they live.

    Example:
        >>> {name: tuple(tensor.shape) for name, tensor in diagonal_ssm_inputs(2, 5, 3, 4).items()}
        {'u': (2, 5, 3), 'a': (3, 4), 'b': (3, 4), 'c': (3, 4), 'state': (2, 3, 4)}
    """
    random = generator(seed)
    wide = _accumulation(dtype.to_complex() if is_complex else dtype)
    shape = (channels, states)
    rows = (1, states) if shared else shape
    a = torch.exp(_log_decays(rows, random))
    inputs = {
        "a": torch.polar(a, _phases(rows, random)) if is_complex else a,
        "b": _normal(rows, random, wide),
        "c": _normal(shape, random, wide) / states**0.5,
        "state": _normal((batch, *shape), random, wide),
    }
    u = _normal((batch, time, channels), random, dtype).to(device, dtype)
    return {"u": u} | {name: tensor.to(device, wide) for name, tensor in inputs.items()}


def dense_ssm_inputs(
    batch: int,
    time: int,
    channels: int,
    states: int,
    outputs: int | None = None,
    *,
    shared: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    device: str = "cpu",
) -> dict[str, Tensor | None]:
    """Inputs u, A, B, C and state for `linrec.ops.dense_ssm`; no A makes any state larger.

    Args:
        batch: sequences b.
        time: steps t.
        channels: channels d.
        states: states n of each channel.
        outputs: rows m of C; None is no C.
        shared: whether A, B and C are the same for all channels.
        dtype: of u; all others have the accumulation dtype.
        seed: of the values.
        device: where they live.

    Example:
        >>> inputs = dense_ssm_inputs(2, 5, 3, 4, 6)
        >>> inputs["A"].shape, inputs["C"].shape, inputs["state"].shape
        (torch.Size([3, 4, 4]), torch.Size([3, 6, 4]), torch.Size([2, 3, 4]))
    """
    random = generator(seed)
    wide = _accumulation(dtype)
    each = () if shared else (channels,)
    # a rotation of states that fade
    rotation, _ = torch.linalg.qr(_normal((*each, states, states), random, torch.float64))
    inputs: dict[str, Tensor | None] = {
        "A": rotation * torch.exp(_log_decays((*each, 1, states), random)),
        "B": _normal((*each, states), random, wide),
        "C": None if outputs is None else _normal((*each, outputs, states), random, wide) / states**0.5,
        "state": _normal((batch, channels, states), random, wide),
    }
    inputs = {name: x if x is None else x.to(device, wide) for name, x in inputs.items()}
    return {"u": _normal((batch, time, channels), random, dtype).to(device, dtype)} | inputs


def dplr_ssm_inputs(
    batch: int,
    time: int,
    channels: int,
    states: int,
    rank: int = 1,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    device: str = "cpu",
) -> dict[str, Tensor]:
    """Inputs u, a, p, q, b, c and state for `linrec.ops.dplr_ssm`; no transition makes any state larger.

    Args:
        batch: sequences b.
        time: steps t.
        channels: channels d.
        states: states n of each channel.
        rank: r, at most 2 n.
        dtype: of u; all others have the complex dtype of its accumulation.
        seed: of the values.
        device: where they live.

    Example:
        >>> inputs = dplr_ssm_inputs(2, 5, 3, 4)
        >>> inputs["a"].shape, inputs["p"].shape, inputs["state"].shape
        (torch.Size([3, 4]), torch.Size([3, 4, 1]), torch.Size([2, 3, 4]))
    """
    random = generator(seed)
    wide = _accumulation(dtype).to_complex()
    shape = (channels, states)
    a = torch.polar(torch.exp(_log_decays(shape, random)), _phases(shape, random))
    # directions of the state, orthonormal as real numbers, of which some share is taken away or turned round
    directions, _ = torch.linalg.qr(_normal((channels, 2 * states, rank), random, torch.float64))
    v = torch.complex(directions[:, :states], directions[:, states:])
    share = 2 * torch.rand(channels, 1, rank, generator=random, dtype=torch.float64)
    inputs = {
        "a": a,
        "p": share * a[..., None] * v,
        "q": v.conj().resolve_conj(),
        "b": _normal(shape, random, wide),
        "c": _normal(shape, random, wide) / states**0.5,
        "state": _normal((batch, *shape), random, wide),
    }
    u = _normal((batch, time, channels), random, dtype).to(device, dtype)
    return {"u": u} | {name: tensor.to(device, wide) for name, tensor in inputs.items()}


def selective_scan_inputs(
    batch: int,
    time: int,
    channels: int,
    d_state: int,
    *,
    groups: int | None = None,
    skip: bool = True,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    device: str = "cpu",
) -> dict[str, Tensor | None]:
    """Inputs x, dt, A, B, C, D and state for `linrec.ops.selective_scan`.

    Step sizes are between 0.01 and 1, and rates between -10 and -0.1.

    Args:
        batch: sequences b.
        time: steps t.
        channels: channels c.
        d_state: states n of a channel.
        groups: groups of B and C; None gives them no axis of groups.
        skip: whether there is a D.
        dtype: of all but the state, which has the accumulation dtype.
        seed: of the values.
        device: where they live.

    Example:
        >>> inputs = selective_scan_inputs(2, 5, 6, 4, groups=3, skip=False)
        >>> inputs["A"].shape, inputs["B"].shape, inputs["D"]
        (torch.Size([6, 4]), torch.Size([2, 5, 3, 4]), None)
    """
    random = generator(seed)
    shared = (batch, time, d_state) if groups is None else (batch, time, groups, d_state)
    inputs: dict[str, Tensor | None] = {
        "x": _normal((batch, time, channels), random, dtype),
        "dt": _log_uniform((batch, time, channels), random, 0.01, 1.0),
        "A": -_log_uniform((channels, d_state), random, 0.1, 10.0),
        "B": _normal(shared, random, dtype),
        "C": _normal(shared, random, dtype) / d_state**0.5,
        "D": _normal((channels,), random, dtype) if skip else None,
    }
    inputs = {name: x if x is None else x.to(device, dtype) for name, x in inputs.items()}
    state = _normal((batch, channels, d_state), random, dtype)
    return inputs | {"state": state.to(device, _accumulation(dtype))}


def _accumulation(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _normal(shape: Sequence[int], random: torch.Generator, dtype: torch.dtype) -> Tensor:
    # drawn in double precision, so that the inputs of two dtypes are roundings of the same numbers
    return torch.randn(shape, generator=random, dtype=torch.complex128 if dtype.is_complex else torch.float64)


def _log_uniform(shape: Sequence[int], random: torch.Generator, low: float, high: float) -> Tensor:
    return low * (high / low) ** torch.rand(shape, generator=random, dtype=torch.float64)


def _log_decays(shape: Sequence[int], random: torch.Generator) -> Tensor:
    time_scale = (
        torch.exp(torch.rand(shape, generator=random, dtype=torch.float64) * math.log(1000 / 1.05)) * 1.05
    )
    return torch.log1p(-1 / time_scale)


def _phases(shape: Sequence[int], random: torch.Generator) -> Tensor:
    return (torch.rand(shape, generator=random, dtype=torch.float64) * 2 - 1) * math.pi
