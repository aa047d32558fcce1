"""Steps of nonlinear_scan that are captured as CUDA graphs, in eager calls and within other graphs."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from linrec import mixers
from linrec.ops import nonlinear_scan
from linrec.ops.nonlinear_scan import captured
from linrec.testing import assert_agree
from tests.mixers import variants
from tests.ops.test_nonlinear_scan_adjoint import (
    always_adjoint,
    elman,
    inputs,
    kernel_of,
    outcome,
    outcome_of_mixer,
    resets,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures(always_adjoint.__name__),
]

# one piece more than the shortest sequence that is captured
LONG = (captured.REPLAYS + 2) * captured.STEPS


@pytest.fixture
def captures(monkeypatch) -> list[None]:
    """Return a list with an entry for each capture."""
    found, right = [], captured._captured

    def counted(piece: Callable[[], None], before: Callable[[], None]) -> Callable[[], None]:
        found.append(None)
        return right(piece, before)

    monkeypatch.setattr(captured, "_captured", counted)
    return found


def uncaptured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured, "capturable", lambda inputs: False)


@pytest.mark.parametrize("time", [LONG - 1, LONG, LONG + 1, LONG + 15, 500])
@pytest.mark.parametrize("with_reset", [False, True])
def test_captured_steps_are_the_loop(monkeypatch, captures, time, with_reset):
    given, reset = inputs(time, device="cuda"), resets(time).cuda() if with_reset else None
    assert kernel_of(elman, *given[:2], state=given[2], reset=reset) == "adjoint"
    captures.clear()
    found = outcome(elman, *given, reset=reset)
    assert len(captures) == 2
    uncaptured(monkeypatch)
    assert_agree(found, outcome(elman, *given, reset=reset))
    assert len(captures) == 2
    assert_agree(found, outcome(elman, *given, reset=reset, gradient="autograd"))


def test_short_sequences_are_not_captured(captures):
    outcome(elman, *inputs(LONG - 2 * captured.STEPS, device="cuda"))
    assert not captures


def test_auto_captures_long_sequences_of_cells_that_can_be_repeated(monkeypatch):
    monkeypatch.undo()
    shortest = (captured.REPLAYS + 1) * captured.STEPS
    for time, kernel in ((shortest - 1, "autograd"), (shortest, "adjoint")):
        x, W, state = inputs(time, device="cuda")
        assert kernel_of(elman, x, W, state=state) == kernel

    def noisy(h: Tensor, x: Tensor, W: Tensor) -> Tensor:
        return elman(h, x, W) + torch.randn_like(h)

    assert kernel_of(noisy, x, W, state=state) == "autograd"


def test_a_call_sees_parameters_that_changed(captures):
    x, W, state = inputs(LONG, device="cuda")
    for _ in range(3):
        found, expected = (
            outcome(elman, x, W, state, gradient=gradient) for gradient in ("auto", "autograd")
        )
        assert_agree(found, expected)
        with torch.no_grad():
            W.mul_(0.9)
    # and what a cell holds
    scale = torch.ones((), dtype=torch.float64, device="cuda")

    def scaled(h: Tensor, x: Tensor, W: Tensor) -> Tensor:
        return scale * elman(h, x, W)

    for factor in (1.0, 0.5):
        scale.fill_(factor)
        assert_agree(outcome(scaled, x, W, state), outcome(scaled, x, W, state, gradient="autograd"))
    assert len(captures) == 2 * 5


def test_shapes_and_lengths_change_from_call_to_call(captures):
    for time, n in ((LONG, 4), (2 * LONG + 3, 4), (LONG + 7, 64), (LONG, 4), (1000, 1)):
        given = inputs(time, n, device="cuda")
        assert_agree(outcome(elman, *given), outcome(elman, *given, gradient="autograd"))
    assert len(captures) == 10


def test_without_gradients(captures):
    x, W, state = (tensor.detach() for tensor in inputs(LONG, device="cuda"))
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            found = nonlinear_scan(elman, x, W, state=state)
        assert_agree(found, nonlinear_scan(elman, x, W, state=state, gradient="autograd"))
    assert len(captures) == 2


def test_second_derivatives(captures):
    x, W, state = inputs(LONG, 2, device="cuda")
    second = []
    for gradient in ("auto", "autograd"):
        y, _ = nonlinear_scan(elman, x, W, state=state, gradient=gradient)
        first = torch.autograd.grad(y.sin().sum(), [x, W], create_graph=True)
        second.append(torch.autograd.grad(sum(part.square().sum() for part in first), [x, W, state]))
    assert_agree(*second)
    assert captures


def test_a_graph_around_the_call_has_its_steps(captures):
    x, W, state = inputs(LONG + 5, device="cuda")
    x.requires_grad_(False)
    stream = torch.cuda.Stream()

    def step() -> tuple[Tensor, ...]:
        y, last = nonlinear_scan(elman, x, W, state=state)
        return y, *torch.autograd.grad(y.sin().sum() + last.sum(), [W, state])

    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    # the eager call is captured itself
    assert len(captures) == 2
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = step()
    assert len(captures) == 2
    for seed in (1, 2):
        torch.manual_seed(seed)
        x.copy_(torch.randn_like(x))
        with torch.no_grad():
            W.mul_(0.9)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            graph.replay()
            expected = step()
        torch.cuda.synchronize()
        assert_agree(found, expected)


def test_calls_do_not_keep_memory():
    given = inputs(LONG, 64, device="cuda")
    for _ in range(3):
        outcome(elman, *given)
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    for _ in range(30):
        outcome(elman, *given)
    torch.cuda.synchronize()
    reserved, allocated = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    # less where graphs of other tests are collected meanwhile
    assert reserved <= before[0]
    assert allocated <= before[1]


def test_other_streams_have_memory_of_their_own():
    given = inputs(LONG, 64, device="cuda")
    expected = outcome(elman, *given)
    streams = [torch.cuda.Stream() for _ in range(3)]
    found = []
    torch.cuda.synchronize()
    for stream in streams:
        with torch.cuda.stream(stream):
            # leaves of this stream's own: those of another stream keep its nodes of autograd
            found.append(outcome(elman, *(tensor.detach().requires_grad_() for tensor in given)))
    torch.cuda.synchronize()
    for each in found:
        assert_agree(each, expected)


@pytest.mark.parametrize("name", variants.NONLINEAR)
def test_every_mixer(monkeypatch, captures, name):
    torch.manual_seed(0)
    mixer = mixers.build(name, 8).double().cuda().eval()
    x = torch.randn(3, LONG + 3, 8, dtype=torch.float64, device="cuda", requires_grad=True)
    found, kernels = outcome_of_mixer(mixer, x)
    assert kernels == {"adjoint"}
    assert captures
    monkeypatch.setattr(nonlinear_scan.operator, "backends", nonlinear_scan.operator.backends[1:])
    assert_agree(found, outcome_of_mixer(mixer, x)[0])


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
def test_a_compiled_model_leaves_out_the_loop_and_is_captured_whole():
    torch.manual_seed(0)
    layer = mixers.build("lem", 16).cuda()
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU()).cuda()
    x = torch.randn(4, 100, 16, device="cuda")
    parameters = [*model.parameters(), *layer.parameters()]

    def run(x: Tensor) -> Tensor:
        return layer(model(x))[0]

    def step(run: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        y = run(x)
        return y, *torch.autograd.grad(y.sin().mean(), parameters)

    compiled, stream, graph = torch.compile(run), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for _ in range(3):
            found = step(compiled)
        assert_agree(found, step(run))
    with torch.cuda.graph(graph, stream=stream):
        found = step(compiled)
    x.normal_()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.replay()
        assert_agree(found, step(run))
