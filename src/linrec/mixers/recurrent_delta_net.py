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

The paper's first version of it has y_t = softmax(W_t q_t + R_t y_{t-1}).

x input, q query, k key, v value, beta writing strength of a head, phi softmax, W_t and R_t fast weights, y
output of a head, t time. Heads side by side are projected. Steps run one by one, since y is not a sum over
time. The state has the transposes of W_t and R_t.
"""

import math
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from linrec.nn.cells import Step, Tensors, step_by_step
from linrec.nn.fast_weights import CHANNELS_PER_HEAD, UnitFeatures, written
from linrec.nn.gates import GateLinear
from linrec.nn.head_sizes import key_value_heads
from linrec.nn.mixer import Mixer, State
from linrec.ops.delta_rule import delta_rule
from linrec.rules import require

__all__ = ["RecurrentDeltaNet", "RecurrentDeltaState"]

Variant = Literal["recurrent_delta_net", "delta_rnn", "delta_rnn_v1"]


class RecurrentDeltaState(NamedTuple):
    """The state of a recurrent fast weight programmer.

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

    The defaults are the paper's Recurrent Delta Net. Its outputs go through a nonlinearity before the next
    step uses them. So there is no parallel form, and steps run one by one.

    | variant | arguments |
    |---|---|
    | Delta RNN | `variant="delta_rnn"`: W_t in chunks as in DeltaNet, R_t step by step |
    | version 1 of Delta RNN, y_t = softmax(W_t q_t + R_t y_{t-1}) | `variant="delta_rnn_v1"` |
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
        variant: "recurrent_delta_net", "delta_rnn" or "delta_rnn_v1". The released code of the second has
            `feature_map="elu"`.
        feature_map: phi, a name of `linrec.nn.feature_maps`; features are divided by their sum.
        output_recurrence: whether there is R_y, of the Recurrent Delta Net alone.

    Raises:
        ValueError: widths that the heads do not divide, an unknown name of a variant, or R_y in Delta RNN.

    Source:
        Irie, Schlag, Csordás and Schmidhuber, Going Beyond Linear Transformers with Recurrent Fast Weight
        Programmers (2021). R_y: Tiezzi and others, State-Space Modeling in Long Sequence
        Processing (2024), section 3.

    Example:
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
        require(
            variant == "recurrent_delta_net" or not output_recurrence,
            f"`output_recurrence` must be False with `variant={variant!r}`; got True. Delta RNN has R_t in "
            "its place.",
        )
        heads = key_value_heads(n_heads, d_qk, d_v, width=d_model, least=CHANNELS_PER_HEAD)
        self.n_heads, d_key, self.d_value = heads
        self.features = UnitFeatures(d_key, feature_map=feature_map, norm="l1")
        self.is_rnn, self.is_first = variant != "recurrent_delta_net", variant == "delta_rnn_v1"

        self.q = nn.Linear(d_model, heads.d_qk, bias=False)
        self.k = nn.Linear(d_model, heads.d_qk, bias=False)
        self.v = nn.Linear(d_model, heads.d_v, bias=False)
        self.beta = GateLinear(d_model, self.n_heads, bias=False)
        if self.is_rnn:
            self.recurrent_k = nn.Linear(d_model, heads.d_v, bias=False)
            self.recurrent_v = nn.Linear(d_model, heads.d_v, bias=False)
            self.recurrent_beta = GateLinear(d_model, self.n_heads, bias=False)
        else:
            # of q and k, of v, of beta, and of R_y
            self.widths = [2 * d_key, self.d_value, 1, output_recurrence * self.d_value]
            # R_q, R_k, R_v, r_beta and R_y side by side, transposed
            R = torch.randn(self.n_heads, self.d_value, sum(self.widths))
            self.R = nn.Parameter(R / math.sqrt(self.d_value))
        self.out = nn.Linear(heads.d_v, d_model, bias=False)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return y, and a `RecurrentDeltaState`."""
        past = self.init_state(x.shape[0], device=x.device) if state is None else state
        if self.is_rnn:
            return self._delta_rnn(x, past, reset)
        R = self.R.to(past.W.dtype)
        # side by side as R has them, with zeros for R_y
        qkvb = (part(x).unflatten(-1, (self.n_heads, 1, -1)) for part in (self.q, self.k, self.v, self.beta))
        W_x = functional.pad(torch.cat([part.to(R.dtype) for part in qkvb], -1), (0, self.widths[-1]))

        def step(state: Tensors, W_x: Tensor) -> Step:
            W, y = state
            qk, v, beta, R_y = (W_x + y.tanh() @ R).split(self.widths, -1)
            q, k = self.features(qk.unflatten(-1, (2, -1))).unbind(-2)
            W = written(W, k, v, torch.sigmoid(beta))
            y = q @ W
            if self.widths[-1]:
                y = y + R_y
            return (W, y), (y,)

        start = past.W, past.y[..., None, :]
        (W, y), (ys,) = step_by_step("recurrent_delta_net", step, start, [W_x], reset=reset)
        return self.out(ys.flatten(2).to(x.dtype)), RecurrentDeltaState(W, y[..., 0, :], None)

    def _delta_rnn(self, x: Tensor, past: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return the results of `mix` by the equations of Delta RNN."""
        heads = (self.n_heads, -1)
        q, k = (self.features(part.unflatten(-1, heads)) for part in (self.q(x), self.k(x)))
        v = self.v(x).unflatten(-1, heads).to(q)
        z, W = delta_rule(q, k, v, torch.sigmoid(self.beta(x)), state=past.W, reset=reset)
        k = self.recurrent_k(x).unflatten(-1, heads).to(past.R.dtype).softmax(-1)
        v = self.recurrent_v(x).unflatten(-1, heads).to(past.R.dtype)
        beta = torch.sigmoid(self.recurrent_beta(x))[..., None]

        def step(state: Tensors, z: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Step:
            R, y = state
            R = written(R, k, v, beta)
            y = (z + y @ R).softmax(-1) if self.is_first else z + y.softmax(-1) @ R
            return (R, y), (y,)

        rows = [part[..., None, :] for part in (z, k, v, beta)]
        start = past.R, past.y[..., None, :]
        (R, y), (ys,) = step_by_step("recurrent_delta_net", step, start, rows, reset=reset)
        return self.out(ys.flatten(2).to(x.dtype)), RecurrentDeltaState(W, y[..., 0, :], R)

    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> RecurrentDeltaState:
        """Return zeros."""
        factory, heads, dv = self.factory_kwargs(device), (batch, self.n_heads), self.d_value
        W = delta_rule.empty_state(*heads, self.features.d_features, dv, **factory)
        R = delta_rule.empty_state(*heads, dv, dv, **factory) if self.is_rnn else None
        return RecurrentDeltaState(W, torch.zeros(*heads, dv, **factory), R)
