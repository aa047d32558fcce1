"""Inputs and state of attention; the state is a cache of the steps seen so far."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Inexact, Int64
from torch import Tensor
from torch.nn import functional

from linrec.ops.core.checks import check_tensors
from linrec.ops.core.isolation import documents
from linrec.ops.core.kernel import differentiated
from linrec.ops.core.precision import wide
from linrec.ops.matrix import canonical_gate
from linrec.ops.matrix.segments import wrapped
from linrec.trees import replaced

# log decay of steps that are fully forgotten: its exponential is zero in every dtype, and unlike -inf it
# cannot produce NaN in later arithmetic
FORGOTTEN = -10_000.0


class AttentionCache(NamedTuple):
    """Cache of keys and values of s past steps, with their decays up to the newest step.

    A step before a reset keeps its index, but its entries are zeros and it is not `alive`. Tensors have the
    accumulation dtype if `gate_loop_attention` made them, and the dtype of the keys if `softmax_attention`
    did.

    Attributes:
        k: keys (b, s, h, dk), as given.
        v: values (b, s, h, dv).
        log_decay: sum of log decays after each step up to the newest, (b, s, h, 1) or (b, s, h, dk), from
            -10,000 (a weight of zero) to 0; None if no call had decays.
        phase: the same sum of phases, modulo 2 pi; None if all scores were real.
        alive: (b, s), whether later steps may attend to a step; None if they may attend to all steps.
        place: None, or (1,) int64: the cache of `softmax_attention` is a ring of s slots for steps one at a
            time without gradients, and this is the slot of the next step. A step is written in place of the
            oldest of s steps: its cache holds the same memory as the cache before it.

    Example:
        >>> import torch
        >>> from linrec.ops import gate_loop_attention
        >>> ones = torch.ones(1, 3, 1, 1)
        >>> gate_loop_attention(ones, ones, ones, torch.tensor([-1.0]))[1].log_decay.flatten().tolist()
        [-2.0, -1.0, 0.0]

        A ring of two slots:

        >>> from linrec.ops import softmax_attention
        >>> zeros, alive = torch.zeros(1, 2, 1, 1), torch.zeros(1, 2, dtype=torch.bool)
        >>> ring = AttentionCache(zeros, zeros.clone(), None, None, alive, torch.tensor([0]))
        >>> for step in (1, 2, 3):
        ...     y, ring = softmax_attention(ones[:, :1], ones[:, :1], step * ones[:, :1], state=ring)
        >>> y.item(), ring.v.flatten().tolist()
        (2.5, [3.0, 2.0])
    """

    k: Inexact[Tensor, "b s h dk"]
    v: Float[Tensor, "b s h dv"]
    log_decay: Float[Tensor, "b s h _"] | None
    phase: Float[Tensor, "b s h _"] | None
    alive: Bool[Tensor, "b s"] | None
    place: Int64[Tensor, "1"] | None = None


Result = tuple[Tensor, AttentionCache | None]
_FIELDS = [
    (i, f"state.{field}", (type(None),) if i > 1 else ())
    for i, field in enumerate(AttentionCache._fields)
    if field != "place"
]


class Attention(NamedTuple):
    """Canonical inputs of the backends.

    Attributes:
        q: (b, t, h, dk), real or complex.
        k: (b, t, g, dk), with g heads that divide h.
        v: (b, t, g, dv), real.
        log_decay: (b, t, h, d), and (b, s, h, d) in the cache, where d is 1 or dk; None in both or in
            neither.
        phase: likewise; not None if keys are complex.
        state: an `AttentionCache` in the dtype of the returned cache.
        reset: None or (b, t).
        scale: factor on the scores.
        window: number of steps that each step attends to, including itself; None means all.
        causal: whether steps attend to earlier steps only.
        dropout: probability of dropping an attention weight.
        function: map from scores to weights: "softmax", "laplace", "relu2", or "gates" for softmax of scores
            with decays and phases.
        slopes: None, or for each head of queries the slope of its scores over the distance, (h,).
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
    slopes: Tensor | None = None


def empty_cache(
    batch: int, heads: int, dk: int, dv: int, *, dtype: torch.dtype, device: torch.device | str | None
) -> AttentionCache:
    """Return a cache of zero steps for this number of heads of keys and values."""
    k, v = (torch.zeros(batch, 0, heads, width, dtype=dtype, device=device) for width in (dk, dv))
    return AttentionCache(k, v, None, None, None)


def check_ring(given: Attention) -> None:
    """Raise unless the inputs are a step that the slots of a ring can take."""
    ring, n, fits = given.state, given.state.k.shape[1], given.window in (None, given.state.k.shape[1])
    single = given.k.shape[1] == 1 and given.reset is None and given.causal and not given.dropout
    inference = ring.k.dtype == given.k.dtype and not differentiated(given.q, given.k, given.v)
    if not (single and inference and fits and given.function == "softmax" and ring.alive is not None):
        raise ValueError(
            f"`state` with a `place`, a ring of {n} slots, must be given to `softmax_attention` with a "
            f"single step in {ring.k.dtype}, with `alive`, without gradients, `reset` and dropout, and with "
            f"a `window` of None or {n}; got {given.k.shape[1]} steps in {given.k.dtype} and "
            f"window={given.window}. Pass a cache without `place` for other calls."
        )


def fitted(cache: AttentionCache | None, k: Tensor, v: Tensor, dtype: torch.dtype) -> AttentionCache:
    """Return `cache` in the real `dtype`, empty if it is None; raise if it does not fit `k` and `v`."""
    b, _, h, dk = k.shape
    if cache is None:
        empty = k.new_zeros(b, 0, h, dk), v.new_zeros(b, 0, h, v.shape[-1])
        return converted(AttentionCache(*empty, None, None, None), dtype)
    cure = "Pass the state that an earlier call returned, or None."
    if not isinstance(cache, AttentionCache):
        raise TypeError(f"`state` must be an AttentionCache or None; got {type(cache).__name__}. {cure}")
    check_tensors(cache, _FIELDS, "k", k)
    s = cache.k.shape[1] if cache.k.ndim == 4 else 0
    gates = (b, s, h, 1), (b, s, h, dk)
    shapes = ((b, s, h, dk),), ((b, s, h, v.shape[-1]),), gates, gates, ((b, s),)
    for (_, name, _), tensor, allowed in zip(_FIELDS, cache[:5], shapes, strict=True):
        if tensor is not None and tensor.shape not in allowed:
            raise ValueError(
                f"`{name}` must have shape {' or '.join(map(str, allowed))} to fit `k` and `v`; "
                f"got {tuple(tensor.shape)}. {cure}"
            )
    return converted(cache, dtype)


def converted(cache: AttentionCache, dtype: torch.dtype) -> AttentionCache:
    """Return the cache in a real dtype, or for complex keys in the complex dtype of equal precision."""
    if all(x is None or x.dtype == dtype for x in cache[:4]):
        return cache
    of_complex = torch.promote_types(dtype, torch.complex64)
    return mapped(cache, lambda x: x.to(of_complex if x.is_complex() else dtype))


def mapped(cache: AttentionCache, change: Callable[[Tensor], Tensor]) -> AttentionCache:
    """Return the cache with a function applied to every tensor except `alive`."""
    k, v, log_decay, phase = (None if x is None else change(x) for x in cache[:4])
    return replaced(cache, k=k, v=v, log_decay=log_decay, phase=phase)


def documents_of(past: AttentionCache, reset: Tensor | None, time: int) -> Tensor | None:
    """Return the document numbers of cached and new steps (b, s + t); None if all belong to one document.

    Without resets, the numbers are bool, true if a step is alive. With resets, dead steps have number -1.
    """
    if reset is None:
        return None if past.alive is None else functional.pad(past.alive, (0, time), value=True)
    if past.alive is None:
        return documents(reset, past=past.k.shape[1])
    return torch.cat([past.alive.long() - 1, documents(reset)], dim=1)


def newest(cache: AttentionCache, window: int | None) -> AttentionCache:
    """Return the part of a cache without gates that the window of the next step covers; None keeps all."""
    first = 0 if window is None else max(0, cache.k.shape[1] - (window - 1))
    if first == 0:
        return cache
    # copied, because views would keep the memory of the dropped steps
    alive = None if cache.alive is None else cache.alive[:, first:].clone()
    return AttentionCache(cache.k[:, first:].clone(), cache.v[:, first:].clone(), None, None, alive)


def grown(
    given: Attention, k: Tensor, v: Tensor, gates: Sequence[Tensor | None], documents: Tensor | None
) -> AttentionCache | None:
    """Return the cache after the new steps, restricted to steps that later steps attend to.

    Args:
        given: the inputs.
        k: keys of cached and new steps (b, s + t, g, dk).
        v: values of cached and new steps.
        gates: None, or the sums of log decays and of phases after each step up to the newest.
        documents: document numbers of cached and new steps, from `documents_of`.
    """
    if not given.causal:
        return None
    dtype = given.state.v.dtype
    log_decay = None if gates[0] is None else gates[0].clamp(min=FORGOTTEN)
    phase = None if gates[1] is None else wrapped(gates[1], dtype)
    alive = documents if documents is None or given.reset is None else documents == documents[:, -1:]
    if alive is None and given.function == "gates":
        alive = k.new_ones(k.shape[:2], dtype=torch.bool)
    last = newest(AttentionCache(k, v, log_decay, phase, alive), given.window)
    if given.reset is not None and last.alive is not None:
        # a zero weight would let NaN pass, so set dead steps to zero
        dead = ~last.alive[..., None, None]
        last = mapped(last, lambda x: x.masked_fill(dead, 0))
    return last if v.dtype == dtype else converted(last, dtype)


def matched(given: Attention, cache: AttentionCache) -> Attention:
    """Return the inputs with this cache; a gate that only inputs or cache have gets zeros in the other.

    Complex keys always have phases.
    """
    gates: dict[str, Any] = {}
    sums: dict[str, Any] = {}
    for name, needed in (("log_decay", False), ("phase", given.k.is_complex() or cache.k.is_complex())):
        both = getattr(cache, name), canonical_gate(name, getattr(given, name), given.q)
        if both[0] is None and both[1] is None and not needed:
            continue
        old, new = (cache.v.new_zeros(1, 1, 1, 1) if x is None else wide(x) for x in both)
        # pad a gate without channels to one channel
        old, new = (functional.pad(x, (0, 1)) if x.shape[-1] == 0 else x for x in (old, new))
        (b, t, h, _), d = given.q.shape, max(old.shape[-1], new.shape[-1])
        sums[name], gates[name] = old.expand(b, cache.k.shape[1], h, d), new.expand(b, t, h, d)
    return given._replace(**gates, state=cache._replace(**sums))
