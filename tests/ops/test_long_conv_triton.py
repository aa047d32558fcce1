"""The Triton kernels of long_conv: on a GPU where there is one, else interpreted on small shapes."""

import pytest
import torch

from linrec.ops import dense_ssm, diagonal_ssm, dplr_ssm, long_conv
from linrec.ops.core import backends
from linrec.ops.core.call import handling
from linrec.ops.long_conv import BACKENDS, triton
from linrec.ops.long_conv import torch as in_torch
from linrec.ops.long_conv.torch import Convolution
from linrec.testing import (
    assert_agree,
    check_operator,
    dense_ssm_inputs,
    diagonal_ssm_inputs,
    dplr_ssm_inputs,
    generator,
    long_conv_inputs,
    reset_mask,
)
from tests.tiers import thorough, tiered

from .opcheck import check_operators
from .triton_process import DEVICE, INTERPRETED, on_a_gpu, on_either, quiet

pytest.importorskip("triton")
pytestmark = quiet
PAIR = {"mode": "convolution", "backend": "triton"}


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=generator(seed), dtype=dtype).to(DEVICE)


def agree(*shape, dtype=torch.float32, options=None, **arguments):
    inputs = long_conv_inputs(*shape, dtype=dtype, device=DEVICE, **arguments)
    check_operator(long_conv, inputs, **PAIR, dtype=dtype, options=options)


@on_either
@pytest.mark.parametrize("time", [1, 2, 31, 33, 100])
@pytest.mark.parametrize("dtype", tiered([torch.float32], rare=[torch.float64, torch.bfloat16]))
def test_lengths_around_tiles(time, dtype):
    agree(2, time, 3, dtype=dtype)


@on_either
@pytest.mark.parametrize("taps", [1, 5, 40])
def test_short_kernels_and_a_state(taps):
    agree(2, 30, triton.CHANNELS + 1, taps, past=10)


@on_either
def test_documents_are_refused_and_auto_takes_torch(monkeypatch):
    inputs = long_conv_inputs(2, 30, 3, device=DEVICE) | {"reset": reset_mask(2, 30, rate=0.1, device=DEVICE)}
    with pytest.raises(ValueError, match=r"'triton'\) of `long_conv` takes calls without `reset`"):
        long_conv(**inputs, **PAIR)
    monkeypatch.setattr(backends, "usable", lambda backend, device: True)
    expected = long_conv(**inputs, mode="convolution", backend="torch")
    assert_agree(long_conv(**inputs), expected)


@on_either
def test_the_kernel_keeps_what_its_declaration_promises():
    given = Convolution(draw(2, 10, 3), draw(3, 7, seed=1), None)
    check_operators(triton.convolution, given)


@on_either
def test_more_frequencies_than_a_program_has(monkeypatch):
    monkeypatch.setattr(triton, "FREQUENCIES", 16)
    agree(3, 70, 2)


@on_either
# some channels of all rows, two rows of one channel, one row of one channel
@pytest.mark.parametrize("alive", tiered([1], [8], [100]))
def test_pieces_make_no_difference(monkeypatch, alive):
    inputs = draw(3, 40, 9).requires_grad_(), draw(9, 40, seed=1).requires_grad_()
    dy = draw(3, 40, 9, seed=2)

    def outputs_and_gradients(**options):
        y, _ = long_conv(*inputs, **options)
        return y, *torch.autograd.grad(y, inputs, dy)

    expected = outputs_and_gradients(mode="convolution", backend="torch")
    monkeypatch.setattr(in_torch, "SMALL", 0)
    monkeypatch.setattr(in_torch, "ALIVE", alive)
    assert_agree(outputs_and_gradients(**PAIR), expected)


@on_either
def test_vmap_runs_the_kernels_once_for_all(monkeypatch):
    u, kernels, calls = draw(2, 20, 3), draw(4, 3, 20, seed=1), []
    forward = triton.KERNELS.multiply

    class Counted:
        def __getitem__(self, grid):
            calls.append(grid)
            return forward[grid]

    monkeypatch.setattr(triton.KERNELS, "multiply", Counted(), raising=False)
    y = torch.func.vmap(lambda kernel: long_conv(u, kernel, **PAIR)[0])(kernels)
    assert len(calls) == 1
    expected = [long_conv(u, kernel, mode="convolution", backend="torch")[0] for kernel in kernels]
    assert_agree(y, torch.stack(expected))


@on_either
def test_other_layouts_of_memory():
    u, kernel = draw(3, 2, 20).permute(1, 2, 0), draw(20, 3, seed=1).T
    expected, _ = long_conv(u, kernel, mode="convolution", backend="torch")
    assert_agree(long_conv(u, kernel, **PAIR)[0], expected)
    u.requires_grad_()
    y, _ = long_conv(u, kernel, **PAIR)
    # the gradient of a sum has no strides
    (du,) = torch.autograd.grad(y.sum(), u)
    assert_agree(du, kernel.cumsum(1).flip(1).mT.expand(2, -1, -1))


@on_either
@pytest.mark.parametrize("needed", ["u", "kernel"])
def test_one_gradient_alone(needed):
    given = {"u": draw(2, 20, 3), "kernel": draw(3, 20, seed=1)}
    given[needed].requires_grad_()
    dy = draw(2, 20, 3, seed=2)
    found = [
        torch.autograd.grad(long_conv(**given, mode="convolution", backend=backend)[0], given[needed], dy)
        for backend in ("torch", "triton")
    ]
    assert_agree(*found)


@thorough
@on_either
def test_gradients_are_differentiable_again():
    u, kernel = draw(1, 3, 1).requires_grad_(), draw(1, 2, seed=1).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda *x: long_conv(*x, **PAIR)[0], (u, kernel))


@on_either
def test_vmap():
    u, kernel = draw(4, 2, 20, 3), draw(4, 3, 20, seed=1)
    apart = torch.stack([long_conv(*pair, **PAIR)[0] for pair in zip(u, kernel, strict=True)])
    assert_agree(torch.func.vmap(lambda *x: long_conv(*x, **PAIR)[0])(u, kernel), apart)


@pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="is refused where there is no GPU")
def test_elsewhere_it_is_refused():
    with pytest.raises(ValueError, match="backend='triton' of `long_conv` runs on 'cuda'"):
        long_conv(torch.zeros(1, 9, 1), torch.zeros(1, 9), backend="triton")


@pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="is refused where there is no GPU")
@pytest.mark.parametrize(
    ("operator", "inputs"),
    [(dense_ssm, dense_ssm_inputs), (diagonal_ssm, diagonal_ssm_inputs), (dplr_ssm, dplr_ssm_inputs)],
)
def test_models_hand_on_their_backend(operator, inputs, monkeypatch):
    given = inputs(1, 20, 2, 3)
    # as if on CUDA: "auto" takes Triton, whose place torch takes
    monkeypatch.setattr(backends, "usable", lambda backend, device: backend == "triton")
    monkeypatch.setattr(backends, "refusal", lambda *called: None)
    (by_torch,) = (entry for entry in BACKENDS if (entry.mode, entry.name) == ("convolution", "torch"))
    chosen = []

    def replaced(call, proceed):
        if call.operator.name != "long_conv":
            return proceed()
        chosen.append(call.backend.name)
        return call.operator.run(call.inputs, by_torch)

    with handling(replaced):
        operator(**given, mode="convolution", backend="torch")
        operator(**given, mode="convolution")
    assert chosen == ["torch", "triton"]


@on_a_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(4, 4096, 768), (1, 65536, 96), (2, 10007, 50)])
def test_memory_on_a_gpu_is_at_most_four_times_the_inputs(dtype, shape):
    _, time, channels = shape
    u = draw(*shape).to(dtype).requires_grad_()
    kernel = draw(channels, time, seed=1).float().requires_grad_()
    dy = draw(*shape, seed=2).to(dtype)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(long_conv(u, kernel, **PAIR)[0], (u, kernel), dy)
    taken = torch.cuda.max_memory_allocated() - before
    inputs = sum(x.numel() * x.element_size() for x in (u, kernel))
    assert taken <= 3 * inputs + max(inputs, in_torch.SMALL)
