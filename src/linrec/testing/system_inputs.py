"""Inputs for tests of operators that do not change over time: convolutions and state-space models."""

import torch
from torch import Tensor

from linrec.ops.core.precision import accumulation
from linrec.testing.draws import generator, log_decays, normal, phases

__all__ = [
    "dense_ssm_inputs",
    "diagonal_ssm_inputs",
    "dplr_ssm_inputs",
    "long_conv_inputs",
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
    wide = accumulation(dtype)
    each = () if shared else (channels,)
    # a rotation of states that fade
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
    wide = accumulation(dtype).to_complex()
    shape = (channels, states)
    a = torch.polar(torch.exp(log_decays(shape, random)), phases(shape, random))
    # directions of the state, orthonormal as real numbers, of which some share is taken away or turned round
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
