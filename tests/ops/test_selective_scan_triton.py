"""The Triton kernels of the selective scan: on a GPU where there is one, else interpreted."""

import dataclasses

import pytest
import torch

from linrec.ops import selective_scan
from linrec.ops.selective_scan import triton
from linrec.ops.selective_scan.torch import Group
from linrec.testing import assert_agree, check_operator, reset_mask, selective_scan_inputs
from tests.tiers import nightly, thorough, tiered

from .opcheck import check_operators
from .triton_process import (
    DEVICE,
    INTERPRETED,
    check_two_documents,
    on_a_gpu,
    on_either,
    quiet,
)

pytest.importorskip("triton")
pytestmark = quiet
PAIR = {"mode": "recurrent", "backend": "triton"}


def agree(*shape, dtype=torch.float32, options=None, **arguments):
    inputs = selective_scan_inputs(*shape, dtype=dtype, seed=shape[1], device=DEVICE, **arguments)
    check_operator(selective_scan, inputs, **PAIR, dtype=dtype, options=options)


@pytest.fixture
def short(monkeypatch):
    """Have few steps fill several chunks and segments, and leave out columns that nothing fills."""
    plan_of = triton.plan_of
    changed = {"steps": 2, "segments": 2}
    monkeypatch.setattr(triton, "plan_of", lambda *given: dataclasses.replace(plan_of(*given), **changed))


@thorough
@on_either
def test_axes_may_lie_in_any_order_in_memory():
    # as many states as kernels have, so that nothing is copied on the way
    inputs = selective_scan_inputs(2, 5, 4, 4, device=DEVICE)
    inputs["B"] = inputs["B"].mT.contiguous().mT
    inputs["C"] = inputs["C"].repeat_interleave(2, dim=1)[:, ::2]
    inputs["x"], inputs["dt"] = (inputs[name].mT.contiguous().mT for name in ("x", "dt"))
    inputs["A"] = inputs["A"].T.contiguous().T
    check_operator(selective_scan, inputs, **PAIR, dtype=torch.float32)


@on_either
@pytest.mark.parametrize("time", tiered([1, 9], rare=[8, 20]))
def test_lengths_around_chunks(time):
    reset = reset_mask(2, time, rate=0.2, device=DEVICE)
    reset[0, 0] = reset[1, -1] = True
    agree(2, time, 3, 2, options={"reset": reset})


@thorough
@on_either
@pytest.mark.parametrize("n_segments", [5])
def test_segments_of_time(n_segments, monkeypatch):
    plan_of = triton.plan_of
    changed = {"steps": 2, "segments": n_segments}
    monkeypatch.setattr(triton, "plan_of", lambda *given: dataclasses.replace(plan_of(*given), **changed))
    reset = torch.zeros(2, 13, dtype=torch.bool, device=DEVICE)
    reset[0, 4] = reset[1, 7] = True
    agree(1, 13, 3, 2)
    agree(2, 13, 3, 2, options={"reset": reset})
    # more segments than there are chunks
    agree(1, 3, 2, 2)


@thorough
@on_either
@pytest.mark.parametrize(
    ("states", "columns", "vector", "warps"), tiered([(4, 64, 2, 2)], rare=[(4, 32, 1, 1), (8, 16, 4, 1)])
)
def test_states_and_channels_of_threads(states, columns, vector, warps, monkeypatch):
    plan = triton.Plan(states, columns, vector, warps, segments=1, steps=4)
    monkeypatch.setattr(triton, "plan_of", lambda *given: plan)
    agree(1, 7, 33, 3)
    agree(2, 8, 40 * vector, 4, skip=False)


@on_either
@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("d_state", [1, 3, 20])
def test_any_number_of_states(d_state):
    agree(1, 5, 2, d_state)


@thorough
@on_either
@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("dtype", tiered([torch.bfloat16], rare=[torch.float64, torch.float16]))
def test_dtypes(dtype):
    agree(2, 5, 3, 2, dtype=dtype)
    inputs = selective_scan_inputs(2, 5, 3, 2, dtype=dtype, device=DEVICE)
    wide = torch.promote_types(dtype, torch.float32)
    inputs |= {name: inputs[name].to(wide) for name in ("dt", "B", "A")}
    check_operator(selective_scan, inputs, **PAIR, dtype=dtype)


@thorough
@on_either
@pytest.mark.usefixtures("short")
def test_layout_in_memory_does_not_matter():
    inputs = selective_scan_inputs(2, 5, 4, 2, device=DEVICE)
    expected = selective_scan(**inputs, **PAIR)
    strided = {
        name: x.repeat_interleave(2, dim=-1)[..., ::2] if x.ndim > 1 else x for name, x in inputs.items()
    }
    x = strided["x"] = strided["x"].requires_grad_()
    y, state = selective_scan(**strided, **PAIR)
    assert_agree((y, state), expected)
    # the gradient of a sum is an expanded number
    torch.autograd.grad(y.sum(), x)


@thorough
@on_either
@pytest.mark.usefixtures("short")
def test_custom_operators_keep_their_promises():
    inputs = selective_scan_inputs(2, 5, 3, 3, device=DEVICE)
    A, D, state = inputs["A"].mT[None], inputs["D"][None], inputs["state"].mT
    of_time = (inputs[name].bfloat16() for name in ("x", "dt"))
    reset = reset_mask(2, 5, device=DEVICE)
    check_operators(triton.recurrent, Group(*of_time, A, inputs["B"], inputs["C"], D, state, reset))


@thorough
@on_either
@pytest.mark.usefixtures("short")
def test_nothing_passes_a_reset():
    inputs = selective_scan_inputs(1, 6, 2, 2, device=DEVICE)
    check_two_documents(selective_scan, inputs, ("x", "dt", "B", "C"), 3, **PAIR)


@on_either
@pytest.mark.parametrize("shape", [(0, 5, 3, 2), (2, 5, 0, 2)])
def test_empty_axes(shape):
    given = selective_scan_inputs(*shape, device=DEVICE)
    inputs = {name: x.requires_grad_() for name, x in given.items()}
    y, state = selective_scan(**inputs, **PAIR)
    gradients = torch.autograd.grad(y.sum() + state.sum(), tuple(inputs.values()))
    assert all(not gradient.any() for gradient in gradients)


@thorough
@on_either
@pytest.mark.usefixtures("short")
def test_maps_with_gradients():
    shared = "A", "D"
    inputs = selective_scan_inputs(2, 5, 3, 2, device=DEVICE)
    axes = {name: None if name in shared else 0 for name in inputs}
    inputs = {
        name: (x if name in shared else torch.stack([x, x.flip(0)])).requires_grad_()
        for name, x in inputs.items()
    }

    def one(inputs):
        return selective_scan(**inputs, **PAIR)

    apart = [one({name: x if name in shared else x[i] for name, x in inputs.items()}) for i in range(2)]
    expected = tuple(torch.stack(pieces) for pieces in zip(*apart, strict=True))
    actual = torch.func.vmap(one, in_dims=(axes,))(inputs)
    assert_agree(actual, expected)
    losses = (y.square().sum() + last.square().sum() for y, last in (actual, expected))
    assert_agree(*(torch.autograd.grad(loss, tuple(inputs.values())) for loss in losses))


# `test_custom_operators_keep_their_promises` traces them too
@nightly
@on_either
@pytest.mark.usefixtures("short")
def test_compiles_into_one_graph():
    given = selective_scan_inputs(2, 5, 3, 3, device=DEVICE)
    inputs = {name: x.requires_grad_() for name, x in given.items()}

    def outcome(function):
        y, last = function(**inputs, **PAIR)
        return y, last, torch.autograd.grad(y.square().sum() + last.sum(), tuple(inputs.values()))

    # inductor's own use of Triton does not go through the interpreter
    compiled = torch.compile(
        selective_scan, fullgraph=True, backend="aot_eager" if INTERPRETED else "inductor"
    )
    assert_agree(outcome(compiled), outcome(selective_scan))
    with torch.no_grad():
        assert_agree(compiled(**inputs, **PAIR), selective_scan(**inputs, **PAIR))


@pytest.mark.skipif(INTERPRETED, reason="the interpreter takes tensors of the CPU")
def test_tensors_of_another_device_are_refused():
    inputs = selective_scan_inputs(1, 3, 2, 1)
    with pytest.raises(
        ValueError, match=r"backend='triton' of `selective_scan` runs on 'cuda'; got tensors on 'cpu'"
    ):
        selective_scan(**inputs, **PAIR)


@on_a_gpu
def test_runs_are_the_same_to_the_bit():
    given = selective_scan_inputs(2, 500, 70, 16, device="cuda")
    inputs = {name: x.requires_grad_() for name, x in given.items()}

    def outcome():
        y, last = selective_scan(**inputs, **PAIR)
        return y, last, *torch.autograd.grad(y.sum() + last.sum(), tuple(inputs.values()))

    for one, other in zip(outcome(), outcome(), strict=True):
        assert torch.equal(one, other)


@on_a_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("batch", "channels"), [(1, 64), (5, 100), (8, 2048)])
def test_full_sizes_on_a_gpu(dtype, batch, channels):
    time = 203 if channels > 1000 else 1000
    reset = reset_mask(batch, time, rate=0.01, device="cuda")
    agree(batch, time, channels, 16, dtype=dtype, options={"reset": reset})
