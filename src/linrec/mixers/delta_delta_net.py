"""Delta Delta Net: Recurrent Fast Weight Programmers (Irie, Schlag, Csordás and Schmidhuber, 2021).

A network programs the fast weights F_t of a network that programs the fast weights W_t:

    q'_t, k'_t, v'_t, beta'_t = W_slow x_t
    F_t = F_{t-1} + sigmoid(beta'_t) (v'_t - F_{t-1} phi(k'_t)) phi(k'_t)^T
    q_t, k_t, v_t, beta_t = F_t phi(q'_t)
    W_t = W_{t-1} + sigmoid(beta_t) (v_t - W_{t-1} phi(k_t)) phi(k_t)^T
    y_t = W_t phi(q_t)

x is the input, t time. Of a head, q' and q are queries, k' and k keys, v' and v values, beta' and beta
writing strengths, F_t and W_t fast weights, and y the output. phi is 1 + ELU over its sum. A projection of
all heads side by side follows.
Each of the two rules runs over all steps at once. The state has the transposes of F_t and W_t.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from linrec.nn.fast_weights import CHANNELS_PER_HEAD, UnitFeatures
from linrec.nn.gates import GateLinear
from linrec.nn.head_sizes import key_value_heads
from linrec.nn.mixer import Mixer, State
from linrec.ops.delta_rule import delta_rule

__all__ = ["DeltaDeltaNet", "DeltaDeltaState"]


class DeltaDeltaState(NamedTuple):
    """The state of a Delta Delta Net.

    Attributes:
        F: fast weights that make q, k, v and beta, transposed (b, h, dk, 2 dk + dv + 1); with
            `base_weights`, F_t - F_0.
        W: fast weights that make the output, transposed (b, h, dk, dv).
    """

    F: Float[Tensor, "b h dk rows"]
    W: Float[Tensor, "b h dk dv"]


class DeltaDeltaNet(Mixer):
    """DeltaNet whose queries, keys, values and strengths are the outputs of a DeltaNet.

    The defaults are the paper's layer.

    | variant | argument |
    |---|---|
    | learned F_0, an option of the released code | `base_weights=True` |
    | sums of features plus 1e-5, as in the released code | `qk_eps=1e-5` |

    When training starts, F_0 is uniform in [1, 2), and the projections are torch's own, as in the released
    code.

    Args:
        d_model: width of the sequence.
        n_heads: heads h. None is the largest number that divides the greatest common divisor of `d_qk`
            and `d_v` and leaves at least 16 of it to each head, or 1.
        d_qk: width of q and k, and of q' and k', over all heads. None is `d_model`.
        d_v: width of v over all heads. None is `d_model`.
        feature_map: phi, a name of `linrec.nn.feature_maps`; features are divided by their sum.
        qk_eps: added to that sum.
        base_weights: whether F_0 is learned; it is zero else.

    Raises:
        ValueError: widths that the heads do not divide, or an unknown name of a feature map.

    Source:
        Irie, Schlag, Csordás and Schmidhuber, Going Beyond Linear Transformers with Recurrent Fast Weight
        Programmers (2021).

    Example:
        >>> mixer = DeltaDeltaNet(64)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.F.shape, state.W.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 4, 16, 49]), torch.Size([2, 4, 16, 16]))
    """

    recurrence = "delta_rule"

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int | None = None,
        d_qk: int | None = None,
        d_v: int | None = None,
        feature_map: str = "elu",
        qk_eps: float = 0.0,
        base_weights: bool = False,
    ) -> None:
        super().__init__(d_model)
        heads = key_value_heads(n_heads, d_qk, d_v, width=d_model, least=CHANNELS_PER_HEAD)
        self.n_heads = heads.n
        self.features = UnitFeatures(heads.d_key, feature_map=feature_map, norm="l1", eps=qk_eps)
        # channels of q, k, v and beta, which F makes
        self.widths = [heads.d_key, heads.d_key, heads.d_value, 1]

        self.q = nn.Linear(d_model, heads.d_qk, bias=False)
        self.k = nn.Linear(d_model, heads.d_qk, bias=False)
        self.v = nn.Linear(d_model, self.n_heads * sum(self.widths), bias=False)
        self.beta = GateLinear(d_model, self.n_heads, bias=False)
        self.F = None
        if base_weights:
            self.F = nn.Parameter(1 + torch.rand(self.n_heads, self.features.d_features, sum(self.widths)))
        self.out = nn.Linear(heads.d_v, d_model, bias=False)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return y, and a `DeltaDeltaState`."""
        F, W = (None, None) if state is None else state
        q, k, v = (part(x).unflatten(-1, (self.n_heads, -1)) for part in (self.q, self.k, self.v))
        q, k = self.features(q), self.features(k)
        v = v.to(q)
        if self.F is not None:
            # the rule for F_t - F_0
            v = v - torch.einsum("bthk,hkr->bthr", k, self.F.to(k))
        made, F = delta_rule(q, k, v, torch.sigmoid(self.beta(x)), state=F, reset=reset)
        if self.F is not None:
            made = made + torch.einsum("bthk,hkr->bthr", q, self.F.to(q))
        q, k, v, beta = made.split(self.widths, -1)
        q, k, beta = self.features(q), self.features(k), torch.sigmoid(beta[..., 0])
        y, W = delta_rule(q, k, v.contiguous(), beta, state=W, reset=reset)
        return self.out(y.flatten(-2).to(x.dtype)), DeltaDeltaState(F, W)
