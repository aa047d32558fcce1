"""Programs that torch.export makes of mixers: for all batches and lengths, of ATen operators alone."""

import io
import os
import subprocess
import sys

import pytest
import torch
from torch._dynamo.exc import UserError
from torch.export import Dim
from torch.utils._pytree import tree_map

from linrec import mixers
from linrec.export import Exportable
from linrec.ops import scan
from linrec.testing import assert_agree
from tests.mixers.variants import DEFAULTS, NONLINEAR, SEGMENTED, VARIANTS, one_of_operators
from tests.tiers import thorough, tiered

TRACED = 20
STEP_BY_STEP = (
    "delta_lstm",
    "hippo_rnn",
    "ind_rnn",
    "r_transformer",
    "recurrent_delta_net",
    "recurrent_positions",
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


BY_LENGTH = (*SEGMENTED, "hyena", "sgconv", "tnn")
"""Programs of one length: Python loops over segments, or makes filters of min(t, max_length) taps."""

CONSTANT = [
    name for name in mixers.names() if not mixers.build(name, 8).state_grows and name not in BY_LENGTH
]
GROWING = [name for name in mixers.names() if name not in (*CONSTANT, *BY_LENGTH)]
# chunks, and a selective scan
FIRST = "mamba"
BATCH = Dim("batch")


def made(name):
    torch.manual_seed(0)
    # without noise
    return mixers.build(name, 8, **next(iter(VARIANTS.get(name, DEFAULTS).values()))).eval()


def exported(mixer, time=None, *, started=True, cached=False, reset=False, dt=False):
    """The program of a mixer, for all batches, and for lengths `time` where they are given.

    Args:
        mixer: the mixer.
        time: a `Dim`, or None.
        started: whether the program takes a state; without, it starts the sequences.
        cached: whether the state holds steps, of any number: a cache that grows.
        reset: whether it takes resets.
        dt: whether it takes irregular steps.
    """
    module, steps = Exportable(mixer), {0: BATCH} if time is None else {0: BATCH, 1: time}
    x, state = torch.randn(2, TRACED, mixer.d_model), module.init_state(2) if started else None
    if cached:
        # as no step may be specialised: another number than of x
        state = module(torch.randn(2, TRACED + 1, mixer.d_model))[1]

    def sizes(part):
        axes = range(1, part.dim()) if cached else ()
        return {0: BATCH, **dict.fromkeys(axes, Dim.AUTO)}

    shapes = {"x": steps, "state": tree_map(lambda part: None if part is None else sizes(part), state)}
    arguments = {}
    if reset:
        arguments["reset"], shapes["reset"] = torch.zeros(2, TRACED, dtype=torch.bool), steps
    if dt:
        arguments["dt"], shapes["dt"] = torch.ones(2, TRACED), steps
    return torch.export.export(module, (x, state), arguments, dynamic_shapes=shapes)


def operators(program):
    """Names of what a program calls, in loops too, without Python's arithmetic on sizes."""
    graphs = (module.graph for module in program.graph_module.modules() if hasattr(module, "graph"))
    called = {node.target for graph in graphs for node in graph.nodes if node.op == "call_function"}
    return {
        str(target) for target in called if getattr(target, "__module__", "") not in ("_operator", "math")
    }


@torch.no_grad
def check(program, mixer, lengths, *, started=True, cached=False, reset=False, dt=False):
    """Compare outputs and states with the mixer's, from the start and from the state of what came before."""
    run, module = program.module(), Exportable(mixer)
    for place, time in enumerate(lengths):
        # never the batch of the example, but a single row too
        batch = (3, 1, 5)[place % 3]
        state = module.init_state(batch) if started else None
        if cached:
            state = module(torch.randn(batch, 13, mixer.d_model))[1]
        for _ in range(2 if started else 1):
            x = torch.randn(batch, time, mixer.d_model)
            arguments = {"reset": torch.rand(batch, time) < 0.2} if reset else {}
            arguments |= {"dt": torch.rand(batch, time) + 0.5} if dt else {}
            expected = module(x, state, **arguments)
            assert_agree(run(x, state, **arguments), expected)
            state = expected[1]


# nearly all of a trace is that of the operator, which is the same for all its mixers
TRACED_HERE = [*one_of_operators(CONSTANT), *one_of_operators(GROWING), "aft", *SEVERAL, COMPLEX[0]]


@pytest.mark.parametrize("name", tiered([FIRST], TRACED_HERE, CONSTANT + GROWING))
def test_a_program_serves_all_batches_and_lengths(name):
    mixer = made(name)
    with torch.set_grad_enabled(name not in COMPLEX):
        time = Dim.AUTO if name in SEVERAL else Dim("time", min=2, max=256)
        program = exported(mixer, time, cached=name in GROWING)
    loops = {"scan"} if name in STEP_BY_STEP else set()
    assert all(op.startswith("aten.") for op in operators(program) - loops)
    check(program, mixer, (2, 3, 17, 64, 200), cached=name in GROWING)
    # a type of linrec's own would be refused here
    torch.export.save(program, io.BytesIO())


# mixers whose first state has the batch's size, made in the program
@pytest.mark.parametrize(
    "name",
    tiered([], ["gru", "attention", "aft"], ["rwkv4", "slstm", "linear_attention", *NONLINEAR, *GROWING]),
)
def test_a_program_starts_sequences(name):
    mixer = made(name)
    with torch.set_grad_enabled(name not in COMPLEX):
        program = exported(mixer, Dim("time", min=2, max=256), started=False)
    check(program, mixer, (2, 17, 200), started=False)


@pytest.mark.parametrize("name", tiered([], ["transformer_xl", "hyena"], BY_LENGTH))
@torch.no_grad
def test_a_program_of_one_length_serves_all_batches(name):
    mixer = made(name)
    check(exported(mixer, started=False), mixer, [TRACED] * 3, started=False)
    # the others of this file must not be here
    with pytest.raises(UserError, match=r"Constraints violated \(.*time\)"):
        exported(mixer, Dim("time", min=2, max=256), started=False)


# a scan with a running maximum, chunks, blocks of a model constant in time, loops, and decays per head
@pytest.mark.parametrize("name", tiered([], ["aft", "gla"], ["s4d", "sru", "gru", "lightning_attention"]))
def test_a_program_takes_resets_and_lengths_without_limit(name):
    torch.manual_seed(0)
    mixer = mixers.build(name, 4)
    program = exported(mixer, Dim("time", min=2), reset=True)
    check(program, mixer, (2, 65, 5000), reset=True)


# a scan, and a solver
@pytest.mark.parametrize(
    "name", tiered([], ["s5", "ltc"], [name for name in CONSTANT if mixers.get(name).takes_dt])
)
def test_a_program_takes_irregular_steps(name):
    torch.manual_seed(0)
    mixer = mixers.build(name, 4)
    program = exported(mixer, Dim("time", min=2, max=256), reset=True, dt=True)
    check(program, mixer, (2, 65), reset=True, dt=True)


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


# a state of several tensors, which has a type of linrec's own, and a state of one
@pytest.mark.parametrize("name", tiered([], ["rwkv4"], ["gla"]))
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
from linrec.ops.core.backends import numba_usable
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

    with pytest.raises(ValueError, match=r"backend='numba' of `scan`"):
        torch.export.export(Module(), (torch.ones(1, 20, 1),))
