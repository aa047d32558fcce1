"""Hawk, of Griffin: Mixing Gated Linear Recurrences with Local Attention (De and others, 2024).

    g_t = GELU(W_g x_t + b_g)
    u_t = W_u x_t + b_u
    v_t = sum_{j=0..3} w_j * u_{t-j} + b_v
    h_t = RG-LRU(v)_t
    y_t = W_o (g_t * h_t) + b_o

The paper's recurrent block. x input, g gate, u and v input of the recurrence before and behind a convolution
of four steps, h output of the recurrent unit (`linrec.mixers.rg_lru`), y output, t time. A model of these
blocks is Hawk; Griffin has local attention in every third layer.
"""

import math
from typing import Literal

from torch import Tensor, nn

from linrec.mixers.rg_lru import BLOCKS, RGLRU, InitOf, Start, Variant
from linrec.nn.activations import ACTIVATIONS
from linrec.nn.mixer import Mixer, State
from linrec.nn.projections import draw
from linrec.nn.short_convolution import ShortConvolution
from linrec.rules import at_least

__all__ = ["Hawk"]

Activation = Literal["gelu", "gelu_tanh"]

# of the released code: variance of the taps' sum
TAPS_VARIANCE = 0.01


class Hawk(Mixer):
    """y_t = W_o (GELU(W_g x_t + b_g) * RG-LRU(conv(W_u x + b_u))_t) + b_o: one branch gates the other.

    | model | arguments |
    |---|---|
    | Hawk | the defaults |
    | Griffin | `ModelConfig(mixer=("hawk", "hawk", "attention"))`; the preset "griffin" |
    | RecurrentGemma | `variant="released"`, `d_rnn` = `d_model`, `n_blocks=10` |

    When training starts, the matrices are normal with variance 1 / their inputs, the taps with variance
    0.01 / `conv_size`, as in the released code, and all biases are 0. (That code also multiplies W_o by
    sqrt(2 / layers).)

    Args:
        d_model: width of the sequence.
        d_rnn: width of the two branches. None is 4/3 `d_model`, or the next smaller multiple of `n_blocks`.
        n_blocks: blocks of the gates' matrices. None is 16, or the largest number below that divides `d_rnn`.
        conv_size: taps of the convolution of each channel; None disables it.
        variant: "paper", or "released" for the released code. It sets `activation`, `a_init_of` and `start`
            where they are None.
        activation: of g, "gelu", the paper's, or "gelu_tanh", its approximation in the released code.
        c: exponent of the transition; see `RGLRU`.
        a_init: range that a or a^c starts in.
        a_init_of: the quantity drawn from `a_init`, "a^c", the paper's, or "a", the released code's.
        start: how the first step of a sequence enters the recurrence: "scaled", the paper's, or "whole", the
            released code's; see `RGLRU`.
        recurrence_gate: whether the recurrence has a recurrence gate.
        input_gate: whether the recurrence has an input gate.

    Raises:
        ValueError: blocks that do not divide `d_rnn`, an unknown name of a variant, or a number out of range.

    Source:
        Griffin (De and others, 2024), sections 2.3 and 2.4; constants missing in the paper come from the
        released code.

    Example:
        >>> import torch
        >>> mixer = Hawk(64)
        >>> y, (tail, h) = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, tail.shape, h.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 3, 80]), torch.Size([2, 80]))
    """

    recurrence = "scan"

    def __init__(
        self,
        d_model: int,
        *,
        d_rnn: int | None = None,
        n_blocks: int | None = None,
        conv_size: int | None = 4,
        variant: Variant = "paper",
        activation: Activation | None = None,
        c: float = 8.0,
        a_init: tuple[float, float] = (0.9, 0.999),
        a_init_of: InitOf | None = None,
        start: Start | None = None,
        recurrence_gate: bool = True,
        input_gate: bool = True,
    ) -> None:
        super().__init__(d_model)
        activation = activation or ("gelu" if variant == "paper" else "gelu_tanh")
        at_least(1, d_rnn=d_rnn, or_none=True, cure="None is 4/3 `d_model`.")
        if d_rnn is None:
            width = 4 * d_model // 3
            multiple = min(BLOCKS, width) if n_blocks is None else max(n_blocks, 1)
            # fewer channels than blocks are refused where the gates are made
            d_rnn = width // multiple * multiple or width
        self.d_rnn = d_rnn
        self.activation = activation

        self.gate = nn.Linear(d_model, d_rnn)
        self.u = nn.Linear(d_model, d_rnn)
        self.conv = ShortConvolution(d_rnn, conv_size, bias=True)
        self.rg_lru = RGLRU(
            d_rnn,
            n_blocks=n_blocks,
            variant=variant,
            c=c,
            a_init=a_init,
            a_init_of=a_init_of,
            start=start,
            recurrence_gate=recurrence_gate,
            input_gate=input_gate,
        )
        self.out = nn.Linear(d_rnn, d_model)
        draw([self.gate, self.u, self.out], nn.init.kaiming_normal_, nonlinearity="linear")
        if conv_size is not None:
            nn.init.normal_(self.conv.weight, std=math.sqrt(TAPS_VARIANCE / conv_size))
            nn.init.zeros_(self.conv.bias)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return y, and the tail of the convolution (b, conv_size - 1, d_rnn) and the recurrence's state.

        Without a convolution, the state is the recurrence's alone.
        """
        tail, h = self.conv.split(state)
        g = ACTIVATIONS[self.activation](self.gate(x))
        v, tail = self.conv(self.u(x), tail, reset=reset)
        y, h = self.rg_lru(v, h, reset=reset)
        return self.out(g * y), self.conv.joined(tail, h)
