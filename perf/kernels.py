"""The time of a device by kind of kernel, from a profile."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from linrec.ops import kernels
from perf.timing import why

KINDS = (
    "recurrence",
    "attention",
    "matrix products",
    "loss",
    "elementwise and norms",
    "optimiser",
    "copies",
    "rest",
)
"""The kinds that `kind_of` tells apart."""

LONGEST_NAME = 160
SHOWN = 25
PROFILED_STEPS = 5

# linrec's own kernels, by the names of its Triton functions
_FILES = Path(kernels.__path__[0]).glob("*/*triton.py")
_SOURCES = (file for file in _FILES if file.parent.name != "products")
_OWN = {name for file in _SOURCES for name in re.findall(r"@triton\.jit.*\ndef (\w+)", file.read_text())}
_RECURRENCE = re.compile(rf"({'|'.join(sorted(_OWN))})(_\d\w*)?$")
_COPIES = re.compile(r"Memcpy|Memset")
_ATTENTION = re.compile(r"flash|fmha|sdpa|attention", re.IGNORECASE)
# the last name is linrec's own kernel
_PRODUCTS = re.compile(
    r"gemm|gemv|cutlass|nvjet|cublas|xmma|splitK|dot_kernel|wgrad|dgrad|^row_products", re.IGNORECASE
)
_LOSS = re.compile(r"softmax|nll_loss|cross_entropy|ArgMax", re.IGNORECASE)
# multi-tensor kernels: the step itself, and the norm of the gradient
_OPTIMISER = re.compile(r"multi_tensor|adam|foreach", re.IGNORECASE)
_ELEMENTWISE = re.compile(
    r"elementwise|reduce_kernel|layer_norm|LayerNorm|CatArray|dropout|copy_kernel|index"
)

# kernels of torch.compile, "triton_<kind>_fused_<operations>_<number>", operations in alphabetical order
_FUSED = re.compile(r"triton_(?P<kind>[a-z]+)_fused_(?P<operations>\w*)")
# operations on the vocabulary's logits: the mixers' exponentials have no maxima and compare no indices
_FUSED_LOSS = re.compile(
    r"(?<![a-z])(arange\w*_exp|max|amax|argmax|gather|logsumexp|nll_loss|log_softmax)(?![a-z0-9])"
)


class Kernel(NamedTuple):
    """One run of a kernel, from `start` to `end` in microseconds."""

    name: str
    start: float
    end: float


def kind_of(name: str) -> str:
    """Return the kind of a kernel, one of `KINDS`, by its name.

    A name tells the computation, not its purpose. A fused kernel with the operations of a cross-entropy is
    the loss. Products with the head's matrix are matrix products, as all products are.

    Example:
        >>> kind_of("backward"), kind_of("row_products"), kind_of("nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_NTN")
        ('recurrence', 'matrix products', 'matrix products')
    """
    if _RECURRENCE.match(name):
        return "recurrence"
    if _COPIES.match(name):
        return "copies"
    if fused := _FUSED.match(name):
        if fused["kind"] == "tem":
            return "attention" if _ATTENTION.search(name) else "matrix products"
        if fused["kind"] == "for":
            return "optimiser"
        return "loss" if _FUSED_LOSS.search(fused["operations"]) else "elementwise and norms"
    kinds = (
        ("attention", _ATTENTION),
        ("matrix products", _PRODUCTS),
        ("loss", _LOSS),
        ("optimiser", _OPTIMISER),
        ("elementwise and norms", _ELEMENTWISE),
    )
    return next((kind for kind, pattern in kinds if pattern.search(name)), "rest")


def profile_of(step: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    """Return the `summary` of a few steps on a CUDA device; or "missing", the reason."""
    try:
        return summary(profiled(step, device, PROFILED_STEPS), PROFILED_STEPS)
    except Exception as error:
        return {"missing": why(error)}


def profiled(step: Callable[[], Any], device: torch.device, steps: int) -> list[Kernel]:
    """Return the kernels of `steps` calls of a compiled step on a CUDA device."""
    for calls in (1, steps):
        torch.cuda.synchronize(device)
        # without `acc_events`, torch 2.11 warns of events that a further cycle would drop
        with torch.profiler.profile(activities=[ProfilerActivity.CUDA], acc_events=True) as found:
            for _ in range(calls):
                step()
            torch.cuda.synchronize(device)
    return [
        Kernel(event.name, event.time_range.start, event.time_range.end)
        for event in found.events()
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]


def summary(runs: Sequence[Kernel], steps: int) -> dict[str, Any]:
    """Return the time of steps by kind and name of kernel, from the kernels of the steps.

    Returns:
        "step_ms", from the first kernel's start to the last kernel's end; "idle", the share of it in which no
        kernel runs; "kinds", for each of `KINDS` its "ms" per step and its "share"; "kernels", the names with
        the most time, each with "kind", "ms" and "calls" per step and "share". Shares may add up to more than
        the rest of "idle", as kernels may run side by side.

    Example:
        >>> found = summary([Kernel("forward", 0, 3000), Kernel("backward", 4000, 8000)], steps=1)
        >>> found["idle"], found["kinds"]["recurrence"]
        (0.125, {'ms': 7.0, 'share': 0.875})
    """
    if not runs:
        raise ValueError("`runs` must hold one at least; got none. Profile on the device that computes.")
    ordered = sorted(runs, key=lambda kernel: kernel.start)
    busy, until = 0.0, ordered[0].start
    for kernel in ordered:
        busy += max(0.0, kernel.end - max(kernel.start, until))
        until = max(until, kernel.end)
    whole = until - ordered[0].start

    times: dict[str, list[float]] = {}
    for kernel in ordered:
        times.setdefault(kernel.name, []).append(kernel.end - kernel.start)
    names = []
    for name, found in sorted(times.items(), key=lambda item: -sum(item[1])):
        about = {"name": name[:LONGEST_NAME], "kind": kind_of(name), "calls": len(found) / steps}
        names.append({**about, **_part(found, whole, steps)})
    of_kind = {kind: [t for name in times if kind_of(name) == kind for t in times[name]] for kind in KINDS}
    return {
        "step_ms": whole * 1e-3 / steps,
        "idle": 1 - busy / whole,
        "kinds": {kind: _part(found, whole, steps) for kind, found in of_kind.items()},
        "kernels": names[:SHOWN],
    }


def _part(microseconds: Sequence[float], whole: float, steps: int) -> dict[str, float]:
    return {"ms": sum(microseconds) * 1e-3 / steps, "share": sum(microseconds) / whole}
