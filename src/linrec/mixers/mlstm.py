"""mLSTM: xLSTM, Extended Long Short-Term Memory (Beck and others, 2024), in its block with pre up-projection.

    [u_t, z_t] = W_up x_t      c_t = SiLU(conv(u)_t)
    q_t = W_q c_t      k_t = W_k c_t / sqrt(d)      v_t = W_v u_t
    i_t = exp(w_i [q_t, k_t, v_t] + b_i)
    f_t = sigmoid(w_f [q_t, k_t, v_t] + b_f), or exp
    C_t = f_t C_{t-1} + i_t v_t k_t^T
    n_t = f_t n_{t-1} + i_t k_t
    h_t = C_t q_t / max(|n_t^T q_t|, 1)
    y_t = W_down ((GroupNorm(h_t) + s * c_t) * SiLU(z_t))

x input, u what is mixed over time and z its output gate, both wider than x; c convolved u, q query, k key, v
value, i input gate and f forget gate of a head, C matrix memory, n normaliser, h output of a head, s learned
skip, y output, t time. W_q, W_k and W_v are block-diagonal. z is in place of the mLSTM's output gate o_t. The
gates see keys before they are divided by sqrt(d), as in the released code.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from linrec.nn.block_diagonal import BlockDiagonalLinear
from linrec.nn.head_norm import HeadNorm
from linrec.nn.head_sizes import heads_of
from linrec.nn.matrix_memory import ForgetGate, MatrixMemory, MatrixMemoryState
from linrec.nn.mixer import Mixer, State, Transitions
from linrec.nn.short_convolution import ShortConvolution

__all__ = ["MLSTM", "MLSTMState"]

# of the paper's models: heads, channels that are projected to q, k and v together, widening of the block
HEADS = 4
BLOCK_SIZE = 4
EXPANSION = 2
# standard deviation of b_i when training starts, in the released code
INPUT_BIAS_STD = 0.1


class MLSTMState(NamedTuple):
    """What an mLSTM carries from one piece of a sequence to the next.

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
    overflow; see `linrec.nn.matrix_memory`.

    When training starts, as in the released code: W_up, W_q, W_k and W_v are normal with variance
    2 / (5 d_model), W_down with standard deviation 2 / (L sqrt(d_model)) in a model of L layers, which draws
    it by `MLSTM.share` (L = 1 in a layer alone); w_i and w_f are zero, b_i is normal with standard deviation
    0.1, b_f runs from 3 to 6 over the heads; s is one. The forget gate is marked as group "transition"
    without weight decay.

    Args:
        d_model: width of the sequence.
        n_heads: heads h. None is 4, or the largest of 2 and 1 that divides `d_inner` where 4 does not; 1 up
            to a width of 4.
        d_inner: width of u and z. None is 2 `d_model`.
        block_size: channels that W_q, W_k and W_v project together. None is 4, or the largest of 2 and 1 that
            divides `d_inner` where 4 does not.
        conv_size: taps of the causal convolution of each channel; None is no convolution, c_t = u_t.
        input_gate: whether there is i_t; without, it is 1.
        forget_gate: "sigmoid", "exponential", or "none" for f_t = 1.
        gate_std: standard deviation of w_i and w_f when training starts.

    Raises:
        ValueError: an `n_heads` or a `block_size` that does not divide `d_inner`, an unknown `forget_gate`,
            or a `gate_std` below 0.

    Source:
        xLSTM (Beck and others, 2024): the mLSTM's equations, and the figure of its block. Constants that it
        leaves out are those of the released code.

    Example:
        >>> import torch
        >>> mixer = MLSTM(64)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.memory.shape, state.largest.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 4, 32, 33]), torch.Size([2, 4]))
    """

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
        if n_heads is None:
            # the norm of a head of one channel is zero
            n_heads = math.gcd(HEADS, d_inner) if d_inner > HEADS else 1
        self.n_heads = n_heads
        d_head = heads_of("d_inner", d_inner, self.n_heads)
        block_size = math.gcd(BLOCK_SIZE, d_inner) if block_size is None else block_size
        if block_size < 1 or d_inner % block_size:
            raise ValueError(
                f"`block_size` must be a positive divisor of `d_inner` = {d_inner}; got {block_size}."
            )
        std = math.sqrt(2 / (5 * d_model))

        self.up = nn.Linear(d_model, 2 * d_inner, bias=False)
        nn.init.normal_(self.up.weight, std=std)
        self.conv = None if conv_size is None else ShortConvolution(d_inner, conv_size, bias=True)
        self.q, self.k, self.v = (
            BlockDiagonalLinear(d_inner, d_inner // block_size, std=std) for _ in range(3)
        )
        self.memory = MatrixMemory(
            3 * d_inner,
            self.n_heads,
            d_head,
            d_head,
            input_gate=input_gate,
            forget_gate=forget_gate,
            gate_std=gate_std,
        )
        if self.memory.i is not None:
            nn.init.normal_(self.memory.i.bias, std=INPUT_BIAS_STD)
        self.norm = HeadNorm(self.n_heads, d_head)
        self.skip = nn.Parameter(torch.ones(d_inner))
        self.down = nn.Linear(d_inner, d_model, bias=False)
        self.share([self])

    @classmethod
    def share(cls, layers: Sequence["MLSTM"]) -> None:
        """Draw W_down of every layer as that of a model of so many."""
        for mixer in layers:
            nn.init.normal_(mixer.down.weight, std=2 / (len(layers) * math.sqrt(mixer.d_model)))

    def forward(
        self,
        x: Float[Tensor, "b t d_model"],
        state: State = None,
        *,
        reset: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b t d_model"], MLSTMState]:
        """Mix `x` over time; see `Mixer.forward`. The state is an `MLSTMState`."""
        self.check_input(x, reset, state)
        tail, memory = (None, None) if state is None else (state.tail, MatrixMemoryState(*state[1:]))
        u, z = self.up(x).chunk(2, -1)
        c, tail = self._convolved(u, tail, reset)
        h, memory = self.memory(*self._reads_and_writes(c, u), memory, reset=reset)
        h = self.norm(h).flatten(-2).to(x.dtype)
        y = (h + self.skip * c) * functional.silu(z)
        return self.down(y), MLSTMState(tail, *memory)

    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> MLSTMState:
        """Zeros, and a stabiliser of -inf."""
        device, dtype = self.skip.device if device is None else device, self._state_dtype()
        tail = None if self.conv is None else self.conv.init_state(batch, dtype=dtype, device=device)
        return MLSTMState(tail, *self.memory.init_state(batch, dtype=dtype, device=device))

    @property
    def state_size(self) -> int:
        """Elements of C, n and m, h (d (d + 1) + 1), and of the convolution's tail."""
        tail = 0 if self.conv is None else self.conv.state_size
        return tail + self.memory.state_size

    def transitions(self, x: Float[Tensor, "b t d_model"]) -> Transitions:
        """f_t, one per head: c = h."""
        u, _ = self.up(x).chunk(2, -1)
        c, _ = self._convolved(u, None, None)
        _, log_f = self.memory.log_gates(self._reads_and_writes(c, u)[0])
        return Transitions(log_f.exp(), None)

    def token_mixing(
        self, x: Float[Tensor, "b t d_model"], *, reset: Bool[Tensor, "b t"] | None = None
    ) -> Float[Tensor, "b t t"]:
        """Mean over heads of the magnitudes of what v is multiplied by in h."""
        u, _ = self.up(x).chunk(2, -1)
        c, _ = self._convolved(u, None, reset)
        gates, q, k, _ = self._reads_and_writes(c, u)
        return self.memory.weights(gates, q, k, reset=reset).abs().mean(2)

    def _convolved(
        self, u: Tensor, tail: Tensor | None, reset: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        if self.conv is not None:
            u, tail = self.conv(u, tail, reset=reset)
            u = functional.silu(u)
        return u, tail

    def _reads_and_writes(self, c: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What the gates see (b, t, 3 d_inner), and q, k and v in heads."""
        q, k, v = self.q(c), self.k(c), self.v(u)
        heads = (part.unflatten(-1, (self.n_heads, -1)) for part in (q, k, v))
        return torch.cat([q, k, v], -1), *heads
