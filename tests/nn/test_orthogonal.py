"""Orthogonal matrices."""

import math

import pytest
import torch

from linrec.nn import groups_of
from linrec.nn.orthogonal import Orthogonal, exponential
from linrec.testing import assert_agree, generator


def make(n: int = 7, *, moved: bool = True, **arguments) -> Orthogonal:
    torch.manual_seed(0)
    module = Orthogonal(n, **arguments).double()
    if moved:
        with torch.no_grad():
            module.A.add_(torch.randn(module.A.shape, generator=generator(1), dtype=torch.float64))
    return module


def skew(module: Orthogonal) -> torch.Tensor:
    n, entries = module.n, iter(module.A.tolist())
    A = torch.zeros(n, n, dtype=torch.float64)
    for row in range(n):
        for column in range(row + 1, n):
            A[row, column] = next(entries)
    return A - A.T


@pytest.mark.parametrize("matrix_map", ["exp", "cayley"])
def test_the_matrix_is_the_map_of_its_eigenvalues(matrix_map):
    module = make(matrix_map=matrix_map)
    # i S is Hermitian, so S has eigenvalues -i e
    e, vectors = torch.linalg.eigh(1j * skew(module))
    mapped = torch.exp(-1j * e) if matrix_map == "exp" else (1 + 1j * e) / (1 - 1j * e)
    expected = (vectors * mapped) @ vectors.mH
    assert expected.imag.abs().max() < 1e-12
    assert_agree(module(), expected.real)


def angles(B: torch.Tensor) -> torch.Tensor:
    """The positive angles of the eigenvalues, without an eigenvalue 1 that an odd size has."""
    found = torch.linalg.eigvals(B).angle().detach()
    return found[found > 1e-7].sort().values


@pytest.mark.parametrize(
    ("arguments", "largest"),
    [
        ({"init": "henaff"}, math.pi),
        ({"matrix_map": "cayley"}, math.pi / 2),
        # tan(u / 2) of u up to pi / 2
        ({}, 1.0),
    ],
)
@pytest.mark.parametrize("base", ["identity", "start"])
def test_initial_angles(arguments, largest, base):
    B = make(801, moved=False, base=base, **arguments)().detach()
    found = angles(B)
    assert len(found) == 400
    drawn = 2 * torch.atan(found) if not arguments else found
    uniform = (torch.arange(400) + 0.5) / 400 * (largest if arguments else math.pi / 2)
    assert (drawn - uniform).abs().max() < 1.6 / math.sqrt(400) * largest
    assert torch.equal(B[-1, :-1], torch.zeros(800, dtype=B.dtype)) and B[-1, -1] == 1


def test_a_base_holds_the_start_and_is_saved():
    start, plain = make(base="start", moved=False), make(moved=False)
    assert not start.A.any()
    torch.testing.assert_close(start(), plain(), rtol=0, atol=2e-7)
    moved = make(base="start")
    assert moved.base is not None
    assert_agree(moved(), moved.base @ torch.matrix_exp(skew(moved)))
    loaded = Orthogonal(7, base="start").double()
    loaded.load_state_dict(moved.state_dict())
    assert torch.equal(loaded(), moved())


@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 30.0, 1000.0])
def test_exponential_of_a_fixed_number_of_products(scale):
    A = scale * torch.randn(5, 5, generator=generator(0), dtype=torch.float64)
    A = (A - A.T).requires_grad_()
    weights = torch.randn(5, 5, generator=generator(1), dtype=torch.float64)
    found, expected = exponential(A), torch.matrix_exp(A)
    # a squaring doubles the error
    close = {"rtol": 0.0, "atol": 1e-15 * max(10, 100 * scale)}
    torch.testing.assert_close(found, expected, **close)
    gradients = [torch.autograd.grad((weights * exp).sum(), A)[0] for exp in (found, expected)]
    torch.testing.assert_close(*gradients, **close)


@pytest.mark.parametrize("arguments", [{}, {"matrix_map": "cayley"}, {"base": "start"}])
def test_half_precision_modules_keep_an_orthogonal_matrix(arguments):
    module = make(64, **arguments).float().bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        B = module()
    assert B.dtype == torch.float32
    assert (B @ B.T - torch.eye(64)).abs().max() < 1e-6


def test_parameters_have_their_own_group():
    (group,) = groups_of(make()).values()
    assert group.name == "transition" and not group.weight_decay
    assert make().A.numel() == 7 * 6 // 2


@pytest.mark.parametrize("argument", ["matrix_map", "init", "base"])
def test_unknown_names_are_refused(argument):
    with pytest.raises(ValueError, match=f"`{argument}` 'caley'"):
        make(**{argument: "caley"})
