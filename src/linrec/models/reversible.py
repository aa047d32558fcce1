"""Reversible residuals: blocks whose inputs follow from their outputs, so that training does not store them.

    y_1 = x_1 + mix(x_2)         x_2 = y_2 - channels(y_1)
    y_2 = x_2 + channels(y_1)    x_1 = y_1 - mix(x_2)

Both lines are (a, b) -> (b, a + f(b)), with f = mix, then f = channels.
"""

import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from linrec.mixers import State
from linrec.models.block import Block
from linrec.nn.mixer import Values, checked_output
from linrec.trees import Tree

__all__ = ["ReversibleBlock", "run_reversible"]


class ReversibleBlock(Block):
    """A block of two streams: y_1 = x_1 + mix(norm(x_2)) and y_2 = x_2 + channels(norm(y_1)).

    The input is [x_1 | x_2] (b, t, 2 d_model), and the output is [y_1 | y_2]. Arguments and state are those
    of a `Block` with norms before the sublayers and with a channel mixing at each step separately.

    Source:
        Gomez and others, The Reversible Residual Network (2017); Reformer (Kitaev, Kaiser and Levskaya,
        2020), section 3.

    Example:
        >>> from linrec.mixers import build
        >>> from linrec.nn import FeedForward
        >>> y, state = ReversibleBlock(build("reformer", 8), FeedForward(8, 16))(torch.zeros(2, 5, 16))
        >>> y.shape
        torch.Size([2, 5, 16])
    """

    def forward(
        self,
        x: Float[Tensor, "b t two_d_model"],
        state: State = None,
        *,
        reset: Bool[Tensor, "b t"] | None = None,
        dt: Float[Tensor, "b t"] | None = None,
        keep_state: bool = True,
        memory: Tree = None,
        values: Values | None = None,
    ) -> tuple[Float[Tensor, "b t two_d_model"], State]:
        """Apply the block to [x_1 | x_2]; otherwise as `Block.forward`, without memory and values."""
        x_1, x_2 = x.chunk(2, -1)
        y, state = self.mixed(x_2, state, reset, dt)
        y_1 = x_1 + y
        return torch.cat([y_1, x_2 + self.channels(y_1)], -1), state if keep_state else None

    def mixed(
        self, x: Tensor, state: State, reset: Tensor | None, dt: Tensor | None
    ) -> tuple[Float[Tensor, "b t d_model"], State]:
        """Return the output of time mixing, and the state."""
        over: dict[str, Any] = {"reset": reset} if dt is None else {"reset": reset, "dt": dt}
        y, state = checked_output(self.mixer, self.mixer(self.mixer_norm(x), state, **over), x)
        return y if self.mixer.own_dropout else self.dropout(y), state

    def channels(self, x: Tensor) -> Float[Tensor, "b t d_model"]:
        """Return the output of channel mixing."""
        return self.dropout(cast(nn.Module, self.channel_mixing)(self.channel_mixing_norm(x)))


def run_reversible(
    blocks: Sequence[ReversibleBlock],
    x: Float[Tensor, "b t d_model"],
    states: Sequence[State],
    *,
    reset: Bool[Tensor, "b t"] | None,
    dt: Float[Tensor, "b t"] | None,
    keep_state: bool,
) -> tuple[Float[Tensor, "b t d_model"], tuple[State, ...]]:
    """Return (y_1 + y_2) / 2 after all blocks, from x_1 = x_2 = x, and the states.

    Where gradients are recorded, and states are neither given nor kept, the backward pass computes the inputs
    of each block from its outputs. Then the memory does not grow with the number of blocks, and gradients
    have no gradients. Compiled models keep activations.
    """
    y = torch.cat([x, x], -1)
    without_states = not keep_state and all(state is None for state in states)
    constant = dt is None or not dt.requires_grad
    if torch.is_grad_enabled() and without_states and constant and not torch.compiler.is_compiling():
        halves = [half for block in blocks for half in _halves(block, reset, dt)]
        parameters = dict.fromkeys(p for half in halves for p in half.parameters)
        return _mean(_Reversible.apply(halves, y, *parameters)), (None,) * len(blocks)
    after = []
    for block, state in zip(blocks, states, strict=True):
        y, state = block(y, state, reset=reset, dt=dt, keep_state=keep_state)
        after.append(state)
    return _mean(y), tuple(after)


class _Half(NamedTuple):
    """A sublayer f of a block, and the parameters that it has."""

    f: Callable[[Tensor], Tensor]
    parameters: tuple[nn.Parameter, ...]


def _halves(block: ReversibleBlock, reset: Tensor | None, dt: Tensor | None) -> Iterator[_Half]:
    def mixed(x: Tensor) -> Tensor:
        return block.mixed(x, None, reset, dt)[0]

    yield _Half(mixed, (*block.mixer.parameters(), *block.mixer_norm.parameters()))
    channels = cast(nn.Module, block.channel_mixing)
    yield _Half(block.channels, (*channels.parameters(), *block.channel_mixing_norm.parameters()))


def _mean(y: Tensor) -> Tensor:
    y_1, y_2 = y.chunk(2, -1)
    return (y_1 + y_2) / 2


class _Again:
    """A function that runs with gradients, twice with the same random numbers, autocast and contexts."""

    def __init__(self, f: Callable[[Tensor], Tensor], x: Tensor) -> None:
        kind = x.device.type
        self.f, self.context, self.kind = f, contextvars.copy_context(), kind
        self.devices = [x.device.index] if x.is_cuda else []
        self.state, self.on_device = (
            torch.get_rng_state(),
            [torch.cuda.get_rng_state(d) for d in self.devices],
        )
        self.casts, self.dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    def first(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return x, to differentiate for, and f(x)."""
        # autocast would keep a cast of each weight, whose graph the second run cannot join
        cast = torch.autocast(self.kind, self.dtype, self.casts, cache_enabled=False)
        with torch.enable_grad(), cast:
            x = x.detach().requires_grad_()
            return x, self.context.copy().run(self.f, x)

    def again(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same as `first`."""
        with torch.random.fork_rng(self.devices):
            torch.set_rng_state(self.state)
            for device, state in zip(self.devices, self.on_device, strict=True):
                torch.cuda.set_rng_state(state, device)
            return self.first(x)


class _Reversible(torch.autograd.Function):
    """(a, b) -> (b, a + f(b)) for each f of `halves`; stores the last pair alone."""

    @staticmethod
    def forward(ctx: Any, halves: Sequence[_Half], y: Tensor, *parameters: Tensor) -> Tensor:
        ctx.parameters, ctx.runs = parameters, []
        a, b = y.chunk(2, -1)
        for half in halves:
            run = _Again(half.f, b)
            a, b = b, a + run.first(b)[1].detach()
            ctx.runs.append((run, half.parameters))
        y = torch.cat([a, b], -1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (y,) = ctx.saved_tensors
        (b, c), (db, dc) = y.chunk(2, -1), dy.chunk(2, -1)
        gradients: dict[Tensor, Tensor] = {}
        while ctx.runs:
            run, parameters = ctx.runs.pop()
            x, z = run.again(b)
            wanted = [p for p in parameters if p.requires_grad]
            dx, *found = torch.autograd.grad(z, [x, *wanted], dc.to(z.dtype), allow_unused=True)
            for p, gradient in zip(wanted, found, strict=True):
                if gradient is not None:
                    gradients[p] = gradients[p] + gradient if p in gradients else gradient
            b, c = c - z.detach(), b
            db, dc = dc, db if dx is None else db + dx
        return None, torch.cat([db, dc], -1), *(gradients.get(p) for p in ctx.parameters)
