import pytest
import torch

from linrec.hippo import StateSpace, discretize, matrices
from linrec.testing import assert_agree, generator


def system(*leading, N=4):
    A = torch.randn(*leading, N, N, generator=generator(), dtype=torch.float64)
    B = torch.randn(*leading, N, generator=generator(1), dtype=torch.float64)
    return StateSpace(A, B)


def test_zoh_is_exact_for_a_held_input():
    A, B = system()
    h, many = 0.3, 300
    # the input held at 1, in many small steps of the classical method of order four
    x = torch.stack([torch.tensor([1.0, -2.0, 0.5, 0.1], dtype=torch.float64), torch.zeros(4).double()])
    start = x.clone()

    def slope(x):
        return x @ A.mT + B

    for _ in range(many):
        small = h / many
        k1 = slope(x)
        k2 = slope(x + small / 2 * k1)
        k3 = slope(x + small / 2 * k2)
        k4 = slope(x + small * k3)
        x = x + small / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    Abar, Bbar = discretize(StateSpace(A, B), h)
    assert_agree(start @ Abar.mT + Bbar, x)


def test_bilinear_is_the_trapezoid_rule():
    A, B = system()
    h, x = 0.3, torch.randn(4, generator=generator(2), dtype=torch.float64)
    Abar, Bbar = discretize(StateSpace(A, B), h, "bilinear")
    after = Abar @ x + Bbar
    # the slope is the mean of those at both ends
    assert_agree((after - x) / h, (A @ x + B + A @ after + B) / 2)


def test_euler_follows_the_slope_and_is_stable_for_short_steps_alone():
    A, B = system()
    x = torch.randn(4, generator=generator(2), dtype=torch.float64)
    Abar, Bbar = discretize(StateSpace(A, B), 0.3, "euler")
    assert_agree(Abar @ x + Bbar, x + 0.3 * (A @ x + B))
    # eigenvalues -1 to -8
    for step, stable in ((0.24, True), (0.26, False)):
        A, _ = discretize(matrices("legs", 8), step, "euler")
        assert bool(torch.linalg.eigvals(A).abs().max() < 1) == stable


@pytest.mark.parametrize("method", ["zoh", "bilinear", "euler"])
def test_a_system_that_stands_still_adds_its_input_up(method):
    Abar, Bbar = discretize(StateSpace(torch.zeros(2, 2), torch.tensor([1.0, 2.0])), 0.25, method)
    assert_agree((Abar, Bbar), (torch.eye(2), torch.tensor([0.25, 0.5])))


@pytest.mark.parametrize("method", ["zoh", "bilinear", "euler"])
def test_steps_and_systems_broadcast(method):
    one, several = system(), system(3)
    h = torch.tensor([0.1, 0.5, 2.0], dtype=torch.float64)
    for given, pick in ((one, lambda _: one), (several, lambda i: StateSpace(several.A[i], several.B[i]))):
        found = discretize(given, h, method)
        for i in range(3):
            expected = discretize(pick(i), float(h[i]), method)
            assert_agree((found.A[i], found.B[i]), expected)


@pytest.mark.parametrize("method", ["zoh", "bilinear", "euler"])
def test_gradients_are_finite_differences(method):
    A, B = (part.requires_grad_() for part in system(2, N=3))
    h = torch.tensor([0.2, 0.7], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda A, B, h: discretize(StateSpace(A, B), h, method), (A, B, h))


@pytest.mark.parametrize("method", ["zoh", "bilinear"])
def test_large_steps_stay_stable(method):
    for measure in ("legs", "legt"):
        A, _ = discretize(matrices(measure, 32), 5.0, method)
        assert torch.linalg.eigvals(A).abs().max() < 1


@pytest.mark.parametrize("method", ["zoh", "bilinear", "euler"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_single(method, dtype):
    given = StateSpace(*(x.to(dtype) for x in matrices("legs", 6)))
    # steps that these dtypes hold exactly
    steps = torch.tensor([0.5, 0.125], dtype=dtype)
    for found, expected in zip(
        discretize(given, steps, method),
        discretize(StateSpace(*(x.double() for x in given)), steps.double(), method),
        strict=True,
    ):
        assert found.dtype == dtype
        assert_agree(found, expected)


def test_errors_say_what_exists():
    with pytest.raises(TypeError, match="`A` must be a tensor; got 1"):
        discretize(1, 0.1)
    with pytest.raises(TypeError, match=r"`step`.*got '1'"):
        discretize(system(), "1")
    with pytest.raises(ValueError, match="no `method` 'bilinera'; did you mean 'bilinear'"):
        discretize(system(), 0.1, "bilinera")
    for step in (0, -0.5):
        with pytest.raises(ValueError, match=f"`step` must be .*; got {step}"):
            discretize(system(), step)
    for least in ("0", "-0.5", "nan"):
        with pytest.raises(ValueError, match=f"`step`.*got values.*{least}"):
            discretize(system(), torch.tensor([0.1, float(least)]))
