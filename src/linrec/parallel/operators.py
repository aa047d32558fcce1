"""The operators that run in parallel over segments of time: one function each, in one table.

A function takes the ranks and this rank's call of the operator, and returns the outputs of this rank's steps,
and the final state of the whole sequence. All other operators run on one rank after another (`turns`).
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from linrec.ops.core.call import Call, Result
from linrec.ops.core.isolation import documents
from linrec.parallel import carry
from linrec.parallel.caches import attention
from linrec.parallel.halos import halo
from linrec.parallel.meeting import Meeting, meet
from linrec.parallel.ranks import Ranks
from linrec.parallel.recurrences import GateLoop, Recurrence, Scan

__all__ = ["OPERATORS"]


def _start(call: Call) -> Tensor:
    """Return the initial state of the sequence."""
    assert call.operator.state is not None
    shape, dtype = call.operator.state(call.inputs)
    if call.inputs.state is not None:
        return call.inputs.state
    return getattr(call.inputs, call.operator.sequence).new_zeros(shape, dtype=dtype)


def _meet(ranks: Ranks, call: Call, start: Tensor) -> Meeting:
    """Compare the call with the calls of the other ranks."""
    given = call.inputs
    return meet(
        ranks,
        call.operator.name,
        start.detach(),
        getattr(given, call.operator.sequence).shape[1],
        tensors=given,
        state=given.state,
        reset=given.reset,
        reverse=getattr(given, "reverse", False),
    )


def _elementwise(ranks: Ranks, call: Call) -> Result:
    """Run `scan` or `gate_loop`, whose transitions multiply entries of the state; see `carry`."""
    given, start = call.inputs, _start(call)
    recurrence: Recurrence = GateLoop(call)
    if call.operator.name == "scan":
        recurrence = Scan(call, given.reverse)
    tensors = tuple(x for name, x in given._asdict().items() if name not in ("state", "reset", "reverse"))
    return carry.run(
        _meet(ranks, call, start), recurrence, (*tensors, given.reset), given.state, start.detach()
    )


def _delta_rule(ranks: Ranks, call: Call) -> Result:
    """Run a delta rule: S_out = M S_in + B and y_t = S_in^T q~_t + y_t of S_in = 0, q~_t = M_{1..t}^T q_t.

    The columns of S evolve independently. So one call on values [v | 0] from the state [0 | I] returns
    outputs [y | q~] and the state [B | M]. After a reset, q~ and M are zeros.
    """
    given, start = call.inputs, _start(call)
    meeting = _meet(ranks, call, start)
    dk, dv = start.shape[-2:]
    own, begin = given.v, start
    if not meeting.is_first:
        own = torch.cat([own, own.new_zeros(*own.shape[:-1], dk)], -1)
        identity = torch.eye(dk, dtype=start.dtype, device=start.device).expand(*start.shape[:-1], dk)
        begin = torch.cat([torch.zeros_like(start), identity], -1)
    y, last = call.operator.run(given._replace(v=own, state=begin), call.backend)
    # the first rank with steps knows its initial state, so its map is a constant
    last = functional.pad(last, (0, dv + dk - last.shape[-1]))
    gathered = meeting.gather(given, last, meeting.cuts(given.reset, start))
    state = entering = start
    for rank in meeting.order:
        if rank == ranks.rank:
            entering = state
        added, through = gathered[rank][0].split([dv, dk], -1)
        # zero times NaN is NaN
        kept = state.masked_fill(gathered[rank][1][:, None, None, None] != 0, 0)
        state = added if rank == meeting.order[0] else through @ kept + added
    if not meeting.is_first:
        y, queries = y.split([dv, dk], -1)
        y = y + _isolated_product(queries, entering.to(y.dtype), given.reset)
    return meeting.tied(y, gathered, given.state), state


def _isolated_product(q: Tensor, state: Tensor, reset: Tensor | None) -> Tensor:
    """Return q_t S (b, t, h, dv) for steps before the first reset, and zeros for later steps."""
    if reset is None:
        return (q.transpose(1, 2) @ state).transpose(1, 2)
    # masked on both sides, so that NaN in S reaches neither later outputs nor their gradients
    later = documents(reset)[..., None, None] > 0
    product = q.masked_fill(later, 0).transpose(1, 2) @ state
    return product.transpose(1, 2).masked_fill(later, 0)


def _short_conv(ranks: Ranks, call: Call) -> Result:
    """Run the convolution on the inputs of the segment and the last inputs before."""
    given = call.inputs
    before, final = halo(ranks, given.x, _start(call), given.reset)
    y, _ = call.operator.run(given._replace(state=before), call.backend)
    return y, final


def _selective_scan(ranks: Ranks, call: Call) -> Result:
    """Run the selective scan: h_out = exp(A sum_t dt_t) h_in + B, with B by a run from zeros.

    The first rank with steps runs once, from its initial state, and its map is a constant.
    """
    given, start = call.inputs, _start(call)
    meeting = _meet(ranks, call, start)
    begin = start if meeting.is_first else torch.zeros_like(start)
    y, last = call.operator.run(given._replace(state=begin), call.backend)
    # added in the precision of the state: a sum in half precision would lose most steps
    cut = meeting.cuts(given.reset, start)
    elapsed = given.dt.sum(1, dtype=start.dtype).masked_fill(cut[:, None], 0)
    gathered = meeting.gather(given, last, elapsed, cut)
    state = entering = start
    for rank in meeting.order:
        if rank == ranks.rank:
            entering = state
        added, elapsed, cut = gathered[rank]
        if rank == meeting.order[0]:
            state = added
            continue
        decay = torch.exp(given.A.to(start.dtype) * elapsed[..., None])
        state = decay * state.masked_fill(cut[:, None, None] != 0, 0) + added
    if not meeting.is_first:
        y, _ = call.operator.run(given._replace(state=entering), call.backend)
    return meeting.tied(y, gathered, given.state), state


OPERATORS: Mapping[str, Callable[[Ranks, Call], Result]] = {
    "scan": _elementwise,
    "gate_loop": _elementwise,
    "delta_rule": _delta_rule,
    "generalized_delta_rule": _delta_rule,
    "short_conv": _short_conv,
    "selective_scan": _selective_scan,
    "softmax_attention": attention,
    "laplace_attention": attention,
}
