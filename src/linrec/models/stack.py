"""The stack of blocks that every model has."""

from collections.abc import Callable

from torch import nn

from linrec.mixers import Mixer
from linrec.models.block import Block
from linrec.models.config import StackConfig
from linrec.nn.channel_mixing import make_channel_mixing

__all__ = ["make_blocks"]


def make_blocks(config: StackConfig, make_mixer: Callable[[], Mixer]) -> nn.ModuleList:
    """x = block_L(... block_1(x)): the blocks, first layer first, with what their mixers share.

    Args:
        config: depth, channel mixing, norms and dropout of the stack.
        make_mixer: makes the time mixer of one block, of width `config.d_model`; called once per block.

    Returns:
        `config.n_layers` of `Block`.

    Raises:
        ValueError: `config` names no channel mixing, norm or position of the norm.

    Example:
        >>> from linrec.mixers import build
        >>> blocks = make_blocks(StackConfig(d_model=8, n_layers=2), lambda: build("hgru", 8))
        >>> blocks[0].mixer.bounds is blocks[1].mixer.bounds
        True
    """
    blocks = [
        Block(
            make_mixer(),
            make_channel_mixing(config.channel_mixing, config.d_model, config.d_channel_mixing),
            norm=config.norm,
            norm_eps=config.norm_eps,
            norm_position=config.norm_position,
            dropout=config.dropout,
        )
        for _ in range(config.n_layers)
    ]
    # what belongs to the stack and not to a layer, such as the lower bounds of HGRU
    for layers in ([block.mixer for block in blocks], [block.channel_mixing for block in blocks]):
        mixers = [layer for layer in layers if isinstance(layer, Mixer)]
        if mixers:
            type(mixers[0]).share(mixers)
    return nn.ModuleList(blocks)
