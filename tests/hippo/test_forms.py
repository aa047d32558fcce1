import math

import pytest
import torch

from linrec.hippo import MEASURES, diagonal, matrices, normal_plus_low_rank
from linrec.testing import assert_agree, generator

every_measure = pytest.mark.parametrize("measure", MEASURES)
RANK = {"legs": 1, "legt": 2, "lagt": 1, "fout": 1}


@every_measure
@pytest.mark.parametrize("N", [1, 2, 5, 64])
def test_the_normal_matrix_and_the_low_rank_are_hippos(measure, N):
    A, B = matrices(measure, N)
    Lambda, P, input_, V = normal_plus_low_rank(measure, N, pairs=False)
    assert P.shape == (N, RANK[measure])
    assert_agree(V.mH @ V, torch.eye(N).to(V))
    assert_agree(V @ (torch.diag(Lambda) - P @ P.mH) @ V.mH, A.to(V))
    assert_agree(V @ input_, B.to(V))


@every_measure
def test_eigenvalues_are_those_of_the_normal_part(measure):
    N = 16
    A, B = matrices(measure, N)
    n = torch.arange(N)
    P = {
        "legs": [torch.sqrt(n + 0.5)],
        "legt": [torch.sqrt(2 * n + 1) * (n % 2 == parity) for parity in (0, 1)],
        "lagt": [torch.full((N,), 0.5**0.5)],
        "fout": [B / 2**0.5],
    }[measure]
    normal = A + sum(torch.outer(column, column).double() for column in P)
    # that which a normal matrix is
    assert_agree(normal @ normal.mT, normal.mT @ normal, dtype=torch.float32)
    found = torch.linalg.eigvals(normal)
    Lambda = diagonal(measure, N, pairs=False).Lambda
    assert_agree(Lambda.imag, found.imag.sort().values, dtype=torch.float32)
    assert set(Lambda.real.tolist()) == {-0.5 if measure == "legs" else 0.0}
    assert_agree(Lambda.real, found.real, dtype=torch.float32)


def test_eigenvalues_that_have_formulas():
    N = 12
    half = torch.arange(N // 2, dtype=torch.float64)
    assert_agree(diagonal("fout", N).Lambda.imag, math.tau * half)
    # the matrix of halves with signs is circulant but for the signs of what wraps around
    cotangents = 0.5 / torch.tan(math.pi * (2 * half + 1) / (2 * N))
    assert_agree(diagonal("lagt", N).Lambda.imag, cotangents.flip(0))


@every_measure
def test_one_of_each_pair_runs_the_whole_system(measure):
    N = 10
    A, B = matrices(measure, N)
    Lambda, P, input_, V = normal_plus_low_rank(measure, N)
    assert Lambda.shape == (N // 2,) and (Lambda.imag >= 0).all() and (Lambda.imag.diff() > 0).all()
    x, u = torch.randn(N, generator=generator(), dtype=torch.float64), 0.7
    z = V.mH @ x.to(V)
    assert_agree(2 * (V @ z).real, x)
    moved = Lambda * z - P @ (2 * (P.mH @ z).real).to(P) + input_ * u
    assert_agree(2 * (V @ moved).real, A @ x + B * u)


@every_measure
def test_conjugates_are_the_other_half(measure):
    N = 10
    whole, half = normal_plus_low_rank(measure, N, pairs=False), normal_plus_low_rank(measure, N)
    for every, one in zip(whole, half, strict=True):
        along = 1 if every is whole.V else 0
        first, second = every.chunk(2, along)
        assert_agree(second, one)
        assert_agree(first, one.conj().flip(along))


@every_measure
def test_inputs_are_real_and_positive(measure):
    B = diagonal(measure, 64).B
    assert (B.real > 0.01).all()
    assert_agree(B.imag, torch.zeros(32))


def test_the_diagonal_of_legs_with_half_the_input_tends_to_legs():
    """S4D's theorem: what both make of a wave that grows, exp((1 + 3i) t), in three coefficients."""
    rate, errors = torch.tensor(1 + 3j, dtype=torch.complex128), []
    for N in (16, 32, 64):
        A, B = (part.to(rate) for part in matrices("legs", N))
        expected = torch.linalg.solve(rate * torch.eye(N) - A, B)
        Lambda, B, V = diagonal("legs", N, pairs=False)
        found = V @ (B / 2 / (rate - Lambda))
        errors.append(float((found - expected)[:3].abs().max()))
    assert errors[0] < 0.003 and errors[0] > 7 * errors[1] > 49 * errors[2], errors


def test_an_odd_number_of_eigenvalues_has_no_pairs():
    with pytest.raises(ValueError, match=r"`N`.* got 5. Pass 6, or `pairs=False`"):
        diagonal("legs", 5)
