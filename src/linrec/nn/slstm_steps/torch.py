"""The loop in torch operations, for every device and dtype."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from linrec.nn.cells import Step, Tensors, step_by_step
from linrec.ops.core.precision import wide


class Steps(NamedTuple):
    """Inputs of both backends.

    Attributes:
        Wx: (b, t, 4, h, d), gates in the order i, f, z, o.
        R: (h, d, 4 d).
        hidden: h before the first step, (b, h, d).
        cell: c exp(-m).
        normalizer: n exp(-m).
        largest: m.
        reset: None or (b, t) bool.
        sigmoid: whether forget gates are sigmoids; else they are exponentials.
    """

    Wx: Tensor
    R: Tensor
    hidden: Tensor
    cell: Tensor
    normalizer: Tensor
    largest: Tensor
    reset: Tensor | None
    sigmoid: bool


Ends = tuple[Tensor, Tensor, Tensor, Tensor]
Kept = tuple[Tensor, ...]


def log_forget(f: Tensor, sigmoid: bool) -> Tensor:
    """Return the logarithm of forget gates."""
    return functional.logsigmoid(f) if sigmoid else f


def by_step(given: Steps, *, keep: bool = False) -> tuple[Tensor, Ends, Kept]:
    """Return h of every step, the last states and, with `keep`, the values that the backward kernel reads."""
    # (t, h, b, 4 d), contiguous for each step
    Wx, R = wide(given.Wx).permute(1, 3, 0, 2, 4).flatten(-2), wide(given.R)

    def step(state: Tensors, Wx: Tensor) -> Step:
        h, *before = state
        c, n, m = before
        gates = torch.baddbmm(Wx, h, R)
        log_i, f, z, o = gates.chunk(4, -1)
        kept = log_forget(f, given.sigmoid) + m
        # c / n does not depend on m, so no gradient passes it
        m = torch.maximum(kept, log_i).detach()
        i, f = (log_i - m).exp(), (kept - m).exp()
        c = f * c + i * z.tanh()
        n = f * n + i
        h = o.sigmoid() * c / n
        return (h, c, n, m), (h, gates, *before) if keep else (h,)

    start = tuple(part.transpose(0, 1).to(R.dtype) for part in given[2:6])
    fresh = (0.0, 0.0, 0.0, -torch.inf)
    end, outputs = step_by_step("slstm", step, start, [Wx], reset=given.reset, fresh=fresh, axis=0)
    hidden, *kept = (x.permute(2, 0, 1, 3) for x in outputs)
    if keep:
        kept[0] = kept[0].unflatten(-1, (4, -1)).transpose(2, 3)
    h, c, n, m = (part.transpose(0, 1) for part in end)
    return hidden, (h, c, n, m), tuple(kept)
