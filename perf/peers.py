"""Other implementations of the same operations, imported only when asked for.

A function of this file takes the operation's name, its inputs and dy, and returns what is to be timed. What a
peer asks of its inputs (another layout, logarithms) is given before the clock starts.
"""

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from perf.operations import OPERATIONS

Inputs = tuple[Tensor, ...]


class UnsuitedError(Exception):
    """The peer has no such operation, or not for these inputs; the message says which."""


@dataclass(frozen=True)
class Calls:
    """What a peer is timed with.

    Args:
        forward: computes the outputs, called without gradients.
        both: computes the gradients of all inputs.
        output: gives y (b, t, ...) as torch has it, for comparison.
        waits: whether `forward` and `both` wait for their results, on no stream of torch's.
    """

    forward: Callable[[], Any]
    both: Callable[[], Any]
    output: Callable[[], Tensor]
    waits: bool = False


@dataclass(frozen=True)
class Implementation:
    """What `--peers` and `--without` name.

    Args:
        name: heads a column.
        about: what it is, in one line.
        module: without which it is not installed.
    """

    name: str
    about: str
    module: str

    @property
    def installed(self) -> bool:
        """Whether its package is there; it may still not work."""
        return importlib.util.find_spec(self.module) is not None


@dataclass(frozen=True)
class Peer(Implementation):
    """An implementation to compare with, forward and backward.

    Args:
        prepare: makes its calls from the operation's name, inputs and dy.
        same: whether it computes the same; softmax attention does not.
    """

    prepare: Callable[[str, Inputs, Tensor], Calls]
    same: bool = True


def reason(error: Exception) -> str:
    """Return an error as one short line."""
    if isinstance(error, UnsuitedError):
        return str(error)
    text = f"{type(error).__name__}: {error}".strip()
    line = " ".join(text.splitlines()[0].split())
    return line if len(line) <= 120 else line[:117] + "..."


def torch_calls(
    function: Callable[..., Tensor],
    inputs: Inputs,
    dy: Tensor,
    output: Callable[[Tensor], Tensor] | None = None,
) -> Calls:
    leaves = tuple(x.detach().requires_grad_() for x in inputs)
    plain = tuple(x.detach() for x in inputs)

    def forward() -> Tensor:
        with torch.no_grad():
            return function(*plain)

    return Calls(
        forward,
        lambda: torch.autograd.grad(function(*leaves), leaves, dy),
        lambda: forward() if output is None else output(forward()),
    )


def _recurrence(operation: str) -> None:
    if operation not in ("scan", "gate_loop"):
        raise UnsuitedError(f"has no {operation}")


def _real_scan_on_cuda(operation: str, inputs: Inputs) -> None:
    if operation != "scan":
        raise UnsuitedError(f"has no {operation}")
    if inputs[0].is_complex():
        raise UnsuitedError("has no complex transitions")
    if not inputs[0].is_cuda:
        raise UnsuitedError("runs on CUDA alone")


def linrec_torch(operation: str, inputs: Inputs, dy: Tensor) -> Calls:
    """linrec itself, by torch operations."""
    return torch_calls(partial(OPERATIONS[operation].run, backend="torch"), inputs, dy)


def loop(operation: str, inputs: Inputs, dy: Tensor) -> Calls:
    """One addcmul per time step."""
    _recurrence(operation)
    if inputs[0].is_cuda:
        raise UnsuitedError("is measured on the CPU alone")

    def scan(a: Tensor, x: Tensor) -> Tensor:
        y = torch.zeros_like(x[:, 0])
        outputs = []
        for a_t, x_t in zip(a.unbind(1), x.unbind(1), strict=True):
            y = torch.addcmul(x_t, a_t, y)
            outputs.append(y)
        return torch.stack(outputs, 1)

    def gate_loop(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, phase: Tensor) -> Tensor:
        return (q * scan(torch.polar(log_decay.exp(), phase), torch.complex(k * v, torch.zeros_like(v)))).real

    return torch_calls(gate_loop if operation == "gate_loop" else scan, inputs, dy)


def fla(operation: str, inputs: Inputs, dy: Tensor) -> Calls:
    """flash-linear-attention's recurrence of HGRN, which takes the logarithm of a."""
    _real_scan_on_cuda(operation, inputs)
    from fla.ops.hgrn import chunk_hgrn

    a, x = inputs
    log_a = a.float().log().to(a.dtype)
    return torch_calls(lambda g, x: chunk_hgrn(x, g)[0], (log_a, x), dy)


def accelerated_scan(operation: str, inputs: Inputs, dy: Tensor) -> Calls:
    """accelerated-scan's kernel of warps; its tensors are (b, c, t), contiguous in time."""
    _real_scan_on_cuda(operation, inputs)
    if inputs[0].dtype != torch.float32:
        # after it, nothing runs on the device any more: version 0.3.1 on an H200
        raise UnsuitedError("accesses illegal memory in bfloat16")
    from accelerated_scan.warp import scan

    turned = tuple(x.transpose(1, 2).contiguous() for x in inputs)
    return torch_calls(scan, turned, dy.transpose(1, 2).contiguous(), lambda y: y.transpose(1, 2))


def torch_scan(operation: str, inputs: Inputs, dy: Tensor) -> Calls:
    """torch's own prototype of an associative scan, compiled."""
    _real_scan_on_cuda(operation, inputs)
    if inputs[1].shape[1] > 4096:
        raise UnsuitedError("is left out beyond 4,096 steps, for its time")
    from torch._higher_order_ops.associative_scan import associative_scan

    def combine(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return left[0] * right[0], right[0] * left[1] + right[1]

    # each size is compiled anew, and after a few of one function torch would give up
    torch.compiler.reset()
    compiled = torch.compile(lambda a, x: associative_scan(combine, (a, x), dim=1)[1], dynamic=False)
    return torch_calls(compiled, inputs, dy)


def jax_scan(operation: str, inputs: Inputs, dy: Tensor) -> Calls:
    """jax.lax.associative_scan; for gate_loop as in the paper's listing, with d_h = 1."""
    _recurrence(operation)
    # JAX would take three quarters of the device's memory when it starts
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax
    import jax.numpy as jnp

    device = jax.devices("gpu" if inputs[0].is_cuda else "cpu")[0]

    def array(tensor: Tensor) -> Any:
        # NumPy knows no bfloat16
        wide = tensor if tensor.is_complex() else tensor.float()
        kind = str(tensor.dtype).removeprefix("torch.")
        return jax.device_put(wide.cpu().numpy(), device).astype(kind)

    def combine(left: Any, right: Any) -> Any:
        return left[0] * right[0], right[0] * left[1] + right[1]

    def scan(a: Any, x: Any) -> Any:
        return jax.lax.associative_scan(combine, (a, x), axis=1)[1]

    def gate_loop(q: Any, k: Any, v: Any, log_decay: Any, phase: Any) -> Any:
        a = jnp.exp(jax.lax.complex(log_decay.astype("float32"), phase.astype("float32")))
        return (q * scan(a, (k * v).astype(a.dtype))).real.astype(v.dtype)

    run = gate_loop if operation == "gate_loop" else scan

    def outputs_and_gradients(dy: Any, *xs: Any) -> Any:
        y, pull = jax.vjp(run, *xs)
        return y, pull(dy)

    forward, both = jax.jit(run), jax.jit(outputs_and_gradients)
    arrays, cotangent = [array(x) for x in inputs], array(dy)

    def output() -> Tensor:
        y = jax.device_get(forward(*arrays).astype("float32" if not inputs[0].is_complex() else "complex64"))
        return torch.from_numpy(y.copy())

    return Calls(
        lambda: jax.block_until_ready(forward(*arrays)),
        lambda: jax.block_until_ready(both(cotangent, *arrays)),
        output,
        waits=True,
    )


def mamba(operation: str, inputs: Inputs, dy: Tensor) -> Calls:
    """mamba-ssm's CUDA kernel; its tensors are (b, c, t), contiguous in time."""
    if operation != "selective":
        raise UnsuitedError(f"has no {operation}")
    if not inputs[0].is_cuda:
        raise UnsuitedError("runs on CUDA alone")
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    dt, A, B, C, D, x = inputs
    turned_dt, turned_B, turned_C, turned_x = (z.transpose(1, 2).contiguous() for z in (dt, B, C, x))

    def function(dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, x: Tensor) -> Tensor:
        return selective_scan_fn(x, dt, A, B, C, D)

    turned = turned_dt, A, turned_B, turned_C, D, turned_x
    return torch_calls(function, turned, dy.transpose(1, 2).contiguous(), lambda y: y.transpose(1, 2))


def fft(operation: str, inputs: Inputs, dy: Tensor) -> Calls:
    """torch's transforms of twice the length, of tensors (b, c, t), contiguous in time."""
    _convolution(operation)

    def function(kernel: Tensor, u: Tensor) -> Tensor:
        time = u.shape[-1]
        spectrum = torch.fft.rfft(u.float(), 2 * time) * torch.fft.rfft(kernel, 2 * time)
        return torch.fft.irfft(spectrum, 2 * time)[..., :time].to(u.dtype)

    kernel, u, dy = inputs[0], *(x.transpose(1, 2).contiguous() for x in (inputs[1], dy))
    return torch_calls(function, (kernel, u), dy, lambda y: y.transpose(1, 2))


def flash_fft(operation: str, inputs: Inputs, dy: Tensor) -> Calls:
    """flash-fft-conv's fused convolution of tensors (b, c, t), contiguous in time."""
    _convolution(operation)
    kernel, u = inputs
    if u.dtype not in (torch.bfloat16, torch.float16):
        raise UnsuitedError("runs in half precision alone")
    from flashfftconv import FlashFFTConv

    run = FlashFFTConv(2 * u.shape[1], dtype=u.dtype).to(u.device)
    turned = kernel, u.transpose(1, 2).contiguous()
    return torch_calls(
        lambda kernel, u: run(u, kernel), turned, dy.transpose(1, 2).contiguous(), lambda y: y.transpose(1, 2)
    )


def _convolution(operation: str) -> None:
    if operation != "conv":
        raise UnsuitedError(f"has no {operation}")


PEERS = (
    Peer("torch", "linrec's own torch backend", "torch", linrec_torch),
    Peer("loop", "a Python loop over torch.addcmul", "torch", loop),
    Peer("fla", "flash-linear-attention, fla.ops.hgrn.chunk_hgrn", "fla", fla),
    Peer("warp", "accelerated_scan.warp, time contiguous (b, c, t)", "accelerated_scan", accelerated_scan),
    Peer("hop", "torch._higher_order_ops.associative_scan, compiled", "torch", torch_scan),
    Peer("mamba", "mamba_ssm's selective_scan_fn, time contiguous (b, c, t)", "mamba_ssm", mamba),
    Peer("fft", "torch.fft.rfft and irfft, time contiguous (b, c, t)", "torch", fft),
    Peer("flash", "flashfftconv.FlashFFTConv, time contiguous (b, c, t)", "flashfftconv", flash_fft),
    Peer("jax", "jax.lax.associative_scan, jit", "jax", jax_scan),
)
