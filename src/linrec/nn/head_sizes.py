"""Numbers of heads, and the channels of each head."""

import math
from typing import NamedTuple

from jaxtyping import Shaped
from torch import Tensor

from linrec.rules import at_least, divisor

__all__ = [
    "KeyValueHeads",
    "few_heads",
    "heads_of",
    "key_value_heads",
    "kv_groups",
    "most_heads",
    "repeat_heads",
    "split_width",
]


def heads_of(name: str, width: int, n_heads: int) -> int:
    """Return the channels per head of a width split over heads.

    Args:
        name: the argument that is the width, for the error.
        width: channels of all heads.
        n_heads: heads.
    """
    if n_heads < 1 or width < 1 or width % n_heads:
        raise ValueError(
            f"`{name}` must be a positive multiple of `n_heads` = {n_heads}; got {width}. "
            "Pass an `n_heads` that divides it."
        )
    return width // n_heads


def most_heads(width: int, channels: int) -> int:
    """Return the largest number of heads that divides `width` and leaves each at least `channels`, or 1."""
    most = max(1, width // channels)
    return next(heads for heads in range(most, 0, -1) if width % heads == 0)


def few_heads(width: int, most: int) -> int:
    """Return the largest divisor of `most` that divides `width`, or 1 where heads would have one channel.

    Heads of one channel cannot have a norm: a single number less its mean is zero.
    """
    return math.gcd(most, width) if width > most else 1


def split_width(
    name: str, width: int, n_heads: int | None, d_head: int | None = None, *, least: int
) -> tuple[int, int]:
    """Return the number of heads of a width, and the channels per head.

    Args:
        name: the argument that is the width, for the error.
        width: channels of all heads.
        n_heads: heads; None is the largest number that divides the width and leaves each head `least`
            channels, or 1.
        d_head: channels of a head; None is the width over the number of heads.
        least: channels of a head, where `n_heads` is None.
    """
    n_heads = most_heads(max(width, 1), least) if n_heads is None else n_heads
    d_head = heads_of(name, width, n_heads) if d_head is None else d_head
    at_least(1, n_heads=n_heads, d_head=d_head)
    return n_heads, d_head


class KeyValueHeads(NamedTuple):
    """Heads whose keys and values have different numbers of channels.

    Attributes:
        n: heads.
        d_key: channels of a key.
        d_value: channels of a value.
    """

    n: int
    d_key: int
    d_value: int

    @property
    def d_qk(self) -> int:
        """Return the width of the keys of all heads."""
        return self.n * self.d_key

    @property
    def d_v(self) -> int:
        """Return the width of the values of all heads."""
        return self.n * self.d_value


def key_value_heads(
    n_heads: int | None, d_qk: int | None, d_v: int | None, *, width: int, least: int = 1
) -> KeyValueHeads:
    """Return the sizes of heads from the widths of keys and values over all heads.

    Args:
        n_heads: heads; None is the largest number that divides the greatest common divisor of the two widths,
            and leaves `least` channels of the divisor to each head, or 1.
        d_qk: width of keys; None is `width`.
        d_v: width of values; None is `width`.
        width: of keys and values by default.
        least: channels of a head, where `n_heads` is None.
    """
    d_qk, d_v = width if d_qk is None else d_qk, width if d_v is None else d_v
    n_heads = most_heads(math.gcd(d_qk, d_v), least) if n_heads is None else n_heads
    return KeyValueHeads(n_heads, heads_of("d_qk", d_qk, n_heads), heads_of("d_v", d_v, n_heads))


def kv_groups(n_heads: int, kv_heads: int | None) -> int:
    """Return the number of heads of keys and values, which is `n_heads` where `kv_heads` is None."""
    kv_heads = n_heads if kv_heads is None else kv_heads
    divisor("n_heads", n_heads, kv_heads=kv_heads, cure="1 is multi-query attention.")
    return kv_heads


def repeat_heads(x: Shaped[Tensor, "b t groups *d"], n_heads: int) -> Shaped[Tensor, "b t h *d"]:
    """Return every head as often as `n_heads` neighbouring heads share it."""
    groups = x.shape[2]
    return x if groups == n_heads else x.repeat_interleave(n_heads // groups, 2)
