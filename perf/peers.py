"""Other implementations of the operations of `perf ops`, imported only when asked for.

Each function takes the operation's name, its inputs and dy, and returns the calls to time.
"""

import os
from functools import partial
from typing import Any

import torch
from torch import Tensor

from perf.engine import BOTH, FORWARD, Calls, Implementation, Tensors, calls_of
from perf.operations import OPERATIONS
from perf.timing import UnsuitedError


def real(a: Tensor) -> Tensor:
    """Return the transitions of a scan, or raise UnsuitedError if they are complex."""
    if a.is_complex():
        raise UnsuitedError("has no complex transitions")
    return a


def turned(x: Tensor) -> Tensor:
    """Return (b, t, c) as (b, c, t), contiguous in time, and the reverse."""
    return x.transpose(1, 2).contiguous()


def linrec_torch(operation: str, inputs: Tensors, dy: Tensor) -> Calls:
    return calls_of(partial(OPERATIONS[operation].run, backend="torch"), inputs, dy)


def loop(operation: str, inputs: Tensors, dy: Tensor) -> Calls:
    def scan(a: Tensor, x: Tensor) -> Tensor:
        y = torch.zeros_like(x[:, 0])
        outputs = []
        for a_t, x_t in zip(a.unbind(1), x.unbind(1), strict=True):
            y = torch.addcmul(x_t, a_t, y)
            outputs.append(y)
        return torch.stack(outputs, 1)

    def gate_loop(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, phase: Tensor) -> Tensor:
        return (q * scan(torch.polar(log_decay.exp(), phase), torch.complex(k * v, torch.zeros_like(v)))).real

    return calls_of(gate_loop if operation == "gate_loop" else scan, inputs, dy)


def fla(operation: str, inputs: Tensors, dy: Tensor) -> Calls:
    """The recurrence of HGRN, which takes the logarithm of a."""
    a, x = real(inputs[0]), inputs[1]
    from fla.ops.hgrn import chunk_hgrn

    log_a = a.float().log().to(a.dtype)
    return calls_of(lambda g, x: chunk_hgrn(x, g)[0], (log_a, x), dy)


def accelerated_scan(operation: str, inputs: Tensors, dy: Tensor) -> Calls:
    if real(inputs[0]).dtype != torch.float32:
        # version 0.3.1 on an H200: the device is unusable after it
        raise UnsuitedError("accesses illegal memory in bfloat16")
    from accelerated_scan.warp import scan

    return calls_of(scan, tuple(map(turned, inputs)), turned(dy), turned)


def torch_scan(operation: str, inputs: Tensors, dy: Tensor) -> Calls:
    if real(inputs[0]).shape[1] > 4096:
        raise UnsuitedError("is left out beyond 4,096 steps, for its time")
    from torch._higher_order_ops.associative_scan import associative_scan

    def combine(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return left[0] * right[0], right[0] * left[1] + right[1]

    # each size is compiled anew, and after a few of one function torch would give up
    torch.compiler.reset()
    compiled = torch.compile(lambda a, x: associative_scan(combine, (a, x), dim=1)[1], dynamic=False)
    return calls_of(compiled, inputs, dy)


def jax_scan(operation: str, inputs: Tensors, dy: Tensor) -> Calls:
    """The associative scan; for gate_loop as in the paper's listing, with d_h = 1."""
    # by default JAX takes three quarters of the device's memory when it starts
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax
    import jax.numpy as jnp

    device = jax.devices("gpu" if inputs[0].is_cuda else "cpu")[0]

    def array(tensor: Tensor) -> Any:
        # NumPy has no bfloat16
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

    def with_gradients(dy: Any, *xs: Any) -> Any:
        y, pull = jax.vjp(run, *xs)
        return y, pull(dy)

    forward, both = jax.jit(run), jax.jit(with_gradients)
    arrays, cotangent = [array(x) for x in inputs], array(dy)

    def outputs() -> Tensors:
        kind = "complex64" if inputs[0].is_complex() else "float32"
        y = jax.device_get(forward(*arrays).astype(kind))
        return (torch.from_numpy(y.copy()),)

    passes = {
        FORWARD: lambda: jax.block_until_ready(forward(*arrays)),
        BOTH: lambda: jax.block_until_ready(both(cotangent, *arrays)),
    }
    return Calls(passes, outputs, waits=True)


def mamba(operation: str, inputs: Tensors, dy: Tensor) -> Calls:
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    dt, A, B, C, D, x = inputs

    def function(dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, x: Tensor) -> Tensor:
        return selective_scan_fn(x, dt, A, B, C, D)

    return calls_of(function, (turned(dt), A, turned(B), turned(C), D, turned(x)), turned(dy), turned)


def fft(operation: str, inputs: Tensors, dy: Tensor) -> Calls:
    """torch's transforms of twice the length."""

    def function(kernel: Tensor, u: Tensor) -> Tensor:
        time = u.shape[-1]
        spectrum = torch.fft.rfft(u.float(), 2 * time) * torch.fft.rfft(kernel, 2 * time)
        return torch.fft.irfft(spectrum, 2 * time)[..., :time].to(u.dtype)

    return calls_of(function, (inputs[0], turned(inputs[1])), turned(dy), turned)


def flash_fft(operation: str, inputs: Tensors, dy: Tensor) -> Calls:
    kernel, u = inputs
    if u.dtype not in (torch.bfloat16, torch.float16):
        raise UnsuitedError("runs in half precision alone")
    from flashfftconv import FlashFFTConv

    run = FlashFFTConv(2 * u.shape[1], dtype=u.dtype).to(u.device)
    return calls_of(lambda kernel, u: run(u, kernel), (kernel, turned(u)), turned(dy), turned)


SCAN, SCANS, CONV = ("scan",), ("scan", "gate_loop"), ("conv",)
HGRN = "flash-linear-attention, fla.ops.hgrn.chunk_hgrn"
WARP = "accelerated_scan.warp, time contiguous (b, c, t)"
HOP = "torch._higher_order_ops.associative_scan, compiled"
MAMBA = "mamba_ssm's selective_scan_fn, time contiguous (b, c, t)"
FFT = "torch.fft.rfft and irfft, time contiguous (b, c, t)"
FLASH = "flashfftconv.FlashFFTConv, time contiguous (b, c, t)"
PEERS = (
    Implementation("torch", "linrec's own torch backend", "torch", linrec_torch),
    Implementation("loop", "a Python loop over torch.addcmul", "torch", loop, SCANS, "cpu"),
    Implementation("fla", HGRN, "fla", fla, SCAN, "cuda"),
    Implementation("warp", WARP, "accelerated_scan", accelerated_scan, SCAN, "cuda"),
    Implementation("hop", HOP, "torch", torch_scan, SCAN, "cuda"),
    Implementation("mamba", MAMBA, "mamba_ssm", mamba, ("selective",), "cuda"),
    Implementation("fft", FFT, "torch", fft, CONV),
    Implementation("flash", FLASH, "flashfftconv", flash_fft, CONV),
    Implementation("jax", "jax.lax.associative_scan, jit", "jax", jax_scan, SCANS),
)
