"""Softmax attention with data-controlled relative positions."""

from jaxtyping import Bool, Float, Inexact
from torch import Tensor, autocast

from linrec.ops.attention.cache import AttentionCache, canonical, empty, matched
from linrec.ops.attention.reference import attention_reference
from linrec.ops.attention.torch import attention
from linrec.ops.dispatch import Pair, resolve
from linrec.ops.gate_loop import inputs

__all__ = ["PAIRS", "AttentionCache", "gate_loop_attention"]

_RUN = {
    ("recurrent", "reference"): attention_reference,
    ("attention", "torch"): attention,
}

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
        log_decay: natural logarithm of the magnitude, <= 0: None, (h,), (h, dk), (b, t, h) or (b, t, h, dk).
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
    inputs.check_reset(reset, q)
    pair = resolve("gate_loop_attention", PAIRS, mode, backend, [("attention", "torch")])
    log_decay, phase = inputs.widened(
        inputs.canonical_gate("log_decay", log_decay, q), inputs.canonical_gate("phase", phase, q)
    )
    cache = empty(q, k, v) if state is None else canonical(state, q, v)
    if q.shape[1] == 0:
        return v.clone(), cache
    steps = cache.k.shape[1]
    if log_decay is not None or cache.log_decay is not None:
        log_decay, decays = matched(log_decay, cache.log_decay, q, steps)
        cache = cache._replace(log_decay=decays)
    if phase is not None or cache.phase is not None or k.is_complex() or cache.k.is_complex():
        phase, phases = matched(phase, cache.phase, q, steps)
        cache = cache._replace(phase=phases)
    wide_q, wide_k, wide_v = (x.to(inputs.accumulation(x.dtype)) for x in (q, k, v))
    # accumulation stays in float32 where the caller's matrix products do not
    with autocast(q.device.type, enabled=False):
        y, cache = _RUN[pair](wide_q, wide_k, wide_v, log_decay, phase, cache, reset, scale)
    return y.to(v.dtype), cache
