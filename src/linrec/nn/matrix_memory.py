"""The mLSTM's memory, which the layers of xLSTM and xLSTM-7B have in common."""

import math
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from linrec.errors import unknown
from linrec.nn.gates import GateLinear
from linrec.nn.head import soft_cap
from linrec.nn.parameters import mark
from linrec.nn.running_maximum import running_maximum
from linrec.ops.core.handlers import refuse_split_time
from linrec.ops.gate_loop import normalized_gate_loop

__all__ = ["ForgetGate", "MatrixMemory", "MatrixMemoryState"]

ForgetGate = Literal["sigmoid", "exponential", "none"]

# range over the heads of what the forget gate is the sigmoid of, when training starts, in the released code
FORGET_BIAS = (3.0, 6.0)
# bound of denominators in the released code, for m so large that exp(-m) is zero
EPS = 1e-6


class MatrixMemoryState(NamedTuple):
    """What a matrix memory carries from one piece of a sequence to the next.

    Attributes:
        memory: C^T with n as its last column, both times exp(-m), (b, h, dk, dv + 1).
        largest: m, (b, h); -inf at the start.
    """

    memory: Float[Tensor, "b h dk dv+1"]
    largest: Float[Tensor, "b h"]


class MatrixMemory(nn.Module):
    """h_t = C_t q_t / max(|n_t^T q_t|, 1), the mLSTM cell without its output gate.

        C_t = f_t C_{t-1} + i_t v_t k_t^T / sqrt(dk)
        n_t = f_t n_{t-1} + i_t k_t / sqrt(dk)
        i_t = exp(w_i x_t + b_i)      f_t = sigmoid(w_f x_t + b_f) or exp(w_f x_t + b_f)

    Both are kept times exp(-m_t), so that no gate overflows:

        m_t = max(log f_t + m_{t-1}, log i_t, 0)
        h_t = C_t q_t / max(|n_t^T q_t|, exp(-m_t))

    The paper's m_t has no zero in it. h_t does not depend on m_t, and below zero there is nothing to keep
    from overflowing but exp(-m_t) itself.

    When training starts, w_i, w_f and b_i are zero, and f_t is sigmoid(3) to sigmoid(6), spread over the
    heads: the released code. The forget gate is marked as group "transition" without weight decay.

    Args:
        d_gates: width of x, which the gates see.
        n_heads: heads h.
        d_key: channels dk of a query or key.
        d_value: channels dv of a value.
        input_gate: whether there is i_t; without, it is 1.
        forget_gate: "sigmoid", "exponential", or "none" for f_t = 1.
        gate_cap: None, or the soft cap c of what the gates are functions of: c tanh(z / c) in place of z.
        gate_std: standard deviation of w_i and w_f when training starts.

    Raises:
        ValueError: an unknown `forget_gate`, a `gate_cap` that is not positive, or a `gate_std` below 0.

    Source:
        xLSTM (Beck and others, 2024), the forward pass of the mLSTM and the stabiliser of the sLSTM's gates.

    Example:
        >>> import torch
        >>> memory = MatrixMemory(8, 2, 4, 4)
        >>> q, k, v = torch.zeros(3, 1, 10, 2, 4)
        >>> h, state = memory(torch.zeros(1, 10, 8), q, k, v)
        >>> h.shape, state.memory.shape
        (torch.Size([1, 10, 2, 4]), torch.Size([1, 2, 4, 5]))
    """

    def __init__(
        self,
        d_gates: int,
        n_heads: int,
        d_key: int,
        d_value: int,
        *,
        input_gate: bool = True,
        forget_gate: ForgetGate = "sigmoid",
        gate_cap: float | None = None,
        gate_std: float = 0.0,
    ) -> None:
        super().__init__()
        if forget_gate not in ("sigmoid", "exponential", "none"):
            raise unknown("`forget_gate`", forget_gate, ["sigmoid", "exponential", "none"])
        if gate_cap is not None and not gate_cap > 0:
            raise ValueError(f"`gate_cap` must be above 0, or None; got {gate_cap}.")
        if not gate_std >= 0:
            raise ValueError(f"`gate_std` must be at least 0, a standard deviation; got {gate_std}.")
        self.n_heads, self.d_key, self.d_value = n_heads, d_key, d_value
        self.gate_cap, self.sigmoid = gate_cap, forget_gate == "sigmoid"
        self.i = GateLinear(d_gates, n_heads) if input_gate else None
        if self.i is not None:
            nn.init.normal_(self.i.weight, std=gate_std)
            nn.init.zeros_(self.i.bias)
        self.f: GateLinear | None = None
        if forget_gate != "none":
            self.f = mark(GateLinear(d_gates, n_heads), group="transition", weight_decay=False)
            nn.init.normal_(self.f.weight, std=gate_std)
            bias = torch.linspace(*FORGET_BIAS, n_heads)
            with torch.no_grad():
                self.f.bias.copy_(bias if self.sigmoid else functional.logsigmoid(bias))

    def forward(
        self,
        x: Float[Tensor, "b t d_gates"],
        q: Float[Tensor, "b t h dk"],
        k: Float[Tensor, "b t h dk"],
        v: Float[Tensor, "b t h dv"],
        state: MatrixMemoryState | None = None,
        *,
        reset: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b t h dv"], MatrixMemoryState]:
        """Write and read at every step; see `Mixer.forward`.

        Args:
            x: what the gates see (b, t, d_gates).
            q: queries (b, t, h, dk).
            k: keys (b, t, h, dk), not yet divided by sqrt(dk).
            v: values (b, t, h, dv), any dv that the state has.
            state: what an earlier call returned, or None.
            reset: (b, t) bool.
        """
        # the largest exponent so far is that of all parts
        refuse_split_time("mlstm")
        log_i, log_f = self.log_gates(x)
        memory, before = (
            (None, log_i.new_full((x.shape[0], self.n_heads), -torch.inf)) if state is None else state
        )
        largest = running_maximum(log_i.clamp(min=0), before, log_f, reset=reset)
        earlier, m = largest[:, :-1], largest[:, 1:]
        if reset is not None:
            earlier = earlier.masked_fill(reset[..., None], -torch.inf)
        # in the gates' precision: i_t exp(-m_t) has a range that float16 has not
        k = (log_i - m).exp()[..., None] / math.sqrt(self.d_key) * k
        h, memory = normalized_gate_loop(
            q.to(k.dtype),
            k,
            v.to(k.dtype),
            log_f + earlier - m,
            floor=(-m).exp().clamp(min=EPS),
            signed=False,
            state=memory,
            reset=reset,
        )
        # a view would keep m of all steps as long as the state
        return h, MatrixMemoryState(memory, largest[:, -1].clone())

    def log_gates(
        self, x: Float[Tensor, "b t d_gates"]
    ) -> tuple[Float[Tensor, "b t h"], Float[Tensor, "b t h"]]:
        """log i_t and log f_t (b, t, h) in float32 or better; zeros for a gate that is not there."""
        zeros = x.new_zeros(*x.shape[:2], self.n_heads, dtype=torch.promote_types(x.dtype, torch.float32))
        log_i = zeros if self.i is None else soft_cap(self.i(x), self.gate_cap)
        if self.f is None:
            return log_i, zeros
        log_f = soft_cap(self.f(x), self.gate_cap)
        return log_i, functional.logsigmoid(log_f) if self.sigmoid else log_f

    def weights(
        self,
        x: Float[Tensor, "b t d_gates"],
        q: Float[Tensor, "b t h dk"],
        k: Float[Tensor, "b t h dk"],
        *,
        reset: Bool[Tensor, "b t"] | None = None,
    ) -> Float[Tensor, "b t h t"]:
        """What the values of each step are multiplied by in each h_t, (b, t, h, t)."""
        # what the memory makes of the identity is the matrix
        identity = torch.eye(x.shape[1], dtype=x.dtype, device=x.device)[:, None]
        return self(x, q, k, identity.expand(len(x), -1, self.n_heads, -1), reset=reset)[0]

    def init_state(
        self, batch: int, *, dtype: torch.dtype, device: torch.device | str | None = None
    ) -> MatrixMemoryState:
        """The state at the start of a sequence: zeros, and m of -inf."""
        shape = (batch, self.n_heads, self.d_key, self.d_value + 1)
        memory = torch.zeros(shape, dtype=dtype, device=device)
        return MatrixMemoryState(memory, memory.new_full((batch, self.n_heads), -torch.inf))

    @property
    def state_size(self) -> int:
        """Elements of C, n and m: h (dk (dv + 1) + 1)."""
        return self.n_heads * (self.d_key * (self.d_value + 1) + 1)
