"""Fast weights whose entries decay by a factor of the key channel times a factor of the value channel."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from linrec.ops.gate_loop import gate_loop_matrix
from linrec.ops.scan import scan

__all__ = ["fast_weights", "fast_weights_matrix", "joint_decay"]


def fast_weights(
    q: Float[Tensor, "b t h dk"],
    k: Float[Tensor, "b t h dk"],
    v: Float[Tensor, "b t h dv"],
    log_f: Float[Tensor, "b t h dk"] | None,
    log_z: Float[Tensor, "b t h dv"],
    *,
    joint: bool = False,
    state: Float[Tensor, "b h dk dv"] | None = None,
    reset: Bool[Tensor, "b t"] | None = None,
) -> tuple[Float[Tensor, "b t h dv"], Float[Tensor, "b h dk dv"]]:
    """Return y_t = q_t S_t and the last S, of S_t = (f_t^T z_t) * S_{t-1} + k_t^T v_t.

    Every entry of S is a channel of `scan`, which keeps it for every step.

    Args:
        q: queries (b, t, h, dk).
        k: keys (b, t, h, dk).
        v: values (b, t, h, dv).
        log_f: log of the decays of key channels (b, t, h, dk), in float32 or better; None is f = 1.
        log_z: log of the decays of value channels (b, t, h, dv), in float32 or better.
        joint: whether entries decay by 1 - (1 - f) (1 - z) in place of f z.
        state: S_0 (b, h, dk, dv), or None for zeros.
        reset: (b, t) bool, true where a new sequence starts.

    Returns:
        y (b, t, h, dv) and the last S (b, h, dk, dv), both in the dtype of the decays.

    Example:
        >>> import torch
        >>> ones, half = torch.ones(1, 3, 1, 1), torch.full((1, 3, 1, 1), 0.5).log()
        >>> fast_weights(ones, ones, ones, half, half)[0].flatten().tolist()
        [1.0, 1.25, 1.3125]
    """
    update = (k[..., None] * v[..., None, :]).to(log_z.dtype)
    if log_f is None:
        decay = log_z.exp()[..., None, :].expand_as(update)
    elif joint:
        decay = joint_decay(log_f[..., None], log_z[..., None, :])
    else:
        decay = (log_f[..., None] + log_z[..., None, :]).exp()
    state = None if state is None else state.flatten(1)
    S, last = scan(decay.flatten(2), update.flatten(2), state=state, reset=reset)
    y = (q[..., None, :].to(S.dtype) @ S.unflatten(-1, update.shape[2:]))[..., 0, :]
    return y, last.unflatten(-1, update.shape[2:])


def joint_decay(log_f: Float[Tensor, "*f"], log_z: Float[Tensor, "*z"]) -> Float[Tensor, "*fz"]:
    """Return 1 - (1 - f) (1 - z) = z + (1 - z) f of logarithms that broadcast; nothing cancels."""
    return log_z.exp() - torch.expm1(log_z) * log_f.exp()


def fast_weights_matrix(
    q: Float[Tensor, "b t h dk"],
    k: Float[Tensor, "b t h dk"],
    log_f: Float[Tensor, "b t h dk"] | None,
    log_z: Float[Tensor, "b t h dv"],
    gate: Float[Tensor, "b t h dv"] | None = None,
    *,
    joint: bool = False,
    reset: Bool[Tensor, "b t"] | None = None,
) -> Float[Tensor, "b t t"]:
    """Return the mean magnitude over heads and value channels of the weight of v of step m in y of step n.

        W_nm = mean_hj |gate_mj sum_i q_ni k_mi prod_{l=m+1..n} f_li z_lj|

    Args:
        q: queries (b, t, h, dk).
        k: keys (b, t, h, dk).
        log_f: as for `fast_weights`.
        log_z: as for `fast_weights`.
        gate: a factor of v (b, t, h, dv); None is 1.
        joint: as for `fast_weights`; the product is then of these decays.
        reset: (b, t) bool.
    """
    # to one value channel, the fast weights are a head of its own
    d_value = log_z.shape[-1]
    q, k = (part.repeat_interleave(d_value, 2) for part in (q, k))
    if gate is not None:
        k = k * gate.flatten(2)[..., None]
    if log_f is None:
        log_decay = log_z[..., None]
    elif joint:
        log_decay = joint_decay(log_f[..., None, :], log_z[..., None]).log()
    else:
        log_decay = log_f[..., None, :] + log_z[..., None]
    return gate_loop_matrix(q, k, log_decay.flatten(2, 3), reset=reset).abs().mean(1)
