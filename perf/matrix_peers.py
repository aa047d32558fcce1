"""Other implementations of matrix states, imported only when asked for."""

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

from perf.matrix import operator
from perf.peers import Calls, Inputs, Peer, UnsuitedError, torch_calls


def fla(operation: str, inputs: Inputs, dy: Tensor) -> Calls:
    """flash-linear-attention's chunkwise kernel of the operation."""
    if not inputs[0].is_cuda:
        raise UnsuitedError("runs on CUDA alone")
    function: Callable[..., Tensor]
    if operation == "linear":
        from fla.ops.linear_attn import chunk_linear_attn

        def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return chunk_linear_attn(q, k, v, scale=1.0, normalize=False)[0]
    elif operation == "head":
        from fla.ops.simple_gla import chunk_simple_gla

        def function(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
            return chunk_simple_gla(q, k, v, g=g, scale=1.0)[0]
    elif operation == "channel":
        from fla.ops.gla import chunk_gla

        def function(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
            return chunk_gla(q, k, v, g, scale=1.0)[0]
    elif operation == "delta":
        from fla.ops.delta_rule import chunk_delta_rule

        def function(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
            return chunk_delta_rule(q, k, v, beta, scale=1.0)[0]
    else:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        def function(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor) -> Tensor:
            return chunk_gated_delta_rule(q, k, v, g=g, beta=beta, scale=1.0)[0]

    return torch_calls(function, inputs, dy)


def attention(operation: str, inputs: Inputs, dy: Tensor) -> Calls:
    """torch's causal softmax attention of q, k and v, which lie as it wants them."""
    turned = tuple(x.transpose(1, 2).contiguous() for x in inputs[:3])

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    return torch_calls(function, turned, dy.transpose(1, 2).contiguous(), lambda y: y.transpose(1, 2))


def torch_backend(operation: str, inputs: Inputs, dy: Tensor) -> Calls:
    """linrec itself, by torch operations."""
    return _linrec(operation, inputs, dy, "chunkwise", "torch")


def reference(operation: str, inputs: Inputs, dy: Tensor) -> Calls:
    """linrec's reference, a loop over time."""
    if inputs[0].is_cuda:
        raise UnsuitedError("is measured on the CPU alone")
    return _linrec(operation, inputs, dy, "recurrent", "reference")


def _linrec(operation: str, inputs: Inputs, dy: Tensor, mode: str, backend: str) -> Calls:
    run = operator(operation)
    return torch_calls(lambda *xs: run(*xs, mode=mode, backend=backend)[0], inputs, dy)


MATRIX_PEERS = (
    Peer("torch", "linrec's own torch backend, chunkwise", "torch", torch_backend),
    Peer("reference", "linrec's reference, a loop over time", "torch", reference),
    Peer("attention", "torch's scaled_dot_product_attention, causal", "torch", attention, same=False),
    Peer("fla", "flash-linear-attention's chunk_* of the same recurrence", "fla", fla),
)
