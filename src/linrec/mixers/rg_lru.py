"""RG-LRU, of Griffin: Mixing Gated Linear Recurrences with Local Attention (De and others, 2024).

    r_t = sigmoid(W_a x_t + b_a)
    i_t = sigmoid(W_x x_t + b_x)
    a_t = a^(c r_t),  a = sigmoid(Lambda)
    h_t = a_t * h_{t-1} + sqrt(1 - a_t^2) * (i_t * x_t)
    y_t = h_t

x input, r recurrence gate, i input gate, a transition of a channel whose gate is at 1 / c, c = 8, h hidden
state, y output, t time; W_a and W_x are block-diagonal. It is the unit alone; `linrec.mixers.hawk` is the
block that the paper's models have around it.
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from linrec.nn.block_diagonal import BlockDiagonalLinear, block_projected
from linrec.nn.mixer import Mixer, State
from linrec.nn.parameters import mark
from linrec.ops.inspection import note
from linrec.ops.scan import scan
from linrec.rules import divisor, positive, span

__all__ = ["RGLRU", "Variant"]

Variant = Literal["paper", "released"]
InitOf = Literal["a", "a^c"]
Start = Literal["scaled", "whole"]

# of the paper, in all its models
BLOCKS = 16
# the root's slope is infinite where a_t is 1, so -log a_t is at least this number, which changes no output
LEAST = 1e-30


class RGLRU(Mixer):
    """h_t = a_t * h_{t-1} + sqrt(1 - a_t^2) * (i_t * x_t) with a_t = sigmoid(Lambda)^(c r_t).

    The root keeps the variance of h equal to the variance of i x: a channel that remembers longer takes in
    less. The root is computed from log a_t, which keeps its digits where a_t is near 1.

    | variant | argument |
    |---|---|
    | the released code and models | `variant="released"`: `start="whole"`, `a_init_of="a"` |
    | without recurrence gate: r_t = 1 | `recurrence_gate=False` |
    | without input gate: i_t = 1 | `input_gate=False` |

    When training starts, the gates' matrices are normal with variance 1 / (`d_model` / `n_blocks`), their
    biases 0. The paper draws a^c uniformly from `a_init`. The released code draws a itself, with a^2 uniform,
    so that its memory starts c times as short.

    Lambda, W_a and b_a are marked as group "transition" without weight decay.

    Args:
        d_model: width of the sequence and of the state.
        n_blocks: blocks of W_a and W_x. None is 16, or the largest number below that divides `d_model`.
        variant: "paper", or "released" for the released code. It sets the arguments below that are None.
        c: exponent of the transition, where the recurrence gate is 1.
        a_init: (low, high), the range that a or a^c starts in.
        a_init_of: "a^c", the paper's, or "a", the released code's: the quantity drawn from `a_init`.
        start: how the first step of a sequence enters, and the first step after a reset. "scaled" is the
            paper's equation. "whole" is the released code, with a factor of 1 for the root: h_1 = i_1 * x_1.
        recurrence_gate: whether there is r.
        input_gate: whether there is i.

    Raises:
        ValueError: blocks that do not divide `d_model`, an unknown name of a variant, or a number out of
            range.

    Source:
        Griffin (De and others, 2024), section 2.4; its code, google-deepmind/recurrentgemma.

    Example:
        >>> mixer = RGLRU(64)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 64]))
    """

    recurrence = "scan"

    def __init__(
        self,
        d_model: int,
        *,
        n_blocks: int | None = None,
        variant: Variant = "paper",
        c: float = 8.0,
        a_init: tuple[float, float] = (0.9, 0.999),
        a_init_of: InitOf | None = None,
        start: Start | None = None,
        recurrence_gate: bool = True,
        input_gate: bool = True,
    ) -> None:
        super().__init__(d_model)
        a_init_of = a_init_of or ("a^c" if variant == "paper" else "a")
        start = start or ("scaled" if variant == "paper" else "whole")
        positive(c=c, cure="The paper's is 8.")
        span(0, 1, a_init=a_init, cure="The paper's is (0.9, 0.999).")
        self.c, self.start = c, start
        n_blocks = most_blocks(d_model) if n_blocks is None else n_blocks
        divisor("the width of the state", d_model, n_blocks=n_blocks)

        def gate() -> BlockDiagonalLinear:
            std = (n_blocks / d_model) ** 0.5
            return BlockDiagonalLinear(d_model, n_blocks, std=std, bias=True, exact=True)

        self.recurrence_gate = mark(gate()) if recurrence_gate else None
        self.input_gate = gate() if input_gate else None
        low, high = a_init
        if a_init_of == "a":
            log_a = torch.empty(d_model).uniform_(low**2, high**2).log() / 2
        else:
            log_a = torch.empty(d_model).uniform_(low, high).log() / c
        # logit(a)
        self.Lambda = nn.Parameter(log_a - torch.log(-torch.expm1(log_a)))
        mark(self, "Lambda", float32=True)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return y, and h (b, d_model); with `start="whole"`, h and the steps since the sequence began."""
        h, steps = state if self.start == "whole" and state is not None else (state, None)
        log_a = self.c * functional.logsigmoid(self.Lambda)
        gates = [gate for gate in (self.recurrence_gate, self.input_gate) if gate is not None]
        of_gates = [torch.sigmoid(z) for z in block_projected(x, *gates)] if gates else []
        if self.recurrence_gate is not None:
            log_a = of_gates[0] * log_a
        gain = torch.sqrt(-torch.expm1(2 * log_a.clamp(max=-LEAST)))
        if self.start == "whole":
            # a scan counts over resets and pieces as it does all else
            one = log_a.new_ones(*x.shape[:2], 1)
            count, steps = scan(one.new_ones(1), one, state=steps, reset=reset)
            gain = torch.where(count == 1, 1.0, gain)
        if self.input_gate is not None:
            gain = of_gates[-1] * gain
        note(gate=gain)
        y, h = scan(log_a.exp(), gain * x, state=h, reset=reset)
        return y.to(x.dtype), h if steps is None else (h, steps)


def most_blocks(width: int) -> int:
    """Blocks of the paper's gates: 16, or the largest number below that divides `width`."""
    return next(n for n in range(min(BLOCKS, width), 0, -1) if width % n == 0)
