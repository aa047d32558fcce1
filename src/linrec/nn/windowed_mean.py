"""Weighted means of all steps so far, with weights of their own for the steps of a window."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from linrec.nn.positions import Windows
from linrec.nn.running_maximum import running_maximum
from linrec.ops.core.precision import without_autocast
from linrec.ops.scan import scan

__all__ = ["WindowState", "window_biases", "windowed_mean", "windowed_weights"]


class WindowState(NamedTuple):
    """State of a windowed mean after a piece of a sequence.

    Attributes:
        sums: sums of exp(k) v and of exp(k), as the last column, over the steps behind the window, both times
            exp(-largest), (b, h, dv + 1).
        largest: the largest key behind the window (b, h).
        k: keys of the last s steps (b, s, h).
        v: values of the last s steps (b, s, h, dv).
        seen: steps of each sequence so far, (b,) int64.
    """

    sums: Float[Tensor, "b h dv+1"]
    largest: Float[Tensor, "b h"]
    k: Float[Tensor, "b s h"]
    v: Float[Tensor, "b s h dv"]
    seen: Int[Tensor, "b"]

    @classmethod
    def empty(cls, batch: int, h: int, dv: int, s: int, *, like: Tensor) -> "WindowState":
        """Return the state at the start, with the dtype and the device of `like`."""
        return cls(
            like.new_zeros(batch, h, dv + 1),
            like.new_full((batch, h), -torch.inf),
            like.new_zeros(batch, s, h),
            like.new_zeros(batch, s, h, dv),
            like.new_zeros(batch, dtype=torch.int64),
        )


def windowed_mean(
    k: Float[Tensor, "b t h"],
    v: Float[Tensor, "b t h dv"],
    w: Float[Tensor, "*bt #h s"],
    position: Int[Tensor, "b t"],
    state: WindowState,
    *,
    reset: Bool[Tensor, "b t"] | None = None,
) -> tuple[Float[Tensor, "b t h dv"], WindowState]:
    """Return sum_m exp(k_m + w_nm) v_m / sum_m exp(k_m + w_nm) over m <= n, with w_nm = 0 for n - m >= s.

    Steps behind the window of s steps are two running sums over their largest exponential; the window is
    formed in pairs of steps. No exponential overflows. Memory grows with s keys and values for each step.

    Args:
        k: keys (b, t, h).
        v: values (b, t, h, dv).
        w: biases of the steps of each window, oldest first; w[..., -1] is the bias of the step itself. The
            shape is (b, t, h or 1, s), or (h or 1, s) for biases that are the same at every step.
        position: of each step in its sequence (b, t).
        state: the state that an earlier call returned.
        reset: (b, t) bool, true where a new sequence starts.

    Returns:
        The means (b, t, h, dv), and the state after the last step.

    Example:
        >>> k, v, w = torch.zeros(1, 3, 1), torch.arange(3.0).reshape(1, 3, 1, 1), torch.zeros(1, 2)
        >>> state = WindowState.empty(1, 1, 1, 2, like=k)
        >>> windowed_mean(k, v, w, torch.arange(3)[None], state)[0].flatten().tolist()
        [0.0, 0.5, 1.0]
    """
    (t, h), s = k.shape[1:], w.shape[-1]
    k, v = torch.cat([state.k, k], 1), torch.cat([state.v, v], 1)
    # a step that is s steps old leaves the window
    passed = position >= s
    old_k = k[:, :t].masked_fill(~passed[..., None], -torch.inf)
    old_v = v[:, :t].masked_fill(~passed[..., None, None], 0)
    maxima = running_maximum(old_k, state.largest, reset=reset)
    # -inf less -inf would be NaN
    m = maxima.clamp(min=torch.finfo(k.dtype).min)
    fade, weight = (m[:, :-1] - m[:, 1:]).clamp(max=0).exp(), (old_k - m[:, 1:]).exp()[..., None]
    update = torch.cat([weight * old_v, weight], -1)
    sums, last = scan(
        fade[..., None].expand_as(update).flatten(2),
        update.flatten(2),
        state=state.sums.flatten(1),
        reset=reset,
    )
    n, d = sums.unflatten(2, (h, -1)).split([v.shape[-1], 1], -1)
    d = d.masked_fill(~passed[..., None, None], 1)
    behind = (d.squeeze(-1).log() + m[:, 1:]).masked_fill(~passed[..., None], -torch.inf)

    age = torch.arange(s - 1, -1, -1, device=k.device)
    hidden = (age > position[..., None])[:, :, None]
    near = (k.unfold(1, s, 1)[:, 1:] + w).masked_fill(hidden, -torch.inf)
    near_v = v.unfold(1, s, 1)[:, 1:]
    seen = torch.cat([state.seen[:, None] - 1, position], 1)[:, -1] + 1
    # views would keep all steps as long as the state
    largest, last_k, last_v = (x.clone() for x in (maxima[:, -1], k[:, t:], v[:, t:]))
    if reset is not None:
        # a share of zero would let NaN pass
        near_v = near_v.masked_fill(hidden[..., None, :], 0)
        last_v = last_v.masked_fill((age >= seen[:, None])[..., None, None], 0)
    share = torch.cat([near, behind[..., None]], -1).softmax(-1)
    mean = (share[..., None, :-1] * near_v).sum(-1) + share[..., -1:] * (n / d)
    return mean, WindowState(last.unflatten(1, (h, -1)), largest, last_k, last_v, seen)


def windowed_weights(
    k: Float[Tensor, "b t h"], w: Float[Tensor, "*bt #h s"], position: Int[Tensor, "b t"]
) -> Float[Tensor, "b t t h"]:
    """Return the weight of v_m in `windowed_mean` at step n, for sequences that start at the first step.

    Example:
        >>> k, w = torch.zeros(1, 2, 1), torch.tensor([[1.0, 3.0]]).log()
        >>> windowed_weights(k, w, torch.arange(2)[None])[..., 0]
        tensor([[[1.0000, 0.0000],
                 [0.2500, 0.7500]]])
    """
    t, s = k.shape[1], w.shape[-1]
    step = torch.arange(t, device=k.device)
    age = step[:, None] - step
    pairs = w.flip(-1).expand(k.shape[0], t, -1, -1).mT
    index = age.clamp(0, s - 1)[None, ..., None].expand(k.shape[0], -1, -1, pairs.shape[-1])
    bias = pairs.gather(2, index).masked_fill((age >= s)[..., None], 0)
    hidden = (age < 0) | (age > position[..., None])
    return (k[:, None] + bias).masked_fill(hidden[..., None], -torch.inf).softmax(2)


def window_biases(
    u: Float[Tensor, "T r"],
    v: Float[Tensor, "T r"],
    position: Int[Tensor, "b t"],
    seen: Int[Tensor, "b"],
    *,
    size: int,
) -> Float[Tensor, "b t size"]:
    """Return u_n . v_m for the steps m of the window of each step n, oldest first.

    Args:
        u: of the positions of steps, (T, r).
        v: of the positions of the steps of windows, (T, r). Positions from T on are T - 1.
        position: of each step in its sequence, (b, t).
        seen: steps of each sequence before the first (b,).
        size: steps of a window, the step itself included.

    Example:
        >>> u, v = torch.ones(4, 1), torch.arange(4.0)[:, None]
        >>> window_biases(u, v, torch.tensor([[2, 3]]), torch.tensor([2]), size=2)
        tensor([[[1., 2.],
                 [2., 3.]]])
    """
    windows, last = Windows(position.shape[1], size), u.shape[0] - 1
    before = seen[:, None] + torch.arange(-size, 0, device=seen.device)
    seen_from = torch.cat([before, position], 1).clamp(0, last)
    with without_autocast(u.device.type):
        w = windows.steps(u[position.clamp(max=last)]) @ windows.behind(v[seen_from])
    # a block sees `size` steps before itself
    oldest = torch.arange(w.shape[2], device=w.device)[:, None] + 1
    index = oldest + torch.arange(size, device=w.device)
    return windows.joined(w.gather(-1, index.expand(*w.shape[:2], -1, -1)))
