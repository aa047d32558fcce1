"""The delta rule: S_t = (I - beta_t k_t k_t^T) diag(a_t) S_{t-1} + beta_t k_t v_t^T, y_t = S_t^T q_t."""

from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor, aminmax, float64

from linrec.ops.core.backends import Backend, few, never
from linrec.ops.core.call import documented
from linrec.ops.core.checks import check_precision, check_shape, name_of, visible
from linrec.ops.delta_rule import triton
from linrec.ops.delta_rule.reference import delta_rule_reference
from linrec.ops.delta_rule.torch import DeltaRule, chunkwise, recurrent, twin
from linrec.ops.matrix import (
    Matrix,
    canonical_gate,
    check_queries_and_keys,
    check_values,
    matrix_operator,
    numba,
)
from linrec.ops.matrix.triton import Steps, steps, steps_entry

__all__ = ["OPERATOR", "delta_rule"]


def _canonical(given: DeltaRule) -> DeltaRule:
    """Check the inputs, and reshape the decay to four axes."""
    q, k, v, beta, log_decay, state, reset = given
    check_real("delta_rule", q=q, k=k, v=v, state=state)
    check_queries_and_keys(q, k)
    check_values(v, q)
    check_shape("beta", beta, "(b, t, h)", q.shape[:3], "Pass one value per step and head.")
    check_precision("beta", beta, q, "q")
    if beta.numel() and visible(beta):
        low, high = (float(x) for x in aminmax(beta.detach()))
        if low < 0 or high > 2:
            raise ValueError(
                f"`beta` must be in [0, 2]; got values from {low:.4g} to {high:.4g}. "
                "Pass `sigmoid(...)`, or `2 * sigmoid(...)` for transitions with negative eigenvalues."
            )
    return DeltaRule(q, k, v, beta, canonical_gate("log_decay", log_decay, q), state, reset)


def check_real(operator: str, **inputs: Tensor | None) -> None:
    """Raise TypeError if an input is complex."""
    for name, x in inputs.items():
        if x is not None and x.is_complex():
            cure = "Pass both parts as channels, or use `gate_loop`, which takes complex q and k."
            raise TypeError(f"`{name}` of `{operator}` must be real; got {name_of(x.dtype)}. {cure}")


def on_cores(given: Any) -> bool:
    """Return whether the chunkwise kernels are the fastest."""
    # these kernels have no tensor-core products in float64, but torch has
    return given.q.shape[1] > 1 and given.q.dtype != float64


ON_CORES = "as by torch, on tensor cores; keys of up to 512 channels"
SMALL_KEYS: Any = {
    "accepts": lambda given: given.q.shape[-1] <= triton.LARGEST,
    "requires": f"keys of at most {triton.LARGEST} channels",
}
recurrent_numba = numba.recurrent("delta_rule_recurrent_numba", twin=twin)
BACKENDS: tuple[Backend[DeltaRule], ...] = (
    steps_entry(lambda given: steps(Steps(*given))[:2], auto=lambda given: given.q.shape[1] <= 1),
    Backend("chunkwise", "triton", triton.chunkwise, ON_CORES, auto=on_cores, widen=False, **SMALL_KEYS),
    Backend("recurrent", "numba", lambda given: recurrent_numba(Matrix(*given))[:2], numba.ABOUT),
    # for few steps a loop needs fewer operations than a triangular system
    Backend("recurrent", "torch", recurrent, "a loop over time", auto=lambda given: few(given.q.shape[1], 4)),
    Backend(
        "chunkwise", "torch", chunkwise, "a triangular system per chunk (WY representation), then a loop"
    ),
    Backend("recurrent", "reference", delta_rule_reference, "a loop over time: the oracle, slow", auto=never),
)
OPERATOR = matrix_operator("delta_rule", DeltaRule, _canonical, BACKENDS)
PAIRS = OPERATOR.pairs


@documented(OPERATOR)
def delta_rule(
    q: Float[Tensor, "b t h dk"],
    k: Float[Tensor, "b t h dk"],
    v: Float[Tensor, "b t h dv"],
    beta: Float[Tensor, "b t h"],
    log_decay: Float[Tensor, "..."] | None = None,
    *,
    state: Float[Tensor, "b h dk dv"] | None = None,
    reset: Bool[Tensor, "b t"] | None = None,
    mode: str = "auto",
    backend: str = "auto",
) -> tuple[Float[Tensor, "b t h dv"], Float[Tensor, "b h dk dv"]]:
    """Run the linear recurrence that moves the value stored under each key towards a new value.

        S_t = (I - beta_t k_t k_t^T) diag(a_t) S_{t-1} + beta_t k_t v_t^T,    a_t = exp(log_decay_t)
        y_t = S_t^T q_t,    S_0 = state

    For keys of norm 1, reading S_t with the query k_t returns (1 - beta_t) times the old value plus beta_t
    v_t. beta = 0 leaves the state unchanged, and beta = 1 replaces the value. For beta in (1, 2) the
    transition has the negative eigenvalue 1 - beta_t. Keys are not normalised here: if beta_t |k_t|^2 > 2,
    the state grows without bounds.

    | `log_decay` | known as | one value per |
    |---|---|---|
    | None | DeltaNet | - (nothing decays) |
    | (h,) | | head |
    | (h, dk) | | head and key channel |
    | (b, t, h) | Gated DeltaNet | step and head |
    | (b, t, h, dk) | Kimi Delta Attention | step, head and key channel |

    A last axis of size 1, as in (h, 1) and (b, t, h, 1), broadcasts over the key channels.

    {backends}

    `"auto"` uses the first entry that supports the call; an explicit mode or backend is used or refused. A
    decay of exactly zero, log_decay = -inf, is exact in every mode.

    Args:
        q: queries (b, t, h, dk), real, in float32, float64, bfloat16 or float16.
        k: keys (b, t, h, dk), in the dtype of `q`.
        v: values (b, t, h, dv), in the dtype of `q`.
        beta: writing strengths (b, t, h), in [0, 2], in the dtype of `q`, or in float32 with half-precision
            inputs. Values out of range raise an error on the CPU. They are not checked on other devices or
            under torch.compile, where reading them would wait for the device.
        log_decay: natural logarithm of a, <= 0; None, or a shape of the table; dtypes as for `beta`.
        state: S_0 (b, h, dk, dv), in any precision; None means zeros.
        reset: (b, t) bool; true at t clears the state before step t, at t = 0 the initial state.
        mode: "auto", "recurrent" or "chunkwise".
        backend: "auto", "reference", "torch", "numba" or "triton".

    Returns:
        y (b, t, h, dv) in the dtype of `v`, and S_t (b, h, dk, dv) in float32 (float64 for double inputs).
        For zero steps S_t is S_0. With half-precision inputs, (chunkwise, triton) rounds the factors of its
        products to that precision. The error of S_t is then up to 1% of its largest value in bfloat16, and
        0.1% in float16; it is larger if consecutive keys are nearly parallel.

    Raises:
        TypeError: an input is complex, a dtype is not supported, or dtypes do not match.
        ValueError: shapes do not match; `beta` is out of range; (mode, backend) is unknown, or does not
            support the size of the keys.

    Source:
        Schlag, Irie and Schmidhuber, Linear Transformers Are Secretly Fast Weight Programmers (2021); Yang,
        Wang, Zhang, Shen and Kim, Parallelizing Linear Transformers with the Delta Rule over Sequence Length
        (2024); with decay, Yang, Kautz and Hatamizadeh, Gated Delta Networks (2025). The papers write the
        transpose of S. beta above 1: Grazzi and others, Unlocking State-Tracking in Linear RNNs Through
        Negative Eigenvalues (2025).

    Example:
        The second step halves the value that the first step wrote under the same key, and adds half of its
        own:

        >>> import torch
        >>> k = torch.ones(1, 2, 1, 1)
        >>> v = torch.tensor([4.0, 8.0]).reshape(1, 2, 1, 1)
        >>> beta = torch.tensor([1.0, 0.5]).reshape(1, 2, 1)
        >>> y, state = delta_rule(k, k, v, beta)
        >>> y.flatten().tolist(), state.flatten().tolist()
        ([4.0, 6.0], [6.0])
    """
    return OPERATOR(DeltaRule(q, k, v, beta, log_decay, state, reset), mode, backend)
