"""What is particular to ops.scan's Numba backend: threads, custom operators, compiled graphs."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from linrec.ops import delta_rule, gate_loop, scan, selective_scan
from linrec.ops.core.kernel import successors
from linrec.ops.core.precision import real_dtype
from linrec.ops.kernels import launch
from linrec.ops.scan import numba as numba_backend
from linrec.ops.scan.torch import Scan
from linrec.testing import (
    check_operator,
    delta_rule_inputs,
    gate_loop_inputs,
    reset_mask,
    scan_inputs,
    selective_scan_inputs,
)
from tests.ops.opcheck import check_operators
from tests.tiers import thorough


@thorough
def test_a_compiled_graph_holds_kernels_and_not_their_loops():
    seen = []

    def compiler(graph, _):
        seen.extend(str(node.target) for node in graph.graph.nodes if "linrec" in str(node.target))
        return make_boxed_func(graph.forward)

    inputs = {name: t.requires_grad_() for name, t in scan_inputs(1, 20, 2).items()}
    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler)
    y, _ = torch.compile(scan, fullgraph=True, backend=backend)(**inputs, backend="numba")
    y.sum().backward()
    assert seen == ["linrec.scan_numba.default", "linrec.scan_numba_backward.default"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_custom_operators_keep_their_promises(dtype):
    inputs = scan_inputs(2, 20, 3, dtype=dtype, decay="head")
    a, x, state = inputs["a"], inputs["x"], inputs["state"]
    cut = reset_mask(2, 20)
    check_operators(numba_backend.recurrent, Scan(a, x, state, cut, False))
    check_operators(numba_backend.recurrent, Scan(a, x, None, None, True))


def test_numba_uses_as_many_threads_as_torch_and_puts_its_own_setting_back():
    numba = pytest.importorskip("numba")
    scan(torch.rand(3), torch.rand(1, 2, 3), backend="numba")
    before, torch_before = numba.get_num_threads(), torch.get_num_threads()
    most, seen = numba.config.NUMBA_NUM_THREADS, []
    look = SimpleNamespace(
        threads=lambda first, stop: seen.append(1),
        threads_parallel=lambda lanes: seen.append(numba.get_num_threads()),
    )
    try:
        for wanted in (2, 3):
            torch.set_num_threads(wanted)
            threads = launch.threads_for(1 << 20)
            assert threads == min(wanted, most)
            launch.divided(rows=8, channels=1, width=1, threads=threads).run(look, "threads")
            assert seen.pop() == threads
            assert launch.threads_for(10) == 1
            assert numba.get_num_threads() == before and torch.get_num_threads() == wanted
    finally:
        torch.set_num_threads(torch_before)


def test_numba_runs_on_many_threads_as_on_one(monkeypatch):
    # small inputs run on one thread unless this says otherwise
    monkeypatch.setattr(launch, "SERIAL", 0)
    inputs = scan_inputs(3, 65, 40, dtype=torch.float64)
    check_operator(scan, inputs, mode="recurrent", backend="numba", dtype=torch.float64)


@thorough
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_numba_runs_in_a_forked_worker():
    # like torch.utils.data's, it sets one thread; with more, OpenMP ends it
    program = (
        "import os, sys, torch, linrec.ops as ops\n"
        "a, x = torch.rand(64), torch.rand(2, 2000, 64)\n"
        "y, _ = ops.scan(a, x, backend='numba')\n"
        "child = os.fork()\n"
        "if child == 0: torch.set_num_threads(1)\n"
        "if child == 0: os._exit(0 if torch.equal(ops.scan(a, x, backend='numba')[0], y) else 1)\n"
        "sys.exit(os.waitpid(child, 0)[1])"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=100)


@thorough
@pytest.mark.parametrize(("batch", "channels"), [(1, 300), (3, 400), (2, 7), (9, 33)])
def test_numba_splits_rows_over_threads(batch, channels, monkeypatch):
    # as if the machine had four threads: rows are cut into blocks, of which the last one is narrower
    width = launch.width_of
    monkeypatch.setattr(launch, "width_of", lambda rows, n, _, narrowest: width(rows, n, 4, narrowest))
    for decay in ("step", "head", "channel", "constant"):
        # longer than the runs over which the gradient of a constant decay is summed
        inputs = scan_inputs(batch, 300, channels, decay=decay, dtype=torch.float64)
        check_operator(scan, inputs, mode="recurrent", backend="numba", dtype=torch.float64)


REAL, TURNING = {"phase": None}, {"phase": "bth"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128])
@pytest.mark.parametrize(
    ("operator", "made", "sizes", "more"),
    [
        (scan, scan_inputs, (5,), {}),
        (gate_loop, gate_loop_inputs, (2, 4, 5), REAL),
        (gate_loop, gate_loop_inputs, (6, 1, 1), REAL),
        (gate_loop, gate_loop_inputs, (6, 1, 1), TURNING),
        (delta_rule, delta_rule_inputs, (2, 4, 5), {}),
        (selective_scan, selective_scan_inputs, (6, 4), {}),
    ],
)
@torch.no_grad()
def test_the_next_state_is_written_where_it_is_wanted(operator, made, sizes, more, dtype):
    if operator is not scan:
        dtype = real_dtype(dtype)
    inputs, pair = made(3, 2, *sizes, dtype=dtype, **more), {"mode": "recurrent", "backend": "numba"}
    y, expected = operator(**inputs, **pair)
    before = inputs["state"].clone()
    buffer = torch.full_like(expected, torch.nan, memory_format=torch.contiguous_format)
    with successors([(inputs["state"], buffer)]):
        found, last = operator(**inputs, **pair)
        # a buffer has room for one state
        _, other = operator(**inputs, **pair)
    assert last.data_ptr() == buffer.data_ptr() != other.data_ptr()
    assert torch.equal(found, y)
    assert torch.equal(last, expected)
    assert torch.equal(other, expected)
    assert torch.equal(inputs["state"], before)
    # in place
    with successors([(inputs["state"], inputs["state"])]):
        found, last = operator(**inputs, **pair)
    assert last.data_ptr() == inputs["state"].data_ptr()
    assert torch.equal(found, y)
    assert torch.equal(last, expected)
