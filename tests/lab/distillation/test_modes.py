import itertools
import re

import pytest
import torch

from linrec.lab.distillation import exact_modes, fit_modes, hankel_singular_values
from linrec.testing import generator
from tests.tiers import tiered

LENGTH = 200


def response(a: torch.Tensor, R: torch.Tensor, D: torch.Tensor, length: int) -> torch.Tensor:
    """Taps of a modal form, by its recurrence."""
    x, taps = torch.ones_like(a), []
    for _ in range(length):
        taps.append((R * x).sum(1).real)
        x = a * x
    taps[0] = taps[0] + D
    return torch.stack(taps, 1)


def smooth_kernels() -> torch.Tensor:
    """Kernels of no finite order: waves of changing frequency under windows that end at nearly zero."""
    t = torch.linspace(0, 1, LENGTH, dtype=torch.float64)
    waves = [torch.sin(7 * t**2 + 1), torch.cos(20 * t), 1 / (0.2 + t)]
    return torch.stack([wave * torch.exp(-(5 + 3 * i) * t) for i, wave in enumerate(waves)])


def dense_hankel(kernel: torch.Tensor) -> torch.Tensor:
    """H_ij = K_{1+i+j}, zeros behind the last tap, (d, rows, rows)."""
    rows = kernel.shape[1] - 1
    padded = torch.nn.functional.pad(kernel[:, 1:], (0, rows))
    return padded[:, torch.arange(rows)[:, None] + torch.arange(rows)]


def test_systems_of_few_modes_are_found():
    magnitude = torch.tensor([[0.9, 0.8, 0.5], [0.85, 0.6, 0.3]], dtype=torch.float64)
    # two real poles, of either sign, and pairs
    angle = torch.tensor([[0.0, 1.0, 2.5], [torch.pi, 0.3, 1.5]], dtype=torch.float64)
    a = torch.polar(magnitude, angle)
    R = torch.randn(2, 3, generator=generator(), dtype=torch.complex128)
    D = torch.tensor([2.0, -1.0], dtype=torch.float64)
    kernel = response(a, R, D, LENGTH)
    for modes in (3, 5):
        found, residues, skip = fit_modes(kernel, modes)
        assert found.shape == residues.shape == (2, modes)
        torch.testing.assert_close(response(found, residues, skip, LENGTH), kernel, rtol=0, atol=1e-8)
        torch.testing.assert_close(skip, D, rtol=0, atol=1e-8)
    assert fit_modes(kernel, 3)[0][0].angle().sort().values.tolist() == pytest.approx([0, 1, 2.5], abs=1e-6)


def test_hankel_singular_values_are_those_of_the_dense_matrix():
    kernel = smooth_kernels()
    values = torch.linalg.svdvals(dense_hankel(kernel))
    found = hankel_singular_values(kernel, 8)
    torch.testing.assert_close(found, values[:, :8], rtol=1e-6, atol=1e-10)
    # more of them than there are
    assert hankel_singular_values(kernel[:, :3], 5)[:, 2:].abs().sum() == 0


@pytest.mark.parametrize("modes", [1, 3, 6])
def test_fits_are_between_what_theory_allows_and_what_it_promises(modes):
    kernel = smooth_kernels()
    a, R, D = fit_modes(kernel, modes)
    assert bool((a.abs() < 1).all()) and bool((a.imag >= 0).all())
    error = response(a, R, D, LENGTH) - kernel
    assert bool((error[:, 0].abs() < 1e-12).all())
    values = torch.linalg.svdvals(dense_hankel(kernel))
    order = 2 * modes
    # behind the last tap the response is all error; it has faded after as many steps again
    tail = response(a, R, D, 3 * LENGTH)[:, LENGTH:]
    difference = torch.cat([error, tail], 1)
    nearest = torch.linalg.svdvals(dense_hankel(difference))[:, 0]
    assert bool((nearest >= values[:, order] * (1 - 1e-9)).all())
    # balanced truncation's bound, for an order that takes so many modes at least: all poles real
    assert bool((difference.norm(dim=1) <= 2 * values[:, modes:].sum(1)).all())


@pytest.mark.parametrize("kind", ["noise", "cut off", "fading noise", "one tap"])
@pytest.mark.parametrize("length", tiered([33], [64]))
def test_more_modes_make_no_fit_worse(kind, length):
    t = torch.arange(length, dtype=torch.float64)
    noise = torch.randn(1, length, generator=generator(), dtype=torch.float64)
    kernel = {
        "noise": noise,
        "cut off": (0.99**t * torch.cos(0.3 * t))[None],
        "fading noise": 0.8**t * noise,
        "one tap": (t == length // 2).double()[None],
    }[kind]
    padded = torch.nn.functional.pad(kernel, (0, length))
    errors = [
        (response(*fit_modes(kernel, modes), 2 * length) - padded).norm() / kernel.norm()
        for modes in range(1, length // 2 + 3)
    ]
    for fewer, more in itertools.pairwise(errors):
        assert more <= fewer + 1e-6
    assert errors[0] <= 1


@pytest.mark.parametrize("length", [1, 2, 7, 8])
@pytest.mark.parametrize("radius", [1.0, 0.9])
def test_exact_modes_are_exact_and_start_over(length, radius):
    kernel = torch.randn(3, length, generator=generator(length), dtype=torch.float64)
    a, R, D = exact_modes(kernel, radius)
    assert a.shape == R.shape == (3, (length + 1) // 2) and not D.any()
    taps = response(a, R, D, 2 * length + 1)
    torch.testing.assert_close(taps[:, :length], kernel, rtol=0, atol=1e-12)
    faded = kernel / radius ** torch.arange(length, dtype=torch.float64)
    torch.testing.assert_close(taps[:, length], -faded.sum(1) * radius**length, rtol=0, atol=1e-12)
    again = radius ** (length + 1) * kernel[:, :length]
    torch.testing.assert_close(taps[:, length + 1 :], again, rtol=0, atol=1e-12)


def test_kernels_that_need_no_modes():
    kernel = torch.zeros(2, 9)
    kernel[:, 0] = torch.tensor([3.0, 0.0])
    for length in (1, 2, 9):
        a, R, D = fit_modes(kernel[:, :length], 2)
        assert not R.any() and not a.any() and D.tolist() == [3, 0]


def test_errors():
    with pytest.raises(ValueError, match="`modes` must be at least 1; got 0"):
        fit_modes(torch.ones(1, 4), 0)
    with pytest.raises(ValueError, match="`radius` must be above 0 and at most 1; got 1"):
        exact_modes(torch.ones(1, 4), 1.1)
    with pytest.raises(ValueError, match="`count` must be at least 1; got 0"):
        hankel_singular_values(torch.ones(1, 4), 0)
    for function in (fit_modes, exact_modes, hankel_singular_values):
        for shape in ((2, 0), (4,)):
            with pytest.raises(ValueError, match=rf"`kernel` must have shape .* got {re.escape(str(shape))}"):
                function(torch.ones(shape), 1)
        with pytest.raises(ValueError, match="`kernel` must be finite; got 2 non-finite taps of 4"):
            function(torch.tensor([[1.0, torch.nan, 0.0, torch.inf]]), 1)
