"""sLSTM: xLSTM, Extended Long Short-Term Memory (Beck and others, 2024): scalar memories that are mixed.

    c_t = f_t * c_{t-1} + i_t * z_t
    n_t = f_t * n_{t-1} + i_t
    h_t = o_t * c_t / n_t
    z_t = tanh(W_z x_t + R_z h_{t-1} + b_z)
    i_t = exp(W_i x'_t + R_i h_{t-1} + b_i)
    f_t = sigmoid(W_f x'_t + R_f h_{t-1} + b_f), or exp
    o_t = sigmoid(W_o x_t + R_o h_{t-1} + b_o)
    m_t = max(log f_t + m_{t-1}, log i_t)
    y_t = GroupNorm(h_t)

x input, x' = SiLU(conv(x)), c memory cells, n normaliser, h hidden state, z cell input, i input gate, f
forget gate, o output gate, m stabiliser, y output, t time, * the product of channels. All W and R are
block-diagonal, a block per head. c and n are kept times exp(-m_t).

The gates see h_{t-1}, so steps run one by one, under learners too: the recurrence is not linear, and no scan
computes it. With gates that are stabilised by m, `linrec.nn.slstm_steps` runs it.
"""

import math
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from linrec.nn.block_diagonal import BlockDiagonalLinear
from linrec.nn.head_sizes import few_heads, heads_of
from linrec.nn.mixer import Mixer, State, Transitions
from linrec.nn.norms import HeadNorm
from linrec.nn.parameters import mark
from linrec.nn.short_convolution import ShortConvolution
from linrec.nn.slstm_steps import SLSTMBackend, log_forget, slstm_steps
from linrec.ops.inspection import note, noting

__all__ = ["SLSTM", "SLSTMState"]

ForgetGate = Literal["sigmoid", "exponential"]
RecurrentInit = Literal["zeros", "uniform"]

# of the paper's models
HEADS = 4
# b_f when training starts falls over a head's channels from the first to the second, in the released code
FORGET_BIAS = (5.0, -7.0)
# by a power that rises from the first layer to the last
POWERS = (0.3, 1.6)


class SLSTMState(NamedTuple):
    """The state of an sLSTM, (b, h, d) but for the tail.

    Attributes:
        tail: the last inputs of the convolution, (b, conv_size - 1, d_model); None without convolution.
        hidden: h.
        cell: c exp(-m).
        normalizer: n exp(-m).
        largest: m; -inf at the start.
    """

    tail: Float[Tensor, "b width-1 c"] | None
    hidden: Float[Tensor, "b h d"]
    cell: Float[Tensor, "b h d"]
    normalizer: Float[Tensor, "b h d"]
    largest: Float[Tensor, "b h d"]


class SLSTM(Mixer):
    """c_t = f_t * c_{t-1} + i_t * z_t, h_t = o_t * c_t / n_t, gates of x_t and h_{t-1}.

    The defaults are the paper's layer. Its block has a post up-projection, which is the channel mixing of a
    model: `channel_mixing="geglu"` with `d_channel_mixing` = 4/3 `d_model`. The layer itself ends with the
    norm.

    Memory mixing, R, lets the layer track states that no linear recurrence with positive gates tracks, such
    as parity. Its price is a loop over time, with a matrix product and a dozen small operations per step. On
    GPUs, all steps are one kernel.

    W starts normal with variance 2 / (5 d_model), as in the released code. R, b_z, b_i and b_o start at zero.
    b_f falls from 5 to -7 over the d channels of each head, 5 - 12 (j / (d - 1))^p. The power p rises from
    0.3 in the first layer of a model to 1.6 in its last layer, where layers of other kinds count too. The
    model calls `SLSTM.place`; a layer that stands alone is the first. W_f is marked as group "transition"
    without weight decay.

    Args:
        d_model: width of the sequence.
        n_heads: heads; h mixes within each. None is 4, or the largest of 2 and 1 that divides `d_model` where
            4 does not; 1 up to a width of 4.
        conv_size: taps of the causal convolution of each channel that i and f see; None disables it: x' = x.
        forget_gate: "sigmoid", or "exponential", which starts at the same f_t.
        recurrent_init: of R, "zeros", or "uniform" in +- 1 / sqrt(d_model).
        backend: of the recurrence, "auto", "torch" or "triton"; see `linrec.nn.slstm_steps`.

    Raises:
        ValueError: an `n_heads` that does not divide `d_model`, or an unknown `forget_gate`,
            `recurrent_init` or `backend`.

    Source:
        xLSTM (Beck and others, 2024): the sLSTM's equations, its stabilised gates, and the figure of its
        block. Constants missing in the paper come from the released code.

    Example:
        >>> mixer = SLSTM(64)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.cell.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 4, 16]))
    """

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int | None = None,
        conv_size: int | None = 4,
        forget_gate: ForgetGate = "sigmoid",
        recurrent_init: RecurrentInit = "zeros",
        backend: SLSTMBackend = "auto",
    ) -> None:
        super().__init__(d_model)
        self.n_heads = few_heads(d_model, HEADS) if n_heads is None else n_heads
        self.d_head = heads_of("d_model", d_model, self.n_heads)
        self.sigmoid = forget_gate == "sigmoid"
        self.backend = backend

        self.conv = ShortConvolution(d_model, conv_size, bias=True, silu=conv_size is not None)
        std = math.sqrt(2 / (5 * d_model))
        self.i, self.f, self.z, self.o = (
            BlockDiagonalLinear(d_model, self.n_heads, std=std, exact=True) for _ in range(4)
        )
        mark(self.f)
        # both in the order i, f, z, o
        self.R = nn.Parameter(torch.zeros(self.n_heads, self.d_head, 4 * self.d_head))
        if recurrent_init == "uniform":
            nn.init.uniform_(self.R, -1 / math.sqrt(d_model), 1 / math.sqrt(d_model))
        self.bias = nn.Parameter(torch.zeros(4 * d_model))
        self.keep_float32("bias")
        self.norm = HeadNorm(self.n_heads, self.d_head)
        self.place(0, 1)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return y, and an `SLSTMState`."""
        tail, *past = self.init_state(x.shape[0], device=x.device) if state is None else state
        filtered, tail = self.conv(x, tail, reset=reset)
        W_x = torch.stack([self.i(filtered), self.f(filtered), self.z(x), self.o(x)], 2)
        W_x = W_x + self.bias.to(W_x.dtype).unflatten(0, (4, -1))
        W_x = W_x.unflatten(-1, (self.n_heads, self.d_head))
        hidden, end = slstm_steps(W_x, self.R, past, reset=reset, sigmoid=self.sigmoid, backend=self.backend)
        note(hidden=hidden, W_x=W_x)
        return self.norm(hidden).flatten(-2).to(x.dtype), SLSTMState(tail, *end)

    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> SLSTMState:
        """Return zeros, and a stabiliser of -inf."""
        factory, shape = self.factory_kwargs(device), (batch, self.n_heads, self.d_head)
        tail = self.conv.init_state(batch, **factory)
        # one tensor each: whoever writes into a state writes into one part of it
        h, c, n = (torch.zeros(shape, **factory) for _ in range(3))
        return SLSTMState(tail, h, c, n, torch.full_like(h, -torch.inf))

    def transitions(self, x: Tensor) -> Transitions:
        """Return f_t of every cell, by its equation for all steps."""
        with noting() as notes:
            self.forward(x)
        before = functional.pad(notes["hidden"], (0, 0, 0, 0, 1, 0))[:, : x.shape[1]]
        R = self.R.to(before.dtype).chunk(4, -1)[1]
        f = notes["W_x"][:, :, 1] + torch.einsum("bthi,hio->btho", before, R)
        return Transitions(log_forget(f, self.sigmoid).exp().flatten(-2), None)

    def place(self, layer: int, n_layers: int) -> None:
        """Set b_f as the layer's place in the stack has it."""
        power = POWERS[0] + (POWERS[1] - POWERS[0]) * layer / max(n_layers - 1, 1)
        fall = torch.arange(self.d_head) / max(self.d_head - 1, 1)
        bias = FORGET_BIAS[0] + (FORGET_BIAS[1] - FORGET_BIAS[0]) * fall**power
        with torch.no_grad():
            b_f = self.bias.unflatten(0, (4, self.n_heads, self.d_head))[1]
            b_f.copy_(bias if self.sigmoid else functional.logsigmoid(bias))
