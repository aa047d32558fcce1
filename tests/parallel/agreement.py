"""Cases of ranks that do different things: all of them raise the same error, and none waits for ever."""

import weakref

import torch
import torch.distributed as dist

from linrec.ops import gate_loop, scan
from linrec.parallel import time_parallel

from .compare import raises

A, X = torch.linspace(0.1, 0.9, 24).reshape(2, 3, 4), torch.ones(2, 3, 4)


def on_last():
    return dist.get_rank() == dist.get_world_size() - 1


def differ(words, of_last, of_others):
    """One call on the last rank, another on the others."""
    with raises(ValueError, "ranks that share a sequence must make the same calls", words), time_parallel():
        of_last() if on_last() else of_others()


def case_batches():
    last = dist.get_world_size() - 1
    differ(f"the batch size: 2 on rank 0, 1 on rank {last}", lambda: scan(A[:1], X[:1]), lambda: scan(A, X))


def case_channels():
    differ("the number of channels or heads: 4 on rank 0, 3 on", lambda: scan(A[..., 1:], X[..., 1:]), both)


def both():
    return scan(A, X)


def case_operators():
    x = torch.ones(2, 3, 4, 1)
    differ("the operator: scan on rank 0, gate_loop on", lambda: gate_loop(x, x, x), both)


def case_heads():
    x = torch.ones(2, 3, 4, 2)
    differ("dv: 2 on rank 0, 1 on", lambda: gate_loop(x, x, x[..., :1]), lambda: gate_loop(x, x, x))


def case_dtypes():
    words = "the dtype of the state: torch.float32 on rank 0, torch.float64 on"
    differ(words, lambda: scan(A.double(), X.double()), both)


def case_states():
    differ("`state` given: no on rank 0, yes on", lambda: scan(A, X, state=torch.zeros(2, 4)), both)


def case_directions():
    differ("`reverse`: no on rank 0, yes on", lambda: scan(A, X, reverse=True), both)


def case_gradients():
    differ("gradient asked for: no on rank 0, yes on", lambda: scan(A, X.clone().requires_grad_()), both)


def case_outputs_that_some_ranks_leave_out_of_the_loss():
    x = X.clone().requires_grad_()
    with time_parallel():
        first, _ = scan(A, x)
        second, _ = scan(A, first)
    loss = first.sum() if on_last() else second.sum()
    with raises(ValueError, "the number of earlier calls: ", "If an output contributes to the loss"):
        loss.backward()


def case_loss_of_one_rank_alone():
    """As the documentation says, times zero is enough."""
    x = X.double().requires_grad_()
    with time_parallel():
        y, _ = scan(A.double(), x)
    (y[:, -1].sum() * on_last()).backward()
    size = dist.get_world_size()
    whole = torch.cat([X.double()] * size, 1).requires_grad_()
    scan(torch.cat([A.double()] * size, 1), whole)[0][:, -1].sum().backward()
    expected = whole.grad.tensor_split(size, 1)[dist.get_rank()]
    torch.testing.assert_close(x.grad, expected, rtol=1e-12, atol=1e-12)


def case_second_derivatives():
    x = X.clone().requires_grad_()
    with time_parallel():
        y, _ = scan(A, x)
    with raises(RuntimeError, "gradients through `time_parallel` cannot be differentiated again"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def case_a_graph_does_not_keep_the_group():
    # with gloo, a group that is left at the end of a program may abort it
    group = dist.new_group()
    x = X.clone().requires_grad_()
    with time_parallel(group):
        y, _ = scan(A, x)
    left = weakref.ref(group)
    dist.destroy_process_group(group)
    del group
    assert left() is None
    with raises(ValueError, "the process group of `time_parallel` is gone"):
        y.sum().backward()


def case_arguments_are_checked_before_ranks_meet():
    with raises(ValueError, "`state` must have shape (b, c) = (2, 4); got (1, 4)"), time_parallel():
        scan(A, X, state=torch.zeros(1, 4))
    q = torch.ones(2, 3, 4, 1)
    with raises(ValueError, "`phase` must have shape"), time_parallel() as ranks:
        gate_loop(q, q, q, phase=q[:1])
    assert ranks.sent == 0
