"""Any mixer over the rows and columns of an image."""

from collections.abc import Sequence
from typing import Literal, TypeAlias

from jaxtyping import Bool, Float
from torch import Tensor

from linrec.errors import unknown
from linrec.mixers import Mixer, State
from linrec.models.bidirectional import Combine, Directions

__all__ = ["IMAGE_DIRECTIONS", "ImageDirection", "ImageScan"]

ImageDirection: TypeAlias = Literal["right", "left", "down", "up", "forward", "backward"]
IMAGE_DIRECTIONS: tuple[ImageDirection, ...] = ("right", "left", "down", "up", "forward", "backward")
_AGAINST = ("left", "up", "backward")


class ImageScan(Directions):
    """y = sum_i f_i(x), where each f_i is a mixer that scans the image in one direction.

    | direction           | sequences                                        |
    |---------------------|--------------------------------------------------|
    | "right", "left"     | each row separately                              |
    | "down", "up"        | each column separately                           |
    | "forward", "backward" | the whole image, row after row (raster order)  |

    The default, the sum of both directions over rows and over columns, is HGRN's released two-dimensional
    layer for images of the Long Range Arena. HGRN's ImageNet classifier scans the whole image instead:
    `directions=("forward", "backward")`. In both, the directions share parameters, `unshared=("theta",)`; in
    the former, rows and columns share phases too. `Bidirectional` lists the other differences from the
    released layers, and the limits of a single mixer for all directions.

    In one scan of rows and columns a pixel receives information from its own row and column only. After a
    second layer it receives information from all pixels.

    Args:
        mixers: one mixer per direction, all of one class and width; or a single mixer for all directions.
        directions: names of the directions, in the order of `mixers`.
        grid: (rows h, columns w) if inputs are tokens (b, h w, d_model); None if inputs are
            (b, h, w, d_model).
        combine: "sum", "mean" or "concatenate"; see `Directions`.
        unshared: None, or names of the parameters that each mixer keeps as its own; all others are shared
            with the first mixer.

    Raises:
        ValueError: `directions` is empty, or has an unknown or repeated name; or an error of `Directions`.

    Source:
        HGRN (Qin, Yang and Zhong, 2023), section 4.1, and the authors' code.

    Example:
        >>> import torch
        >>> from linrec.mixers import build
        >>> scan = ImageScan(build("hgru", 8))
        >>> y, _ = scan(torch.zeros(2, 3, 4, 8))
        >>> y.shape
        torch.Size([2, 3, 4, 8])
        >>> four = ImageScan([build("hgru", 8) for _ in range(4)], grid=(3, 4))
        >>> y, _ = four(torch.zeros(2, 12, 8))
        >>> y.shape
        torch.Size([2, 12, 8])
    """

    def __init__(
        self,
        mixers: Mixer | Sequence[Mixer],
        *,
        directions: Sequence[ImageDirection] = ("right", "left", "down", "up"),
        grid: tuple[int, int] | None = None,
        combine: Combine = "sum",
        unshared: Sequence[str] | None = None,
    ) -> None:
        check_directions(directions)
        super().__init__([mixers] if isinstance(mixers, Mixer) else mixers, directions, combine, unshared)
        self.grid = grid

    def forward(
        self,
        x: Float[Tensor, "b *grid d_model"],
        state: State = None,
        *,
        reset: Bool[Tensor, "b t"] | None = None,
        dt: Float[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b *grid d_model"], None]:
        """Mix `x` over the image.

        Args:
            x: (b, h, w, d_model) of any size, or tokens (b, h w, d_model) of the `grid`.
            state: None.
            reset: None: an image is a single sequence.
            dt: None: pixels have equal distances.

        Returns:
            y in the shape of `x`, and None.

        Raises:
            ValueError: `x` has neither shape, or `state`, `reset` or `dt` is not None.
        """
        image = self._image(x)
        if reset is not None or dt is not None:
            raise ValueError(
                "`reset` and `dt` must be None for an image, a single sequence of equal steps; got a tensor."
            )
        runs = zip(self.directions, self._runs(state), strict=True)
        y = self._combined([_scan(image, direction, mixer) for direction, mixer in runs])
        return y.reshape(x.shape), None

    def _image(self, x: Tensor) -> Tensor:
        if x.ndim == 4 and x.shape[-1] == self.d_model:
            return x
        if self.grid is None:
            raise ValueError(
                f"`x` must have shape (batch, rows, columns, d_model) = (batch, rows, columns, "
                f"{self.d_model}); got {tuple(x.shape)}. For tokens give `grid` = (rows, columns)."
            )
        h, w = self.grid
        if x.ndim != 3 or x.shape[1:] != (h * w, self.d_model):
            raise ValueError(
                f"`x` must have shape (batch, rows, columns, {self.d_model}), or (batch, {h * w}, "
                f"{self.d_model}) for the grid {h} x {w}; got {tuple(x.shape)}."
            )
        return x.unflatten(1, (h, w))


def check_directions(directions: Sequence[str]) -> None:
    """Raise if a direction of an image is unknown or repeated."""
    for direction in directions:
        if direction not in IMAGE_DIRECTIONS:
            raise unknown("direction of an image", direction, IMAGE_DIRECTIONS)
    if not directions or len(set(directions)) != len(directions):
        raise ValueError(
            f"`directions` must name at least one direction, and each once; got {tuple(directions)}."
        )


def _scan(image: Tensor, direction: str, mixer: Mixer) -> Tensor:
    columns = direction in ("down", "up")
    if columns:
        image = image.transpose(1, 2)
    # one sequence per row or column, or one per image
    lines = image.flatten(1, 2) if direction in ("forward", "backward") else image.flatten(0, 1)
    y, _ = mixer(lines.flip(1) if direction in _AGAINST else lines)
    y = (y.flip(1) if direction in _AGAINST else y).reshape(image.shape)
    return y.transpose(1, 2) if columns else y
