"""RWKV-7 "Goose" with Expressive Dynamic State Evolution (Peng and others, 2025).

    x_z = x_t + (x_{t-1} - x_t) * mu_z,    z = r, w, k, v, a, g
    r_t = W_r x_r,    k_t = W_k x_k,    v'_t = W_v x_v,    g_t = lora_g(x_g)
    w_t = exp(-e^{-1/2} sigmoid(lora_w(x_w)))
    a_t = sigmoid(lora_a(x_a))
    kappa_t = k_t * xi / |k_t * xi|
    k~_t = k_t * (1 + (a_t - 1) * alpha)
    v_t = v'_t + (v'_t of the first layer - v'_t) * sigmoid(lora_v(x_v)), in all layers but the first
    S_t = (diag(w_t) - (a_t * kappa_t) kappa_t^T) S_{t-1} + k~_t v_t^T
    u_t = LayerNorm(S_t^T r_t) + (r_t . (rho * k~_t)) v_t
    o_t = W_o (g_t * u_t)

x is the input, t time, o the output, and * the product of channels. r is the receptance, w the decay of a key
channel, k the key, v the value, a the in-context learning rate, g the gate, kappa the removal key of norm 1,
S the state of a head, and u its output; mu, xi, alpha and rho are learned. lora(x) = lambda + f(x A) B, where
A B has low rank, with f = tanh in lora_w, a sigmoid in lora_g, which has no lambda, and none in the others.
"""

import math
from collections.abc import Sequence
from typing import cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.functional import normalize

from linrec.nn.gates import GateLinear
from linrec.nn.head_sizes import split_width
from linrec.nn.mixer import Mixer, State, Values
from linrec.nn.norms import HeadNorm
from linrec.nn.parameters import mark
from linrec.nn.projections import drawn_linear
from linrec.nn.token_shift import Place, TokenShift, ramp
from linrec.ops.generalized_delta_rule import generalized_delta_rule
from linrec.rules import at_least, positive

__all__ = ["RWKV7"]

# of the paper's models
CHANNELS_PER_HEAD = 64
# of the released code, for outputs that are not divided by sqrt(64)
EPS = 64e-5
# powers of i/d in the shares of the last token when training starts, in the order of the mixtures
POWERS = {"r": 0.2, "w": 0.9, "k": 0.7, "v": 0.7, "a": 0.9, "g": 0.2}
# ranks are these numbers times sqrt(d_model), rounded to multiples of 32
RANKS = {"w": 2.5, "a": 2.5, "v": 1.7, "g": 5.0}


class RWKV7(Mixer):
    """S_t = (diag(w_t) - (a_t * kappa_t) kappa_t^T) S_{t-1} + k~_t v_t^T: Goose.

    The defaults are the paper's layer. Its channel mixing is `RWKVChannelMixing` without receptance,
    "rwkv7" in a model. In a model, the layers after the first read the values of the first layer; a layer
    that stands alone is the first of one, and has no lora_v.

    When training starts, for channel i of d, channel j of a head of N, and layer l of L, as in the released
    code, with p = 1 - l/L and z = (2j/(N - 1) - 1) |2j/(N - 1) - 1|:

        mu_r = mu_g = 1 - (i/d)^(0.2 p)    mu_k = mu_v = 1 - (i/d)^(0.7 p)    mu_w = mu_a = 1 - (i/d)^(0.9 p)
        lambda_w = -5.5 + 6 (i/(d - 1))^(1 + (l/(L - 1))^0.3) + 2.5 z
        lambda_a = -0.19 + 0.3 z + 0.4 (i/(d - 1) - 1/2)    lambda_v = 0.73 - 0.4 (i/(d - 1) - 1/2)
        xi = 0.71 - 0.1 (i/(d - 1) - 1/2)    alpha = 1.02    rho = -0.04

    All A are zero and all B orthogonal with gain 0.1. W_r and W_v are uniform in +- 0.5 / sqrt(d), W_k in a
    tenth of that, and W_o is zero, so that every output is zero at first. The norm's weights are
    ((l + 1)/L)^0.7. lora_w is marked as group "transition" without weight decay, and all vectors and the
    other A and B have no weight decay. The released code trains lambda_w with twice the learning rate.

    Args:
        d_model: width of the sequence, and of all vectors over the heads.
        n_heads: heads. None is the largest number that divides `d_model` and leaves at least 64 channels to
            each head, or 1.
        decay_rank: of A_w B_w. This and the other ranks are multiples of sqrt(d_model) by default, 2.5 here,
            rounded to a multiple of 32, and at least 32.
        rate_rank: of A_a B_a; None is as for `decay_rank`.
        value_rank: of A_v B_v; None is 1.7 sqrt(d_model), rounded.
        gate_rank: of A_g B_g; None is 5 sqrt(d_model), rounded.
        norm_eps: of the norm.
        zero_init: whether W_o starts at zero; else it is uniform, as W_v.

    Raises:
        ValueError: an `n_heads` that does not divide `d_model`, a rank below 1, or a `norm_eps` that is not
            positive; a later layer of a model that does not pass on values.

    Source:
        Peng and others (2025), section 4; the initialisation comes from the authors' RWKV-LM.

    Example:
        >>> mixer = RWKV7(64, n_heads=4)
        >>> y, (last, S) = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, last.shape, S.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 64]), torch.Size([2, 4, 16, 16]))
    """

    recurrence = "generalized_delta_rule"
    takes_values = True

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int | None = None,
        decay_rank: int | None = None,
        rate_rank: int | None = None,
        value_rank: int | None = None,
        gate_rank: int | None = None,
        norm_eps: float = EPS,
        zero_init: bool = True,
    ) -> None:
        super().__init__(d_model)
        ranks = {"w": decay_rank, "a": rate_rank, "v": value_rank, "g": gate_rank}
        at_least(1, decay_rank=decay_rank, rate_rank=rate_rank, or_none=True)
        at_least(1, value_rank=value_rank, gate_rank=gate_rank, or_none=True)
        positive(norm_eps=norm_eps, cure="The released code's is 64e-5.")
        self.n_heads, self.d_head = split_width("d_model", d_model, n_heads, least=CHANNELS_PER_HEAD)
        self.ranks = {name: _rank(d_model, RANKS[name]) if r is None else r for name, r in ranks.items()}
        self.shift = TokenShift(d_model, len(POWERS))
        bound = 0.5 / math.sqrt(d_model)
        self.r, self.v, self.k, self.out = (
            drawn_linear(d_model, d_model, nn.init.uniform_, a=-size, b=size)
            for size in (bound, bound, 0.1 * bound, 0.0 if zero_init else bound)
        )
        self.w = mark(self._lora("w", nn.Tanh(), GateLinear), group="transition", weight_decay=False)
        self.a = mark(self._lora("a", nn.Identity()), group="default", weight_decay=False)
        self.gate = mark(self._lora("g", nn.Sigmoid(), bias=False), group="default", weight_decay=False)
        self.residual: nn.Sequential | None = None
        self.xi, self.alpha, self.rho = (nn.Parameter(torch.empty(d_model)) for _ in range(3))
        self.norm = HeadNorm(self.n_heads, self.d_head, eps=norm_eps, bias=True)
        self.share([self])

    def mix(
        self, x: Tensor, state: State, reset: Tensor | None, values: Values | None = None
    ) -> tuple[Tensor, State]:
        """Return y, and the last input (b, d_model) with S (b, h, d, d); with `values`, those too."""
        heads = self.n_heads, self.d_head
        last, S = self.shift.split(state)
        mixed, last = self.shift(x, last, reset=reset)
        z = dict(zip(POWERS, mixed, strict=True))
        r, k, v, g = self.r(z["r"]), self.k(z["k"]), self.v(z["v"]), self.gate(z["g"])
        log_w = -math.exp(-0.5) * torch.sigmoid(self.w(z["w"]))
        a = torch.sigmoid(self.a(z["a"]))
        kappa = normalize((k * self.xi).unflatten(-1, heads), dim=-1)
        k = k * (1 + (a - 1) * self.alpha)
        first = values or (v,)
        if self.residual is not None:
            if not values:
                raise ValueError(
                    "`values` of the first layer must reach each RWKV7 of a stack; got None. Run the layers "
                    "in a `LanguageModel` or `SequenceClassifier` that is neither pooled nor reversible."
                )
            v = v + (first[0] - v) * torch.sigmoid(self.residual(z["v"]))
        a, log_w = a.unflatten(-1, heads), log_w.unflatten(-1, heads)
        r, k, v = (part.to(r.dtype).unflatten(-1, heads) for part in (r, k, v))
        o, S = generalized_delta_rule(
            r, k, v, kappa.to(r.dtype), (a * kappa).to(r.dtype), log_w, state=S, reset=reset
        )
        bonus = (r * k * self.rho.unflatten(-1, heads)).sum(-1, keepdim=True)
        u = (self.norm(o) + bonus * v).flatten(-2).to(x.dtype)
        y, state = self.out(g * u), self.shift.joined(last, S)
        return y, state if values is None else (state, first)

    def forward(
        self,
        x: Float[Tensor, "b t d_model"],
        state: State = None,
        *,
        reset: Bool[Tensor, "b t"] | None = None,
        dt: Float[Tensor, "b t"] | None = None,
        values: Values | None = None,
    ) -> tuple[Float[Tensor, "b t d_model"], State]:
        """Return y and the state, as every mixer; with `values`, (state, values of the first layer)."""
        return self.checked(x, state, reset, dt, **({} if values is None else {"values": values}))

    def _lora(
        self, name: str, f: nn.Module, kind: type[nn.Linear] = nn.Linear, *, bias: bool = True
    ) -> nn.Sequential:
        rank = self.ranks[name]
        A, B = kind(self.d_model, rank, bias=False), kind(rank, self.d_model, bias=bias)
        nn.init.zeros_(A.weight)
        nn.init.orthogonal_(B.weight, gain=0.1 * max(1.0, math.sqrt(rank / self.d_model)))
        return nn.Sequential(A, f, B)

    @classmethod
    def share(cls, layers: "Sequence[RWKV7]") -> None:
        """Give lora_v to all layers but the first, and start each layer from its place in the stack."""
        for layer, mixer in enumerate(layers):
            if layer:
                lora = mixer._lora("v", nn.Identity()).to(mixer.xi)
                mixer.residual = mark(lora, group="default", weight_decay=False)
            mixer._begin(Place(layer, len(layers)))

    @torch.no_grad()
    def _begin(self, place: Place) -> None:
        """Set the initial values of vectors."""
        d = self.d_model
        along = torch.arange(d) / max(d - 1, 1)
        within = 2 * (torch.arange(d) % self.d_head) / max(self.d_head - 1, 1) - 1
        zigzag, linear = within * within.abs(), along - 0.5
        self.shift.start([1 - ramp(d, power * place.height) for power in POWERS.values()])
        starts = [(self.w, -5.5 + 6 * along ** (1 + place.depth**0.3) + 2.5 * zigzag)]
        starts.append((self.a, -0.19 + 0.3 * zigzag + 0.4 * linear))
        if self.residual is not None:
            starts.append((self.residual, 0.73 - 0.4 * linear))
        for lora, start in starts:
            cast(nn.Linear, lora[2]).bias.copy_(start)
        self.xi.copy_(0.71 - 0.1 * linear)
        self.alpha.fill_(1.02)
        self.rho.fill_(-0.04)
        self.norm.weight.fill_(((place.layer + 1) / place.n_layers) ** 0.7)


def _rank(d_model: int, factor: float) -> int:
    """Return the rank for a width: a multiple of 32."""
    return max(32, 32 * round(factor * math.sqrt(d_model) / 32))
