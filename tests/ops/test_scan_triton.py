"""The Triton kernels of ops.scan: on a GPU where there is one, else interpreted on small shapes."""

import dataclasses
import itertools

import pytest
import torch

from linrec.ops import scan
from linrec.ops.core.call import recording
from linrec.ops.kernels.launch import Tiling
from linrec.ops.scan import triton as triton_backend
from linrec.testing import assert_agree, check_operator, generator, reset_mask, scan_inputs
from tests.tiers import thorough, tiered

from .triton_process import (
    DEVICE,
    INTERPRETED,
    PAIR,
    check_two_documents,
    on_a_gpu,
    on_either,
    quiet,
)

pytest.importorskip("triton")
pytestmark = quiet


@pytest.fixture
def small_tiles(monkeypatch):
    """Have few steps and channels fill several tiles, where every element takes its time."""
    if INTERPRETED:
        tiling = Tiling(pieces=4, rows=2, columns=2, vector=1, group=2, groups=2, warps=1)
        monkeypatch.setattr(triton_backend, "tiling", lambda y: tiling)


@pytest.fixture
def few_columns(monkeypatch):
    """Divide time as on a GPU, and leave out the columns that no channel fills."""
    if INTERPRETED:
        tiling = triton_backend.tiling
        monkeypatch.setattr(
            triton_backend, "tiling", lambda y: dataclasses.replace(tiling(y), columns=4, vector=2)
        )


small = pytest.mark.usefixtures("small_tiles")
narrow = pytest.mark.usefixtures("few_columns")
DTYPES = [torch.float32, torch.float64, torch.complex64, torch.complex128]


def agree(batch, time, channels, *, dtype=torch.float32, decay="step", **options):
    inputs = scan_inputs(batch, time, channels, dtype=dtype, decay=decay, seed=time, device=DEVICE)
    check_operator(scan, inputs, **PAIR, dtype=dtype, options=options)


@thorough
@on_either
@small
@pytest.mark.parametrize("reverse", tiered([False], rare=[True]))
def test_nothing_passes_a_reset(reverse):
    inputs = scan_inputs(1, 20, 3, device=DEVICE)
    check_two_documents(scan, inputs, ("a", "x"), 10, **PAIR, reverse=reverse)


@on_either
@narrow
@pytest.mark.parametrize("time", tiered([1, 17], [65], [2, 16, 63, 64]))
def test_lengths_around_tiles(time):
    agree(2, time, 3)
    agree(1, time, 2, reverse=True, reset=reset_mask(1, time, rate=0.2, device=DEVICE))


@on_either
@small
@pytest.mark.parametrize(
    ("dtype", "reverse"),
    tiered([(torch.complex64, True)], [(torch.float32, False)], itertools.product(DTYPES, [False, True])),
)
def test_dtypes_directions_and_resets(dtype, reverse):
    # five tiles of time, one more than a supergroup has, and two of channels
    reset = reset_mask(2, 40, rate=0.1, device=DEVICE)
    reset[0, 0] = reset[1, -1] = True
    agree(2, 40, 3, dtype=dtype, reverse=reverse, reset=reset)


@on_either
@small
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    agree(2, 10, 3, dtype=dtype)
    # in bfloat16, 256 + 1 is 256: a carry of that precision would stand still
    steps = 20 if INTERPRETED else 300
    x = torch.ones(1, steps, 1, dtype=torch.bfloat16, device=DEVICE)
    start = torch.full((1, 1), 256.0, device=DEVICE)
    _, state = scan(torch.ones((), dtype=torch.bfloat16, device=DEVICE), x, state=start, **PAIR)
    assert state.dtype == torch.float32 and state.item() == 256 + steps


@on_either
@small
@pytest.mark.parametrize("half", tiered([torch.bfloat16], rare=[torch.float16]))
@pytest.mark.parametrize("decay", tiered(["step"], ["channel"]))
def test_a_in_float32_beside_inputs_in_half_precision(half, decay):
    inputs = scan_inputs(2, 10, 3, decay=decay, device=DEVICE)
    inputs["x"] = inputs["x"].to(half)
    options = {"reset": reset_mask(2, 10, rate=0.2, device=DEVICE)}
    check_operator(scan, inputs, **PAIR, dtype=half, options=options)
    # in bfloat16, 0.999 is 1
    a = torch.full((1, 20, 1), 0.999, device=DEVICE)
    y, state = scan(a, torch.ones(1, 20, 1, dtype=half, device=DEVICE), **PAIR)
    assert (y.dtype, state.dtype) == (half, torch.float32)
    assert state.item() == pytest.approx((1 - 0.999**20) / 0.001, rel=1e-6)


@thorough
@on_either
@small
@pytest.mark.parametrize("decay", ["head", "channel", "constant"])
@pytest.mark.parametrize("dtype", tiered([torch.float32], rare=[torch.complex64]))
def test_a_broadcasts(decay, dtype):
    agree(2, 10, 3, decay=decay, dtype=dtype, reset=reset_mask(2, 10, rate=0.2, device=DEVICE))


@on_either
@narrow
@pytest.mark.parametrize("real", ["a", "x"])
def test_real_and_complex_mix(real):
    inputs = scan_inputs(2, 20, 3, dtype=torch.complex64, device=DEVICE)
    inputs[real] = inputs[real].real.clone()
    check_operator(scan, inputs, **PAIR, dtype=torch.complex64)


@on_either
def test_more_channels_than_one_program_has():
    agree(1, 5, 33)


@thorough
@on_either
@small
def test_layout_in_memory_does_not_matter():
    inputs = scan_inputs(2, 10, 3, dtype=torch.complex64, device=DEVICE)
    a, x = inputs["a"], inputs["x"]
    expected = scan(a, x, **PAIR)
    views = [
        lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
        lambda t: t.repeat_interleave(2, dim=2)[..., ::2],
        lambda t: t.conj().resolve_conj().conj(),
    ]
    for view in views:
        assert_agree(scan(view(a), view(x), **PAIR), expected)
    negative = x.conj().imag
    assert negative.is_neg()
    assert_agree(scan(a.real, negative, **PAIR), scan(a.real, -x.imag.clone(), **PAIR))
    # the gradient of a sum is an expanded number
    y, _ = scan(a, x.requires_grad_(), **PAIR)
    torch.autograd.grad(y.real.sum(), x)


@on_either
@pytest.mark.parametrize(("batch", "time", "channels"), [(0, 5, 3), (2, 0, 3), (2, 5, 0)])
def test_empty_axes(batch, time, channels):
    x = torch.randn(batch, time, channels, device=DEVICE, requires_grad=True)
    a = torch.rand(channels, device=DEVICE, requires_grad=True)
    y, last = scan(a, x, **PAIR)
    assert y.shape == x.shape and last.shape == (batch, channels)
    gradients = torch.autograd.grad(y.sum() + last.sum(), (a, x), materialize_grads=True)
    assert torch.equal(gradients[0], torch.zeros_like(a))


@thorough
@on_either
@narrow
@pytest.mark.parametrize("dtype", tiered([torch.complex128], rare=[torch.float64]))
def test_gradients_are_finite_differences(dtype):
    inputs = scan_inputs(1, 4, 2, dtype=dtype, device=DEVICE)
    reset = torch.tensor([[False, False, True, False]], device=DEVICE)

    def run(a, x, state):
        return scan(a, x, state=state, reset=reset, **PAIR)

    inputs = [t.requires_grad_() for t in inputs.values()]
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True, check_forward_ad=True)


@thorough
@on_either
@small
def test_compiles_into_one_graph_and_maps():
    inputs = {name: t.requires_grad_() for name, t in scan_inputs(2, 10, 3, device=DEVICE).items()}

    def outcome(function):
        y, last = function(**inputs, **PAIR)
        return y, last, torch.autograd.grad(y.square().sum() + last.sum(), tuple(inputs.values()))

    # inductor's own use of Triton does not go through the interpreter
    compiled = torch.compile(scan, fullgraph=True, backend="aot_eager" if INTERPRETED else "inductor")
    assert_agree(outcome(compiled), outcome(scan))
    x = torch.randn(3, 2, 10, 3, device=DEVICE, generator=generator(device=DEVICE))
    a = torch.rand(3, 10, 1, device=DEVICE)
    mapped = torch.vmap(lambda a, x: scan(a, x, **PAIR))(a, x)
    assert_agree(mapped[0], torch.stack([scan(*pair, **PAIR)[0] for pair in zip(a, x, strict=True)]))


@on_a_gpu
@pytest.mark.parametrize("channels", [1, 2, 12, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
def test_few_channels_on_a_gpu(channels, dtype):
    # neighbours in memory are steps, for which Triton would choose another layout of registers
    for time in (2, 16, 33, 200):
        agree(2, time, channels, dtype=dtype)
        agree(1, time, channels, dtype=dtype, reverse=True, decay="constant")
    inputs = scan_inputs(2, 70, channels, dtype=dtype, device="cuda")
    inputs = {n: x.mT.contiguous().mT if x.ndim == 3 else x for n, x in inputs.items()}
    check_operator(scan, inputs, **PAIR, dtype=dtype)


@on_a_gpu
def test_runs_are_the_same_to_the_bit():
    inputs = scan_inputs(4, 300, 3, decay="channel", device="cuda")
    inputs = {name: tensor.requires_grad_() for name, tensor in inputs.items()}

    def outcome():
        y, last = scan(**inputs, **PAIR)
        return y, last, *torch.autograd.grad(y.sum() + last.sum(), tuple(inputs.values()))

    for one, other in zip(outcome(), outcome(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter takes tensors of the CPU")
def test_tensors_of_another_device_are_refused():
    with pytest.raises(ValueError, match=r"backend='triton' of `scan` runs on 'cuda'; got tensors on 'cpu'"):
        scan(torch.rand(3), torch.rand(2, 5, 3), **PAIR)


@on_a_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("decay", ["step", "head", "channel", "constant"])
@pytest.mark.parametrize("reverse", [False, True])
def test_full_tiles_on_a_gpu(dtype, decay, reverse):
    agree(
        5,
        1000,
        100,
        dtype=dtype,
        decay=decay,
        reverse=reverse,
        reset=reset_mask(5, 1000, rate=0.01, device="cuda"),
    )


@on_a_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_long_sequences_on_a_gpu(dtype):
    inputs = scan_inputs(2, 16_384, 64, dtype=dtype, device="cuda")
    # |a| from zero to one within rounding
    inputs["a"] = torch.linspace(0, 1, 64, device="cuda").to(dtype)
    inputs = {name: t.requires_grad_() for name, t in inputs.items()}

    def outcome(mode, backend):
        y, last = scan(**inputs, mode=mode, backend=backend)
        return y, last, *torch.autograd.grad(y.abs().mean() + last.abs().sum(), tuple(inputs.values()))

    for mine, other in zip(outcome("scan", "triton"), outcome("scan", "torch"), strict=True):
        assert_agree(mine, other)


@on_a_gpu
def test_auto_takes_the_kernels_on_a_gpu():
    with recording() as calls:
        scan(torch.rand(3, device="cuda"), torch.rand(2, 5, 3, device="cuda"))
    assert [(call.backend.mode, call.backend.name) for call in calls] == [("scan", "triton")]


@on_a_gpu
def test_more_than_two_to_the_31_elements_on_a_gpu():
    # offsets need 64 bits
    time = (1 << 31) // 2048 + 10
    x = torch.zeros(1, time, 2048, dtype=torch.bfloat16, device="cuda")
    x[0, -5] = 1
    y, state = scan(torch.full((), 0.5, dtype=torch.bfloat16, device="cuda"), x, **PAIR)
    assert torch.equal(state, torch.full_like(state, 0.5**4))
    assert torch.equal(y[0, -1].float(), state[0])
