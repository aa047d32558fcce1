"""diagonal_ssm against formulas written apart from it; test_laws.py has the laws."""

import contextlib
import math

import numpy as np
import pytest
import torch

from linrec.ops import diagonal_ssm
from linrec.ops.core.call import TimeSplit, handling
from linrec.ops.diagonal_ssm import OPERATOR
from linrec.ops.diagonal_ssm.torch import DiagonalSSM
from linrec.testing import assert_agree, diagonal_ssm_inputs, generator, reset_mask
from tests.tiers import thorough

from .memory import Allocations

ON_CPU = [pair for pair in OPERATOR.pairs if pair[1] != "triton"]
every_pair = pytest.mark.parametrize(("mode", "backend"), ON_CPU)


@every_pair
@pytest.mark.parametrize("is_complex", [True, False])
def test_outputs_and_states_are_those_of_powers(mode, backend, is_complex):
    inputs = diagonal_ssm_inputs(2, 30, 3, 4, dtype=torch.float64, is_complex=is_complex)
    y, last = diagonal_ssm(**inputs, mode=mode, backend=backend)
    u, a, b, c, state = (inputs[name].numpy() for name in ("u", "a", "b", "c", "state"))
    for t in (0, 1, 16, 29):
        power = a[..., None] ** np.arange(t, -1, -1)
        x = a ** (t + 1) * state + np.einsum("dns,dn,bsd->bdn", power, b, u[:, : t + 1])
        np.testing.assert_allclose(y[:, t], (c * x).sum(-1).real, atol=1e-11)
    np.testing.assert_allclose(last, x, atol=1e-11)


@pytest.mark.parametrize(
    ("of_a", "of_b", "of_c", "of_state"), [(0, 0, 1, 0), (0, 1, 0, 0), (1, 0, 0, 0), (1, 1, 1, 0)]
)
def test_real_and_complex_factors_mix(of_a, of_b, of_c, of_state):
    inputs = diagonal_ssm_inputs(2, 20, 3, 4, dtype=torch.float64)
    for name, is_complex in (("a", of_a), ("b", of_b), ("c", of_c), ("state", of_state)):
        if not is_complex:
            inputs[name] = inputs[name].real.contiguous()
    expected = diagonal_ssm(**{k: v if k == "u" else v + 0j for k, v in inputs.items()}, backend="reference")
    for mode, backend in ON_CPU:
        y, last = diagonal_ssm(**inputs, mode=mode, backend=backend)
        assert_agree(y, expected[0])
        assert last.is_complex() == bool(of_a or of_b)
        assert_agree(last + 0j, expected[1])


def long_inputs(time=16_384):
    """S4D-Lin's, with steps from 0.001 to 0.1: phases up to 10 radians per step."""
    A = torch.complex(torch.full((32,), -0.5), math.pi * torch.arange(32.0))
    dt = torch.logspace(-3, -1, 4)[:, None]
    a = torch.exp(dt * A)
    c = torch.randn(4, 32, generator=generator(1), dtype=torch.complex64)
    state = torch.randn(2, 4, 32, generator=generator(2), dtype=torch.complex64)
    return {
        "u": torch.randn(2, time, 4, generator=generator()),
        "a": a,
        "b": (a - 1) / A,
        "c": c,
        "state": state,
    }


@thorough
def test_convolution_and_recurrence_agree_over_16384_steps():
    inputs = {name: tensor.requires_grad_() for name, tensor in long_inputs().items()}
    outcomes = []
    for mode in ("convolution", "recurrent"):
        y, last = diagonal_ssm(**inputs, mode=mode)
        dy = torch.randn(y.shape, generator=generator(3)) / 128
        gradients = torch.autograd.grad(y, list(inputs.values()), dy)
        outcomes.append((y.detach(), last.detach(), *gradients))
    for convolved, stepped in zip(*outcomes, strict=True):
        assert float((convolved - stepped).abs().max()) < 1e-3 * max(1.0, float(stepped.abs().max()))


def test_the_convolution_forms_no_states_of_all_steps():
    inputs = {name: tensor.requires_grad_() for name, tensor in long_inputs(4096).items()}
    reset = reset_mask(2, 4096, rate=1e-3)
    states = 2 * 4096 * 4 * 32
    for options, share in (({}, 8), ({"reset": reset}, 8)):
        with Allocations() as seen:
            y, last = diagonal_ssm(**inputs, **options, mode="convolution")
            (y.sum() + last.abs().sum()).backward()
        assert seen.largest < states / share


def test_a_transition_of_zero_forgets_at_once():
    inputs = diagonal_ssm_inputs(1, 20, 2, 3, dtype=torch.float64)
    inputs["a"] = torch.zeros_like(inputs["a"]).requires_grad_()
    for mode, backend in ON_CPU:
        y, _ = diagonal_ssm(**inputs, mode=mode, backend=backend)
        assert_agree(y, inputs["u"] * (inputs["c"] * inputs["b"]).sum(-1).real)
        # the tap of one step before
        (da,) = torch.autograd.grad(y.sum(), inputs["a"])
        later = inputs["u"][:, :-1].sum((0, 1))[:, None] * (inputs["c"] * inputs["b"]).conj()
        assert_agree(da, later + (inputs["c"] * inputs["state"][0]).conj())


class Splits(TimeSplit):
    """Runs nothing: whoever asks whether time is split gets a yes."""

    def run(self, call):
        raise AssertionError("this test runs nothing")

    halo = in_turn = run


@pytest.fixture
def taken(machine_with, chosen):
    """The pair that a call takes on a machine with Numba and Triton."""

    def pair(time, device="cpu", mode="auto", backend="auto", *, split=False, reset=False, exporting=False):
        machine_with(numba=True, triton=True, exporting=exporting)
        inputs = diagonal_ssm_inputs(2, time, 8, 4, device="meta")
        flags = torch.empty(2, time, dtype=torch.bool, device="meta") if reset else None
        given = DiagonalSSM(**inputs, reset=flags)
        with handling(Splits()) if split else contextlib.nullcontext():
            return chosen(OPERATOR, given, device, mode, backend)

    return pair


def test_what_auto_takes(taken):
    assert taken(1) == taken(1, "cuda") == ("recurrent", "torch")
    assert taken(16) == ("recurrent", "numba")
    assert taken(16, "cuda") == ("scan", "triton")
    assert taken(16, "mps") == ("recurrent", "torch")
    assert taken(17) == taken(16_384, "mps") == ("convolution", "torch")
    assert taken(17, "cuda") == ("convolution", "triton")
    assert taken(17, "cuda", reset=True) == ("convolution", "torch")
    assert taken(1000, split=True) == ("recurrent", "numba")
    assert taken(1000, "cuda", split=True) == ("scan", "triton")
    assert taken(1000, "mps", split=True) == ("scan", "torch")


def test_what_auto_takes_in_exported_programs(taken):
    # one program serves all lengths from 2 on
    for device in ("cpu", "cuda"):
        assert taken(1, device, exporting=True) == ("recurrent", "torch")
        assert taken(2, device, exporting=True) == ("convolution", "torch")


def test_auto_is_filled_in_beside_an_explicit_choice(taken):
    assert taken(100, mode="recurrent") == ("recurrent", "numba")
    assert taken(100, "mps", mode="recurrent") == ("recurrent", "torch")
    assert taken(100, mode="scan") == taken(4, mode="scan") == ("scan", "torch")
    assert taken(4, mode="convolution") == ("convolution", "torch")
    assert taken(4, "cuda", mode="convolution") == ("convolution", "triton")
    assert taken(4, backend="torch") == ("recurrent", "torch")
    assert taken(100, "cuda", backend="torch") == ("convolution", "torch")
    assert taken(100, "cuda", backend="triton") == ("convolution", "triton")
    assert taken(100, "cuda", backend="triton", reset=True) == ("scan", "triton")
    assert taken(100, backend="reference") == ("recurrent", "reference")
    with pytest.raises(ValueError, match=r"'triton'.* takes calls without `reset`"):
        taken(100, "cuda", "convolution", "triton", reset=True)


def test_half_precision_is_summed_in_float32():
    inputs = diagonal_ssm_inputs(2, 40, 3, 4, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, last = diagonal_ssm(**inputs)
    expected, exact = diagonal_ssm(**inputs | {"u": inputs["u"].float()})
    assert (y.dtype, last.dtype) == (torch.bfloat16, torch.complex64)
    assert_agree(y, expected)
    torch.testing.assert_close(last, exact)


def test_vmap_over_parameters():
    inputs = diagonal_ssm_inputs(2, 40, 3, 4)
    a = torch.stack([inputs["a"], inputs["a"] ** 2])

    def of(a):
        return diagonal_ssm(**inputs | {"a": a}, mode="convolution")

    for mine, other in zip(torch.func.vmap(of)(a), zip(*map(of, a), strict=True), strict=True):
        assert_agree(mine, torch.stack(other))


def test_errors():
    inputs = diagonal_ssm_inputs(2, 5, 3, 4)
    flat = inputs["a"][0]
    for message, changed in {
        "`u` must have shape": {"u": inputs["u"][0]},
        "`a` must have shape (d, n) = (3, n) or (1, n), n at least 1; got (4,)": {"a": flat},
        "n at least 1; got (3, 0)": {"a": inputs["a"][:, :0]},
        "`b` must have shape (d, n) = (3, 4); got (4,)": {"b": flat},
        "`c` must have shape (d, n) = (3, 4); got (4,)": {"c": flat},
        "`state` must have shape (b, d, n) = (2, 3, 4); got (3, 4)": {"state": inputs["state"][0]},
        "`reset` must have shape": {"reset": torch.zeros(5, dtype=torch.bool)},
        "('scan', 'numba')": {"mode": "scan", "backend": "numba"},
    }.items():
        with pytest.raises(ValueError) as error:
            diagonal_ssm(**inputs | changed)
        assert message in str(error.value)
    real = {name: tensor.real for name, tensor in inputs.items()}
    for message, given in {
        "`a` must be float32 or complex64 beside `u` in float32; got complex128": (
            inputs | {"a": inputs["a"].to(torch.complex128)}
        ),
        "`c` must be float64 or complex128 beside": inputs
        | {"u": inputs["u"].double(), "a": inputs["a"].to(torch.complex128)}
        | {"b": inputs["b"].to(torch.complex128)},
        "`state` must be real (float32) for a real recurrence; got complex64": real
        | {"state": inputs["state"]},
        "`state` must be complex64; got int64": inputs | {"state": inputs["state"].real.long()},
    }.items():
        with pytest.raises(TypeError) as error:
            diagonal_ssm(**given)
        assert message in str(error.value)
