"""Other implementations of one step of a matrix state, imported only when asked for."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from torch import Tensor

from perf.matrix import operator
from perf.peers import Implementation, Inputs, UnsuitedError

Step: TypeAlias = Callable[[], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class StepPeer(Implementation):
    """An implementation to compare with, forward alone.

    Args:
        prepare: makes the call that gives y and the new state, from the operation's name, its inputs and the
            state.
    """

    prepare: Callable[[str, Inputs, Tensor], Step]


def fla(operation: str, inputs: Inputs, state: Tensor) -> Step:
    """flash-linear-attention's kernel that goes through the steps one by one."""
    if not state.is_cuda:
        raise UnsuitedError("runs on CUDA alone")
    q, k, v, *more = inputs
    function: Callable[..., tuple[Tensor, Tensor]]
    if operation == "linear":
        from fla.ops.linear_attn import fused_recurrent_linear_attn

        function = partial(fused_recurrent_linear_attn, q, k, v, normalize=False)
    elif operation == "head":
        from fla.ops.simple_gla import fused_recurrent_simple_gla

        function = partial(fused_recurrent_simple_gla, q, k, v, g=more[0])
    elif operation == "channel":
        from fla.ops.gla import fused_recurrent_gla

        function = partial(fused_recurrent_gla, q, k, v, gk=more[0])
    elif operation == "delta":
        from fla.ops.delta_rule import fused_recurrent_delta_rule

        function = partial(fused_recurrent_delta_rule, q, k, v, beta=more[0])
    else:
        from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

        function = partial(fused_recurrent_gated_delta_rule, q, k, v, g=more[1], beta=more[0])
    return partial(function, scale=1.0, initial_state=state, output_final_state=True)


def torch_backend(operation: str, inputs: Inputs, state: Tensor) -> Step:
    """linrec itself, by torch operations."""
    return partial(operator(operation), *inputs, state=state, mode="recurrent", backend="torch")


STEP_PEERS = (
    StepPeer("torch", "linrec's own torch backend, recurrent", "torch", torch_backend),
    StepPeer("fla", "flash-linear-attention's fused_recurrent_* of the same recurrence", "fla", fla),
)
