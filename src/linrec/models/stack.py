"""The stack of blocks that all models share."""

from collections.abc import Callable, Sequence

from torch import nn

from linrec.mixers import Mixer, build, get
from linrec.models.block import Block
from linrec.models.config import StackConfig
from linrec.models.reversible import ReversibleBlock
from linrec.nn.channel_mixing import make_channel_mixing
from linrec.rules import require

__all__ = ["build_mixer", "make_blocks"]


def build_mixer(config: StackConfig, layer: int) -> Mixer:
    """Return the time mixer of a block as `config` specifies it.

    Args:
        config: width, mixer or pattern of mixers, and their arguments.
        layer: index of the block, counted from 0.

    Raises:
        ValueError: the mixer or an argument is unknown; the message gives the nearest name.

    Example:
        >>> config = StackConfig(d_model=8, mixer=("hgru", "lru"))
        >>> type(build_mixer(config, 3)).__name__
        'LRU'
    """
    name, arguments = config.mixer_of(layer)
    return build(get(name), config.width_of(layer), **arguments)


def make_blocks(
    config: StackConfig,
    make_mixer: Callable[[int], Mixer] | None = None,
    *,
    make_reading: Callable[[int], tuple[nn.Module | None, nn.Module | None]] = lambda layer: (None, None),
) -> nn.ModuleList:
    """Return the blocks of x = block_L(... block_1(x)), first layer first, with shared parameters tied.

    In a stack of several kinds or widths of mixers, each shares parameters among its own mixers; HGRU shares
    its lower bounds. `Mixer.place` counts the blocks of all kinds; mLSTM and sLSTM use it for initial values.

    Args:
        config: depth, mixers, channel mixing, norms and dropout of the stack.
        make_mixer: returns the time mixer of a block, given its index from 0, of its block's width; it is
            called once per block. None means `build_mixer`.
        make_reading: returns `reading` and `reading_channels` of a block, given its index from 0.

    Returns:
        `config.n_layers` blocks of class `Block`.

    Raises:
        ValueError: `config` has an unknown mixer, channel mixing, norm or norm position, or an argument that
            a mixer lacks.

    Example:
        >>> blocks = make_blocks(StackConfig(d_model=8, n_layers=3, mixer=("hgru", "lru")))
        >>> blocks[0].mixer.bounds is blocks[2].mixer.bounds
        True
    """
    blocks = []
    for layer in range(config.n_layers):
        reading, reading_channels = make_reading(layer)
        require(
            not config.reversible or reading is None,
            "`reversible` must be False for blocks that read a memory or an encoder; got True. Leave it out.",
        )
        block = (ReversibleBlock if config.reversible else Block)(
            build_mixer(config, layer) if make_mixer is None else make_mixer(layer),
            make_channel_mixing(
                config.channel_mixing_of(layer),
                config.width_of(layer),
                config.d_channel_mixing * config.width_of(layer) // config.d_model,
                bias=config.channel_mixing_bias,
            ),
            norm=config.norm,
            norm_eps=config.norm_eps,
            norm_position=config.norm_position_of(layer),
            skip=config.skip,
            dropout=config.dropout,
            reading=reading,
            reading_channels=reading_channels,
        )
        blocks.append(block)
    # parameters of the whole stack rather than a layer, such as HGRU's lower bounds
    kinds = [(config.mixer_of(layer)[0], config.width_of(layer)) for layer in range(config.n_layers)]
    for kind in dict.fromkeys(kinds):
        _share([block.mixer for block, of in zip(blocks, kinds, strict=True) if of == kind])
    _share([block.channel_mixing for block in blocks if isinstance(block.channel_mixing, Mixer)])
    for layer, block in enumerate(blocks):
        block.mixer.place(layer, len(blocks))
    return nn.ModuleList(blocks)


def _share(mixers: Sequence[Mixer]) -> None:
    if mixers:
        type(mixers[0]).share(mixers)
