"""Attention with a bounded cache, from which a policy evicts a step after each step.

    S_n = [S_{n-1}; (k_n, v_n)]                  the rows that are kept, and the new row
    w_n = softmax(q_n K_n^T / sqrt(d)),  o_n = w_n V_n
    S_n without a row, if it has more than N rows

A decoder with a cache is a recurrent network whose state has a row for each step; a policy bounds its rows.

    "window"    the oldest row behind the first c, the sinks
    "tova"      the row with the smallest weight of the last query, on average over heads
    "h2o"       in each head, of all but the last N / 2 rows, the row with the smallest sum of weights so far

k key, v value, q query of a step n, N the size of the cache, c the number of sinks.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from linrec.nn.head_sizes import repeat_heads
from linrec.nn.positions import positions
from linrec.nn.rotary import Rotary
from linrec.nn.visible_attention import visible_attention
from linrec.ops.attention import AttentionCache, softmax_attention
from linrec.ops.core.isolation import Isolation, documents
from linrec.ops.core.precision import wide
from linrec.rules import at_least, choice, require

__all__ = ["EvictingCache", "Eviction", "EvictionState", "Rows"]

Eviction = Literal["window", "tova", "h2o"]


class Rows(NamedTuple):
    """Rows of a cache, oldest first.

    Attributes:
        k: keys (b, s, g, d), already turned where positions are rotary.
        v: values (b, s, g, dv).
        alive: whether a row is of the current sequence (b, s); other rows are the first to be evicted.
    """

    k: Float[Tensor, "b s g d"]
    v: Float[Tensor, "b s g dv"]
    alive: Bool[Tensor, "b s"]

    @classmethod
    def of(cls, cache: AttentionCache | None) -> "Rows":
        """Return the rows of a cache of `softmax_attention`."""
        # causal attention has one
        assert cache is not None
        alive = cache.alive
        if alive is None:
            alive = torch.ones(cache.k.shape[:2], dtype=torch.bool, device=cache.k.device)
        return cls(cache.k, cache.v, alive)

    @property
    def seen(self) -> AttentionCache:
        """The cache for `softmax_attention`; no rows need no mask."""
        return AttentionCache(self.k, self.v, None, None, self.alive if self.k.shape[1] else None)

    def kept(self, row: Int[Tensor, "b n #g"]) -> "Rows":
        """Return some rows, in ascending order, for each head or for all."""
        of_heads = row.expand(-1, -1, self.k.shape[2])[..., None]
        k, v = (x.gather(1, of_heads.expand(-1, -1, -1, x.shape[-1])) for x in (self.k, self.v))
        return Rows(k, v, self.alive.gather(1, row[..., 0]))


class EvictionState(NamedTuple):
    """The state of attention with an evicting cache.

    Attributes:
        cache: the rows that the policy has kept, at most `EvictingCache.size` of them.
        received: sums of the weights that each row has received (b, s, g), for "h2o"; else None.
        position: steps of the sequence so far, (b,) int64.
    """

    cache: Rows
    received: Float[Tensor, "b s g"] | None
    position: Int[Tensor, "b"]


class Inputs(NamedTuple):
    """Queries, keys and values of new steps, and resets."""

    q: Tensor
    k: Tensor
    v: Tensor
    reset: Tensor | None

    @property
    def documents(self) -> Tensor:
        """Document numbers of the steps (b, t)."""
        if self.reset is None:
            return torch.zeros(self.q.shape[:2], dtype=torch.int64, device=self.q.device)
        return documents(self.reset)

    def steps(self, begin: int, end: int) -> "Inputs":
        """Return the inputs of some steps."""
        q, k, v = (x[:, begin:end] for x in (self.q, self.k, self.v))
        return Inputs(q, k, v, None if self.reset is None else self.reset[:, begin:end])


@dataclass(frozen=True)
class EvictingCache:
    """A cache of N = `size` rows: each step attends to at most N kept rows and itself.

    The policy runs after every step, so that a sequence gives the same in one call, in pieces, and step by
    step. Until N + 1 steps of a call have filled the cache, "tova" and "h2o" take them at once; then they
    are a loop over steps. "window" takes all steps at once: in linear time and memory without sinks, and with
    a mask of all pairs with sinks.

    Keys keep the rotary positions at which they came. To sinks, a query has at most the position N, as if
    rows were numbered by their place in the cache (StreamingLLM); to other rows of a window the distances
    are then the same.

    Args:
        size: N.
        policy: "window", "tova" or "h2o".
        sinks: c, first steps of a sequence that "window" keeps.

    Raises:
        ValueError: an unknown policy, a `size` below 1 (2 for "h2o"), `sinks` of another policy, or not below
            `size`.

    Source:
        Oren and others, Transformers are Multi-State RNNs (2024), TOVA; Zhang and others, H2O: Heavy-Hitter
        Oracle (2023); Xiao and others, Efficient Streaming Language Models with Attention Sinks (2023).
    """

    size: int
    policy: Eviction = "window"
    sinks: int = 0

    def __post_init__(self) -> None:
        choice(Eviction, eviction=self.policy)
        at_least(2 if self.policy == "h2o" else 1, cache_size=self.size)
        at_least(0, most=self.size - 1, sinks=self.sinks)
        require(
            self.policy == "window" or not self.sinks,
            f'`sinks` must be 0 with `eviction="{self.policy}"`, which chooses rows by their weights; got '
            f'{self.sinks}. Pass `eviction="window"`.',
        )

    def empty(self, batch: int, heads: int, dk: int, dv: int, **factory: Any) -> EvictionState:
        """Return a cache of no rows for this number of heads of keys and values."""
        cache = Rows.of(softmax_attention.empty_state(batch, heads, dk, dv, **factory))
        received = wide(cache.k.new_zeros(batch, 0, heads)) if self.policy == "h2o" else None
        position = torch.zeros(batch, dtype=torch.int64, device=cache.k.device)
        return EvictionState(cache, received, position)

    def per_step(self, heads: int) -> int:
        """Return the elements of a row beside its keys and values: `alive`, and `received` of each head."""
        return 1 + (heads if self.policy == "h2o" else 0)

    def attend(
        self,
        q: Float[Tensor, "b t h d"],
        k: Float[Tensor, "b t g d"],
        v: Float[Tensor, "b t g dv"],
        state: EvictionState,
        *,
        reset: Bool[Tensor, "b t"] | None,
        rotary: Rotary | None,
        dropout: float,
    ) -> tuple[Float[Tensor, "b t h dv"], EvictionState]:
        """Return o_n of every step, and the rows that are left.

        Args:
            q: queries, which are not yet turned.
            k: keys, likewise.
            v: values.
            state: the rows kept so far.
            reset: true at t makes all rows before t the first to be evicted, and hides them.
            rotary: turns queries and keys; None for heads without positions.
            dropout: probability of dropping a weight.
        """
        place, position = positions(state.position, q.shape[1], reset=reset)
        far = q
        if rotary is not None:
            far = rotary(place.clamp(max=self.size), q)[0]
            q, k = rotary(place, q, k)
        if self.policy == "window":
            windowed = self._with_sinks if self.sinks else self._windowed
            o, cache = windowed(Inputs(q, k, v, reset), far, place, state.cache, dropout)
            return o, EvictionState(cache, None, position)
        # the steps up to the first eviction
        free = min(q.shape[1], self.size + 1 - state.cache.k.shape[1])
        given = Inputs(q, k, v, reset).steps(0, free)
        o, seen = softmax_attention(*given[:3], state=state.cache.seen, reset=given.reset, dropout=dropout)
        cache, received = self._evicted(given.q, Rows.of(seen), state.received)
        outputs = [o]
        for t in range(free, q.shape[1]):
            given = Inputs(q, k, v, reset).steps(t, t + 1)
            cache = extended(cache, given)
            weights = weights_of(given.q, cache)
            shares = functional.dropout(weights, dropout).to(v.dtype)
            outputs.append((shares @ repeat_heads(cache.v, q.shape[2]).transpose(1, 2)).transpose(1, 2))
            cache, received = self._evicted(given.q, cache, received, weights)
        return torch.cat(outputs, 1), EvictionState(cache, received, position)

    def _evicted(
        self, q: Tensor, seen: Rows, received: Tensor | None, weights: Tensor | None = None
    ) -> tuple[Rows, Tensor | None]:
        """Return at most N rows, by the policy, and the sums of weights that these rows have received."""
        rows, groups = seen.k.shape[1:3]
        full = rows > self.size
        if received is None and not full:
            return seen, None
        if weights is None:
            weights = weights_of(q[:, -1:] if received is None else q, seen)
        weights = weights.detach()
        if received is None:
            priority = weights[:, :, -1].mean(1)[..., None]
        else:
            new = weights.sum(2).unflatten(1, (groups, -1)).sum(2).transpose(1, 2)
            received = functional.pad(received, (0, 0, 0, q.shape[1])) + new
            received = received.masked_fill(~seen.alive[..., None], 0)
            if not full:
                return seen, received
            recent = torch.arange(rows, device=q.device) >= rows - self.size // 2
            priority = received.masked_fill(recent[:, None], torch.inf)
        # rows of an earlier sequence first
        dropped = priority.masked_fill(~seen.alive[..., None], -torch.inf).argmin(1, keepdim=True)
        row = torch.arange(self.size, device=q.device)[:, None]
        row = row + (row >= dropped)
        return seen.kept(row), None if received is None else received.gather(1, row)

    def _windowed(
        self, given: Inputs, far: Tensor, place: Tensor, cache: Rows, dropout: float
    ) -> tuple[Tensor, Rows]:
        """Attend with all new steps to the last N rows, and keep as many."""
        o, seen = softmax_attention(
            *given[:3], state=cache.seen, reset=given.reset, window=self.size + 1, dropout=dropout
        )
        return o, Rows.of(seen)

    def _with_sinks(
        self, given: Inputs, far: Tensor, place: Tensor, cache: Rows, dropout: float
    ) -> tuple[Tensor, Rows]:
        """Attend with all new steps to sinks and the last N - c rows, and keep the rows of the next step."""
        past, time = cache.k.shape[1], given.q.shape[1]
        rows, heads = past + time, given.q.shape[2]
        k, v = torch.cat([cache.k, given.k], 1), torch.cat([cache.v, given.v], 1)
        document = torch.cat([cache.alive.long() - 1, given.documents], 1)
        # sinks are never evicted, so they are the first rows of their sequence
        sink = torch.cat([cache.alive & (cache.alive.cumsum(1) <= self.sinks), place < self.sinks], 1)
        row = torch.arange(rows, device=k.device)
        age = row[past:, None] - row
        seen = (age >= 0) & ((age <= self.size - self.sinks) | sink[:, None])
        q, keys, values, isolation = given.q, k, v, Isolation(document)
        if given.reset is not None:
            q, far = (isolation.enter(x, begin=past, carried=False) for x in (q, far))
            keys, values = isolation.enter(k, begin=0), isolation.enter(v, begin=0)
        hidden = sink[..., None, None]
        o = visible_attention(
            # products with sinks are those of `far`
            torch.cat([q, far], -1),
            repeat_heads(torch.cat([keys.masked_fill(hidden, 0), keys.masked_fill(~hidden, 0)], -1), heads),
            repeat_heads(values, heads),
            seen & (document[:, past:, None] == document[:, None]),
            scale=1 / math.sqrt(q.shape[-1]),
            dropout=dropout,
        )
        if given.reset is not None:
            o = isolation.leave(o, begin=past, window=None, causal=True)
        alive = document == document[:, -1:]
        dead = ~alive[..., None, None]
        left = Rows(k.masked_fill(dead, 0), v.masked_fill(dead, 0), alive)
        if rows <= self.size:
            return o, left
        # sinks last, then the newest rows, and rows of an earlier sequence first
        order = torch.where(sink & alive, rows + row, torch.where(alive, row, row - rows))
        return o, left.kept(order.topk(self.size, 1).indices.sort(1).values[..., None])


def extended(cache: Rows, given: Inputs) -> Rows:
    """Return a cache with the row of a single step."""
    alive = cache.alive if given.reset is None else cache.alive & ~given.reset
    k, v = cache.k, cache.v
    if given.reset is not None:
        # a weight of zero would let NaN pass
        k, v = (x.masked_fill(~alive[..., None, None], 0) for x in (k, v))
    alive = functional.pad(alive, (0, 1), value=True)
    return Rows(torch.cat([k, given.k], 1), torch.cat([v, given.v], 1), alive)


def weights_of(q: Float[Tensor, "b t h d"], seen: Rows) -> Float[Tensor, "b h t s"]:
    """Return the weights of queries of the last t rows, 0 for rows and queries of earlier sequences."""
    time, rows = q.shape[1], seen.k.shape[1]
    scores = q.transpose(1, 2) @ repeat_heads(seen.k, q.shape[2]).permute(0, 2, 3, 1)
    visible = (seen.alive[:, rows - time :, None] & seen.alive[:, None]).tril(rows - time)[:, None]
    scores = wide(scores).masked_fill(~visible, -torch.inf) / math.sqrt(q.shape[-1])
    return scores.softmax(-1).masked_fill(~visible, 0)
