"""Inputs and state of attention: the state is a cache of the steps seen so far."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Inexact
from torch import Tensor
from torch.nn import functional

from linrec.ops.core.checks import check_tensors
from linrec.ops.core.precision import accumulation, real_dtype, wide
from linrec.ops.gate_loop.inputs import canonical_gate

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


Result = tuple[Tensor, AttentionCache | None]


class Attention(NamedTuple):
    """What backends take.

    Attributes:
        q: (b, t, h, dk), real or complex.
        k: (b, t, g, dk), with g heads that divide h.
        v: (b, t, g, dv), real.
        log_decay: None, or the cache's sums and then the gates of the new steps, (b, s + t, h, d), where d is
            1 or dk.
        phase: likewise; not None where a key is complex.
        state: an `AttentionCache` in the dtype that the returned cache has.
        reset: None or (b, t).
        scale: factor of the scores.
        window: steps that each step sees, its own included; None is all.
        causal: whether steps see the past alone.
        dropout: probability that a share is dropped.
        function: what makes weights of scores: "softmax", "laplace", "relu2", or for the softmax of scores
            that decay and turn, "gates".
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    phase: Tensor | None
    state: AttentionCache | Any
    reset: Tensor | None
    scale: Any
    window: int | None = None
    causal: bool = True
    dropout: float = 0.0
    function: str = "gates"


def fitted(cache: AttentionCache | None, k: Tensor, v: Tensor, dtype: torch.dtype) -> AttentionCache:
    """Return `cache` in the real `dtype`, an empty one for None; raise where it does not fit `k` and `v`."""
    if cache is None:
        nothing = AttentionCache(torch.zeros_like(k[:, :0]), torch.zeros_like(v[:, :0]), None, None, None)
        return converted(nothing, dtype)
    if not isinstance(cache, AttentionCache):
        raise TypeError(
            f"`state` must be an AttentionCache or None; got {type(cache).__name__}. Pass the state that an "
            "earlier call returned."
        )
    fields = [(i, f"state.{name}", (type(None),) if i > 1 else ()) for i, name in enumerate(cache._fields)]
    check_tensors(cache, fields, "k", k)
    b, _, h, dk = k.shape
    s = cache.k.shape[1] if cache.k.ndim == 4 else 0
    gates = (b, s, h, 1), (b, s, h, dk)
    shapes = ((b, s, h, dk),), ((b, s, h, v.shape[-1]),), gates, gates, ((b, s),)
    for name, tensor, allowed in zip(cache._fields, cache, shapes, strict=True):
        if tensor is not None and tensor.shape not in allowed:
            raise ValueError(
                f"`state.{name}` must have shape {' or '.join(map(str, allowed))} to fit `k` and `v`; "
                f"got {tuple(tensor.shape)}. Pass the state that an earlier call returned, or None."
            )
    return converted(cache, dtype)


def converted(cache: AttentionCache, dtype: torch.dtype) -> AttentionCache:
    """Return the cache in a real dtype, or the complex one of equal precision for complex keys."""
    of_complex = torch.promote_types(dtype, torch.complex64)
    return mapped(cache, lambda x: x.to(of_complex if x.is_complex() else dtype))


def mapped(cache: AttentionCache, change: Callable[[Tensor], Tensor]) -> AttentionCache:
    """Return the cache with all that it keeps of its steps changed alike."""
    k, v, *gates, alive = cache
    log_decay, phase = (None if gate is None else change(gate) for gate in gates)
    return AttentionCache(change(k), change(v), log_decay, phase, alive)


def alive_in(cache: AttentionCache) -> Tensor:
    """Return whether later steps may attend to each cached one, (b, s), also where `alive` is None."""
    return cache.k.new_ones(cache.k.shape[:2], dtype=torch.bool) if cache.alive is None else cache.alive


def documents_of(past: AttentionCache, reset: Tensor | None, time: int) -> Tensor:
    """Return numbers of the documents of cached and new steps (b, s + t), -1 where dead."""
    old = alive_in(past).long() - 1
    new = old.new_zeros(len(old), time) if reset is None else reset.cumsum(1)
    return torch.cat([old, new], dim=1)


def newest(cache: AttentionCache, window: int | None) -> AttentionCache:
    """Return the steps of a cache that a window lets the next step see, without gates; None keeps all."""
    first = 0 if window is None else max(0, cache.k.shape[1] - (window - 1))
    if first == 0:
        return cache
    # copies, since views would keep the memory of the steps that are dropped
    alive = None if cache.alive is None else cache.alive[:, first:].clone()
    return AttentionCache(cache.k[:, first:].clone(), cache.v[:, first:].clone(), None, None, alive)


def grown(
    given: Attention, k: Tensor, v: Tensor, gates: Sequence[Tensor | None], documents: Tensor | None
) -> AttentionCache | None:
    """Return the cache of all steps, those that later steps see, in the dtype of the given one.

    Args:
        given: the inputs.
        k: keys of cached and new steps (b, s + t, g, dk).
        v: values of cached and new steps.
        gates: None, or the sum from after each step to the newest, of log decays and of phases.
        documents: of cached and new steps, as `documents_of` returns them; None where there is but one.
    """
    if not given.causal:
        return None
    log_decay = None if gates[0] is None else gates[0].clamp(min=FORGOTTEN)
    phase = None if gates[1] is None else gates[1].remainder(2 * math.pi)
    alive = None if documents is None else documents == documents[:, -1:]
    last = newest(AttentionCache(k, v, log_decay, phase, alive), given.window)
    if given.reset is not None and last.alive is not None:
        # a share of zero would let NaN pass
        dead = ~last.alive[..., None, None]
        last = mapped(last, lambda x: x.masked_fill(dead, 0))
    if given.function == "gates":
        last = last._replace(alive=alive_in(last))
    return converted(last, given.state.v.dtype)


def matched(name: str, given: Attention, cache: AttentionCache, *, needed: bool = False) -> Tensor | None:
    """Return a gate of cached and new steps, (b, s + t, h, d), with zeros for None; None for two None.

    Args:
        name: "log_decay" or "phase".
        given: the arguments, with checked queries.
        cache: the cache, as `fitted` returns it.
        needed: whether zeros are returned for two None too.
    """
    q, steps, cached = given.q, cache.k.shape[1], getattr(cache, name)
    gate = canonical_gate(name, getattr(given, name), q)
    if gate is None and cached is None and not needed:
        return None
    zero = torch.zeros(1, 1, 1, 1, dtype=accumulation(real_dtype(q.dtype)), device=q.device)
    both = [zero if x is None else wide(x) for x in (cached, gate)]
    # a gate of no channels becomes a gate of one
    both = [functional.pad(x, (0, 1)) if x.shape[-1] == 0 else x for x in both]
    b, t, h, d = *q.shape[:3], max(x.shape[-1] for x in both)
    new = both[1].expand(b, t, h, d)
    return torch.cat([both[0].expand(b, steps, h, d), new], dim=1) if steps else new
