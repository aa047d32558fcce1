"""The steps that softmax attention has seen: what it carries from one piece of a sequence to the next."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Inexact
from torch import Tensor

from linrec.ops.precision import accumulation, real_dtype

# the log decay of what has been forgotten: its exponential is zero in every dtype, and unlike -inf it stays a
# number in whatever a caller does with a cache
FORGOTTEN = -10_000.0


class AttentionCache(NamedTuple):
    """Keys and values of s past steps, and how each of them reaches the newest one.

    A step that a reset has cut off keeps its place, with zeros, and is not `alive`. Tensors have the
    accumulation dtype where `gate_loop_attention` made them, and the dtype of the keys where
    `softmax_attention` did.

    Attributes:
        k: keys (b, s, h, dk), as they were given.
        v: values (b, s, h, dv).
        log_decay: sum of log decays from after each step to the newest, (b, s, h, 1) or (b, s, h, dk), from
            -10,000 (a weight of zero) to 0; None where no call had any.
        phase: the same sum of phases, modulo 2 pi; None where all scores were real.
        alive: whether later steps may attend to it, (b, s); None where they may attend to all.

    Example:
        >>> import torch
        >>> from linrec.ops import gate_loop_attention
        >>> ones = torch.ones(1, 3, 1, 1)
        >>> gate_loop_attention(ones, ones, ones, torch.tensor([-1.0]))[1].log_decay.flatten().tolist()
        [-2.0, -1.0, 0.0]
    """

    k: Inexact[Tensor, "b s h dk"]
    v: Float[Tensor, "b s h dv"]
    log_decay: Float[Tensor, "b s h _"] | None
    phase: Float[Tensor, "b s h _"] | None
    alive: Bool[Tensor, "b s"] | None


def canonical(cache: AttentionCache | None, k: Tensor, v: Tensor, dtype: torch.dtype) -> AttentionCache:
    """Return `cache` in the real `dtype`, an empty one for None; raise where it does not fit `k` and `v`."""
    if cache is None:
        cache = AttentionCache(torch.zeros_like(k[:, :0]), torch.zeros_like(v[:, :0]), None, None, None)
    if not isinstance(cache, AttentionCache):
        raise TypeError(
            f"`state` must be an AttentionCache or None; got {type(cache).__name__}. "
            "Pass the state that an earlier call returned."
        )
    b, _, h, dk = k.shape
    s = cache.k.shape[1] if cache.k.ndim == 4 else 0
    gate_shapes: tuple[tuple[int, ...], ...] = ((b, s, h, 1), (b, s, h, dk))
    for name, tensor, allowed in (
        ("k", cache.k, ((b, s, h, dk),)),
        ("v", cache.v, ((b, s, h, v.shape[-1]),)),
        ("log_decay", cache.log_decay, gate_shapes),
        ("phase", cache.phase, gate_shapes),
        ("alive", cache.alive, ((b, s),)),
    ):
        if tensor is not None and tensor.shape not in allowed:
            raise ValueError(
                f"`state.{name}` must have shape {' or '.join(map(str, allowed))} to fit `k` and `v`; "
                f"got {tuple(tensor.shape)}. Pass the state that an earlier call returned, or None."
            )
    return AttentionCache(
        cache.k.to(torch.promote_types(dtype, torch.complex64) if cache.k.is_complex() else dtype),
        cache.v.to(dtype),
        None if cache.log_decay is None else cache.log_decay.to(dtype),
        None if cache.phase is None else cache.phase.to(dtype),
        cache.alive,
    )


def mapped(cache: AttentionCache, change: Callable[[Tensor], Tensor]) -> AttentionCache:
    """The cache with all that it keeps of its steps changed alike."""
    k, v, log_decay, phase, alive = cache
    log_decay = None if log_decay is None else change(log_decay)
    return AttentionCache(change(k), change(v), log_decay, None if phase is None else change(phase), alive)


def without_dead(cache: AttentionCache) -> AttentionCache:
    """The cache with zeros for the steps that a reset has cut off: their share of zero would let NaN pass."""
    if cache.alive is None:
        return cache
    dead = ~cache.alive[..., None, None]
    return mapped(cache, lambda x: x.masked_fill(dead, 0))


def alive_in(cache: AttentionCache) -> Tensor:
    """Whether later steps may attend to each cached one, (b, s), also where the cache leaves it out."""
    if cache.alive is not None:
        return cache.alive
    return torch.ones(cache.k.shape[:2], dtype=torch.bool, device=cache.k.device)


def documents_of(past: AttentionCache, reset: Tensor | None, time: int) -> Tensor:
    """Numbers of the documents of cached and new steps (b, s + t), -1 where dead."""
    old = alive_in(past).long() - 1
    new = old.new_zeros(len(old), time) if reset is None else reset.cumsum(1)
    return torch.cat([old, new], dim=1)


def newest(cache: AttentionCache, steps: int | None) -> AttentionCache:
    """The last `steps` steps of a cache without decays and phases; all of them where it is None."""
    first = 0 if steps is None else max(0, cache.k.shape[1] - steps)
    if first == 0:
        return cache
    # copies, since views would keep the memory of the steps that are dropped
    alive = None if cache.alive is None else cache.alive[:, first:].clone()
    return AttentionCache(cache.k[:, first:].clone(), cache.v[:, first:].clone(), None, None, alive)


def matched(gate: Tensor | None, cached: Tensor | None, q: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Return the gate of new steps (b, t, h, d) and of cached steps (b, s, h, d); zeros for what is None.

    Args:
        gate: None or (b or 1, t or 1, h, dk or 1).
        cached: None or (b, s, h, dk or 1).
        q: queries (b, t, h, dk).
        steps: cached steps s.
    """
    b, t, h, _ = q.shape
    zero = torch.zeros(1, 1, 1, 1, dtype=accumulation(real_dtype(q.dtype)), device=q.device)
    gate = zero if gate is None else gate
    cached = zero if cached is None else cached
    d = max(gate.shape[-1], cached.shape[-1])
    return gate.expand(b, t, h, d), cached.expand(b, steps, h, d)
