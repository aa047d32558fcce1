"""Which (mode, backend) pairs `delta_rule` has, and which of them runs where the caller leaves it open."""

from linrec.ops.dispatch import Pair

PAIRS: tuple[Pair, ...] = (
    ("recurrent", "reference"),
    ("recurrent", "torch"),
    ("recurrent", "numba"),
    ("chunkwise", "torch"),
    ("chunkwise", "triton"),
)


def auto_delta_rule(time: int, device_type: str, *, numba: bool, exporting: bool = False) -> list[Pair]:
    """Return the pairs that `ops.delta_rule` may run on, best first.

    | call | first choice | why |
    |---|---|---|
    | CPU with Numba, not exported | (recurrent, numba) | one call, in which states stay in the cache |
    | up to 4 steps | (recurrent, torch) | fewer operations than a triangular system |
    | else | (chunkwise, torch) | matrix products, and the state is kept once per chunk |

    Args:
        time: steps t.
        device_type: "cpu", "cuda", "mps", "meta", ...
        numba: Numba works on this machine.
        exporting: torch.export is tracing the call: the program must run where linrec's kernels are not.

    Returns:
        Usable pairs, best first; never empty.

    Example:
        >>> auto_delta_rule(4096, "cpu", numba=True)[0]
        ('recurrent', 'numba')
    """
    order: list[Pair] = [("recurrent", "torch"), ("chunkwise", "torch")]
    if time > SHORT:
        order.reverse()
    if numba and device_type == "cpu" and not exporting:
        return [("recurrent", "numba"), *order]
    return order


SHORT = 4
"""Up to this many steps, a loop over them is faster than one chunk."""
