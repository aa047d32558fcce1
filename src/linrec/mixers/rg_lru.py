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

import math
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from linrec.errors import unknown
from linrec.mixers.base import Mixer, State, Transitions, elementwise_mixing
from linrec.nn.block_diagonal import BlockDiagonalLinear
from linrec.nn.parameters import mark
from linrec.ops.scan import scan

__all__ = ["RGLRU"]

InitOf = Literal["a", "a^c"]
Start = Literal["scaled", "whole"]

# of the paper, in all its models
BLOCKS = 16
# -log a_t is no less in the root, whose slope is infinite where a_t is 1: small enough to change no output
LEAST = 1e-30


class RGLRU(Mixer):
    """h_t = a_t * h_{t-1} + sqrt(1 - a_t^2) * (i_t * x_t) with a_t = sigmoid(Lambda)^(c r_t).

    The root keeps the variance of h that of i x: what a channel remembers longer, it takes in less of. It is
    made of log a_t, which keeps its digits where a_t is near 1.

    | variant | argument |
    |---|---|
    | the released models | `start="whole"` |
    | without recurrence gate: r_t = 1 | `recurrence_gate=False` |
    | without input gate: i_t = 1 | `input_gate=False` |

    When training starts, the gates' matrices are normal with variance 1 / (`d_model` / `n_blocks`), their
    biases 0, and a lies in `a_init`. In the released code it is a itself, with a^2 uniform; the paper's text
    has a^c there, uniform, which is a memory c times as long.

    Lambda, W_a and b_a are marked as group "transition" without weight decay.

    Args:
        d_model: width of the sequence and of the state.
        n_blocks: blocks of W_a and W_x. None is 16, or the largest number below that divides `d_model`.
        c: exponent of the transition, where the recurrence gate is 1.
        a_init: (low, high), the range that a starts in.
        a_init_of: what is drawn from `a_init`, "a" or "a^c".
        start: how the first step of a sequence enters, and that after a reset: "scaled" as all others, or
            "whole", by a factor of 1 instead of the root: h_1 = i_1 * x_1.
        recurrence_gate: whether there is r.
        input_gate: whether there is i.

    Raises:
        ValueError: blocks that do not divide `d_model`, an unknown name of a variant, or a number out of
            range.

    Source:
        Griffin (De and others, 2024), section 2.4; `start` and `a_init_of` are the released code's.

    Example:
        >>> import torch
        >>> mixer = RGLRU(64)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 64]))
    """

    def __init__(
        self,
        d_model: int,
        *,
        n_blocks: int | None = None,
        c: float = 8.0,
        a_init: tuple[float, float] = (0.9, 0.999),
        a_init_of: InitOf = "a",
        start: Start = "scaled",
        recurrence_gate: bool = True,
        input_gate: bool = True,
    ) -> None:
        super().__init__(d_model)
        if a_init_of not in ("a", "a^c"):
            raise unknown("`a_init_of`", a_init_of, ["a", "a^c"])
        if start not in ("scaled", "whole"):
            raise unknown("`start`", start, ["scaled", "whole"])
        if not 0 < c < math.inf:
            raise ValueError(f"`c` must be a finite number above 0; got {c}. The paper's is 8.")
        low, high = a_init
        if not 0 < low <= high < 1:
            raise ValueError(
                f"`a_init` must be (low, high) with 0 < low <= high < 1; got {tuple(a_init)}. "
                "The paper's is (0.9, 0.999)."
            )
        self.c, self.start = c, start
        n_blocks = most_blocks(d_model) if n_blocks is None else n_blocks
        if n_blocks < 1 or d_model % n_blocks:
            raise ValueError(
                f"`n_blocks` must be a positive divisor of the width of the state, {d_model}; got {n_blocks}."
            )

        def gate() -> BlockDiagonalLinear:
            std = (n_blocks / d_model) ** 0.5
            return BlockDiagonalLinear(d_model, n_blocks, std=std, bias=True, exact=True)

        self.recurrence_gate = mark(gate()) if recurrence_gate else None
        self.input_gate = gate() if input_gate else None
        if a_init_of == "a":
            log_a = torch.empty(d_model).uniform_(low**2, high**2).log() / 2
        else:
            log_a = torch.empty(d_model).uniform_(low, high).log() / c
        # logit(a)
        self.Lambda = nn.Parameter(log_a - torch.log(-torch.expm1(log_a)))
        mark(self, "Lambda")
        self.keep_float32("Lambda")

    def forward(
        self,
        x: Float[Tensor, "b t d_model"],
        state: State = None,
        *,
        reset: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b t d_model"], State]:
        """Mix `x` over time; see `Mixer.forward`.

        The state is h (b, d_model); with `start="whole"`, h and the number of steps since the sequence began
        (b, 1).
        """
        self.check_input(x, reset, state)
        h, seen = state if self.start == "whole" and state is not None else (state, None)
        log_a = self._log_a(x)
        gain, seen = self._gain(x, log_a, seen, reset)
        y, h = scan(log_a.exp(), gain * x, state=h, reset=reset)
        return y.to(x.dtype), h if seen is None else (h, seen)

    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> State:
        """Zeros (batch, d_model); with `start="whole"`, those and (batch, 1)."""
        device = self.Lambda.device if device is None else device
        h = torch.zeros(batch, self.d_model, dtype=self._state_dtype(), device=device)
        return h if self.start == "scaled" else (h, h.new_zeros(batch, 1))

    @property
    def state_size(self) -> int:
        """Elements of h, d_model; with `start="whole"`, one more."""
        return self.d_model + (self.start == "whole")

    def transitions(self, x: Float[Tensor, "b t d_model"]) -> Transitions:
        """a_t; see `Mixer.transitions`."""
        return Transitions(self._log_a(x).exp(), None)

    def token_mixing(
        self, x: Float[Tensor, "b t d_model"], *, reset: Bool[Tensor, "b t"] | None = None
    ) -> Float[Tensor, "b t t"]:
        """Mean over channels of the matrix that x is multiplied by."""
        log_a = self._log_a(x)
        return elementwise_mixing(log_a.exp(), self._gain(x, log_a, None, reset)[0], x, reset)

    def _log_a(self, x: Tensor) -> Tensor:
        """log a_t (b, t, d_model); (d_model,) where it is the same at every step."""
        log_a = self.c * functional.logsigmoid(self.Lambda.to(self._state_dtype()))
        return log_a if self.recurrence_gate is None else torch.sigmoid(self.recurrence_gate(x)) * log_a

    def _gain(
        self, x: Tensor, log_a: Tensor, seen: Tensor | None, reset: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """What x is multiplied by, and the number of steps seen, None where it does not matter."""
        gain = torch.sqrt(-torch.expm1(2 * log_a.clamp(max=-LEAST)))
        if self.start == "whole":
            # a scan counts over resets and pieces as it does all else
            one = log_a.new_ones(*x.shape[:2], 1)
            steps, seen = scan(one.new_ones(1), one, state=seen, reset=reset)
            gain = torch.where(steps == 1, 1.0, gain)
        return gain if self.input_gate is None else torch.sigmoid(self.input_gate(x)) * gain, seen


def most_blocks(width: int) -> int:
    """Blocks of the paper's gates: 16, or the largest number below that divides `width`."""
    return next(n for n in range(min(BLOCKS, width), 0, -1) if width % n == 0)
