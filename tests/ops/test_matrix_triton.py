"""The step-by-step Triton kernel of matrix states: on a GPU where there is one, else interpreted."""

import pytest
import torch

from linrec.ops import matrix_triton
from linrec.ops.delta_rule.reference import delta_rule_reference
from linrec.ops.gate_loop.inputs import canonical_gate
from linrec.ops.gate_loop.reference import gate_loop_reference
from linrec.testing import assert_agree, delta_rule_inputs, reset_mask

from .triton_process import DEVICE, from_outside, on_a_gpu, on_either, quiet, run_interpreted

pytest.importorskip("triton")
pytestmark = quiet


@from_outside
def test_kernels_in_the_interpreter():
    run_interpreted(__file__)


def made(batch, time, heads, dk, dv, *, delta, dtype=torch.float32, **arguments):
    inputs = delta_rule_inputs(batch, time, heads, dk, dv, dtype=dtype, **arguments)
    inputs = {name: x if x is None else x.to(DEVICE) for name, x in inputs.items()}
    inputs["log_decay"] = canonical_gate("log_decay", inputs["log_decay"], inputs["q"])
    inputs["state"] = inputs["state"].to(torch.promote_types(dtype, torch.float32))
    return inputs if delta else inputs | {"beta": None}


def expected(q, k, v, beta, log_decay, state, reset):
    if beta is None:
        return gate_loop_reference(q, k, v, log_decay, None, state, reset)
    return delta_rule_reference(q, k, v, beta, log_decay, state, reset)


def agree(inputs, reset, dtype):
    names = [name for name, x in inputs.items() if x is not None]

    def outcome(run, wide):
        leaves = {
            name: (inputs[name].double() if wide else inputs[name]).detach().requires_grad_()
            for name in names
        }
        y, last = run(**(inputs | leaves), reset=reset)
        total = (y * y.detach().cos()).sum() + (last * last.detach().sin()).sum()
        return y, last, torch.autograd.grad(total, list(leaves.values()))

    assert_agree(outcome(matrix_triton.recurrent, False), outcome(expected, True), "kernel", dtype=dtype)


@on_either
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("log_decay", [None, "h", "hk", "bth", "bthk"])
def test_every_shape_of_the_decays(delta, log_decay):
    reset = reset_mask(2, 7, rate=0.2, device=DEVICE)
    agree(made(2, 7, 2, 5, 6, delta=delta, log_decay=log_decay), reset, torch.float32)


@on_either
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_one_step_in_other_precisions(delta, dtype):
    agree(made(3, 1, 2, 4, 3, delta=delta, dtype=dtype), None, dtype)


@on_either
def test_a_magnitude_of_zero_stops_the_state():
    inputs = made(1, 4, 1, 3, 2, delta=False, log_decay="bth")
    inputs["log_decay"][:, 2] = -torch.inf
    y, _ = matrix_triton.recurrent(**inputs, reset=None)
    again = {name: x if x is None else x[:, 2:] for name, x in inputs.items()} | {
        "state": 0 * inputs["state"]
    }
    assert_agree(y[:, 2:], matrix_triton.recurrent(**again, reset=None)[0])


@on_a_gpu
@pytest.mark.parametrize("size", [(64, 64), (128, 128), (256, 96), (24, 200), (1, 7)])
def test_full_heads_on_a_gpu(size):
    agree(made(2, 33, 3, *size, delta=True, dtype=torch.bfloat16), None, torch.bfloat16)
