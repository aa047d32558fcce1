"""UnICORNN: Undamped Independent Controlled Oscillatory RNN (Rusch and Mishra, 2021).

    z_t = z_{t-1} - dt sigmoid(c) * (tanh(w * y_{t-1} + V x_t + b) + alpha y_{t-1})
    y_t = y_{t-1} + dt sigmoid(c) * z_t

x is the input, t time, * the product of channels, dt a time step and alpha a frequency. y has the positions
of the oscillators and is the output, and z has their velocities. A channel has a time scale c and a recurrent
weight w.

Oscillators do not see each other within a layer, so Newton's method has Jacobians of 2 x 2. Each step can be
inverted, and the backward pass rebuilds the states from the last one.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from linrec.nn.cells import NonlinearMixer
from linrec.nn.mixer import State
from linrec.nn.parameters import mark
from linrec.ops.core.precision import wide, without_autocast
from linrec.ops.nonlinear_scan import leaves_graph
from linrec.rules import at_least, positive, require
from linrec.torch_private import transforms_active

__all__ = ["UnICORNN"]


class UnICORNN(NonlinearMixer):
    """z_t = z - D (tanh(w y + V x_t + b) + alpha y), y_t = y + D z_t, D = dt sigmoid(c): single oscillators.

    | task of the paper | arguments |
    |---|---|
    | permuted sequential MNIST, 3 layers of 256 channels | the defaults |
    | noisy CIFAR-10, 3 layers of 128 channels | `dt=0.126, alpha=13` |
    | respiratory rate, 3 layers of 128 channels | `dt=0.011, alpha=9` |
    | EigenWorms, layers 1 and 2 of 32 channels | `dt=2.81e-5` and `dt=0.0343`, `alpha=0` |
    | IMDB, layers 1 and 2 of 128 channels | `dt=0.0066` and `dt=0.205`, `alpha=0` |

    In a model, `layer_args={"dt": (2.81e-5, 0.0343)}` gives each layer its time step, and the paper's stack
    is `skip=False, norm="none", channel_mixing="none"`.

    Initial values are those of the released code: w uniform in [0, 1], c in [-0.1, 0.1], V in
    +- sqrt(6 / (65 d_model)), b zero. w and c are marked as group "transition" without weight decay. The
    released model drops channels of y between layers, the same at all steps; the dropout is not here.

    With `reversible`, the backward pass stores V x, the last state and the states before resets, and no
    others. Rounding errors of the rebuilt states grow with the length. A call with `reset` then waits for the
    device to read the flags. `torch.export` stores all states, and so does `torch.compile` where there is a
    `reset` or a sequence of up to 32 steps; longer loops are graph breaks.

    Args:
        d_model: width of the sequence, and number of oscillators.
        dt: largest time step.
        alpha: squared frequency of all oscillators.
        reversible: whether the backward pass rebuilds the states. It has no second derivatives.
        mode: mode of `linrec.ops.nonlinear_scan`; "auto" is the loop.

    Raises:
        ValueError: a number is out of range, the mode does not exist, or `reversible` is true in a mode of
            Newton's method.

    Source:
        Rusch and Mishra, UnICORNN: A recurrent model for learning very long time dependencies (2021), and
        the released code.

    Example:
        >>> mixer = UnICORNN(64)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 64, 2]))
    """

    def __init__(
        self,
        d_model: int,
        *,
        dt: float = 0.19,
        alpha: float = 30.65,
        reversible: bool = False,
        mode: str = "auto",
    ) -> None:
        super().__init__(d_model, mode, d_model, 2)
        positive(dt=dt)
        at_least(0, alpha=alpha)
        require(
            not reversible or mode in ("auto", "recurrent"),
            f"`reversible` needs the loop, but `mode` is {mode!r}. Pass mode='auto'.",
        )
        self.dt, self.alpha, self.reversible = dt, alpha, reversible
        # the loop that rebuilds the states is no operator
        self.takes_turns = reversible

        self.V = nn.Linear(d_model, d_model)
        nn.init.kaiming_uniform_(self.V.weight, a=8)
        nn.init.zeros_(self.V.bias)
        self.w = nn.Parameter(torch.rand(d_model))
        self.c = nn.Parameter(torch.empty(d_model).uniform_(-0.1, 0.1))
        mark(self, "w", "c", float32=True)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return y of every step, and the last z and y (b, d_model, 2)."""
        start, step = self.started(x, state), self.dt * torch.sigmoid(self.c)
        Vx = self.V(x)
        transformed = transforms_active()
        if self.reversible and not torch.compiler.is_compiling() and not transformed:
            return self._rebuilt(Vx, step, start, reset)
        if self.reversible and reset is None and leaves_graph(Vx, self.mode):
            return torch.compiler.disable(self._rebuilt)(Vx, step, start, None)
        zy, state = self.nonlinear_scan(self._cell, Vx, (self.w, step), state=start, reset=reset)
        return zy[..., 1], state

    def _cell(self, zy: Tensor, Vx: Tensor, w: Tensor, step: Tensor) -> Tensor:
        """Return z_t and y_t on the last axis."""
        z, y = zy.unbind(-1)
        z = z - step * (torch.tanh(w * y + Vx) + self.alpha * y)
        return torch.stack([z, y + step * z], -1)

    def _rebuilt(
        self, Vx: Tensor, step: Tensor, start: Tensor, reset: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        with without_autocast(Vx.device.type):
            y, state = _Reversible.apply(self.alpha, reset, *map(wide, (Vx, self.w, step, start)))
        return y.to(Vx.dtype), state


class _Reversible(torch.autograd.Function):
    """The loop, whose backward pass rebuilds the states from the last state."""

    @staticmethod
    def forward(
        ctx: Any, alpha: float, reset: Tensor | None, Vx: Tensor, w: Tensor, step: Tensor, start: Tensor
    ) -> tuple[Tensor, Tensor]:
        z, y = start.unbind(-1)
        out, lost = torch.empty_like(Vx), []
        cuts = _cuts(reset, Vx.shape[1])
        for t, cut in enumerate(cuts):
            if cut is not None:
                lost.append(torch.stack([z[cut[:, 0]], y[cut[:, 0]]], -1))
                z, y = z.masked_fill(cut, 0), y.masked_fill(cut, 0)
            z = z - step * (torch.tanh(w * y + Vx[:, t]) + alpha * y)
            y = y + step * z
            out[:, t] = y
        last = torch.stack([z, y], -1)
        ctx.alpha = alpha
        ctx.save_for_backward(reset, Vx, w, step, last, *lost)
        return out, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out: Tensor, last: Tensor) -> tuple[Tensor | None, ...]:
        reset, Vx, w, step, state, *lost = ctx.saved_tensors
        alpha = ctx.alpha
        z, y = state.unbind(-1)
        # gradients have the names of their tensors, with d before them
        dz, dy = last.unbind(-1)
        dVx, dw, dstep = torch.empty_like(Vx), torch.zeros_like(w), torch.zeros_like(step)
        for t, cut in reversed(list(enumerate(_cuts(reset, Vx.shape[1])))):
            before = y - step * z
            push = torch.tanh(w * before + Vx[:, t])
            force = push + alpha * before
            dy = dy + out[:, t]
            dz = dz + step * dy
            dforce = -step * dz
            dpush = dforce * (1 - push**2)
            dVx[:, t] = dpush
            dw += (dpush * before).sum(0)
            dstep += (dy * z - dz * force).sum(0)
            dy = dy + dpush * w + dforce * alpha
            z, y = z + step * force, before
            if cut is not None:
                old_z, old_y = lost.pop().unbind(-1)
                z, y = z.masked_scatter(cut, old_z), y.masked_scatter(cut, old_y)
                dz, dy = dz.masked_fill(cut, 0), dy.masked_fill(cut, 0)
        return None, None, dVx, dw, dstep, torch.stack([dz, dy], -1)


def _cuts(reset: Tensor | None, time: int) -> list[Tensor | None]:
    """Return the rows that every step resets, (b, 1); None at steps without any."""
    if reset is None:
        return [None] * time
    return [reset[:, t, None] if found else None for t, found in enumerate(reset.any(0).tolist())]
