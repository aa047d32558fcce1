"""The chunkwise mode of the delta rule on GPUs."""

import functools
import inspect
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from linrec.ops import matrix_torch
from linrec.ops.gate_loop.chunkwise_triton import Chunks, Tiles
from linrec.ops.operators import differentiated, operator
from linrec.ops.triton_launch import power_of_2

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def chunkwise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    state: Tensor,
    reset: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence; arguments and results as in `reference.py`, q, k and v in any precision."""
    inputs = (q, k, v, beta, log_decay, state, reset)
    run = DeltaRule.apply if differentiated(*inputs[:6]) else DeltaRule.forward
    return run(*inputs)


class DeltaRule(torch.autograd.Function):
    """y, last = DeltaRule.apply(q, k, v, beta, log_decay, state, cut)."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor]:
        """Run the kernels."""
        return forward(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Keep the inputs: all else is made again."""
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dlast: Tensor) -> tuple[Tensor | None, ...]:
        """Run the adjoint kernels, or torch operations where the gradient is to be differentiated again."""
        inputs, needed = ctx.saved_tensors, ctx.needs_input_grad[:6]
        if torch.is_grad_enabled():
            *given, state, cut = inputs
            found = matrix_torch.gradients(
                (*needed[:5], False, needed[5]), (*given, None, state, cut), dy, dlast
            )
            return (*found[:5], found[6], None)
        gradients = backward(*inputs, dy, dlast)
        return (*(g if need else None for g, need in zip(gradients, needed, strict=True)), None)


@operator("delta_rule_chunkwise_triton")
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    state: Tensor,
    cut: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return y (b, t, h, dv) and the last state (b, h, dk, dv)."""
    chunks = _DeltaChunks(q, k, v, beta, log_decay, cut)
    states, last, corrected = chunks.corrected(state)
    return chunks.mixed(corrected, chunks.matrices(), states), last


@torch.library.register_fake(forward)
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    state: Tensor,
    cut: Tensor | None,
) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape), state.new_empty(state.shape)


@operator("delta_rule_chunkwise_triton_backward")
def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    state: Tensor,
    cut: Tensor | None,
    dy: Tensor,
    dlast: Tensor,
) -> Gradients:
    """Return the gradients of all inputs but `cut`; that of `log_decay` is empty where there is none."""
    chunks = _DeltaChunks(q, k, v, beta, log_decay, cut)
    dy = dy.contiguous()
    states, _, corrected = chunks.corrected(state)
    gradients, dstate, dcorrected = chunks.corrected_gradients(dy, dlast)
    through = chunks.applied(dcorrected, turned=True)
    passing, within = chunks.decay_gradient(), chunks.decay_gradient()
    dq, dk = chunks.gate_gradients(chunks.q, chunks.k, corrected, dy, states, gradients, passing)
    # what the corrections read under a key
    dread, dwritten = chunks.gate_gradients(
        chunks.written, chunks.k, corrected, -through, states, states, within, strict=True
    )
    strength = beta[..., None]
    wide = dread.float() if dread.dtype.itemsize < 4 else dread
    dbeta = (wide * chunks.k).sum(-1) + (through * chunks.v).sum(-1, dtype=wide.dtype)
    dk = (dk.to(wide) + dwritten.to(wide) + strength * wide).to(k.dtype)
    ddecay = q.new_empty(0) if log_decay is None else chunks.summed(passing + within, log_decay)
    return dq, dk, (strength * through).to(v.dtype), dbeta.to(beta.dtype), ddecay, dstate


@torch.library.register_fake(backward)
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    state: Tensor,
    cut: Tensor | None,
    dy: Tensor,
    dlast: Tensor,
) -> Gradients:
    ddecay = q.new_empty(0) if log_decay is None else log_decay.new_empty(log_decay.shape)
    dq, dk, dv, dbeta, dstate = (x.new_empty(x.shape) for x in (q, k, v, beta, state))
    return dq, dk, dv, dbeta, ddecay, dstate


class _DeltaChunks(Chunks):
    """The calls that the delta rule has beyond those of `gate_loop`."""

    kernels_of_delta = ("applied", "delta_states", "delta_state_gradients")

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor,
        log_decay: Tensor | None,
        cut: Tensor | None,
    ) -> None:
        super().__init__(q, k, v, log_decay, cut)
        strength = beta[..., None]
        self.written = (strength * self.k).to(k.dtype).contiguous()
        self.values = (strength * self.v).to(v.dtype).contiguous()
        self.inverses = self.mixings(self.written, strict=True, inverse=True)
        self.read = self.applied(self.written, weighed=True)

    def applied(self, x: Tensor, *, turned: bool = False, weighed: bool = False) -> Tensor:
        """T x, T^T x, or T (e^P * x), of all chunks."""
        out = torch.empty_like(x)
        tiles = self._tiles("applied")
        width, block = (self.dk, tiles.block_k) if weighed else (self.dv, tiles.block_v)
        constants = {"TURNED": turned, "WEIGHED": weighed}
        self.per_chunk("applied", -(-width // block), self.inverses, x, *self.gates, out, **constants)
        return out

    def corrected(self, start: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """States before the chunks and after the last, and the corrected values W."""
        values = self.applied(self.values)
        states = self.k.new_empty(self.batch, self.heads, self.chunks, self.dk, self.dv)
        end = torch.empty_like(start, memory_format=torch.contiguous_format)
        corrected = torch.empty_like(self.v)
        tensors = (self.k, self.read, values, *self.gates, start.contiguous(), states, end, corrected)
        self._run("delta_states", self._over_time("delta_states"), tensors)
        return states, end, corrected

    def corrected_gradients(self, dy: Tensor, dlast: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the states after the chunks and before the first, and dW."""
        gradients = self.k.new_empty(self.batch, self.heads, self.chunks, self.dk, self.dv)
        end = torch.empty_like(dlast, memory_format=torch.contiguous_format)
        dcorrected = torch.empty_like(self.v)
        given = (self.q, self.k, self.read, dy, self.mixings(self.q))
        tensors = (*given, *self.gates, dlast.contiguous(), gradients, end, dcorrected)
        self._run("delta_state_gradients", self._over_time("delta_state_gradients"), tensors)
        return gradients, end, dcorrected

    def _over_time(self, name: str) -> tuple[int, int, int]:
        return -(-self.dv // self._tiles(name).block_v), 1, self.batch * self.heads

    def _tiles(self, name: str) -> Tiles:
        if name not in self.kernels_of_delta:
            return super()._tiles(name)
        if name == "applied":
            return super()._tiles("mixed")
        # a state is whole in its key channels, for W reads all of them; 64 columns as in `Chunks._tiles`
        block_k = max(16, power_of_2(self.dk))
        return Tiles(block_k, 64, 8 if block_k > 64 else 4, 1 if self.exact else 2)

    def _kernel(self, name: str) -> Any:
        return getattr(_kernels(), name) if name in self.kernels_of_delta else super()._kernel(name)


@functools.cache
def _kernels() -> ModuleType:
    from linrec.ops.delta_rule import chunkwise_triton_kernels

    return chunkwise_triton_kernels


# autograd asks for it at every call, and making it takes longer than a small recurrence
DeltaRule.forward.__signature__ = inspect.signature(DeltaRule.forward)  # type: ignore[attr-defined]
