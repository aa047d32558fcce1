"""mLSTM, in its block with pre up-projection: xLSTM, Extended Long Short-Term Memory (Beck and others, 2024).

    [u_t, z_t] = W_up x_t      c_t = SiLU(conv(u)_t)
    q_t = W_q c_t      k_t = W_k c_t / sqrt(d)      v_t = W_v u_t
    i_t = exp(w_i [q_t, k_t, v_t] + b_i)
    f_t = sigmoid(w_f [q_t, k_t, v_t] + b_f), or exp
    m_t = max(log f_t + m_{t-1}, log i_t, 0)
    C_t = f_t C_{t-1} + i_t v_t k_t^T
    n_t = f_t n_{t-1} + i_t k_t
    h_t = C_t q_t / max(|n_t^T q_t|, 1)
    y_t = W_down ((GroupNorm(h_t) + s * c_t) * SiLU(z_t))

x input, u input and z output gate of the memory, both wider than x; c convolved u, q query, k key, v value. i
input gate, f forget gate and m stabiliser of a head, C matrix memory, n normaliser, h output of a head, s
learned skip, y output, t time. W_q, W_k and W_v are block-diagonal. z is in place of the mLSTM's
output gate o_t. C and n are kept times exp(-m_t). The gates see keys before they are divided by sqrt(d), as
in the released code.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from linrec.nn.block_diagonal import BlockDiagonalLinear, block_projected
from linrec.nn.head_sizes import few_heads, heads_of
from linrec.nn.mixer import Mixer, State
from linrec.nn.norms import HeadNorm
from linrec.nn.projections import drawn_linear
from linrec.nn.running_maximum import ForgetGate, MemoryGates, stabilised
from linrec.nn.short_convolution import ShortConvolution
from linrec.ops.gate_loop import normalized_gate_loop
from linrec.ops.inspection import note
from linrec.rules import divisor

__all__ = ["MLSTM", "MLSTMState"]

# of the paper's models: heads, channels that are projected to q, k and v together, widening of the block
HEADS = 4
BLOCK_SIZE = 4
EXPANSION = 2
# standard deviation of b_i when training starts, in the released code
INPUT_BIAS_STD = 0.1


class MLSTMState(NamedTuple):
    """The state of an mLSTM.

    Attributes:
        tail: the last inputs of the convolution, (b, conv_size - 1, d_inner); None without convolution.
        memory: C^T with n as its last column, both times exp(-m), (b, h, d, d + 1).
        largest: m, the stabiliser, (b, h); -inf at the start.
    """

    tail: Float[Tensor, "b width-1 c"] | None
    memory: Float[Tensor, "b h d d+1"]
    largest: Float[Tensor, "b h"]


class MLSTM(Mixer):
    """C_t = f_t C_{t-1} + i_t v_t k_t^T, h_t = C_t q_t / max(|n_t^T q_t|, 1), in a block that widens.

    The defaults are the paper's block. It widens the sequence itself and has an output gate, so the paper's
    models have no other channel mixing: `channel_mixing="none"` of the model.

    | the paper's ablation | argument |
    |---|---|
    | exponential forget gate | `forget_gate="exponential"` |
    | without forget gate, without input gate | `forget_gate="none"`, `input_gate=False` |

    C and n are kept over exp(m_t), the largest weight that is remembered, so that exponential gates do not
    overflow; see `linrec.nn.running_maximum.stabilised`.

    When training starts, as in the released code: W_up, W_q, W_k and W_v are normal with variance
    2 / (5 d_model), W_down with standard deviation 2 / (L sqrt(d_model)) in a model of L layers of all
    kinds, which draws it by `MLSTM.place` (L = 1 in a layer alone); w_i and w_f are zero, b_i is normal with
    standard deviation 0.1, b_f runs from 3 to 6 over the heads; s is one. The forget gate is marked as group
    "transition" without weight decay.

    Args:
        d_model: width of the sequence.
        n_heads: heads h. None is 4, or the largest of 2 and 1 that divides `d_inner` where 4 does not; 1 up
            to a width of 4.
        d_inner: width of u and z. None is 2 `d_model`.
        block_size: channels that W_q, W_k and W_v project together. None is 4, or the largest of 2 and 1 that
            divides `d_inner` where 4 does not.
        conv_size: taps of the causal convolution of each channel; None disables it: c_t = u_t.
        input_gate: whether there is i_t; without, it is 1.
        forget_gate: "sigmoid", "exponential", or "none" for f_t = 1.
        gate_std: standard deviation of w_i and w_f when training starts.

    Raises:
        ValueError: an `n_heads` or a `block_size` that does not divide `d_inner`, an unknown `forget_gate`,
            or a `gate_std` below 0.

    Source:
        xLSTM (Beck and others, 2024): the mLSTM's equations, and the figure of its block. Constants missing
        in the paper come from the released code, which also adds 1e-6 to the stabilised denominator.

    Example:
        >>> mixer = MLSTM(64)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.memory.shape, state.largest.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 4, 32, 33]), torch.Size([2, 4]))
    """

    recurrence = "normalized_gate_loop"

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int | None = None,
        d_inner: int | None = None,
        block_size: int | None = None,
        conv_size: int | None = 4,
        input_gate: bool = True,
        forget_gate: ForgetGate = "sigmoid",
        gate_std: float = 0.0,
    ) -> None:
        super().__init__(d_model)
        d_inner = EXPANSION * d_model if d_inner is None else d_inner
        n_heads = few_heads(d_inner, HEADS) if n_heads is None else n_heads
        block_size = math.gcd(BLOCK_SIZE, d_inner) if block_size is None else block_size
        self.n_heads, self.d_head = n_heads, heads_of("d_inner", d_inner, n_heads)
        divisor("d_inner", d_inner, block_size=block_size)
        std = math.sqrt(2 / (5 * d_model))

        self.up = drawn_linear(d_model, 2 * d_inner, nn.init.normal_, std=std)
        self.conv = ShortConvolution(d_inner, conv_size, bias=True, silu=conv_size is not None)
        self.q, self.k, self.v = (
            BlockDiagonalLinear(d_inner, d_inner // block_size, std=std) for _ in range(3)
        )
        self.memory = MemoryGates(
            3 * d_inner, n_heads, input_gate=input_gate, forget_gate=forget_gate, gate_std=gate_std
        )
        if self.memory.i is not None:
            nn.init.normal_(self.memory.i.bias, std=INPUT_BIAS_STD)
        self.norm = HeadNorm(n_heads, self.d_head)
        self.skip = nn.Parameter(torch.ones(d_inner))
        self.down = nn.Linear(d_inner, d_model, bias=False)
        self.place(0, 1)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return y, and an `MLSTMState`."""
        tail, C, m = (None, None, None) if state is None else state
        u, z = self.up(x).chunk(2, -1)
        c, tail = self.conv(u, tail, reset=reset)
        (q, k), v = block_projected(c, self.q, self.k), self.v(u)
        log_i, log_f = self.memory(torch.cat([q, k, v], -1))
        note(log_decay=log_f)
        q, k, v = (part.unflatten(-1, (self.n_heads, self.d_head)) for part in (q, k, v))
        q, k, v, log_f, floor, m = stabilised(q, k, v, log_i, log_f, m, reset=reset)
        h, C = normalized_gate_loop(q, k, v, log_f, floor=floor, signed=False, state=C, reset=reset)
        h = self.norm(h).flatten(-2).to(x.dtype)
        y = (h + self.skip * c) * functional.silu(z)
        return self.down(y), MLSTMState(tail, C, m)

    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> MLSTMState:
        """Return zeros, and a stabiliser of -inf."""
        factory = self.factory_kwargs(device)
        tail = self.conv.init_state(batch, **factory)
        C = normalized_gate_loop.empty_state(batch, self.n_heads, self.d_head, self.d_head, **factory)
        return MLSTMState(tail, C, C.new_full((batch, self.n_heads), -torch.inf))

    def place(self, layer: int, n_layers: int) -> None:
        """Draw W_down with the standard deviation for a model of `n_layers` layers."""
        nn.init.normal_(self.down.weight, std=2 / (n_layers * math.sqrt(self.d_model)))
