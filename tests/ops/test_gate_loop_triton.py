"""The fused Triton kernel of the max-headed GateLoop: on a GPU where there is one, else interpreted."""

import dataclasses
import itertools

import pytest
import torch

from linrec.ops import gate_loop
from linrec.ops.gate_loop import max_headed
from linrec.ops.kernels.launch import Tiling
from linrec.testing import assert_agree, check_operator, gate_loop_inputs, reset_mask
from tests.tiers import nightly, thorough, tiered

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
GATES = [None, "h", "bth"]
EVERY_GATE = list(itertools.product(GATES, GATES))
SOME_GATES = [("bth", "h"), ("h", "bth"), (None, "bth"), ("bth", None)]


@pytest.fixture
def small_tiles(monkeypatch):
    """Have few steps and heads fill several tiles, where every element takes its time."""
    if INTERPRETED:
        tiling = Tiling(pieces=2, rows=2, columns=2, vector=1, group=2, groups=2, warps=1)
        monkeypatch.setattr(max_headed, "tiling", lambda shape: tiling)


@pytest.fixture
def few_columns(monkeypatch):
    """Divide time as on a GPU, and leave out the columns that no head fills."""
    if INTERPRETED:
        tiling = max_headed.tiling
        monkeypatch.setattr(
            max_headed, "tiling", lambda shape: dataclasses.replace(tiling(shape), columns=4, vector=2)
        )


small = pytest.mark.usefixtures("small_tiles")
narrow = pytest.mark.usefixtures("few_columns")


def agree(batch, time, heads, *, dtype=torch.float32, options=None, **gates):
    inputs = gate_loop_inputs(batch, time, heads, 1, 1, dtype=dtype, seed=time, device=DEVICE, **gates)
    check_operator(gate_loop, inputs, **PAIR, dtype=dtype, options=options)


@thorough
@on_either
@small
def test_nothing_passes_a_reset():
    inputs = gate_loop_inputs(1, 10, 3, 1, 1, device=DEVICE)
    check_two_documents(gate_loop, inputs, ("q", "k", "v", "log_decay", "phase"), 5, **PAIR)


@on_either
@narrow
@pytest.mark.parametrize("time", tiered([1, 17], rare=[2, 16, 65]))
def test_lengths_around_tiles(time):
    agree(2, time, 3)
    agree(1, time, 2, phase=None, options={"reset": reset_mask(1, time, rate=0.2, device=DEVICE)})


@thorough
@on_either
@small
@pytest.mark.parametrize(("log_decay", "phase"), tiered(SOME_GATES, rare=EVERY_GATE))
def test_every_shape_of_the_gates(log_decay, phase):
    reset = reset_mask(2, 10, rate=0.1, device=DEVICE)
    reset[0, 0] = reset[1, -1] = True
    agree(2, 10, 2, log_decay=log_decay, phase=phase, options={"reset": reset})


@thorough
@on_either
@small
@pytest.mark.parametrize("dtype", tiered([torch.bfloat16], rare=[torch.float64, torch.float16]))
@pytest.mark.parametrize("phase", [None, "bthk"])
def test_dtypes(dtype, phase):
    agree(2, 10, 2, dtype=dtype, phase=phase)


@thorough
@on_either
def test_more_heads_than_one_program_has():
    agree(2, 5, 33)


@thorough
@on_either
@pytest.mark.parametrize("phase", tiered(["bth"], rare=[None]))
def test_groups_of_tiles(phase, monkeypatch):
    # a chain of ten tiles, groups of two, supergroups of four
    tiling = Tiling(pieces=2, rows=2, columns=4, vector=2, group=2, groups=2, warps=1)
    monkeypatch.setattr(max_headed, "tiling", lambda shape: tiling)
    agree(1, 38, 6, phase=phase, options={"reset": reset_mask(1, 38, rate=0.05, device=DEVICE)})
    agree(1, 38, 6, phase=phase, dtype=torch.float64)


@on_either
def test_phases_of_any_size():
    # inputs at the first step alone: y_t is the cosine of the sum of the phases
    phase = torch.tensor(
        [1e-30, 0.3, 0.8, 1.6, 3.2, -4.0, 7.0, 1e3, -12345.678, 1e5, 3e7, -1e12], device=DEVICE
    )
    ones = torch.ones(1, 2, 12, 1, device=DEVICE)
    x = torch.tensor([1.0, 0.0], device=DEVICE)[None, :, None, None].expand_as(ones)
    y, state = gate_loop(ones, x, ones, phase=phase.expand(1, 2, 12), **PAIR)
    expected = torch.polar(torch.ones(12, dtype=torch.float64), phase.cpu().double())
    assert_agree(state.flatten().cpu(), expected.to(torch.complex64))
    assert_agree(y[:, 1].flatten().cpu(), expected.real.float())
    agree(1, 3, 33, phase=None)


@thorough
@on_either
@small
def test_layout_in_memory_does_not_matter():
    inputs = gate_loop_inputs(2, 10, 3, 1, 1, device=DEVICE)
    expected = gate_loop(**inputs, **PAIR)
    strided = {
        name: tensor.repeat_interleave(2, dim=-2)[..., ::2, :] if name != "state" else tensor
        for name, tensor in inputs.items()
    }
    assert not strided["q"].is_contiguous()
    assert_agree(gate_loop(**strided, **PAIR), expected)
    y, _ = gate_loop(**{**inputs, "v": inputs["v"].requires_grad_()}, **PAIR)
    # the gradient of a sum is an expanded number
    torch.autograd.grad(y.sum(), inputs["v"])


@on_either
@small
def test_a_magnitude_of_zero_stops_values_and_gives_no_nan():
    inputs = gate_loop_inputs(2, 10, 2, 1, 1, device=DEVICE)
    inputs["log_decay"][:, 7] = -torch.inf
    check_operator(gate_loop, inputs, **PAIR, dtype=torch.float32)


@on_either
@pytest.mark.parametrize("shape", [(0, 5, 3), (2, 5, 0)])
def test_empty_axes(shape):
    inputs = gate_loop_inputs(*shape, 1, 1, device=DEVICE)
    y, state = gate_loop(**inputs, **PAIR)
    assert y.shape == (*shape, 1) and state.shape == (shape[0], shape[2], 1, 1)


@nightly
@on_either
@small
def test_gradients_are_finite_differences():
    inputs = gate_loop_inputs(1, 4, 2, 1, 1, dtype=torch.float64, device=DEVICE)
    names, values = list(inputs), [tensor.requires_grad_() for tensor in inputs.values()]

    def run(*tensors):
        return gate_loop(**dict(zip(names, tensors, strict=True)), **PAIR)

    # outputs without a gradient are tried on a GPU alone: the interpreter takes half a minute for them
    options = {"fast_mode": True, "check_undefined_grad": not INTERPRETED}
    assert torch.autograd.gradcheck(run, values, **options)
    assert torch.autograd.gradgradcheck(run, values, **options)


@thorough
@on_either
@small
@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
def test_compiles_into_one_graph_and_maps():
    inputs = {name: t.requires_grad_() for name, t in gate_loop_inputs(2, 10, 2, 1, 1, device=DEVICE).items()}

    def outcome(function):
        y, last = function(**inputs, **PAIR)
        loss = y.square().sum() + torch.view_as_real(last).sum()
        return y, last, torch.autograd.grad(loss, tuple(inputs.values()))

    # inductor's own use of Triton does not go through the interpreter
    compiled = torch.compile(gate_loop, fullgraph=True, backend="aot_eager" if INTERPRETED else "inductor")
    assert_agree(outcome(compiled), outcome(gate_loop))
    with torch.no_grad():
        assert_agree(compiled(**inputs, **PAIR), gate_loop(**inputs, **PAIR))


@on_a_gpu
def test_runs_are_the_same_to_the_bit():
    inputs = gate_loop_inputs(4, 70, 3, 1, 1, log_decay="h", phase="h", device="cuda")
    inputs = {name: tensor.requires_grad_() for name, tensor in inputs.items()}

    def outcome():
        y, last = gate_loop(**inputs, **PAIR)
        return y, last, *torch.autograd.grad(y.sum() + last.real.sum(), tuple(inputs.values()))

    for one, other in zip(outcome(), outcome(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter takes tensors of the CPU")
def test_tensors_of_another_device_are_refused():
    inputs = gate_loop_inputs(1, 3, 2, 1, 1)
    with pytest.raises(
        ValueError, match=r"backend='triton' of `gate_loop` runs on 'cuda'; got tensors on 'cpu'"
    ):
        gate_loop(**inputs, **PAIR)


@on_a_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gates", GATES)
def test_full_tiles_on_a_gpu(dtype, gates):
    reset = reset_mask(5, 1000, rate=0.01, device="cuda")
    agree(5, 1000, 100, dtype=dtype, log_decay=gates, phase=gates, options={"reset": reset})
