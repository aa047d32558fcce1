"""Mamba: Linear-Time Sequence Modeling with Selective State Spaces (Gu and Dao, 2023).

    x_t, z_t = W u_t
    x_t = SiLU(conv(x)_t)
    s_t, B_t, C_t = W_x x_t
    dt_t = softplus(W_dt s_t + b_dt)
    h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t                                                  (algorithm 2)
    y_t = W_o ((C_t h_t + D x_t) * SiLU(z_t))

u input (the argument `x`), x value and z gate of a channel, dt step size of a channel, of a few numbers s, B
input and C output weights of N states, which all channels share, A = -exp(A_log) their rates and D a skip
weight of a channel, h N states of each channel, y output, conv a causal convolution of a few steps, t time.
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from linrec.errors import unknown
from linrec.nn.gates import GateLinear
from linrec.nn.mixer import Mixer, State, Transitions
from linrec.nn.parameters import mark
from linrec.nn.short_convolution import ShortConvolution
from linrec.ops.gate_loop import gate_loop_matrix
from linrec.ops.selective_scan import selective_scan

__all__ = ["Mamba"]

Selective = Literal["dt", "B", "C"]
Rates = Literal["real", "constant", "random"]

SELECTIVE: tuple[Selective, ...] = ("dt", "B", "C")
RATES: tuple[Rates, ...] = ("real", "constant", "random")


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

    What is not selective is learned: a step size of each channel, N weights for all. The paper's complex
    rates, A_n = -1/2 + i n, are not here: `selective_scan` is real.

    When training starts, softplus(b_dt) is log-uniform in `dt_init` but at least `dt_floor`, W_dt is uniform
    in +- `dt_scale` / sqrt(dt_rank), D is one, and all else is as torch draws it. A_log, b_dt and D have no
    weight decay.

    Args:
        d_model: width of the sequence.
        expand: channels of x, as a multiple of `d_model`.
        d_state: states N of a channel.
        dt_rank: numbers s that the step sizes of all channels are made of; None is d_model / 16, rounded up.
        selective: which of "dt", "B" and "C" are made of x.
        A_init: "real", "constant" or "random".
        conv_size: taps of the convolution of each channel; None is none.
        conv_bias: whether the convolution has biases.
        bias: whether the projections of u and of the output have biases; that of dt always has.
        D: whether there is one.
        inner_norm: "rms" divides s, B and C each by its root mean square, as FalconMamba does; or "none".
        norm_eps: of that.
        dt_init: (low, high), range of dt at s = 0 when training starts.
        dt_floor: smallest dt of those drawn.
        dt_scale: of the initial W_dt.

    Raises:
        ValueError: sizes below 1, a range that is none, a negative number, or an unknown name of a variant.

    Source:
        Gu and Dao (2023), section 3; the ablations are those of its section on model ablations. Constants
        are those of the released code.

    Example:
        >>> import torch
        >>> y, (tail, h) = Mamba(64)(torch.zeros(2, 10, 64))
        >>> y.shape, tail.shape, h.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 3, 128]), torch.Size([2, 128, 16]))
    """

    def __init__(
        self,
        d_model: int,
        *,
        expand: int = 2,
        d_state: int = 16,
        dt_rank: int | None = None,
        selective: Sequence[Selective] = SELECTIVE,
        A_init: Rates = "real",
        conv_size: int | None = 4,
        conv_bias: bool = True,
        bias: bool = False,
        D: bool = True,
        inner_norm: Literal["none", "rms"] = "none",
        norm_eps: float = 1e-6,
        dt_init: tuple[float, float] = (0.001, 0.1),
        dt_floor: float = 1e-4,
        dt_scale: float = 1.0,
    ) -> None:
        super().__init__(d_model)
        rank = math.ceil(d_model / 16) if dt_rank is None else dt_rank
        for name, size in (("expand", expand), ("d_state", d_state), ("dt_rank", rank)):
            if size < 1:
                raise ValueError(f"`{name}` must be at least 1; got {size}.")
        if isinstance(selective, str):
            raise ValueError(
                f"`selective` must be a tuple of names; got {selective!r}. Pass ({selective!r},)."
            )
        for part in selective:
            if part not in SELECTIVE:
                raise unknown("part that can be `selective`", part, SELECTIVE)
        if A_init not in RATES:
            raise unknown("`A_init`", A_init, RATES)
        if inner_norm not in ("none", "rms"):
            raise unknown("`inner_norm`", inner_norm, ["none", "rms"])
        low, high = dt_init
        if not 0 < low <= high < math.inf:
            raise ValueError(
                f"`dt_init` must be (low, high) with 0 < low <= high; got {tuple(dt_init)}. "
                "A step of zero never moves; the paper's are 0.001 and 0.1."
            )
        for name, number in (("dt_floor", dt_floor), ("dt_scale", dt_scale), ("norm_eps", norm_eps)):
            if not 0 <= number < math.inf:
                raise ValueError(f"`{name}` must be a number of at least 0; got {number}.")
        self.d_inner, self.d_state = expand * d_model, d_state
        self.norm_eps = None if inner_norm == "none" else norm_eps
        widths = {"dt": rank, "B": d_state, "C": d_state}
        self.widths = {name: width for name, width in widths.items() if name in selective}

        self.xz = nn.Linear(d_model, 2 * self.d_inner, bias=bias)
        self.conv = None if conv_size is None else ShortConvolution(self.d_inner, conv_size, bias=conv_bias)
        self.dtBC = nn.Linear(self.d_inner, sum(self.widths.values()), bias=False) if self.widths else None
        dt = torch.exp(torch.empty(self.d_inner).uniform_(math.log(low), math.log(high))).clamp(min=dt_floor)
        # softplus backwards
        b_dt = dt + torch.log(-torch.expm1(-dt))
        self.W_dt: nn.Module | None = None
        if "dt" in self.widths:
            self.W_dt = mark(GateLinear(rank, self.d_inner), "bias", group="default", weight_decay=False)
            nn.init.uniform_(self.W_dt.weight, -dt_scale * rank**-0.5, dt_scale * rank**-0.5)
            self.W_dt.bias = nn.Parameter(b_dt)
        else:
            self.b_dt = nn.Parameter(b_dt)
            mark(self, "b_dt", group="default", weight_decay=False)
            self.keep_float32("b_dt")
        # normal, so that the states of a channel differ
        for name in ("B", "C"):
            if name not in self.widths:
                self.register_parameter(name, nn.Parameter(torch.randn(d_state)))
        self.A_log = nn.Parameter(_log_rates(A_init, self.d_inner, d_state))
        mark(self, "A_log", group="channel", weight_decay=False)
        self.keep_float32("A_log")
        self.D: nn.Parameter | None = None
        if D:
            self.D = nn.Parameter(torch.ones(self.d_inner))
            mark(self, "D", group="channel", weight_decay=False)
        self.out = nn.Linear(self.d_inner, d_model, bias=bias)

    def forward(
        self,
        x: Float[Tensor, "b t d_model"],
        state: State = None,
        *,
        reset: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b t d_model"], State]:
        """Mix `x` over time; see `Mixer.forward`.

        The state is h (b, expand * d_model, N); with a convolution, its tail and that.
        """
        self.check_input(x, reset, state)
        tail, h = (None, state) if self.conv is None or state is None else state
        value, z, dt, B, C, tail = self._projections(x, tail, reset)
        y, h = selective_scan(value, dt, self._rates(dt), B, C, self.D, state=h, reset=reset)
        y = self.out((y * functional.silu(z)).to(x.dtype))
        return y, h if self.conv is None else (tail, h)

    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> State:
        """Zeros (batch, channels, N); with a convolution, those behind zeros (b, conv_size - 1, channels)."""
        device = self.out.weight.device if device is None else device
        h = torch.zeros(batch, self.d_inner, self.d_state, dtype=self._state_dtype(), device=device)
        return h if self.conv is None else (self.conv.init_state(batch, dtype=h.dtype, device=device), h)

    @property
    def state_size(self) -> int:
        """Elements of h, and of the convolution's tail."""
        size = self.d_inner * self.d_state
        return size if self.conv is None else size + self.conv.state_size

    def transitions(self, x: Float[Tensor, "b t d_model"]) -> Transitions:
        """exp(dt_t A) of the N states of every channel; see `Mixer.transitions`."""
        dt = self._projections(x, None, None)[2]
        return Transitions.of_heads(dt[..., None] * self._rates(dt), None)

    def token_mixing(
        self, x: Float[Tensor, "b t d_model"], *, reset: Bool[Tensor, "b t"] | None = None
    ) -> Float[Tensor, "b t t"]:
        """Mean over channels of |C_n^T exp(A sum_{m+1..n} dt) B_m dt_m|: of x, but for D."""
        _, _, dt, B, C, _ = self._projections(x, None, reset)
        # one head for each channel, in the precision of dt
        C, B = (part.to(dt.dtype)[:, :, None] for part in (C, B))
        keys, log_decay = B * dt[..., None], dt[..., None] * self._rates(dt)
        return gate_loop_matrix(C.expand_as(keys), keys, log_decay, reset=reset).abs().mean(1)

    def _projections(
        self, x: Tensor, tail: Tensor | None, reset: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """x, z, dt, B and C, and the tail of the convolution."""
        value, z = self.xz(x).chunk(2, dim=-1)
        if self.conv is not None:
            value, tail = self.conv(value, tail, reset=reset)
        value = functional.silu(value)
        made: dict[str, Tensor] = {}
        if self.dtBC is not None:
            parts = self.dtBC(value).split(list(self.widths.values()), dim=-1)
            made = dict(zip(self.widths, parts, strict=True))
        if self.norm_eps is not None:
            made = {name: functional.rms_norm(p, p.shape[-1:], eps=self.norm_eps) for name, p in made.items()}
        B, C = (
            made[name] if name in made else getattr(self, name).expand(*x.shape[:2], -1).to(value.dtype)
            for name in ("B", "C")
        )
        if self.W_dt is not None:
            steps = self.W_dt(made["dt"])
        else:
            wide = torch.promote_types(self.b_dt.dtype, torch.float32)
            steps = self.b_dt.to(wide).expand(*x.shape[:2], -1)
        # -log sigmoid(-s) = softplus(s); of the latter, torch 2.13 compiles the gradient with wrong strides
        return value, z, -functional.logsigmoid(-steps), B, C, tail

    def _rates(self, dt: Tensor) -> Tensor:
        """A (c, N) in the precision of dt, float32 or better."""
        return -torch.exp(self.A_log.to(dt.dtype))


def _log_rates(init: Rates, channels: int, d_state: int) -> Tensor:
    """log(-A) when training starts."""
    if init == "random":
        return torch.randn(channels, d_state)
    if init == "constant":
        return torch.full((channels, d_state), math.log(0.5))
    return torch.arange(1, d_state + 1, dtype=torch.float32).log().expand(channels, -1).contiguous()
