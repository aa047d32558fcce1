"""Matrix states on the GPU, step by step: one kernel, for decoding and short pieces."""

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from linrec.ops import matrix_torch
from linrec.ops.kernels.launch import on_device, power_of_2
from linrec.ops.operators import differentiated, operator
from linrec.ops.vmap import batch_of, fold

# numbers of a state that one program has in its registers
STATE = 4096
NONE, HEAD, CHANNEL = 0, 1, 2


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    log_decay: Tensor | None,
    state: Tensor,
    reset: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Run `delta_rule`, or `gate_loop` without phases where `beta` is None.

    Where a gradient is asked for, the loop in torch runs instead: what is trained has more steps than this
    mode is for.

    Args:
        q: (b, t, h, dk), in any real precision.
        k: (b, t, h, dk).
        v: (b, t, h, dv).
        beta: None or (b, t, h).
        log_decay: log a, None or (b or 1, t or 1, h, dk or 1).
        state: S_0, (b, h, dk, dv).
        reset: None or (b, t) bool.

    Returns:
        y (b, t, h, dv) in the dtype of v, and S_t.
    """
    if differentiated(q, k, v, beta, log_decay, state):
        return matrix_torch.recurrent(q, k, v, beta, log_decay, state, reset)
    return forward(q, k, v, beta, log_decay, state, reset)


@operator("matrix_steps_triton")
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    log_decay: Tensor | None,
    state: Tensor,
    cut: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return y (b, t, h, dv) and the last state (b, h, dk, dv)."""
    import triton.language as tl

    q, k, v, state = (x.contiguous() for x in (q, k, v, state))
    batch, time, heads, dk = q.shape
    dv = v.shape[-1]
    y, end = torch.empty_like(v), torch.empty_like(state)
    # what is not there is never read; any pointer will do
    decays, decay = q, NONE
    strides: tuple[int, ...] = (0, 0, 0)
    if log_decay is not None:
        decays = log_decay.contiguous().expand(batch, time, -1, -1)
        strides, decay = decays.stride()[:3], CHANNEL if log_decay.shape[-1] > 1 else HEAD
    block_k = power_of_2(dk)
    block_v = max(1, min(power_of_2(dv), STATE // block_k))
    programs = -(-dv // block_v) * batch * heads
    if programs:
        with on_device(q.device):
            _kernels().steps[(programs,)](
                q,
                k,
                v,
                q if beta is None else beta.contiguous(),
                decays,
                q if cut is None else cut.contiguous().view(torch.uint8),
                state,
                y,
                end,
                time,
                strides,
                HEADS=heads,
                DK=dk,
                DV=dv,
                DECAY=decay,
                DELTA=beta is not None,
                RESET=cut is not None,
                BLOCK_K=block_k,
                BLOCK_V=block_v,
                WIDE=tl.float64 if state.dtype == torch.float64 else tl.float32,
                num_warps=4,
                num_stages=1,
            )
    return y, end


@torch.library.register_fake(forward)
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    log_decay: Tensor | None,
    state: Tensor,
    cut: Tensor | None,
) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape), state.new_empty(state.shape)


def _mapped(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> Any:
    outer, batch = info.batch_size, batch_of(inputs[0], in_dims[0])
    outputs = forward(*(fold(x, dim, outer, batch) for x, dim in zip(inputs, in_dims, strict=True)))
    return tuple(x.unflatten(0, (outer, batch)) for x in outputs), (0, 0)


torch.library.register_vmap(forward, _mapped)


@functools.cache
def _kernels() -> ModuleType:
    from linrec.ops.kernels.matrix import steps_triton as matrix_triton_kernels

    return matrix_triton_kernels
