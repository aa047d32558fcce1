"""The recurrence of matrix states on GPUs, step by step: `gate_loop` and `delta_rule` in one kernel.

A program has some columns of one state in its registers and walks time. For one step, that reads and writes
each number once.
"""

import triton
import triton.language as tl

NONE = tl.constexpr(0)
CHANNEL = tl.constexpr(2)


@triton.jit
def steps(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    beta,
    decays,
    reset,
    start,
    y,
    end,
    TIME,
    strides,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    DECAY: tl.constexpr,
    DELTA: tl.constexpr,
    RESET: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Y of all steps and the last state, of one head and some of its columns.

    `decays` are log decays, of strides (batch, time, head) and one number per step or, CHANNEL, DK of them.
    """
    # along one axis, since the others hold 65,535 programs
    BLOCKS: tl.constexpr = (DV + BLOCK_V - 1) // BLOCK_V
    block, matrix = tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS
    b, h = (matrix // HEADS).to(tl.int64), matrix % HEADS
    rows = tl.arange(0, BLOCK_K)
    columns = block * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = (rows < DK)[:, None] & (columns < DV)[None, :]
    at = matrix.to(tl.int64) * (DK * DV) + rows[:, None] * DV + columns[None, :]
    state = tl.load(start + at, mask=inside, other=0.0).to(WIDE)
    for t in range(TIME):
        place = (b * TIME + t) * HEADS + h
        query = tl.load(q + place * DK + rows, mask=rows < DK, other=0.0).to(WIDE)
        key = tl.load(k + place * DK + rows, mask=rows < DK, other=0.0).to(WIDE)
        value = tl.load(v + place * DV + columns, mask=columns < DV, other=0.0).to(WIDE)
        gate = decays + b * strides[0] + t * strides[1] + h * strides[2]
        if DECAY == CHANNEL:
            state *= tl.exp(tl.load(gate + rows, mask=rows < DK, other=0.0).to(WIDE))[:, None]
        elif DECAY != NONE:
            state *= tl.exp(tl.load(gate).to(WIDE))
        if RESET:
            state = tl.where(tl.load(reset + b * TIME + t) != 0, 0.0, state)
        if DELTA:
            found = tl.sum(state * key[:, None], axis=0)
            value = tl.load(beta + place).to(WIDE) * (value - found)
        state += key[:, None] * value[None, :]
        tl.store(
            y + place * DV + columns,
            tl.sum(state * query[:, None], axis=0).to(y.dtype.element_ty),
            mask=columns < DV,
        )
    tl.store(end + at, state.to(end.dtype.element_ty), mask=inside)
