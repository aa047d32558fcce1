"""The generalised delta rule: S_t = (diag(a_t) - w_t r_t^T) S_{t-1} + k_t v_t^T, y_t = S_t^T q_t."""

from jaxtyping import Bool, Float
from torch import Tensor

from linrec.ops.core.backends import Backend, few, never
from linrec.ops.core.call import documented
from linrec.ops.delta_rule import ON_CORES, SMALL_KEYS, check_real, on_cores
from linrec.ops.generalized_delta_rule import triton
from linrec.ops.generalized_delta_rule.reference import generalized_delta_rule_reference
from linrec.ops.generalized_delta_rule.torch import GeneralizedDeltaRule, chunkwise, matrix, recurrent, twin
from linrec.ops.matrix import (
    canonical_gate,
    check_like_queries,
    check_queries_and_keys,
    check_values,
    matrix_operator,
    numba,
)
from linrec.ops.matrix.triton import Steps, steps, steps_entry

__all__ = ["OPERATOR", "generalized_delta_rule"]


def _canonical(given: GeneralizedDeltaRule) -> GeneralizedDeltaRule:
    """Check the inputs, and reshape the decay to four axes."""
    q, k, v, r, w, log_decay, state, _ = given
    check_real("generalized_delta_rule", q=q, k=k, v=v, r=r, w=w, state=state)
    check_queries_and_keys(q, k)
    check_values(v, q)
    for name, x in (("r", r), ("w", w)):
        check_like_queries(name, x, q)
    return given._replace(log_decay=canonical_gate("log_decay", log_decay, q))


def _steps(given: GeneralizedDeltaRule) -> tuple[Tensor, Tensor]:
    q, k, v, r, w, log_decay, state, reset = given
    return steps(Steps(q, k, v, None, log_decay, state, reset, r=r, w=w))[:2]


recurrent_numba = numba.recurrent("generalized_delta_rule_recurrent_numba", twin=twin)
BACKENDS: tuple[Backend[GeneralizedDeltaRule], ...] = (
    steps_entry(_steps, auto=lambda given: given.q.shape[1] <= 1),
    Backend("chunkwise", "triton", triton.chunkwise, ON_CORES, auto=on_cores, widen=False, **SMALL_KEYS),
    Backend("recurrent", "numba", lambda given: recurrent_numba(matrix(given))[:2], numba.ABOUT),
    # for few steps a loop needs fewer operations than a triangular system
    Backend("recurrent", "torch", recurrent, "a loop over time", auto=lambda given: few(given.q.shape[1], 4)),
    Backend(
        "chunkwise", "torch", chunkwise, "a triangular system per chunk (WY representation), then a loop"
    ),
    Backend(
        "recurrent", "reference", generalized_delta_rule_reference,
        "a loop over time: the oracle, slow", auto=never,
    ),
)  # fmt: skip
OPERATOR = matrix_operator("generalized_delta_rule", GeneralizedDeltaRule, _canonical, BACKENDS)
PAIRS = OPERATOR.pairs


@documented(OPERATOR)
def generalized_delta_rule(
    q: Float[Tensor, "b t h dk"],
    k: Float[Tensor, "b t h dk"],
    v: Float[Tensor, "b t h dv"],
    r: Float[Tensor, "b t h dk"],
    w: Float[Tensor, "b t h dk"],
    log_decay: Float[Tensor, "..."] | None = None,
    *,
    state: Float[Tensor, "b h dk dv"] | None = None,
    reset: Bool[Tensor, "b t"] | None = None,
    mode: str = "auto",
    backend: str = "auto",
) -> tuple[Float[Tensor, "b t h dv"], Float[Tensor, "b h dk dv"]]:
    """Run the linear recurrence whose transition is a diagonal matrix plus any matrix of rank one.

        S_t = diag(a_t) S_{t-1} - w_t (r_t^T S_{t-1}) + k_t v_t^T,    a_t = exp(log_decay_t)
        y_t = S_t^T q_t,    S_0 = state

    r_t reads the state before the decay of its step, and w_t erases the value that r_t reads. The transition
    of a head changes at every step; for a model whose matrix is constant, use `linrec.ops.dplr_ssm`. These
    models are cases:

    | model | r | w | k | v |
    |---|---|---|---|---|
    | RWKV-7, kappa of norm 1, rates eta | kappa | eta kappa | k | v |
    | Gated DeltaNet-2, erase gate b, write gate g | a b k | k | k | g v |
    | Comba, feedback key p | beta a p | k | k | beta v |
    | preconditioned DeltaNet, preconditioner m | a k | beta m k | beta m k | v |
    | Gated DeltaNet, Kimi Delta Attention | beta a k | k | k | beta v |

    `linrec.ops.delta_rule` runs the last row in half the time.

    | `log_decay` | one value per |
    |---|---|
    | None | - (nothing decays) |
    | (h,) | head |
    | (h, dk) | head and key channel |
    | (b, t, h) | step and head |
    | (b, t, h, dk) | step, head and key channel |

    A last axis of size 1, as in (h, 1) and (b, t, h, 1), broadcasts over the key channels.

    {backends}

    `"auto"` uses the first entry that supports the call; an explicit mode or backend is used or refused. A
    decay of exactly zero, log_decay = -inf, is exact in every mode.

    Args:
        q: queries (b, t, h, dk), real, in float32, float64, bfloat16 or float16.
        k: keys (b, t, h, dk), in the dtype of `q`.
        v: values (b, t, h, dv), in the dtype of `q`.
        r: vectors that read the erased values (b, t, h, dk), in the dtype of `q`.
        w: vectors under which the values are erased (b, t, h, dk), in the dtype of `q`. The state stays
            bounded if w is r or a times r, scaled by a factor per channel >= 0 with r^T w <= 2; vectors of
            unrelated directions can let it grow without bounds.
        log_decay: natural logarithm of a, <= 0; None, or a shape of the table, in the dtype of `q`, or in
            float32 with half-precision inputs.
        state: S_0 (b, h, dk, dv), in any precision; None means zeros.
        reset: (b, t) bool; true at t clears the state before step t, at t = 0 the initial state.
        mode: "auto", "recurrent" or "chunkwise".
        backend: "auto", "reference", "torch", "numba" or "triton".

    Returns:
        y (b, t, h, dv) in the dtype of `v`, and S_t (b, h, dk, dv) in float32 (float64 for double inputs).
        For zero steps S_t is S_0. With half-precision inputs, (chunkwise, triton) rounds the factors of its
        products to that precision. The error of S_t is then up to 1% of its largest value in bfloat16, and
        0.1% in float16; it is larger if consecutive r and w are nearly parallel.

    Raises:
        TypeError: an input is complex, a dtype is not supported, or dtypes do not match.
        ValueError: shapes do not match; (mode, backend) is unknown, or does not support the size of the keys.

    Source:
        Peng and others, RWKV-7 Goose with Expressive Dynamic State Evolution (2025), whose state is the
        transpose of S; the chunkwise form follows Yang, Wang, Zhang, Shen and Kim, Parallelizing Linear
        Transformers with the Delta Rule over Sequence Length (2024).

    Example:
        The second step moves half of the value that is stored under the first key to the second key:

        >>> import torch
        >>> e = torch.eye(2).reshape(1, 2, 1, 2)
        >>> first = torch.tensor([1.0, 0.0])
        >>> r = w = torch.stack([0 * first, first]).reshape(1, 2, 1, 2)
        >>> v = torch.tensor([4.0, 2.0]).reshape(1, 2, 1, 1)
        >>> y, state = generalized_delta_rule(e, e, v, r, w / 2)
        >>> y.flatten().tolist(), state.flatten().tolist()
        ([4.0, 2.0], [2.0, 2.0])
    """
    return OPERATOR(GeneralizedDeltaRule(q, k, v, r, w, log_decay, state, reset), mode, backend)
