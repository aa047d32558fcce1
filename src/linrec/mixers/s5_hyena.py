"""S5-Hyena: Hyena (Poli and others, 2023) with S5 (Smith and others, 2023) for filters.

    (v, x^1, .., x^N) = ShortConv(W x + b)
    z^1 = v     z^{n+1} = S5^n(x^n * z^n), n = 1 .. N - 1     y = x^N * z^N     o = W_o y + b_o
    S5(u)_k = GELU(Re(C h_k) + D * u_k)     h_k = Lambdabar * h_{k-1} + Bbar u_k

x input, v value, x^n gates, N the order, y output of the recurrence, o output of the layer; each S5 is one
system of all channels (`linrec.mixers.s5`), h its state, here with an entry for both of each conjugate pair.
There is no paper: the authors of S5 released the layer, and GateLoop and HGRN compare with its results. With
N = 2 it is H3 whose diagonal system is S5's and whose shift is a short convolution.
"""

import math
from typing import NamedTuple

from jaxtyping import Complex, Float
from torch import Tensor, nn

from linrec.mixers.s5 import S5, Output
from linrec.nn.mixer import Mixer, State
from linrec.nn.short_convolution import ShortConvolution
from linrec.rules import COUNT, at_least, positive

__all__ = ["S5Hyena", "S5HyenaState"]

# standard deviation of a normal number of variance 1 that is cut at 2
CUT = 0.8796256610342398


class S5HyenaState(NamedTuple):
    """State of S5-Hyena between two pieces of a sequence.

    Args:
        tail: of the short convolution (b, conv_size - 1, (N + 1) d_model), or None without one.
        systems: h of each system (b, n), complex.
    """

    tail: Float[Tensor, "b width c"] | None
    systems: tuple[Complex[Tensor, "b n"], ...]


class S5Hyena(Mixer):
    """z^{n+1} = S5^n(x^n * z^n), n = 1 .. N - 1, y = x^N * z^N: gates and systems of all channels in turn.

    The state has a fixed size, without distillation. Inspection shows the transitions and the token mixing of
    the last system.

    When training starts, W and the taps of the short convolution are normal, cut at twice their standard
    deviation, with variances of 1 / d_model and 1 / conv_size; W_o is normal, and all biases are zero. The
    systems start as S5 with `C_init="complex_normal"`. The released code also drops out x^n * z^n in
    training, which linrec leaves out. Its step-by-step mode leaves the short convolution out.

    Args:
        d_model: width of the sequence, of v and of each gate.
        order: N, gates.
        d_state: entries of the state of each system.
        n_blocks: blocks of the systems' transition when training starts.
        conv_size: taps of the short convolution; None disables it.
        dt_min: smallest step when training starts.
        dt_max: largest step when training starts.
        pairs: whether an entry of the state stands for itself and its conjugate; see `S5`.
        activation: whether the output of a system goes through GELU.
        output: the map after GELU; see `S5`.
        out_std: standard deviation of W_o when training starts. The released code has 0.02 / sqrt(2 layers).

    Raises:
        ValueError: an `order` below 2, a `d_state` that blocks do not divide, an unknown name, or a number
            out of range.

    Source:
        The released code of S5 (Smith, Warrington and Linderman, 2023), branch "development".

    Example:
        >>> import torch
        >>> mixer = S5Hyena(16, d_state=8, n_blocks=2)
        >>> y, state = mixer(torch.zeros(2, 50, 16))
        >>> y.shape, state.tail.shape, [h.shape for h in state.systems]
        (torch.Size([2, 50, 16]), torch.Size([2, 2, 48]), [torch.Size([2, 8])])
    """

    recurrence = "scan"

    def __init__(
        self,
        d_model: int,
        *,
        order: int = 2,
        d_state: int = 128,
        n_blocks: int = 32,
        conv_size: int | None = 3,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        pairs: bool = False,
        activation: bool = True,
        output: Output = "none",
        out_std: float = 0.02,
    ) -> None:
        super().__init__(d_model)
        at_least(2, most=COUNT, order=order, cure="There must be a system.")
        positive(out_std=out_std)
        self.order = order
        width = (order + 1) * d_model
        self.inputs = nn.Linear(d_model, width)
        self.conv = ShortConvolution(width, conv_size, bias=True)
        self.systems = nn.ModuleList(
            S5(
                d_model,
                d_state=d_state,
                n_blocks=n_blocks,
                dt_min=dt_min,
                dt_max=dt_max,
                C_init="complex_normal",
                pairs=pairs,
                activation=activation,
                output=output,
            )
            for _ in range(order - 1)
        )
        self.out = nn.Linear(d_model, d_model)
        nn.init.normal_(self.out.weight, std=out_std)
        nn.init.zeros_(self.out.bias)
        for layer in (self.inputs, self.conv) if conv_size is not None else (self.inputs,):
            # the inputs of an output: channels or taps
            std = 1 / math.sqrt(layer.weight.shape[1]) / CUT
            nn.init.trunc_normal_(layer.weight, std=std, a=-2 * std, b=2 * std)
            nn.init.zeros_(layer.bias)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return o, and an `S5HyenaState`."""
        tail, past = (None, [None] * len(self.systems)) if state is None else state
        parts, tail = self.conv(self.inputs(x), tail, reset=reset)
        z, *gates, last = parts.chunk(self.order + 1, -1)
        states = []
        for gate, s5, before in zip(gates, self.systems, past, strict=True):
            z, after = s5(gate * z, before, reset=reset)
            states.append(after)
        return self.out(last * z), S5HyenaState(tail, tuple(states))
