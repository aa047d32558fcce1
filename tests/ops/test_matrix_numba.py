"""The Numba kernels of matrix states; test_laws.py compares their operators with the references."""

import pytest
import torch

from linrec.ops import delta_rule, gate_loop, generalized_delta_rule
from linrec.ops.delta_rule import recurrent_numba
from linrec.ops.gate_loop.variants import matrices_numba
from linrec.ops.kernels import launch
from linrec.ops.matrix import Matrix
from linrec.ops.matrix import numba as matrix_numba
from linrec.ops.matrix.numba import chunk_size
from linrec.testing import (
    assert_agree,
    check_operator,
    delta_rule_inputs,
    gate_loop_inputs,
    generalized_delta_rule_inputs,
    reset_mask,
)
from tests.ops.opcheck import check_operators
from tests.tiers import thorough

pytest.importorskip("numba")
PAIR = {"mode": "recurrent", "backend": "numba"}
DECAYS = (None, "h", "hk", "bth", "bthk")
MAKERS = {
    delta_rule: delta_rule_inputs,
    gate_loop: gate_loop_inputs,
    generalized_delta_rule: generalized_delta_rule_inputs,
}
TURNS = dict(zip(DECAYS, ("hk", "bthk", "bth", None, "h"), strict=True))


def agree(*shape, log_decay):
    """All operators on (b, t, h, dk, dv) with resets, at both ends of time among others."""
    reset = reset_mask(*shape[:2], rate=0.1)
    reset[0, 0] = reset[-1, -1] = True
    for operator, inputs in (
        (delta_rule, delta_rule_inputs(*shape, seed=shape[1], log_decay=log_decay)),
        (
            generalized_delta_rule,
            generalized_delta_rule_inputs(*shape, seed=shape[1], log_decay=log_decay),
        ),
        # every shape of phases, beside another one of decays
        (gate_loop, gate_loop_inputs(*shape, seed=shape[1], log_decay=log_decay, phase=TURNS[log_decay])),
    ):
        check_operator(operator, inputs, **PAIR, dtype=torch.float32, options={"reset": reset})


@pytest.mark.parametrize("time", [1, 3, 4, 5, 17])
def test_lengths_around_chunks(time, monkeypatch):
    monkeypatch.setattr(matrix_numba, "chunk_size", lambda q, v: 4)
    for log_decay in DECAYS:
        agree(2, time, 2, 3, 5, log_decay=log_decay)


# on one worker: Numba takes ten seconds for kernels of several threads, once
@thorough
@pytest.mark.xdist_group("matrices on threads")
@pytest.mark.parametrize("rows", [(1, 1), (2, 3)])
def test_value_channels_on_threads(rows, monkeypatch):
    # as if the machine had four threads: blocks of value channels, of which the last one is narrower
    monkeypatch.setattr(launch, "SERIAL", 0)
    width = launch.width_of
    monkeypatch.setattr(launch, "width_of", lambda rows, n, _, narrowest: width(rows, n, 4, narrowest))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    batch, heads = rows
    for log_decay in DECAYS:
        agree(batch, 20, heads, 3, 40, log_decay=log_decay)


def test_a_lane_has_all_value_channels_where_rows_keep_threads_busy():
    widths = {(8, 1): 40, (4, 1): 40, (1, 2): 32, (1, 3): 16, (1, 4): 16, (2, 2): 48, (3, 2): 32}
    for (rows, threads), width in widths.items():
        assert launch.width_of(rows, 40, threads, 16) == width, (rows, threads)


def test_layout_in_memory_does_not_matter():
    inputs = delta_rule_inputs(2, 20, 3, 4, 6)
    expected = delta_rule(**inputs, **PAIR)
    strided = {
        name: x.repeat_interleave(2, dim=2)[:, :, ::2] for name, x in inputs.items() if name != "state"
    }
    strided["state"] = inputs["state"].mT.contiguous().mT
    assert not any(x.is_contiguous() for x in strided.values())
    v = strided["v"] = strided["v"].requires_grad_()
    y, state = delta_rule(**strided, **PAIR)
    assert_agree((y, state), expected)
    # the gradient of a sum is an expanded number
    (gradient,) = torch.autograd.grad(y.sum(), v)
    y, _ = delta_rule(**inputs | {"v": inputs["v"].requires_grad_()}, **PAIR)
    assert_agree(gradient, torch.autograd.grad(y, inputs["v"], torch.ones_like(y))[0])


def test_nothing_comes_over_a_cut_link():
    inputs = {name: x.requires_grad_() for name, x in delta_rule_inputs(1, 6, 2, 3, 4).items()}
    reset = torch.tensor([[False, False, False, True, False, False]])
    y, _ = delta_rule(**inputs, reset=reset, **PAIR)
    cotangent = torch.ones_like(y)
    cotangent[:, 4] = torch.inf
    wanted = [inputs[name] for name in ("k", "v", "beta", "log_decay")]
    for gradient in torch.autograd.grad(y, wanted, cotangent):
        assert gradient[:, :3].isfinite().all()


@pytest.mark.parametrize("shape", [(0, 5, 3, 2, 2), (2, 5, 0, 2, 2), (2, 5, 3, 2, 0)])
def test_empty_axes(shape):
    inputs = {name: x.requires_grad_() for name, x in delta_rule_inputs(*shape).items()}
    y, state = delta_rule(**inputs, **PAIR)
    gradients = torch.autograd.grad(y.sum() + state.sum(), tuple(inputs.values()))
    assert all(not gradient.any() for gradient in gradients)


@thorough
@pytest.mark.parametrize("operator", MAKERS)
def test_gradients_of_gradients(operator):
    for log_decay in (None, "h", "bthk"):
        phase = {"phase": TURNS[log_decay]} if operator is gate_loop else {}
        inputs = MAKERS[operator](1, 4, 2, 2, 3, dtype=torch.float64, log_decay=log_decay, **phase)
        given = {name: x.requires_grad_() for name, x in inputs.items() if x is not None}

        def of(*tensors, names=tuple(given)):
            return operator(**dict(zip(names, tensors, strict=True)), **PAIR)

        assert torch.autograd.gradgradcheck(of, tuple(given.values()), fast_mode=True)


@pytest.mark.parametrize("operator", MAKERS)
@pytest.mark.parametrize("shared", [(), ("log_decay", "phase"), ("k", "beta", "state")])
def test_maps_with_gradients(operator, shared):
    for log_decay in ("hk", "bthk"):
        phase = {"phase": TURNS[log_decay]} if operator is gate_loop else {}
        inputs = MAKERS[operator](2, 9, 2, 3, 2, log_decay=log_decay, **phase)
        axes = {name: None if name in shared else 0 for name in inputs}
        inputs = {
            name: (x if name in shared else torch.stack([x, x.flip(0)])).requires_grad_()
            for name, x in inputs.items()
        }

        def one(inputs):
            return operator(**inputs, **PAIR)

        apart = [one({name: x if name in shared else x[i] for name, x in inputs.items()}) for i in range(2)]
        expected = tuple(torch.stack(pieces) for pieces in zip(*apart, strict=True))
        actual = torch.func.vmap(one, in_dims=(axes,))(inputs)
        assert_agree(actual, expected)
        losses = (y.square().sum() + last.abs().square().sum() for y, last in (actual, expected))
        assert_agree(*(torch.autograd.grad(loss, tuple(inputs.values())) for loss in losses))


def test_custom_operators_keep_their_promises():
    inputs = delta_rule_inputs(2, 70, 2, 3, 4)
    q, k, v, state = (inputs[name] for name in ("q", "k", "v", "state"))
    reset = reset_mask(2, 70)
    for beta, log_decay, phase, cut in (
        (None, None, None, None),
        (inputs["beta"], torch.rand(1, 1, 2, 3), None, reset),
        (None, inputs["log_decay"][..., None], torch.rand(1, 1, 2, 1), reset),
        (None, None, torch.rand(2, 70, 2, 2), None),
    ):
        kernel = matrices_numba if beta is None else recurrent_numba
        check_operators(kernel, Matrix(q, k, v, beta, log_decay, state, cut, phase))


def test_the_states_kept_for_the_adjoint_are_few_and_without_one_none():
    inputs = delta_rule_inputs(2, 160, 1, 96, 96)
    q, k, v, beta, state = (inputs[name] for name in ("q", "k", "v", "beta", "state"))
    assert chunk_size(q, v) == 16
    for keep, count in ((True, 10), (False, 0)):
        _, _, starts = recurrent_numba.forward(Matrix(q, k, v, beta, None, state, None), keep)
        assert starts.numel() == 2 * count * 96 * 96
