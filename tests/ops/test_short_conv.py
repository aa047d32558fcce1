"""short_conv against formulas written apart from it; test_laws.py has the laws."""

import numpy as np
import pytest
import torch
from torch import nn

from linrec.ops import short_conv
from linrec.testing import assert_agree, check_operator, reset_mask, short_conv_inputs

ON_CPU = [pair for pair in short_conv.operator.pairs if pair[1] != "triton"]
every_pair = pytest.mark.parametrize(("mode", "backend"), ON_CPU)


@every_pair
def test_each_channel_is_convolved(mode, backend):
    inputs = short_conv_inputs(2, 9, 3, dtype=torch.float64) | {"state": None}
    x, weight, bias = (inputs[name].numpy() for name in ("x", "weight", "bias"))
    y, state = short_conv(**inputs, mode=mode, backend=backend)
    for b in range(2):
        for c in range(3):
            expected = np.convolve(x[b, :, c], weight[c])[:9] + bias[c]
            np.testing.assert_allclose(y[b, :, c], expected, atol=1e-12)
    np.testing.assert_array_equal(state, x[:, -3:])


@every_pair
def test_silu_follows(mode, backend):
    inputs = short_conv_inputs(2, 9, 3)
    (y, state), (without, same) = (
        short_conv(**inputs, silu=silu, mode=mode, backend=backend) for silu in (True, False)
    )
    assert_agree(y, without / (1 + torch.exp(-without)))
    assert torch.equal(state, same)


@every_pair
def test_a_convolution_of_torch_has_its_taps_the_other_way_round(mode, backend):
    conv = nn.Conv1d(3, 3, 4, groups=3, padding=3)
    x = torch.randn(2, 9, 3)
    expected = conv(x.mT)[..., :9].mT
    y, _ = short_conv(x, conv.weight[:, 0].flip(-1), conv.bias, mode=mode, backend=backend)
    assert_agree(y, expected)


@every_pair
def test_few_steps_keep_the_older_state(mode, backend):
    state = torch.tensor([1.0, 2.0, 3.0]).reshape(1, 3, 1)
    x, weight = torch.full((1, 1, 1), 4.0), torch.tensor([[1.0, 10.0, 100.0, 1000.0]])
    y, last = short_conv(x, weight, state=state, mode=mode, backend=backend)
    assert y.item() == 4 + 30 + 200 + 1000
    assert last.flatten().tolist() == [2, 3, 4]


@every_pair
def test_a_reset_hides_what_came_before_also_from_the_state(mode, backend):
    x, weight = torch.arange(1.0, 6.0).reshape(1, 5, 1), torch.ones(1, 4)
    reset = torch.tensor([[False, False, False, True, False]])
    state = torch.full((1, 3, 1), torch.inf)
    y, last = short_conv(x, weight, state=state, reset=reset, mode=mode, backend=backend)
    # not even an infinity passes
    assert y.flatten().tolist() == [torch.inf, torch.inf, torch.inf, 4, 9]
    assert last.flatten().tolist() == [0, 4, 5]


@pytest.mark.parametrize("width", [1, 2, 5])
@pytest.mark.parametrize("time", [1, 3, 20])
def test_every_width(width, time):
    inputs = short_conv_inputs(2, time, 3, width)
    for options in ({}, {"reset": reset_mask(2, time, rate=0.3)}, {"silu": True}):
        check_operator(
            short_conv, inputs, mode="convolution", backend="torch", dtype=torch.float32, options=options
        )


@every_pair
def test_parameters_in_float32_beside_half_precision(mode, backend):
    inputs = short_conv_inputs(2, 20, 3, dtype=torch.bfloat16)
    inputs |= {name: inputs[name].float() for name in ("weight", "bias")}
    check_operator(short_conv, inputs, mode=mode, backend=backend, dtype=torch.bfloat16)
    y, state = short_conv(**inputs, mode=mode, backend=backend)
    assert (y.dtype, state.dtype) == (torch.bfloat16, torch.float32)


def test_vmap():
    inputs = short_conv_inputs(2, 9, 3)
    stacked = [torch.stack([tensor, tensor.flip(0)]) for tensor in inputs.values()]

    def of(*tensors):
        return short_conv(**dict(zip(inputs, tensors, strict=True)))

    expected = [of(*(tensor[i] for tensor in stacked)) for i in range(2)]
    for actual, pieces in zip(torch.func.vmap(of)(*stacked), zip(*expected, strict=True), strict=True):
        assert_agree(actual, torch.stack(pieces))


X, W = torch.zeros(2, 5, 3), torch.zeros(3, 4)


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"x": X[0]}, ValueError, r"`x` must have shape \(batch, time, channels\); got \(5, 3\)"),
        ({"weight": W[:2]}, ValueError, r"`weight` must have shape .*\(3, width\).*; got \(2, 4\)"),
        ({"weight": W[:, :0]}, ValueError, r"width at least 1; got \(3, 0\)"),
        (
            {"weight": W[:, None]},
            ValueError,
            r"got \(3, 1, 4\)\. For a depthwise torch.nn.Conv1d, pass `conv",
        ),
        ({"bias": X[0]}, ValueError, r"`bias` must have shape \(c,\) = \(3,\); got \(5, 3\)"),
        ({"state": X}, ValueError, r"`state` must have shape \(b, width - 1, c\) = \(2, 3, 3\); got"),
        ({"reset": torch.zeros(5).bool()}, ValueError, r"`reset` must have shape \(b, t\) = \(2, 5\)"),
        ({"reset": torch.zeros(2, 5)}, TypeError, r"`reset` must be bool; got float32"),
        ({"x": X.long()}, TypeError, r"`x` must be float16, .*; got int64"),
        ({"x": X.to(torch.complex64)}, TypeError, r"`x` must be .* or float64; got complex64"),
        ({"weight": W.double()}, TypeError, r"`weight` must be float32; got float64"),
        ({"bias": W[:, 0].bfloat16()}, TypeError, r"`bias` must be float32; got bfloat16"),
        ({"state": torch.zeros(2, 3, 3).long()}, TypeError, r"`state` must be float32; got int64"),
        ({"mode": "convolve"}, ValueError, r"no `mode` of `short_conv` called 'convolve'; did you mean"),
        (
            {"mode": "convolution", "backend": "reference"},
            ValueError,
            r"`short_conv` has no \(mode, backend\)",
        ),
    ],
)
def test_errors(changed, error, words):
    with pytest.raises(error, match=words):
        short_conv(**{"x": X, "weight": W} | changed)


def test_half_precision_takes_parameters_of_two_dtypes():
    with pytest.raises(TypeError, match=r"`weight` must be bfloat16 \(as `x`\) or float32; got float16"):
        short_conv(X.bfloat16(), W.half())


@pytest.mark.parametrize("name", ["weight", "bias", "state", "reset"])
def test_another_device_is_refused(name):
    inputs = short_conv_inputs(1, 2, 3) | {"reset": torch.zeros(1, 2).bool()}
    with pytest.raises(ValueError, match=rf"`{name}` must be on the device of `x`, 'cpu'; got 'meta'"):
        short_conv(**inputs | {name: inputs[name].to("meta")})


@every_pair
def test_the_state_after_no_steps_is_a_copy(mode, backend):
    state = torch.ones(2, 3, 3)
    _, last = short_conv(X[:, :0], W, state=state, mode=mode, backend=backend)
    last.zero_()
    assert (state == 1).all()
