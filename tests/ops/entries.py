"""The tables of the operators, as tests go through them."""

from collections.abc import Callable
from typing import Any

import torch

from linrec.ops.core.backends import Backend
from linrec.ops.core.call import Operator, handling
from linrec.testing import check_operator, reset_mask


def canonical(function: Callable[..., Any], /, **arguments: Any) -> Any:
    """Return the canonical inputs of a call of an operator; no backend runs."""
    found = []

    def stop(call: Any, proceed: Callable[[], Any]) -> tuple[None, None]:
        found.append(call.inputs)
        return None, None

    with handling(stop):
        function(**arguments)
    return found[0]


def runs(operator: Operator, entry: Backend, given: Any) -> bool:
    """Return whether a call with the mode and the name of an entry runs it, and no other one of the pair."""
    pair = entry.mode, entry.name
    taking = [
        other for other in operator.backends if pair == (other.mode, other.name) and other.accepts(given)
    ]
    # those that "auto" does not choose come last
    return bool(taking) and min(taking, key=lambda other: not other.auto(given)) is entry


def check_forgetting(
    function: Callable[..., Any], make: Callable[..., Any], pair: Any, strong: float
) -> None:
    """Check that steps whose decay is `strong`, near zero, cost later steps no digits."""
    for axes in ("bthk", "bth"):
        inputs = make(2, 70, 2, 3, 2, log_decay=axes)
        forget = reset_mask(2, 70).reshape(2, 70, *[1] * (len(axes) - 2)).expand_as(inputs["log_decay"])
        inputs["log_decay"] = torch.where(forget, strong, inputs["log_decay"])
        check_operator(function, inputs, mode=pair[0], backend=pair[1], dtype=torch.float32)
