"""Mamba: Linear-Time Sequence Modeling with Selective State Spaces (Gu and Dao, 2023).

    x_t, z_t = W u_t
    x_t = SiLU(conv(x)_t)
    s_t, B_t, C_t = W_x x_t
    dt_t = softplus(W_dt s_t + b_dt)
    h_t = exp(dt_t A) h_{t-1} + Bbar_t x_t                                                    (algorithm 2)
    Bbar_t = dt_t B_t, or by zero-order hold (dt_t A)^-1 (exp(dt_t A) - I) dt_t B_t                      (4)
    y_t = W_o ((C_t h_t + D x_t) * SiLU(z_t))

u input (the argument `x`), x value and z gate of a channel, dt step size of a channel, of a few numbers s, B
input and C output weights of N states, which all channels share, A = -exp(A_log) their rates and D a skip
weight of a channel, h N states of each channel, y output, conv a causal convolution of a few steps, t time.
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from linrec.nn.decays import softplus, step_bias
from linrec.nn.gates import GateLinear
from linrec.nn.mixer import Mixer, State
from linrec.nn.norms import RMSNorm
from linrec.nn.parameters import mark
from linrec.nn.short_convolution import ShortConvolution
from linrec.ops.gate_loop import gate_loop
from linrec.ops.long_conv import discretize_diagonal
from linrec.ops.selective_scan import selective_scan
from linrec.rules import at_least, choice, require

__all__ = ["Mamba"]

Selective = Literal["dt", "B", "C"]
Rates = Literal["real", "constant", "random"]
InnerNorm = Literal["none", "rms", "rms_weight"]
Discretization = Literal["euler", "zoh"]


class Mamba(Mixer):
    """h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t, y_t = C_t h_t + D x_t: N states per channel, S6.

    The defaults are the paper's layer. It stands alone in its block, without channel mixing, so that a model
    of it has twice the layers of a Transformer.

    | the paper's ablation | argument |
    |---|---|
    | which of dt, B and C depend on the input | `selective=("dt",)`, ..., `()` |
    | how A starts: -(n + 1), -1/2, or -exp(N(0, 1)) | `A_init="real"`, `"constant"`, `"random"` |
    | numbers that dt is made of | `dt_rank` |
    | state size | `d_state` |

    The released code takes dt B for Bbar, and so does the default, "euler". `discretization="zoh"` is eq. 4.
    Its Bbar differs from channel to channel, so the operator is then `gate_loop` with a head for each
    channel, and takes memory for Bbar and exp(dt A) at all steps, each `d_state` times the size of x.

    Parts that are not selective are learned constants: a step size of each channel, or N weights for all
    channels. The paper's complex rates, A_n = -1/2 + i n, are not here: `selective_scan` is real.

    When training starts, softplus(b_dt) is log-uniform in `dt_init` but at least `dt_floor`, W_dt is uniform
    in +- `dt_scale` / sqrt(dt_rank), D is one, and all else is as torch draws it. A_log, b_dt and D have no
    weight decay. The released language model of L layers starts with `out_scale` = 1 / sqrt(L).

    With irregular steps, the logarithm of the argument `dt`, here tau, is an offset of the step sizes:

        dt_t = softplus(W_dt s_t + b_dt + log(tau_t))

    Step sizes well below 1 are multiplied by tau. Large step sizes grow by its logarithm only, because they
    multiply the input too. The convolution counts steps, not time.

    Args:
        d_model: width of the sequence.
        expand: channels of x, as a multiple of `d_model`.
        d_state: states N of a channel.
        dt_rank: numbers s that the step sizes of all channels are made of; None is d_model / 16, rounded up.
        selective: which of "dt", "B" and "C" are made of x.
        A_init: "real", "constant" or "random".
        discretization: how Bbar is made, "euler" or "zoh".
        conv_size: taps of the convolution of each channel; None disables it.
        conv_bias: whether the convolution has biases.
        bias: whether the projections of u and of the output have biases; the projection of dt always has.
        D: whether there is a skip weight D.
        inner_norm: "rms" divides s, B and C each by its root mean square, as FalconMamba does; "rms_weight"
            also multiplies each by a learned weight per channel, as Jamba does; or "none".
        norm_eps: added to the mean square.
        dt_init: (low, high), range of dt at s = 0 when training starts.
        dt_floor: the smallest dt when training starts.
        dt_scale: of the initial W_dt.
        out_scale: of the initial W_o.

    Raises:
        ValueError: sizes below 1, an empty range, a negative number, or an unknown name of a variant.

    Source:
        Gu and Dao (2023), section 3; the ablations are from its section on model ablations. Constants come
        from the released code.

    Example:
        >>> y, (tail, h) = Mamba(64)(torch.zeros(2, 10, 64))
        >>> y.shape, tail.shape, h.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 3, 128]), torch.Size([2, 128, 16]))
    """

    recurrence = "selective_scan"
    takes_dt = True

    def __init__(
        self,
        d_model: int,
        *,
        expand: int = 2,
        d_state: int = 16,
        dt_rank: int | None = None,
        selective: Sequence[Selective] = ("dt", "B", "C"),
        A_init: Rates = "real",
        discretization: Discretization = "euler",
        conv_size: int | None = 4,
        conv_bias: bool = True,
        bias: bool = False,
        D: bool = True,
        inner_norm: InnerNorm = "none",
        norm_eps: float = 1e-6,
        dt_init: tuple[float, float] = (0.001, 0.1),
        dt_floor: float = 1e-4,
        dt_scale: float = 1.0,
        out_scale: float = 1.0,
    ) -> None:
        super().__init__(d_model)
        dt_rank = math.ceil(d_model / 16) if dt_rank is None else dt_rank
        at_least(1, expand=expand, d_state=d_state, dt_rank=dt_rank)
        at_least(0, dt_floor=dt_floor, dt_scale=dt_scale, out_scale=out_scale, norm_eps=norm_eps)
        require(
            not isinstance(selective, str),
            f"`selective` must be a tuple of names; got {selective!r}. Pass ({selective!r},).",
        )
        for part in selective:
            choice(Selective, selective=part)
        self.d_inner, self.d_state = expand * d_model, d_state
        self.discretization = discretization
        if discretization == "zoh":
            self.recurrence = "gate_loop"
        widths = {"dt": dt_rank, "B": d_state, "C": d_state}
        self.widths = {name: width for name, width in widths.items() if name in selective}
        self.norms: nn.ModuleDict | None = None
        if inner_norm != "none":
            weighted = inner_norm == "rms_weight"
            self.norms = nn.ModuleDict(
                {
                    name: RMSNorm(width, eps=norm_eps, elementwise_affine=weighted)
                    for name, width in self.widths.items()
                }
            )

        self.xz = nn.Linear(d_model, 2 * self.d_inner, bias=bias)
        self.conv = ShortConvolution(self.d_inner, conv_size, bias=conv_bias, silu=True)
        self.dtBC = nn.Linear(self.d_inner, sum(self.widths.values()), bias=False) if self.widths else None
        b_dt = step_bias(self.d_inner, dt_init, floor=dt_floor)
        self.W_dt: nn.Module | None = None
        if "dt" in self.widths:
            self.W_dt = mark(GateLinear(dt_rank, self.d_inner), "bias", group="default", weight_decay=False)
            nn.init.uniform_(self.W_dt.weight, -dt_scale * dt_rank**-0.5, dt_scale * dt_rank**-0.5)
            self.W_dt.bias = nn.Parameter(b_dt)
        else:
            self.b_dt = nn.Parameter(b_dt)
            mark(self, "b_dt", group="default", weight_decay=False, float32=True)
        # normal, so that the states of a channel differ
        for name in ("B", "C"):
            if name not in self.widths:
                self.register_parameter(name, nn.Parameter(torch.randn(d_state)))
        log_A = torch.full((self.d_inner, d_state), math.log(0.5))
        if A_init == "real":
            log_A = torch.arange(1.0, d_state + 1).log().repeat(self.d_inner, 1)
        elif A_init == "random":
            log_A = torch.randn(self.d_inner, d_state)
        self.A_log = nn.Parameter(log_A)
        mark(self, "A_log", group="channel", weight_decay=False, float32=True)
        self.D: nn.Parameter | None = None
        if D:
            self.D = nn.Parameter(torch.ones(self.d_inner))
            mark(self, "D", group="channel", weight_decay=False)
        self.out = nn.Linear(self.d_inner, d_model, bias=bias)
        with torch.no_grad():
            self.out.weight.mul_(out_scale)

    def mix(
        self, x: Tensor, state: State, reset: Tensor | None, elapsed: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Return y, and h (b, channels, N); with a convolution, its tail and h."""
        tail, h = self.conv.split(state)
        u = x
        x, z = self.xz(u).chunk(2, dim=-1)
        x, tail = self.conv(x, tail, reset=reset)
        made: dict[str, Tensor] = {}
        if self.dtBC is not None:
            parts = self.dtBC(x).split(list(self.widths.values()), dim=-1)
            made = dict(zip(self.widths, parts, strict=True))
        if self.norms is not None:
            made = {name: self.norms[name](part).to(part.dtype) for name, part in made.items()}
        B, C = (
            made[name] if name in made else getattr(self, name).expand(*x.shape[:2], -1).to(x.dtype)
            for name in ("B", "C")
        )
        if self.W_dt is not None:
            steps = self.W_dt(made["dt"])
        else:
            steps = self.b_dt.to(self.state_dtype).expand(*x.shape[:2], -1)
        if elapsed is not None:
            steps = steps + elapsed.to(steps.dtype).log()[..., None]
        dt = softplus(steps)
        A = -torch.exp(self.A_log.to(dt.dtype))
        if self.discretization == "euler":
            y, h = selective_scan(x, dt, A, B, C, self.D, state=h, reset=reset)
        else:
            # a channel is a head with a single value, whose keys Bbar are the channel's own
            _, Bbar = discretize_diagonal(A, B[:, :, None].to(dt.dtype), dt[..., None])
            keys, v, h = Bbar.to(x.dtype), x[..., None], None if h is None else h[..., None]
            y, h = gate_loop(C[:, :, None].expand_as(keys), keys, v, dt[..., None] * A, state=h, reset=reset)
            y, h = y[..., 0], h[..., 0]
            y = y if self.D is None else y + self.D.to(x.dtype) * x
        y = self.out((y * functional.silu(z)).to(u.dtype))
        return y, self.conv.joined(tail, h)
