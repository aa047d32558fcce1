"""dplr_ssm against formulas written apart from it; test_laws.py has the laws."""

import numpy as np
import pytest
import torch

from linrec.ops import diagonal_ssm, dplr_ssm
from linrec.ops.core.call import recording
from linrec.ops.dplr_ssm.torch import fed_back, times
from linrec.testing import assert_agree, check_operator, dplr_ssm_inputs, generator, reset_mask
from tests.tiers import thorough

from .memory import Allocations

ON_CPU = [pair for pair in dplr_ssm.operator.pairs if pair[1] != "triton"]
every_pair = pytest.mark.parametrize(("mode", "backend"), ON_CPU)


@every_pair
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_outputs_and_states_are_those_of_real_matrices(mode, backend, rank):
    inputs = dplr_ssm_inputs(2, 30, 3, 4, rank, dtype=torch.float64)
    y, last = dplr_ssm(**inputs, mode=mode, backend=backend)
    u, a, p, q, b, c, state = (inputs[name].numpy() for name in ("u", "a", "p", "q", "b", "c", "state"))

    def stacked(z):
        return np.concatenate([z.real, z.imag])

    for d in range(3):
        diagonal = np.block(
            [[np.diag(a[d].real), -np.diag(a[d].imag)], [np.diag(a[d].imag), np.diag(a[d].real)]]
        )
        A = diagonal - stacked(p[d]) @ stacked(q[d].conj()).T
        x = stacked(state[1, d])
        for t in range(30):
            x = A @ x + stacked(b[d]) * u[1, t, d]
            np.testing.assert_allclose(y[1, t, d], stacked(c[d].conj()) @ x, atol=1e-11)
        np.testing.assert_allclose(stacked(last[1, d].numpy()), x, atol=1e-11)


@pytest.mark.parametrize("time", [1, 2, 3, 4, 5, 7, 8, 9, 31, 33, 100])
def test_every_length(time):
    inputs = dplr_ssm_inputs(2, time, 2, 3, seed=time)
    for options in ({}, {"reset": reset_mask(2, time, rate=0.1)}):
        for state in (None, inputs["state"]):
            given = inputs | {"state": state}
            check_operator(
                dplr_ssm, given, mode="convolution", backend="torch", dtype=torch.float32, options=options
            )


@pytest.mark.parametrize("rank", [1, 2])
def test_feeding_back_is_the_inverse_of_a_series(rank):
    f = torch.randn(rank, rank, 3, 37, generator=generator(), dtype=torch.float64) / 8
    v = fed_back(f).movedim(-1, 0).numpy()
    f = f.movedim(-1, 0).numpy()
    for length in range(37):
        # v + z f v = 1
        term = v[length] + sum(
            (np.einsum("rsd,skd->rkd", f[j], v[length - 1 - j]) for j in range(length)), np.zeros_like(v[0])
        )
        expected = np.eye(rank)[..., None] if length == 0 else 0
        np.testing.assert_allclose(term, np.broadcast_to(expected, term.shape), atol=1e-12)


def test_gradients_of_series_may_be_differentiated_again():
    f, g = (
        torch.randn(2, 2, 1, 5, generator=generator(seed), dtype=torch.float64, requires_grad=True)
        for seed in range(2)
    )
    assert torch.autograd.gradgradcheck(lambda f, g: times(fed_back(f), g), (f, g), fast_mode=True)


def test_without_the_low_rank_it_is_diagonal():
    inputs = dplr_ssm_inputs(2, 40, 3, 4, dtype=torch.float64)
    inputs["q"] = torch.zeros_like(inputs["q"])
    rest = {name: tensor for name, tensor in inputs.items() if name not in "pq"}
    for mode, backend in ON_CPU:
        assert_agree(dplr_ssm(**inputs, mode=mode, backend=backend), diagonal_ssm(**rest))


@thorough
def test_the_convolution_forms_no_states_of_all_steps():
    inputs = {name: x.requires_grad_() for name, x in dplr_ssm_inputs(2, 4096, 4, 32).items()}
    for reset in (None, reset_mask(2, 4096, rate=1e-3)):
        with Allocations() as seen:
            y, last = dplr_ssm(**inputs, reset=reset, mode="convolution")
            (y.sum() + last.abs().sum()).backward()
        assert seen.largest < 2 * 4096 * 4 * 32 / 4


@every_pair
def test_a_reset_keeps_even_an_infinity_out(mode, backend):
    inputs = dplr_ssm_inputs(1, 20, 2, 3)
    state = torch.full((1, 2, 3), torch.inf, dtype=torch.complex64)
    reset = torch.zeros(1, 20, dtype=torch.bool)
    reset[0, 7] = True
    y, last = dplr_ssm(**inputs | {"state": state}, reset=reset, mode=mode, backend=backend)
    assert not y[:, :7].isfinite().any()
    alone = {**inputs, "u": inputs["u"][:, 7:], "state": None}
    assert_agree((y[:, 7:], last), dplr_ssm(**alone, mode=mode, backend=backend))


def test_half_precision_is_summed_in_float32():
    inputs = dplr_ssm_inputs(2, 40, 3, 4, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, last = dplr_ssm(**inputs)
    expected, exact = dplr_ssm(**inputs | {"u": inputs["u"].float()})
    assert (y.dtype, last.dtype) == (torch.bfloat16, torch.complex64)
    assert_agree(y, expected)
    assert_agree(last, exact)


def test_vmap_over_parameters():
    inputs = dplr_ssm_inputs(2, 20, 3, 4)
    scale = torch.tensor([1.0, 0.5])

    def of(scale):
        return dplr_ssm(**inputs | {"p": scale * inputs["p"]})

    expected = [of(each) for each in scale]
    assert_agree(torch.func.vmap(of)(scale), tuple(torch.stack(x) for x in zip(*expected, strict=True)))


def test_auto_takes_the_loop_for_few_steps():
    with recording() as calls:
        for time in (1, 16, 17):
            dplr_ssm(**dplr_ssm_inputs(1, time, 2, 3))
    taken = [(call.backend.mode, call.backend.name) for call in calls]
    assert taken == [("recurrent", "torch"), ("recurrent", "torch"), ("convolution", "torch")]


def test_errors_name_the_shape_that_is_wrong():
    inputs = dplr_ssm_inputs(2, 5, 3, 4)

    def refused(error, match, **changed):
        with pytest.raises(error, match=match):
            dplr_ssm(**inputs | changed)

    def zeros(*shape, dtype=torch.complex64):
        return torch.zeros(shape, dtype=dtype)

    refused(ValueError, r"`a` must have shape \(d, n\) = \(3, n\); got \(2, 4\)", a=zeros(2, 4))
    refused(ValueError, r"`p` must have shape \(d, n, r\) = \(3, 4, r\); got \(3, 4\)", p=zeros(3, 4))
    none = {name: zeros(3, 0) for name in "abc"} | {name: zeros(3, 0, 1) for name in "pq"}
    refused(ValueError, r"n and r of at least 1; got \(3, 0\)", **none)
    refused(ValueError, "For rank 0, use `diagonal_ssm`", p=zeros(3, 4, 0), q=zeros(3, 4, 0))
    refused(ValueError, r"`q` must have shape \(d, n, r\) = \(3, 4, 1\); got \(3, 4, 2\)", q=zeros(3, 4, 2))
    refused(ValueError, r"`b` must have shape \(d, n\) = \(3, 4\); got \(4,\)", b=zeros(4))
    refused(ValueError, r"`state` must have shape \(b, d, n\) = \(2, 3, 4\)", state=zeros(2, 4, 3))
    refused(TypeError, "`c` must be complex64 beside `u` in float32; got float32", c=inputs["c"].real)
    refused(TypeError, "`state` must be complex64; got int64", state=zeros(2, 3, 4, dtype=torch.int64))
    refused(ValueError, "`u` must have shape", u=torch.zeros(2, 5))
    refused(ValueError, "scan", mode="scan")
