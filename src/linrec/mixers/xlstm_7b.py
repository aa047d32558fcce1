"""xLSTM 7B: A Recurrent LLM for Fast and Efficient Inference (Beck and others, 2025): its mLSTM layer.

    q_t = W_q x_t      k_t = W_k x_t / sqrt(dk)      v_t = W_v x_t
    i_t = exp(cap(w_i x_t + b_i))      f_t = sigmoid(cap(w_f x_t + b_f))      cap(z) = 15 tanh(z / 15)
    m_t = max(log f_t + m_{t-1}, log i_t, 0)
    C_t = f_t C_{t-1} + i_t v_t k_t^T
    n_t = f_t n_{t-1} + i_t k_t
    h_t = C_t q_t / max(|n_t^T q_t|, 1)
    y_t = W_o (sigmoid(W_g x_t) * LayerNorm(h_t))

x input, q query, k key, v value, y output, t time. i input gate, f forget gate and m stabiliser of a head, C
matrix memory, n normaliser, h output of a head. q and k are half as wide as x. C and n are kept times
exp(-m_t).
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from linrec.nn.head_sizes import key_value_heads
from linrec.nn.mixer import Mixer, State
from linrec.nn.norms import HeadNorm
from linrec.nn.projections import draw, projected
from linrec.nn.running_maximum import ForgetGate, MemoryGates, stabilised
from linrec.ops.gate_loop import normalized_gate_loop
from linrec.ops.inspection import note
from linrec.rules import at_least

__all__ = ["XLSTM7B", "XLSTM7BState"]

# of the paper's model, whose heads have 256 channels of keys and 512 of values
HEADS = 8
# b_i when training starts: little is written
INPUT_BIAS = -10.0


class XLSTM7BState(NamedTuple):
    """The state of an xLSTM-7B layer.

    Attributes:
        memory: C^T with n as its last column, both times exp(-m), (b, h, dk, dv + 1).
        largest: m, the stabiliser, (b, h); -inf at the start.
    """

    memory: Float[Tensor, "b h dk dv+1"]
    largest: Float[Tensor, "b h"]


class XLSTM7B(Mixer):
    """C_t = f_t C_{t-1} + i_t v_t k_t^T, h_t = C_t q_t / max(|n_t^T q_t|, 1), as wide as the sequence.

    The defaults are the paper's layer. Its model has RMSNorms and a SwiGLU of width 8/3 `d_model` beside it,
    and a soft cap of 30 on the logits: `norm="rms"`, `norm_eps=1e-6`, `channel_mixing="swiglu"` and
    `logit_cap=30` of a `ModelConfig`. The block of the first xLSTM paper is the mixer `mlstm`.

    C and n are kept over exp(m_t), the largest weight that is remembered, so that exponential gates do not
    overflow; see `linrec.nn.running_maximum.stabilised`.

    When training starts, w_i and w_f are zero, b_i is -10, so that little is written, and b_f runs from 3 to
    6 over the heads. W_q, W_k, W_v and W_g are normal with variance 2 / (5 d_model), and W_o has standard
    deviation 2 / (L sqrt(d_model)) in a model of L layers of all kinds, which draws it by `XLSTM7B.place`
    (L = 1 in a layer alone). The forget gate is marked as group "transition" without weight decay.

    Args:
        d_model: width of the sequence.
        n_heads: heads h. None is 8, or the largest of 4, 2 and 1 that divides `d_qk` and `d_v` where 8 does
            not.
        d_qk: width of q and k over all heads. None is `d_model` / 2, rounded down, at least 1.
        d_v: width of v over all heads. None is `d_model`.
        forget_gate: "sigmoid", "exponential", or "none" for f_t = 1.
        gate_cap: the soft cap of the gates, or None.
        gate_std: standard deviation of w_i and w_f when training starts.
        norm_eps: added to the variance in LayerNorm.

    Raises:
        ValueError: widths that the heads do not divide, an unknown `forget_gate`, a `gate_cap` that is not
            positive, or a `gate_std` below 0.

    Source:
        xLSTM 7B (Beck and others, 2025). The initialisation comes from the authors' code in transformers,
        which however starts W_g at zero.

    Example:
        >>> mixer = XLSTM7B(64)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.memory.shape, state.largest.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 8, 4, 9]), torch.Size([2, 8]))
    """

    recurrence = "normalized_gate_loop"
    of_one_input = "q", "k", "v", "gate"

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int | None = None,
        d_qk: int | None = None,
        d_v: int | None = None,
        forget_gate: ForgetGate = "sigmoid",
        gate_cap: float | None = 15.0,
        gate_std: float = 0.0,
        norm_eps: float = 1e-6,
    ) -> None:
        super().__init__(d_model)
        d_qk = max(1, d_model // 2) if d_qk is None else d_qk
        d_v = d_model if d_v is None else d_v
        at_least(0, norm_eps=norm_eps)
        n_heads = math.gcd(HEADS, d_qk, d_v) if n_heads is None else n_heads
        self.n_heads, self.d_key, self.d_value = key_value_heads(n_heads, d_qk, d_v, width=d_model)

        self.q = nn.Linear(d_model, d_qk, bias=False)
        self.k = nn.Linear(d_model, d_qk, bias=False)
        self.v = nn.Linear(d_model, d_v, bias=False)
        self.gate = nn.Linear(d_model, d_v, bias=False)
        draw([self.q, self.k, self.v, self.gate], nn.init.normal_, std=math.sqrt(2 / (5 * d_model)))
        self.memory = MemoryGates(
            d_model, self.n_heads, forget_gate=forget_gate, gate_cap=gate_cap, gate_std=gate_std
        )
        if self.memory.i is not None:
            nn.init.constant_(self.memory.i.bias, INPUT_BIAS)
        self.norm = HeadNorm(self.n_heads, self.d_value, eps=norm_eps)
        self.out = nn.Linear(d_v, d_model, bias=False)
        self.place(0, 1)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return y, and an `XLSTM7BState`."""
        C, m = (None, None) if state is None else state
        *qkv, g = projected(x, self.q, self.k, self.v, self.gate)
        q, k, v = (part.unflatten(-1, (self.n_heads, -1)) for part in qkv)
        log_i, log_f = self.memory(x)
        note(log_decay=log_f)
        q, k, v, log_f, floor, m = stabilised(q, k, v, log_i, log_f, m, reset=reset)
        h, C = normalized_gate_loop(q, k, v, log_f, floor=floor, signed=False, state=C, reset=reset)
        h = self.norm(h).flatten(-2).to(x.dtype)
        return self.out(torch.sigmoid(g) * h), XLSTM7BState(C, m)

    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> XLSTM7BState:
        """Return zeros, and a stabiliser of -inf."""
        sizes = self.n_heads, self.d_key, self.d_value
        C = normalized_gate_loop.empty_state(batch, *sizes, **self.factory_kwargs(device))
        return XLSTM7BState(C, C.new_full((batch, self.n_heads), -torch.inf))

    def place(self, layer: int, n_layers: int) -> None:
        """Draw W_o with the standard deviation for a model of `n_layers` layers."""
        nn.init.normal_(self.out.weight, std=2 / (n_layers * math.sqrt(self.d_model)))
