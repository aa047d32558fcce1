"""What is needed of an operator to run it over parts of time: what a part does to a state, and the adjoint.

A part maps the state that enters it to the one that leaves it by S_leaving = A * S_entering + B: A is the
product of its transitions, B what its own steps leave. Its outputs depend on S_entering linearly too, so
that a share of the gradient of S_entering, C, comes from the gradients of the outputs alone.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from linrec.ops.core.call import Call
from linrec.ops.core.isolation import documents
from linrec.ops.core.precision import accumulation, real_dtype, wide, without_autocast
from linrec.ops.gate_loop import segments
from linrec.ops.gate_loop.inputs import GateLoop as GateLoopInputs
from linrec.ops.gate_loop.torch import transition
from linrec.ops.scan.torch import Scan as ScanInputs


@dataclass(frozen=True)
class Recurrence(ABC):
    """A call of an operator. `tensors` are its canonical inputs without the state, `reset` the last of them.

    Args:
        call: the operator, and the backend that it runs.
        reverse: whether it runs from the last step to the first.
    """

    call: Call
    reverse: bool = False

    @abstractmethod
    def run(self, tensors: tuple[Any, ...], state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the outputs and S_leaving."""

    @abstractmethod
    def summary(self, tensors: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        """Return A, which broadcasts against a state, and B; A is infinite in rows where a reset cuts it."""

    @abstractmethod
    def adjoint(self, tensors: tuple[Any, ...], dy: Tensor) -> Tensor:
        """Return C for the gradients dy of the outputs."""


class Scan(Recurrence):
    """`linrec.ops.scan` of (a, x, reset)."""

    def run(self, tensors: tuple[Any, ...], state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Run the operator."""
        a, x, reset = tensors
        return self._scan(a, x, reset, state, self.reverse)

    def summary(self, tensors: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        """A = prod_t a_t; B by the operator, from no state."""
        a, x, reset = tensors
        _, added = self.run(tensors, None)
        steps = a.expand(-1, x.shape[1], -1)
        through = steps.prod(1, dtype=accumulation(a.dtype)).to(added.dtype).expand_as(added)
        if reset is not None:
            # against time, the link behind the last step that is run belongs to the next part
            cut = reset[:, 1:] if self.reverse else reset
            through = through.masked_fill(cut.any(1, keepdim=True), torch.inf)
        return through, added

    def adjoint(self, tensors: tuple[Any, ...], dy: Tensor) -> Tensor:
        """C = conj(a_1) g_1, where g_t = dy_t + conj(a_{t+1}) g_{t+1}: the operator, the other way."""
        a, _, reset = tensors
        first, shift = (-1, 1) if self.reverse else (0, -1)
        # the transition that comes around to the other end meets a state of zeros
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
    """`linrec.ops.gate_loop` of (q, k, v, log_decay, phase, bonus, reset)."""

    def run(self, tensors: tuple[Any, ...], state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Run the operator."""
        inputs: tuple[Any, ...] = *tensors[:-1], state, tensors[-1]
        return self.call.operator.run(GateLoopInputs(*inputs), self.call.backend)

    def summary(self, tensors: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        """A = exp(sum_t log_decay_t + i phase_t), B = sum_t (prod_{j>t} a_j) k_t^T v_t."""
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
        """C = conj(a_1) sum_t (prod_{1<j<=t} conj(a_j)) conj(q_t)^T dy_t: a sum like B, against time.

        With a bonus, step t reads the state before its own decay: C = sum_t (prod_{j<t} conj(a_j)) ...
        """
        q, k, _, log_decay, phase, bonus, reset = tensors
        is_complex = phase is not None or k.is_complex()
        # beside a real state, the imaginary part of q makes no outputs
        keys = q.conj() if is_complex else q.real if q.is_complex() else q
        steps = torch.arange(q.shape[1], device=q.device)
        if bonus is None:
            # the link between t and t+1 is that of step t+1; the first one comes around to a state of zeros
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
        """B: by the operator where that may be one kernel, which reads k once for q too; else as a sum."""
        if k.shape[-1] == v.shape[-1] == 1:
            return self.run((k, k, v, log_decay, phase, None, reset), None)[1]
        log_decay, phase = wide(log_decay), wide(phase)
        k, v = wide(k.transpose(1, 2)), wide(v.transpose(1, 2))
        with without_autocast(k.device.type):
            log_decay, phase = segments.gates(log_decay, phase, reset, k)
            keys = segments.keys(k, segments.suffix(log_decay), segments.suffix(phase))
            if reset is not None:
                # weights of zero would let NaN pass
                document = documents(reset)
                earlier = (document < document[:, -1:])[:, None, :, None]
                keys, v = (x.masked_fill(earlier, 0) for x in (keys, v))
            added = keys.mT @ v
        return added if phase is None else torch.complex(*added.chunk(2, dim=-2))


def _transition(log_decay: Tensor | None, phase: Tensor | None, state: Tensor) -> Tensor:
    """exp(log_decay + i phase) of gates (b or 1, h, dk or 1), as (b, h, dk, 1) beside a state."""
    a = transition(log_decay, phase)
    beside = torch.ones_like(state[..., :1])
    return beside if a is None else beside * a[..., None]


def _real(state: Tensor) -> torch.dtype:
    return real_dtype(state.dtype)
