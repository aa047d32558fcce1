"""nonlinear_scan: its iterations, their errors and reports; test_laws.py has the laws."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from linrec.mixers import build
from linrec.ops import nonlinear_scan, scan
from linrec.ops.nonlinear_scan import Convergence, ConvergenceError, newton_options
from linrec.ops.nonlinear_scan.linear import smoothed
from linrec.testing import assert_agree, generator
from tests.tiers import thorough, tiered

NEWTON = ["newton", "quasi_newton", "damped"]


def elman(h: Tensor, x: Tensor, W: Tensor) -> Tensor:
    return torch.tanh(x + h @ W.T)


def inputs(time: int, n: int = 4, *, gain: float = 0.7) -> tuple[Tensor, Tensor]:
    random = generator(time)
    x = torch.randn(2, time, n, generator=random, dtype=torch.float64)
    return x, gain * torch.linalg.qr(torch.randn(n, n, generator=random, dtype=torch.float64)).Q


def iterations(mode: str, *given: Tensor, **options: object) -> tuple[Tensor, int]:
    convergence = Convergence()
    y, _ = nonlinear_scan(*given, mode=mode, convergence=convergence, **options)
    convergence.check()
    return y, int(convergence.iterations)


@pytest.mark.parametrize("mode", ["newton", "quasi_newton"])
def test_a_linear_cell_takes_one_iteration_and_one_to_see_that_it_is_done(mode):
    x, _ = inputs(40)
    a = torch.linspace(0.1, 0.9, 4, dtype=torch.float64)
    y, count = iterations(mode, lambda h, x, a: a * h + x, x, a)
    assert_agree(y, scan(a, x)[0])
    assert count == 2


def test_whole_jacobians_take_fewer_iterations_than_diagonals():
    x, W = inputs(200)
    counts = [iterations(mode, elman, x, W)[1] for mode in NEWTON]
    assert counts[0] < 10 < min(counts[1:]) and max(counts) < 60


def cubic(h: Tensor, x: Tensor) -> Tensor:
    return h + 0.1 * (x - h**3)


def test_damping_keeps_iterations_where_the_cell_contracts():
    x = 1 + inputs(300)[0]
    y, count = iterations("damped", cubic, x)
    assert_agree(y, nonlinear_scan(cubic, x)[0])
    assert count < 30
    for mode in NEWTON[:2]:
        assert iterations(mode, cubic, x, max_iterations=300)[1] > 3 * count


def test_options_reach_the_calls_of_mixers_and_nest():
    mixer, x = build("elman", 4, mode="newton"), torch.randn(2, 60, 4)
    expected, _ = build_like(mixer, "recurrent")(x)
    with newton_options(max_iterations=1):
        with pytest.raises(ConvergenceError, match=r"after 1 iterations .*`linrec.*newton_options`"):
            mixer(x)
        with newton_options(otherwise="recurrent"):
            assert_agree(mixer(x)[0], expected)
        # an argument of the call is left as it is
        nonlinear_scan(elman, *inputs(20), mode="newton", max_iterations=50)
    assert_agree(mixer(x)[0], expected)
    with pytest.raises(ValueError, match="`tolerance` must be positive"), newton_options(tolerance=0.0):
        pass


def build_like(mixer: nn.Module, mode: str) -> nn.Module:
    found = build("elman", 4, mode=mode)
    found.load_state_dict(mixer.state_dict())
    return found


@thorough
def test_options_of_newtons_method_hold_for_compiled_calls():
    # so many iterations are exact; to trace the 12 of the default takes a minute
    x, W = inputs(3)
    solve = torch.compile(lambda x: nonlinear_scan(elman, x, W, mode="newton")[0], backend="eager")
    expected = nonlinear_scan(elman, x, W)[0]
    for limit in (4, 1, 4):
        with newton_options(max_iterations=limit):
            y = solve(x)
        assert y.isnan().any() if limit == 1 else torch.allclose(y, expected)


@pytest.mark.parametrize("mode", NEWTON)
def test_iterations_start_from_a_guess(mode):
    x, W = inputs(100)
    y, cold = iterations(mode, elman, x, W)
    same, warm = iterations(mode, elman, x, W, guess=y)
    assert_agree(same, y)
    assert warm == 1 < cold
    near = iterations(mode, elman, x, 1.001 * W, guess=y)[1]
    assert near < iterations(mode, elman, x, 1.001 * W)[1]
    # non-finite entries of the guess become zeros
    assert iterations(mode, elman, x, W, guess=torch.full_like(y, torch.nan))[1] == cold


@pytest.mark.parametrize("mode", ["quasi_newton", "damped"])
def test_a_diagonal_saves_the_jacobian_and_an_approximation_changes_nothing(mode):
    x, W = inputs(60)
    calls = []

    def counted(h: Tensor, x: Tensor, W: Tensor) -> Tensor:
        calls.append(torch._C._are_functorch_transforms_active())
        return elman(h, x, W)

    def diagonal(h: Tensor, x: Tensor, W: Tensor) -> Tensor:
        return (1 - elman(h, x, W) ** 2) * W.diagonal()

    expected, count = iterations(mode, elman, x, W)
    y, same = iterations(mode, counted, x, W, diagonal=diagonal)
    assert_agree(y, expected)
    assert same == count and not any(calls)
    assert_agree(iterations(mode, elman, x, W, diagonal=lambda h, x, W: torch.zeros_like(h))[0], expected)


def test_a_smoother_is_the_least_squares_solution():
    random = generator(3)
    d, b, near = (torch.randn(1, 6, 1, generator=random, dtype=torch.float64) for _ in range(3))
    state, damping = torch.randn(1, 1, generator=random, dtype=torch.float64), 0.3
    d[0, 3] = 0
    # the normal equations of |L h - c|^2 + damping |h - near|^2
    L = torch.eye(6, dtype=torch.float64) - torch.diag(d[0, 1:, 0], -1)
    c = b[0, :, 0].clone()
    c[0] += d[0, 0, 0] * state[0, 0]
    eye = damping * torch.eye(6, dtype=torch.float64)
    expected = torch.linalg.solve(L.T @ L + eye, L.T @ c + damping * near[0, :, 0])
    assert_agree(smoothed(d, b, state, near, damping)[0, :, 0], expected)


@thorough
@pytest.mark.parametrize("mode", tiered(NEWTON[:2], NEWTON[2:]))
def test_second_derivatives(mode):
    x, W = inputs(5, 2)
    x, W = x.requires_grad_(), W.requires_grad_()
    state = torch.full((2, 2), 0.3, dtype=torch.float64, requires_grad=True)
    reset = torch.tensor([[False, False, True, False, False], [True, False, False, False, True]])

    def of(x: Tensor, W: Tensor, state: Tensor) -> Tensor:
        return nonlinear_scan(elman, x, W, state=state, reset=reset, mode=mode)[0]

    assert torch.autograd.gradgradcheck(of, (x, W, state), atol=1e-4)


@pytest.mark.parametrize("mode", NEWTON)
@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_gradients_do_not_depend_on_the_scale_of_a_loss(mode, scale):
    x, W = inputs(100)
    W.requires_grad_()
    y, _ = nonlinear_scan(elman, x, W, mode=mode)
    (expected,) = torch.autograd.grad(nonlinear_scan(elman, x, W)[0].sin().sum(), W)
    (found,) = torch.autograd.grad(scale * y.sin().sum(), W)
    assert_agree(found / scale, expected)


@pytest.mark.parametrize("mode", NEWTON)
def test_small_residuals_of_a_slow_cell_are_no_convergence(mode):
    def slow(h: Tensor, x: Tensor) -> Tensor:
        return h + 1e-6 * (torch.tanh(x) - h)

    x = torch.ones(1, 3000, 1)
    expected, _ = nonlinear_scan(slow, x)
    y, _ = nonlinear_scan(slow, x, mode=mode, damping=1e-9)
    assert (y - expected).abs().max() < 1e-3 * expected.max()


@pytest.mark.parametrize("mode", NEWTON)
def test_large_states_converge_in_float32(mode):
    x, W = (tensor.float() for tensor in inputs(1000))

    def large(h: Tensor, x: Tensor, W: Tensor) -> Tensor:
        return 1000 * x + 1000 * torch.tanh(h @ W.T / 1000)

    assert_agree(nonlinear_scan(large, x, W, mode=mode)[0], nonlinear_scan(large, x, W)[0])


@pytest.mark.parametrize("mode", NEWTON)
def test_cells_of_every_kind(mode):
    x, W = inputs(30)
    x = (0.5 + x.abs()).requires_grad_()
    cells = {
        "no state": lambda h, x, W: x @ W,
        "detached": lambda h, x, W: x @ W + 0.1 * h.detach(),
        # not defined at zero
        "divides": lambda h, x, W: torch.tanh(h @ W / x),
    }
    for name, cell in cells.items():
        found = []
        for each in (mode, "recurrent"):
            y, _ = nonlinear_scan(cell, x, W, mode=each)
            found.append((y, torch.autograd.grad(y.square().sum(), x)[0]))
        assert_agree(*found, name)
    order, weight = torch.tensor([1, 0, 3, 2]), W.clone().requires_grad_()
    y, state = nonlinear_scan(lambda h, x, W, i: elman(h[:, i], x, W), x, [weight, order], mode=mode)
    y.sum().backward()
    assert weight.grad is not None and state.untyped_storage().nbytes() == 2 * 4 * 8


def test_parameters_in_half_precision_beside_inputs_in_float32():
    x, W = inputs(20)
    x, W = x.float(), W.bfloat16()
    for mode in ("recurrent", *NEWTON):
        y, _ = nonlinear_scan(elman, x, W, mode=mode)
        assert_agree(y, nonlinear_scan(elman, x, W.float())[0])


def test_results_that_are_no_state_are_refused():
    x, _ = inputs(5)
    for mode in ("recurrent", *NEWTON):
        with pytest.raises(ValueError, match=r"`cell` must return h of shape \(2, 4\) in torch.float64"):
            nonlinear_scan(lambda h, x: x[:, :1], x, mode=mode)


@pytest.mark.parametrize("mode", ["recurrent", *NEWTON])
def test_cells_that_return_more_than_h_are_refused(mode):
    x, _ = inputs(5)
    with pytest.raises(TypeError, match="`cell` must return h alone, a tensor; got tuple"):
        nonlinear_scan(lambda h, x: (h, x), x, mode=mode)


@pytest.mark.parametrize("mode", NEWTON)
def test_cells_that_draw_random_numbers_are_refused(mode):
    x, _ = inputs(5)
    with pytest.raises(ValueError, match="`cell` must give the same result again"):
        nonlinear_scan(lambda h, x: torch.tanh(h + x + torch.randn_like(x)), x, mode=mode)


@pytest.mark.parametrize("mode", NEWTON)
def test_a_cell_that_saturates_stays_finite_at_an_infinite_input(mode):
    x, W = inputs(40)
    x[0, 7, 1], x[1, 9] = torch.inf, -torch.inf
    x.requires_grad_()
    found, expected = (
        [y, *torch.autograd.grad(y.sum(), [x])]
        for y in (nonlinear_scan(elman, x, W, mode=each)[0] for each in (mode, "recurrent"))
    )
    assert found[0].isfinite().all()
    assert_agree(found, expected)


@pytest.mark.parametrize("mode", NEWTON[1:])
def test_wide_states_need_a_diagonal(mode):
    x, W = torch.zeros(1, 5, 65), torch.zeros(65, 65)
    with pytest.raises(ValueError, match="`diagonal` for states of over 64 entries"):
        nonlinear_scan(elman, x, W, mode=mode)
    nonlinear_scan(elman, x, W, mode=mode, diagonal=lambda h, x, W: torch.zeros_like(h))


def test_damped_iterations_end_at_the_solution():
    """Damping makes steps small far from the solution: here residuals of 2e-6 added up to 3e-5."""

    def slow(h: Tensor, x: Tensor) -> Tensor:
        return h + 0.02 * torch.tanh(x - h)

    x = torch.randn(2, 400, 3, generator=generator(0))
    expected, _ = nonlinear_scan(slow, x)
    found, _ = nonlinear_scan(slow, x, mode="damped")
    assert (found - expected).abs().max() < 4e-6


def test_the_last_iteration_computes_no_jacobian():
    x, W = inputs(30)
    calls = []

    def counted(h: Tensor, x: Tensor, W: Tensor) -> Tensor:
        calls.append(1)
        return torch.zeros_like(h)

    _, count = iterations("quasi_newton", elman, x, W, diagonal=counted)
    assert len(calls) == count


def grows(h: Tensor, x: Tensor) -> Tensor:
    """A cell that forgets nothing: changes grow threefold per step."""
    return torch.sin(3 * h + x)


@pytest.mark.parametrize("mode", NEWTON)
def test_iterations_that_do_not_converge(mode):
    x, _ = inputs(300, 1)
    options = {"mode": mode, "max_iterations": 5}
    with pytest.raises(ConvergenceError, match=r"after 5 iterations the residual is .* times the tolerance"):
        nonlinear_scan(grows, x, **options)
    x.requires_grad_()
    y, _ = nonlinear_scan(grows, x, **options, otherwise="recurrent")
    expected, _ = nonlinear_scan(grows, x)
    assert_agree(y, expected)
    # a report of a call that fell back does not stop the next call
    convergence = Convergence()
    for _ in range(3):
        nonlinear_scan(grows, x, **options, otherwise="recurrent", convergence=convergence)
    assert convergence.residual > 1
    # a compiled call runs the loop too
    torch.compiler.reset()
    compiled = torch.compile(
        partial(nonlinear_scan, grows, **options, otherwise="recurrent"), backend="eager"
    )
    assert_agree(compiled(x)[0], expected)
    # over few steps: gradients grow with y's
    gradients = [torch.autograd.grad(z[:, :9].sum(), x)[0] for z in (y, expected)]
    assert_agree(*gradients)


@thorough
def test_a_compiled_call_that_does_not_converge_is_nan_and_the_next_check_raises():
    x, _ = inputs(40, 1)
    x = torch.stack([x[0], torch.zeros_like(x[0])])
    convergence = Convergence()

    def run(x: Tensor, limit: int) -> Tensor:
        return nonlinear_scan(grows, x, mode="newton", max_iterations=limit, convergence=convergence)[0]

    y = torch.compile(run, backend="eager", fullgraph=True)(x, 2)
    # the row of zeros is a solution from the start
    assert y[0].isnan().all() and torch.equal(y[1], x[1])
    assert convergence.residual > 1 and convergence.iterations == 2
    with pytest.raises(ConvergenceError, match="after 2 iterations"):
        run(x, 40)
    run(x, 40)
    convergence.check()


@pytest.mark.parametrize("mode", NEWTON)
def test_a_cell_that_overflows_starts_again(mode):
    x = torch.zeros(1, 30, 1, dtype=torch.float64)
    x[0, 0] = 1.5

    def cubic(h: Tensor, x: Tensor) -> Tensor:
        # Newton's steps from zero pass through states of up to 1e100
        return 0.1 * h - 0.3 * h**3 + x

    y, _ = nonlinear_scan(cubic, x, mode=mode, guess=torch.full_like(x, 1e120))
    assert_agree(y, nonlinear_scan(cubic, x)[0])


def test_weights_in_a_cell_get_no_gradient_from_newton():
    x, W = inputs(5)
    W.requires_grad_()
    with pytest.raises(ValueError, match="`cell` must get all tensors that need a gradient as `parameters`"):
        nonlinear_scan(lambda h, x: elman(h, x, W), x, mode="newton")
    assert nonlinear_scan(lambda h, x: elman(h, x, W), x)[0].requires_grad
    with torch.no_grad():
        nonlinear_scan(lambda h, x: elman(h, x, W), x, mode="newton")


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"x": torch.zeros(2, 5)}, ValueError, r"`x` must have shape \(b, t, ..\), at least 3 axes"),
        ({"parameters": (None,)}, TypeError, "`parameters` must be a tensor; got None"),
        ({"parameters": torch.zeros(4, 4).bfloat16()}, TypeError, "`parameters` must be float64"),
        ({"state": torch.zeros(3, 4)}, ValueError, r"`state` must have shape \(b, .., n\) with b = 2"),
        ({"guess": torch.zeros(2, 5, 3)}, ValueError, r"`guess` must have the shape of y, \(2, 5, 4\)"),
        ({"tolerance": 0.0}, ValueError, "`tolerance` must be positive"),
        ({"damping": -1.0}, ValueError, "`damping` must be positive"),
        ({"max_iterations": 0}, ValueError, "`max_iterations` must be at least 1"),
        ({"otherwise": "loop"}, ValueError, "'recurrent'"),
        ({"convergence": 3}, TypeError, "`convergence` must be a Convergence or None; got 3"),
        ({"diagonal": 3}, TypeError, "`diagonal` must be a function like `cell`, or None; got 3"),
        ({"mode": "neton"}, ValueError, "did you mean 'newton'"),
    ],
)
def test_errors(changed, error, message):
    x, W = inputs(5)
    with pytest.raises(error, match=message):
        nonlinear_scan(**{"cell": elman, "x": x, "parameters": W} | changed)
