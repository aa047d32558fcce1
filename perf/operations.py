"""The operations of `perf ops`: their inputs, the call to time, the bytes that it moves, and their check.

The operation runs at its full size. Of its results the first and the last batch row and eight channels,
evenly spread from the first to the last, are compared with the float64 reference over all time steps.

The reference is a loop over time, too slow at a length of a million. A scan's time is therefore cut into
windows that the reference runs side by side. Each window starts from the operation's own output at the step
before it, and from the operation's gradient at the step after it. When every window is right given its
neighbours, all of them are.

A selective scan sums the gradients of B and C over all channels, and those of A and D over all rows; a long
convolution sums the gradient of K over all rows. Both are compared as a whole with their torch backend in
float64, which the tests compare with the reference.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from linrec.ops import gate_loop, long_conv, scan, selective_scan
from perf import engine
from perf.command import Named
from perf.engine import BOTH, DTYPES, FORWARD, Calls, Tensors

Shape: TypeAlias = tuple[int, ...]

SHORTEST, LONGEST = 10.0, 1000.0
"""Range of the time scales 1 / (1 - |a|) of the decays: |a| from 0.9 to 0.999."""

STATES = 16
"""States of a channel in `selective`, as in the models of Mamba's paper."""

SHORTEST_STEP, LONGEST_STEP = 0.001, 0.1
"""Range of the step sizes dt with which Mamba's training starts."""

PARTS = "first and last batch row, 8 channels, every step; outputs and all gradients"
CHANNELS = 8
WINDOW = 256


@dataclass(frozen=True)
class Row(Named):
    """One operation at one size.

    Args:
        operation: name of the operation.
        size: its sizes.
        dtype: a key of `DTYPES`.
        targets: percent of the yardstick's rate for each pass; None where no speed is asked.
    """

    operation: str
    size: tuple[int, ...]
    dtype: str
    targets: tuple[float | None, float | None] = (None, None)

    template = "{row.operation}-{row.dtype}-{row.sizes}"

    @property
    def sizes(self) -> str:
        return "x".join(map(str, self.size))


@dataclass(frozen=True)
class Operation:
    """One operation of any size.

    Args:
        inputs: makes the input tensors from shape, dtype and a generator on the device.
        run: maps the inputs, and `backend=`, to y.
        tensors: the fewest tensors of the last input's size that each pass moves, forward, and forward and
            backward together: each input read once, each output written once.
        others: the same for tensors of the first input's size, if that differs and counts.
        whole: the check's description and the torch backend's mode, for operations compared as a whole.
    """

    inputs: Callable[[Shape, torch.dtype, torch.Generator], Tensors]
    run: Callable[..., Tensor]
    tensors: tuple[int, int]
    others: tuple[int, int] = (0, 0)
    whole: tuple[str, str] | None = None

    @property
    def checked(self) -> str:
        return PARTS if self.whole is None else self.whole[0]

    def fewest_bytes(self, inputs: Tensors) -> dict[str, int]:
        first, last = (x.numel() * x.element_size() for x in (inputs[0], inputs[-1]))
        passes = zip((FORWARD, BOTH), self.tensors, self.others, strict=True)
        return {name: tensors * last + others * first for name, tensors, others in passes}


def make(row: Row, device: torch.device) -> tuple[Tensors, Tensor]:
    """Return the inputs of a row of (batch, time, channels), and the gradient dy of its output."""
    random, dtype = torch.Generator(device).manual_seed(0), DTYPES[row.dtype]
    inputs = OPERATIONS[row.operation].inputs(row.size, dtype, random)
    return inputs, normal(tuple(inputs[-1].shape), dtype, random)


def calls_of(operation: str, inputs: Tensors, dy: Tensor) -> Calls:
    """Return linrec's calls, with their check and the bytes that they move."""
    found = OPERATIONS[operation]
    return engine.calls_of(
        found.run,
        inputs,
        dy,
        check=partial(check, operation, inputs, dy),
        n_bytes=found.fewest_bytes(inputs),
        dtype=inputs[-1].dtype,
    )


def scan_inputs(shape: Shape, dtype: torch.dtype, random: torch.Generator) -> Tensors:
    """Return a and x (b, t, c); a complex a has any phase."""
    a = decays(shape, dtype.to_real(), random)
    if dtype.is_complex:
        a = torch.polar(a, _phases(shape, random))
    return a, normal(shape, dtype, random)


def run_scan(a: Tensor, x: Tensor, **how: Any) -> Tensor:
    """y_t = a_t y_{t-1} + x_t."""
    return scan(a, x, **how)[0]


def gate_loop_inputs(shape: Shape, dtype: torch.dtype, random: torch.Generator) -> Tensors:
    """Return q, k, v, log_decay and phase (b, t, h, 1): the max-headed GateLoop, one channel per head."""
    size = (*shape, 1)
    q, k, v = (normal(size, dtype, random) for _ in range(3))
    return q, k, v, decays(size, torch.float32, random).log().to(dtype), _phases(size, random).to(dtype)


def run_gate_loop(*inputs: Tensor, **how: Any) -> Tensor:
    """h_t = exp(log_decay_t + i phase_t) h_{t-1} + k_t v_t, y_t = Re(q_t h_t)."""
    return gate_loop(*inputs, **how)[0]


def selective_inputs(shape: Shape, dtype: torch.dtype, random: torch.Generator) -> Tensors:
    """Return dt (b, t, c), A (c, n), B and C (b, t, n), D (c,) and x (b, t, c) of a Mamba layer, n = 16."""
    batch, time, channels = shape
    position = torch.rand(shape, device=random.device, generator=random)
    dt = SHORTEST_STEP * (LONGEST_STEP / SHORTEST_STEP) ** position
    A = -torch.arange(1, STATES + 1, dtype=torch.float32, device=random.device).repeat(channels, 1)
    B, C = (normal((batch, time, STATES), dtype, random) for _ in range(2))
    D = torch.ones(channels, device=random.device)
    return dt.to(dtype), A, B, C / STATES**0.5, D, normal(shape, dtype, random)


def run_selective(*inputs: Tensor, **how: Any) -> Tensor:
    """h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t, y_t = C_t h_t + D x_t."""
    *parameters, x = inputs
    return selective_scan(x, *parameters, **how)[0]


def long_conv_inputs(shape: Shape, dtype: torch.dtype, random: torch.Generator) -> Tensors:
    """Return K (c, t) in float32, as models make it in autocast too, and u (b, t, c)."""
    _, time, channels = shape
    kernel = normal((channels, time), torch.float32, random) / time**0.5
    return kernel, normal(shape, dtype, random)


def run_long_conv(kernel: Tensor, u: Tensor, **how: Any) -> Tensor:
    """y = K * u."""
    return long_conv(u, kernel, **how)[0]


CHUNKWISE = "outputs and all gradients, with the chunkwise torch mode in float64"
CONVOLUTION = "outputs and all gradients, with the convolution by torch in float64"
# the tensors of a pass: forward reads the inputs and writes y; backward reads most of them and dy, and writes
# their gradients
OPERATIONS = {
    "scan": Operation(scan_inputs, run_scan, (3, 3 + 5)),
    "gate_loop": Operation(gate_loop_inputs, run_gate_loop, (6, 6 + 11)),
    # dt, x and y; A, B, C and D are small
    "selective": Operation(selective_inputs, run_selective, (3, 3 + 5), whole=(CHUNKWISE, "chunkwise")),
    # u and y, and beside them K
    "conv": Operation(long_conv_inputs, run_long_conv, (2, 2 + 3), (1, 1 + 2), (CONVOLUTION, "convolution")),
}


def check(operation: str, inputs: Tensors, dy: Tensor, run: Callable[..., Tensor] | None = None) -> None:
    """Raise AssertionError if results of an operation, or of `run`, differ from the float64 reference."""
    made = OPERATIONS[operation]
    found = engine.outputs_and_gradients(run or made.run, inputs, dy)
    dtype = found[0].dtype
    if made.whole is not None:
        wide = tuple(x.double() for x in inputs)
        right = partial(made.run, mode=made.whole[1], backend="torch")
        expected = engine.outputs_and_gradients(right, wide, dy.double())
    else:
        found, (*few, few_dy) = tuple(map(cut, found)), map(cut, (*inputs, dy))
        if operation == "scan":
            expected = _expected_scan(few[0], few[1], few_dy, found[0], found[2])
        else:
            right = partial(made.run, backend="reference")
            expected = engine.outputs_and_gradients(right, tuple(few), few_dy)
    engine.assert_all_agree(engine.gradient_names(inputs), found, expected, dtype)


def cut(tensor: Tensor, n: int = CHANNELS) -> Tensor:
    """Return the first and last batch row, and n channels or heads, in double precision."""
    batch, _, channels = tensor.shape[:3]
    rows = torch.tensor(sorted({0, batch - 1}), device=tensor.device)
    spread = torch.linspace(0, channels - 1, min(n, channels), device=tensor.device).long()
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    return tensor.index_select(0, rows).index_select(2, spread).to(wide)


def _expected_scan(a: Tensor, x: Tensor, dy: Tensor, y: Tensor, dx: Tensor) -> Tensors:
    size = math.gcd(a.shape[1], WINDOW)
    nothing = torch.zeros_like(y[:, :1])
    before = torch.cat([nothing, y[:, size - 1 : -1 : size]], 1).flatten(0, 1)
    after = torch.cat([(a.conj() * dx)[:, size::size], nothing], 1).flatten(0, 1)
    windows = [tensor.unflatten(1, (-1, size)).flatten(0, 1) for tensor in (a, x, dy)]
    leaves = [tensor.requires_grad_() for tensor in windows[:2]]
    outputs = scan(*leaves, state=before, backend="reference")
    gradients = torch.autograd.grad(outputs, leaves, (windows[2], after))
    return tuple(tensor.detach().reshape(a.shape) for tensor in (outputs[0], *gradients))


def normal(shape: tuple[int, ...], dtype: torch.dtype, random: torch.Generator) -> Tensor:
    return torch.randn(shape, dtype=dtype, device=random.device, generator=random)


def decays(shape: tuple[int, ...], dtype: torch.dtype, random: torch.Generator) -> Tensor:
    """Return decays of time scales from `SHORTEST` to `LONGEST`."""
    # uniform on the logarithm of the time scale: models have as many slow channels as fast ones
    position = torch.rand(shape, device=random.device, generator=random)
    decay = 1 - 1 / (SHORTEST * (LONGEST / SHORTEST) ** position)
    # bfloat16 has no number between 0.996 and 1, and 1 is no decay
    return decay.clamp(max=1 - torch.finfo(dtype).eps / 2).to(dtype)


def _phases(shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    return (torch.rand(shape, device=random.device, generator=random) * 2 - 1) * torch.pi
