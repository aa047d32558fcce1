"""The general operator: S_t = diag(a_t) S_{t-1} + k_t^T v_t, y_t = Re(q_t S_t)."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

from jaxtyping import Bool, Float, Inexact
from torch import Tensor, autocast, is_autocast_enabled

from linrec.ops import splitting
from linrec.ops.dispatch import exporting, numba_usable, refusal, resolve, triton_usable
from linrec.ops.gate_loop import fused, inputs, segments
from linrec.ops.gate_loop.auto import PAIRS, auto_gate_loop
from linrec.ops.gate_loop.chunkwise import attention, chunkwise
from linrec.ops.gate_loop.reference import gate_loop_reference
from linrec.ops.gate_loop.torch import elementwise, recurrent

__all__ = ["PAIRS", "gate_loop", "gate_loop_matrix"]

_OWN = {
    ("recurrent", "reference"): gate_loop_reference,
    ("recurrent", "torch"): recurrent,
    ("attention", "torch"): attention,
    ("chunkwise", "torch"): chunkwise,
}


def gate_loop(
    q: Inexact[Tensor, "b t h dk"],
    k: Inexact[Tensor, "b t h dk"],
    v: Float[Tensor, "b t h dv"],
    log_decay: Float[Tensor, "..."] | None = None,
    phase: Float[Tensor, "..."] | None = None,
    *,
    state: Inexact[Tensor, "b h dk dv"] | None = None,
    reset: Bool[Tensor, "b t"] | None = None,
    mode: str = "auto",
    backend: str = "auto",
) -> tuple[Float[Tensor, "b t h dv"], Inexact[Tensor, "b h dk dv"]]:
    """Run the gated linear recurrence of matrix states over time.

        S_t = diag(a_t) S_{t-1} + k_t^T v_t,    a_t = exp(log_decay_t + i phase_t),    S_0 = state
        y_t = Re(q_t S_t)

    Nothing is conjugated. `log_decay` and `phase` each have one of these shapes, whatever the other has:

    | `log_decay` | without `phase` | one value per |
    |---|---|---|
    | None | linear attention | - (a magnitude of 1, or a phase of 0) |
    | (h,) | RetNet | head |
    | (h, dk) | | head and key channel |
    | (b, t, h) | Mamba-2 | step and head |
    | (b, t, h, dk) | GLA; GateLoop with `phase` | step, head and key channel |

    | mode | backend | what it is |
    |---|---|---|
    | recurrent | reference | a loop over time: the oracle, slow |
    | recurrent | torch | a loop over time; no memory per step where no gradient is asked for |
    | attention | torch | all pairs of steps, O(t^2): the paper's surrogate attention |
    | chunkwise | torch | pairs of steps within chunks, the recurrence between them |
    | scan | torch, triton | an associative scan with one channel per entry of the state |
    | recurrent | numba | the same channels, step by step on CPU threads |

    The last two keep the state of every step, which is too much for large heads. For dk = dv = 1 (the
    max-headed GateLoop) with real q and k, they are one fused kernel with Triton and with Numba, which keeps
    the state once per piece of time and makes it again for the gradient. `"auto"` takes the best pair that
    works for the call (the table is at `linrec.ops.gate_loop.auto.auto_gate_loop`); what is given explicitly
    is obeyed or refused.

    A magnitude of exactly zero, log_decay = -inf, is exact in every mode: nothing passes that step, and no
    gradient is NaN. Phases of any size are used modulo 2 pi.

    Args:
        q: output gates (b, t, h, dk), real or complex, in float32, float64, bfloat16, float16, complex64 or
            complex128.
        k: input gates (b, t, h, dk), real or complex, of the precision of `q`.
        v: values (b, t, h, dv), real, of the precision of `q`.
        log_decay: natural logarithm of the magnitude, <= 0; None, or a shape of the table. In the precision
            of `q`, or in float32 beside inputs in half precision.
        phase: radians per step; shapes and dtypes as for `log_decay`.
        state: S_0 (b, h, dk, dv), in any precision; None means zeros.
        reset: (b, t) bool; true at t clears the state before step t, at t = 0 the initial one.
        mode: "auto", "recurrent", "scan", "chunkwise" or "attention".
        backend: "auto", "reference", "torch", "numba" or "triton".

    Returns:
        y (b, t, h, dv) in the dtype of `v`, and S_t (b, h, dk, dv) in float32 (float64 for double inputs) or,
        where `phase` is given or `k` is complex, complex64 (complex128). For zero-length time S_t is S_0.

    Raises:
        TypeError: dtypes that are not supported or do not fit together, a complex state of a real recurrence.
        ValueError: shapes that do not fit together; an unknown (mode, backend).

    Source:
        Katsch, GateLoop (2023): eq. 7-8 (recurrent), 12-13 (scan), 14-21 (attention), 25 (a).

    Example:
        A sum that halves at each step, then the same sum rotating by a quarter turn instead:

        >>> import torch
        >>> ones = torch.ones(1, 3, 1, 1)
        >>> y, state = gate_loop(ones, ones, ones, torch.tensor([0.5]).log())
        >>> y.flatten().tolist(), state.flatten().tolist()
        ([1.0, 1.5, 1.75], [1.75])
        >>> y, state = gate_loop(ones, ones, ones, phase=torch.tensor([torch.pi / 2]))
        >>> y.flatten().round(decimals=4).tolist()
        [1.0, 1.0, 0.0]
    """
    inputs.check_queries_and_keys(q, k)
    inputs.check_values(v, q)
    inputs.check_reset(reset, q)
    shape = (*q.shape, v.shape[-1])
    device = q.device.type
    pair = resolve(
        "gate_loop",
        PAIRS,
        mode,
        backend,
        auto_gate_loop(
            shape,
            device,
            numba=device == "cpu" and numba_usable(),
            triton=triton_usable(device),
            exporting=exporting(),
        ),
    )
    refused = refusal("gate_loop", pair[1], device)
    if refused is not None:
        raise ValueError(refused)
    if splitting.current is not None:
        return splitting.current.gate_loop(q, k, v, log_decay, phase, state, reset, pair)
    log_decay = inputs.canonical_gate("log_decay", log_decay, q)
    phase = inputs.canonical_gate("phase", phase, q)
    is_complex = phase is not None or k.is_complex()
    state = inputs.canonical_state(state, q, v, is_complex=is_complex)
    if q.shape[1] == 0:
        return v.clone(), state.clone()
    tensors: list[Any] = [q, k, v, log_decay, phase]
    if fused.applies(pair, q, k, v):
        run: Callable[..., tuple[Tensor, Tensor]] = partial(fused.fused, backend=pair[1])
    else:
        run = _OWN.get(pair) or partial(elementwise, mode=pair[0], backend=pair[1])
        tensors = inputs.widened(*tensors)
    # accumulation stays in float32 where the caller's matrix products do not
    with autocast(device, enabled=False) if is_autocast_enabled(device) else nullcontext():
        y, state = run(*tensors, state, reset)
    return y.to(v.dtype), state


def gate_loop_matrix(
    q: Inexact[Tensor, "b t h dk"],
    k: Inexact[Tensor, "b t h dk"],
    log_decay: Float[Tensor, "..."] | None = None,
    phase: Float[Tensor, "..."] | None = None,
    *,
    reset: Bool[Tensor, "b t"] | None = None,
) -> Float[Tensor, "b h t t"]:
    """Return the token-mixing matrix of `gate_loop`: entry (n, m) is what step m adds to step n.

        W_nm = Re(sum_c q_nc k_mc prod_{j=m+1..n} a_jc) for n >= m, else 0;    Y = W V

    Products are exponentials of sums <= 0 over their own steps, so nothing overflows, and what underflows is
    negligible beside the entries that do not.

    Args:
        q: output gates (b, t, h, dk), real or complex.
        k: input gates (b, t, h, dk), real or complex, of the precision of `q`.
        log_decay: as for `gate_loop`.
        phase: as for `gate_loop`.
        reset: (b, t) bool; true at t makes every entry from before t to t or later zero.

    Returns:
        Lower triangular matrices (b, h, t, t) in the real precision of `q`; h and t stand as in `attention`.

    Raises:
        TypeError: dtypes that are not supported or do not fit together.
        ValueError: shapes that do not fit together.

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
    splitting.refuse("gate_loop_matrix")
    precision = inputs.check_queries_and_keys(q, k)
    inputs.check_reset(reset, q)
    log_decay = inputs.canonical_gate("log_decay", log_decay, q)
    phase = inputs.canonical_gate("phase", phase, q)
    b, t, h, _ = q.shape
    if t == 0:
        return q.new_zeros(b, h, 0, 0, dtype=precision)
    q, k, log_decay, phase = inputs.widened(q.transpose(1, 2), k.transpose(1, 2), log_decay, phase)
    with autocast(q.device.type, enabled=False):
        log_decay, phase = segments.gates(log_decay, phase, reset, k)
        return segments.matrix(q, k, log_decay, phase).to(precision)
