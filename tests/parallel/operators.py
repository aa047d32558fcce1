"""Cases for operators: parts of time on several ranks give what the whole gives in one process."""

import itertools
import math
import sys

import torch
import torch.distributed as dist

from linrec.nn.token_shift import token_shift
from linrec.ops import (
    delta_rule,
    diagonal_ssm,
    gate_loop,
    laplace_attention,
    normalized_gate_loop,
    scan,
    selective_scan,
    short_conv,
    softmax_attention,
)
from linrec.parallel import time_parallel
from linrec.testing import (
    assert_agree,
    delta_rule_inputs,
    diagonal_ssm_inputs,
    differentiable,
    gate_loop_inputs,
    reset_mask,
    scan_inputs,
    selective_scan_inputs,
    short_conv_inputs,
)

from . import compare
from .compare import check_parts, here

OVER_TIME = ("q", "k", "v", "log_decay", "phase")
OF_DELTA_RULE = ("q", "k", "v", "beta", "log_decay")
# ways to part eleven steps: nearly even, and with parts of one step and of none
WAYS = {
    2: [(6, 5), (1, 10), (0, 11), (11, 0)],
    3: [(4, 4, 3), (1, 0, 10), (0, 11, 0)],
    4: [(3, 3, 3, 2), (0, 5, 0, 6), (1, 0, 10, 0), (0, 0, 0, 11)],
}


def ways():
    return WAYS[dist.get_world_size()]


def resets(batch, parts):
    """No resets; some anywhere; some at the first step of the sequence and of the parts, and everywhere."""
    at_edges = torch.zeros(batch, sum(parts), dtype=torch.bool)
    for first in itertools.accumulate(parts[:-1], initial=0):
        at_edges[0, min(first, sum(parts) - 1)] = True
    at_edges[-1] = True
    return None, reset_mask(batch, sum(parts), rate=0.15), at_edges


def gates_over_time(log_decay, phase):
    return tuple(
        name
        for name, axes in (("q", "b"), ("k", "b"), ("v", "b"), ("log_decay", log_decay), ("phase", phase))
        if axes is not None and axes.startswith("b")
    )


def case_scan():
    for parts, reverse in itertools.product(ways(), (False, True)):
        inputs = scan_inputs(3, 11, 5, dtype=torch.float64)
        for reset in resets(3, parts):
            check_parts(scan, inputs, ("a", "x"), parts, reset=reset, reverse=reverse)


def case_nothing_passes_a_reset():
    reset = torch.zeros(2, 11, dtype=torch.bool, device=compare.device)
    reset[:, 4] = True
    runs = [(scan, scan_inputs, (3,), {}), (scan, scan_inputs, (3,), {"reverse": True})]
    runs += [(gate_loop, gate_loop_inputs, (2, 3, 2), {}), (delta_rule, delta_rule_inputs, (2, 3, 2), {})]
    runs += [(short_conv, short_conv_inputs, (3, 4), {}), (selective_scan, selective_scan_inputs, (3, 2), {})]
    for (function, inputs_of, sizes, options), parts in itertools.product(runs, ways()):
        given = inputs_of(2, 11, *sizes, dtype=torch.float64)
        inputs = {name: x.to(compare.device) for name, x in given.items() if x is not None}
        inputs.pop("state")
        names = [name for name, x in inputs.items() if x.shape[:2] == (2, 11)]
        leaves = differentiable(inputs)
        y, _ = function(**leaves, reset=reset, **options)
        expected = y, *torch.autograd.grad(y.sum(), [leaves[name] for name in names])
        for spoilt in (slice(4), slice(4, None)):
            other = torch.ones(11, dtype=torch.bool, device=compare.device)
            other[spoilt] = False
            mine = dict(inputs)
            for name in names:
                mine[name] = inputs[name].clone()
                mine[name][:, spoilt] = torch.nan
                mine[name] = mine[name][:, here(parts)]
            mine = differentiable(mine)
            with time_parallel():
                y, _ = function(**mine, reset=reset[:, here(parts)], **options)
            found = y, *compare.gradients(y.sum(), {name: mine[name] for name in names}).values()
            for actual, whole in zip(found, expected, strict=True):
                of_other = actual[:, other[here(parts)]]
                assert_agree(of_other, whole[:, here(parts)][:, other[here(parts)]], function.__name__)


def case_delta_rule():
    for parts in ways():
        for log_decay in (None, "bth", "bthk"):
            inputs = delta_rule_inputs(3, 11, 2, 3, 2, dtype=torch.float64, log_decay=log_decay)
            over_time = [name for name in OF_DELTA_RULE if inputs[name] is not None]
            for reset in resets(3, parts):
                check_parts(delta_rule, inputs, over_time, parts, reset=reset)
        check_parts(delta_rule, inputs | {"state": None}, over_time, parts)


def case_short_conv():
    for parts, width in itertools.product(ways(), (1, 2, 4)):
        inputs = short_conv_inputs(3, 11, 5, width, dtype=torch.float64)
        for reset in resets(3, parts):
            check_parts(short_conv, inputs, ("x",), parts, reset=reset)
        check_parts(short_conv, inputs | {"state": None}, ("x",), parts)


def case_selective_scan():
    for parts in ways():
        inputs = selective_scan_inputs(3, 11, 4, 3, groups=2, dtype=torch.float64)
        for reset in resets(3, parts):
            check_parts(selective_scan, inputs, ("x", "dt", "B", "C"), parts, reset=reset)
        check_parts(selective_scan, inputs | {"state": None}, ("x", "dt", "B", "C"), parts)


def case_attention():
    for parts, window, size in itertools.product(ways(), (None, 1, 4), (2, 0)):
        q, k, v = torch.randn(3, 3, 11 + size, 2, 4, dtype=torch.float64).unbind()
        for reset, attend in itertools.product(resets(3, parts), (softmax_attention, laplace_attention)):
            _, cache = attend(q[:, :size], k[:, :size], v[:, :size], window=window)

            def run(q, k, v, reset, state_k, state_v, attend=attend, cache=cache, window=window):
                state = cache._replace(k=state_k, v=state_v)
                y, last = attend(q, k, v, state=state, reset=reset, window=window)
                alive = last.k.new_ones(last.k.shape[:2]) if last.alive is None else last.alive.to(last.k)
                return y, torch.cat([last.k.flatten(), last.v.flatten(), alive.flatten()])

            inputs = {"q": q[:, size:], "k": k[:, size:], "v": v[:, size:]}
            inputs |= {"state_k": cache.k, "state_v": cache.v}
            check_parts(run, inputs, ("q", "k", "v"), parts, reset=reset)


def case_token_shift():
    for parts in ways():
        x = torch.randn(3, 11, 5, dtype=torch.float64)
        for reset, last in itertools.product(resets(3, parts), (None, x[:, 0])):
            check_parts(token_shift, {"x": x, "last": last}, ("x",), parts, reset=reset)


def case_diagonal_ssm():
    inputs = diagonal_ssm_inputs(3, 11, 2, 3, dtype=torch.float64)
    for parts in ways():
        for reset in resets(3, parts):
            check_parts(diagonal_ssm, inputs, ("u",), parts, reset=reset)


def case_nothing_imports_the_compiler():
    # it takes seconds; the cases that use it come later
    assert "torch._dynamo" not in sys.modules


def case_every_shape_of_a():
    parts = ways()[0]
    _, reset, _ = resets(2, parts)
    for decay in ("step", "head", "channel", "constant"):
        over_time = ("a", "x") if decay in ("step", "head") else ("x",)
        for dtype, reverse in itertools.product((torch.float64, torch.complex128), (False, True)):
            inputs = scan_inputs(2, 11, 5, dtype=dtype, decay=decay)
            check_parts(scan, inputs, over_time, parts, reset=reset, reverse=reverse)


def case_scan_without_a_state_and_with_one_complex_factor():
    parts = ways()[0]
    inputs = scan_inputs(2, 11, 3, dtype=torch.complex128)
    check_parts(scan, inputs | {"state": None}, ("a", "x"), parts)
    check_parts(scan, inputs | {"a": inputs["a"].abs()}, ("a", "x"), parts)
    check_parts(scan, inputs | {"x": inputs["x"].real.clone()}, ("a", "x"), parts)


def case_every_mode_and_backend():
    parts = ways()[0]
    for pair in (("recurrent", "reference"), ("recurrent", "torch"), ("scan", "torch")):
        chosen = dict(zip(("mode", "backend"), pair, strict=True))
        inputs = scan_inputs(2, 11, 3, dtype=torch.complex128)
        check_parts(scan, inputs, ("a", "x"), parts, reset=reset_mask(2, 11), **chosen)
        for size in (1, 3):
            inputs = gate_loop_inputs(2, 11, 2, size, size, dtype=torch.float64)
            check_parts(gate_loop, inputs, OVER_TIME, parts, reset=reset_mask(2, 11), **chosen)
    inputs = gate_loop_inputs(2, 11, 2, 3, 2, dtype=torch.float64)
    check_parts(gate_loop, inputs, OVER_TIME, parts, mode="attention")


def case_long_parts():
    # longer than the chunks and blocks of every backend
    parts = (150,) * dist.get_world_size()
    reset = reset_mask(2, sum(parts), rate=0.003)
    inputs = scan_inputs(2, sum(parts), 3, dtype=torch.complex128)
    check_parts(scan, inputs, ("a", "x"), parts, reset=reset)
    for size in (1, 4):
        inputs = gate_loop_inputs(2, sum(parts), 2, size, size, dtype=torch.float64)
        check_parts(gate_loop, inputs, OVER_TIME, parts, reset=reset)
        check_parts(gate_loop, inputs, OVER_TIME, parts)


def case_every_shape_of_the_gates():
    shapes = (None, "h", "hk", "bth", "bthk")
    for count, (log_decay, phase) in enumerate(itertools.product(shapes, shapes)):
        parts = ways()[count % 3]
        for dk, dv in ((3, 2), (1, 1)):
            inputs = gate_loop_inputs(2, 11, 2, dk, dv, dtype=torch.float64, log_decay=log_decay, phase=phase)
            reset = resets(2, parts)[count % 2]
            check_parts(gate_loop, inputs, gates_over_time(log_decay, phase), parts, reset=reset)


def case_gate_loop_in_every_way():
    for parts in ways():
        for dk, dv in ((3, 2), (1, 1)):
            inputs = gate_loop_inputs(3, 11, 2, dk, dv, dtype=torch.float64)
            for reset in resets(3, parts):
                check_parts(gate_loop, inputs, OVER_TIME, parts, reset=reset)
                check_parts(gate_loop, inputs | {"state": None}, OVER_TIME, parts, reset=reset)


def case_complex_queries_and_keys():
    for phase, dk in itertools.product((None, "bthk"), (1, 3)):
        inputs = gate_loop_inputs(2, 11, 2, dk, dk, dtype=torch.float64, phase=phase, complex_qk=True)
        real = {name: inputs[name].real.clone() for name in ("q", "k")}
        over_time = gates_over_time("bthk", phase)
        for changed in ({}, {"q": real["q"]}, {"k": real["k"]}):
            given = inputs | changed
            if phase is None and "k" in changed:
                given["state"] = given["state"].real.clone()
            check_parts(gate_loop, given, over_time, ways()[0])


def case_a_bonus():
    for parts, (dk, dv) in itertools.product(ways(), ((3, 2), (1, 1))):
        for phase in (None, "bthk"):
            inputs = gate_loop_inputs(3, 11, 2, dk, dv, dtype=torch.float64, phase=phase, bonus=True)
            for reset in resets(3, parts):
                check_parts(gate_loop, inputs, gates_over_time("bthk", phase), parts, reset=reset)


def case_a_normaliser():
    for parts, bonus in itertools.product(ways(), (False, True)):
        inputs = gate_loop_inputs(3, 11, 2, 3, 3, dtype=torch.float64, bonus=bonus)
        inputs |= {"v": inputs["v"][..., :2], "floor": torch.full((3, 11, 2), 0.1, dtype=torch.float64)}
        for reset in resets(3, parts):
            over_time = (*OVER_TIME, "floor")
            check_parts(normalized_gate_loop, inputs, over_time, parts, reset=reset, signed=False)
    check_parts(normalized_gate_loop, inputs, over_time, ways()[0], signed=False, backend="reference")
    one = gate_loop_inputs(3, 11, 2, 1, 2, dtype=torch.float64, bonus=True)
    one |= {"v": one["v"][..., :1], "floor": inputs["floor"]}
    for parts in ways():
        check_parts(normalized_gate_loop, one, over_time, parts, signed=False)


def case_a_magnitude_of_zero_passes_nothing():
    parts = ways()[0]
    inputs = gate_loop_inputs(2, 11, 2, 3, 2, dtype=torch.float64)
    for step in (0, parts[0], 8):
        inputs["log_decay"][0, step] = -math.inf
    check_parts(gate_loop, inputs, OVER_TIME, parts)
    # at the first step of a part and within one: not even from a state without bounds, or a rank that has one
    inputs = scan_inputs(2, 11, 3, dtype=torch.float64)
    inputs["a"][:, parts[0]] = 0
    check_parts(scan, inputs, ("a", "x"), parts)


def case_decays_that_underflow():
    # the product over a part is zero to the computer; a quotient of two such products would be NaN
    parts = tuple(300 // dist.get_world_size() for _ in range(dist.get_world_size()))
    inputs = gate_loop_inputs(1, 300, 2, 2, 2, dtype=torch.float64)
    inputs["log_decay"] = inputs["log_decay"] - 30
    check_parts(gate_loop, inputs, OVER_TIME, parts)
    inputs = scan_inputs(1, 300, 2, dtype=torch.float64)
    check_parts(scan, inputs | {"a": inputs["a"] * 1e-12}, ("a", "x"), parts)


def case_other_precisions():
    parts = ways()[0]
    reset = reset_mask(2, 11)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        check_parts(scan, scan_inputs(2, 11, 3, dtype=dtype), ("a", "x"), parts, reset=reset)
        for size in (1, 3):
            inputs = gate_loop_inputs(2, 11, 2, size, size, dtype=dtype)
            check_parts(gate_loop, inputs, OVER_TIME, parts, reset=reset)
    check_parts(scan, scan_inputs(2, 11, 3, dtype=torch.complex64), ("a", "x"), parts, reset=reset)


def case_no_rows_and_no_steps():
    size = dist.get_world_size()
    check_parts(scan, scan_inputs(0, 11, 3, dtype=torch.float64), ("a", "x"), ways()[0])
    check_parts(scan, scan_inputs(2, 0, 3, dtype=torch.float64), ("a", "x"), (0,) * size)
    for dk in (1, 3):
        inputs = gate_loop_inputs(2, 0, 2, dk, dk, dtype=torch.float64)
        check_parts(gate_loop, inputs, OVER_TIME, (0,) * size)
        inputs = gate_loop_inputs(0, 11, 2, dk, dk, dtype=torch.float64)
        check_parts(gate_loop, inputs, OVER_TIME, ways()[0])
