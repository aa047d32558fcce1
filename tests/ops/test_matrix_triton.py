"""The step-by-step Triton kernel of matrix states: on a GPU where there is one, else interpreted."""

import pytest
import torch

from linrec.ops import delta_rule, gate_loop
from linrec.ops.core.call import recording
from linrec.ops.core.kernel import successors
from linrec.testing import assert_agree, delta_rule_inputs, gate_loop_inputs, reset_mask
from tests.tiers import tiered

from .triton_process import DEVICE, on_a_gpu, on_either, on_views, quiet

pytest.importorskip("triton")
pytestmark = quiet
PAIR = {"mode": "recurrent", "backend": "triton"}
ORACLE = {"mode": "recurrent", "backend": "reference"}


def made(operator, *size, **arguments):
    make = delta_rule_inputs if operator is delta_rule else gate_loop_inputs
    more = {} if operator is delta_rule else {"phase": None}
    inputs = make(*size, **more | arguments)
    return {name: x if x is None else x.to(DEVICE) for name, x in inputs.items()}


def agree(operator, inputs, dtype=torch.float32, reset=None):
    wide = {
        name: x if x is None else x.to(torch.complex128 if x.is_complex() else torch.float64)
        for name, x in inputs.items()
    }
    with torch.no_grad():
        actual = operator(**inputs, reset=reset, **PAIR)
    assert_agree(actual, operator(**wide, reset=reset, **ORACLE), "kernel", dtype=dtype)


@on_either
@pytest.mark.parametrize("operator", [gate_loop, delta_rule])
@pytest.mark.parametrize("log_decay", [None, "h", "hk", "bth", "bthk"])
def test_every_shape_of_the_decays(operator, log_decay):
    reset = reset_mask(2, 7, rate=0.2, device=DEVICE)
    agree(operator, made(operator, 2, 7, 2, 5, 6, log_decay=log_decay), reset=reset)


@on_either
@pytest.mark.parametrize("operator", [gate_loop, delta_rule])
@pytest.mark.parametrize("time", [1, 3])
def test_views(operator, time):
    agree(on_views(operator), made(operator, 2, time, 3, 4, 5))


@on_either
@pytest.mark.parametrize("operator", [gate_loop, delta_rule])
@pytest.mark.parametrize("dtype", tiered([torch.float16], [torch.float64]))
def test_one_step_in_other_precisions(operator, dtype):
    agree(operator, made(operator, 3, 1, 2, 4, 3, dtype=dtype), dtype)


@on_either
@pytest.mark.parametrize("phase", ["h", "bthk"])
def test_phases(phase):
    reset = reset_mask(2, 7, rate=0.2, device=DEVICE)
    agree(gate_loop, made(gate_loop, 2, 7, 2, 5, 6, phase=phase), reset=reset)


@on_either
@pytest.mark.parametrize("operator", [gate_loop, delta_rule])
def test_gradients_are_refused(operator):
    inputs = made(operator, 2, 7, 2, 3, 4)
    inputs["v"].requires_grad_()
    with pytest.raises(ValueError, match=r"has no gradients\. Call it under `torch.no_grad\(\)`"):
        operator(**inputs, **PAIR)
    with recording() as calls:
        operator(**inputs)
    assert calls[0].backend.differentiable


@on_either
def test_a_magnitude_of_zero_stops_the_state():
    inputs = made(gate_loop, 1, 4, 1, 3, 2, log_decay="bth")
    inputs["log_decay"][:, 2] = -torch.inf
    y, _ = gate_loop(**inputs, **PAIR)
    later = {name: x if x is None else x[:, 2:] for name, x in inputs.items()}
    assert_agree(y[:, 2:], gate_loop(**later | {"state": None}, **PAIR)[0])


@on_either
def test_vmap_folds_the_mapped_axis_into_the_batch():
    q, k, v = torch.randn(3, 2, 1, 3, 2, 4, device=DEVICE)
    log_decay = -torch.rand(2, 1, 3, 2, device=DEVICE)
    with torch.no_grad():
        mapped, _ = torch.vmap(lambda *x: gate_loop(*x, **PAIR))(q, k, v, log_decay)
    assert_agree(
        mapped, torch.stack([gate_loop(*x, **PAIR)[0] for x in zip(q, k, v, log_decay, strict=True)])
    )


@on_a_gpu
@pytest.mark.parametrize("size", [(64, 64), (128, 128), (256, 96), (24, 200), (1, 7)])
def test_full_heads_on_a_gpu(size):
    agree(delta_rule, made(delta_rule, 2, 33, 3, *size, dtype=torch.bfloat16), torch.bfloat16)


@on_a_gpu
@pytest.mark.parametrize("operator", [gate_loop, delta_rule])
@pytest.mark.parametrize("time", [1, 2])
def test_more_heads_than_an_axis_of_a_grid_has_programs(operator, time):
    q, k, v = torch.randn(3, 66_000, time, 1, 2, device="cuda")
    more = (torch.rand(66_000, time, 1, device="cuda"),) if operator is delta_rule else ()
    y, state = operator(q, k, v, *more)
    rows = [0, 40_000, 65_999]
    expected = operator(*(x[rows].double() for x in (q, k, v, *more)), **ORACLE)
    assert_agree((y[rows], state[rows]), expected)


@on_either
def test_the_next_state_is_written_where_a_graph_wants_it():
    inputs = made(gate_loop, 2, 1, 3, 4, 5, log_decay="bth")
    with torch.no_grad():
        expected = gate_loop(**inputs, **PAIR)
    state = inputs["state"]
    buffer = torch.empty_like(state)
    with torch.no_grad(), successors([(state, buffer)]):
        y, last = gate_loop(**inputs, **PAIR)
        # a buffer has room for one state
        _, other = gate_loop(**inputs, **PAIR)
    assert last.data_ptr() == buffer.data_ptr()
    assert other.data_ptr() not in (buffer.data_ptr(), state.data_ptr())
    assert_agree((y, buffer), expected)
    assert_agree(other, buffer)
    with torch.no_grad():
        assert gate_loop(**inputs, **PAIR)[1].data_ptr() != buffer.data_ptr()
