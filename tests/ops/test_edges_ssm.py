"""State-space operators at the edges of what they take: empty axes, meta tensors, and what is no tensor."""

import pytest
import torch

from linrec.ops import dense_ssm, diagonal_ssm, dplr_ssm
from linrec.ops.diagonal_ssm import growing_ssm
from linrec.ops.diagonal_ssm.torch import GrowingSSM
from linrec.testing import dense_ssm_inputs, diagonal_ssm_inputs, dplr_ssm_inputs, reset_mask
from tests.tiers import thorough, tiered

OPERATORS = {
    "diagonal": (diagonal_ssm, diagonal_ssm_inputs, {}),
    "real": (diagonal_ssm, diagonal_ssm_inputs, {"is_complex": False, "shared": True}),
    "dense": (dense_ssm, dense_ssm_inputs, {"outputs": 2}),
    "states": (dense_ssm, dense_ssm_inputs, {"outputs": None, "shared": True}),
    "dplr": (dplr_ssm, dplr_ssm_inputs, {"rank": 2}),
}
PAIRS = ("recurrent", "reference"), ("recurrent", "torch"), ("convolution", "torch"), ("auto", "auto")
SCAN = ("scan", "torch"), ("recurrent", "numba")

every_pair = pytest.mark.parametrize(
    ("case", "mode", "backend"),
    [
        (case, *pair)
        for case in OPERATORS
        for pair in PAIRS + (SCAN if OPERATORS[case][0] is diagonal_ssm else ())
    ],
)


def inputs(case, *shape, dtype=torch.float32):
    make, arguments = OPERATORS[case][1:]
    return {name: x for name, x in make(*shape, 4, **arguments, dtype=dtype).items() if x is not None}


@every_pair
@pytest.mark.parametrize(("batch", "time", "channels"), [(0, 20, 3), (2, 0, 3), (2, 20, 0), (0, 0, 0)])
def test_empty_axes(case, mode, backend, batch, time, channels):
    given = inputs(case, 2, 20, 3)
    for name, x in given.items():
        if name == "u":
            x = x[:batch, :time, :channels]
        elif name == "state":
            x = x[:batch, :channels]
        elif x.shape[0] == 3:
            x = x[:channels]
        given[name] = x.clone().requires_grad_()
    for reset in (None, reset_mask(2, 20)[:batch, :time]):
        for state in (given["state"], None):
            options = {"state": state, "reset": reset, "mode": mode, "backend": backend}
            y, last = OPERATORS[case][0](**given | options)
            assert y.shape[:3] == (batch, time, channels) and y.dtype == torch.float32
            assert last.shape == given["state"].shape and last.dtype == given["state"].dtype
            assert torch.equal(last, torch.zeros_like(last) if state is None else state)
            # gradients have a place to go
            wanted = [x for name, x in given.items() if name != "state" or state is not None]
            gradients = torch.autograd.grad(y.sum() + last.abs().sum(), wanted, materialize_grads=True)
            assert [g.shape for g in gradients] == [x.shape for x in wanted]


@pytest.mark.parametrize(("mode", "backend"), PAIRS)
def test_a_dense_model_without_states_gives_zeros(mode, backend):
    A, B, C, state = (torch.zeros(shape) for shape in ((0, 0), (0,), (2, 0), (2, 3, 0)))
    y, last = dense_ssm(torch.ones(2, 20, 3), A, B, C, state=state, mode=mode, backend=backend)
    assert torch.equal(y, torch.zeros(2, 20, 3, 2)) and last.shape == (2, 3, 0)


@pytest.mark.parametrize(("mode", "backend"), PAIRS)
def test_dense_matrices_for_no_channel(mode, backend):
    u, A, B, C = torch.ones(2, 20, 0), torch.ones(4, 4), torch.ones(0, 4), torch.ones(3, 4)
    y, last = dense_ssm(u, A, B, C, mode=mode, backend=backend)
    assert y.shape == (2, 20, 0, 3) and last.shape == (2, 0, 4)


@pytest.mark.parametrize("mode", ["auto", "convolution", "recurrent", "scan"])
@pytest.mark.parametrize(("batch", "time"), [(0, 20), (2, 0)])
def test_growing_models_with_empty_axes(mode, batch, time):
    u, a, b, c, state = inputs("diagonal", 2, 20, 3).values()
    given = GrowingSSM(
        u[:batch, :time], a / a.abs(), torch.full((3, 4), 0.5), b, c, 9, state[:batch], torch.zeros(0) > 0
    )
    y, last = growing_ssm(given._replace(reset=torch.zeros(batch, time, dtype=torch.bool)), mode)
    assert y.shape == (batch, time, 3) and torch.equal(last, state[:batch])


@thorough
@every_pair
@pytest.mark.parametrize("dtype", tiered([torch.float32], [torch.bfloat16]))
@pytest.mark.parametrize("time", tiered([5], [1, 40]))
def test_meta_tensors(case, mode, backend, time, dtype):
    if backend == "numba":
        pytest.skip("runs on a CPU alone")
    given = inputs(case, 2, time, 3, dtype=dtype)
    on_meta = {name: x.to("meta").requires_grad_() for name, x in given.items()}
    reset = torch.zeros(2, time, dtype=torch.bool)
    for options, on_cpu in (
        ({}, {}),
        ({"state": None}, {"state": None}),
        ({"reset": reset.to("meta")}, {"reset": reset}),
    ):
        expected = OPERATORS[case][0](**given | on_cpu, mode=mode, backend=backend)
        found = OPERATORS[case][0](**on_meta | options, mode=mode, backend=backend)
        for x, cpu in zip(found, expected, strict=True):
            assert (x.shape, x.dtype, x.device.type) == (cpu.shape, cpu.dtype, "meta")
        wanted = [x for name, x in on_meta.items() if name != "state" or "state" not in options]
        gradients = torch.autograd.grad(found[0].sum() + found[1].abs().sum(), wanted, materialize_grads=True)
        assert [(g.shape, g.dtype) for g in gradients] == [(x.shape, x.dtype) for x in wanted]


@pytest.mark.parametrize("case", OPERATORS)
def test_what_is_no_dense_tensor_is_refused_by_name(case):
    run, given = OPERATORS[case][0], inputs(case, 2, 5, 3)
    for name, x in given.items():
        with pytest.raises(TypeError, match=f"`{name}` must be a tensor.*; got list"):
            run(**given | {name: x.tolist()})
        with pytest.raises(TypeError, match=rf"`{name}` must be a dense tensor; .* `{name}\.to_dense\(\)`"):
            run(**given | {name: x.to_sparse()})
        with pytest.raises(ValueError, match="must be on the device of `u`"):
            run(**given | {name: x.to("meta")})
    with pytest.raises(TypeError, match=r"`reset` must be a tensor or None; got list"):
        run(**given, reset=[False] * 5)
