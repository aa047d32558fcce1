"""Sizes of heads."""

__all__ = ["heads_of", "most_heads"]


def heads_of(name: str, width: int, n_heads: int) -> int:
    """Return the channels per head of a width split over heads.

    Args:
        name: the argument that is the width, for the error.
        width: channels of all heads.
        n_heads: heads.

    Raises:
        ValueError: the heads do not divide the width.

    Example:
        >>> heads_of("d_model", 12, 3)
        4
    """
    if n_heads < 1 or width < 1 or width % n_heads:
        raise ValueError(
            f"`{name}` must be a positive multiple of `n_heads` = {n_heads}; got {width}. "
            "Pass an `n_heads` that divides it."
        )
    return width // n_heads


def most_heads(width: int, channels: int) -> int:
    """Return the largest number of heads that divides `width` and leaves each at least `channels`, or 1.

    Example:
        >>> most_heads(384, 64)
        6
    """
    most = max(1, width // channels)
    return next(heads for heads in range(most, 0, -1) if width % heads == 0)
