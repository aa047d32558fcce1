"""selective_scan and short_conv at the edges: empty axes, tensors without data, no tensors."""

import pytest
import torch

from linrec.ops import selective_scan, short_conv
from linrec.testing import reset_mask, selective_scan_inputs, short_conv_inputs
from tests.tiers import thorough


def selective_inputs(batch, time, channels, *, groups=1):
    return selective_scan_inputs(batch, time, channels, 2, groups=groups)


PAIRS = [
    (operator, inputs, mode, backend)
    for operator, inputs, pairs in (
        (selective_scan, selective_inputs, selective_scan.operator.pairs),
        (short_conv, short_conv_inputs, short_conv.operator.pairs),
    )
    for mode, backend in pairs
]
OPERATORS = {operator: inputs for operator, inputs, _, _ in PAIRS}
every_pair = pytest.mark.parametrize(
    ("operator", "inputs_of", "mode", "backend"), [pair for pair in PAIRS if pair[3] != "triton"]
)
every_operator = pytest.mark.parametrize(("operator", "inputs_of"), OPERATORS.items())


@every_pair
@pytest.mark.parametrize("shape", [(0, 5, 4), (2, 0, 4), (2, 5, 0), (0, 0, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_empty_axes(operator, inputs_of, mode, backend, shape, dtype):
    given = {name: x.to(dtype).requires_grad_() for name, x in inputs_of(*shape).items()}
    reset = reset_mask(*shape[:2])
    y, state = operator(**given, reset=reset, mode=mode, backend=backend)
    assert y.shape == shape and y.dtype == dtype
    assert state.dtype == torch.float32 and torch.equal(state, given["state"].float())
    # every input has a gradient, which is zero but for the state's
    found = dict(zip(given, torch.autograd.grad(y.sum() + state.sum(), tuple(given.values())), strict=True))
    assert found.pop("state").eq(1).all()
    assert all(not gradient.any() for gradient in found.values())
    _, zeros = operator(**given | {"state": None}, mode=mode, backend=backend)
    assert zeros.shape == state.shape and not zeros.any()


@pytest.mark.parametrize(
    ("mode", "backend"), [pair for pair in selective_scan.operator.pairs if pair[1] != "triton"]
)
def test_empty_axes_of_groups(mode, backend):
    for shape in ((0, 5, 4), (2, 0, 4), (2, 5, 0)):
        y, state = selective_scan(**selective_inputs(*shape, groups=2), mode=mode, backend=backend)
        assert y.shape == shape and state.shape == (shape[0], shape[2], 2)


@thorough
@every_operator
@pytest.mark.parametrize("backend", ["auto", "torch", "reference"])
def test_tensors_without_data(operator, inputs_of, backend):
    for time in (0, 1, 5, 70):
        given = {name: x.to("meta").requires_grad_() for name, x in inputs_of(2, time, 4).items()}
        y, state = operator(**given, reset=reset_mask(2, time).to("meta"), backend=backend)
        assert y.shape == (2, time, 4) and state.shape == given["state"].shape
        gradients = torch.autograd.grad(y.sum() + state.sum(), tuple(given.values()))
        assert [g.shape for g in gradients] == [x.shape for x in given.values()]


@every_operator
def test_arguments_that_are_no_dense_tensors_are_refused_by_name(operator, inputs_of):
    given = inputs_of(2, 5, 4)
    for name, x in given.items():
        with pytest.raises(TypeError, match=rf"`{name}` must be a tensor.*; got list\. Pass `torch.as_tens"):
            operator(**given | {name: x.tolist()})
        with pytest.raises(TypeError, match=rf"`{name}` must be a dense tensor; got torch.sparse_coo"):
            operator(**given | {name: x.to_sparse()})
        if name not in ("D", "bias", "state"):
            with pytest.raises(TypeError, match=rf"`{name}` must be a tensor; got None"):
                operator(**given | {name: None})
    with pytest.raises(TypeError, match=r"`reset` must be a tensor or None; got list"):
        operator(**given, reset=[[False] * 5] * 2)
