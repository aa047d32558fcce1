"""What a thread does must not change the numbers of another thread."""

import threading

import pytest
import torch

from linrec import mixers
from linrec.nn.added_loss import weighing_losses, with_loss
from linrec.ops import ConvergenceError
from linrec.ops.core import call
from linrec.ops.nonlinear_scan import newton_options, nonlinear_scan

shared = pytest.mark.xfail(strict=True, reason="the threads of a process share this list")


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


@shared
def test_weights_of_losses():
    def gradient():
        w = torch.ones((), requires_grad=True)
        with_loss(torch.ones(3, requires_grad=True), 5 * w).sum().backward()
        return float(w.grad)

    assert beside(weighing_losses(1 / 8), gradient) == 5


@shared
def test_options_of_newtons_method():
    x, W = torch.randn(1, 200, 4, generator=torch.Generator().manual_seed(0)), 3 * torch.eye(4)

    def solve():
        with pytest.raises(ConvergenceError):
            nonlinear_scan(lambda h, x, W: torch.sin(x + h @ W.T), x, W, mode="newton", max_iterations=2)

    beside(newton_options(otherwise="recurrent"), solve)


@shared
def test_recording_of_calls():
    x, record = torch.ones(1, 4, 8), []

    def handler(of: call.Call, proceed):
        record.append(of)
        return proceed()

    beside(call.handling(handler), lambda: mixers.build("gla", 8)(x))
    assert not record


@shared
def test_contexts_that_overlap_leave_no_handler():
    first, second = call.unhandled(), call.handling(lambda of, proceed: proceed())
    # as two threads interleave
    with second:
        first.__enter__()
    first.__exit__(None, None, None)
    try:
        assert not call.handlers
    finally:
        call.handlers.clear()
