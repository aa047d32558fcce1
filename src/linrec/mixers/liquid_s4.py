"""Liquid-S4: Liquid Structural State-Space Models (Hasani, Lechner and others, 2022).

    u^p_t = u_t u_{t-1} .. u_{t-p+1}     p = 2 .. P
    KB    x_t = Abar * x_{t-1} + sum_{p=1..P} Bbar^p u^p_t     y_t = 2 Re(C x_t) + D u_t
    PB    x_t = Abar * x_{t-1} + Bbar u_t     y_t = 2 Re(C x_t + sum_{p=2..P} C Bbar^p u^p_t) + D u_t
    o_t = GLU(W GELU(y_t) + b)

u input of a channel, u^p its correlations of order p, x state with one entry of each conjugate pair, y output
of the channel, o output of the layer, t time; Abar and Bbar diagonal and column, discretised by the bilinear
transform, C a row and D a number, all per channel. Powers of Bbar are powers of its entries.

Both are parts of the unrolled liquid transition x_t = (Abar + Bbar u_t) * x_{t-1} + Bbar u_t. Of its products
of p inputs, both keep the products of neighbouring steps, with the weight C Abar^l Bbar^p after l steps. KB,
the kernel of S4 times powers of B, has all of these terms. PB, powers of B alone, has the terms of l = 0.
"""

from typing import Literal

import torch
from torch import Tensor

from linrec.nn.channel_mixing import Output, PositionWise
from linrec.nn.mixer import Mixer, State
from linrec.nn.state_space import DiagonalSSM, Spectrum
from linrec.nn.token_shift import token_shift
from linrec.ops.diagonal_ssm import diagonal_ssm
from linrec.ops.inspection import kernel_mixing
from linrec.ops.long_conv import Discretization
from linrec.rules import COUNT, at_least, require

__all__ = ["LiquidS4"]

Kernel = Literal["pb", "kb"]
Powers = Literal["entries", "sums"]


class LiquidS4(Mixer):
    """S4D whose inputs are also products of neighbouring steps, as an input-dependent transition makes them.

    | the paper's variant | argument |
    |---|---|
    | PB, KB | `kernel="pb"`, "kb" |
    | correlations of up to p inputs | `degree` |
    | powers of the released code | `powers="sums"` |

    The released code reverses correlations in time. Unless `allcombs=False`, it takes all combinations of the
    last steps in place of neighbours. So its outputs depend on later inputs; here they do not. The transition
    here is diagonal. In the released code, it may be S4's, but powers of Bbar leave the low-rank part out.

    The paper writes Bbar^p, which means powers of entries here. The released PB has Bbar^p = Bbar^(p-1)
    sum(Bbar^(p-1)) with a sum over all entries, and u^p_t = u^(p-1)_t u^(p-1)_(t-1), so that u^3_t = u_t
    u_{t-1}^2 u_{t-2}. These are `powers="sums"`. The released KB cannot be had: its transforms have lengths
    that do not fit together.

    Parameters and their initial values are the same as in `linrec.mixers.s4d.S4D`.

    Args:
        d_model: width of the sequence, and channels.
        degree: P, inputs in the largest product, at least 2.
        kernel: "pb" or "kb".
        d_state: N, numbers of the real state of each channel; even, but with `init="real"`.
        init: where A starts, "legs", "lin", "inv" or "real".
        discretization: "bilinear", "zoh" or "euler".
        dt_min: smallest step size when training starts.
        dt_max: largest step size when training starts.
        activation: whether y goes through GELU.
        output: "glu", "linear" or "none", the map that mixes the channels at the end.
        mode: "auto", "convolution", "recurrent" or "scan"; see `linrec.ops.diagonal_ssm`.
        powers: "entries", the paper's u^p with powers of entries, or "sums", the released code's, for "pb".

    Raises:
        ValueError: a `degree` below 2, an unknown name, "sums" with "kb", a `d_state` that is odd or not
            positive, a step size that is not positive, or one that makes Euler's steps unstable.

    Source:
        Hasani, Lechner, Wang, Chahine, Amini and Rus (2022), its kernels KB and PB.

    Example:
        >>> mixer = LiquidS4(16, d_state=8, degree=3)
        >>> y, (products, x) = mixer(torch.zeros(2, 50, 16))
        >>> y.shape, products.shape, x.shape
        (torch.Size([2, 50, 16]), torch.Size([2, 2, 16]), torch.Size([2, 16, 4]))
    """

    recurrence = "diagonal_ssm"

    def __init__(
        self,
        d_model: int,
        *,
        degree: int = 2,
        kernel: Kernel = "pb",
        d_state: int = 64,
        init: Spectrum = "legs",
        discretization: Discretization = "bilinear",
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        activation: bool = True,
        output: Output = "glu",
        mode: str = "auto",
        powers: Powers = "entries",
    ) -> None:
        super().__init__(d_model)
        require(
            powers == "entries" or kernel == "pb",
            f'`powers="sums"` needs `kernel="pb"`; got {kernel!r}. The released "kb" has no such form.',
        )
        at_least(2, most=COUNT, degree=degree, cure='Without products of inputs it is the mixer "s4d".')
        self.ssm = DiagonalSSM(
            d_model,
            d_state=d_state,
            init=init,
            discretization=discretization,
            dt_min=dt_min,
            dt_max=dt_max,
            mode=mode,
        )
        self.degree, self.kernel, self.powers = degree, kernel, powers
        self.out = PositionWise(d_model, output=output, activation=activation)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return o, u^p of the last step for p = 1 .. P - 1 (b, P - 1, d_model), and x (b, d_model, n)."""
        before, S = (None, None) if state is None else state
        u, (Abar, Bbar, C, D), mode = x, self.ssm(), self.ssm.mode
        y, S = diagonal_ssm(u, Abar, Bbar, C, state=S, reset=reset, mode=mode)
        y = y + D.to(y.dtype) * u
        product, power, lasts = u, Bbar, []
        for p in range(2, self.degree + 1):
            earlier, last = token_shift(product, None if before is None else before[:, p - 2], reset=reset)
            lasts.append(last)
            if self.powers == "entries":
                product, power = u * earlier, Bbar**p
            else:
                # entries that stand for pairs count twice
                total = (1 + self.ssm.is_complex) * power.real.sum(1, keepdim=True)
                product, power = product * earlier, power * total
            if self.kernel == "pb":
                y = y + (C * power).sum(1).real.to(y.dtype) * product
            else:
                # the same transition: states add up
                more, end = diagonal_ssm(product, Abar, power, C, reset=reset, mode=mode)
                y, S = y + more, S + end
        return self.out(y), (torch.stack(lasts, 1), S)

    def token_mixing(self, x: Tensor, *, reset: Tensor | None = None) -> Tensor:
        """Return the mean over channels of |K_(n - m)|, of the kernel of u alone, without D and products."""
        return kernel_mixing(self.ssm.kernel(x.shape[1]), x, reset)
