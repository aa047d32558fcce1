"""Which (mode, backend) pairs `delta_rule` has, and which of them runs where the caller leaves it open."""

from linrec.ops.dispatch import Pair

PAIRS: tuple[Pair, ...] = (
    ("recurrent", "reference"),
    ("recurrent", "torch"),
    ("recurrent", "numba"),
    ("chunkwise", "torch"),
    ("chunkwise", "triton"),
    ("recurrent", "triton"),
)


def auto_delta_rule(
    time: int,
    device_type: str,
    *,
    numba: bool,
    triton: bool = False,
    exporting: bool = False,
    fits: bool = True,
) -> list[Pair]:
    """Return the pairs that `ops.delta_rule` may run on, best first.

    | call | first choice | why |
    |---|---|---|
    | CPU with Numba, not exported | (recurrent, numba) | one call, in which states stay in the cache |
    | one step, CUDA with Triton, not exported | (recurrent, triton) | one kernel |
    | more, likewise, where keys fit (`LARGEST`), not in float64 | (chunkwise, triton) | tensor cores |
    | being exported, from 2 steps on | (chunkwise, torch) | one program serves all lengths |
    | up to 4 steps | (recurrent, torch) | fewer operations than a triangular system |
    | else | (chunkwise, torch) | matrix products, and the state is kept once per chunk |

    Args:
        time: steps t.
        device_type: "cpu", "cuda", "mps", "meta", ...
        numba: Numba works on this machine.
        triton: Triton works on this device.
        exporting: torch.export is tracing the call: the program must run where linrec's kernels are not.
        fits: the kernels for tensor cores take this precision and this size of keys.

    Returns:
        Usable pairs, best first; never empty.

    Example:
        >>> auto_delta_rule(4096, "cpu", numba=True)[0]
        ('recurrent', 'numba')
    """
    if triton and device_type == "cuda" and not exporting:
        if time <= 1:
            return [("recurrent", "triton"), ("recurrent", "torch"), ("chunkwise", "torch")]
        if fits:
            return [("chunkwise", "triton"), ("chunkwise", "torch"), ("recurrent", "torch")]
    order: list[Pair] = [("recurrent", "torch"), ("chunkwise", "torch")]
    # one program serves all lengths from 2 on: a comparison with any other number would limit them
    if time > 1 and (exporting or time > SHORT):
        order.reverse()
    if numba and device_type == "cpu" and not exporting:
        return [("recurrent", "numba"), *order]
    return order


SHORT = 4
"""Up to this many steps, a loop over them is faster than one chunk."""


LARGEST = 512
"""Key channels of a head, at most, in (chunkwise, triton): a program holds all of them."""
