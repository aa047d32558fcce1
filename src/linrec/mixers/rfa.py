"""RFA: Random Feature Attention (Peng, Pappas, Yogatama, Schwartz, Smith and Kong, 2021).

    q_t = x_t W_Q     k_t = x_t W_K     v_t = x_t W_V
    phi(x) = [sin(w_1 x), .., sin(w_D x), cos(w_1 x), .., cos(w_D x)] / sqrt(D)
    g_t = sigmoid(w_g x_t + b_g)
    S_t = g_t S_{t-1} + (1 - g_t) phi(k_t) v_t^T
    z_t = g_t z_{t-1} + (1 - g_t) phi(k_t)
    y_t = phi(q_t)^T S_t / (phi(q_t)^T z_t)

x is the input, t time. Of a head, q is the query, k the key, v the value, g the gate, S and z the state, and
y the output. phi are random features of unit vectors, and w_i their directions. Directions are drawn, and
scaled by a learned sigma over a constant tau. Heads side by side are projected by W_O.
"""

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from linrec.nn import feature_maps
from linrec.nn.gates import GateLinear
from linrec.nn.head_sizes import split_width
from linrec.nn.mixer import Mixer, State
from linrec.nn.parameters import mark
from linrec.ops.gate_loop import normalized_gate_loop
from linrec.rules import positive, require

__all__ = ["RFA"]

Features = Literal["rfa", "arc_cosine"]
Init = Literal["torch", "released"]

# as the Transformer's heads, whose place RFA takes
CHANNELS_PER_HEAD = 64


class RFA(Mixer):
    """S_t = g_t S_{t-1} + (1 - g_t) phi(k_t) v_t^T, y_t = phi(q_t)^T S_t / (phi(q_t)^T z_t).

    The defaults are the paper's gated layer, RFA-Gate-Gaussian. Its weights estimate the weights of softmax
    attention of unit queries and keys, and fade with the gate. An estimate may be negative, and so may the
    sum of weights. The output is divided by the magnitude of the sum, which is at least `floor`.

    | the paper's variant | argument |
    |---|---|
    | RFA without gate | `gate=False`: S_t = S_{t-1} + phi(k_t) v_t^T |
    | RFA-arccos | `feature_map="arc_cosine"` |
    | constant sigma | `learn_sigma=False`, its size is 1 / `tau` |

    The paper draws other directions at each training step, and keeps one draw for evaluation:
    `mixer.phi.redraw()` draws, between sequences.

    Args:
        d_model: width of the sequence.
        n_heads: heads h, each with a draw, a sigma and a gate of its own. None is the largest number that
            divides `d_model` and leaves at least 64 channels to each head, or 1.
        n_features: D, directions per head. None is the channels of a head.
        feature_map: "rfa" (Gaussian kernel) or "arc_cosine".
        gate: whether the state fades.
        orthogonal: whether directions are orthogonal in blocks, as Performer draws them.
        learn_sigma: whether sigma is learned, per head and channel; "arc_cosine" has no sigma.
        tau: temperature of the Gaussian kernel, by which sigma is divided: 1 in the released code, where it
            can be set, too. Where sigma is learned, tau sets its start.
        floor: the smallest denominator, max(|phi(q)^T z|, floor). The Gaussian kernel of unit vectors is at
            least exp(-2) = 0.14 where sigma / tau is 1. The first sum of a sequence is 1 - g_1 times that;
            with gates that start near 1/2, no sum falls below 0.01 when a head has 64 directions. Estimates
            from few directions, or with a smaller tau, come near to 0: choose a larger floor if gradients are
            large there. The released code bounds sums of sequences at 0.001, and steps and its CUDA kernel at
            1, of features that are times 0.1 in place of 1 / sqrt(D): at D = 64 that is a `floor` of 0.0016
            and of 1.6.
        init: initial projections. "torch" is torch's own. "released" is the released code's: weights by
            Xavier's uniform rule with a gain of 1 / sqrt(2), and an output bias of zero.
        bias: whether the projections of q, k, v and of the output have biases.

    Raises:
        ValueError: `n_heads` that does not divide `d_model`, an unknown name of a variant, a `tau` of
            "arc_cosine", or a number out of range.

    Source:
        Random Feature Attention (Peng and others, 2021), RFA and RFA-Gate. tau and the bound of the
        denominator are the released code's, which has no gate.

    Example:
        >>> mixer = RFA(64, n_heads=4)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 4, 32, 17]))
    """

    recurrence = "normalized_gate_loop"

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int | None = None,
        n_features: int | None = None,
        feature_map: Features = "rfa",
        gate: bool = True,
        orthogonal: bool = False,
        learn_sigma: bool = True,
        tau: float = 1.0,
        floor: float = 0.01,
        init: Init = "torch",
        bias: bool = True,
    ) -> None:
        super().__init__(d_model)
        positive(floor=floor, cure="It keeps a sum from being zero.")
        require(
            feature_map == "rfa" or tau == 1,
            f'`tau` is the temperature of the kernel of `feature_map="rfa"`; got {tau}. Leave it at 1.',
        )
        self.n_heads, self.d_head = split_width("d_model", d_model, n_heads, least=CHANNELS_PER_HEAD)
        self.floor = floor

        self.q = nn.Linear(d_model, d_model, bias=bias)
        self.k = nn.Linear(d_model, d_model, bias=bias)
        self.v = nn.Linear(d_model, d_model, bias=bias)
        features: dict[str, float | None] = {"n_features": n_features, "n_heads": self.n_heads}
        if feature_map == "rfa":
            features |= {"learn_sigma": learn_sigma, "tau": tau}
        self.phi = feature_maps.build(feature_map, self.d_head, orthogonal=orthogonal, **features)
        self.gate: GateLinear | None = None
        if gate:
            self.gate = mark(GateLinear(d_model, self.n_heads))
        self.out = nn.Linear(d_model, d_model, bias=bias)
        if init == "released":
            for linear in (self.q, self.k, self.v, self.out):
                nn.init.xavier_uniform_(linear.weight, gain=math.sqrt(0.5))
            if bias:
                nn.init.zeros_(self.out.bias)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return y, and S with z as its last column (b, h, m, dv + 1)."""
        heads = self.n_heads, self.d_head
        q, k, v = (linear(x).unflatten(-1, heads) for linear in (self.q, self.k, self.v))
        q, k = self.phi.queries(q), self.phi(k)
        log_g = None
        if self.gate is not None:
            g = self.gate(x)
            log_g = functional.logsigmoid(g)
            # sigmoid(-g) is 1 - sigmoid(g) without a difference
            k = (torch.sigmoid(-g)[..., None] * k).to(q)
        y, state = normalized_gate_loop(
            q, k, v.to(q), log_g, floor=self.floor, signed=False, state=state, reset=reset
        )
        return self.out(y.flatten(-2)), state
