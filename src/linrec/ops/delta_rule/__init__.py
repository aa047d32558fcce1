"""The delta rule: S_t = (I - beta_t k_t k_t^T) diag(a_t) S_{t-1} + beta_t k_t v_t^T, y_t = S_t^T q_t."""

from collections.abc import Callable

from jaxtyping import Bool, Float
from torch import Tensor, float64

from linrec.ops import matrix_numba, matrix_triton
from linrec.ops.core.handlers import refuse_split_time
from linrec.ops.delta_rule import chunkwise_triton
from linrec.ops.delta_rule.auto import LARGEST, PAIRS, auto_delta_rule
from linrec.ops.delta_rule.chunkwise import chunkwise
from linrec.ops.delta_rule.inputs import check_beta, check_real
from linrec.ops.delta_rule.reference import delta_rule_reference
from linrec.ops.delta_rule.torch import recurrent
from linrec.ops.dispatch import Pair, exporting, numba_usable, refusal, resolve, triton_usable
from linrec.ops.gate_loop import inputs
from linrec.ops.precision import widened, without_autocast

__all__ = ["PAIRS", "delta_rule"]

_RUN: dict[Pair, Callable[..., tuple[Tensor, Tensor]]] = {
    ("recurrent", "reference"): delta_rule_reference,
    ("recurrent", "torch"): recurrent,
    ("recurrent", "numba"): matrix_numba.recurrent,
    ("chunkwise", "torch"): chunkwise,
    ("chunkwise", "triton"): chunkwise_triton.chunkwise,
    ("recurrent", "triton"): matrix_triton.recurrent,
}


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
    """Run the linear recurrence that moves what a state holds under a key towards a value.

        S_t = (I - beta_t k_t k_t^T) diag(a_t) S_{t-1} + beta_t k_t v_t^T,    a_t = exp(log_decay_t)
        y_t = S_t^T q_t,    S_0 = state

    With keys of norm 1, a query of k_t finds (1 - beta_t) of what it found before and beta_t v_t: nothing
    changes with beta = 0, the value is replaced with beta = 1, and with beta in (1, 2) the transition has a
    negative eigenvalue, 1 - beta_t. Keys are used as they are: where beta_t |k_t|^2 > 2 the state grows
    without bounds, so normalise them.

    | `log_decay` | known as | one value per |
    |---|---|---|
    | None | DeltaNet | - (nothing decays) |
    | (h,) | | head |
    | (h, dk) | | head and key channel |
    | (b, t, h) | Gated DeltaNet | step and head |
    | (b, t, h, dk) | Kimi Delta Attention | step, head and key channel |

    A last axis of size 1, as in (h, 1) and (b, t, h, 1), broadcasts over the key channels.

    | mode | backend | what it is |
    |---|---|---|
    | recurrent | reference | a loop over time: the oracle, slow |
    | recurrent | torch | a loop over time; no memory per step where no gradient is asked for |
    | recurrent | numba | the same, with the states in the caches of CPU threads |
    | recurrent | triton | the same in one kernel; where a gradient is asked for, the loop in torch |
    | chunkwise | torch, triton | a triangular system per chunk (WY representation), the recurrence between |

    (chunkwise, triton) takes keys of up to 256 channels, of up to 128 where each channel decays for itself in
    single precision. `"auto"` takes Numba on the CPU, Triton on CUDA, and elsewhere the loop for a few steps
    and chunks else (the table is at `linrec.ops.delta_rule.auto.auto_delta_rule`); what is given explicitly
    is obeyed or refused. A decay of exactly zero, log_decay = -inf, is exact in every mode.

    Args:
        q: queries (b, t, h, dk), real, in float32, float64, bfloat16 or float16.
        k: keys (b, t, h, dk), in the dtype of `q`.
        v: values (b, t, h, dv), in the dtype of `q`.
        beta: writing strengths (b, t, h), in [0, 2], in the dtype of `q`, or in float32 beside inputs in half
            precision. Values out of range are an error on the CPU; elsewhere, and under torch.compile, where
            looking would mean waiting, they are not looked at.
        log_decay: natural logarithm of a, <= 0; None, or a shape of the table; dtypes as for `beta`.
        state: S_0 (b, h, dk, dv), in any precision; None means zeros.
        reset: (b, t) bool; true at t clears the state before step t, at t = 0 the initial one.
        mode: "auto", "recurrent" or "chunkwise".
        backend: "auto", "reference", "torch", "numba" or "triton".

    Returns:
        y (b, t, h, dv) in the dtype of `v`, and S_t (b, h, dk, dv) in float32 (float64 for double inputs).
        For zero-length time S_t is S_0. For inputs in half precision, (chunkwise, triton) rounds the factors
        of its products to the inputs' dtype: S_t is off by up to 1% of its largest value in bfloat16, and by
        0.1% in float16, more where keys of nearly the same direction follow each other.

    Raises:
        TypeError: complex inputs; dtypes that are not supported or do not fit together.
        ValueError: shapes that do not fit together; `beta` out of range; an unknown (mode, backend), or one
            that does not take the size of the keys; a call within `time_parallel`.

    Source:
        Schlag, Irie and Schmidhuber, Linear Transformers Are Secretly Fast Weight Programmers (2021); Yang,
        Wang, Zhang, Shen and Kim, Parallelizing Linear Transformers with the Delta Rule over Sequence Length
        (2024); with decay, Yang, Kautz and Hatamizadeh, Gated Delta Networks (2025). They write the transpose
        of S. beta above 1: Grazzi and others, Unlocking State-Tracking in Linear RNNs Through Negative
        Eigenvalues (2025).

    Example:
        The second step halves what the first wrote under the same key, and adds half of its own value:

        >>> import torch
        >>> k = torch.ones(1, 2, 1, 1)
        >>> v = torch.tensor([4.0, 8.0]).reshape(1, 2, 1, 1)
        >>> beta = torch.tensor([1.0, 0.5]).reshape(1, 2, 1)
        >>> y, state = delta_rule(k, k, v, beta)
        >>> y.flatten().tolist(), state.flatten().tolist()
        ([4.0, 6.0], [6.0])
    """
    check_real(q=q, k=k, v=v, state=state)
    inputs.check_queries_and_keys(q, k)
    inputs.check_values(v, q)
    check_beta(beta, q)
    inputs.check_reset(reset, q)
    device = q.device.type
    log_decay = inputs.canonical_gate("log_decay", log_decay, q)
    pair = _pair(q, mode, backend)
    refuse_split_time("delta_rule")
    state = inputs.canonical_state(state, q, v, is_complex=False)
    if q.shape[1] == 0:
        return v.clone(), state.clone()
    tensors: tuple[Tensor | None, ...] = (q, k, v, beta, log_decay)
    # Triton's kernels take half precision as it is
    if pair[1] != "triton":
        tensors = tuple(widened(*tensors))
    # accumulation stays in float32 where the caller's matrix products do not
    with without_autocast(device):
        y, state = _RUN[pair](*tensors, state, reset)
    return y.to(v.dtype), state


def _pair(q: Tensor, mode: str, backend: str) -> Pair:
    """The (mode, backend) that a call runs."""
    time, channels, device = q.shape[1], q.shape[-1], q.device.type
    auto = auto_delta_rule(
        time,
        device,
        numba=device == "cpu" and numba_usable(),
        triton=triton_usable(device),
        exporting=exporting(),
        # double precision has no tensor cores here, and torch's products have
        fits=channels <= LARGEST and q.dtype != float64,
    )
    pair = resolve("delta_rule", PAIRS, mode, backend, auto)
    refused = refusal("delta_rule", pair[1], device)
    if refused is not None:
        raise ValueError(refused)
    if pair == ("chunkwise", "triton") and channels > LARGEST:
        raise ValueError(
            "(mode, backend) = ('chunkwise', 'triton') of `delta_rule` takes keys of at most "
            f"{LARGEST} channels; got {channels}. Use more and smaller heads, or backend='torch'."
        )
    return pair
