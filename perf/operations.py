"""The operations: their inputs, the call that is timed, the bytes that it must move."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from linrec.ops import gate_loop, long_conv, scan, selective_scan
from perf.rows import DTYPES, Row, Shape

SHORTEST, LONGEST = 10.0, 1000.0
"""Range of the time scales 1 / (1 - |a|) that decays are drawn from: |a| from 0.9 to 0.999."""

STATES = 16
"""States of a channel in `selective`, as in the models of Mamba's paper."""

SHORTEST_STEP, LONGEST_STEP = 0.001, 0.1
"""Range of the step sizes dt, with which Mamba's training starts."""


@dataclass(frozen=True)
class Operation:
    """One operation of any size.

    Args:
        inputs: makes the tensors that it takes, from shape, dtype, device and a generator.
        run: maps them, and `backend=`, to y.
        tensors: how many tensors of the size of the last input each pass moves at least: what is read once
            and what is written once, forward, and forward and backward together.
        others: the same of the size of the first input, where that counts and is another one.
    """

    inputs: Callable[[Shape, torch.dtype, torch.Generator], tuple[Tensor, ...]]
    run: Callable[..., Tensor]
    tensors: tuple[int, int]
    others: tuple[int, int] = (0, 0)

    def fewest_bytes(self, inputs: tuple[Tensor, ...]) -> tuple[int, int]:
        """Return the least that forward, and forward and backward, must read and write."""
        first, last = (x.numel() * x.element_size() for x in (inputs[0], inputs[-1]))
        (forward, both), others = self.tensors, self.others
        return forward * last + others[0] * first, both * last + others[1] * first


def make(row: Row, device: torch.device, seed: int = 0) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return the inputs of a row, and the gradient dy that its backward pass starts from."""
    random = torch.Generator(device).manual_seed(seed)
    inputs = OPERATIONS[row.operation].inputs(row.shape, DTYPES[row.dtype], random)
    return inputs, normal(tuple(inputs[-1].shape), DTYPES[row.dtype], random)


def scan_inputs(shape: Shape, dtype: torch.dtype, random: torch.Generator) -> tuple[Tensor, ...]:
    """Return a and x (b, t, c); a complex a has any phase."""
    a = decays(shape, dtype.to_real(), random)
    if dtype.is_complex:
        a = torch.polar(a, _phases(shape, random))
    return a, normal(shape, dtype, random)


def run_scan(a: Tensor, x: Tensor, *, backend: str = "auto") -> Tensor:
    """y_t = a_t y_{t-1} + x_t."""
    return scan(a, x, backend=backend)[0]


def gate_loop_inputs(shape: Shape, dtype: torch.dtype, random: torch.Generator) -> tuple[Tensor, ...]:
    """Return q, k, v, log_decay and phase (b, t, h, 1): the max-headed GateLoop, one channel per head."""
    size = (*shape, 1)
    q, k, v = (normal(size, dtype, random) for _ in range(3))
    return q, k, v, decays(size, torch.float32, random).log().to(dtype), _phases(size, random).to(dtype)


def run_gate_loop(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, phase: Tensor, *, backend: str = "auto"
) -> Tensor:
    """h_t = exp(log_decay_t + i phase_t) h_{t-1} + k_t v_t, y_t = Re(q_t h_t)."""
    return gate_loop(q, k, v, log_decay, phase, backend=backend)[0]


def selective_inputs(shape: Shape, dtype: torch.dtype, random: torch.Generator) -> tuple[Tensor, ...]:
    """Return dt (b, t, c), A (c, n), B and C (b, t, n), D (c,) and x (b, t, c) of a Mamba layer, n = 16."""
    batch, time, channels = shape
    position = torch.rand(shape, device=random.device, generator=random)
    dt = SHORTEST_STEP * (LONGEST_STEP / SHORTEST_STEP) ** position
    A = -torch.arange(1, STATES + 1, dtype=torch.float32, device=random.device).repeat(channels, 1)
    B, C = (normal((batch, time, STATES), dtype, random) for _ in range(2))
    D = torch.ones(channels, device=random.device)
    return dt.to(dtype), A, B, C / STATES**0.5, D, normal(shape, dtype, random)


def run_selective(
    dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, x: Tensor, *, backend: str = "auto"
) -> Tensor:
    """h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t, y_t = C_t h_t + D x_t."""
    return selective_scan(x, dt, A, B, C, D, backend=backend)[0]


def long_conv_inputs(shape: Shape, dtype: torch.dtype, random: torch.Generator) -> tuple[Tensor, ...]:
    """Return K (c, t) in float32, as models make it in autocast too, and u (b, t, c)."""
    _, time, channels = shape
    kernel = normal((channels, time), torch.float32, random) / time**0.5
    return kernel, normal(shape, dtype, random)


def run_long_conv(kernel: Tensor, u: Tensor, *, backend: str = "auto") -> Tensor:
    """y = K * u."""
    return long_conv(u, kernel, backend=backend)[0]


OPERATIONS = {
    # forward reads a, x and writes y; backward reads a, y, dy and writes da, dx
    "scan": Operation(scan_inputs, run_scan, (3, 3 + 5)),
    # forward reads five and writes y; backward reads the five and dy, and writes five gradients
    "gate_loop": Operation(gate_loop_inputs, run_gate_loop, (6, 6 + 11)),
    # forward reads dt, x and writes y; backward reads dt, x, dy and writes their gradients; the rest is small
    "selective": Operation(selective_inputs, run_selective, (3, 3 + 5)),
    # forward reads u, K and writes y; backward reads u, K, dy and writes du, dK
    "conv": Operation(long_conv_inputs, run_long_conv, (2, 2 + 3), others=(1, 1 + 2)),
}


def outputs_and_gradients(
    function: Callable[..., Tensor], inputs: tuple[Tensor, ...], dy: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return y and the gradients of all inputs."""
    leaves = tuple(x.detach().requires_grad_() for x in inputs)
    y = function(*leaves)
    return y.detach(), torch.autograd.grad(y, leaves, dy)


def normal(shape: tuple[int, ...], dtype: torch.dtype, random: torch.Generator) -> Tensor:
    return torch.randn(shape, dtype=dtype, device=random.device, generator=random)


def decays(shape: tuple[int, ...], dtype: torch.dtype, random: torch.Generator) -> Tensor:
    # uniform on the logarithm of the time scale: models have as many slow channels as fast ones
    position = torch.rand(shape, device=random.device, generator=random)
    decay = 1 - 1 / (SHORTEST * (LONGEST / SHORTEST) ** position)
    # bfloat16 knows no number between 0.996 and 1, and 1 would be no decay
    return decay.clamp(max=1 - torch.finfo(dtype).eps / 2).to(dtype)


def _phases(shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    return (torch.rand(shape, device=random.device, generator=random) * 2 - 1) * torch.pi
