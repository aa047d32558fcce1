"""Attention: by softmax, plain and with data-controlled relative positions, and by weights of scores."""

import math
from collections.abc import Callable

from jaxtyping import Bool, Float, Inexact
from torch import Tensor, autocast

from linrec.errors import unknown
from linrec.ops.attention import laplace, softmax, softmax_reference
from linrec.ops.attention.cache import AttentionCache, canonical, matched
from linrec.ops.attention.reference import attention_reference
from linrec.ops.attention.torch import attention
from linrec.ops.core.checks import check_reset
from linrec.ops.core.handlers import refuse_split_time
from linrec.ops.dispatch import Pair, resolve
from linrec.ops.gate_loop import inputs
from linrec.ops.precision import accumulation, real_dtype, widened

__all__ = ["PAIRS", "AttentionCache", "gate_loop_attention", "laplace_attention", "softmax_attention"]

_RUN = {
    ("recurrent", "reference"): attention_reference,
    ("attention", "torch"): attention,
}
_RUN_CAUSAL: dict[Pair, Callable[..., tuple[Tensor, AttentionCache]]] = {
    ("recurrent", "reference"): softmax_reference.causal_reference,
    ("attention", "torch"): softmax.causal,
}
_RUN_BIDIRECTIONAL = {
    ("recurrent", "reference"): softmax_reference.bidirectional_reference,
    ("attention", "torch"): softmax.bidirectional,
}
_RUN_LAPLACE = {
    ("recurrent", "reference"): laplace.causal_reference,
    ("attention", "torch"): laplace.causal,
}

# of all three operators
PAIRS: tuple[Pair, ...] = tuple(_RUN)


def gate_loop_attention(
    q: Inexact[Tensor, "b t h dk"],
    k: Inexact[Tensor, "b t h dk"],
    v: Float[Tensor, "b t h dv"],
    log_decay: Float[Tensor, "..."] | None = None,
    phase: Float[Tensor, "..."] | None = None,
    *,
    state: AttentionCache | None = None,
    reset: Bool[Tensor, "b t"] | None = None,
    scale: float = 1.0,
    mode: str = "auto",
    backend: str = "auto",
) -> tuple[Float[Tensor, "b t h dv"], AttentionCache]:
    """Attend to past steps by scores that decay and turn on the way.

        s_nm = scale * Re(sum_c q_nc k_mc prod_{j=m+1..n} a_jc),    a_j = exp(log_decay_j + i phase_j)
        y_n = sum_{m<=n} softmax_m(s_nm) v_m

    The scores are the entries of `gate_loop_matrix`. A magnitude of zero makes the scores across it zero,
    which softmax still gives a share; only `reset` hides steps.

    | mode | backend | what it is |
    |---|---|---|
    | recurrent | reference | a loop over time: the oracle, slow |
    | attention | torch | all pairs of steps, O(t^2); the choice of "auto" |

    Args:
        q: queries (b, t, h, dk), real or complex, in float32, float64, bfloat16, float16, complex64 or
            complex128.
        k: keys (b, t, h, dk), real or complex, of the precision of `q`.
        v: values (b, t, h, dv), real, of the precision of `q`.
        log_decay: natural logarithm of the magnitude, <= 0: None, (h,), (h, dk), (b, t, h) or (b, t, h, dk);
            a last axis of size 1 broadcasts over the key channels.
        phase: radians per step; shapes and dtypes as for `log_decay`.
        state: the cache that an earlier call returned, or None; it grows by t steps per call.
        reset: (b, t) bool; true at t hides all steps before t from step t on.
        scale: factor of the scores; the paper has none. 1 / sqrt(dk) is usual elsewhere.
        mode: "auto", "recurrent" or "attention".
        backend: "auto", "reference" or "torch".

    Returns:
        y (b, t, h, dv) in the dtype of `v`, and the cache with the new steps.

    Raises:
        TypeError: dtypes that are not supported or do not fit together.
        ValueError: shapes that do not fit together; an unknown (mode, backend).

    Source:
        Katsch, GateLoop (2023), eq. 22-23, with the real part of complex scores.

    Example:
        With a decay of one half the step before scores half as much, here log 2 against log 4:

        >>> import torch
        >>> q, k, v = torch.full((3, 1, 2, 1, 1), 4.0).log()
        >>> v = torch.tensor([0.0, 1.0]).reshape(1, 2, 1, 1)
        >>> y, cache = gate_loop_attention(q / q, k, v, torch.tensor([0.5]).log())
        >>> y.flatten(), cache.k.shape
        (tensor([0.0000, 0.6667]), torch.Size([1, 2, 1, 1]))
    """
    inputs.check_queries_and_keys(q, k)
    inputs.check_values(v, q)
    check_reset(reset, q)
    pair = resolve("gate_loop_attention", PAIRS, mode, backend, [("attention", "torch")])
    refuse_split_time("gate_loop_attention")
    log_decay, phase = widened(
        inputs.canonical_gate("log_decay", log_decay, q), inputs.canonical_gate("phase", phase, q)
    )
    cache = canonical(state, k, v, accumulation(real_dtype(q.dtype)))
    if q.shape[1] == 0:
        return v.clone(), cache
    steps = cache.k.shape[1]
    if log_decay is not None or cache.log_decay is not None:
        log_decay, decays = matched(log_decay, cache.log_decay, q, steps)
        cache = cache._replace(log_decay=decays)
    if phase is not None or cache.phase is not None or k.is_complex() or cache.k.is_complex():
        phase, phases = matched(phase, cache.phase, q, steps)
        cache = cache._replace(phase=phases)
    wide_q, wide_k, wide_v = (x.to(accumulation(x.dtype)) for x in (q, k, v))
    # accumulation stays in float32 where the caller's matrix products do not
    with autocast(q.device.type, enabled=False):
        y, cache = _RUN[pair](wide_q, wide_k, wide_v, log_decay, phase, cache, reset, scale)
    return y.to(v.dtype), cache


def softmax_attention(
    q: Float[Tensor, "b t h dk"],
    k: Float[Tensor, "b t g dk"],
    v: Float[Tensor, "b t g dv"],
    *,
    state: AttentionCache | None = None,
    reset: Bool[Tensor, "b t"] | None = None,
    scale: float | None = None,
    window: int | None = None,
    causal: bool = True,
    dropout: float = 0.0,
    mode: str = "auto",
    backend: str = "auto",
) -> tuple[Float[Tensor, "b t h dv"], AttentionCache | None]:
    """Attend to past steps by scores of queries and keys alone: the attention of the Transformer.

        y_n = sum_m softmax_m(scale q_n . k_m) v_m,    n - window < m <= n

    The sum is over the steps since the last reset. With `causal=False` it is over those of the whole
    document, before and after n, with |n - m| < window.

    | mode | backend | what it is |
    |---|---|---|
    | recurrent | reference | a loop over time: the oracle, slow |
    | attention | torch | torch's fused kernels, O(t^2), or O(t window) with one; the choice of "auto" |

    The fused kernels are fastest without a mask. They have none where no step is hidden but the future ones:
    without resets and windows, from an empty cache or for a single new step. Elsewhere they read a mask,
    (b, t, s + t) bool with resets and (t, s + t) without, s being the cached steps.

    With fewer heads of keys and values than of queries, g that divides h, h / g neighbouring queries attend
    to the same keys: the cache is h / g times smaller. They read one head in place (g = 1, multi-query) and
    copies of several (grouped queries).

    Args:
        q: queries (b, t, h, dk) in float32, float64, bfloat16 or float16.
        k: keys (b, t, g, dk), in the dtype of `q`.
        v: values (b, t, g, dv), in the dtype of `q`.
        state: the cache that an earlier call returned, or None; it grows by t steps per call.
        reset: (b, t) bool; true at t cuts the sequence before step t: neither side sees the other.
        scale: factor of the scores; None is 1 / sqrt(dk).
        window: steps that each step sees, its own included; None is all. The cache then has the last
            window - 1 steps and grows no further.
        causal: whether steps see the past alone. Without, there is no state.
        dropout: probability that a share is dropped, the others then growing by 1 / (1 - dropout). Drawn from
            torch's global generator; pairs differ in what they draw.
        mode: "auto", "recurrent" or "attention".
        backend: "auto", "reference" or "torch".

    Returns:
        y (b, t, h, dv) in the dtype of `v`, and the cache with the new steps, None with `causal=False`. The
        cache is in the dtype of the inputs and not the accumulation's: keys and values are only read, so
        nothing adds up, and memory and time of decoding are theirs. The first is `k` and `v` themselves, not
        a copy.

    Raises:
        TypeError: dtypes that are not supported or do not fit together.
        ValueError: shapes that do not fit together; a cache with decays or phases, or any with
            `causal=False`; `window` or `dropout` out of range; an unknown (mode, backend).

    Source:
        Vaswani and others, Attention Is All You Need (2017), eq. 1, with the mask of section 3.2.3; Shazeer,
        Fast Transformer Decoding: One Write-Head is All You Need (2019); Ainslie and others, GQA (2023).

    Example:
        >>> import torch
        >>> v = torch.tensor([0.0, 3.0, 6.0]).reshape(1, 3, 1, 1)
        >>> y, cache = softmax_attention(0 * v, v, v, window=2)
        >>> y.flatten(), cache.v.flatten()
        (tensor([0.0000, 1.5000, 4.5000]), tensor([6.]))
    """
    _check(q, k, v, reset)
    softmax.check_options(window, dropout)
    if not causal and state is not None:
        raise ValueError(
            f"`state` must be None with `causal=False`; got {type(state).__name__}. Steps that see the "
            "future cannot be run in pieces: pass whole sequences, or `causal=True`."
        )
    pair = resolve("softmax_attention", PAIRS, mode, backend, [("attention", "torch")])
    refuse_split_time("softmax_attention")
    cache = _plain_cache("softmax_attention", state, k, v)
    if q.shape[1] == 0:
        return softmax.repeated(v, q).clone(), cache if causal else None
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    # the inputs' dtype decides, and not the caller's matrix products
    with autocast(q.device.type, enabled=False):
        if causal:
            return _RUN_CAUSAL[pair](q, k, v, cache, reset, scale, window, dropout)
        return _RUN_BIDIRECTIONAL[pair](q, k, v, reset, scale, window, dropout), None


def laplace_attention(
    q: Float[Tensor, "b t h dk"],
    k: Float[Tensor, "b t g dk"],
    v: Float[Tensor, "b t g dv"],
    *,
    state: AttentionCache | None = None,
    reset: Bool[Tensor, "b t"] | None = None,
    scale: float = 1.0,
    window: int | None = None,
    function: laplace.Weigher = "laplace",
    mode: str = "auto",
    backend: str = "auto",
) -> tuple[Float[Tensor, "b t h dv"], AttentionCache]:
    """Attend to past steps by Laplace's function of the scores, each apart from the others.

        y_n = sum_m f(scale q_n . k_m) v_m,    n - window < m <= n
        f(s) = (1 + erf((s - mu) / (sigma sqrt(2)))) / 2,    mu = sqrt(1/2), sigma = sqrt(1 / (4 pi))

    f is in (0, 1), and has the value and slope of relu(s)^2 at mu, which `function="relu2"` has in its place.
    The sum is over the steps since the last reset, and its weights do not add up to one.

    | mode | backend | what it is |
    |---|---|---|
    | recurrent | reference | a loop over time: the oracle, slow |
    | attention | torch | all pairs of steps, O(t^2), or O(t window) with one; the choice of "auto" |

    Args:
        q: queries (b, t, h, dk) in float32, float64, bfloat16 or float16.
        k: keys (b, t, g, dk), in the dtype of `q`; g divides h, as in `softmax_attention`.
        v: values (b, t, g, dv), in the dtype of `q`.
        state: the cache that an earlier call returned, or None.
        reset: (b, t) bool; true at t hides all steps before t from step t on.
        scale: factor of the scores.
        window: steps that each step sees, its own included; None is all. The cache then has the last
            window - 1 steps and grows no further.
        function: f, "laplace" or "relu2".
        mode: "auto", "recurrent" or "attention".
        backend: "auto", "reference" or "torch".

    Returns:
        y (b, t, h, dv) in the dtype of `v`, and the cache with the new steps, in that of the inputs.

    Raises:
        TypeError: dtypes that are not supported or do not fit together.
        ValueError: shapes that do not fit together; a cache with decays or phases; `window` out of range; an
            unknown function or (mode, backend).

    Source:
        Ma and others, Mega: Moving Average Equipped Gated Attention (2022), its Laplace attention function.

    Example:
        >>> import torch
        >>> v = torch.tensor([1.0, 2.0]).reshape(1, 2, 1, 1)
        >>> y, cache = laplace_attention(0.5**0.5 * torch.ones_like(v), torch.ones_like(v), v)
        >>> y.flatten()
        tensor([0.5000, 1.5000])
    """
    _check(q, k, v, reset)
    softmax.check_options(window, 0.0)
    if function not in laplace.WEIGHERS:
        raise unknown("`function`", function, list(laplace.WEIGHERS))
    pair = resolve("laplace_attention", PAIRS, mode, backend, [("attention", "torch")])
    refuse_split_time("laplace_attention")
    cache = _plain_cache("laplace_attention", state, k, v)
    if q.shape[1] == 0:
        return softmax.repeated(v, q).clone(), cache
    with autocast(q.device.type, enabled=False):
        return _RUN_LAPLACE[pair](q, k, v, cache, reset, scale, window, function)


def _check(q: Tensor, k: Tensor, v: Tensor, reset: Tensor | None) -> None:
    """Raise unless queries and keys are real and all shapes and dtypes fit."""
    grouped = softmax.of_groups(q, k, v)
    inputs.check_queries_and_keys(grouped, k)
    inputs.check_values(v, grouped)
    check_reset(reset, q)
    for letter, tensor in (("q", q), ("k", k)):
        if tensor.is_complex():
            raise TypeError(
                f"`{letter}` must be real; got {str(tensor.dtype).removeprefix('torch.')}. "
                "`gate_loop_attention` takes complex queries and keys."
            )


def _plain_cache(name: str, state: AttentionCache | None, k: Tensor, v: Tensor) -> AttentionCache:
    """The cache in the dtype of `k`; raise where it has decays or phases."""
    cache = canonical(state, k, v, k.dtype)
    if cache.log_decay is not None or cache.phase is not None:
        raise ValueError(
            "`state` must have neither decays nor phases; got a cache of `gate_loop_attention`, which has. "
            f"Pass the state that an earlier call of `{name}` returned, or None."
        )
    return cache
