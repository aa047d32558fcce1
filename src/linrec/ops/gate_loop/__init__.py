"""The general operator: S_t = diag(a_t) S_{t-1} + k_t^T v_t, y_t = Re(q_t S_t)."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

from jaxtyping import Bool, Float, Inexact
from torch import Tensor, float64

from linrec.ops.core.backends import Backend, few, never
from linrec.ops.core.call import documented, refuse_split_time
from linrec.ops.core.checks import check_precision, check_reset, check_shape, check_tensors, tensor_fields
from linrec.ops.core.isolation import Isolation, documents
from linrec.ops.core.precision import real_dtype, wide, without_autocast
from linrec.ops.gate_loop import max_headed, variants
from linrec.ops.gate_loop.reference import gate_loop_reference
from linrec.ops.gate_loop.torch import GateLoop, Normalized, attention, chunkwise, elementwise, recurrent
from linrec.ops.gate_loop.variants import Run, recurrent_numba, with_bonus
from linrec.ops.matrix import (
    canonical_gate,
    check_queries_and_keys,
    check_values,
    matrix_operator,
    numba,
    segments,
)
from linrec.ops.matrix.triton import steps_entry

__all__ = ["NORMALIZED", "OPERATOR", "gate_loop", "gate_loop_matrix", "normalized_gate_loop"]


def _canonical(given: GateLoop) -> GateLoop:
    """Check the inputs, and reshape gates to four axes."""
    q, k, v, log_decay, phase, bonus, state, reset = given
    check_queries_and_keys(q, k)
    check_values(v, q)
    check_shape("bonus", bonus, "(h, dk)", q.shape[2:], "Pass one factor per head and key channel.")
    check_precision("bonus", bonus, q, "q")
    log_decay, phase = canonical_gate("log_decay", log_decay, q), canonical_gate("phase", phase, q)
    return GateLoop(q, k, v, log_decay, phase, bonus, state, reset)


def _canonical_of_normalized(given: Normalized) -> Normalized:
    """Check the inputs, and reshape gates to four axes."""
    q, floor, inputs = given.q, given.floor, _canonical(GateLoop(*given[:8]))
    if isinstance(floor, Tensor):
        check_shape("floor", floor, "(b, t, h)", q.shape[:3], "Pass a number, or one per step and head.")
        check_precision("floor", floor, q, "q")
    elif not 0 < floor < math.inf:
        raise ValueError(f"`floor` must be positive and finite; got {floor}. It prevents division by zero.")
    return Normalized(*inputs, floor, given.signed)


def _one_step(given: GateLoop | Normalized) -> bool:
    return given.q.shape[1] <= 1


def _one_channel(given: GateLoop | Normalized) -> bool:
    """Return whether heads have a single channel, so that the state is as small as k and v."""
    return given.q.shape[-1] == given.v.shape[-1] == 1


def _matrices(given: GateLoop | Normalized) -> bool:
    return not _one_channel(given)


def _plain(given: GateLoop) -> bool:
    """Return whether there are no phases, no complex keys and no bonus."""
    return given.phase is None and given.bonus is None and not given.k.is_complex()


def _on_cores(given: GateLoop) -> bool:
    # torch has tensor-core products in float64, Triton does not
    return _matrices(given) and given.v.dtype != float64


def _plain_step(given: GateLoop) -> bool:
    return _one_step(given) and given.bonus is None and _on_cores(given)


def _by_loop(given: GateLoop) -> bool:
    return not _one_step(given) or _plain(given)


_IN_CHUNKS = "pairs of steps within chunks, the recurrence between them"


def _entry(mode: str, name: str, run: Run, about: str, **options: Any) -> Backend[GateLoop]:
    return Backend(mode, name, with_bonus(run), about, **options)


def _max_headed(mode: str, name: str, run: Run, **options: Any) -> Backend[GateLoop]:
    about = "heads of one channel and real q and k: one fused kernel"
    return _entry(mode, name, run, about, kernel="max-headed", accepts=max_headed.takes, **options)


def _by_scan(mode: str, name: str, **options: Any) -> Backend[GateLoop]:
    run = partial(elementwise, mode=mode, backend=name)
    about = "`scan` with one channel per entry of the state, which it keeps for every step"
    return _entry(mode, name, run, about, kernel="elementwise", **options)


def _chunkwise(run: Run) -> Backend[GateLoop]:
    run = with_bonus(run, variants.chunkwise_triton_wide)
    return Backend("chunkwise", "triton", run, f"{_IN_CHUNKS}, on tensor cores", auto=_on_cores, widen=False)


_CHUNKWISE = _chunkwise(variants.chunkwise_triton)
BACKENDS: tuple[Backend[GateLoop], ...] = (
    steps_entry(with_bonus(variants.recurrent_triton), _plain_step),
    _entry(
        "recurrent", "numba", recurrent_numba, numba.ABOUT, kernel="matrix", accepts=_matrices, auto=_by_loop
    ),
    # a single step has nothing to parallelise
    _entry("recurrent", "torch", recurrent, "a loop over time", auto=_one_step),
    _max_headed("scan", "triton", max_headed.scan_triton, widen=False),
    _max_headed("recurrent", "numba", max_headed.recurrent_numba),
    # heads of one channel form contiguous vectors of channels for the scan
    _by_scan("scan", "triton", auto=_one_channel),
    _by_scan("recurrent", "numba", accepts=_one_channel),
    _by_scan("scan", "torch", auto=lambda given: _one_channel(given) and not few(given.q.shape[1], 16)),
    _CHUNKWISE,
    # memory for one state per chunk, not per step
    _entry("chunkwise", "torch", chunkwise, _IN_CHUNKS, auto=_matrices),
    _entry("attention", "torch", attention, "all pairs of steps, O(t^2)", auto=never),
    Backend("recurrent", "reference", gate_loop_reference, "a loop over time: the oracle, slow", auto=never),
)
OPERATOR = matrix_operator("gate_loop", GateLoop, _canonical, BACKENDS)


# without rounding of the outputs, for `normalized_gate_loop`
_WIDE_CHUNKWISE = _chunkwise(variants.chunkwise_triton_wide)
_WIDE_BACKENDS = [
    _WIDE_CHUNKWISE if entry is _CHUNKWISE else replace(entry, widen=True) for entry in BACKENDS
]
_WIDE = matrix_operator("gate_loop", GateLoop, _canonical, _WIDE_BACKENDS, wide=True)
NORMALIZED = matrix_operator(
    "normalized_gate_loop", Normalized, _canonical_of_normalized,
    [variants.normalized(entry, _WIDE.proceed) for entry in _WIDE_BACKENDS], columns=1, composed=True,
)  # fmt: skip
PAIRS = OPERATOR.pairs


@documented(OPERATOR)
def gate_loop(
    q: Inexact[Tensor, "b t h dk"],
    k: Inexact[Tensor, "b t h dk"],
    v: Float[Tensor, "b t h dv"],
    log_decay: Float[Tensor, "..."] | None = None,
    phase: Float[Tensor, "..."] | None = None,
    *,
    bonus: Float[Tensor, "h dk"] | None = None,
    state: Inexact[Tensor, "b h dk dv"] | None = None,
    reset: Bool[Tensor, "b t"] | None = None,
    mode: str = "auto",
    backend: str = "auto",
) -> tuple[Float[Tensor, "b t h dv"], Inexact[Tensor, "b h dk dv"]]:
    """Run the gated linear recurrence of matrix states over time.

        S_t = diag(a_t) S_{t-1} + k_t^T v_t,    a_t = exp(log_decay_t + i phase_t),    S_0 = state
        y_t = Re(q_t S_t)

    With `bonus`, an output reads the state before its own step, plus the current token weighted by `bonus`:

        y_t = Re(q_t (S_{t-1} + diag(bonus) k_t^T v_t))

    Nothing is conjugated. `log_decay` and `phase` each have a shape of this table, which may differ:

    | `log_decay` | without `phase` | one value per |
    |---|---|---|
    | None | linear attention | - (a magnitude of 1, or a phase of 0) |
    | (h,) | RetNet | head |
    | (h, dk) | | head and key channel |
    | (b, t, h) | Mamba-2 | step and head |
    | (b, t, h, dk) | GLA; GateLoop with `phase` | step, head and key channel |

    A last axis of size 1, as in (h, 1) and (b, t, h, 1), broadcasts over the key channels.

    {backends}

    The scan materialises the state of every step, which needs too much memory for large heads. For dk = dv =
    1 (the max-headed GateLoop) with real q and k, (scan, triton) and (recurrent, numba) are fused kernels:
    they store a state per chunk of time and recompute the others for the gradient. `"auto"` uses the first
    entry that supports the call; an explicit mode or backend is used or refused.

    A decay of exactly zero, log_decay = -inf, is exact in every mode: nothing passes that step, and no
    gradient is NaN. Phases of any size are used modulo 2 pi.

    Args:
        q: output gates (b, t, h, dk), real or complex, in float32, float64, bfloat16, float16, complex64 or
            complex128.
        k: input gates (b, t, h, dk), real or complex, of the precision of `q`.
        v: values (b, t, h, dv), real, of the precision of `q`.
        log_decay: natural logarithm of the magnitude, <= 0; None, or a shape of the table. In the precision
            of `q`, or in float32 with half-precision inputs.
        phase: radians per step; shapes and dtypes as for `log_decay`.
        bonus: real (h, dk), as in RWKV; None reads the state after the step. Dtypes as for `log_decay`.
        state: S_0 (b, h, dk, dv), in any precision; None means zeros.
        reset: (b, t) bool; true at t clears the state before step t, at t = 0 the initial state. With
            `bonus`, the output of step t then depends on step t only.
        mode: "auto", "recurrent", "scan", "chunkwise" or "attention".
        backend: "auto", "reference", "torch", "numba" or "triton".

    Returns:
        y (b, t, h, dv) in the dtype of `v`, and S_t (b, h, dk, dv) in float32 (float64 for double inputs) or,
        if `phase` is given or `k` is complex, complex64 (complex128). For zero steps S_t is S_0. With
        half-precision inputs, (chunkwise, triton) rounds the factors of its products to that precision. The
        error of S_t is then up to 0.3% of its largest value in bfloat16, and 0.07% in float16.

    Raises:
        TypeError: a dtype is not supported, dtypes do not match, or the state of a real recurrence is
            complex.
        ValueError: shapes do not match, or (mode, backend) is unknown.

    Source:
        Katsch, GateLoop (2023): eq. 7-8 (recurrent), 12-13 (scan), 14-21 (attention), 25 (a). `bonus` is u in
        Peng et al., Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence (2024).

    Example:
        A sum that is halved at each step, then a sum that is rotated by a quarter turn at each step:

        >>> import torch
        >>> ones = torch.ones(1, 3, 1, 1)
        >>> y, state = gate_loop(ones, ones, ones, torch.tensor([0.5]).log())
        >>> y.flatten().tolist(), state.flatten().tolist()
        ([1.0, 1.5, 1.75], [1.75])
        >>> y, state = gate_loop(ones, ones, ones, phase=torch.tensor([torch.pi / 2]))
        >>> y.flatten().round(decimals=4).tolist()
        [1.0, 1.0, 0.0]
    """
    return OPERATOR(GateLoop(q, k, v, log_decay, phase, bonus, state, reset), mode, backend)


@documented(NORMALIZED)
def normalized_gate_loop(
    q: Inexact[Tensor, "b t h dk"],
    k: Inexact[Tensor, "b t h dk"],
    v: Float[Tensor, "b t h dv"],
    log_decay: Float[Tensor, "..."] | None = None,
    phase: Float[Tensor, "..."] | None = None,
    *,
    bonus: Float[Tensor, "h dk"] | None = None,
    floor: Float[Tensor, "b t h"] | float = 1e-6,
    signed: bool = True,
    state: Inexact[Tensor, "b h dk dv+1"] | None = None,
    reset: Bool[Tensor, "b t"] | None = None,
    mode: str = "auto",
    backend: str = "auto",
) -> tuple[Float[Tensor, "b t h dv"], Inexact[Tensor, "b h dk dv+1"]]:
    """Run `gate_loop` and divide each output by the sum of its weights.

        S_t = diag(a_t) S_{t-1} + k_t^T v_t,    n_t = diag(a_t) n_{t-1} + k_t
        y_t = Re(q_t S_t) / d_t,    d_t = sign(z_t) max(abs(z_t), floor_t),    z_t = Re(q_t n_t)

    With `signed=False`, d_t = max(abs(z_t), floor_t). With `bonus`, S and n are both read before their step,
    as in `gate_loop`. The sign of zero is +. If |z_t| is below the floor, no gradient flows through z_t. A
    query that matches no key returns zeros, because the numerator is zero too.

    | model | arguments |
    |---|---|
    | linear attention, q and k features >= 0 | the defaults |
    | gated RFA | `log_decay` (b, t, h) |
    | cosFormer | `phase` (h,) |
    | mLSTM, gates stabilised by m_t | `floor=exp(-m_t)`, `signed=False` |

    n is the last column of the state, so a single recurrence with dv + 1 values runs in the modes of
    `gate_loop`.

    Args:
        q: output gates (b, t, h, dk); for details of all arguments up to `reset` see `gate_loop`.
        k: input gates (b, t, h, dk).
        v: values (b, t, h, dv).
        log_decay: natural logarithm of the magnitude, <= 0.
        phase: radians per step.
        bonus: (h, dk), the weight of the current token.
        floor: smallest magnitude of a denominator, > 0: a number, or (b, t, h) in the dtypes of `log_decay`.
        signed: whether a denominator keeps the sign of z_t.
        state: S_0, with n_0 as the last column (b, h, dk, dv + 1); None means zeros.
        reset: (b, t) bool; true at t clears S and n before step t.
        mode: "auto", "recurrent", "scan", "chunkwise" or "attention".
        backend: "auto", "reference", "torch", "numba" or "triton".

    Returns:
        y (b, t, h, dv) in the dtype of `v`, and S_t with n_t (b, h, dk, dv + 1) in the state dtype of
        `gate_loop`.

    Raises:
        TypeError: as for `gate_loop`, or the floor has a different precision.
        ValueError: as for `gate_loop`, or the floor is not positive or has the wrong shape.

    Source:
        Katharopoulos et al., Transformers are RNNs (2020), eq. 18-20. Beck et al., xLSTM (2024), eq. 19-21,
        and the stabilised mLSTM of its appendix, which has the floor.

    Example:
        Constant weights give the running mean:

        >>> import torch
        >>> ones, v = torch.ones(1, 3, 1, 1), torch.tensor([3.0, 1.0, 5.0]).reshape(1, 3, 1, 1)
        >>> y, state = normalized_gate_loop(ones, ones, v)
        >>> y.flatten().tolist(), state.flatten().tolist()
        ([3.0, 2.0, 3.0], [9.0, 3.0])
    """
    given = Normalized(q, k, v, log_decay, phase, bonus, state, reset, floor, signed)
    return NORMALIZED(given, mode, backend)


_TENSORS = tensor_fields(GateLoop)


def gate_loop_matrix(
    q: Inexact[Tensor, "b t h dk"],
    k: Inexact[Tensor, "b t h dk"],
    log_decay: Float[Tensor, "..."] | None = None,
    phase: Float[Tensor, "..."] | None = None,
    *,
    bonus: Float[Tensor, "h dk"] | None = None,
    reset: Bool[Tensor, "b t"] | None = None,
) -> Float[Tensor, "b h t t"]:
    """Return the token-mixing matrix of `gate_loop`: entry (n, m) is the weight of value m in output n.

        W_nm = Re(sum_c q_nc k_mc prod_{j=m+1..n} a_jc) for n >= m, else 0;    Y = W V

    With `bonus`, the products end at n-1, and an entry of the diagonal is Re(sum_c q_nc bonus_c k_nc).

    The products are exponentials of sums <= 0 over the steps in between, so nothing overflows. Entries that
    underflow are negligible next to the others.

    Args:
        q: output gates (b, t, h, dk), real or complex.
        k: input gates (b, t, h, dk), real or complex, of the precision of `q`.
        log_decay: as for `gate_loop`.
        phase: as for `gate_loop`.
        bonus: as for `gate_loop`.
        reset: (b, t) bool; true at t zeroes every entry that connects a step before t to step t or later.

    Returns:
        Lower triangular matrices (b, h, t, t) in the real precision of `q`; axes are ordered as in attention.

    Raises:
        TypeError: a dtype is not supported, or dtypes do not match.
        ValueError: shapes do not match.

    Source:
        Katsch, GateLoop (2023), eq. 18-21: Re(Qbar Kbar^T) * M.

    Example:
        >>> import torch
        >>> ones = torch.ones(1, 3, 1, 1)
        >>> gate_loop_matrix(ones, ones, torch.tensor([0.5]).log())[0, 0]
        tensor([[1.0000, 0.0000, 0.0000],
                [0.5000, 1.0000, 0.0000],
                [0.2500, 0.5000, 1.0000]])
    """
    given = GateLoop(q, k, q, log_decay, phase, bonus, None, reset)
    check_tensors(given, _TENSORS, "q")
    refuse_split_time("gate_loop_matrix")
    # the matrix does not depend on the values
    given = _canonical(given._replace(v=q.real if q.is_complex() else q))
    check_reset(reset, q)
    precision = real_dtype(q.dtype)
    b, t, h, _ = q.shape
    if 0 in q.shape:
        return q.new_zeros(b, h, t, t, dtype=precision)
    gates: dict[str, Any] = {"q": q, "k": k, "log_decay": given.log_decay, "phase": given.phase}
    if reset is not None:
        isolation = Isolation(documents(reset))
        gates |= isolation.entered(gates, begin=0)
    q, k, log_decay, phase, bonus = map(wide, (*gates.values(), bonus))
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    with without_autocast(q.device.type):
        log_decay, phase = segments.gates(log_decay, phase, reset, k)
        if bonus is None:
            matrix = segments.matrix(q, k, log_decay, phase)
        else:
            matrix = variants.matrix_with_bonus(q, k, log_decay, phase, reset, bonus)
    if reset is not None:
        matrix = isolation.leave(matrix.transpose(1, 2), begin=0).transpose(1, 2)
    return matrix.to(precision)
