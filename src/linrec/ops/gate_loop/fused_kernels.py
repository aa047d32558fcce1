"""GPU kernels of the max-headed GateLoop; imported at the first use, because importing Triton is slow.

One program owns one batch row and a run of heads (dk = dv = 1), and walks time in tiles as the kernels of
`ops.scan` do. Links and inputs are made in registers: a = exp(log_decay + i phase) and k v are never written.
The state is, as two real planes, for the adjoint to read. Rows past the end of time are the identity.
"""

import triton
import triton.language as tl

from linrec.ops.scan.triton_kernels import compose, compose_complex, last_row

# how a gate comes: not at all, (b, t, h), or (h)
NONE = tl.constexpr(0)
STEP = tl.constexpr(1)
CONSTANT = tl.constexpr(2)


@triton.jit
def _gate(gate_ptr, at, column, mask, KIND: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load the gate of the steps `at`; 0, that is no decay and no turn, where there is none."""
    if KIND == STEP:
        gate = tl.load(gate_ptr + at, mask=mask, other=0.0).to(WIDE)
    elif KIND == CONSTANT:
        gate = tl.load(gate_ptr + column + 0 * at, mask=mask, other=0.0).to(WIDE)
    else:
        gate = tl.zeros_like(at).to(WIDE)
    return gate


@triton.jit
def forward(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    v_ptr,
    decay_ptr,
    phase_ptr,
    state_ptr,
    cut_ptr,
    y_ptr,
    hidden_ptr,
    last_ptr,
    time,
    channels,
    plane,
    DECAY: tl.constexpr,
    PHASE: tl.constexpr,
    HAS_STATE: tl.constexpr,
    HAS_CUT: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Fill y (b, t, h), hidden (1 or 2, b, t, h) and last (b, h); every tensor is contiguous."""
    unit: tl.constexpr = 1 if PHASE == NONE else 2
    blocks = tl.cdiv(channels, COLUMNS)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = ((tl.program_id(0) % blocks) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = column < channels
    rows = tl.arange(0, ROWS)[:, None]
    vector = (row * channels + column) * unit

    carry = tl.zeros([1, COLUMNS], WIDE)
    carry_i = tl.zeros([1, COLUMNS], WIDE)
    if HAS_STATE:
        carry = tl.load(state_ptr + vector, mask=inside, other=0.0)
        if PHASE != NONE:
            carry_i = tl.load(state_ptr + vector + 1, mask=inside, other=0.0)
    for tile in range(0, tl.cdiv(time, ROWS)):
        t = tile * ROWS + rows
        mask = (t < time) & inside
        at = (row * time + t) * channels + column
        u = tl.load(k_ptr + at, mask=mask, other=0.0) * tl.load(v_ptr + at, mask=mask, other=0.0)
        a = tl.exp(_gate(decay_ptr, at, column, mask, DECAY, WIDE))
        if HAS_CUT:
            kept = tl.load(cut_ptr + row * time + t, mask=t < time, other=0) == 0
            a = tl.where(kept, a, 0.0)
        if PHASE != NONE:
            angle = _gate(phase_ptr, at, column, mask, PHASE, WIDE)
            a_i = a * tl.sin(angle)
            a *= tl.cos(angle)
            a, a_i, h, h_i = tl.associative_scan((a, a_i, u, tl.zeros_like(u)), 0, compose_complex)
            h += a * carry - a_i * carry_i
            h_i += a * carry_i + a_i * carry
            tl.store(hidden_ptr + plane + at, h_i, mask=mask)
            carry_i = last_row(h_i, rows, ROWS)[None, :]
        else:
            a, h = tl.associative_scan((a, u), 0, compose)
            h += a * carry
        tl.store(hidden_ptr + at, h, mask=mask)
        tl.store(y_ptr + at, tl.load(q_ptr + at, mask=mask, other=0.0) * h, mask=mask)
        carry = last_row(h, rows, ROWS)[None, :]
    tl.store(last_ptr + vector, carry, mask=inside)
    if PHASE != NONE:
        tl.store(last_ptr + vector + 1, carry_i, mask=inside)


@triton.jit
def backward(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    v_ptr,
    decay_ptr,
    phase_ptr,
    cut_ptr,
    hidden_ptr,
    dy_ptr,
    dlast_ptr,
    dq_ptr,
    dk_ptr,
    dv_ptr,
    ddecay_ptr,
    dphase_ptr,
    dstate_ptr,
    time,
    channels,
    plane,
    DECAY: tl.constexpr,
    PHASE: tl.constexpr,
    HAS_CUT: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Fill the gradients; those of constant gates are (b, h), still to be summed over the batch.

    With g_t = q_t dy_t + conj(a_{t+1}) g_{t+1} and w_t = a_t h_{t-1} = h_t - k_t v_t:
    dq = dy Re h, dk = v Re g, dv = k Re g, dlog_decay = Re(g conj w), dphase = Im(g conj w).
    """
    unit: tl.constexpr = 1 if PHASE == NONE else 2
    blocks = tl.cdiv(channels, COLUMNS)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = ((tl.program_id(0) % blocks) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = column < channels
    rows = tl.arange(0, ROWS)[:, None]
    vector = (row * channels + column) * unit

    total = tl.zeros([1, COLUMNS], WIDE)
    total_i = tl.zeros([1, COLUMNS], WIDE)
    carry = tl.load(dlast_ptr + vector, mask=inside, other=0.0)
    carry_i = tl.zeros([1, COLUMNS], WIDE)
    if PHASE != NONE:
        carry_i = tl.load(dlast_ptr + vector + 1, mask=inside, other=0.0)
    for tile in range(0, tl.cdiv(time, ROWS)):
        index = tile * ROWS + rows
        t = time - 1 - index
        mask = (index < time) & inside
        at = (row * time + t) * channels + column
        # the adjoint enters step t over the link of step t + 1; after the last step there is none
        linked = mask & (index > 0)
        a = tl.exp(_gate(decay_ptr, at + channels, column, linked, DECAY, WIDE))
        if HAS_CUT:
            after = tl.load(cut_ptr + row * time + t + 1, mask=(index > 0) & (index < time), other=0)
            a = tl.where(after == 0, a, 0.0)
        dy = tl.load(dy_ptr + at, mask=mask, other=0.0)
        h = tl.load(hidden_ptr + at, mask=mask, other=0.0)
        k = tl.load(k_ptr + at, mask=mask, other=0.0)
        v = tl.load(v_ptr + at, mask=mask, other=0.0)
        g = tl.load(q_ptr + at, mask=mask, other=0.0) * dy
        w = h - k * v
        if PHASE != NONE:
            angle = _gate(phase_ptr, at + channels, column, linked, PHASE, WIDE)
            a_i = -a * tl.sin(angle)
            a *= tl.cos(angle)
            a, a_i, g, g_i = tl.associative_scan((a, a_i, g, tl.zeros_like(g)), 0, compose_complex)
            g += a * carry - a_i * carry_i
            g_i += a * carry_i + a_i * carry
            carry_i = last_row(g_i, rows, ROWS)[None, :]
            w_i = tl.load(hidden_ptr + plane + at, mask=mask, other=0.0)
            ddecay = g * w + g_i * w_i
            dphase = g_i * w - g * w_i
            if PHASE == STEP:
                tl.store(dphase_ptr + at, dphase, mask=mask)
            else:
                total_i += tl.sum(tl.where(mask, dphase, 0.0), axis=0)[None, :]
        else:
            a, g = tl.associative_scan((a, g), 0, compose)
            g += a * carry
            ddecay = g * w
        carry = last_row(g, rows, ROWS)[None, :]
        tl.store(dq_ptr + at, dy * h, mask=mask)
        tl.store(dk_ptr + at, g * v, mask=mask)
        tl.store(dv_ptr + at, g * k, mask=mask)
        if DECAY == STEP:
            tl.store(ddecay_ptr + at, ddecay, mask=mask)
        elif DECAY == CONSTANT:
            total += tl.sum(tl.where(mask, ddecay, 0.0), axis=0)[None, :]
    real = row * channels + column
    if DECAY == CONSTANT:
        tl.store(ddecay_ptr + real, total, mask=inside)
    if PHASE == CONSTANT:
        tl.store(dphase_ptr + real, total_i, mask=inside)
    # over the link of the first step into the initial state
    at = row * time * channels + column
    a = tl.exp(_gate(decay_ptr, at, column, inside, DECAY, WIDE))
    if HAS_CUT:
        a = tl.where(tl.load(cut_ptr + row * time) == 0, a, 0.0)
    if PHASE != NONE:
        angle = _gate(phase_ptr, at, column, inside, PHASE, WIDE)
        a_i = -a * tl.sin(angle)
        a *= tl.cos(angle)
        tl.store(dstate_ptr + vector, a * carry - a_i * carry_i, mask=inside)
        tl.store(dstate_ptr + vector + 1, a * carry_i + a_i * carry, mask=inside)
    else:
        tl.store(dstate_ptr + vector, a * carry, mask=inside)
