"""What a thread does must not change the numbers of another thread."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from linrec import mixers, ops
from linrec.nn.added_loss import weighing_losses, with_loss
from linrec.ops import ConvergenceError, scan
from linrec.ops.core.ambient import checkpointed
from linrec.ops.core.call import handled, handling, recording, unhandled
from linrec.ops.nonlinear_scan import newton_options, nonlinear_scan
from linrec.testing import assert_agree, generator
from linrec.trees import leaves
from tests.mixers import variants
from tests.ops.test_edges import OPERATORS, every_operator
from tests.tiers import tiered

THREADS = 4


def beside(context, function):
    """Return the result of a function while another thread is within a context."""
    ready, go = threading.Event(), threading.Event()

    def other():
        with context:
            ready.set()
            go.wait()

    thread = threading.Thread(target=other)
    thread.start()
    ready.wait()
    try:
        return function()
    finally:
        go.set()
        thread.join()


def check_threads(function):
    """Law: the tensors that a function returns are the same from four threads at once as alone."""
    alone, start = function(), threading.Barrier(THREADS)

    def run(_):
        start.wait()
        return [function() for _ in range(3)]

    with ThreadPoolExecutor(THREADS) as pool:
        for results in pool.map(run, range(THREADS)):
            for found in results:
                for name, x in alone.items():
                    assert_agree(found[name], x, name)
    assert not handled()


@every_operator
def test_operators_from_four_threads(name):
    make, sizes = OPERATORS[name]
    given = make(**sizes)

    def run():
        inputs = {key: x.detach().requires_grad_() if torch.is_tensor(x) else x for key, x in given.items()}
        with recording() as calls:
            y, _ = getattr(ops, name)(**inputs)
        assert len(calls) == 1
        wanted = [x for x in inputs.values() if torch.is_tensor(x)]
        gradients = torch.autograd.grad(y.sum(), wanted, materialize_grads=True)
        return {"y": y.detach()} | {f"gradient {i}": x for i, x in enumerate(gradients)}

    check_threads(run)


@pytest.mark.parametrize("name", tiered(["gla", "hippo_rnn", "compressive_transformer"], mixers.names()))
def test_mixers_and_their_inspection_from_four_threads(name):
    torch.manual_seed(0)
    mixer = mixers.build(name, 8, **variants.arguments(*variants.cases(name)[0])).eval()
    x = torch.randn(1, 12, 8, generator=generator()).requires_grad_()

    def run():
        y, state = mixer(x)
        gradients = torch.autograd.grad(y.sum(), [x, *mixer.parameters()], allow_unused=True)
        found = {"y": y, "mixing": mixer.token_mixing(x), "transitions": mixer.transitions(x)}
        return {
            f"{key} {i}": part.detach()
            for key, value in {**found, "state": state, "gradient": gradients}.items()
            for i, part in enumerate(leaves(value))
        }

    check_threads(run)


def test_weights_of_losses():
    def gradient():
        w = torch.ones((), requires_grad=True)
        with_loss(torch.ones(3, requires_grad=True), 5 * w).sum().backward()
        return float(w.grad)

    assert beside(weighing_losses(1 / 8), gradient) == 5


def test_options_of_newtons_method():
    x, W = torch.randn(1, 200, 4, generator=generator()), 3 * torch.eye(4)

    def solve():
        with pytest.raises(ConvergenceError):
            nonlinear_scan(lambda h, x, W: torch.sin(x + h @ W.T), x, W, mode="newton", max_iterations=2)

    beside(newton_options(otherwise="recurrent"), solve)


def test_recording_of_calls():
    x, record = torch.ones(1, 4, 8), []

    def handler(of, proceed):
        record.append(of)
        return proceed()

    beside(handling(handler), lambda: mixers.build("gla", 8)(x))
    assert not record


def test_contexts_that_overlap_leave_no_handler():
    with ThreadPoolExecutor(1) as pool:
        first = unhandled()
        with handling(lambda of, proceed: proceed()):
            pool.submit(first.__enter__).result()
        assert not handled()
        pool.submit(first.__exit__, None, None, None).result()
        assert not pool.submit(handled).result() and not handled()


def test_a_checkpoint_runs_again_in_the_contexts_of_its_first_run():
    """Also in another thread, as in autograd's threads for GPUs."""
    asked = []

    def handler(call, proceed):
        asked.append(call.operator.name)
        return proceed()

    x = torch.ones(1, 4, 2, requires_grad=True)
    with handling(handler), recording() as calls:
        y = checkpointed(lambda x: scan(x.exp().sin(), x.exp())[0])(x)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(y.sum().backward).result()
    # the second run is not among the calls within the context
    assert asked == ["scan"] * 2 and len(calls) == 1
