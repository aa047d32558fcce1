"""A classifier of images after DeiT, with any mixer in place of attention."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn

from linrec.mixers import Mixer
from linrec.models.bidirectional import Combine
from linrec.models.block import run_blocks
from linrec.models.config import StackConfig, check_sizes
from linrec.models.image_scan import ImageDirection, ImageScan, check_directions
from linrec.models.s4nd import S4ND
from linrec.models.stack import build_mixer, make_blocks
from linrec.nn.norms import make_norm
from linrec.nn.parameters import mark
from linrec.rules import require

__all__ = ["ImageClassifier", "ImageClassifierConfig"]


@dataclass(frozen=True)
class ImageClassifierConfig(StackConfig):
    """Configuration of an `ImageClassifier`; all values are plain, so that it can be written to a file.

    Args:
        n_outputs: number of classes.
        patch_size: height and width of a patch, in pixels.
        n_channels: numbers per pixel; 3 for colours.
        directions: directions of the scans over the patches in each block; see `ImageScan`. A mixer that is
            bidirectional itself, such as softmax attention with `mixer_args={"causal": False}`, takes
            ("forward",).
        unshared: parameters that the directions do not share. None gives each direction a mixer of its own.
            Names of parameters, such as ("theta",) in HGRN, are kept per direction, and all others are
            shared. () runs a single mixer in all directions.
        combine: how the outputs of the directions are combined, "sum", "mean" or "concatenate".
        grid: rows and columns of patches, each of which has a learned position; images must have this many.
            None has no positions, and takes images of any size.
        class_token: whether a learned token stands before the patches, and the head reads it in place of the
            mean. It has no place in a grid, so `directions` must be ("forward",).

    The other arguments are keyword arguments of `StackConfig`. `mixer` may also be "s4nd": an `S4ND` layer
    with `mixer_args`, which has no directions.

    Raises:
        ValueError: a number is out of range, a direction is unknown or repeated, or `class_token` has other
            directions or "s4nd".

    Example:
        >>> ImageClassifierConfig(n_outputs=10, patch_size=4).directions
        ('right', 'left', 'down', 'up')
    """

    n_outputs: int = 1000
    patch_size: int = 16
    n_channels: int = 3
    directions: tuple[ImageDirection, ...] = ("right", "left", "down", "up")
    unshared: tuple[str, ...] | None = None
    combine: Combine = "sum"
    grid: tuple[int, int] | None = None
    class_token: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes(self, "n_outputs", "patch_size", "n_channels")
        # JSON stores tuples as lists
        object.__setattr__(self, "directions", tuple(self.directions))
        if self.unshared is not None:
            object.__setattr__(self, "unshared", tuple(self.unshared))
        check_directions(self.directions)
        require(not self.reversible, "`reversible` must be False for images; got True. Leave it out.")
        if self.grid is not None:
            object.__setattr__(self, "grid", tuple(self.grid))
            require(
                len(self.grid) == 2 and min(self.grid) >= 1,
                f"`grid` must be two numbers of at least 1, rows and columns of patches; got {self.grid}.",
            )
        require(
            not self.class_token or (self.directions == ("forward",) and "s4nd" not in self.mixer_pattern),
            f'`class_token` needs `directions=("forward",)` and no "s4nd"; got {self.directions}. The token '
            "has no place in a grid.",
        )


class ImageClassifier(nn.Module):
    """logits = head(mean(norm(block_L(... block_1(patches(image)))))).

    DeiT with a scan over patches in place of attention. The patches do not overlap, and a Linear embeds each
    of them. As in HGRN's released code there are no positional embeddings, since a recurrence knows the
    order. There is no class token, since it has no place in the grid: the head reads the mean over the
    patches. So an image may have any height and width that are multiples of `patch_size`. The norm stands
    before the mean, as in DeiT; in HGRN's code it stands after the mean.

    DeiT itself has attention that is not causal, `class_token=True` and a `grid`; the presets "deit-tiny",
    "deit-small" and "deit-base" are DeiT's, without its token of distillation. Positions and token start as
    normal numbers of a standard deviation of 0.02, cut at 2, as in DeiT; other weights start as torch's own.

    Args:
        config: the model's configuration; see `ImageClassifierConfig`.

    Raises:
        ValueError: `config` has an unknown mixer or channel mixing, or an argument that the mixer lacks.

    Source:
        Touvron and others, Training data-efficient image transformers (2021); HGRN (Qin, Yang and Zhong,
        2023), section 4.1 and table 7, and the authors' code.

    Example:
        >>> import torch
        >>> config = ImageClassifierConfig(n_outputs=10, patch_size=4, mixer="hgru", n_layers=2)
        >>> ImageClassifier(config)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(self, config: ImageClassifierConfig) -> None:
        super().__init__()
        self.config = config
        size = config.patch_size
        # a Linear on each patch, implemented as a convolution
        self.patches = nn.Conv2d(config.n_channels, config.d_model, size, stride=size)
        self.dropout = nn.Dropout(config.dropout)

        tokens = 0 if config.grid is None else config.grid[0] * config.grid[1] + config.class_token
        self.token = _drawn(1, config.d_model) if config.class_token else None
        self.positions = _drawn(tokens, config.d_model) if tokens else None
        for part in ("token", "positions"):
            if getattr(self, part) is not None:
                mark(self, part, group="vocabulary")

        def layer_of(layer: int) -> Mixer:
            name, arguments = config.mixer_of(layer)
            if config.class_token:
                return build_mixer(config, layer)
            if name == "s4nd":
                return S4ND(config.d_model, **arguments)
            return ImageScan(
                [build_mixer(config, layer) for _ in config.directions],
                directions=config.directions,
                combine=config.combine,
                unshared=config.unshared,
            )

        self.blocks = make_blocks(config, layer_of)
        self.norm = make_norm(
            config.norm if config.final_norm else "none", config.d_model, eps=config.norm_eps
        )
        self.head = nn.Linear(config.d_model, config.n_outputs)
        mark(self.head, group="vocabulary", weight_decay=True)

    def forward(self, images: Float[Tensor, "b c height width"]) -> Float[Tensor, "b n_outputs"]:
        """Return the logits of every image.

        Args:
            images: (b, n_channels, height, width), with height and width multiples of `patch_size`.

        Returns:
            (b, n_outputs).

        Raises:
            ValueError: `images` has the wrong shape.
            TypeError: `images` is not of a floating dtype.
        """
        size, channels = self.config.patch_size, self.config.n_channels
        if images.ndim != 4 or images.shape[1] != channels:
            raise ValueError(
                f"`images` must have shape (batch, {channels}, height, width); got {tuple(images.shape)}."
            )
        height, width = images.shape[2:]
        if height % size or width % size or not height * width:
            raise ValueError(
                f"`images` must have height and width in multiples of `patch_size` = {size}; got "
                f"{height} x {width}. Resize, crop or pad them."
            )
        if not images.is_floating_point():
            raise TypeError(f"`images` must be real numbers; got {images.dtype}. Convert: `images / 255`.")
        x = self._with_positions(self.patches(images).movedim(1, -1))
        x = self.dropout(x)
        x, _ = run_blocks(self.blocks, x, [None] * len(self.blocks), keep_state=False)
        x = self.norm(x)
        return self.head(x[:, 0] if self.config.class_token else x.mean((1, 2)))

    def _with_positions(self, x: Float[Tensor, "b h w d"]) -> Float[Tensor, "b *grid d"]:
        """Return patches with their positions, in a row behind the class token if there is one."""
        grid = self.config.grid
        if grid is not None and x.shape[1:3] != grid:
            raise ValueError(
                f"`images` must have {grid[0]} x {grid[1]} patches, as `grid` says; got "
                f"{x.shape[1]} x {x.shape[2]}. Resize them, or make a model without a `grid`."
            )
        if self.token is not None:
            x = torch.cat([self.token.to(x.dtype).expand(len(x), 1, -1), x.flatten(1, 2)], 1)
        if self.positions is None:
            return x
        return x + self.positions.view(*x.shape[1:]).to(x.dtype)

    if TYPE_CHECKING:
        __call__ = forward


def _drawn(n: int, d: int) -> nn.Parameter:
    """Return n vectors of normal numbers, cut at 2, of a standard deviation of 0.02."""
    return nn.Parameter(nn.init.trunc_normal_(torch.empty(n, d), std=0.02))
