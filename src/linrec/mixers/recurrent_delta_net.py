"""Recurrent Delta Net: Recurrent Fast Weight Programmers (Irie, Schlag, Csordás and Schmidhuber, 2021).

Its slow net, which makes the fast weights W_t, sees the last output:

    q_t = phi(W_q x_t + R_q tanh(y_{t-1}))        k_t = phi(W_k x_t + R_k tanh(y_{t-1}))
    v_t = W_v x_t + R_v tanh(y_{t-1})             beta_t = sigmoid(w_beta x_t + r_beta tanh(y_{t-1}))
    W_t = W_{t-1} + beta_t (v_t - W_{t-1} k_t) k_t^T
    y_t = W_t q_t

In Delta RNN, the fast net sees it, through fast weights R_t with keys, values and strengths of their own, and
W_t comes of x alone:

    R_t = R_{t-1} + beta'_t (v'_t - R_{t-1} k'_t) k'_t^T        k'_t = softmax(W'_k x_t)
    y_t = W_t q_t + R_t softmax(y_{t-1})

x input, q query, k key, v value, beta writing strength of a head, phi softmax, W_t and R_t fast weights, y
output of a head, t time. Heads side by side are projected. No sum over time gives y: steps run one by one.
The state has the transposes of W_t and R_t.
"""

import math
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from linrec.errors import unknown
from linrec.nn.delta import UnitFeatures
from linrec.nn.gates import GateLinear
from linrec.nn.head_sizes import heads_of, most_heads
from linrec.nn.mixer import Mixer, State
from linrec.ops.core.handlers import refuse_split_time
from linrec.ops.core.loop import Step, Tensors, loop
from linrec.ops.core.precision import without_autocast
from linrec.ops.delta_rule import delta_rule

__all__ = ["RecurrentDeltaNet", "RecurrentDeltaState"]

Variant = Literal["recurrent_delta_net", "delta_rnn"]

# of the paper's language models: 8 heads in a width of 128
CHANNELS_PER_HEAD = 16


class RecurrentDeltaState(NamedTuple):
    """What recurrent fast weight programmers carry from one piece of a sequence to the next.

    Attributes:
        W: fast weights, transposed (b, h, dk, dv).
        y: the last outputs of the heads, (b, h, dv); zero at the start.
        R: recurrent fast weights of Delta RNN, transposed (b, h, dv, dv); None else.
    """

    W: Float[Tensor, "b h dk dv"]
    y: Float[Tensor, "b h dv"]
    R: Float[Tensor, "b h dv dv"] | None


class RecurrentDeltaNet(Mixer):
    """W_t = W_{t-1} + beta_t (v_t - W_{t-1} k_t) k_t^T, y_t = W_t q_t, all made of x_t and tanh(y_{t-1}).

    The defaults are the paper's Recurrent Delta Net. Its outputs go through a nonlinearity before they are
    used again, which no parallel form has: a sequence takes as many steps in a row as it has.

    | variant | arguments |
    |---|---|
    | Delta RNN | `variant="delta_rnn"`: W_t in chunks as in DeltaNet, R_t step by step |
    | 1 + ELU over the sum, of the paper's other tasks | `feature_map="elu"` |
    | y_t = W_t q_t + R_y tanh(y_{t-1}), as a survey writes it | `output_recurrence=True` |

    When training starts, R_q, R_k, R_v, r_beta and R_y are normal with a standard deviation of 1 / sqrt(dv),
    and the projections are torch's own, as in the paper's code.

    Args:
        d_model: width of the sequence.
        n_heads: heads h. None is the largest number that divides the greatest common divisor of `d_qk`
            and `d_v` and leaves at least 16 of it to each head, or 1.
        d_qk: width of q and k over all heads. None is `d_model`.
        d_v: width of v over all heads. None is `d_model`.
        variant: "recurrent_delta_net" or "delta_rnn".
        feature_map: phi, a name of `linrec.nn.feature_maps`; features are divided by their sum.
        output_recurrence: whether there is R_y, of the Recurrent Delta Net alone.

    Raises:
        ValueError: widths that the heads do not divide, an unknown name of a variant, or R_y in Delta RNN.

    Source:
        Irie, Schlag, Csordás and Schmidhuber, Going Beyond Linear Transformers with Recurrent Fast Weight
        Programmers (2021). R_y: Tiezzi and others, State-Space Modeling in Long Sequence
        Processing (2024), section 3.

    Example:
        >>> import torch
        >>> mixer = RecurrentDeltaNet(64)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.W.shape, state.y.shape, state.R
        (torch.Size([2, 10, 64]), torch.Size([2, 4, 16, 16]), torch.Size([2, 4, 16]), None)
    """

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int | None = None,
        d_qk: int | None = None,
        d_v: int | None = None,
        variant: Variant = "recurrent_delta_net",
        feature_map: str = "softmax",
        output_recurrence: bool = False,
    ) -> None:
        super().__init__(d_model)
        if variant not in ("recurrent_delta_net", "delta_rnn"):
            raise unknown("`variant`", variant, ["recurrent_delta_net", "delta_rnn"])
        if variant == "delta_rnn" and output_recurrence:
            raise ValueError(
                '`output_recurrence` is of `variant="recurrent_delta_net"`; Delta RNN has R_t in its place. '
                "Leave it at False."
            )
        d_qk = d_model if d_qk is None else d_qk
        d_v = d_model if d_v is None else d_v
        self.n_heads = most_heads(math.gcd(d_qk, d_v), CHANNELS_PER_HEAD) if n_heads is None else n_heads
        self.features = UnitFeatures(heads_of("d_qk", d_qk, self.n_heads), feature_map=feature_map, norm="l1")
        self.d_value = heads_of("d_v", d_v, self.n_heads)
        self.is_rnn = variant == "delta_rnn"

        self.q = nn.Linear(d_model, d_qk, bias=False)
        self.k = nn.Linear(d_model, d_qk, bias=False)
        self.v = nn.Linear(d_model, d_v, bias=False)
        self.beta = GateLinear(d_model, self.n_heads, bias=False)
        if self.is_rnn:
            self.recurrent_k = nn.Linear(d_model, d_v, bias=False)
            self.recurrent_v = nn.Linear(d_model, d_v, bias=False)
            self.recurrent_beta = GateLinear(d_model, self.n_heads, bias=False)
        else:
            # what becomes queries and keys, values, strengths, and is added to outputs
            self.widths = [2 * d_qk // self.n_heads, self.d_value, 1, output_recurrence * self.d_value]
            # R_q, R_k, R_v, r_beta and R_y side by side, transposed
            R = torch.randn(self.n_heads, self.d_value, sum(self.widths))
            self.R = nn.Parameter(R / math.sqrt(self.d_value))
        self.out = nn.Linear(d_v, d_model, bias=False)

    def forward(
        self,
        x: Float[Tensor, "b t d_model"],
        state: State = None,
        *,
        reset: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b t d_model"], RecurrentDeltaState]:
        """Mix `x` over time; see `Mixer.forward`. The state is a `RecurrentDeltaState`."""
        self.check_input(x, reset, state)
        refuse_split_time("recurrent_delta_net")
        past = self.init_state(x.shape[0], device=x.device) if state is None else state
        if x.shape[1] == 0:
            return torch.zeros_like(x), past
        run = self._delta_rnn if self.is_rnn else self._recurrent_delta_net
        y, state = run(x, past, reset)
        return self.out(y.flatten(-2).to(x.dtype)), state

    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> RecurrentDeltaState:
        """Zeros."""
        device = self.q.weight.device if device is None else device

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(batch, self.n_heads, *shape, dtype=self._state_dtype(), device=device)

        R = zeros(self.d_value, self.d_value) if self.is_rnn else None
        return RecurrentDeltaState(zeros(self.features.d_features, self.d_value), zeros(self.d_value), R)

    @property
    def state_size(self) -> int:
        """Elements of W, h dk dv with dk counting features, of y, h dv, and of Delta RNN's R, h dv dv."""
        rows = self.features.d_features + 1 + self.is_rnn * self.d_value
        return self.n_heads * rows * self.d_value

    def _recurrent_delta_net(
        self, x: Tensor, past: State, reset: Tensor | None
    ) -> tuple[Tensor, RecurrentDeltaState]:
        W, y = past.W, past.y[..., None, :]
        parts = (self.q(x), self.k(x), self.v(x), self.beta(x))
        made = torch.cat([part.to(W.dtype).unflatten(-1, (self.n_heads, 1, -1)) for part in parts], -1)
        made = functional.pad(made, (0, self.widths[-1]))
        R = self.R.to(W.dtype)

        def step(state: Tensors, made_t: Tensor, fresh: Tensor | None) -> Step:
            W, y = state
            if fresh is not None:
                W, y = W.masked_fill(fresh, 0), y.masked_fill(fresh, 0)
            qk, v, beta, added = (made_t + y.tanh() @ R).split(self.widths, -1)
            q, k = self.features(qk.unflatten(-1, (2, -1))).unbind(-2)
            W = _written(W, k, v, torch.sigmoid(beta))
            y = q @ W
            if added.shape[-1]:
                y = y + added
            return (W, y), (y,)

        # rounding errors would be fed back
        with without_autocast(x.device.type):
            (W, y), (outputs,) = loop(step, (W, y), [made, _fresh(reset)])
        return outputs[..., 0, :], RecurrentDeltaState(W, y[..., 0, :], None)

    def _delta_rnn(self, x: Tensor, past: State, reset: Tensor | None) -> tuple[Tensor, RecurrentDeltaState]:
        heads = (self.n_heads, -1)
        q, k = (self.features(part.unflatten(-1, heads)) for part in (self.q(x), self.k(x)))
        v = self.v(x).unflatten(-1, heads).to(q)
        z, W = delta_rule(q, k, v, torch.sigmoid(self.beta(x)), state=past.W, reset=reset)
        recurrent_k = self.recurrent_k(x).unflatten(-1, heads).to(past.R.dtype).softmax(-1)
        recurrent_v = self.recurrent_v(x).unflatten(-1, heads).to(past.R.dtype)
        recurrent_beta = torch.sigmoid(self.recurrent_beta(x))[..., None]
        rows = [part[..., None, :] for part in (z, recurrent_k, recurrent_v, recurrent_beta)]

        def step(
            state: Tensors, z_t: Tensor, k_t: Tensor, v_t: Tensor, beta_t: Tensor, fresh: Tensor | None
        ) -> Step:
            R, y = state
            if fresh is not None:
                R, y = R.masked_fill(fresh, 0), y.masked_fill(fresh, 0)
            R = _written(R, k_t, v_t, beta_t)
            y = z_t + y.softmax(-1) @ R
            return (R, y), (y,)

        with without_autocast(x.device.type):
            (R, y), (outputs,) = loop(step, (past.R, past.y[..., None, :]), [*rows, _fresh(reset)])
        return outputs[..., 0, :], RecurrentDeltaState(W, y[..., 0, :], R)


def _fresh(reset: Tensor | None) -> Tensor | None:
    """Return `reset` with the axes of rows (b, t, h, 1, d)."""
    return None if reset is None else reset[:, :, None, None, None]


def _written(W: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """W with what is under the key moved towards the value by a share of beta: all rows (b, h, 1, d)."""
    return W + k.mT * (beta * (v - k @ W))
