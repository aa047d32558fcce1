"""The states of layers as rows of bytes, as vLLM's pool has them."""

import math
from typing import cast

import torch
from torch import Tensor

from linrec.mixers import Mixer, State
from linrec.mixers.attention import Attention
from linrec.models import Block, LanguageModel, ModelConfig
from linrec.rules import require
from linrec.trees import leaves, map_tree

__all__ = ["StateRows", "blocks_of", "check_servable", "longest_row", "pooled", "without_values"]

# the largest element of a state, complex128, may begin at multiples of its size alone
ALIGNED = 16


class StateRows:
    """A state as a row of bytes, its tensors one after another, at multiples of 16.

    Bytes hold states of any dtypes, complex numbers and counters too, and layers with different states can
    share a pool.

    Args:
        state: the state of one sequence.

    Attributes:
        size: bytes of a row.

    Example:
        >>> rows = StateRows((torch.zeros(1, 2, dtype=torch.complex64), torch.zeros(1, dtype=torch.int64)))
        >>> rows.size
        32
        >>> pool = torch.zeros(3, 32, dtype=torch.uint8)
        >>> rows.write(rows.views(pool), torch.tensor([2]), (torch.ones(1, 2) + 1j, torch.tensor([7])))
        >>> rows.read(rows.views(pool), torch.tensor([2]))
        (tensor([[1.+1.j, 1.+1.j]]), tensor([7]))
    """

    def __init__(self, state: State) -> None:
        self._like = map_tree(lambda part: part.detach().to("meta"), state)
        self._forms = [(part.shape[1:], part.dtype) for part in leaves(state)]
        self._places: list[int] = []
        self.size = 0
        for shape, dtype in self._forms:
            self._places.append(self.size)
            self.size += math.ceil(math.prod(shape) * dtype.itemsize / ALIGNED) * ALIGNED

    def views(self, pool: Tensor) -> list[Tensor]:
        """Return the tensors of the state (n, ...) of all rows of a pool of bytes (n, size or more)."""
        found = []
        for start, (shape, dtype) in zip(self._places, self._forms, strict=True):
            part = pool[:, start : start + math.prod(shape) * dtype.itemsize]
            found.append(part.view(dtype).view(len(pool), *shape))
        return found

    def read(self, views: list[Tensor], rows: Tensor) -> State:
        """Return a copy of the states of some rows (b)."""
        parts = iter([view.index_select(0, rows) for view in views])
        return map_tree(lambda _: next(parts), self._like)

    def write(self, views: list[Tensor], rows: Tensor, state: State) -> None:
        """Write the states of some rows (b); of rows that repeat, any."""
        parts = leaves(state)
        found = [(part.shape[1:], part.dtype) for part in parts]
        require(
            found == self._forms,
            f"the state of a layer must keep its shapes and dtypes, {self._forms}; got {found}.",
        )
        for view, part in zip(views, parts, strict=True):
            view.index_copy_(0, rows, part)


def pooled(block: Block, state: State) -> dict[str, tuple[Mixer, State]]:
    """Return the parts of a block whose state is in the pool, and their state, by attribute of the block.

    Softmax attention has pages in place of rows.
    """
    parts = {"mixer": (block.mixer, state)}
    if isinstance(block.channel_mixing, Mixer):
        parts = {"mixer": (block.mixer, state[0]), "channel_mixing": (block.channel_mixing, state[1])}
    return {
        name: (part, of)
        for name, (part, of) in parts.items()
        if leaves(of) and not isinstance(part, Attention)
    }


def longest_row(model: LanguageModel) -> int:
    """Return the bytes of the longest row of a model's layers; rows of all layers have this length.

    Raises:
        ValueError: vLLM cannot serve the model.
    """
    check_servable(model)
    return max(StateRows(state).size for _, state in _all_pooled(model))


def without_values(config: ModelConfig, dtype: torch.dtype) -> LanguageModel:
    """Return a model on the device "meta"."""
    with torch.device("meta"):
        return LanguageModel(config).to(dtype)


def check_servable(model: LanguageModel) -> None:
    """Raise ValueError, which names the part, unless vLLM can hold the states of a model."""
    config = model.config
    require(
        config.memory.kind == "none" and not config.pool,
        f"vLLM runs one layer after another; got `memory.kind` = {config.memory.kind!r} and `pool` = "
        f"{config.pool}, whose memory spans the layers. Use `linrec serve`.",
    )
    for layer, block in enumerate(blocks_of(model)):
        for part in (block.mixer, block.channel_mixing):
            if isinstance(part, Mixer):
                _check_part(part, f"layer {layer}, {type(part).__name__},")
    heads = {
        (part.n_heads, part.kv_heads, part.d_head) for part in model.mixers if isinstance(part, Attention)
    }
    require(
        len(heads) <= 1,
        "all layers of softmax attention must have the same `n_heads`, `kv_heads` and `d_head`, because "
        f"pages of vLLM have one size; got {sorted(heads)}. Use `linrec serve`.",
    )
    require(
        bool(_all_pooled(model)),
        f"a model must have a recurrent layer; got the mixer {config.mixer!r} alone. Use `linrec serve`.",
    )


def _all_pooled(model: LanguageModel) -> list[tuple[Mixer, State]]:
    states = model.init_state(1, device="meta")
    parts = zip(blocks_of(model), states, strict=True)
    return [pair for block, state in parts for pair in pooled(block, state).values()]


def blocks_of(model: LanguageModel) -> list[Block]:
    """Return the blocks of a model, first layer first."""
    return cast(list[Block], [*model.blocks])


def _check_part(part: Mixer, name: str) -> None:
    require(part.is_causal, f"{name} sees later steps, so that it cannot generate. Train with `causal=True`.")
    if isinstance(part, Attention):
        require(
            part.bounded is None and not part.xpos,
            f"{name} has a cache of its own (`cache_size`, or positions of xPos), which vLLM's pages cannot "
            "hold. Use `linrec serve`.",
        )
        return
    start = leaves(part.init_state(1, device="meta"))
    require(
        part.segment_length is None and not part.state_grows and all(tensor.numel() for tensor in start),
        f"{name} has a state whose size changes with the steps, which does not fit a row of vLLM's pool. Use "
        "`linrec serve`.",
    )
