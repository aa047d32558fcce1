"""The convolution as a sum of shifted inputs, which is efficient for few taps and any number of steps."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from linrec.ops.core.checks import State
from linrec.ops.core.isolation import documents


class ShortConv(NamedTuple):
    """Canonical inputs of the backends.

    Attributes:
        x: (b, t, c).
        weight: (c, width).
        bias: None or (c,).
        state: previous inputs (b, width - 1, c), oldest first.
        reset: None or (b, t) bool.
        silu: whether SiLU follows.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    state: State
    reset: Tensor | None
    silu: bool


def convolution(given: ShortConv) -> tuple[Tensor, Tensor]:
    """Compute y = f(sum_j w_j (x shifted by j) + b), over the state and the new inputs."""
    x, weight, bias, state, reset, silu = given
    inputs = torch.cat([state, x], dim=1)
    return filtered(x, inputs, weight, bias, reset, silu), last_inputs(inputs, state, reset)


def filtered(
    x: Tensor, inputs: Tensor, weight: Tensor, bias: Tensor | None, reset: Tensor | None, silu: bool
) -> Tensor:
    """Return y; `inputs` are x with the width - 1 steps before it. Weights may have a batch axis."""
    document = None if reset is None else documents(reset, past=weight.shape[-1] - 1)
    y = by_shifts(x, inputs, weight, document)
    y = y if bias is None else y + bias
    return functional.silu(y) if silu else y


def last_inputs(inputs: Tensor, state: Tensor, reset: Tensor | None) -> Tensor:
    """Return the state after the last step, (b, width - 1, c), from at least so many inputs."""
    past = state.shape[1]
    # cloned, because a view would keep all inputs alive
    last = inputs[:, inputs.shape[1] - past :].to(state.dtype, copy=True)
    if reset is None or not past:
        return last
    time = reset.shape[1]
    document = documents(reset, past=past)
    return last.masked_fill((document[:, time:] != document[:, -1:])[..., None], 0)


def by_shifts(x: Tensor, inputs: Tensor, weight: Tensor, document: Tensor | None) -> Tensor:
    """Return y = sum_j w_j (x shifted by j); `inputs` are x with the width - 1 steps before it.

    An output only depends on inputs of its own `document`, (b, width - 1 + t).
    """
    time, past = x.shape[1], weight.shape[-1] - 1
    y = x * weight[..., 0]
    for j in range(1, past + 1):
        begin = past - j
        shifted = inputs[:, begin : begin + time]
        if document is not None:
            hidden = document[:, begin : begin + time] != document[:, past:]
            shifted = shifted.masked_fill(hidden[..., None], 0)
        y = torch.addcmul(y, shifted, weight[..., j])
    return y
