"""Attention by softmax, plain or with data-controlled relative positions, or by other score functions."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

from jaxtyping import Bool, Float, Inexact
from torch import Tensor
from torch.compiler import is_compiling

from linrec.errors import unknown
from linrec.ops.attention.cache import (
    Attention,
    AttentionCache,
    Result,
    check_ring,
    empty_cache,
    fitted,
    matched,
)
from linrec.ops.attention.reference import loop
from linrec.ops.attention.torch import WEIGHERS, attention
from linrec.ops.core.backends import Backend, never
from linrec.ops.core.call import Operator, Space, documented, zeros_of
from linrec.ops.core.checks import check_precision, check_shape, name_of
from linrec.ops.core.precision import accumulation, real_dtype
from linrec.ops.matrix import check_queries_and_keys, check_values
from linrec.rules import positive, typed

__all__ = [
    "OPERATORS",
    "AttentionCache",
    "gate_loop_attention",
    "laplace_attention",
    "softmax_attention",
]


def check_options(window: int | None, dropout: float) -> None:
    """Raise unless `window` is None or at least 1, and `dropout` is in [0, 1)."""
    if window is not None and window < 1:
        raise ValueError(
            f"`window` must be at least 1, which is the step itself, or None for all steps; got {window}."
        )
    if not 0 <= dropout < 1:
        raise ValueError(f"`dropout` must be in [0, 1); got {dropout}.")


def _canonical(given: Attention, functions: Sequence[str]) -> Attention:
    """Check shapes, dtypes and options, and convert the cache: with gates to the accumulation dtype."""
    q, k, v, state, gated = given.q, given.k, given.v, given.state, given.function == "gates"
    grouped = q
    if not gated and q.ndim == k.ndim == 4 and q.shape[2] != (groups := k.shape[2]):
        if groups == 0 or q.shape[2] % groups:
            raise ValueError(
                f"`k` must have as many heads as `q`, {q.shape[2]}, or a number that divides it; got "
                f"{groups}. Consecutive heads of queries share a head of keys."
            )
        grouped = q[:, :, :groups]
    check_queries_and_keys(grouped, k)
    if v.ndim == 4:
        check_shape("v", v, "(b, t, h, dv)", (*k.shape[:3], v.shape[3]), "Pass as many heads as `k` has.")
    check_values(v, grouped)
    if not gated and (q.is_complex() or k.is_complex()):
        name, dtype = ("q", q.dtype) if q.is_complex() else ("k", k.dtype)
        got = f"got {name_of(dtype)}. `gate_loop_attention` takes complex queries and keys."
        raise TypeError(f"`{name}` must be real; {got}")
    check_options(given.window, given.dropout)
    if not is_compiling():
        typed({"scale": float if gated else float | None}, scale=given.scale)
    if given.function == "softmax":
        # torch scales the scores of hidden steps, which are -inf
        positive(scale=given.scale, or_none=True)
    if given.slopes is not None:
        check_shape("slopes", given.slopes, "(h,)", q.shape[2:3], "Pass one slope per head of `q`.")
        check_precision("slopes", given.slopes, q, "q")
    if given.function not in functions:
        raise unknown("`function`", given.function, functions)
    if not given.causal and state is not None:
        raise ValueError(
            f"`state` must be None with `causal=False`; got {type(state).__name__}. Bidirectional attention "
            "cannot run in segments: pass whole sequences, or `causal=True`."
        )
    cache = fitted(state, k, v, accumulation(real_dtype(q.dtype)) if gated else k.dtype)
    if cache.place is not None:
        check_ring(given)
    if gated:
        return matched(given, cache)
    if cache.log_decay is not None or cache.phase is not None:
        raise ValueError(
            "`state` must have neither decays nor phases; got a cache of `gate_loop_attention` with them. "
            "Pass the state that an earlier call of this operator returned, or None."
        )
    scale = 1 / math.sqrt(max(1, q.shape[-1])) if given.scale is None else given.scale
    return given._replace(state=cache, scale=scale)


def _output(given: Attention) -> Space:
    return (*given.q.shape[:3], given.v.shape[-1]), given.v.dtype


def _stepping(run: Callable[[Attention], Result]) -> Callable[[Attention], Result]:
    """Extend a backend, which needs at least one step, to empty time."""

    def stepped(given: Attention) -> Result:
        if given.q.shape[1] > 0:
            return run(given)
        return zeros_of(*_output(given), given), given.state if given.causal else None

    return stepped


def _operator(name: str, functions: Sequence[str], about: str, *, widen: bool = False) -> Operator:
    backends = (
        Backend("attention", "torch", _stepping(attention), about, widen=widen),
        Backend(
            "recurrent",
            "reference",
            _stepping(loop),
            "a loop over time: the oracle, slow",
            auto=never,
            accepts=lambda given: given.state.place is None,
            requires="a `state` without `place`",
        ),
    )
    check = partial(_canonical, functions=functions)
    return Operator(name, Attention, "q", check, _output, "(b, h, dk, dv)", None, backends, empty=empty_cache)


GATE_LOOP = _operator("gate_loop_attention", ["gates"], "all pairs of steps, O(t^2)", widen=True)
# not widened, because the inputs' dtype selects torch's kernel
SOFTMAX = _operator("softmax_attention", ["softmax"], "torch's fused kernels, O(t^2), or O(t window)")
PAIRS = SOFTMAX.pairs
LAPLACE = _operator("laplace_attention", list(WEIGHERS), "all pairs of steps, O(t^2), or O(t window)")
OPERATORS = (GATE_LOOP, SOFTMAX, LAPLACE)


@documented(GATE_LOOP)
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
    """Attend to past steps by scores that decay and rotate with the distance between steps.

        s_nm = scale * Re(sum_c q_nc k_mc prod_{j=m+1..n} a_jc),    a_j = exp(log_decay_j + i phase_j)
        y_n = sum_{m<=n} softmax_m(s_nm) v_m

    The scores are the entries of `gate_loop_matrix`. A decay of zero makes all scores across it zero, but
    softmax still gives these steps a weight; only `reset` hides steps.

    {backends}

    Args:
        q: queries (b, t, h, dk), real or complex, in float32, float64, bfloat16, float16, complex64 or
            complex128.
        k: keys (b, t, h, dk), real or complex, of the precision of `q`.
        v: values (b, t, h, dv), real, of the precision of `q`.
        log_decay: natural logarithm of the magnitude, <= 0: None, (h,), (h, dk), (b, t, h) or (b, t, h, dk);
            a last axis of size 1 broadcasts over the key channels.
        phase: radians per step; shapes and dtypes as for `log_decay`.
        state: the cache that an earlier call returned, or None; it grows by t steps per call.
        reset: (b, t) bool; true at t hides all steps before t from step t and later steps.
        scale: factor on the scores; the paper uses 1, and 1 / sqrt(dk) is usual elsewhere.
        mode: "auto", "recurrent" or "attention".
        backend: "auto", "reference" or "torch".

    Returns:
        y (b, t, h, dv) in the dtype of `v`, and the cache with the new steps.

    Raises:
        TypeError: a dtype is not supported, or dtypes do not match.
        ValueError: shapes do not match, or (mode, backend) is unknown.

    Source:
        Katsch, GateLoop (2023), eq. 22-23, with the real part of complex scores.

    Example:
        With a decay of one half, the score of the previous step is halved, here log 2 against log 4:

        >>> import torch
        >>> q, k, v = torch.full((3, 1, 2, 1, 1), 4.0).log()
        >>> v = torch.tensor([0.0, 1.0]).reshape(1, 2, 1, 1)
        >>> y, cache = gate_loop_attention(q / q, k, v, torch.tensor([0.5]).log())
        >>> y.flatten(), cache.k.shape
        (tensor([0.0000, 0.6667]), torch.Size([1, 2, 1, 1]))
    """
    return GATE_LOOP(Attention(q, k, v, log_decay, phase, state, reset, scale), mode, backend)


@documented(SOFTMAX)
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
    slopes: Float[Tensor, "h"] | None = None,
    mode: str = "auto",
    backend: str = "auto",
) -> tuple[Float[Tensor, "b t h dv"], AttentionCache | None]:
    """Attend to past steps by softmax of scaled query-key products, as in the Transformer.

        y_n = sum_m softmax_m(scale q_n . k_m - slope |n - m|) v_m,    n - window < m <= n

    The sum is over the steps since the last reset. With `causal=False` it is over all steps of the document,
    before and after n, with |n - m| < window.

    {backends}

    The fused kernels are fastest without a mask. They need no mask if only future steps are hidden: without
    resets and windows, and with an empty cache or a single new step. Otherwise they read a bool mask of shape
    (b, t, s + t) with resets, or (t, s + t) without, where s is the number of cached steps. With slopes they
    read biases in the dtype of `q`, of shape (h, t, s + t), or (b, h, t, s + t) with resets.

    Keys and values may have fewer heads than queries: g heads, where g divides h. Then h / g consecutive
    heads of queries share a head of keys, and the cache is h / g times smaller. A single head (g = 1,
    multi-query) is read in place; several heads (grouped queries) are copied.

    Args:
        q: queries (b, t, h, dk) in float32, float64, bfloat16 or float16.
        k: keys (b, t, g, dk), in the dtype of `q`.
        v: values (b, t, g, dv), in the dtype of `q`.
        state: the cache that an earlier call returned, or None; it grows by t steps per call. A ring, with
            `place`, takes a single step, and is written in place.
        reset: (b, t) bool; true at t separates step t and later steps from all steps before t.
        scale: factor on the scores; None means 1 / sqrt(dk).
        window: number of steps that each step attends to, including itself; None means all. The cache then
            holds at most the last window - 1 steps.
        causal: whether steps attend to earlier steps only. If not, there is no state.
        dropout: probability of dropping an attention weight; the other weights are scaled by
            1 / (1 - dropout). It uses torch's global generator, and the random numbers depend on the backend.
        slopes: slope of each head of `q`, (h,), in the dtype of `q` or its accumulation dtype; ALiBi's are in
            `linrec.nn.decays.alibi_slopes`. None is zeros.
        mode: "auto", "recurrent" or "attention".
        backend: "auto", "reference" or "torch".

    Returns:
        y (b, t, h, dv) in the dtype of `v`, and the cache with the new steps, None with `causal=False`. The
        cache has the dtype of the inputs, not the accumulation dtype: keys and values are only read, so no
        error accumulates, and decoding saves memory and time. The first call's cache holds `k` and `v`
        themselves, without a copy.

    Raises:
        TypeError: a dtype is not supported, or dtypes do not match.
        ValueError: shapes do not match; the cache has decays or phases, or is given with `causal=False`;
            `window` or `dropout` is out of range; (mode, backend) is unknown.

    Source:
        Vaswani and others, Attention Is All You Need (2017), eq. 1, with the mask of section 3.2.3; Shazeer,
        Fast Transformer Decoding: One Write-Head is All You Need (2019); Ainslie and others, GQA (2023).
        Slopes: Press, Smith and Lewis, Train Short, Test Long (2022); theirs is causal attention alone.

    Example:
        >>> import torch
        >>> v = torch.tensor([0.0, 3.0, 6.0]).reshape(1, 3, 1, 1)
        >>> y, cache = softmax_attention(0 * v, v, v, window=2)
        >>> y.flatten(), cache.v.flatten()
        (tensor([0.0000, 1.5000, 4.5000]), tensor([6.]))
    """
    given = Attention(q, k, v, None, None, state, reset, scale, window, causal, dropout, "softmax", slopes)
    return SOFTMAX(given, mode, backend)


@documented(LAPLACE)
def laplace_attention(
    q: Float[Tensor, "b t h dk"],
    k: Float[Tensor, "b t g dk"],
    v: Float[Tensor, "b t g dv"],
    *,
    state: AttentionCache | None = None,
    reset: Bool[Tensor, "b t"] | None = None,
    scale: float = 1.0,
    window: int | None = None,
    function: Literal["laplace", "relu2"] = "laplace",
    mode: str = "auto",
    backend: str = "auto",
) -> tuple[Float[Tensor, "b t h dv"], AttentionCache]:
    """Attend to past steps by Laplace's function of the scores, applied to every score independently.

        y_n = sum_m f(scale q_n . k_m) v_m,    n - window < m <= n
        f(s) = (1 + erf((s - mu) / (sigma sqrt(2)))) / 2,    mu = sqrt(1/2), sigma = sqrt(1 / (4 pi))

    f maps to (0, 1). At mu, its value and slope equal those of relu(s)^2, which `function="relu2"` uses
    instead. The sum is over the steps since the last reset, and its weights do not add up to 1.

    {backends}

    Args:
        q: queries (b, t, h, dk) in float32, float64, bfloat16 or float16.
        k: keys (b, t, g, dk), in the dtype of `q`; g divides h, as in `softmax_attention`.
        v: values (b, t, g, dv), in the dtype of `q`.
        state: the cache that an earlier call returned, or None.
        reset: (b, t) bool; true at t hides all steps before t from step t and later steps.
        scale: factor on the scores.
        window: number of steps that each step attends to, including itself; None means all. The cache then
            holds at most the last window - 1 steps.
        function: f, "laplace" or "relu2".
        mode: "auto", "recurrent" or "attention".
        backend: "auto", "reference" or "torch".

    Returns:
        y (b, t, h, dv) in the dtype of `v`, and the cache with the new steps, in the dtype of the inputs.

    Raises:
        TypeError: a dtype is not supported, or dtypes do not match.
        ValueError: shapes do not match; the cache has decays or phases; `window` is out of range; the
            function or (mode, backend) is unknown.

    Source:
        Ma and others, Mega: Moving Average Equipped Gated Attention (2022), its Laplace attention function.

    Example:
        >>> import torch
        >>> v = torch.tensor([1.0, 2.0]).reshape(1, 2, 1, 1)
        >>> y, cache = laplace_attention(0.5**0.5 * torch.ones_like(v), torch.ones_like(v), v)
        >>> y.flatten()
        tensor([0.5000, 1.5000])
    """
    given = Attention(q, k, v, None, None, state, reset, scale, window, function=function)
    return LAPLACE(given, mode, backend)
