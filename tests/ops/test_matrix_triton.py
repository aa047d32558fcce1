"""The step-by-step Triton kernel of matrix states: on a GPU where there is one, else interpreted."""

import itertools
from functools import partial

import pytest
import torch

from linrec.nn import rotary as module
from linrec.nn.rotary import Rotary, rotary_gate_loop
from linrec.ops import delta_rule, gate_loop, generalized_delta_rule
from linrec.ops.core.call import recording
from linrec.ops.core.kernel import successors
from linrec.ops.matrix import triton
from linrec.testing import (
    assert_agree,
    delta_rule_inputs,
    gate_loop_inputs,
    generalized_delta_rule_inputs,
    reset_mask,
)
from tests.tiers import thorough, tiered

from .entries import canonical
from .opcheck import UTILITIES
from .triton_process import (
    DEVICE,
    INTERPRETED,
    on_a_gpu,
    on_either,
    on_views,
    quiet,
)

pytest.importorskip("triton")
pytestmark = quiet
PAIR = {"mode": "recurrent", "backend": "triton"}
ORACLE = {"mode": "recurrent", "backend": "reference"}


MAKERS = {
    gate_loop: gate_loop_inputs,
    delta_rule: delta_rule_inputs,
    generalized_delta_rule: generalized_delta_rule_inputs,
}


def made(operator, *size, **arguments):
    more = {"phase": None} if operator is gate_loop else {}
    inputs = MAKERS[operator](*size, **more | arguments)
    return {name: x if x is None else x.to(DEVICE) for name, x in inputs.items()}


def agree(operator, inputs, dtype=torch.float32, reset=None):
    wide = {
        name: x if x is None else x.to(torch.complex128 if x.is_complex() else torch.float64)
        for name, x in inputs.items()
    }
    with torch.no_grad():
        actual = operator(**inputs, reset=reset, **PAIR)
    assert_agree(actual, operator(**wide, reset=reset, **ORACLE), "kernel", dtype=dtype)


@thorough
@on_either
@pytest.mark.parametrize("operator", MAKERS)
@pytest.mark.parametrize("log_decay", [None, "h", "hk", "bth", "bthk"])
def test_every_shape_of_the_decays(operator, log_decay):
    reset = reset_mask(2, 7, rate=0.2, device=DEVICE)
    agree(operator, made(operator, 2, 7, 2, 5, 6, log_decay=log_decay), reset=reset)


@on_either
@pytest.mark.parametrize("operator", MAKERS)
@pytest.mark.parametrize("time", [1, 3])
def test_views(operator, time):
    agree(on_views(operator), made(operator, 2, time, 3, 4, 5))


@on_either
@pytest.mark.parametrize("operator", MAKERS)
@pytest.mark.parametrize("dtype", tiered([torch.float16], [torch.float64]))
def test_one_step_in_other_precisions(operator, dtype):
    agree(operator, made(operator, 3, 1, 2, 4, 3, dtype=dtype), dtype)


GATES = [None, "h", "hk", "bth", "bthk"]
# q and k are real or complex
PARTS = list(itertools.product([False, True], [False, True]))
# every shape of each gate, and every kind of q and k
PHASES = [
    (None, "h", (False, False)),
    ("h", "hk", (True, True)),
    ("bthk", "bth", (True, False)),
    ("hk", "bthk", (False, True)),
    ("bth", None, (False, True)),
    # the state is real, and y is that of the real part of q
    ("h", None, (True, False)),
]
EVERY_PHASE = [case for case in itertools.product(GATES, GATES[1:], PARTS) if case not in PHASES]


def turning(*size, q_is_complex=True, k_is_complex=True, **gates):
    """Return inputs of `gate_loop` with complex q and k, or one of them."""
    inputs = made(gate_loop, *size, complex_qk=True, **{"phase": "bthk"} | gates)
    kinds = {"q": q_is_complex, "k": k_is_complex, "state": k_is_complex or inputs["phase"] is not None}
    return inputs | {name: inputs[name].real for name, is_complex in kinds.items() if not is_complex}


@on_either
@pytest.mark.parametrize(("log_decay", "phase", "parts"), tiered(PHASES, rare=EVERY_PHASE))
@pytest.mark.parametrize("time", tiered([3], [1]))
def test_complex_numbers(log_decay, phase, parts, time):
    q_is_complex, k_is_complex = parts
    gates = {"log_decay": log_decay, "phase": phase}
    inputs = turning(2, time, 2, 5, 6, q_is_complex=q_is_complex, k_is_complex=k_is_complex, **gates)
    agree(gate_loop, inputs, reset=reset_mask(2, time, rate=0.3, device=DEVICE))


@on_either
@pytest.mark.parametrize("is_complex", [False, True])
@pytest.mark.parametrize("dv", [4, 7])
def test_states_of_several_blocks(is_complex, dv, monkeypatch):
    # blocks of 4 x 4 numbers, and of 4 x 2 complex numbers
    monkeypatch.setattr(triton, "STATE", 16)
    inputs = turning(2, 2, 2, 3, dv) if is_complex else made(gate_loop, 2, 2, 2, 3, dv)
    agree(gate_loop, inputs)


@on_either
@pytest.mark.parametrize("dtype", tiered([torch.float16], [torch.float64]))
def test_complex_states_in_other_precisions(dtype):
    agree(gate_loop, made(gate_loop, 2, 2, 2, 3, 4, dtype=dtype, phase="hk"), dtype)
    if dtype == torch.float64:
        agree(gate_loop, turning(2, 2, 2, 3, 4, dtype=dtype), dtype)


@on_either
def test_a_bonus_of_complex_keys():
    inputs = turning(2, 1, 2, 3, 4) | {"bonus": torch.randn(2, 3, device=DEVICE)}
    agree(gate_loop, inputs)
    agree(gate_loop, inputs, reset=torch.tensor([[True], [False]], device=DEVICE))


@on_either
def test_conjugates_and_views_of_complex_numbers():
    inputs = turning(2, 2, 2, 3, 4)
    expected = gate_loop(**inputs, **ORACLE)
    # memory in another order, and conjugation that is still to be done
    strided = {name: inputs[name].mT.contiguous().mT for name in ("q", "k", "v", "phase", "state")}
    lazy = {name: inputs[name].conj().resolve_conj().conj() for name in ("q", "k", "state")}
    assert all(x.is_conj() for x in lazy.values()) and not strided["state"].is_contiguous()
    with torch.no_grad():
        assert_agree(gate_loop(**inputs | strided, **PAIR), expected)
        assert_agree(gate_loop(**inputs | lazy, **PAIR), expected)


@on_either
def test_phases_of_any_size():
    angles = torch.tensor([1e-30, 3.2, -4.0, -12345.678, 1e5, 3e7, -1e12], device=DEVICE)
    ones = torch.ones(1, 1, 7, 1, device=DEVICE)
    start = torch.ones(1, 7, 1, 1, device=DEVICE)
    _, state = gate_loop(ones, 0 * ones, ones, phase=angles, state=start, **PAIR)
    expected = torch.polar(torch.ones(7, dtype=torch.float64), angles.cpu().double())
    assert_agree(state.flatten().cpu(), expected.to(torch.complex64))


@on_either
@pytest.mark.parametrize("is_complex", [False, True])
@pytest.mark.parametrize("at", [0, 2])
def test_nothing_passes_a_reset(is_complex, at):
    inputs = turning(1, 4, 2, 3, 2, log_decay="bth") if is_complex else made(gate_loop, 1, 4, 2, 3, 2)
    gates = ("q", "k", "v", "log_decay") + ("phase",) * is_complex
    after = {name: inputs[name][:, at:] for name in gates}
    spoilt = {name: inputs[name].clone() for name in (*gates, "state")}
    for name in gates:
        spoilt[name][:, :at] = torch.nan
    spoilt["state"].fill_(torch.inf)
    reset = torch.arange(4, device=DEVICE)[None] == at
    with torch.no_grad():
        y, last = gate_loop(**inputs | spoilt, reset=reset, **PAIR)
    expected = gate_loop(**inputs | after | {"state": None}, **ORACLE)
    assert_agree((y[:, at:], last), expected)


@on_either
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_single_steps_of_a_rotary_memory(dtype, monkeypatch):
    rotary = Rotary(6)
    q, k, v = torch.randn(3, 2, 4, 3, 6, device=DEVICE).to(dtype)
    log_decay = torch.tensor([-0.1, -0.2, 0.0], device=DEVICE)
    whole, last = rotary_gate_loop(rotary, *(x.double() for x in (q, k, v)), log_decay.double())
    monkeypatch.setattr(module, "gate_loop", partial(gate_loop, **PAIR))
    state, steps = None, []
    for n in range(4):
        step = (x[:, n : n + 1] for x in (q, k, v))
        y, state = rotary_gate_loop(rotary, *step, log_decay, state=state)
        steps.append(y)
    assert_agree(torch.cat(steps, 1), whole, dtype=dtype)
    assert_agree(state, last)


@on_either
def test_no_rows_and_no_values():
    for inputs in (turning(0, 1, 2, 3, 4), turning(2, 1, 2, 3, 0)):
        y, last = gate_loop(**inputs, **PAIR)
        assert y.shape == inputs["v"].shape and last.dtype == torch.complex64
        assert last.shape == inputs["state"].shape


@on_either
@pytest.mark.parametrize("kind", ["real", "delta rule", "complex"])
def test_the_declared_outputs_are_those_of_the_kernel(kind):
    inputs = made(gate_loop, 2, 3, 2, 3, 4, phase="hk" if kind == "complex" else None)
    q, k, v, log_decay, phase, _, state, reset = canonical(gate_loop, **inputs)
    beta = torch.rand(2, 3, 2, device=DEVICE) if kind == "delta rule" else None
    given = triton.Steps(q, k, v, beta, log_decay, state, reset, phase)
    op = torch.ops.linrec.matrix_steps_triton.default
    torch.library.opcheck(op, (*given, False), test_utils=UTILITIES)


@on_either
@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
def test_complex_states_compile_into_one_graph():
    inputs = turning(2, 1, 2, 3, 4)
    # the compiler's own use of Triton does not go through the interpreter
    compiled = torch.compile(gate_loop, fullgraph=True, backend="aot_eager" if INTERPRETED else "inductor")
    with torch.no_grad():
        assert_agree(compiled(**inputs, **PAIR), gate_loop(**inputs, **PAIR))


@on_either
@pytest.mark.parametrize("operator", MAKERS)
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
@pytest.mark.parametrize("is_complex", [False, True])
def test_vmap_folds_the_mapped_axis_into_the_batch(is_complex):
    q, k, v = torch.randn(3, 2, 1, 3, 2, 4, device=DEVICE)
    log_decay, phase = -torch.rand(2, 2, 1, 3, 2, device=DEVICE)
    k, given = (torch.complex(k, q), (log_decay, phase)) if is_complex else (k, (log_decay,))
    with torch.no_grad():
        mapped = torch.vmap(lambda *x: gate_loop(*x, **PAIR))(q, k, v, *given)
        rows = [gate_loop(*x, **PAIR) for x in zip(q, k, v, *given, strict=True)]
    assert_agree(mapped, tuple(map(torch.stack, zip(*rows, strict=True))))


@on_a_gpu
@pytest.mark.parametrize("size", [(64, 64), (128, 128), (256, 96), (24, 200), (1, 7)])
@pytest.mark.parametrize("operator", [delta_rule, generalized_delta_rule])
def test_full_heads_on_a_gpu(operator, size):
    agree(operator, made(operator, 2, 33, 3, *size, dtype=torch.bfloat16), torch.bfloat16)


@on_a_gpu
@pytest.mark.parametrize("size", [(128, 512), (256, 96), (24, 200), (1, 7)])
@pytest.mark.parametrize("time", [1, 33])
def test_full_heads_of_complex_numbers_on_a_gpu(size, time):
    agree(gate_loop, turning(2, time, 3, *size, log_decay="h", phase="hk"))


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
@pytest.mark.parametrize("phase", [None, "hk"])
def test_the_next_state_is_written_where_a_graph_wants_it(phase):
    inputs = made(gate_loop, 2, 1, 3, 4, 5, log_decay="bth", phase=phase)
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
