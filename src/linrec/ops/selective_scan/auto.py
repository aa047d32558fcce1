"""Which (mode, backend) pairs `selective_scan` has, and which one runs where the caller leaves it open."""

from linrec.ops.dispatch import Pair

PAIRS: tuple[Pair, ...] = (
    ("recurrent", "reference"),
    ("chunkwise", "torch"),
    ("recurrent", "numba"),
    ("recurrent", "triton"),
)


def auto_selective_scan(
    time: int, device_type: str, *, numba: bool, triton: bool, exporting: bool = False
) -> list[Pair]:
    """Return the pairs that `ops.selective_scan` may run on, best first.

    | call | first choice | why |
    |---|---|---|
    | one step, or being exported | (chunkwise, torch) | nothing to recompute; runs anywhere |
    | CUDA with Triton | (recurrent, triton) | states stay in registers |
    | CPU with Numba | (recurrent, numba) | states stay in the cache |
    | else | (chunkwise, torch) | the state is kept once per chunk, not once per step |

    Args:
        time: steps t.
        device_type: "cpu", "cuda", "mps", "meta", ...
        numba: Numba works on this machine.
        triton: Triton works on this device.
        exporting: torch.export is tracing the call: the program must run where linrec's kernels are not.

    Returns:
        Usable pairs, best first; never empty.

    Example:
        >>> auto_selective_scan(4096, "cpu", numba=True, triton=False)[0]
        ('recurrent', 'numba')
    """
    order: list[Pair] = [("chunkwise", "torch")]
    if exporting or time <= 1:
        return order
    if triton and device_type == "cuda":
        return [("recurrent", "triton"), *order]
    if numba and device_type == "cpu":
        return [("recurrent", "numba"), *order]
    return order
