"""Torch's kernels of recurrent layers agree with the loop, and run where they can."""

import pytest
import torch

from linrec import mixers
from linrec.nn import torch_rnn
from linrec.nn.torch_rnn import run_torch_rnn
from linrec.ops.core.call import recording
from linrec.ops.nonlinear_scan import UNROLLED
from linrec.testing import assert_agree, generator
from tests.tiers import thorough

D = 6
LAYERS = {"elman": {}, "elman_relu": {"activation": "relu"}, "gru": {}, "lstm": {}}


def run(mixer, x, start, mode="auto"):
    return run_torch_rnn(mixer.rnn, mixer._cell, x, start, None, mode)


def make(layer, dtype=torch.float64):
    torch.manual_seed(0)
    mixer = mixers.build(layer.partition("_")[0], D, **LAYERS[layer]).to(dtype)
    random = generator(1)
    x = torch.randn(2, 9, D, generator=random, dtype=dtype, requires_grad=True)
    start = torch.randn(mixer.init_state(2).shape, generator=random, dtype=dtype, requires_grad=True)
    return mixer, x, start


def derivatives(mixer, x, start, mode):
    """Return outputs, first and second derivatives."""
    of = [x, start, *mixer.parameters()]
    y, state = run(mixer, x, start, mode)
    first = torch.autograd.grad(y.square().sum() + state.pow(3).sum(), of, create_graph=True)
    return y, state, first, torch.autograd.grad(sum(g.square().sum() for g in first), of)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("layer", LAYERS)
def test_kernels_give_the_outputs_and_derivatives_of_the_loop(layer, dtype):
    arguments = make(layer, dtype)
    assert_agree(derivatives(*arguments, "auto"), derivatives(*arguments, "recurrent"), dtype=dtype)


@pytest.mark.parametrize("layer", ["gru", "lstm"])
def test_kernels_without_second_derivatives_leave_them_to_the_loop(layer, monkeypatch):
    """The path of CUDA, with the kernels of the CPU."""
    arguments = make(layer)
    expected = derivatives(*arguments, "recurrent")
    monkeypatch.setattr(torch_rnn, "_only_once", lambda x: True)
    with recording() as calls:
        # the record must not itself lead to the loop
        monkeypatch.setattr(torch_rnn, "handled", lambda: False)
        found = derivatives(*arguments, "auto")
    assert_agree(found, expected)
    assert [call.operator.name for call in calls] == ["nonlinear_scan"]


def test_first_derivatives_of_those_kernels_run_no_loop(monkeypatch):
    mixer, x, start = make("lstm")
    monkeypatch.setattr(torch_rnn, "_only_once", lambda x: True)
    found = []
    for mode in ("auto", "recurrent"):
        with recording() as calls:
            monkeypatch.setattr(torch_rnn, "handled", lambda: False)
            y, _ = run(mixer, x, start, mode)
            # without a gradient of the state, for the inputs alone
            found.append(torch.autograd.grad(y.square().sum(), [x, mixer.rnn.weight_hh_l0]))
        assert len(calls) == (mode == "recurrent")
    assert_agree(*found)


def kernels_ran(monkeypatch, function):
    """Return whether a function called torch's kernels."""
    called = []
    served = torch_rnn._kernels
    monkeypatch.setattr(torch_rnn, "_kernels", lambda rnn: called.append(rnn) or served(rnn))
    function()
    return bool(called)


def test_kernels_run_without_resets_in_eager_calls(monkeypatch):
    mixer, x, start = make("lstm")
    assert kernels_ran(monkeypatch, lambda: mixer(x, start))


def test_kernels_run_under_autocast(monkeypatch):
    mixer, x, start = make("lstm", torch.float32)

    def autocast():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            mixer(x.bfloat16(), start)

    assert kernels_ran(monkeypatch, autocast)


def with_resets(mixer, x, start):
    mixer(x, start, reset=torch.zeros(2, 9, dtype=torch.bool))


def recorded(mixer, x, start):
    with recording() as calls:
        mixer(x, start)
    assert [call.operator.name for call in calls] == ["nonlinear_scan"]


def mapped(mixer, x, start):
    y, _ = torch.func.vmap(lambda x, start: mixer(x[None], start[None]))(x, start)
    assert_agree(y[:, 0], run(mixer, x, start, "recurrent")[0])


def empty(mixer, x, start):
    y, state = mixer(x[:, :0], start)
    assert y.shape == (2, 0, D)
    assert_agree(state, start)


def half(mixer, x, start):
    mixer.bfloat16()(x.bfloat16())


@pytest.mark.parametrize("call", [with_resets, recorded, mapped, empty, half])
def test_the_loop_runs_where_kernels_do_not_take_the_call(call, monkeypatch):
    arguments = make("lstm")
    assert not kernels_ran(monkeypatch, lambda: call(*arguments))


@thorough
@pytest.mark.parametrize("layer", ["gru", "lstm"])
@pytest.mark.parametrize(("time", "kernels"), [(UNROLLED + 1, True), (5, False)])
def test_kernels_run_in_compiled_programs_of_many_steps(layer, time, kernels, monkeypatch):
    mixer, _, start = make(layer)
    x = torch.randn(2, time, D, dtype=torch.float64, requires_grad=True)
    of = [x, start, *mixer.parameters()]

    def values(layer):
        y, state = layer(2 * x, start)
        return y, state, torch.autograd.grad((3 * y).sum() + state.sum(), of)

    expected = values(mixer)
    torch.compiler.reset()
    found = []
    compiled = torch.compile(mixer, backend="aot_eager")
    assert kernels_ran(monkeypatch, lambda: found.append(values(compiled))) == kernels
    assert_agree(found[0], expected)
