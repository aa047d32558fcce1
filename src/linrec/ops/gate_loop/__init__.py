"""The general operator: S_t = diag(a_t) S_{t-1} + k_t^T v_t, y_t = Re(q_t S_t)."""

from collections.abc import Callable
from functools import partial
from typing import Any

from jaxtyping import Bool, Float, Inexact
from torch import Tensor, float64

from linrec.ops import splitting
from linrec.ops.core.handlers import refuse_split_time
from linrec.ops.core.isolation import Isolation
from linrec.ops.dispatch import Pair, exporting, numba_usable, refusal, resolve, triton_usable
from linrec.ops.gate_loop import chunkwise_triton, fused, inputs, normalized, segments
from linrec.ops.gate_loop.auto import PAIRS, auto_gate_loop
from linrec.ops.gate_loop.bonus import matrix_with_bonus, with_bonus
from linrec.ops.gate_loop.chunkwise import attention, chunkwise
from linrec.ops.gate_loop.numba import recurrent as recurrent_numba
from linrec.ops.gate_loop.reference import gate_loop_reference, normalized_gate_loop_reference
from linrec.ops.gate_loop.torch import elementwise, recurrent
from linrec.ops.gate_loop.triton import recurrent as recurrent_triton
from linrec.ops.precision import widened, without_autocast

__all__ = ["PAIRS", "gate_loop", "gate_loop_matrix", "normalized_gate_loop"]

_OWN: dict[Pair, Callable[..., tuple[Tensor, Tensor]]] = {
    ("recurrent", "reference"): gate_loop_reference,
    ("recurrent", "torch"): recurrent,
    ("recurrent", "numba"): recurrent_numba,
    ("attention", "torch"): attention,
    ("chunkwise", "torch"): chunkwise,
    ("chunkwise", "triton"): chunkwise_triton.chunkwise,
    ("recurrent", "triton"): recurrent_triton,
}
# matrix states in kernels of their own, which take any precision
_KERNELS: tuple[Pair, ...] = (("chunkwise", "triton"), ("recurrent", "triton"))


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

    With `bonus`, an output sees the state before its own step, and the current token by a factor of its own:

        y_t = Re(q_t (S_{t-1} + diag(bonus) k_t^T v_t))

    Nothing is conjugated. `log_decay` and `phase` each have one of these shapes, whatever the other has:

    | `log_decay` | without `phase` | one value per |
    |---|---|---|
    | None | linear attention | - (a magnitude of 1, or a phase of 0) |
    | (h,) | RetNet | head |
    | (h, dk) | | head and key channel |
    | (b, t, h) | Mamba-2 | step and head |
    | (b, t, h, dk) | GLA; GateLoop with `phase` | step, head and key channel |

    A last axis of size 1, as in (h, 1) and (b, t, h, 1), broadcasts over the key channels.

    | mode | backend | what it is |
    |---|---|---|
    | recurrent | reference | a loop over time: the oracle, slow |
    | recurrent | torch | a loop over time; no memory per step where no gradient is asked for |
    | recurrent | numba | the same, with the states in the caches of CPU threads |
    | recurrent | triton | the same in one kernel; where a gradient is asked for, the loop in torch |
    | attention | torch | all pairs of steps, O(t^2): the paper's surrogate attention |
    | chunkwise | torch, triton | pairs of steps within chunks, the recurrence between them |
    | scan | torch, triton | an associative scan with one channel per entry of the state |

    The scan keeps the state of every step, which is too much for large heads. For dk = dv = 1 (the max-headed
    GateLoop) with real q and k, (scan, triton) and (recurrent, numba) are one fused kernel, which keeps the
    state once per piece of time and makes it again for the gradient. `"auto"` takes the best pair that
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
        bonus: real (h, dk), as RWKV has it; None reads the state after the step. Dtypes as for `log_decay`.
        state: S_0 (b, h, dk, dv), in any precision; None means zeros.
        reset: (b, t) bool; true at t clears the state before step t, at t = 0 the initial one. With `bonus`,
            step t then sees itself alone.
        mode: "auto", "recurrent", "scan", "chunkwise" or "attention".
        backend: "auto", "reference", "torch", "numba" or "triton".

    Returns:
        y (b, t, h, dv) in the dtype of `v`, and S_t (b, h, dk, dv) in float32 (float64 for double inputs) or,
        where `phase` is given or `k` is complex, complex64 (complex128). For zero-length time S_t is S_0.
        For inputs in half precision, (chunkwise, triton) rounds the factors of its products to the inputs'
        dtype: S_t is off by up to 0.3% of its largest value in bfloat16, and by 0.07% in float16.

    Raises:
        TypeError: dtypes that are not supported or do not fit together, a complex state of a real recurrence.
        ValueError: shapes that do not fit together; an unknown (mode, backend).

    Source:
        Katsch, GateLoop (2023): eq. 7-8 (recurrent), 12-13 (scan), 14-21 (attention), 25 (a). `bonus` is u in
        Peng et al., Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence (2024).

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
    device = q.device.type
    is_complex = phase is not None or k.is_complex()
    shape = *q.shape, v.shape[-1]
    plain = not is_complex and bonus is None
    double = v.dtype == float64
    pair = _pair("gate_loop", shape, device, mode, backend, plain=plain, double=double)
    if splitting.current is not None:
        return splitting.current.gate_loop(q, k, v, log_decay, phase, bonus, state, reset, pair)
    log_decay = inputs.canonical_gate("log_decay", log_decay, q)
    phase = inputs.canonical_gate("phase", phase, q)
    inputs.check_bonus(bonus, q)
    state = inputs.canonical_state(state, q, v, is_complex=is_complex)
    if q.shape[1] == 0:
        return v.clone(), state.clone()
    tensors: list[Any] = [q, k, v, log_decay, phase]
    is_fused = fused.applies(pair, q, k, v)
    takes_any = is_fused or pair in _KERNELS
    # these kernels take any precision, but return it: with a bonus, their output is not the last word
    if bonus is not None or not takes_any:
        *tensors, bonus = widened(*tensors, bonus)
    run = _runner(pair, bonus, is_fused=is_fused)
    # accumulation stays in float32 where the caller's matrix products do not
    with without_autocast(device):
        y, state = run(*tensors, state, reset)
    return y.to(v.dtype), state


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
    """Run `gate_loop` and divide each output by the sum of the weights that its values have in it.

        S_t = diag(a_t) S_{t-1} + k_t^T v_t,    n_t = diag(a_t) n_{t-1} + k_t
        y_t = Re(q_t S_t) / d_t,    d_t = sign(z_t) max(abs(z_t), floor_t),    z_t = Re(q_t n_t)

    With `signed=False`, d_t = max(abs(z_t), floor_t). With `bonus`, S and n are both read before their step,
    as in `gate_loop`. The sign of zero is +. Where z_t is below the floor, there is no gradient through it; a
    query that no key reaches gets zeros, since its numerator is zero too.

    | model | arguments |
    |---|---|
    | linear attention, q and k features >= 0 | the defaults |
    | gated RFA | `log_decay` (b, t, h) |
    | cosFormer | `phase` (h,) |
    | mLSTM, gates stabilised by m_t | `floor=exp(-m_t)`, `signed=False` |

    n is the last column of the state, so that there is one recurrence, of dv + 1 values, in the modes of
    `gate_loop`.

    Args:
        q: as for `gate_loop`, and so are `k`, `v`, `log_decay`, `phase`, `bonus` and `reset`.
        k: input gates (b, t, h, dk).
        v: values (b, t, h, dv).
        log_decay: natural logarithm of the magnitude, <= 0.
        phase: radians per step.
        bonus: (h, dk), the factor of the current token.
        floor: the smallest magnitude of a denominator, > 0: a number, or (b, t, h) in the dtypes of
            `log_decay`.
        signed: whether a denominator keeps the sign of z_t.
        state: S_0 and n_0 as the last column (b, h, dk, dv + 1); None means zeros.
        reset: (b, t) bool; true at t clears both before step t.
        mode: "auto", "recurrent", "scan", "chunkwise" or "attention".
        backend: "auto", "reference", "torch", "numba" or "triton".

    Returns:
        y (b, t, h, dv) in the dtype of `v`, and S_t with n_t (b, h, dk, dv + 1) in that of `gate_loop`.

    Raises:
        TypeError: as `gate_loop` does; a floor of another precision.
        ValueError: as `gate_loop` does; a floor that is not positive, or of another shape.

    Source:
        Katharopoulos et al., Transformers are RNNs (2020), eq. 18-20. Beck et al., xLSTM (2024), eq. 19-21,
        and the stabilised mLSTM of its appendix, which has the floor.

    Example:
        Constant weights make the mean of what has come:

        >>> import torch
        >>> ones, v = torch.ones(1, 3, 1, 1), torch.tensor([3.0, 1.0, 5.0]).reshape(1, 3, 1, 1)
        >>> y, state = normalized_gate_loop(ones, ones, v)
        >>> y.flatten().tolist(), state.flatten().tolist()
        ([3.0, 2.0, 3.0], [9.0, 3.0])
    """
    inputs.check_queries_and_keys(q, k)
    inputs.check_values(v, q)
    inputs.check_reset(reset, q)
    normalized.check_floor(floor, q)
    normalized.check_state(state, q, v)
    inputs.check_bonus(bonus, q)
    for name, gate in (("log_decay", log_decay), ("phase", phase)):
        inputs.canonical_gate(name, gate, q)
    b, t, h, dk = q.shape
    # of heads of one channel, the two values make two heads, for the fused kernels, which one step has no use
    # for; processes that share a sequence have the same heads, but not the same steps
    in_heads = dk == v.shape[-1] == 1 and (t > 1 or splitting.current is not None)
    shape = (b, t, 2 * h, 1, 1) if in_heads else (b, t, h, dk, v.shape[-1] + 1)
    is_complex = phase is not None or k.is_complex()
    plain = not is_complex and bonus is None
    double = v.dtype == float64
    device = q.device.type
    pair = _pair("normalized_gate_loop", shape, device, mode, backend, plain=plain, double=double)
    dtype = v.dtype
    # the quotient of two rounded numbers would be rounded three times
    q, k, v, log_decay, phase, bonus = widened(q, k, v, log_decay, phase, bonus)
    if pair[1] == "reference" and splitting.current is None and t > 0:
        log_decay = inputs.canonical_gate("log_decay", log_decay, q)
        phase = inputs.canonical_gate("phase", phase, q)
        state = inputs.canonical_state(state, q, normalized.with_one(v), is_complex=is_complex)
        y, state = normalized_gate_loop_reference(
            q, k, v, log_decay, phase, state, reset, bonus, floor, signed
        )
        return y.to(dtype), state
    tensors = q, k, normalized.with_one(v), log_decay, phase, bonus, state
    if in_heads:
        tensors = normalized.in_heads(*tensors)
    *given, bonus, state = tensors
    mode, backend = pair
    y, state = gate_loop(*given, bonus=bonus, state=state, reset=reset, mode=mode, backend=backend)
    if in_heads:
        y, state = y.reshape(b, t, h, 2), state.reshape(b, h, 1, 2)
    return normalized.divided(y, floor, signed).to(dtype), state


def gate_loop_matrix(
    q: Inexact[Tensor, "b t h dk"],
    k: Inexact[Tensor, "b t h dk"],
    log_decay: Float[Tensor, "..."] | None = None,
    phase: Float[Tensor, "..."] | None = None,
    *,
    bonus: Float[Tensor, "h dk"] | None = None,
    reset: Bool[Tensor, "b t"] | None = None,
) -> Float[Tensor, "b h t t"]:
    """Return the token-mixing matrix of `gate_loop`: entry (n, m) is what step m adds to step n.

        W_nm = Re(sum_c q_nc k_mc prod_{j=m+1..n} a_jc) for n >= m, else 0;    Y = W V

    With `bonus`, the products end at n-1, and an entry of the diagonal is Re(sum_c q_nc bonus_c k_nc).

    Products are exponentials of sums <= 0 over their own steps, so nothing overflows, and what underflows is
    negligible beside the entries that do not.

    Args:
        q: output gates (b, t, h, dk), real or complex.
        k: input gates (b, t, h, dk), real or complex, of the precision of `q`.
        log_decay: as for `gate_loop`.
        phase: as for `gate_loop`.
        bonus: as for `gate_loop`.
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
    refuse_split_time("gate_loop_matrix")
    precision = inputs.check_queries_and_keys(q, k)
    inputs.check_reset(reset, q)
    log_decay = inputs.canonical_gate("log_decay", log_decay, q)
    phase = inputs.canonical_gate("phase", phase, q)
    inputs.check_bonus(bonus, q)
    b, t, h, _ = q.shape
    if t == 0:
        return q.new_zeros(b, h, 0, 0, dtype=precision)
    if reset is not None:
        isolation = Isolation(reset.cumsum(1))
        q, k = isolation.enter(q, begin=0, carried=False), isolation.enter(k, begin=0)
        if log_decay is not None:
            begin = 0 if log_decay.shape[1] == t else None
            log_decay = isolation.enter(log_decay, begin=begin, decays=True)
        if phase is not None:
            phase = isolation.enter(phase, begin=0 if phase.shape[1] == t else None)
    q, k, log_decay, phase, bonus = widened(q.transpose(1, 2), k.transpose(1, 2), log_decay, phase, bonus)
    with without_autocast(q.device.type):
        log_decay, phase = segments.gates(log_decay, phase, reset, k)
        if bonus is None:
            matrix = segments.matrix(q, k, log_decay, phase)
        else:
            matrix = matrix_with_bonus(q, k, log_decay, phase, reset, bonus)
    if reset is not None:
        matrix = isolation.leave(matrix.transpose(1, 2), begin=0).transpose(1, 2)
    return matrix.to(precision)


def _runner(pair: Pair, bonus: Tensor | None, *, is_fused: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    """What runs the pair, as a function of q, k, v, log_decay, phase, state and reset."""
    run = _OWN.get(pair) or partial(elementwise, mode=pair[0], backend=pair[1])
    if is_fused:
        run = partial(fused.fused, backend=pair[1])
    if bonus is None:
        return run
    if pair[1] == "reference":
        # the oracle has a loop of its own for it
        return partial(gate_loop_reference, bonus=bonus)
    return partial(with_bonus, bonus=bonus, run=run)


def _pair(
    op_name: str,
    shape: tuple[int, int, int, int, int],
    device: str,
    mode: str,
    backend: str,
    *,
    plain: bool,
    double: bool,
) -> Pair:
    """The (mode, backend) that a call of this (b, t, h, dk, dv) runs."""
    pair = resolve(
        op_name,
        PAIRS,
        mode,
        backend,
        auto_gate_loop(
            shape,
            device,
            numba=device == "cpu" and numba_usable(),
            triton=triton_usable(device),
            exporting=exporting(),
            plain=plain,
            double=double,
        ),
    )
    refused = refusal(op_name, pair[1], device)
    if refused is not None:
        raise ValueError(refused)
    return pair
