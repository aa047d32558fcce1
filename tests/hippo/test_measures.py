import math

import numpy as np
import pytest
import torch
from numpy.polynomial import laguerre, legendre

from linrec.hippo import MEASURES, basis, matrices
from linrec.testing import assert_agree, generator

N = 7
# nodes and weights of the interval from 0 to 1
NODES, WEIGHTS = (torch.from_numpy(part) for part in legendre.leggauss(60))
NODES, WEIGHTS = (NODES + 1) / 2, WEIGHTS / 2


def legendre_functions(z, count=N):
    """sqrt(2n + 1) P_n(z), by numpy."""
    return torch.from_numpy(legendre.legvander(np.asarray(z), count - 1) * np.sqrt(2 * np.arange(count) + 1))


def laguerre_functions(s, count=N):
    return torch.from_numpy(laguerre.lagvander(np.asarray(s), count - 1)) * torch.exp(-s / 2)[:, None]


def kernel(measure, s, count=N):
    """exp(s A) B at the times s."""
    A, B = matrices(measure, count)
    return torch.linalg.matrix_exp(s[:, None, None] * A) @ B


def test_small_matrices_are_those_of_the_papers():
    r3, r5, r8 = math.sqrt(3), math.sqrt(5), math.sqrt(8)
    legs = [[-1, 0, 0], [-r3, -2, 0], [-r5, -r3 * r5, -3]]
    legt = [[-1, r3, -r5], [-r3, -3, r3 * r5], [-r5, -r3 * r5, -5]]
    fout = [[-2, -r8, 0], [-r8, -4, -math.tau], [0, math.tau, 0]]
    for measure, A, B in (
        ("legs", legs, [1, r3, r5]),
        ("legt", legt, [1, r3, r5]),
        ("fout", fout, [2, r8, 0]),
    ):
        expected = torch.tensor(A, dtype=torch.float64), torch.tensor(B, dtype=torch.float64)
        assert_agree(matrices(measure, 3), expected)


def test_a_fourier_state_of_even_size_is_the_odd_one_and_a_zero():
    A, B = matrices("fout", 6)
    assert_agree((A[:5, :5], B[:5]), matrices("fout", 5))
    assert not A[5].any() and not A[:, 5].any() and B[5] == 0


@pytest.mark.parametrize("measure", MEASURES)
def test_a_state_of_one_coefficient_is_an_average(measure):
    A, B = matrices(measure, 1, dtype=torch.float32)
    # what a constant input of 1 leads to
    assert A.shape == (1, 1) and A.dtype == B.dtype == torch.float32
    assert -B.item() / A.item() == {"legs": 1, "legt": 1, "lagt": 2, "fout": 1}[measure]


def test_legs_weighs_the_past_by_legendre_functions_of_an_exponential():
    s = torch.linspace(0, 3, 13, dtype=torch.float64)
    z = torch.exp(-s)
    assert_agree(kernel("legs", s), legendre_functions(2 * z - 1) * z[:, None])


def test_lagt_weighs_the_past_by_laguerre_functions():
    s = torch.linspace(0, 20, 13, dtype=torch.float64)
    assert_agree(kernel("lagt", s), laguerre_functions(s))


@pytest.mark.parametrize("measure", ["legt", "fout"])
def test_windows_move_along_what_their_basis_holds(measure):
    """x' = A x + B u, without approximation, where u(t - s) is in the span of the basis at every t."""
    A, B = matrices(measure, N)
    if measure == "legt":
        polynomial = np.polynomial.Polynomial(torch.randn(N, generator=generator()).double().numpy())
        u, slope = polynomial, polynomial.deriv()
    else:

        def u(t):
            return 0.3 + np.sin(math.tau * t + 1) - 2 * np.cos(3 * math.tau * t)

        def slope(t):
            return math.tau * np.cos(math.tau * t + 1) + 6 * math.tau * np.sin(3 * math.tau * t)

    for t in (0.2, 1.7):
        # x_n = int_0^1 u(t - s) F_n(s) ds, and its derivative in t
        F = legendre_functions(1 - 2 * NODES) if measure == "legt" else basis("fout", N, NODES)
        x, moved = (WEIGHTS * f(t - NODES) @ F for f in (u, slope))
        assert_agree(A @ x + B * u(t), moved)


@pytest.mark.parametrize("count", [N, 40])
def test_windows_keep_what_their_basis_holds_and_drop_the_rest(count):
    """The kernels are near the basis within the window and fade after it, the nearer the more there are."""
    for measure in ("legt", "fout"):
        error = (kernel(measure, NODES, count) - basis(measure, count, NODES))[:, :3]
        after = kernel(measure, 1 + NODES, count)[:, :3]
        for part in (error, after):
            assert (WEIGHTS @ part.square()).max().sqrt() < 2.6 / math.sqrt(count)


@pytest.mark.parametrize("measure", MEASURES)
def test_bases_are_orthonormal(measure):
    count, weights, s = 6, WEIGHTS, NODES
    if measure == "legs":
        s = -torch.log(NODES)
    if measure == "lagt":
        # Gauss and Laguerre's rule has the factor e^-s in its weights
        s, weights = (torch.from_numpy(part) for part in laguerre.laggauss(40))
        weights = weights * torch.exp(s)
    F = basis(measure, count, s)
    expected = torch.eye(count, dtype=torch.float64)
    if measure == "fout":
        expected[-1, -1] = 0
    assert_agree(F.mT @ (weights[:, None] * F), expected)


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("count", [1, 2, 64])
def test_bases_are_numpys(measure, count):
    s = torch.linspace(0, 1, 9, dtype=torch.float64)
    waves = [f(math.tau * m * s) * 2**0.5 for m in range(1, 33) for f in (torch.cos, torch.sin)]
    expected = {
        "legs": legendre_functions(2 * torch.exp(-s) - 1, count),
        "legt": legendre_functions(1 - 2 * s, count),
        "lagt": laguerre_functions(s, count),
        "fout": torch.stack([torch.ones_like(s), *waves], 1)[:, :count].clone(),
    }[measure]
    if measure == "fout" and count % 2 == 0:
        expected[:, -1] = 0
    assert_agree(basis(measure, count, s), expected)


def test_laguerre_functions_stay_finite_far_back():
    F = basis("lagt", 256, torch.tensor([0.0, 1000.0, 1e5], dtype=torch.float64))
    # Szego's bound
    assert F.isfinite().all() and F.abs().max() <= 1
    assert F[1].abs().max() > 1e-3 and not F[2].any()


def test_errors_say_what_exists():
    with pytest.raises(ValueError, match="no `measure` 'legz'; did you mean 'legs'"):
        matrices("legz", 4)
    with pytest.raises(ValueError, match="`N` must be at least 1; got 0"):
        basis("legt", 0, torch.zeros(1))
