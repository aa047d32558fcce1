"""Which (mode, backend) pairs `delta_rule` has, and which of them runs where the caller leaves it open."""

from linrec.ops.dispatch import Pair

PAIRS: tuple[Pair, ...] = (
    ("recurrent", "reference"),
    ("recurrent", "torch"),
    ("chunkwise", "torch"),
)


def auto_delta_rule(time: int) -> list[Pair]:
    """Return the pairs that `ops.delta_rule` may run on, best first.

    | call | first choice | why |
    |---|---|---|
    | up to 4 steps | (recurrent, torch) | fewer operations than a triangular system |
    | else | (chunkwise, torch) | matrix products, and the state is kept once per chunk |

    Args:
        time: steps t.

    Returns:
        Usable pairs, best first; never empty.

    Example:
        >>> auto_delta_rule(4096)[0]
        ('chunkwise', 'torch')
    """
    order: list[Pair] = [("recurrent", "torch"), ("chunkwise", "torch")]
    return order if time <= SHORT else order[::-1]


SHORT = 4
"""Up to this many steps, a loop over them is faster than one chunk."""
