"""Delta LSTM: Recurrent Fast Weight Programmers (Irie, Schlag, Csordás and Schmidhuber, 2021).

An LSTM whose weights of x and of its last output are fast weights. For each of its three parts g = i, u, o:

    W^g_t = W^g_{t-1} + beta^g_t (v^g_t - W^g_{t-1} k^g_t) k^g_t^T
    R^g_t = R^g_{t-1} + beta'^g_t (v'^g_t - R^g_{t-1} k'^g_t) k'^g_t^T
    z^g_t = W^g_t q^g_t + R^g_t softmax(y_{t-1})

and of the three:

    c_t = sigmoid(z^i_t) * z^u_t + (1 - sigmoid(z^i_t)) * c_{t-1}
    y_t = sigmoid(z^o_t) * c_t

x input, q = phi(W_q x) query, k = phi(W_k x) key, v = W_v x value and beta = sigmoid(w_beta x) writing
strength of a head and part, k' = softmax(W'_k x), v' and beta' the same of R, phi 1 + ELU over its sum, W_t
and R_t fast weights, i input gate, u update, o output gate, c cell, y output of a head, t time, * products of
entries. Heads side by side are projected. W_t comes of x alone, all steps at once; R_t, c and y are made step
by step. The state has the transposes of W_t and R_t.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from linrec.nn.cells import Step, Tensors, step_by_step
from linrec.nn.fast_weights import CHANNELS_PER_HEAD, UnitFeatures, written
from linrec.nn.gates import GateLinear
from linrec.nn.head_sizes import key_value_heads
from linrec.nn.mixer import Mixer, State
from linrec.ops.delta_rule import delta_rule
from linrec.rules import require

__all__ = ["DeltaLSTM", "DeltaLSTMState"]


class DeltaLSTMState(NamedTuple):
    """The state of a Delta LSTM.

    Attributes:
        W: fast weights of x for i, u and o side by side, transposed (b, 3 h, dk, dv).
        R: fast weights of the last output, likewise (b, 3 h, dv, dv).
        c: cells (b, h, dv); zero at the start.
        y: the last outputs of the heads (b, h, dv); zero at the start.
    """

    W: Float[Tensor, "b g dk dv"]
    R: Float[Tensor, "b g dv dv"]
    c: Float[Tensor, "b h dv"]
    y: Float[Tensor, "b h dv"]


class DeltaLSTM(Mixer):
    """c_t = i_t * u_t + (1 - i_t) * c_{t-1}, y_t = o_t * c_t: an LSTM whose weights the delta rule makes.

    The default is version 4, the Delta LSTM of the paper's main table. The others are in its appendix:

    | version | u_t | y_t | R_t is multiplied by |
    |---|---|---|---|
    | 4 | z^u_t | o_t * c_t | softmax(y_{t-1}) |
    | 3 | sigmoid(z^u_t) | o_t * c_t + W^u_t q^u_t | softmax(y_{t-1}) |
    | 2 | sigmoid(z^u_t) | o_t * c_t | softmax(y_{t-1}) |
    | 1 | sigmoid(z^u_t) | softmax(o_t * c_t) | y_{t-1} |

    When training starts, the projections are torch's own, as in the paper's code.

    Args:
        d_model: width of the sequence.
        n_heads: heads h. None is the largest number that divides the greatest common divisor of `d_qk`
            and `d_v` and leaves at least 16 of it to each head, or 1.
        d_qk: width of q and k of each part over all heads. None is `d_model`.
        d_v: width of v of each part over all heads. None is `d_model`.
        version: 1, 2, 3 or 4.
        feature_map: phi, a name of `linrec.nn.feature_maps`; features are divided by their sum.

    Raises:
        ValueError: widths that the heads do not divide, or an unknown version.

    Source:
        Irie, Schlag, Csordás and Schmidhuber, Going Beyond Linear Transformers with Recurrent Fast Weight
        Programmers (2021), appendix A.

    Example:
        >>> mixer = DeltaLSTM(64)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.W.shape, state.c.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 12, 16, 16]), torch.Size([2, 4, 16]))
    """

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int | None = None,
        d_qk: int | None = None,
        d_v: int | None = None,
        version: int = 4,
        feature_map: str = "elu",
    ) -> None:
        super().__init__(d_model)
        require(version in (1, 2, 3, 4), f"`version` must be 1, 2, 3 or 4; got {version}.")
        heads = key_value_heads(n_heads, d_qk, d_v, width=d_model, least=CHANNELS_PER_HEAD)
        (self.n_heads, d_key, self.d_value), self.version = heads, version
        self.features = UnitFeatures(d_key, feature_map=feature_map, norm="l1")

        # of i, u and o side by side
        self.q = nn.Linear(d_model, 3 * heads.d_qk, bias=False)
        self.k = nn.Linear(d_model, 3 * heads.d_qk, bias=False)
        self.v = nn.Linear(d_model, 3 * heads.d_v, bias=False)
        self.beta = GateLinear(d_model, 3 * self.n_heads, bias=False)
        self.recurrent_k = nn.Linear(d_model, 3 * heads.d_v, bias=False)
        self.recurrent_v = nn.Linear(d_model, 3 * heads.d_v, bias=False)
        self.recurrent_beta = GateLinear(d_model, 3 * self.n_heads, bias=False)
        self.out = nn.Linear(heads.d_v, d_model, bias=False)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return y, and a `DeltaLSTMState`."""
        past = self.init_state(x.shape[0], device=x.device) if state is None else state
        linears = (self.q, self.k, self.v, self.recurrent_k, self.recurrent_v)
        q, k, v, k_R, v_R = (linear(x).unflatten(-1, (3 * self.n_heads, -1)) for linear in linears)
        q, k = self.features(q), self.features(k)
        z, W = delta_rule(q, k, v.to(q), torch.sigmoid(self.beta(x)), state=past.W, reset=reset)
        z, k_R, v_R = (part.to(past.R.dtype) for part in (z, k_R, v_R))
        k_R = k_R.softmax(-1)
        beta_R = torch.sigmoid(self.recurrent_beta(x))[..., None]

        def step(state: Tensors, z: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Step:
            R, c, y = state
            R = written(R, k, v, beta)
            last = y if self.version == 1 else y.softmax(-1)
            i, u, o = (z + last.repeat(1, 3, 1, 1) @ R).chunk(3, 1)
            i, o = torch.sigmoid(i), torch.sigmoid(o)
            if self.version < 4:
                u = torch.sigmoid(u)
            c = i * u + (1 - i) * c
            y = o * c
            if self.version == 3:
                y = y + z.chunk(3, 1)[1]
            if self.version == 1:
                y = y.softmax(-1)
            return (R, c, y), (y,)

        rows = [part[..., None, :] for part in (z, k_R, v_R, beta_R)]
        start = past.R, past.c[..., None, :], past.y[..., None, :]
        (R, c, y), (ys,) = step_by_step("delta_lstm", step, start, rows, reset=reset)
        return self.out(ys.flatten(2).to(x.dtype)), DeltaLSTMState(W, R, c[..., 0, :], y[..., 0, :])

    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> DeltaLSTMState:
        """Return zeros."""
        factory, heads, dv = self.factory_kwargs(device), self.n_heads, self.d_value
        W = delta_rule.empty_state(batch, 3 * heads, self.features.d_features, dv, **factory)
        R = delta_rule.empty_state(batch, 3 * heads, dv, dv, **factory)
        return DeltaLSTMState(W, R, *torch.zeros(2, batch, heads, dv, **factory))
