"""Bitmaps of 8 x 8 pixels: digits, letters and shapes."""

from functools import cache

import numpy as np

__all__ = ["glyphs"]

# five columns and seven rows of each character, a row as five bits
DIGITS = (
    "0e11131519110e", "040c040404040e", "0e11010204081f", "1f02040201110e", "02060a121f0202",
    "1f101e0101110e", "0608101e11110e", "1f010204080808", "0e11110e11110e", "0e11110f01020c",
)  # fmt: skip
LETTERS = (
    "0e11111f111111", "1e11111e11111e", "0e11101010110e", "1c12111111121c", "1f10101e10101f",
    "1f10101e101010", "0e11101713110f", "1111111f111111", "0e04040404040e", "0702020202120c",
)  # fmt: skip


@cache
def glyphs(kind: int) -> np.ndarray:
    """Return ten glyphs, (10, 8, 8) float32 of 0 and 1.

    Args:
        kind: 0 for digits, 1 for the letters A to J, 2 for shapes.
    """
    if kind == 2:
        return _shapes()
    found = np.zeros((10, 8, 8), np.float32)
    for glyph, rows in zip(found, (DIGITS, LETTERS)[kind], strict=True):
        for row, bits in enumerate(bytes.fromhex(rows), start=1):
            glyph[row, 1:6] = [bits >> place & 1 for place in range(4, -1, -1)]
    return found


def _shapes() -> np.ndarray:
    """Discs, frames, crosses and the like, from their equations."""
    y, x = np.mgrid[:8, :8] - 3.5
    r, square, diamond = np.hypot(x, y), np.maximum(abs(x), abs(y)), abs(x) + abs(y)
    shapes = (
        r < 3.6, (r < 3.8) & (r > 2.2), square < 3, (square < 3.6) & (square > 2), diamond < 4,
        (diamond < 4.1) & (diamond > 2), abs(x * y) < 2, abs(abs(x) - abs(y)) < 1, y > 2 * abs(x) - 3.5,
        (x % 2 < 1) & (square < 4),
    )  # fmt: skip
    return np.stack(shapes).astype(np.float32)
