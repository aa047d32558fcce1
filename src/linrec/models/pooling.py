"""SaShiMi's pooled stack (Goel, Gu, Donahue and Ré, 2022): blocks at several rates, as a state that streams.

    z_j = W_d [x_{p j} | .. | x_{p j + p - 1}] + b_d                 down: p steps become one, which is wider
    w_j = tier(z)_j                                                  the tier of the lower rate
    [u_{p j} | .. | u_{p j + p - 1}] = W_u w_{j-1} + b_u             up: one step becomes the p steps after it
    y = x + u + blocks(x + u)

The first p steps have u = 0. The lowest tier has no pool: y = x + blocks(x). x is an input and y an output at
a tier's rate, p its pool.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias, cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from linrec.mixers import State
from linrec.models.block import Block
from linrec.models.config import ModelConfig
from linrec.nn.parameters import tensor_options
from linrec.ops.core.call import refuse_split_time

__all__ = ["Pool", "PoolState", "PooledState", "Pooling"]

Run: TypeAlias = Callable[[range, Tensor, tuple[State, ...], Tensor | None], tuple[Tensor, tuple[State, ...]]]
"""(blocks, x, their states, reset) -> (y, their states), blocks by their places in the stack."""


class PoolState(NamedTuple):
    """The state of a pool between two pieces of a sequence.

    Attributes:
        steps: inputs of the pool's unfinished step, s of its p (b, s, d); zeros before the row's reset.
        spread: u of the current p steps (b, p, d); zeros from the row's reset on.
        reset: whether a row began anew within the unfinished step (b,); None if no row did.
    """

    steps: Float[Tensor, "b s d"]
    spread: Float[Tensor, "b p d"]
    reset: Bool[Tensor, "b"] | None


class PooledState(NamedTuple):
    """The state of a pooled stack.

    Attributes:
        blocks: the states of the blocks, first block first.
        pools: the states of the pools, of the highest rate first.
    """

    blocks: tuple[State, ...]
    pools: tuple[PoolState, ...]


class Pool(nn.Module):
    """Join p steps to one of another width, and spread each step of the lower rate over the next p steps.

    A reset within the p steps hides the steps before it, in the joined step and in u, and resets the lower
    rate at the joined step. Boundaries stay at multiples of p.

    Args:
        d_model: width d of the steps.
        size: p.
        expansion: width of the lower rate over d.
    """

    def __init__(self, d_model: int, size: int, expansion: int) -> None:
        super().__init__()
        self.d_model, self.size = d_model, size
        self.down = nn.Linear(size * d_model, expansion * d_model)
        self.up = nn.Linear(expansion * d_model, size * d_model)

    def forward(
        self,
        x: Float[Tensor, "b t d"],
        state: PoolState,
        reset: Bool[Tensor, "b t"] | None,
        tier: Callable[[Tensor, Tensor | None], Tensor],
    ) -> tuple[Float[Tensor, "b t d"], PoolState]:
        """Return u, and the state after the last step; `tier` is (z, reset) -> w at the lower rate."""
        seen, time = state.steps.shape[1], x.shape[1]
        joined = (seen + time) // self.size
        steps, begun, began = torch.cat([state.steps.to(x.dtype), x], 1), None, state.reset
        if reset is not None:
            missing = (joined + 1) * self.size - seen - time
            at = functional.pad(reset, (seen, missing)).unflatten(1, (joined + 1, self.size)).long()
            behind = at.flip(2).cumsum(2).flip(2) - at
            steps = steps.masked_fill((behind > 0).flatten(1)[:, : seen + time, None], 0)
            begun = at.sum(2) > 0
            if began is not None:
                begun = torch.cat([begun[:, :1] | began[:, None], begun[:, 1:]], 1)
        elif began is not None:
            begun = functional.pad(began[:, None], (0, joined))
        whole, rest = steps.tensor_split([joined * self.size], 1)
        z = self.down(whole.unflatten(1, (joined, self.size)).flatten(2))
        w = tier(z, None if begun is None else begun[:, :joined])
        spread = self.up(w).unflatten(-1, (self.size, self.d_model))
        spread = torch.cat([state.spread[:, None].to(spread.dtype), spread], 1)
        if reset is not None:
            spread = spread.masked_fill((at.cumsum(2) > 0)[..., None], 0)
        u = spread.flatten(1, 2)[:, seen : seen + time]
        # without resets, a step that is joined takes the row's reset with it
        began = None if begun is None or (reset is None and joined) else begun[:, joined].clone()
        return u, PoolState(rest.clone(), spread[:, -1].clone(), began)

    def start(self, batch: int, position: int, device: torch.device | str | None) -> PoolState:
        """Return zeros for the steps before `position`."""
        factory = tensor_options(self, device)
        steps = torch.zeros(batch, position % self.size, self.d_model, **factory)
        return PoolState(steps, torch.zeros(batch, self.size, self.d_model, **factory), None)


class Pooling(nn.Module):
    """Run the blocks of a stack at several rates, the lowest rate first.

    Args:
        config: `pool` has the sizes of the pools, from the highest rate down, and `pool_expansion` the factor
            on the width at each. The blocks are divided equally among the tiers, of which there is one more.

    Source:
        Goel, Gu, Donahue and Ré, It's Raw! Audio Generation with State-Space Models (2022), section 3.2.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        widths = (config.d_model * config.pool_expansion**tier for tier in range(len(config.pool)))
        self.pools = nn.ModuleList(
            Pool(width, size, config.pool_expansion) for width, size in zip(widths, config.pool, strict=True)
        )
        self.sizes, self.n_blocks = config.pool, config.n_layers // (len(config.pool) + 1)

    def forward(
        self,
        x: Float[Tensor, "b t d"],
        state: PooledState | None,
        reset: Bool[Tensor, "b t"] | None,
        run: Run,
    ) -> tuple[Float[Tensor, "b t d"], PooledState]:
        """Return the outputs of the highest rate, and the state; `run` runs some of the blocks."""
        refuse_split_time("a pooled stack")
        n_blocks = self.n_blocks * (len(self.pools) + 1)
        past = PooledState((None,) * n_blocks, self.start(len(x), 0, x.device)) if state is None else state
        blocks, pools = list(past.blocks), list(past.pools)

        def tier(level: int, x: Tensor, reset: Tensor | None) -> Tensor:
            # most steps of a stream do not reach the lower rates
            if level and state is not None and not x.shape[1]:
                return x
            if level < len(self.pools):

                def lower(z: Tensor, reset: Tensor | None) -> Tensor:
                    return tier(level + 1, z, reset)

                u, pools[level] = self.pools[level](x, pools[level], reset, lower)
                x = x + u
            first = (len(self.pools) - level) * self.n_blocks
            own = range(first, first + self.n_blocks)
            y, states = run(own, x, past.blocks[first : own.stop], reset)
            blocks[first : own.stop] = states
            return x + y

        return tier(0, x, reset), PooledState(tuple(blocks), tuple(pools))

    def start(self, batch: int, position: int, device: torch.device | str | None) -> tuple[PoolState, ...]:
        """Return the states of pools of sequences that start at step `position` of a stream."""
        found = []
        for pool in self._pools:
            found.append(pool.start(batch, position, device))
            position //= pool.size
        return tuple(found)

    def first_state(
        self, batch: int, position: int, *, device: torch.device | str | None, blocks: Sequence[Block]
    ) -> PooledState:
        """Return the initial state of sequences that start at step `position` of a stream."""
        found = []
        for layer, block in enumerate(blocks):
            passed = math.prod(self.sizes[: len(self.sizes) - layer // self.n_blocks])
            found.append(block.init_state(batch, device=device, position=position // passed))
        return PooledState(tuple(found), self.start(batch, position, device))

    @property
    def state_size(self) -> int:
        """Elements of the largest state of the pools per sequence: p - 1 steps, and u of p steps."""
        return sum((2 * pool.size - 1) * pool.d_model for pool in self._pools)

    @property
    def _pools(self) -> list[Pool]:
        return cast(list[Pool], [*self.pools])
