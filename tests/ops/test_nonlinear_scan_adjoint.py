"""The adjoint loop of nonlinear_scan, and the replay of its steps; test_laws.py has the laws."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from linrec import mixers
from linrec.ops import nonlinear_scan
from linrec.ops.core.call import recording
from linrec.ops.nonlinear_scan import UNROLLED, captured
from linrec.testing import assert_agree, generator
from linrec.trees import leaves
from tests.mixers import variants
from tests.tiers import thorough

DOUBLE = {"dtype": torch.float64}


def elman(h: Tensor, x: Tensor, W: Tensor) -> Tensor:
    return torch.tanh(x + h @ W.T)


def inputs(time: int, n: int = 4, *, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    random = generator(time)
    x, state = (torch.randn(*shape, generator=random, **DOUBLE) for shape in ((2, time, n), (2, n)))
    W = 0.7 * torch.linalg.qr(torch.randn(n, n, generator=random, **DOUBLE)).Q
    return tuple(tensor.to(device).requires_grad_() for tensor in (x, W, state))


def outcome(cell: Callable[..., Tensor], *given: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """Return y, the state, and the gradients of x, the parameter and the initial state."""
    x, W, state = given
    y, last = nonlinear_scan(cell, x, W, state=state, **options)
    return y, last, *torch.autograd.grad(y.sin().sum() + last.square().sum(), given)


def kernel_of(*arguments: Any, **options: Any) -> str:
    with recording() as calls:
        nonlinear_scan(*arguments, **options)
    return calls[0].backend.kernel


def resets(time: int) -> Tensor:
    return torch.rand(2, time, generator=generator(1)) < 0.1


@pytest.mark.parametrize("time", [1, 2, 40])
@pytest.mark.parametrize("with_reset", [False, True])
def test_the_gradient_is_that_of_autograd(time, with_reset):
    given, reset = inputs(time), resets(time) if with_reset else None
    expected = outcome(elman, *given, reset=reset, backend="reference")
    assert_agree(outcome(elman, *given, reset=reset, gradient="adjoint"), expected)


@thorough
def test_gradients_of_any_order():
    x, W, state = inputs(4, 2)
    reset = torch.tensor([[False, False, True, False], [True, False, False, True]])

    def of(x: Tensor, W: Tensor, state: Tensor) -> Tensor:
        return nonlinear_scan(elman, x, W, state=state, reset=reset, gradient="adjoint")[0]

    assert torch.autograd.gradcheck(of, (x, W, state), check_batched_grad=True)
    assert torch.autograd.gradgradcheck(of, (x, W, state), check_batched_grad=True)
    third = []
    for gradient in ("adjoint", "autograd"):
        found = nonlinear_scan(elman, x, W, state=state, gradient=gradient)[0].sum()
        for _ in range(3):
            (found,) = torch.autograd.grad(found.sin().sum(), W, create_graph=True)
        third.append(found)
    assert_agree(*third)


def test_the_states_alone_are_saved():
    x, W, state = inputs(50)
    saved = {"adjoint": 0, "autograd": 0}
    for gradient in saved:

        def packed(tensor: Tensor, gradient: str = gradient) -> Tensor:
            saved[gradient] += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(packed, lambda tensor: tensor):
            nonlinear_scan(elman, x, W, state=state, gradient=gradient)
    assert saved["adjoint"] == 2 * x.numel() + W.numel() + state.numel() < saved["autograd"]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nothing_from_before_a_reset_reaches_a_gradient(bad):
    x, _, state = inputs(9)
    values = x.detach().clone()
    values[0, 2] = bad
    reset = torch.zeros(2, 9, dtype=torch.bool)
    reset[:, 5] = True
    found = []
    for options in ({"gradient": "adjoint"}, {"backend": "reference"}):
        x = values.clone().requires_grad_()
        y, _ = nonlinear_scan(lambda h, x: (x + h).abs().sqrt(), x, state=state, reset=reset, **options)
        found.append((y[:, 5:], torch.autograd.grad(y[:, 5:].sum(), x)[0][:, 5:]))
        assert found[-1][1].isfinite().all()
    assert_agree(*found)


def test_cells_without_a_gradient_of_h():
    x, W, state = inputs(20)
    for cell in (lambda h, x, W: x @ W, lambda h, x, W: x @ W + 0.1 * h.detach(), lambda h, x, W: 0.5 * h):
        found = []
        for gradient in ("adjoint", "autograd"):
            y, _ = nonlinear_scan(cell, x, W, state=state, gradient=gradient)
            found.append(torch.autograd.grad(y.sum(), [x, W, state], materialize_grads=True))
        assert_agree(*found)


def test_auto_keeps_the_gradients_of_weights_in_a_cell(always_adjoint):
    x, _, state = inputs(20)
    layer = nn.Linear(4, 4, **DOUBLE)

    def closed(h: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(layer(h) + x)

    assert kernel_of(closed, x, state=state) == "autograd"
    nonlinear_scan(closed, x, state=state)[0].sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.abs().sum() > 0
    with pytest.raises(ValueError, match="`cell` must get all tensors that need a gradient as `parameters`"):
        nonlinear_scan(closed, x, state=state, gradient="adjoint")
    with torch.no_grad():
        assert kernel_of(closed, x, state=state) == "adjoint"


def test_auto_does_not_repeat_cells_that_give_other_values(always_adjoint):
    x, W, state = inputs(20)
    cells = {
        "random": lambda h, x, W: functional.dropout(elman(h, x, W)),
        "values": lambda h, x, W: elman(h, x, W) if float(h.detach().abs().max()) < 9 else h,
        "masks": lambda h, x, W: elman(h, x, W) + x[x > 0].sum(),
    }
    for cell in cells.values():
        assert kernel_of(cell, x, W, state=state) == "autograd"
        with pytest.raises(ValueError, match="draws random numbers or reads values"):
            nonlinear_scan(cell, x, W, state=state, gradient="adjoint")
    # a mask of the rows of a batch: several steps have more rows
    mask = torch.ones(2, 1, **DOUBLE)
    assert kernel_of(lambda h, x, W: mask * elman(h, x, W), x, W, state=state) == "autograd"
    assert kernel_of(elman, x, W, state=state) == "adjoint"
    assert kernel_of(elman, x[:, :2], W, state=state) == "autograd"


def test_transforms_differentiate_the_loop_by_autograd(always_adjoint):
    x, W, state = (tensor.detach() for tensor in inputs(20))

    def run(x: Tensor) -> Tensor:
        return nonlinear_scan(elman, x, W, state=state)[0]

    y, slope = torch.func.jvp(run, (x,), (torch.ones_like(x),))
    assert_agree(y, run(x))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        assert_agree(torch.autograd.forward_ad.unpack_dual(run(dual)).tangent, slope)
    assert_agree(torch.vmap(run)(torch.stack([x, x]))[1], y)


def test_adaptive_solvers_keep_autograd(always_adjoint):
    pytest.importorskip("torchdiffeq")
    torch.manual_seed(0)
    for solver, kernel in (("dopri5", "autograd"), ("rk4", "adjoint")):
        mixer = mixers.build("ode_rnn", 4, solver=solver)
        with recording() as calls:
            mixer(torch.randn(2, 20, 4))
        assert [call.backend.kernel for call in calls] == [kernel]


@pytest.mark.parametrize("time", [17, 31, 32, 48, 100])
def test_pieces_are_the_loop(monkeypatch, time):
    given, reset = inputs(time), resets(time)
    expected = outcome(elman, *given, reset=reset, gradient="adjoint")
    replays = replay_in_python(monkeypatch)
    assert_agree(outcome(elman, *given, reset=reset, gradient="adjoint"), expected)
    # forwards and backwards
    assert len(replays) == 2 * ((time - 1) // captured.STEPS)


@thorough
def test_pieces_have_second_derivatives(monkeypatch):
    x, W, _ = inputs(captured.STEPS + 1, 2)
    replay_in_python(monkeypatch)

    def of(x: Tensor, W: Tensor) -> Tensor:
        return nonlinear_scan(elman, x, W, gradient="adjoint")[0]

    assert torch.autograd.gradgradcheck(of, (x, W))


@thorough
def test_a_compiler_leaves_out_long_loops():
    graphs = []

    def counting(graph: torch.fx.GraphModule, example: list[Tensor]) -> Callable[..., Any]:
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    def run(x: Tensor, W: Tensor, state: Tensor) -> Tensor:
        return nonlinear_scan(elman, 2 * x, W, state=state)[0].sin()

    torch._dynamo.reset()
    given = inputs(UNROLLED + 1)
    assert_agree(torch.compile(run, backend=counting)(*given), run(*given))
    assert graphs and max(graphs) < UNROLLED
    short = inputs(UNROLLED)
    assert_agree(torch.compile(run, backend=counting, fullgraph=True)(*short), run(*short))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="disable"):
        torch.compile(run, backend=counting, fullgraph=True)(*given)


@thorough
def test_a_long_loop_within_compiled_code_compiles_its_steps():
    def run(x: Tensor, W: Tensor, state: Tensor) -> tuple[Tensor, ...]:
        return nonlinear_scan(elman, x, W, state=state, reset=reset, gradient="adjoint")

    torch._dynamo.reset()
    given, reset = inputs(UNROLLED + 1), resets(UNROLLED + 1)
    found = []
    for each in (run, torch.compile(run, backend="eager")):
        y, last = each(*given)
        first = torch.autograd.grad(y.sin().sum() + last.sum(), given, create_graph=True)
        found.append((y, last, *first, *torch.autograd.grad(first[1].square().sum(), given)))
    assert_agree(found[1], found[0])


@pytest.mark.parametrize("name", variants.NONLINEAR)
def test_every_mixer(monkeypatch, always_adjoint, name):
    torch.manual_seed(0)
    mixer = mixers.build(name, 8).double().eval()
    x = torch.randn(2, 20, 8, generator=generator(0), requires_grad=True, **DOUBLE)
    replay_in_python(monkeypatch)
    found, kernels = outcome_of_mixer(mixer, x)
    assert kernels == {"adjoint"}
    monkeypatch.undo()
    expected, kernels = outcome_of_mixer(mixer, x)
    assert kernels <= {"autograd"}
    assert_agree(found, expected)


def outcome_of_mixer(mixer: nn.Module, x: Tensor) -> tuple[tuple[Tensor, ...], set[str]]:
    """Return y and all gradients, and the kernels of `nonlinear_scan` that ran."""
    # torch's kernels do not take calls with resets
    reset = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
    reset[1, 7] = True
    with recording() as calls:
        y, state = mixer(x, reset=reset)
    loss = y.square().sum() + sum(part.abs().square().sum() for part in leaves(state))
    gradients = torch.autograd.grad(loss, [x, *mixer.parameters()], materialize_grads=True)
    kernels = {call.backend.kernel for call in calls if call.operator is nonlinear_scan.operator}
    return (y, *gradients), kernels


def replay_in_python(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Run pieces of any sequence that is longer than one, as on CUDA, without a graph; return the replays."""
    replays = []

    def recorded(piece: Callable[[], None], before: Callable[[], None]) -> Callable[[], None]:
        before()
        return lambda: (replays.append(None), piece())[1]

    monkeypatch.setattr(captured, "_captured", recorded)
    monkeypatch.setattr(captured, "capturable", lambda given: given[0].shape[1] > captured.STEPS)
    return replays


@pytest.fixture
def always_adjoint(monkeypatch):
    """Have "auto" choose the adjoint loop for more than 8 steps."""
    first, *others = nonlinear_scan.operator.backends
    assert first.kernel == "adjoint"
    preferred = replace(first, auto=lambda given: given.x.shape[1] > 8)
    monkeypatch.setattr(nonlinear_scan.operator, "backends", [preferred, *others])
