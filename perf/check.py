"""Whether an operation computes what it should, forward and backward: what is wrong is not timed.

The operation runs at its full size. Of its results the first and the last batch row and eight channels,
evenly spread from the first to the last, are compared with the float64 reference over all time steps.

The reference is a loop over time, which nobody waits for at a length of a million. A scan's time is therefore
cut into windows that the reference runs side by side, each from the output that the operation itself has at
the step before the window, and with the gradient that it has at the step after. When every window is right
given its neighbours, all of them are.

A selective scan sums the gradients of B and C over all channels, and those of A and D over all rows; a long
convolution that of K over all rows. Both are compared as a whole with their torch backend in float64, which
the tests compare with the reference.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from linrec.ops import gate_loop, long_conv, scan, selective_scan
from linrec.testing import assert_agree
from perf.operations import outputs_and_gradients

PARTS = "first and last batch row, 8 channels, every step; outputs and all gradients"
CHECKED = {
    "scan": PARTS,
    "gate_loop": PARTS,
    "selective": "outputs and all gradients, with the chunkwise torch mode in float64",
    "conv": "outputs and all gradients, with the convolution by torch in float64",
}
CHANNELS = 8
WINDOW = 256


def check(operation: str, run: Callable[..., Tensor], inputs: tuple[Tensor, ...], dy: Tensor) -> None:
    """Compare an operation with the float64 reference, outputs and gradients.

    Raises:
        AssertionError: they differ by more than the tolerance of the dtype.
    """
    y, gradients = outputs_and_gradients(run, inputs, dy)
    compared = _cut if CHECKED[operation] == PARTS else torch.Tensor.double
    cut = [compared(tensor) for tensor in (y, *gradients)]
    expected = _EXPECTED[operation](*map(compared, inputs), compared(dy), *cut)
    names = ("y", *(f"gradient of input {number}" for number in range(1, len(cut))))
    for name, mine, right in zip(names, cut, expected, strict=True):
        assert_agree(mine, right, name, dtype=y.dtype)


def _cut(tensor: Tensor) -> Tensor:
    batch, _, channels = tensor.shape[:3]
    rows = torch.tensor(sorted({0, batch - 1}), device=tensor.device)
    spread = torch.linspace(0, channels - 1, min(CHANNELS, channels), device=tensor.device).long()
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    return tensor.index_select(0, rows).index_select(2, spread).to(wide)


def _expected_scan(a: Tensor, x: Tensor, dy: Tensor, y: Tensor, da: Tensor, dx: Tensor) -> list[Tensor]:
    size = math.gcd(a.shape[1], WINDOW)
    nothing = torch.zeros_like(y[:, :1])
    before = torch.cat([nothing, y[:, size - 1 : -1 : size]], 1).flatten(0, 1)
    after = torch.cat([(a.conj() * dx)[:, size::size], nothing], 1).flatten(0, 1)
    windows = [tensor.unflatten(1, (-1, size)).flatten(0, 1) for tensor in (a, x, dy)]
    leaves = [tensor.requires_grad_() for tensor in windows[:2]]
    outputs = scan(*leaves, state=before, backend="reference")
    gradients = torch.autograd.grad(outputs, leaves, (windows[2], after))
    return [tensor.detach().reshape(a.shape) for tensor in (outputs[0], *gradients)]


def _expected_gate_loop(*tensors: Tensor) -> list[Tensor]:
    inputs, dy = tensors[:5], tensors[5]
    y, gradients = outputs_and_gradients(lambda *xs: gate_loop(*xs, backend="reference")[0], inputs, dy)
    return [y, *gradients]


def _expected_selective(*tensors: Tensor) -> list[Tensor]:
    def run(dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, x: Tensor) -> Tensor:
        return selective_scan(x, dt, A, B, C, D, mode="chunkwise", backend="torch")[0]

    y, gradients = outputs_and_gradients(run, tensors[:6], tensors[6])
    return [y, *gradients]


def _expected_long_conv(*tensors: Tensor) -> list[Tensor]:
    def run(kernel: Tensor, u: Tensor) -> Tensor:
        return long_conv(u, kernel, mode="convolution", backend="torch")[0]

    y, gradients = outputs_and_gradients(run, tensors[:2], tensors[2])
    return [y, *gradients]


_EXPECTED: dict[str, Callable[..., list[Tensor]]] = {
    "scan": _expected_scan,
    "gate_loop": _expected_gate_loop,
    "selective": _expected_selective,
    "conv": _expected_long_conv,
}
