"""A classifier of images after DeiT, with any mixer in place of attention."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxtyping import Float
from torch import Tensor, nn

from linrec.mixers import Mixer
from linrec.models.bidirectional import Combine
from linrec.models.config import StackConfig, check_sizes
from linrec.models.image_scan import ImageDirection, ImageScan, check_directions
from linrec.models.s4nd import S4ND
from linrec.models.stack import build_mixer, make_blocks
from linrec.nn.norms import make_norm
from linrec.nn.parameters import mark

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

    The other arguments are keyword arguments of `StackConfig`. `mixer` may also be "s4nd": an `S4ND` layer
    with `mixer_args`, which has no directions.

    Raises:
        ValueError: a number is out of range, or a direction is unknown or repeated.

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

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes(self, "n_outputs", "patch_size", "n_channels")
        # JSON stores tuples as lists
        object.__setattr__(self, "directions", tuple(self.directions))
        if self.unshared is not None:
            object.__setattr__(self, "unshared", tuple(self.unshared))
        check_directions(self.directions)


class ImageClassifier(nn.Module):
    """logits = head(mean(norm(block_L(... block_1(patches(image)))))).

    DeiT with a scan over patches in place of attention. The patches do not overlap, and a Linear embeds each
    of them. As in HGRN's released code there are no positional embeddings, since a recurrence knows the
    order. There is no class token, since it has no place in the grid: the head reads the mean over the
    patches. So an image may have any height and width that are multiples of `patch_size`. The norm stands
    before the mean, as in DeiT; in HGRN's code it stands after the mean.

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

        def layer_of(layer: int) -> Mixer:
            name, arguments = config.mixer_of(layer)
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
        x = self.dropout(self.patches(images).movedim(1, -1))
        for block in self.blocks:
            x, _ = block(x, keep_state=False)
        return self.head(self.norm(x).mean((1, 2)))

    if TYPE_CHECKING:
        __call__ = forward
