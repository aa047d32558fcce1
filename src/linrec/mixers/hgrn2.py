"""HGRN2: Gated Linear RNNs with State Expansion (Qin and others, 2024).

    mu_t = Sigmoid(x_t W_g + b_g)
    g_t = beta^k + (1 - beta^k) * mu_t
    i_t = SiLU(x_t W_i + b_i)
    o_t = Sigmoid(x_t W_o + b_o)
    h_t = Diag(g_t) h_{t-1} + (1 - g_t) i_t^T
    y_t = LayerNorm(h_t^T o_t) W_out + b_out

x is the input, t time, and y the output. g is the forget gate, whose lower bound in layer k is beta^k, the
gamma^k of HGRN; i is the input, o the output gate, and h the hidden state of a head. Seen as linear
attention, o is the query, 1 - g the key and i the value. Norm and projection at the end are HGRN's, over all
heads together.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from linrec.nn.activations import ACTIVATIONS
from linrec.nn.decays import LowerBoundKind, bound_of, make_lower_bounds, share_lower_bounds
from linrec.nn.gates import GateLinear
from linrec.nn.head_sizes import kv_groups, repeat_heads, split_width
from linrec.nn.mixer import Mixer, State
from linrec.nn.norms import Norm, make_norm
from linrec.nn.parameters import mark
from linrec.nn.short_convolution import ShortConvolution
from linrec.ops.gate_loop import gate_loop
from linrec.rules import positive

__all__ = ["HGRN2", "log_bounded"]

InputActivation = Literal["silu", "none"]
OutputGate = Literal["sigmoid", "silu", "relu", "elu", "none"]

# the expansion ratio of the paper's language models
CHANNELS_PER_HEAD = 128


class HGRN2(Mixer):
    """h_t = Diag(g_t) h_{t-1} + (1 - g_t) i_t^T with g_t above a learned bound: HGRN with outer products.

    The state of a head is d x d for d channels, with no more parameters than HGRN's real layer. The lower
    bounds beta belong to the stack, as in `linrec.mixers.hgru.HGRU`: a model lets its layers share one
    parameter, by `HGRN2.share`. A layer that stands alone is a stack of one, whose bound is 0 (random with
    "random"), unless it is given a number.

    | the paper's ablation | argument |
    |---|---|
    | expansion ratio n | `n_heads` = `d_model` / n |
    | without expansion | `n_heads` = `d_model` |
    | without lower bound | `lower_bound=0.0` |

    The authors' released language models are `input_activation="none", output_gate="silu", bias=False,
    output_norm="rms"`. flash-linear-attention's layer also has short convolutions, `conv_size`. In linear
    attention's terms, `output_gate` is the feature map of the queries, and `kv_heads` groups the heads. When
    training starts, all projections are as torch's Linear draws them.

    Args:
        d_model: width of the sequence, and of o over all heads.
        n_heads: heads. None is the largest number that divides `d_model` and leaves at least 128 channels to
            each head, or 1.
        kv_heads: heads of g and i, each shared by `n_heads` / `kv_heads` neighbouring heads of o. None is
            `n_heads`.
        lower_bound: "increasing", "decreasing" or "random" over the layers (`linrec.nn.LowerBounds`), or a
            number in [0, 1), which is then the bound of every layer and is not learned.
        input_activation: of i_t, "silu" or "none".
        output_gate: activation of o_t, "sigmoid", "silu", "relu", "elu" (elu(x) + 1) or "none".
        conv_size: taps of a causal convolution of each channel before the activations; None disables it.
        conv_bias: whether the convolution has biases.
        output_norm: over all channels, "layer", "rms" or "none".
        norm_eps: of that norm. flash-linear-attention divides o by sqrt(d), which the norm undoes but for its
            eps: an eps there is eps d here.
        bias: whether the projections have biases.

    Raises:
        ValueError: an `n_heads` that does not divide `d_model`, `kv_heads` that do not divide `n_heads`, an
            unknown name of a variant, or a number out of range.

    Source:
        HGRN2 (Qin and others, 2024), its state expansion by outer products; HGRN (Qin, Yang and Zhong, 2023),
        section 3.2, for the lower bounds and the output.

    Example:
        >>> mixer = HGRN2(64, n_heads=4)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.shape, state.dtype
        (torch.Size([2, 10, 64]), torch.Size([2, 4, 16, 16]), torch.float32)
    """

    recurrence = "gate_loop"

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int | None = None,
        kv_heads: int | None = None,
        lower_bound: LowerBoundKind | float = "increasing",
        input_activation: InputActivation = "silu",
        output_gate: OutputGate = "sigmoid",
        conv_size: int | None = None,
        conv_bias: bool = False,
        output_norm: Norm = "layer",
        norm_eps: float = 1e-5,
        bias: bool = True,
    ) -> None:
        super().__init__(d_model)
        positive(norm_eps=norm_eps, cure="torch's is 1e-5.")
        self.n_heads, self.d_head = split_width("d_model", d_model, n_heads, least=CHANNELS_PER_HEAD)
        self.kv_heads = kv_groups(self.n_heads, kv_heads)
        self.input_activation, self.output_gate = input_activation, output_gate
        d_kv = self.kv_heads * self.d_head

        self.lower_bound = lower_bound
        self.layer = 0
        self.bounds = make_lower_bounds(lower_bound, d_kv)
        self.g = mark(GateLinear(d_model, d_kv, bias=bias))
        self.i = nn.Linear(d_model, d_kv, bias=bias)
        self.o = nn.Linear(d_model, d_model, bias=bias)
        self.conv = ShortConvolution(d_model + 2 * d_kv, conv_size, bias=conv_bias)
        self.norm = make_norm(output_norm, d_model, eps=norm_eps)
        self.out = nn.Linear(d_model, d_model, bias=bias)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return y, and h (b, h, d, d); with a convolution, its tail and h."""
        tail, h = self.conv.split(state)
        z, i, o = self.g(x), self.i(x), self.o(x)
        (o, z, i), tail = self.conv.side_by_side((o, z, i), tail, reset=reset)
        log_g, rest = log_bounded(z, bound_of(self, z))
        i, o = ACTIVATIONS[self.input_activation](i), ACTIVATIONS[self.output_gate](o)
        if self.output_gate == "elu":
            o = o + 1
        o, log_g, rest, i = (part.unflatten(-1, (-1, self.d_head)) for part in (o, log_g, rest, i))
        log_g, rest, i = (repeat_heads(part, self.n_heads) for part in (log_g, rest, i))
        y, h = gate_loop(o, rest.to(i.dtype), i, log_g, state=h, reset=reset)
        return self.out(self.norm(y.flatten(-2))), self.conv.joined(tail, h)

    @classmethod
    def share(cls, layers: "Sequence[HGRN2]") -> None:
        """Share lower bounds over the stack; see `linrec.nn.decays.share_lower_bounds`."""
        share_lower_bounds(layers, like=layers[0].out.weight)


def log_bounded(
    mu: Float[Tensor, "*batch d"], bound: Float[Tensor, "d"]
) -> tuple[Float[Tensor, "*batch d"], Float[Tensor, "*batch d"]]:
    """Return log g and 1 - g of the gate g = bound + (1 - bound) sigmoid(mu), without rounding g."""
    # a bound of zero has no logarithm, and the smallest number forgets as completely
    floor = torch.log(bound.clamp(min=torch.finfo(bound.dtype).tiny))
    log_g = torch.logaddexp(floor, torch.log1p(-bound) + functional.logsigmoid(mu))
    # rounding alone makes log g positive
    return log_g.clamp(max=0), (1 - bound) * torch.sigmoid(-mu)
