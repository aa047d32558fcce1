"""Attention by matrix products, and softmax attention by torch's fused kernels.

With gates, decays and phases between steps are summed by segments. Without gates, softmax attention does not
materialise the matrix of scores. The fused kernels are fastest without a mask, so a mask is made only if it
hides something: after resets, for several new steps after cached steps, and for windows. Causal windows are
processed in blocks, in time and memory linear in the length.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend

from linrec.ops.attention.cache import (
    Attention,
    AttentionCache,
    Result,
    documents_of,
    grown,
    mapped,
    newest,
)
from linrec.ops.core.call import zeros_of
from linrec.ops.core.isolation import Isolation
from linrec.ops.core.kernel import by_autograd, differentiated
from linrec.ops.matrix import segments
from linrec.torch_private import attention_choice, flash_on_cpu, flash_on_cpu_backward, transforms_active
from linrec.trees import replaced

# shorter blocks do not occupy a GPU
SHORTEST_BLOCK = 128
# with these constants, Laplace's function has the value and slope of relu(s)^2 at mu
MU, SIGMA = math.sqrt(1 / 2), math.sqrt(1 / (4 * math.pi))


def laplace(scores: Tensor) -> Tensor:
    """f(s) = (1 + erf((s - mu) / (sigma sqrt(2)))) / 2."""
    # for small f, 1 + erf loses all digits by cancellation, but erfc does not
    return 0.5 * torch.erfc((MU - scores) / (SIGMA * math.sqrt(2)))


WEIGHERS = {"laplace": laplace, "relu2": lambda scores: torch.relu(scores).square()}


def attention(given: Attention) -> Result:
    """y_n = sum_m softmax_m(s_nm) v_m over the visible steps m, or with other weights of the scores s_nm."""
    q, k, v, log_decay, phase, state, reset, _, window, causal, _, function, _ = given
    if state.place is not None:
        return _in_ring(given, state)
    past = newest(state, window)
    steps, time = past.k.shape[1], q.shape[1]
    documents = documents_of(past, reset, time)
    if steps:
        k, v = torch.cat([past.k, k], dim=1), torch.cat([past.v, v], dim=1)
    seen = AttentionCache(k, v, past.log_decay, past.phase, None)
    gates = _heads_first(seen, log_decay, phase, given)
    last = grown(given, k, v, [_summed(*gates[:2]), _summed(*gates[2:])], documents)
    if reset is not None and documents is not None:
        # steps that earlier resets hide are already zero in the cache
        isolation = Isolation(documents)
        q = isolation.enter(q, begin=steps, carried=False)
        seen = mapped(seen, partial(isolation.enter, begin=0))
        log_decay = None if log_decay is None else isolation.enter(log_decay, begin=steps, decays=True)
        phase = None if phase is None else isolation.enter(phase, begin=steps)
        k, v, gates = seen.k, seen.v, _heads_first(seen, log_decay, phase, given)
    if function == "gates":
        y = _attend_gated(q, k, v, gates, _visible(steps, documents, given), given.scale)
    elif causal and window is not None and time > max(window, SHORTEST_BLOCK):
        y = _by_blocks(q, k, v, documents, given)
    elif causal and time > 1 and steps == 0 and documents is None and (window is None or time <= window):
        y = _attend(q, k, v, given, is_causal=True)
    else:
        y = _attend(q, k, v, given, _visible(steps, documents, given))
    return y if reset is None else isolation.leave(y, begin=steps, window=window, causal=causal), last


def _in_ring(given: Attention, ring: Any) -> Result:
    """Write the step in place, and attend to the slots in any order, as keys hold their positions."""
    ring.k.index_copy_(1, ring.place, given.k)
    ring.v.index_copy_(1, ring.place, given.v)
    ring.alive.index_fill_(1, ring.place, True)
    n = ring.k.shape[1]
    distance = (ring.place - torch.arange(n, device=ring.k.device))[None] % n
    y = _attend(given.q, ring.k, ring.v, given, ring.alive[:, None], distance=distance)
    return y, replaced(ring, place=(ring.place + 1) % n)


def _heads_first(seen: AttentionCache, log_decay: Any, phase: Any, given: Attention) -> list[Any]:
    """Return decays and phases of cached and new steps in the layout that `segments` expects."""
    if log_decay is None and phase is None:
        return [None] * 4
    old = [None if gate is None else gate.transpose(1, 2) for gate in seen[2:4]]
    new = segments.gates(log_decay, phase, None, given.k.transpose(1, 2))
    return [old[0], new[0], old[1], new[1]]


def _summed(old: Any, new: Tensor | None) -> Tensor | None:
    """Return sums of a gate after each cached and new step up to the newest step."""
    if new is None:
        return None
    return torch.cat([old + new.sum(-2, keepdim=True), segments.suffix(new)], -2).transpose(1, 2)


def _attend_gated(q: Tensor, k: Tensor, v: Tensor, gates: list[Any], visible: Any, scale: float) -> Tensor:
    """Softmax(M_{-inf}(Re(Qbar Kbar^T))) V   (eq. 22-23), for cached and new keys and values."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    old, new = k.tensor_split([k.shape[2] - q.shape[2]], dim=2)
    decays, log_decay, angles, phase = gates
    scores = segments.matrix(q, new, log_decay, phase)
    if old.shape[2]:
        # split at the newest cached step, so that both exponents are <= 0
        queries = segments.queries(q, segments.prefix(log_decay), segments.prefix(phase))
        scores = torch.cat([queries @ segments.keys(old, decays, angles).mT, scores], dim=-1)
    scores = scale * scores
    if visible is not None:
        scores = scores.masked_fill(~visible[:, None], -math.inf)
    return (torch.softmax(scores, dim=-1) @ v).transpose(1, 2)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    given: Attention,
    visible: Tensor | None = None,
    is_causal: bool = False,
    distance: Tensor | None = None,
) -> Tensor:
    """Attend with queries (b, n, h, dk) to the `visible` (b or 1, n, m) keys (b, m, g, dk).

    `distance` (n, m) of queries and keys is for slopes; None is for queries of the last n of m steps.
    """
    k, v = repeated(k, q), repeated(v, q)
    shape = *q.shape[:3], v.shape[-1]
    if 0 in shape:
        # on CUDA the kernels return no tensor for empty inputs
        return zeros_of(shape, v.dtype, (q, k, v))
    visible = None if visible is None else visible[:, None]
    if given.function == "softmax":
        if q.shape[-1] == 0:
            # the kernels divide by the number of channels, so it must not be zero
            q, k = functional.pad(q, (0, 1)), functional.pad(k, (0, 1))
        if q.device.type == "cuda":
            q, k, v = aligned(q), aligned(k), aligned(v)
        if given.slopes is not None:
            visible, is_causal = _biases(given.slopes, q, k, visible, is_causal, distance), False
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        y = softmax(Softmax(q, k, v, visible, is_causal, given.scale), given.dropout)
        return y.transpose(1, 2)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    # Laplace's function is steep near mu, where scores in half precision are too coarse
    scores = given.scale * (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32))
    weights = WEIGHERS[given.function](scores)
    if is_causal:
        weights = weights.tril()
    elif visible is not None:
        # not a product: its gradient would be NaN where that of hidden weights overflows
        weights = weights.masked_fill(~visible, 0.0)
    return (weights.to(v.dtype) @ v).transpose(1, 2)


def _biases(
    slopes: Tensor,
    q: Tensor,
    k: Tensor,
    visible: Tensor | None,
    is_causal: bool,
    distance: Tensor | None,
) -> Tensor:
    """Return -slope |n - m|, (b or 1, h, n, m) in the dtype of q, and -inf where a key is hidden."""
    (n, m), step = (q.shape[1], k.shape[1]), torch.arange(k.shape[1], device=q.device)
    if distance is None:
        distance = step[m - n :, None] - step
    # products in half precision would be as coarse as their largest number
    slopes = slopes.to(torch.promote_types(slopes.dtype, torch.float32))
    bias = -slopes[:, None, None] * distance.abs()
    if is_causal:
        bias = bias.masked_fill(distance < 0, -math.inf)
    if visible is not None:
        bias = bias.masked_fill(~visible, -math.inf)
    return (bias if bias.ndim == 4 else bias[None]).to(q.dtype)


class Softmax(NamedTuple):
    """Inputs of `softmax`: heads (b, h, t, d), and a mask (b or 1, h or 1, t, s) or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    is_causal: bool
    scale: float


def softmax(given: Softmax, dropout: float) -> Tensor:
    """Run torch's fused attention; on the CPU, without dropout, it has derivatives of every order."""
    q, k, v, mask, is_causal, scale = given
    if q.is_cpu and not dropout and differentiated(*given) and not torch.compiler.is_compiling():
        if transforms_active():
            return _softmax_by_torch(given)[0]
        choice = attention_choice(q, k, v, mask, is_causal=is_causal, scale=scale)
        # the other choice of the CPU is made of torch operations
        if choice == SDPBackend.FLASH_ATTENTION.value:
            y: Tensor = _FlashOnCPU.apply(*given)
            return y
    return functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=is_causal, scale=scale
    )


def _softmax_by_torch(given: Softmax) -> tuple[Tensor]:
    scores = given.scale * (given.q @ given.k.mT).to(torch.promote_types(given.q.dtype, torch.float32))
    if given.is_causal:
        scores = scores.masked_fill(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), -math.inf)
    if given.mask is not None:
        scores = scores + _as_bias(given.mask, scores.dtype)
    return (scores.softmax(-1).to(given.v.dtype) @ given.v,)


def _as_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, -math.inf)


class _FlashOnCPU(torch.autograd.Function):
    """The kernel of the CPU, whose adjoint has no derivative in torch."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, is_causal: bool, scale: float
    ) -> Tensor:
        bias = None if mask is None else _as_bias(mask, q.dtype)
        y, log_sum = flash_on_cpu(q, k, v, is_causal, attn_mask=bias, scale=scale)
        ctx.save_for_backward(q, k, v, bias, y, log_sum)
        ctx.flags = is_causal, scale
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        q, k, v, bias, y, log_sum = ctx.saved_tensors
        is_causal, scale = ctx.flags
        if torch.is_grad_enabled():
            given = Softmax(q, k, v, bias, is_causal, scale)
            return tuple(by_autograd(_softmax_by_torch)(given, None, (dy,), ctx.needs_input_grad))
        saved = (dy, q, k, v, y, log_sum, 0.0, is_causal)
        found = flash_on_cpu_backward(*saved, attn_mask=bias, scale=scale)
        return *found, None, None, None


def repeated(x: Tensor, q: Tensor) -> Tensor:
    """Repeat each head of keys or values (b, s, g, d) h / g times, (b, s, h, d); a view for one head."""
    groups, heads = x.shape[2], q.shape[2]
    if groups == heads:
        return x
    # torch's own support of grouped queries has no masks on some devices, and materialises all scores there
    return x[:, :, :, None].expand(-1, -1, -1, heads // groups, -1).flatten(2, 3)


def aligned(x: Tensor) -> Tensor:
    """Return the tensor, copied if its rows are not aligned to the 16 bytes that torch's kernels load."""
    # a compiler cannot trace the offset, and aligns the tensors that it makes
    offset = 0 if torch.compiler.is_compiling() else x.storage_offset()
    steps = offset, *(() if x.is_contiguous() else x.stride()[:-1])
    is_aligned = all(step * x.element_size() % 16 == 0 for step in steps)
    return x if is_aligned else x.clone(memory_format=torch.contiguous_format)


def _by_blocks(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, given: Attention) -> Tensor:
    """Attend within a window: each block of queries attends to its own and the previous block of keys."""
    batch, time = q.shape[:2]
    steps = k.shape[1] - time
    block = max(given.window or 0, SHORTEST_BLOCK)
    blocks = -(-time // block)
    # an additional block of keys at the front holds the cached steps, after padding
    ends = block - steps, blocks * block - time

    def pairs(x: Tensor) -> Tensor:
        x = x.unflatten(1, (blocks + 1, block))
        return torch.cat([x[:, :-1], x[:, 1:]], dim=2)

    queries = functional.pad(q, (0, 0, 0, 0, 0, ends[1])).unflatten(1, (blocks, block))
    keys, values = (pairs(functional.pad(x, (0, 0, 0, 0, *ends))) for x in (k, v))
    documents = k.new_zeros(1, k.shape[1]) if documents is None else documents
    # padding has a number that no step has, so that padded queries attend only to padding
    documents = functional.pad(documents.long(), ends, value=-2)
    same = documents[:, block:].unflatten(1, (blocks, block))[..., None] == pairs(documents)[:, :, None]
    visible = (same & _in_reach(block, block, given)).expand(batch, -1, -1, -1)
    queries, keys, values, visible = (x.flatten(0, 1) for x in (queries, keys, values, visible))
    y = _attend(queries, keys, values, given, visible)
    return y.unflatten(0, (batch, blocks)).flatten(1, 2)[:, :time]


def _visible(steps: int, documents: Tensor | None, given: Attention) -> Tensor | None:
    """Return which cached and new steps each new step attends to, (b or 1, t, s + t); None means all."""
    same = None if documents is None else documents[:, None]
    if documents is not None and given.reset is not None:
        # without resets, `documents` is true for alive steps
        same = documents[:, None] == documents[:, steps:, None]
    if given.q.shape[1] == 1 or (not given.causal and given.window is None):
        return same
    near = _in_reach(steps, given.q.shape[1], given)[None]
    return near if same is None else near & same


def _in_reach(steps: int, time: int, given: Attention) -> Tensor:
    """Return which of `steps` + `time` steps the last `time` steps attend to, ignoring resets."""
    visible = torch.ones(time, steps + time, dtype=torch.bool, device=given.q.device)
    visible = visible.tril(steps) if given.causal else visible
    reach = given.window
    return visible if reach is None else visible.tril(steps + reach - 1).triu(steps - reach + 1)
