"""Programs that torch.export makes of mixers: for all lengths, of ATen operators, run without linrec."""

import io
import os
import subprocess
import sys

import pytest
import torch
from torch.export import Dim
from torch.utils._pytree import tree_leaves, tree_map

from linrec import mixers
from linrec.export import Exportable
from linrec.ops import scan
from linrec.testing import assert_agree
from tests.mixers.variants import DEFAULTS, NONLINEAR, VARIANTS
from tests.tiers import thorough, tiered

TRACED = 20
STEP_BY_STEP = (
    "delta_lstm",
    "hippo_rnn",
    "ind_rnn",
    "recurrent_delta_net",
    "slstm",
    "sru",
    "srwm",
    *NONLINEAR,
)
"""Recurrences that are not linear: theirs is a loop, which ATen has no operator for."""

SEVERAL = ("gated_delta_product",)
"""Recurrences of several steps at a token: torch cannot prove bounds of a multiple of the length."""

COMPLEX = ("eu_rnn", "u_rnn")
"""Loops over complex numbers: torch cannot prepare gradients of their programs."""


def grows(name):
    state = mixers.build(name, 8).init_state(1)
    return any(part.numel() == 0 for part in tree_leaves(state) if part is not None)


CONSTANT = [name for name in mixers.names() if not grows(name)]
# chunks, and a selective scan
FIRST = "mamba"


def exported(mixer, time, batch=None, *, reset=False, dt=False):
    """The program of a mixer, for lengths `time` and, where it is given, batches `batch`."""
    module = Exportable(mixer)
    x, state = torch.randn(2, TRACED, mixer.d_model), module.init_state(2)
    rows = {} if batch is None else {0: batch}
    shapes = {"x": {**rows, 1: time}, "state": tree_map(lambda part: None if part is None else rows, state)}
    arguments = {}
    if reset:
        arguments["reset"], shapes["reset"] = torch.zeros(2, TRACED, dtype=torch.bool), {**rows, 1: time}
    if dt:
        arguments["dt"], shapes["dt"] = torch.ones(2, TRACED), {**rows, 1: time}
    return torch.export.export(module, (x, state), arguments, dynamic_shapes=shapes)


def operators(program):
    """Names of what a program calls, in loops too, without Python's arithmetic on sizes."""
    graphs = (module.graph for module in program.graph_module.modules() if hasattr(module, "graph"))
    called = {node.target for graph in graphs for node in graph.nodes if node.op == "call_function"}
    return {
        str(target) for target in called if getattr(target, "__module__", "") not in ("_operator", "math")
    }


@torch.no_grad
def check(program, mixer, lengths, *, batch=2, reset=False, dt=False):
    """Compare outputs and states with the mixer's, from the start and from the state of what came before."""
    run, module = program.module(), Exportable(mixer)
    for time in lengths:
        state = module.init_state(batch)
        for _ in range(2):
            x = torch.randn(batch, time, mixer.d_model)
            arguments = {"reset": torch.rand(batch, time) < 0.2} if reset else {}
            arguments |= {"dt": torch.rand(batch, time) + 0.5} if dt else {}
            expected = module(x, state, **arguments)
            assert_agree(run(x, state, **arguments), expected)
            state = expected[1]


@pytest.mark.parametrize("name", tiered([FIRST], CONSTANT))
def test_a_program_serves_all_lengths(name):
    torch.manual_seed(0)
    mixer = mixers.build(name, 8, **next(iter(VARIANTS.get(name, DEFAULTS).values())))
    with torch.set_grad_enabled(name not in COMPLEX):
        program = exported(mixer, Dim.AUTO if name in SEVERAL else Dim("time", min=2, max=256))
    loops = {"scan"} if name in STEP_BY_STEP else set()
    assert all(op.startswith("aten.") for op in operators(program) - loops)
    check(program, mixer, (2, 3, 17, 64, 200))
    # a type of linrec's own would be refused here
    torch.export.save(program, io.BytesIO())


# a scan with a running maximum, chunks, blocks of a model constant in time, and a loop
@thorough
@pytest.mark.parametrize("name", ["aft", "s4d", "gla", "sru"])
def test_a_program_takes_resets_any_batch_and_lengths_without_limit(name):
    torch.manual_seed(0)
    mixer = mixers.build(name, 4)
    program = exported(mixer, Dim("time", min=2), Dim("batch"), reset=True)
    check(program, mixer, (2, 65, 5000), batch=3, reset=True)


@thorough
@pytest.mark.parametrize("name", [name for name in CONSTANT if mixers.get(name).takes_dt])
def test_a_program_takes_irregular_steps(name):
    torch.manual_seed(0)
    mixer = mixers.build(name, 4)
    # the loops of `nonlinear_scan` are programs of one batch size
    batch, rows = (None, 2) if name in NONLINEAR else (Dim("batch"), 3)
    program = exported(mixer, Dim("time", min=2, max=256), batch, reset=True, dt=True)
    check(program, mixer, (2, 65), batch=rows, reset=True, dt=True)


@thorough
def test_a_program_can_be_trained():
    torch.manual_seed(0)
    mixer = mixers.build("gate_loop", 4)
    program = exported(mixer, Dim("time", min=2)).module()
    x, state = torch.randn(2, 50, 4), torch.randn_like(mixer.init_state(2))
    for module in (program, mixer):
        y, last = module(x, state)
        (y.square().sum() + last.abs().square().sum()).backward()
    trained = {name.removeprefix("mixer."): parameter for name, parameter in program.named_parameters()}
    assert trained.keys() == dict(mixer.named_parameters()).keys()
    for name, parameter in mixer.named_parameters():
        assert_agree(trained[name].grad, parameter.grad, name)


ELSEWHERE = """
import sys
sys.modules["linrec"] = None
import torch
program = torch.export.load(sys.argv[1]).module()
for x, state, y, last in torch.load(sys.argv[2]):
    found = program(x, state)
    torch.testing.assert_close(found, (y, last))
print([name for name in sys.modules if name.startswith("linrec.")])
"""


# a state of one tensor, and a state of several, which has a type of linrec's own
@thorough
@pytest.mark.parametrize("name", ["gla", "rwkv4"])
def test_a_saved_program_runs_without_linrec(tmp_path, name):
    torch.manual_seed(0)
    mixer = mixers.build(name, 8).eval()
    torch.export.save(exported(mixer, Dim("time", min=2, max=256)), tmp_path / "mixer.pt2")
    module = Exportable(mixer)
    cases, state = [], module.init_state(2)
    with torch.no_grad():
        for time in (2, 33, 200):
            x = torch.randn(2, time, 8)
            y, last = module(x, state)
            cases.append((x, state, y, last))
            state = last
    torch.save(cases, tmp_path / "cases.pt")
    # neither this folder nor what PYTHONPATH names is looked at
    command = [sys.executable, "-I", "-c", ELSEWHERE, str(tmp_path / "mixer.pt2"), str(tmp_path / "cases.pt")]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


FIRST = """
import torch
from linrec import mixers
from linrec.ops import scan
from linrec.ops.core.call import recording
from linrec.ops.core.machine import numba_usable
mixer = mixers.build("min_gru", 4)
torch.export.export(mixer, (torch.zeros(2, 20, 4), mixer.init_state(2)))
with recording() as calls:
    scan(torch.tensor(0.5), torch.ones(1, 20, 1))
print(numba_usable(), *(call.backend.name for call in calls))
"""


@thorough
def test_exporting_first_leaves_numba_usable():
    pytest.importorskip("numba")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", FIRST]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["True", "numba"]


def test_kernels_are_refused_in_programs():
    class Module(torch.nn.Module):
        def forward(self, x):
            return scan(torch.tensor(0.5), x, backend="numba")

    with pytest.raises(ValueError, match=r"backend='numba' of `scan` cannot be exported"):
        torch.export.export(Module(), (torch.ones(1, 20, 1),))
