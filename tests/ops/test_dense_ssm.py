"""dense_ssm against formulas written apart from it; test_laws.py has the laws."""

import numpy as np
import pytest
import torch

from linrec.hippo import discretize, matrices
from linrec.ops import dense_ssm
from linrec.ops.core.call import recording
from linrec.testing import assert_agree, check_operator, dense_ssm_inputs, generator, reset_mask
from tests.tiers import thorough

ON_CPU = [pair for pair in dense_ssm.operator.pairs if pair[1] != "triton"]
every_pair = pytest.mark.parametrize(("mode", "backend"), ON_CPU)
fast_pairs = pytest.mark.parametrize(("mode", "backend"), [pair for pair in ON_CPU if pair[1] != "reference"])


@every_pair
@pytest.mark.parametrize("shared", [False, True])
def test_outputs_are_sums_over_powers(mode, backend, shared):
    inputs = dense_ssm_inputs(2, 9, 3, 4, 2, shared=shared, dtype=torch.float64)
    y, last = dense_ssm(**inputs, mode=mode, backend=backend)
    u, A, B, C, state = (inputs[name].numpy() for name in ("u", "A", "B", "C", "state"))
    for d in range(3):
        A_d, B_d, C_d = (A, B, C) if shared else (A[d], B[d], C[d])
        for t in range(9):
            x = np.linalg.matrix_power(A_d, t + 1) @ state[1, d]
            for s in range(t + 1):
                x = x + np.linalg.matrix_power(A_d, t - s) @ B_d * u[1, s, d]
            np.testing.assert_allclose(y[1, t, d], C_d @ x, atol=1e-12)
        np.testing.assert_allclose(last[1, d], x, atol=1e-12)


@every_pair
def test_without_c_the_states_are_the_outputs(mode, backend):
    inputs = dense_ssm_inputs(2, 33, 3, 4, dtype=torch.float64)
    y, last = dense_ssm(**inputs, mode=mode, backend=backend)
    assert_agree(y[:, -1], last)
    same, _ = dense_ssm(**inputs | {"C": torch.eye(4, dtype=torch.float64)}, mode=mode, backend=backend)
    assert_agree(y, same)


@fast_pairs
def test_any_of_the_matrices_may_be_shared(mode, backend):
    inputs = dense_ssm_inputs(2, 40, 3, 4, 2)
    for names in (("A",), ("B",), ("C",), ("A", "B"), ("B", "C"), ("A", "C")):
        given = inputs | {name: inputs[name][0] for name in names}
        for reset in (None, reset_mask(2, 40, rate=0.1)):
            check_operator(
                dense_ssm, given, mode=mode, backend=backend, dtype=torch.float32, options={"reset": reset}
            )


@pytest.mark.parametrize("time", [1, 2, 3, 4, 5, 7, 8, 9, 31, 32, 33, 100, 128, 129])
def test_every_length(time):
    inputs = dense_ssm_inputs(2, time, 2, 3, 2, seed=time)
    for options in ({}, {"reset": reset_mask(2, time, rate=0.1)}):
        for state in (None, inputs["state"]):
            given = inputs | {"state": state}
            check_operator(
                dense_ssm, given, mode="convolution", backend="torch", dtype=torch.float32, options=options
            )


@thorough
@pytest.mark.parametrize("measure", ["legs", "legt"])
def test_both_modes_agree_over_16384_steps_in_single_precision(measure):
    step = torch.logspace(-4, -1, 4, dtype=torch.float64)
    system = discretize(matrices(measure, 32), step, "bilinear")
    u = torch.randn(1, 16_384, 4, generator=generator())
    C = torch.randn(4, 1, 32, generator=generator(1))
    exact = dense_ssm(u.double(), *system, C.double(), mode="recurrent")
    A, B = (part.float() for part in system)
    found = [dense_ssm(u, A, B, C, mode=mode) for mode in ("recurrent", "convolution")]
    for y, last in found:
        assert_agree(last, exact[1])
        assert (y - exact[0]).abs().max() < 1e-4 * exact[0].abs().max()
    assert (found[0][0] - found[1][0]).abs().max() < 1e-4


@every_pair
def test_a_reset_keeps_even_an_infinity_out(mode, backend):
    inputs = dense_ssm_inputs(1, 20, 2, 3, 2)
    state = torch.full((1, 2, 3), torch.inf)
    reset = torch.zeros(1, 20, dtype=torch.bool)
    reset[0, 7] = True
    y, last = dense_ssm(**inputs | {"state": state}, reset=reset, mode=mode, backend=backend)
    assert not y[:, :7].isfinite().any()
    alone = {**inputs, "u": inputs["u"][:, 7:], "state": None}
    assert_agree((y[:, 7:], last), dense_ssm(**alone, mode=mode, backend=backend))


@every_pair
def test_there_may_be_no_outputs(mode, backend):
    inputs = dense_ssm_inputs(2, 20, 3, 4, 2)
    _, expected = dense_ssm(**inputs)
    for shape in ((0, 4), (3, 0, 4)):
        y, state = dense_ssm(**inputs | {"C": torch.zeros(shape)}, mode=mode, backend=backend)
        assert y.shape == (2, 20, 3, 0)
        assert_agree(state, expected)


def test_auto_takes_the_loop_for_few_steps():
    with recording() as calls:
        for time in (1, 16, 17):
            dense_ssm(**dense_ssm_inputs(1, time, 2, 3))
    taken = [(call.backend.mode, call.backend.name) for call in calls]
    assert taken == [("recurrent", "torch"), ("recurrent", "torch"), ("convolution", "torch")]


def test_errors_name_the_shape_that_is_wrong():
    inputs = dense_ssm_inputs(2, 5, 3, 4, 2)

    def refused(error, match, **changed):
        with pytest.raises(error, match=match):
            dense_ssm(**inputs | changed)

    refused(
        ValueError, r"`A` must have shape \(4, 4\), or \(3, 4, 4\) .* got \(2, 4, 4\)", A=torch.zeros(2, 4, 4)
    )
    refused(ValueError, r"`A` must have shape \(5, 5\), or .* got \(4, 5\)", A=torch.zeros(4, 5))
    refused(ValueError, r"`B` must have shape \(4,\), or \(3, 4\) .* got \(5,\)", B=torch.zeros(5))
    refused(ValueError, r"`C` must have shape \(2, 4\), or \(3, 2, 4\) .* got \(2, 3\)", C=torch.zeros(2, 3))
    refused(ValueError, r"`C` must have shape \(1, 4\), .* got \(4,\)", C=torch.zeros(4))
    refused(ValueError, r"`state` must have shape \(b, d, n\) = \(2, 3, 4\)", state=torch.zeros(2, 4, 3))
    refused(TypeError, "`B` must be float32 beside `u` in float32; got float64", B=torch.zeros(4).double())
    refused(TypeError, "`state` must be float32; got int64", state=torch.zeros(2, 3, 4).long())
    refused(
        TypeError,
        r"`state` must be real \(float32\) .* got complex64",
        state=torch.zeros(2, 3, 4).to(torch.complex64),
    )
    refused(ValueError, "`u` must have shape", u=torch.zeros(2, 5))
    refused(ValueError, "scan", mode="scan")
