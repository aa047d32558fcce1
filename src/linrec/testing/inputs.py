"""Test inputs for recurrences whose transitions may change at every step."""

from typing import Literal

import torch
from torch import Tensor

from linrec.ops.core.precision import accumulation
from linrec.testing.draws import generator, log_decays, log_uniform, normal, phases

__all__ = [
    "delta_rule_inputs",
    "gate_loop_inputs",
    "generalized_delta_rule_inputs",
    "scan_inputs",
    "selective_scan_inputs",
]


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
    """Return a, x and state for `linrec.ops.scan`, with time scales 1 / (1 - |a|) from 1.05 to 1,000 steps.

    Args:
        batch: batch size b.
        time: number of steps t.
        channels: number of channels c.
        dtype: dtype of a and x; if complex, a has random phases. The state has the accumulation dtype.
        decay: shape of a: (b, t, c), (b, t, 1), (c,) or ().
        seed: random seed.
        device: device of the tensors.

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
    a = torch.exp(log_decays(shape[decay], random)).to(
        torch.complex128 if dtype.is_complex else torch.float64
    )
    if dtype.is_complex:
        a = torch.polar(a.real, phases(a.shape, random))
    inputs = {"a": a, "x": normal((batch, time, channels), random, dtype)}
    inputs = {name: tensor.to(device, dtype) for name, tensor in inputs.items()}
    return inputs | {"state": normal((batch, channels), random, dtype).to(device, accumulation(dtype))}


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
    """Return q, k, v, log_decay, phase and state for `linrec.ops.gate_loop`, and bonus if requested.

    Args:
        batch: batch size b.
        time: number of steps t.
        heads: number of heads h.
        d_key: key channels per head.
        d_value: value channels per head.
        dtype: real dtype of all inputs, or of their real and imaginary parts; the state has the accumulation
            dtype.
        log_decay: axes of log_decay: "bthk", "bth", "hk" or "h"; None for no decay.
        phase: axes of phase, in radians; None for no phase.
        complex_qk: whether q and k are complex.
        bonus: whether to return a bonus (h, dk).
        seed: random seed.
        device: device of the tensors.

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
        "q": (normal(qk_shape, random, qk_dtype) / d_key**0.5).to(device, qk_dtype),
        "k": normal(qk_shape, random, qk_dtype).to(device, qk_dtype),
        "v": normal((batch, time, heads, d_value), random, dtype).to(device, dtype),
        "log_decay": None,
        "phase": None,
    }
    if log_decay is not None:
        inputs["log_decay"] = log_decays([size[axis] for axis in log_decay], random).to(device, dtype)
    if phase is not None:
        inputs["phase"] = phases([size[axis] for axis in phase], random).to(device, dtype)
    state_dtype = accumulation(dtype if phase is None and not complex_qk else dtype.to_complex())
    state = normal((batch, heads, d_key, d_value), random, state_dtype)
    inputs["state"] = state.to(device, state_dtype)
    if bonus:
        inputs["bonus"] = normal((heads, d_key), random, dtype).to(device, dtype)
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
    """Return q, k, v, beta, log_decay and state for `linrec.ops.delta_rule`, with keys of norm 1.

    Args:
        batch: batch size b.
        time: number of steps t.
        heads: number of heads h.
        d_key: key channels per head.
        d_value: value channels per head.
        dtype: dtype of all inputs except the state, which has the accumulation dtype.
        log_decay: axes of log_decay: "bthk", "bth", "hk" or "h"; None for no decay.
        largest_beta: upper bound of beta, which is uniform from 0; above 1, eigenvalues may be negative.
        seed: random seed.
        device: device of the tensors.

    Example:
        >>> inputs = delta_rule_inputs(2, 5, 3, 4, 6, log_decay="h")
        >>> inputs["log_decay"].shape, inputs["beta"].shape, inputs["state"].shape
        (torch.Size([3]), torch.Size([2, 5, 3]), torch.Size([2, 3, 4, 6]))
    """
    shape = (batch, time, heads, d_key, d_value)
    inputs = gate_loop_inputs(*shape, dtype=dtype, log_decay=log_decay, phase=None, seed=seed, device=device)
    del inputs["phase"]
    random = generator(seed + 1)
    keys = torch.nn.functional.normalize(normal(shape[:4], random, torch.float64), dim=-1)
    beta = torch.rand(shape[:3], generator=random, dtype=torch.float64) * largest_beta
    return inputs | {"k": keys.to(device, dtype), "beta": beta.to(device, dtype)}


def generalized_delta_rule_inputs(
    batch: int,
    time: int,
    heads: int,
    d_key: int,
    d_value: int,
    *,
    dtype: torch.dtype = torch.float32,
    log_decay: str | None = "bthk",
    seed: int = 0,
    device: str = "cpu",
) -> dict[str, Tensor | None]:
    """Return q, k, v, r, w, log_decay and state for `linrec.ops.generalized_delta_rule`.

    They are as in RWKV-7: r has norm 1, and w is r with a factor from 0 to 1 for each channel.

    Args:
        batch: batch size b.
        time: number of steps t.
        heads: number of heads h.
        d_key: key channels per head.
        d_value: value channels per head.
        dtype: dtype of all inputs except the state, which has the accumulation dtype.
        log_decay: axes of log_decay: "bthk", "bth", "hk" or "h"; None for no decay.
        seed: random seed.
        device: device of the tensors.

    Example:
        >>> inputs = generalized_delta_rule_inputs(2, 5, 3, 4, 6, log_decay="h")
        >>> inputs["log_decay"].shape, inputs["r"].shape, inputs["state"].shape
        (torch.Size([3]), torch.Size([2, 5, 3, 4]), torch.Size([2, 3, 4, 6]))
    """
    shape = (batch, time, heads, d_key, d_value)
    inputs = delta_rule_inputs(*shape, dtype=dtype, log_decay=log_decay, seed=seed, device=device)
    del inputs["beta"]
    random = generator(seed + 2)
    r = torch.nn.functional.normalize(normal(shape[:4], random, torch.float64), dim=-1)
    rates = torch.rand(shape[:4], generator=random, dtype=torch.float64)
    return inputs | {"r": r.to(device, dtype), "w": (rates * r).to(device, dtype)}


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
    """Return x, dt, A, B, C, D and state for `linrec.ops.selective_scan`.

    Step sizes are between 0.01 and 1, and entries of A between -10 and -0.1.

    Args:
        batch: batch size b.
        time: number of steps t.
        channels: number of channels c.
        d_state: state size n per channel.
        groups: number of groups of B and C; None omits the axis of groups.
        skip: whether to return a D.
        dtype: dtype of all inputs except the state, which has the accumulation dtype.
        seed: random seed.
        device: device of the tensors.

    Example:
        >>> inputs = selective_scan_inputs(2, 5, 6, 4, groups=3, skip=False)
        >>> inputs["A"].shape, inputs["B"].shape, inputs["D"]
        (torch.Size([6, 4]), torch.Size([2, 5, 3, 4]), None)
    """
    random = generator(seed)
    shared = (batch, time, d_state) if groups is None else (batch, time, groups, d_state)
    inputs: dict[str, Tensor | None] = {
        "x": normal((batch, time, channels), random, dtype),
        "dt": log_uniform((batch, time, channels), random, 0.01, 1.0),
        "A": -log_uniform((channels, d_state), random, 0.1, 10.0),
        "B": normal(shared, random, dtype),
        "C": normal(shared, random, dtype) / d_state**0.5,
        "D": normal((channels,), random, dtype) if skip else None,
    }
    inputs = {name: x if x is None else x.to(device, dtype) for name, x in inputs.items()}
    state = normal((batch, channels, d_state), random, dtype)
    return inputs | {"state": state.to(device, accumulation(dtype))}
