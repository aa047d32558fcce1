"""Random calls of every operator against its float64 reference.

They differ in shapes, dtypes, layouts in memory, modes, states and resets.

A few calls of each operator, the same in every run, are part of the tests. The long search makes new ones:

    pytest tests/ops/test_random_calls.py --hypothesis-profile long -n auto

With a CUDA device, the calls marked `gpu` run every Triton kernel.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from linrec import ops
from linrec.ops.core.backends import refusal
from linrec.testing import (
    check_operator,
    delta_rule_inputs,
    dense_ssm_inputs,
    diagonal_ssm_inputs,
    dplr_ssm_inputs,
    gate_loop_inputs,
    generalized_delta_rule_inputs,
    generator,
    long_conv_inputs,
    nonlinear_scan_inputs,
    scan_inputs,
    selective_scan_inputs,
    short_conv_inputs,
)
from tests.tiers import thorough

from .entries import canonical, runs
from .triton_process import on_a_gpu, quiet

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies
Draw = Callable[[Any], Any]
Call = tuple[dict[str, Tensor | None], dict[str, Any]]

pytestmark = quiet
TIMES = st.sampled_from([1, 2, 3, 7, 16, 17, 33, 64, 65, 100])
FEW = st.integers(1, 3)
WIDTHS = st.sampled_from([1, 2, 3, 5, 8, 16, 33])
REAL = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])
COMPLEX = st.sampled_from([torch.complex64, torch.complex128])
SEEDS = st.integers(0, 1 << 20)
GATES = st.sampled_from([None, "h", "hk", "bth", "bthk"])
# no decay at all, a decay to zero, one below the least positive number, one that float32 rounds to no decay
EXTREME_DECAYS = (0.0, -math.inf, -1e4, -1e-9)


def extreme(draw: Draw, log_decay: Tensor | None, seed: int) -> Tensor | None:
    """The log decays, some or all of them at the ends of their range."""
    if log_decay is None:
        return None
    rate = draw(st.sampled_from([0.0, 0.1, 1.0]))
    chosen = torch.rand(log_decay.shape, generator=generator(seed)) < rate
    return log_decay.masked_fill(chosen, draw(st.sampled_from(EXTREME_DECAYS)))


def scan_call(draw: Draw) -> Call:
    dtype, seed = draw(st.one_of(REAL, COMPLEX)), draw(SEEDS)
    decay = draw(st.sampled_from(["step", "head", "channel", "constant"]))
    inputs = scan_inputs(draw(FEW), draw(TIMES), draw(WIDTHS), dtype=dtype, decay=decay, seed=seed)
    zeros = torch.rand(inputs["a"].shape, generator=generator(seed)) < draw(st.sampled_from([0, 0.1]))
    inputs["a"] = inputs["a"].masked_fill(zeros, 0.0)
    return inputs, {"reverse": draw(st.booleans())}


def matrix_call(draw: Draw, **chosen: Any) -> dict[str, Tensor | None]:
    """Inputs of `gate_loop`, with extreme decays."""
    seed, shape = draw(SEEDS), (draw(FEW), draw(TIMES), draw(FEW), draw(WIDTHS), draw(WIDTHS))
    chosen = {"dtype": draw(REAL), "log_decay": draw(GATES), "phase": draw(GATES), "seed": seed} | chosen
    if chosen.get("complex_qk") is None:
        single = chosen["dtype"] in (torch.float32, torch.float64)
        chosen["complex_qk"] = single and chosen["phase"] is not None and draw(st.booleans())
    inputs = gate_loop_inputs(*shape, **chosen)
    inputs["log_decay"] = extreme(draw, inputs["log_decay"], seed)
    return inputs


def gate_loop_call(draw: Draw) -> Call:
    return matrix_call(draw, bonus=draw(st.booleans())), {}


def normalized_gate_loop_call(draw: Draw) -> Call:
    inputs = matrix_call(draw, phase=None, complex_qk=False, bonus=draw(st.booleans()))
    # denominators that do not cancel: sums of positive features
    changed = {"q": 0.1, "k": 0.1, "bonus": 0.1}
    inputs |= {name: inputs[name].abs() + least for name, least in changed.items() if name in inputs}
    state = inputs["state"]
    inputs["state"] = torch.cat([state, state[..., :1].abs().clamp(0.1, 10)], -1)
    return inputs, {"floor": draw(st.sampled_from([1e-6, 0.5])), "signed": draw(st.booleans())}


def gate_loop_attention_call(draw: Draw) -> Call:
    inputs = matrix_call(draw)
    del inputs["state"]
    return inputs, {"scale": draw(st.sampled_from([1.0, 0.3]))}


def attention_call(draw: Draw) -> dict[str, Tensor | None]:
    """Queries, and keys and values of as many heads or of one."""
    inputs = matrix_call(draw, log_decay=None, phase=None, complex_qk=False)
    groups = draw(st.sampled_from([inputs["q"].shape[2], 1]))
    return {"q": inputs["q"], "k": inputs["k"][:, :, :groups], "v": inputs["v"][:, :, :groups]}


def softmax_attention_call(draw: Draw) -> Call:
    inputs = attention_call(draw)
    if draw(st.booleans()):
        inputs["slopes"] = torch.logspace(-3, 1, inputs["q"].shape[2]).to(inputs["q"].dtype)
    return inputs, {"window": draw(st.sampled_from([None, 1, 4, 100]))}


def laplace_attention_call(draw: Draw) -> Call:
    function = draw(st.sampled_from(["laplace", "relu2"]))
    return attention_call(draw), {"window": draw(st.sampled_from([None, 1, 4, 100])), "function": function}


def delta_rule_call(draw: Draw) -> Call:
    seed, shape = draw(SEEDS), (draw(FEW), draw(TIMES), draw(FEW), draw(WIDTHS), draw(WIDTHS))
    chosen = {
        "dtype": draw(REAL),
        "log_decay": draw(GATES),
        "largest_beta": draw(st.sampled_from([1.0, 2.0])),
    }
    inputs = delta_rule_inputs(*shape, seed=seed, **chosen)
    inputs["log_decay"] = extreme(draw, inputs["log_decay"], seed)
    return inputs, {}


def generalized_delta_rule_call(draw: Draw) -> Call:
    seed, shape = draw(SEEDS), (draw(FEW), draw(TIMES), draw(FEW), draw(WIDTHS), draw(WIDTHS))
    inputs = generalized_delta_rule_inputs(*shape, seed=seed, dtype=draw(REAL), log_decay=draw(GATES))
    inputs["log_decay"] = extreme(draw, inputs["log_decay"], seed)
    return inputs, {}


def selective_scan_call(draw: Draw) -> Call:
    groups = draw(st.sampled_from([None, 1, 3]))
    shape = draw(FEW), draw(TIMES), 3 * draw(FEW), draw(st.sampled_from([1, 2, 3, 4, 16, 17]))
    chosen = {"groups": groups, "skip": draw(st.booleans()), "dtype": draw(REAL)}
    return selective_scan_inputs(*shape, seed=draw(SEEDS), **chosen), {}


def diagonal_ssm_call(draw: Draw) -> Call:
    shape = draw(FEW), draw(TIMES), draw(WIDTHS), draw(st.sampled_from([1, 2, 4, 7]))
    chosen = {"dtype": draw(REAL), "is_complex": draw(st.booleans()), "shared": draw(st.booleans())}
    return diagonal_ssm_inputs(*shape, seed=draw(SEEDS), **chosen), {}


def dense_ssm_call(draw: Draw) -> Call:
    shape = (
        draw(FEW),
        draw(TIMES),
        draw(FEW),
        draw(st.sampled_from([1, 2, 4])),
        draw(st.sampled_from([None, 1, 3])),
    )
    return dense_ssm_inputs(*shape, shared=draw(st.booleans()), dtype=draw(REAL), seed=draw(SEEDS)), {}


def dplr_ssm_call(draw: Draw) -> Call:
    shape = draw(FEW), draw(TIMES), draw(FEW), draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2]))
    return dplr_ssm_inputs(*shape, dtype=draw(REAL), seed=draw(SEEDS)), {}


def long_conv_call(draw: Draw) -> Call:
    time = draw(TIMES)
    taps, past = draw(st.integers(1, time)), draw(st.sampled_from([0, 1, 5]))
    shape = draw(FEW), time, draw(WIDTHS), taps
    return long_conv_inputs(*shape, past=past, dtype=draw(REAL), seed=draw(SEEDS)), {}


def short_conv_call(draw: Draw) -> Call:
    shape = draw(FEW), draw(TIMES), draw(WIDTHS), draw(st.integers(1, 5))
    return short_conv_inputs(*shape, dtype=draw(REAL), seed=draw(SEEDS)), {"silu": draw(st.booleans())}


def nonlinear_scan_call(draw: Draw) -> Call:
    shape = draw(FEW), draw(TIMES), draw(FEW)
    inputs = nonlinear_scan_inputs(*shape, pairs=draw(st.booleans()), dtype=draw(REAL), seed=draw(SEEDS))
    gradient = draw(st.sampled_from(["auto", "adjoint", "autograd"]))
    return inputs, {"cell": inputs.pop("cell"), "gradient": gradient}


CALLS: dict[str, Callable[[Draw], Call]] = {
    "scan": scan_call,
    "gate_loop": gate_loop_call,
    "normalized_gate_loop": normalized_gate_loop_call,
    "gate_loop_attention": gate_loop_attention_call,
    "softmax_attention": softmax_attention_call,
    "laplace_attention": laplace_attention_call,
    "delta_rule": delta_rule_call,
    "generalized_delta_rule": generalized_delta_rule_call,
    "selective_scan": selective_scan_call,
    "diagonal_ssm": diagonal_ssm_call,
    "dense_ssm": dense_ssm_call,
    "dplr_ssm": dplr_ssm_call,
    "long_conv": long_conv_call,
    "short_conv": short_conv_call,
    "nonlinear_scan": nonlinear_scan_call,
}


def laid_out(draw: Draw, x: Tensor) -> Tensor:
    """The same values in memory with axes in another order, with gaps, or from an odd place on."""
    layout = draw(st.sampled_from(["contiguous", "contiguous", "permuted", "apart", "offset"]))
    if layout == "permuted":
        order = draw(st.permutations(range(x.ndim)))
        return x.permute(order).contiguous().permute([order.index(axis) for axis in range(x.ndim)])
    if layout == "apart" and x.ndim:
        axis = draw(st.integers(0, x.ndim - 1))
        return x.repeat_interleave(2, axis)[(slice(None),) * axis + (slice(None, None, 2),)]
    if layout == "offset":
        return torch.cat([x.new_zeros(3), x.flatten()])[3:].view(x.shape)
    return x


def resets(draw: Draw, batch: int, time: int) -> dict[str, Tensor]:
    """A `reset` at no, some or all steps, or none at all."""
    rate = draw(st.sampled_from([None, 0.0, 0.1, 0.4, 1.0]))
    if rate is None:
        return {}
    return {"reset": torch.rand(batch, time, generator=generator(draw(SEEDS))) < rate}


def _carries_nothing(inputs: dict[str, Any], options: dict[str, Any]) -> bool:
    """Whether no state reaches a step: a single step without a state, resets, or decays of zero."""
    log_decay, reset = inputs.get("log_decay"), options.get("reset")
    if inputs["q"].shape[1] == 1 and inputs.get("state") is None:
        return True
    decayed = log_decay is not None and bool((log_decay == -torch.inf).all())
    return decayed or (reset is not None and bool(reset.all()))


def check_call(name: str, draw: Draw, device: str) -> None:
    inputs, options = CALLS[name](draw)
    operator = getattr(ops, name)
    first = next(x for x in inputs.values() if x is not None and x.ndim > 2)
    lowest = min(
        (x.dtype for x in inputs.values() if x is not None), key=lambda dtype: dtype.to_real().itemsize
    )
    if draw(st.booleans()):
        inputs |= {"state": None}
    options |= resets(draw, first.shape[0], first.shape[1])
    table, given = operator.operator, canonical(operator, **inputs, **options)
    fast = [
        entry
        for entry in table.backends
        if entry.name != "reference"
        and refusal(name, entry.name, device) is None
        and runs(table, entry, given)
    ]
    if device == "cuda":
        fast = [entry for entry in fast if entry.name == "triton"] or fast
    entry = draw(st.sampled_from(fast))
    mode, backend = entry.mode, entry.name
    if name.endswith("delta_rule") and (mode, backend, lowest) == ("chunkwise", "triton", torch.float16):
        # corrected values are rounded several times
        lowest = torch.bfloat16
    moved = {key: x if x is None else laid_out(draw, x.to(device)) for key, x in inputs.items()}
    options = {key: x.to(device) if isinstance(x, Tensor) else x for key, x in options.items()}
    function = operator
    if moved.get("phase") is not None and _carries_nothing(moved, options):
        # the gradient of a phase that turns nothing is what sums that cancel leave of rounding
        def function(phase: Tensor, **arguments: Any) -> Any:
            return operator(phase=phase.detach(), **arguments)

    chosen = {"mode": mode, "backend": backend, "gradients": entry.differentiable}
    check_operator(function, moved, dtype=lowest, options=options, **chosen)


@thorough
@pytest.mark.parametrize("name", CALLS)
@hypothesis.given(data=st.data())
def test_random_calls(name, data):
    check_call(name, data.draw, "cpu")


@on_a_gpu
@pytest.mark.parametrize("name", CALLS)
@hypothesis.given(data=st.data())
def test_random_calls_on_a_gpu(name, data):
    check_call(name, data.draw, "cuda")


def test_every_operator_is_called():
    functions = {name: f for name, f in vars(ops).items() if inspect.isfunction(f)}
    assert CALLS.keys() == {
        name for name, f in functions.items() if "mode" in inspect.signature(f).parameters
    }
