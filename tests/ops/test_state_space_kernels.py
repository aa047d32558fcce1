"""Kernels of state-space models, and how systems are made discrete, against formulas apart from them."""

import math

import pytest
import torch

from linrec.ops import cauchy_kernel, discretize_diagonal, vandermonde_kernel
from linrec.ops.long_conv import DISCRETIZATIONS
from linrec.testing import assert_agree, generator
from tests.tiers import thorough

from .memory import Allocations


def draw(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, generator=generator(seed), dtype=dtype)


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 1000])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_the_kernel_is_a_product_with_vandermondes_matrix(length, dtype):
    a, w = draw(3, 4, dtype=dtype), draw(2, 3, 4, dtype=dtype, seed=1)
    # on the circle and inside of it, zero too
    a = a / a.abs() * torch.linspace(0, 1, 4)
    a, w = a.requires_grad_(), w.requires_grad_()
    kernel = vandermonde_kernel(a, w, length)
    expected, power = [], torch.ones_like(a)
    for _ in range(length):
        expected.append((w * power).sum(-1).real)
        power = power * a
    expected = torch.stack(expected, -1)
    assert_agree(kernel, expected)
    dk = draw(*kernel.shape, seed=2)
    gradients = (torch.autograd.grad(k, (a, w), dk, materialize_grads=True) for k in (kernel, expected))
    assert_agree(*gradients)


def test_gradients_of_the_kernel_are_differentiable_again():
    a, w = (0.5 * draw(1, 2, dtype=torch.complex128, seed=seed) for seed in (0, 1))
    given = (a.requires_grad_(), w.requires_grad_())
    assert torch.autograd.gradgradcheck(lambda a, w: vandermonde_kernel(a, w, 7), given)


def test_the_kernel_forms_no_states_times_length():
    a, w = (0.99 * draw(8, 32, dtype=torch.complex64)).requires_grad_(), draw(8, 32, dtype=torch.complex64)
    with Allocations() as seen:
        vandermonde_kernel(a / (1 + a.abs()), w, 4096).sum().backward()
    assert seen.largest < 8 * 32 * 4096 / 8


def test_powers_have_the_error_of_rounding_at_a_million_steps():
    a = torch.polar(torch.tensor([[1.0 - 1e-6]]), torch.tensor([[2.5]]))
    kernel = vandermonde_kernel(a, torch.ones_like(a), 1_000_000)
    steps = torch.tensor([1, 1000, 123_457, 999_999])
    assert_agree(kernel[0, steps], (a.to(torch.complex128)[0, 0] ** steps).real)


@thorough
def test_the_kernel_is_traced_for_lengths_that_vary():
    a = 0.9 * torch.exp(1j * draw(2, 3)).to(torch.complex64)
    traced = torch.compile(vandermonde_kernel, backend="eager", dynamic=True)
    for length in (5, 9, 70):
        assert_agree(traced(a, a, length), vandermonde_kernel(a, a, length))


@pytest.mark.parametrize("method", ["zoh", "bilinear", "euler"])
def test_discretisations_are_what_they_approximate(method):
    # x' = A x + B for one unit of time from zero: x = (e^A - 1) / A B
    A, B = torch.tensor([-1.0 + 2j, -0.5, 0.0, -3.0 + 1j], dtype=torch.complex128), 1.5
    exact = torch.where(A == 0, B, (torch.exp(A) - 1) / torch.where(A == 0, 1, A) * B)
    errors = []
    for steps in (50, 100):
        a, b = discretize_diagonal(A, torch.full_like(A, B), 1 / steps, method)
        errors.append(float((vandermonde_kernel(a[None], b[None], steps).sum() - exact.real.sum()).abs()))
    order = {"zoh": None, "bilinear": 2, "euler": 1}[method]
    if order is None:
        assert max(errors) < 1e-12
    else:
        assert errors[0] / errors[1] == pytest.approx(2**order, rel=0.1)


def test_the_step_responses_of_small_entries_keep_their_digits():
    A = torch.tensor([-1e-9, -1e-4, -1e-3, -10.0, -1e3, -1e5])
    _, b = discretize_diagonal(A, torch.ones(6), 0.1)
    expected = torch.expm1(0.1 * A.double()) / A.double()
    torch.testing.assert_close(b.double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("turn", [-1.0, 1j, -0.6 + 0.8j], ids=["real", "imaginary", "complex"])
@pytest.mark.parametrize("step", [1e-5, 1e-2, 1.0])
def test_zero_order_hold_and_its_gradients_are_exact_to_rounding(turn, step):
    sizes = torch.cat([torch.logspace(-12, 1, 400, dtype=torch.float64), torch.linspace(0.45, 0.55, 50)])
    real = isinstance(turn, float)
    A = (turn * sizes / step).to(torch.float32 if real else torch.complex64).requires_grad_()
    B = torch.full_like(A, 1.3 if real else 1.3 - 0.4j).requires_grad_()
    dt = torch.full(A.shape, step, dtype=torch.float32).requires_grad_()
    a, b = discretize_diagonal(A, B, dt)
    # autograd conjugates derivatives of complex numbers
    gradients = torch.autograd.grad(b.real.sum(), (A, B, dt))

    exact_A, exact_B, exact_dt = (x.detach().to(torch.complex128) for x in (A, B, dt))
    z = exact_A * exact_dt
    # (exp(z) - 1) / z and its derivative, as power series that end when 10^k / k! is below rounding
    value, slope = torch.zeros_like(z), torch.zeros_like(z)
    for n in range(80, 0, -1):
        value = 1 / math.factorial(n) + z * value
        slope = n / math.factorial(n + 1) + z * slope
    # the size of all but the first beside their units; near 2 pi i they are differences of such numbers
    size = 1 / (4 * z.abs().clamp(min=1))
    moved = torch.exp(z) * exact_B
    expected = {
        "a": (a, torch.exp(z), 0),
        "b": (b, exact_dt * value * exact_B, size * exact_dt.abs() * exact_B.abs()),
        "A": (gradients[0].conj(), exact_dt**2 * slope * exact_B, size * exact_dt.abs() ** 2 * exact_B.abs()),
        "B": (gradients[1].conj(), exact_dt * value, size * exact_dt.abs()),
        "dt": (gradients[2], moved.real, moved.abs()),
    }
    for name, (found, correct, scale) in expected.items():
        error = (found.detach().to(torch.complex128) - correct).abs()
        assert (error < 2e-6 * torch.maximum(correct.abs(), torch.as_tensor(scale))).all(), name


def test_gradients_of_discretisations():
    A = torch.tensor([-1.0 + 2j, -0.5, -1e-3], dtype=torch.complex128, requires_grad=True)
    B = torch.tensor([1.0, 2.0, 0.5 + 1j], dtype=torch.complex128, requires_grad=True)
    dt = torch.tensor([[0.1], [0.7]], dtype=torch.float64, requires_grad=True)
    for method in DISCRETIZATIONS:
        options = {"length": 9} if method == "softmax" else {}

        def of(A, B, dt, method=method, options=options):
            return discretize_diagonal(A, B, dt, method, **options)

        assert torch.autograd.gradcheck(of, (A, B, dt))


def test_softmax_taps_are_a_softmax_over_their_steps():
    A = torch.tensor([[-0.5 + 3j, -2.0 + 0.3j, 0.3 - 1j]], dtype=torch.complex128)
    B, length = torch.tensor([[1.0, 0.5 - 2j, 1j]], dtype=torch.complex128), 20
    a, b = discretize_diagonal(A, B, 0.2, "softmax", length=length)
    powers = torch.exp(0.2 * A[..., None] * torch.arange(length))
    expected = (B / A)[..., None] * powers / powers.sum(-1, keepdim=True)
    torch.testing.assert_close(
        b[..., None] * a[..., None] ** torch.arange(length), expected, rtol=1e-5, atol=0
    )


def test_errors_of_discretisations_and_kernels():
    A = -torch.ones(2)
    with pytest.raises(ValueError, match="did you mean 'bilinear'"):
        discretize_diagonal(A, A, 0.1, "bilinaer")
    for dt in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=r"`dt` must be .*; got"):
            discretize_diagonal(A, A, dt)
    with pytest.raises(ValueError, match=r"`dt` must be at least 0; got values down to -1"):
        discretize_diagonal(A, A, torch.tensor([0.5, -1.0]))
    with pytest.raises(ValueError, match=r"`A` must be at most 0, .*; got values up to 1"):
        discretize_diagonal(-A, A, 0.1)
    pairs = torch.complex(-A, 5 * A)
    for method in ("zoh", "bilinear", "euler"):
        with pytest.raises(
            ValueError, match=r"`A` must have real parts of at most 0, .* up to 1\. .* real parts"
        ):
            discretize_diagonal(pairs, A, torch.ones(2), method)
    # values that are not there to look at, or that may stand still
    assert torch.vmap(lambda A: discretize_diagonal(A, A, 0.1)[0])(-A).min() > 1
    assert torch.equal(discretize_diagonal(pairs.conj() - 1, A, torch.zeros(2))[1], torch.zeros_like(pairs))
    for options in (
        {"method": "softmax"},
        {"method": "zoh", "length": 3},
        {"method": "softmax", "length": 0},
    ):
        with pytest.raises(ValueError, match="`length` must be the number of taps"):
            discretize_diagonal(A, A, 0.1, **options)
    with pytest.raises(ValueError, match=r"`a` must have shape \(d, n\)"):
        vandermonde_kernel(A, A, 3)
    with pytest.raises(ValueError, match="`length` must be at least 1"):
        vandermonde_kernel(A[None], A[None], 0)
    for dtype in (torch.int64, torch.float16):
        with pytest.raises(TypeError, match=f"`a` must be float32, .* got {str(dtype)[6:]}"):
            vandermonde_kernel(A[None].to(dtype), A[None], 3)


def low_rank_inputs(rank=2, dtype=torch.complex128):
    Lambda = torch.complex(-draw(2, 3).exp(), 3 * draw(2, 3, seed=1)).to(dtype)
    shapes = ((2, 3, rank), (2, 3), (2, 3))
    P, B, C = (draw(*shape, dtype=torch.complex128, seed=seed).to(dtype) for seed, shape in enumerate(shapes))
    return Lambda, P, B, C, torch.tensor([0.3, 0.1], dtype=dtype.to_real())


def taps_of_low_rank(Lambda, P, B, C, dt, length):
    """C Abar^l Bbar, with whole matrices."""
    Lambda, P, B, C = (torch.cat([x, x.conj()], 1) for x in (Lambda, P, B, C))
    one = torch.eye(Lambda.shape[1], dtype=Lambda.dtype)
    A = dt[:, None, None] / 2 * (torch.diag_embed(Lambda) - P @ P.mH)
    Abar = torch.linalg.inv(one - A) @ (one + A)
    x, taps = torch.linalg.inv(one - A) @ (dt[:, None] * B)[..., None], []
    for _ in range(length):
        taps.append((C[:, None] @ x)[:, 0, 0].real)
        x = Abar @ x
    return torch.stack(taps, -1)


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("length", [1, 2, 9, 64])
def test_the_kernel_of_low_rank_is_that_of_whole_matrices(rank, length):
    given = [x.requires_grad_() for x in low_rank_inputs(rank)]
    kernel, expected = cauchy_kernel(*given, length), taps_of_low_rank(*given, length)
    assert_agree(kernel, expected)
    dk = draw(*kernel.shape, seed=5)
    wanted = [x for x in given if x.numel()]
    assert_agree(*(torch.autograd.grad(k, wanted, dk, materialize_grads=True) for k in (kernel, expected)))


@pytest.mark.parametrize("length", [1, 2, 9, 64])
def test_the_kernel_of_low_rank_where_nothing_moves(length):
    Lambda, P, B, C, dt = low_rank_inputs(1)
    # steps of zero, and an entry that stays as it is
    dt = dt * (torch.arange(len(dt)) > 0)
    Lambda, P = (
        x * (torch.arange(x.shape[1]) > 0).unflatten(0, (-1, *[1] * (x.ndim - 2))) for x in (Lambda, P)
    )
    given = [x.detach().requires_grad_() for x in (Lambda, P, B, C, dt)]
    kernel, expected = cauchy_kernel(*given, length), taps_of_low_rank(*given, length)
    assert_agree(kernel, expected)
    assert (kernel[0] == 0).all() and (kernel[1:] != 0).all()
    dk = draw(*kernel.shape, seed=5)
    assert_agree(*(torch.autograd.grad(k, given, dk) for k in (kernel, expected)))


def test_the_kernel_of_low_rank_in_single_precision_and_without_the_sum_of_all_terms():
    Lambda, P, B, C, dt = low_rank_inputs(1)
    # many entries, slow ones, and a kernel that has not faded at its end
    Lambda, P, B, C = (x.repeat(1, 8, *[1] * (x.ndim - 2)) / 4 for x in (Lambda, P, B, C))
    expected = taps_of_low_rank(Lambda, P, B, C, dt / 100, 2000)
    given = [x.to(torch.complex64).requires_grad_() for x in (Lambda, P, B, C)]
    with Allocations() as seen:
        kernel = cauchy_kernel(*given, (dt / 100).float(), 2000)
        kernel.sum().backward()
    assert_agree(kernel, expected)
    assert seen.largest < 2 * 2 * 24 * 2000 / 4


def test_errors_of_the_kernel_of_low_rank():
    given = low_rank_inputs()
    with pytest.raises(ValueError, match=r"`P` must have shape \(d, n, r\) = \(2, 3, r\); got \(2, 3\)"):
        cauchy_kernel(given[0], given[2], *given[2:], 4)
    with pytest.raises(ValueError, match="`length` must be at least 1"):
        cauchy_kernel(*given, 0)
    with pytest.raises(TypeError, match="`Lambda` must be complex64 or complex128; got float64"):
        cauchy_kernel(*(x.real for x in given), 4)
    for name, place in (("P", 1), ("C", 3), ("dt", 4)):
        wrong = list(given)
        wrong[place] = wrong[place].to(torch.complex64 if wrong[place].is_complex() else torch.float32)
        with pytest.raises(TypeError, match=f"`{name}` must be .* beside `Lambda` in complex128; got"):
            cauchy_kernel(*wrong, 4)
    with pytest.raises(
        ValueError, match=r"`Lambda` must have real parts of at most 0, .*`-torch.exp\(Lambda_log"
    ):
        cauchy_kernel(-given[0], *given[1:], 4)
    with pytest.raises(ValueError, match=r"`dt` must be at least 0; got values down to -0\.3"):
        cauchy_kernel(*given[:4], -given[4], 4)
