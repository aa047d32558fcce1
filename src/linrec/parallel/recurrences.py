"""Interface of operators that can run over segments of time: a segment's map of states, and its adjoint.

A segment maps its initial state to its final state by S_final = A * S_initial + B. A is the product of the
segment's transitions, and B is its final state from a zero initial state. The outputs are linear in S_initial
too, so the gradients of the outputs contribute a term C to the gradient of S_initial.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from linrec.ops.core.call import Call
from linrec.ops.core.isolation import documents
from linrec.ops.core.precision import accumulation, real_dtype, wide, without_autocast
from linrec.ops.gate_loop.torch import GateLoop as GateLoopInputs
from linrec.ops.matrix import segments
from linrec.ops.matrix.segments import transition
from linrec.ops.scan.torch import Scan as ScanInputs


@dataclass(frozen=True)
class Recurrence(ABC):
    """A call of an operator on a segment. `tensors` are its canonical inputs without the state, `reset` last.

    Args:
        call: the operator, and the backend that runs it.
        reverse: whether the recurrence runs from the last step to the first.
    """

    call: Call
    reverse: bool = False

    @abstractmethod
    def run(self, tensors: tuple[Any, ...], state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the outputs and S_final."""

    @abstractmethod
    def summary(self, tensors: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        """Return A, which broadcasts against a state, and B; A is infinite in rows that a reset cuts."""

    @abstractmethod
    def adjoint(self, tensors: tuple[Any, ...], dy: Tensor) -> Tensor:
        """Return C for the output gradients dy."""


class Scan(Recurrence):
    """`linrec.ops.scan` on (a, x, reset)."""

    def run(self, tensors: tuple[Any, ...], state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Run the operator."""
        a, x, reset = tensors
        return self._scan(a, x, reset, state, self.reverse)

    def summary(self, tensors: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        """Return A = prod_t a_t, and B by the operator from a zero state."""
        a, x, reset = tensors
        _, added = self.run(tensors, None)
        steps = a.expand(-1, x.shape[1], -1)
        through = steps.prod(1, dtype=accumulation(a.dtype)).to(added.dtype).expand_as(added)
        if reset is not None:
            # in reverse, `reset` at the first step cuts the link to the next segment, which `_sealed` handles
            cut = reset[:, 1:] if self.reverse else reset
            through = through.masked_fill(cut.any(1, keepdim=True), torch.inf)
        return through, added

    def adjoint(self, tensors: tuple[Any, ...], dy: Tensor) -> Tensor:
        """Return C = conj(a_1) g_1, where g_t = dy_t + conj(a_{t+1}) g_{t+1}: the operator in reverse."""
        a, _, reset = tensors
        first, shift = (-1, 1) if self.reverse else (0, -1)
        # roll wraps a transition around to the other end, where it multiplies a zero state
        _, last = self._scan(a.roll(shift, 1).conj(), dy, reset, None, not self.reverse)
        gradient = a[:, first].conj() * last
        if reset is not None and not self.reverse:
            gradient = gradient.masked_fill(reset[:, :1], 0)
        return gradient

    def _scan(
        self, a: Tensor, x: Tensor, reset: Tensor | None, state: Tensor | None, reverse: bool
    ) -> tuple[Tensor, Tensor]:
        return self.call.operator.run(ScanInputs(a, x, state, reset, reverse), self.call.backend)


class GateLoop(Recurrence):
    """`linrec.ops.gate_loop` on (q, k, v, log_decay, phase, bonus, reset)."""

    def run(self, tensors: tuple[Any, ...], state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Run the operator."""
        inputs: tuple[Any, ...] = *tensors[:-1], state, tensors[-1]
        return self.call.operator.run(GateLoopInputs(*inputs), self.call.backend)

    def summary(self, tensors: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        """Return A = exp(sum_t log_decay_t + i phase_t), B = sum_t (prod_{j>t} a_j) k_t^T v_t."""
        q, k, v, log_decay, phase, _, reset = tensors
        added = self._added(k, v, log_decay, phase, reset)
        if log_decay is not None:
            log_decay = log_decay.expand(-1, q.shape[1], -1, -1).sum(1, dtype=_real(added))
        if phase is not None:
            phase = segments.wrapped(
                phase.expand(-1, q.shape[1], -1, -1).sum(1, dtype=torch.float64), _real(added)
            )
        through = _transition(log_decay, phase, added)
        if reset is not None:
            through = through.masked_fill(reset.any(1)[:, None, None, None], torch.inf)
        return through, added

    def adjoint(self, tensors: tuple[Any, ...], dy: Tensor) -> Tensor:
        """Return C = conj(a_1) sum_t (prod_{1<j<=t} conj(a_j)) conj(q_t)^T dy_t: a sum like B, in reverse.

        With a bonus, step t reads the state before its own decay: C = sum_t (prod_{j<t} conj(a_j)) ...
        """
        q, k, _, log_decay, phase, bonus, reset = tensors
        is_complex = phase is not None or k.is_complex()
        # with a real state, the imaginary part of q does not affect the outputs
        keys = q.conj() if is_complex else q.real if q.is_complex() else q
        steps = torch.arange(q.shape[1], device=q.device)
        if bonus is None:
            # step t+1 owns the link from t to t+1; the first step's link wraps around to a zero state
            order = -steps % q.shape[1]
        else:
            order = steps.flip(0)
            if reset is not None:
                dy = dy.masked_fill(reset[:, :, None, None], 0)
        turned = [x if x is None or x.shape[1] == 1 else x[:, order] for x in (log_decay, phase)]
        gradient = self._added(
            keys.flip(1),
            dy.flip(1),
            turned[0],
            None if turned[1] is None else -turned[1],
            None if reset is None else reset[:, order],
        )
        if is_complex:
            gradient = gradient.to(torch.promote_types(gradient.dtype, torch.complex64))
        if bonus is not None:
            return gradient
        log_decay, phase = (x if x is None else x[:, 0].to(_real(gradient)) for x in (log_decay, phase))
        gradient = _transition(log_decay, phase, gradient).conj() * gradient
        if reset is not None:
            gradient = gradient.masked_fill(reset[:, 0, None, None, None], 0)
        return gradient

    def _added(
        self, k: Tensor, v: Tensor, log_decay: Tensor | None, phase: Tensor | None, reset: Tensor | None
    ) -> Tensor:
        """Return B as a sum; for heads of size 1, by the operator's fused kernel, with k in place of q."""
        if k.shape[-1] == v.shape[-1] == 1:
            return self.run((k, k, v, log_decay, phase, None, reset), None)[1]
        log_decay, phase = wide(log_decay), wide(phase)
        k, v = wide(k.transpose(1, 2)), wide(v.transpose(1, 2))
        with without_autocast(k.device.type):
            log_decay, phase = segments.gates(log_decay, phase, reset, k)
            keys = segments.keys(k, segments.suffix(log_decay), segments.suffix(phase))
            if reset is not None:
                # a weight of zero would let NaN pass, so mask instead
                document = documents(reset)
                earlier = (document < document[:, -1:])[:, None, :, None]
                keys, v = (x.masked_fill(earlier, 0) for x in (keys, v))
            added = keys.mT @ v
        return added if phase is None else torch.complex(*added.chunk(2, dim=-2))


def _transition(log_decay: Tensor | None, phase: Tensor | None, state: Tensor) -> Tensor:
    """Return exp(log_decay + i phase) of gates (b or 1, h, dk or 1), as (b, h, dk, 1) to multiply a state."""
    a = transition(log_decay, phase)
    beside = torch.ones_like(state[..., :1])
    return beside if a is None else beside * a[..., None]


def _real(state: Tensor) -> torch.dtype:
    return real_dtype(state.dtype)
