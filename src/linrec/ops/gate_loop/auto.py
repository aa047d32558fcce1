"""Which (mode, backend) pairs `gate_loop` has, and which of them runs where the caller leaves it open."""

from linrec.ops.dispatch import Pair, auto_scan
from linrec.ops.scan import PAIRS as SCAN_PAIRS

OWN: tuple[Pair, ...] = (
    ("recurrent", "reference"),
    ("recurrent", "torch"),
    ("attention", "torch"),
    ("chunkwise", "torch"),
)

# every entry of the state can be a channel of `ops.scan`, whatever runs it; with Numba, heads of one channel
PAIRS: tuple[Pair, ...] = (
    *OWN,
    *(pair for pair in SCAN_PAIRS if pair not in OWN),
    ("chunkwise", "triton"),
    ("recurrent", "triton"),
)


def auto_gate_loop(
    shape: tuple[int, int, int, int, int],
    device_type: str,
    *,
    numba: bool,
    triton: bool,
    exporting: bool = False,
    plain: bool = True,
    double: bool = False,
) -> list[Pair]:
    """Return the pairs that `ops.gate_loop` may run on, best first.

    | call | first choice | why |
    |---|---|---|
    | one step, plain, dk dv > 1, CPU with Numba, not exported | (recurrent, numba) | one call |
    | one step, likewise, CUDA with Triton, single or half precision | (recurrent, triton) | one kernel |
    | one step | (recurrent, torch) | there is nothing to share between steps |
    | dk = dv = 1 | as `ops.scan` on h channels | the state is no larger than k and v |
    | CPU with Numba, not exported | (recurrent, numba) | states stay in the cache |
    | CUDA with Triton, not exported, single or half precision | (chunkwise, triton) | tensor cores |
    | else | (chunkwise, torch) | the state is kept once per chunk, not once per step |

    Args:
        shape: (batch, time, heads, dk, dv).
        device_type: "cpu", "cuda", "mps", "meta", ...
        numba: Numba works on this machine.
        triton: Triton works on this device.
        exporting: torch.export is tracing the call.
        plain: neither phases, nor complex keys, nor a bonus.
        double: double precision, which Triton's kernels compute without tensor cores.

    Returns:
        Usable pairs, best first; never empty.

    Example:
        >>> auto_gate_loop((8, 4096, 16, 64, 64), "cuda", numba=False, triton=True)[0]
        ('chunkwise', 'triton')
    """
    batch, time, heads, dk, dv = shape
    in_cache = numba and device_type == "cpu" and not exporting
    on_tensor_cores = triton and device_type == "cuda" and not exporting and not double
    if time <= 1 and plain and dk * dv > 1 and on_tensor_cores:
        return [("recurrent", "triton"), ("recurrent", "torch")]
    if time <= 1 and not (in_cache and plain and dk * dv > 1):
        return [("recurrent", "torch")]
    if dk == dv == 1:
        return auto_scan((batch, time, heads), device_type, numba=numba, triton=triton, exporting=exporting)
    # an explicit "recurrent" or "scan" finds the pair that needs least besides torch
    order: list[Pair] = [("chunkwise", "torch"), ("recurrent", "torch"), ("scan", "torch")]
    if on_tensor_cores:
        return [("chunkwise", "triton"), *order]
    return [("recurrent", "numba"), *order] if in_cache else order
