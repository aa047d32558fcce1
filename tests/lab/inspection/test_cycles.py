"""Cycles of piecewise linear networks, against known systems and an exhaustive search."""

import itertools

import pytest
import torch

from linrec.lab.inspection.cycles import find_cycles


def test_the_published_system_has_one_fixed_point_and_no_cycles():
    A = torch.tensor([0.4688, -0.6124], dtype=torch.float64)
    W = torch.tensor([[0, 1.7254], [-0.2253, 0]], dtype=torch.float64)
    h = torch.tensor([1.6024, 0.6124], dtype=torch.float64)
    (point,) = find_cycles(A, W, h, 1)
    assert torch.allclose(point.states, torch.tensor([[3.0166, -0.0417]], dtype=torch.float64), atol=1e-4)
    assert float(point.eigenvalues.abs().max()) == pytest.approx(0.612, abs=1e-3)
    assert point.is_stable
    for order in range(2, 9):
        assert not find_cycles(A, W, h, order)


def test_a_tent_map_has_its_cycles():
    # z' = 1.9 z + 1 left of 0, and 1 - 1.9 z right of it: chaotic, with 2^k points of period dividing k
    A, W, h = (torch.tensor(v, dtype=torch.float64) for v in ([1.9], [[-3.8]], [1.0]))
    counts = [len(find_cycles(A, W, h, order, starts=400)) for order in range(1, 5)]
    assert counts == [2, 1, 2, 3]
    for order in range(1, 5):
        for cycle in find_cycles(A, W, h, order, starts=400):
            slopes = torch.where(cycle.states > 0, -1.9, 1.9).double().prod()
            assert torch.allclose(cycle.eigenvalues.real, slopes)
            assert not cycle.is_stable


@pytest.mark.parametrize("order", [1, 2, 3])
def test_the_search_finds_what_an_exhaustive_one_finds(order):
    for seed in range(6):
        torch.manual_seed(seed)
        A, h = torch.rand(2, dtype=torch.float64) - 0.5, torch.randn(2, dtype=torch.float64)
        W = 2 * torch.randn(2, 2, dtype=torch.float64)
        expected = set()
        for signs in itertools.product([0.0, 1.0], repeat=2 * order):
            regions = torch.tensor(signs, dtype=torch.float64).view(order, 2)
            P, s = torch.eye(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
            for region in regions:
                J = A.diag() + W * region
                P, s = J @ P, J @ s + h
            z = torch.linalg.solve(torch.eye(2) - P, s)
            states = [z]
            for _ in range(order - 1):
                states.append(A * states[-1] + W @ states[-1].relu() + h)
            is_real = torch.equal((torch.stack(states) > 0).double(), regions)
            if is_real and all((states[0] - other).abs().max() > 1e-6 for other in states[1:]):
                expected.add(tuple(round(float(v), 6) for v in max(states, key=lambda z: float(z[0]))))
        found = find_cycles(A, W, h, order, starts=300)
        assert {tuple(round(float(v), 6) for v in cycle.states[0]) for cycle in found} == expected


def test_shapes_are_checked():
    with pytest.raises(ValueError, match="`A`"):
        find_cycles(torch.ones(2), torch.ones(3, 3), torch.ones(2), 1)
