"""A matrix memory whose pairs of channels turn by constant phases, as a rotation of queries and keys."""

import torch
from jaxtyping import Bool, Complex, Float
from torch import Tensor

from linrec.nn.rotary import Rotary
from linrec.ops.core.call import handled
from linrec.ops.core.precision import accumulation
from linrec.ops.gate_loop import gate_loop

__all__ = ["rotary_gate_loop"]


def rotary_gate_loop(
    rotary: Rotary,
    q: Float[Tensor, "b t h dk"],
    k: Float[Tensor, "b t h dk"],
    v: Float[Tensor, "b t h dv"],
    log_decay: Float[Tensor, "..."] | None = None,
    *,
    state: Complex[Tensor, "b h pairs dv"] | None = None,
    reset: Bool[Tensor, "b t"] | None = None,
) -> tuple[Float[Tensor, "b t h dv"], Complex[Tensor, "b h pairs dv"]]:
    """S_n = a_n e^(i theta) S_{n-1} + conj(k_n)^T v_n and y_n = Re(q_n S_n), for constant phases theta.

    The channels 2j and 2j + 1 of q and k are the parts of complex number j, which turns by theta_j.

    Re(q_n e^(i (n - m) theta) conj(k_m)) is the product of q_n turned by n theta and k_m turned by m theta.
    Several steps therefore run as a real recurrence of the turned q and k, which keep their dtype; its states
    are e^(-i n theta) S_n, with n counted from the state that is passed. A single step multiplies S instead,
    and so do calls that a handler observes or splits over processes.

    Args:
        rotary: has the phases theta, and turns all channels.
        q: queries.
        k: keys.
        v: values.
        log_decay: log a_n per head (h,) or per pair of channels (b, t, h, dk / 2); None is a_n = 1.
        state: S before the first step, (b, h, dk / 2, dv); None is zeros.
        reset: steps that start a new sequence.

    Returns:
        y in the dtype of q, k and v, and S after the last step.

    Source:
        RetNet (Sun and others, 2023), eq. 5 and 6; RoFormer (Su and others, 2021), eq. 16.

    Example:
        >>> x = torch.ones(1, 3, 1, 2)
        >>> y, state = rotary_gate_loop(Rotary(2), x, x, x[..., :1])
        >>> y.flatten(), state.shape
        (tensor([2.0000, 3.0806, 2.2483]), torch.Size([1, 1, 1, 1]))
    """
    dtype = accumulation(q.dtype)
    if q.shape[1] < 2 or handled():
        q, k = (part.to(dtype).unflatten(-1, (-1, 2)) for part in (q, k))
        # conjugated as pairs, because compilers fuse real numbers only
        k = torch.stack([k[..., 0], -k[..., 1]], dim=-1)
        q, k = torch.view_as_complex(q), torch.view_as_complex(k)
        theta = rotary.frequencies(dtype, q.device).expand(q.shape[2], -1)
        y, state = gate_loop(q, k, v.to(dtype), log_decay, theta, state=state, reset=reset)
        return y.to(v.dtype), state
    if log_decay is not None and log_decay.dim() > 1:
        log_decay = log_decay.repeat_interleave(2, -1)
    if state is not None:
        state = torch.view_as_real(state.conj().resolve_conj()).mT.flatten(2, 3)
    steps = torch.arange(1, q.shape[1] + 1, device=q.device)
    q, k = rotary(steps[None], q, k)
    y, state = gate_loop(q, k, v, log_decay, state=state, reset=reset)
    real, imaginary = state.unflatten(2, (-1, 2)).unbind(3)
    cos, sin = rotary.turns(steps[None, -1:], dtype)
    return y, torch.complex(real, -imaginary) * torch.complex(cos, sin).squeeze(1)[..., None]
