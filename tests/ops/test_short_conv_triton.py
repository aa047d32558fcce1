"""The Triton kernels of the short convolution: on a GPU where there is one, else interpreted."""

import pytest
import torch

from linrec.ops import short_conv
from linrec.ops.short_conv import triton
from linrec.testing import assert_agree, check_operator, reset_mask, short_conv_inputs
from tests.tiers import thorough, tiered

from .opcheck import check_operators
from .triton_process import (
    DEVICE,
    INTERPRETED,
    on_a_gpu,
    on_either,
    quiet,
)

pytest.importorskip("triton")
pytestmark = quiet
PAIR = {"mode": "convolution", "backend": "triton"}


@pytest.fixture
def small(monkeypatch):
    """Have few steps and channels fill several tiles."""
    for name, size in {"ROWS": 8, "COLUMNS": 16, "PART": 8, "PARTS": 2}.items():
        monkeypatch.setattr(triton, name, size)


def agree(*shape, dtype=torch.float32, options=None, **arguments):
    inputs = short_conv_inputs(*shape, dtype=dtype, seed=shape[1], device=DEVICE, **arguments)
    check_operator(short_conv, inputs, **PAIR, dtype=dtype, options=options)


@on_either
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("time", tiered([1, 30], [9], [5, 8]))
@pytest.mark.parametrize("width", tiered([4], [1], [2, 8]))
def test_lengths_around_tiles(time, width):
    agree(2, time, 3, width, options={"silu": True})
    reset = reset_mask(2, time, rate=0.2, device=DEVICE)
    reset[0, 0] = reset[1, -1] = True
    agree(2, time, 17, width, options={"reset": reset})


@on_either
@pytest.mark.parametrize("dtype", tiered([torch.bfloat16], [torch.float64, torch.float16]))
def test_dtypes(dtype):
    agree(2, 9, 3, 4, dtype=dtype)
    inputs = short_conv_inputs(2, 9, 3, 4, dtype=dtype, device=DEVICE)
    wide = torch.promote_types(dtype, torch.float32)
    inputs |= {name: inputs[name].to(wide) for name in ("weight", "bias")}
    check_operator(short_conv, inputs, **PAIR, dtype=dtype, options={"silu": True})


@on_either
@pytest.mark.usefixtures("small")
def test_layout_in_memory_does_not_matter():
    inputs = short_conv_inputs(2, 9, 8, 4, device=DEVICE)
    expected = short_conv(**inputs, **PAIR)
    # channels of a wider projection, which are read in place; and every second number
    for changed in (
        torch.cat([inputs["x"], inputs["x"]], dim=-1)[..., :8],
        inputs["x"].mT.contiguous().mT,
        inputs["x"].repeat_interleave(2, dim=-1)[..., ::2],
    ):
        x = changed.requires_grad_()
        y, state = short_conv(**inputs | {"x": x}, **PAIR)
        assert_agree((y, state), expected)
        # the gradient of a sum is an expanded number
        torch.autograd.grad(y.sum(), x)


@on_either
@pytest.mark.usefixtures("small")
def test_custom_operators_keep_their_promises():
    x, weight, bias, state = short_conv_inputs(2, 5, 3, device=DEVICE).values()
    reset = reset_mask(2, 5, device=DEVICE)
    for silu in (False, True):
        inputs = x.bfloat16(), weight.mT[None], bias[None, None], state, reset, silu
        check_operators(triton.kernel, triton.Inputs(*inputs))


@on_either
@pytest.mark.usefixtures("small")
def test_nothing_passes_a_reset():
    inputs = short_conv_inputs(1, 9, 2, device=DEVICE)
    reset = torch.arange(9, device=DEVICE)[None] == 5
    for spoilt, other in ((slice(5), slice(5, None)), (slice(5, None), slice(5))):
        x = inputs["x"].clone()
        x[:, spoilt] = torch.nan
        y, _ = short_conv(**inputs | {"x": x}, reset=reset, **PAIR)
        assert y[:, other].isfinite().all() and y[:, spoilt].isnan().all()
        x = inputs["x"].clone().requires_grad_()
        y, _ = short_conv(**inputs | {"x": x}, reset=reset, **PAIR)
        cotangent = torch.ones_like(y)
        cotangent[:, spoilt] = torch.nan
        (dx,) = torch.autograd.grad(y, x, cotangent)
        assert dx[:, other].isfinite().all() and dx[:, spoilt].isnan().all()


@on_either
@pytest.mark.parametrize("shape", [(0, 5, 3), (2, 0, 3), (2, 5, 0)])
def test_empty_axes(shape):
    inputs = {name: x.requires_grad_() for name, x in short_conv_inputs(*shape, device=DEVICE).items()}
    y, state = short_conv(**inputs, **PAIR)
    assert y.shape == shape and state.shape == inputs["state"].shape
    *gradients, of_state = torch.autograd.grad(y.sum() + state.sum(), tuple(inputs.values()))
    assert all(not gradient.any() for gradient in gradients)
    # after no steps, the state is the state before
    assert shape[1] > 0 or (torch.equal(state, inputs["state"]) and of_state.eq(1).all())


@thorough
@on_either
@pytest.mark.usefixtures("small")
def test_maps_with_gradients():
    inputs = short_conv_inputs(2, 5, 3, device=DEVICE)
    for shared in ((), ("weight", "bias")):
        axes = {name: None if name in shared else 0 for name in inputs}
        given = {
            name: (x if name in shared else torch.stack([x, x.flip(0)])).requires_grad_()
            for name, x in inputs.items()
        }

        def one(given):
            return short_conv(**given, silu=True, **PAIR)

        apart = [one({name: x if name in shared else x[i] for name, x in given.items()}) for i in range(2)]
        expected = tuple(torch.stack(pieces) for pieces in zip(*apart, strict=True))
        actual = torch.func.vmap(one, in_dims=(axes,))(given)
        assert_agree(actual, expected)
        losses = (y.square().sum() + last.square().sum() for y, last in (actual, expected))
        assert_agree(*(torch.autograd.grad(loss, tuple(given.values())) for loss in losses))


@thorough
@on_either
@pytest.mark.usefixtures("small")
def test_compiles_into_one_graph():
    inputs = {name: x.requires_grad_() for name, x in short_conv_inputs(2, 5, 3, device=DEVICE).items()}

    def outcome(function):
        y, last = function(**inputs, silu=True, **PAIR)
        return y, last, torch.autograd.grad(y.square().sum() + last.sum(), tuple(inputs.values()))

    # inductor's own use of Triton does not go through the interpreter
    backend = "aot_eager" if INTERPRETED else "inductor"
    assert_agree(outcome(torch.compile(short_conv, fullgraph=True, backend=backend)), outcome(short_conv))


@on_either
def test_many_taps_are_refused():
    with pytest.raises(ValueError, match="of `short_conv` takes at most 8 taps"):
        short_conv(**short_conv_inputs(1, 3, 2, 9, device=DEVICE), **PAIR)


@on_a_gpu
def test_runs_are_the_same_to_the_bit():
    given = short_conv_inputs(2, 500, 300, device="cuda", dtype=torch.bfloat16)
    inputs = {name: x.requires_grad_() for name, x in given.items()}

    def outcome():
        y, last = short_conv(**inputs, **PAIR)
        return y, last, *torch.autograd.grad(y.sum() + last.sum(), tuple(inputs.values()))

    for one, other in zip(outcome(), outcome(), strict=True):
        assert torch.equal(one, other)
