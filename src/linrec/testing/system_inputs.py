"""Test inputs for convolutions, state-space models and nonlinear recurrences."""

from typing import Any

import torch
from torch import Tensor

from linrec.ops.core.precision import accumulation
from linrec.testing.draws import generator, log_decays, normal, phases

__all__ = [
    "dense_ssm_inputs",
    "diagonal_ssm_inputs",
    "dplr_ssm_inputs",
    "long_conv_inputs",
    "nonlinear_scan_inputs",
    "short_conv_inputs",
]


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
    """Return x, weight, bias and state for `linrec.ops.short_conv`.

    Args:
        batch: batch size b.
        time: number of steps t.
        channels: number of channels c.
        width: taps per channel.
        dtype: dtype of all inputs except the state, which has the accumulation dtype.
        seed: random seed.
        device: device of the tensors.

    Example:
        >>> {name: tuple(tensor.shape) for name, tensor in short_conv_inputs(2, 5, 3).items()}
        {'x': (2, 5, 3), 'weight': (3, 4), 'bias': (3,), 'state': (2, 3, 3)}
    """
    random = generator(seed)
    shapes = {"x": (batch, time, channels), "weight": (channels, width), "bias": (channels,)}
    inputs = {name: normal(shape, random, dtype).to(device, dtype) for name, shape in shapes.items()}
    state = normal((batch, width - 1, channels), random, dtype)
    return inputs | {"state": state.to(device, accumulation(dtype))}


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
    """Return u, kernel and state for `linrec.ops.long_conv`.

    Args:
        batch: batch size b.
        time: number of steps t.
        channels: number of channels d.
        taps: length of the kernel; None uses the largest allowed length, up to 40.
        past: number of steps in the state.
        dtype: dtype of all inputs.
        seed: random seed.
        device: device of the tensors.

    Example:
        >>> {name: tuple(tensor.shape) for name, tensor in long_conv_inputs(2, 4, 3).items()}
        {'u': (2, 4, 3), 'kernel': (3, 9), 'state': (2, 5, 3)}
    """
    random = generator(seed)
    taps = min(time + past, 40) if taps is None else taps
    shapes = {"u": (batch, time, channels), "kernel": (channels, taps), "state": (batch, past, channels)}
    return {name: normal(shape, random, dtype).to(device, dtype) for name, shape in shapes.items()}


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
    """Return u, a, b, c and state for `linrec.ops.diagonal_ssm`, with time scales from 1.05 to 1,000 steps.

    Args:
        batch: batch size b.
        time: number of steps t.
        channels: number of channels d.
        states: state size n per channel.
        dtype: dtype of u; all other inputs have the accumulation dtype or its complex counterpart.
        is_complex: whether all inputs except u are complex.
        shared: whether a and b are the same for all channels.
        seed: random seed.
        device: device of the tensors.

    Example:
        >>> {name: tuple(tensor.shape) for name, tensor in diagonal_ssm_inputs(2, 5, 3, 4).items()}
        {'u': (2, 5, 3), 'a': (3, 4), 'b': (3, 4), 'c': (3, 4), 'state': (2, 3, 4)}
    """
    random = generator(seed)
    wide = accumulation(dtype.to_complex() if is_complex else dtype)
    shape = (channels, states)
    rows = (1, states) if shared else shape
    a = torch.exp(log_decays(rows, random))
    inputs = {
        "a": torch.polar(a, phases(rows, random)) if is_complex else a,
        "b": normal(rows, random, wide),
        "c": normal(shape, random, wide) / states**0.5,
        "state": normal((batch, *shape), random, wide),
    }
    u = normal((batch, time, channels), random, dtype).to(device, dtype)
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
    """Return u, A, B, C and state for `linrec.ops.dense_ssm`; A never increases the norm of a state.

    Args:
        batch: batch size b.
        time: number of steps t.
        channels: number of channels d.
        states: state size n per channel.
        outputs: number of rows m of C; None omits C.
        shared: whether A, B and C are the same for all channels.
        dtype: dtype of u; all other inputs have the accumulation dtype.
        seed: random seed.
        device: device of the tensors.

    Example:
        >>> inputs = dense_ssm_inputs(2, 5, 3, 4, 6)
        >>> inputs["A"].shape, inputs["C"].shape, inputs["state"].shape
        (torch.Size([3, 4, 4]), torch.Size([3, 6, 4]), torch.Size([2, 3, 4]))
    """
    random = generator(seed)
    wide = accumulation(dtype)
    each = () if shared else (channels,)
    # a rotation times decays
    rotation, _ = torch.linalg.qr(normal((*each, states, states), random, torch.float64))
    inputs: dict[str, Tensor | None] = {
        "A": rotation * torch.exp(log_decays((*each, 1, states), random)),
        "B": normal((*each, states), random, wide),
        "C": None if outputs is None else normal((*each, outputs, states), random, wide) / states**0.5,
        "state": normal((batch, channels, states), random, wide),
    }
    inputs = {name: x if x is None else x.to(device, wide) for name, x in inputs.items()}
    return {"u": normal((batch, time, channels), random, dtype).to(device, dtype)} | inputs


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
    """Return u, a, p, q, b, c and state for `linrec.ops.dplr_ssm`; no transition increases a state's norm.

    Args:
        batch: batch size b.
        time: number of steps t.
        channels: number of channels d.
        states: state size n per channel.
        rank: rank r, at most 2 n.
        dtype: dtype of u; all other inputs have the complex counterpart of its accumulation dtype.
        seed: random seed.
        device: device of the tensors.

    Example:
        >>> inputs = dplr_ssm_inputs(2, 5, 3, 4)
        >>> inputs["a"].shape, inputs["p"].shape, inputs["state"].shape
        (torch.Size([3, 4]), torch.Size([3, 4, 1]), torch.Size([2, 3, 4]))
    """
    random = generator(seed)
    wide = accumulation(dtype).to_complex()
    shape = (channels, states)
    a = torch.polar(torch.exp(log_decays(shape, random)), phases(shape, random))
    # orthonormal directions of the state, as real vectors; a random share of each is removed or reflected
    directions, _ = torch.linalg.qr(normal((channels, 2 * states, rank), random, torch.float64))
    v = torch.complex(directions[:, :states], directions[:, states:])
    share = 2 * torch.rand(channels, 1, rank, generator=random, dtype=torch.float64)
    inputs = {
        "a": a,
        "p": share * a[..., None] * v,
        "q": v.conj().resolve_conj(),
        "b": normal(shape, random, wide),
        "c": normal(shape, random, wide) / states**0.5,
        "state": normal((batch, *shape), random, wide),
    }
    u = normal((batch, time, channels), random, dtype).to(device, dtype)
    return {"u": u} | {name: tensor.to(device, wide) for name, tensor in inputs.items()}


def nonlinear_scan_inputs(
    batch: int,
    time: int,
    channels: int,
    *,
    pairs: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    device: str = "cpu",
) -> dict[str, Any]:
    """Return cell, x, parameters and state for `linrec.ops.nonlinear_scan`.

    The cell contracts, so that Newton's iterations converge.

    Args:
        batch: batch size b.
        time: number of steps t.
        channels: number of channels c.
        pairs: whether the state is (b, c, 2), pairs that do not see each other, instead of (b, c).
        dtype: dtype of x; the parameter and the state have the accumulation dtype.
        seed: random seed.
        device: device of the tensors.

    Example:
        >>> inputs = nonlinear_scan_inputs(2, 5, 3)
        >>> [tuple(inputs[name].shape) for name in ("x", "parameters", "state")]
        [(2, 5, 3), (3, 3), (2, 3)]
    """
    random, wide = generator(seed), accumulation(dtype)
    of_step = (channels, 2) if pairs else (channels,)
    x = normal((batch, time, *of_step), random, dtype)
    W = 0.7 * torch.linalg.qr(normal((of_step[-1], of_step[-1]), random, torch.float64)).Q
    state = normal((batch, *of_step), random, dtype)
    tensors = {"x": x.to(device, dtype), "parameters": W.to(device, wide), "state": state.to(device, wide)}
    return {"cell": _cell, **tensors}


def _cell(h: Tensor, x: Tensor, W: Tensor) -> Tensor:
    return torch.tanh(x + h @ W.mT) - 0.2 * h.flip(-1)
