"""HGRN: Hierarchically Gated Recurrent Neural Network for Sequence Modeling (Qin, Yang and Zhong, 2023).

    c_t = SiLU(x_t W_cr + b_cr) + i SiLU(x_t W_ci + b_ci)
    gamma^k = Cumsum(Softmax(Gamma))_k, without the first layer's part
    mu_t = Sigmoid(x_t W_mu + b_mu)
    lambda_t = gamma^k + (1 - gamma^k) mu_t
    h_t = lambda_t exp(i theta) h_{t-1} + (1 - lambda_t) c_t             (2)
    g_t = Sigmoid(x_t W_g + b_g)
    o'_t = LayerNorm(g_t [Re(h_t), Im(h_t)])
    o_t = o'_t W_o + b_o                                                 (3)

HGRU is its token mixer. x is the input, c the candidate, h the hidden state, g the output gate, and o the
output. mu is the forget gate before its lower bound gamma^k in layer k. lambda is the magnitude and theta the
phase of the transition; 1 - lambda is the input gate. [Re(h_t), Im(h_t)] has the two parts of each channel
side by side, as they lie in memory; the paper's order is a permutation of the columns of W_g and W_o.
Equation 1, with independent forget and input gates and all real, is the paper's starting point.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from linrec.nn.activations import ACTIVATIONS
from linrec.nn.decays import LowerBoundKind, bound_of, make_lower_bounds, share_lower_bounds
from linrec.nn.gates import Gate, GateLinear, spread
from linrec.nn.mixer import Mixer, State
from linrec.nn.norms import Norm, gated, make_norm
from linrec.nn.parameters import mark
from linrec.nn.projections import projected
from linrec.nn.short_convolution import ShortConvolution
from linrec.ops.inspection import note
from linrec.ops.scan import scan
from linrec.rules import at_least, positive, require

__all__ = ["HGRU"]

ForgetGate = Literal["data", "bound", "none"]
OutputGate = Literal["sigmoid", "silu", "none"]
Phase = Literal["learned", "data", "none"]


class HGRU(Mixer):
    """h_t = lambda_t exp(i theta) h_{t-1} + (1 - lambda_t) c_t with lambda_t above a learned bound (eq. 2).

    The defaults are the paper's layer. The lower bounds gamma belong to the stack: a model lets its layers
    share one parameter, by `HGRU.share`. A layer that stands alone is a stack of one, whose bound is 0
    (random with "random"), unless it is given a number.

    | the paper's ablation | argument |
    |---|---|
    | without, random, decreasing lower bound (table 10) | `lower_bound=0.0`, "random", "decreasing" |
    | only lower bound (tables 8, 10) | `forget_gate="bound"`: lambda_t = gamma^k |
    | without forget gate (table 8) | `forget_gate="none"`: h_t = exp(i theta) h_{t-1} + (1 - lambda_t) c_t |
    | without input gate (table 9) | `input_gate=False`: c_t in place of (1 - lambda_t) c_t |
    | without output gate (table 9) | `output_gate="none"` |
    | without complex (table 11) | `phase="none"`: theta = 0; with `complex_input=False`, all is real |
    | data-dependent theta (table 11) | `phase="data"`: theta_t = x_t W_theta + b_theta |

    The paper has no formulas for the removed forget gate, the data-dependent theta, and bounds that do not
    increase; the table interprets its words. "Without complex" removes theta. `complex_input=False` removes
    Im(c) too, and halves the width of norm and gate.

    `refine` and `uniform_init` are the UR gates of Gu and others: mu_t refined by a gate of its own, and mu
    spread over time scales of 1 to d steps when training starts.

    The authors' released code is `output_gate="silu", gate_before_norm=False, phase_base=1e8`. The layer of
    flash-linear-attention is real and without biases: `output_gate="silu", gate_before_norm=False,
    output_norm="rms", phase="none", complex_input=False, bias=False`. It also has short convolutions and a
    wider state, `conv_size` and `d_state`.

    Args:
        d_model: width of the sequence.
        d_state: width d of the state. None is `d_model`.
        lower_bound: "increasing", "decreasing" or "random" over the layers (`linrec.nn.LowerBounds`), or a
            number in [0, 1), which is then the bound of every layer and is not learned.
        forget_gate: "data"; "bound", constant in time; or "none".
        input_gate: whether the input is multiplied by 1 - lambda_t.
        conv_size: taps of a causal convolution of each channel of c and mu, before SiLU and sigmoid; None
            disables it.
        conv_bias: whether the convolution has biases.
        output_gate: activation of g_t, "sigmoid" or "silu", or "none".
        gate_before_norm: LayerNorm(g_t [...]), eq. 3; False is g_t LayerNorm([...]).
        output_norm: "layer", "rms" or "none".
        norm_eps: of that norm.
        phase: "learned" constants per channel, "data", or "none".
        phase_base: theta_k = phase_base^(-k/d) for k = 0 .. d - 1 when training starts, in radians per step:
            RoPE over the 2d numbers of the state. 1e8 is RoPE's formula over d with k counted up to d.
        complex_input: whether c_t has an imaginary part.
        bias: whether the projections have biases. That of a data-dependent theta always has.
        refine: whether mu has a refine gate; see `linrec.nn.Gate`.
        uniform_init: whether mu starts uniformly spread; see `linrec.nn.Gate`.

    Raises:
        ValueError: an unknown name of a variant, a number out of range, neither forget nor input gate,
            `refine` or `uniform_init` without mu, or `uniform_init` without biases.

    Source:
        HGRN (Qin, Yang and Zhong, 2023), section 3.2, eq. 1 to 3, algorithm 1, tables 8 to 11; refine gate
        and uniform initialisation: Gu and others (2020).

    Example:
        >>> mixer = HGRU(64)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.shape, state.dtype
        (torch.Size([2, 10, 64]), torch.Size([2, 64]), torch.complex64)
    """

    recurrence = "scan"
    of_one_input = "c", "gate"

    def __init__(
        self,
        d_model: int,
        *,
        d_state: int | None = None,
        lower_bound: LowerBoundKind | float = "increasing",
        forget_gate: ForgetGate = "data",
        input_gate: bool = True,
        conv_size: int | None = None,
        conv_bias: bool = False,
        output_gate: OutputGate = "sigmoid",
        gate_before_norm: bool = True,
        output_norm: Norm = "layer",
        norm_eps: float = 1e-5,
        phase: Phase = "learned",
        phase_base: float = 10_000.0,
        complex_input: bool = True,
        bias: bool = True,
        refine: bool = False,
        uniform_init: bool = False,
    ) -> None:
        super().__init__(d_model)
        at_least(1, phase_base=phase_base, cure="RoPE's is 10000.")
        positive(norm_eps=norm_eps, cure="torch's is 1e-5.")
        at_least(1, d_state=d_state, or_none=True, cure="None is `d_model`.")
        require(
            forget_gate != "none" or input_gate,
            '`forget_gate="none"` needs `input_gate=True`; got False, which leaves the gates no use. '
            "Leave out one of the two.",
        )
        require(
            forget_gate != "bound" or not (refine or uniform_init),
            '`refine` and `uniform_init` are of mu, which `forget_gate="bound"` leaves out. '
            "Leave them out too, or keep the gate.",
        )
        require(bias or not uniform_init, "`uniform_init` is of the bias of mu, and needs `bias=True`.")
        self.d_state = n = d_model if d_state is None else d_state
        self.lower_bound = lower_bound
        self.forget_gate, self.input_gate = forget_gate, input_gate
        self.output_gate, self.gate_before_norm = output_gate, gate_before_norm

        self.complex_input = complex_input
        # real and imaginary part of each channel side by side, so that no part is ever copied
        self.c = nn.Linear(d_model, 2 * n if complex_input else n, bias=bias)
        self.layer = 0
        self.bounds = make_lower_bounds(lower_bound, n)
        self.mu: GateLinear | None = None
        self.r: GateLinear | None = None
        if forget_gate != "bound":
            self.mu = mark(GateLinear(d_model, n, bias=bias))
            if refine:
                self.r = mark(GateLinear(d_model, n, bias=bias))
            if uniform_init:
                spread(self.mu, self.r)
        self.theta: nn.Parameter | GateLinear | None = None
        start = phase_base ** (-torch.arange(n) / n)
        if phase == "learned":
            self.theta = nn.Parameter(start)
            mark(self, "theta", float32=True)
        elif phase == "data":
            self.theta = mark(GateLinear(d_model, n))
            with torch.no_grad():
                self.theta.bias.copy_(start)
        self.is_complex = complex_input or phase != "none"
        width = 2 * n if self.is_complex else n
        self.gate = None if output_gate == "none" else nn.Linear(d_model, width, bias=bias)
        self.norm = make_norm(output_norm, width, eps=norm_eps)
        self.out = nn.Linear(width, d_model, bias=bias)
        channels = self.c.out_features + (0 if self.mu is None else n)
        self.conv = ShortConvolution(channels, conv_size, bias=conv_bias)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return o, and h (b, d_state): complex, or real with `complex_input=False` and `phase="none"`.

        With a convolution, the state is its tail and h.
        """
        tail, h = self.conv.split(state)
        dtype = self.state_dtype
        c, g = projected(x, self.c, self.gate)
        parts = [c] if self.mu is None else [c, self.mu(x)]
        (c, *logits), tail = self.conv.side_by_side(parts, tail, reset=reset)
        # pairs of real numbers up to the scan: compilers fuse them, and leave complex ones alone
        c = functional.silu(c).to(dtype).unflatten(-1, (self.d_state, -1))

        lambda_ = gamma = bound_of(self, c[..., 0])
        if logits:
            mu, _ = Gate.of_logits(logits[0], None if self.r is None else self.r(x))
            lambda_ = gamma + (1 - gamma) * mu
        if self.input_gate:
            rest = 1 - lambda_
            c = rest[..., None] * c
            note(gate=rest)

        transition = torch.ones_like(gamma) if self.forget_gate == "none" else lambda_
        if self.theta is not None:
            theta = self.theta.to(dtype) if isinstance(self.theta, Tensor) else self.theta(x)
            note(phase=theta)
            turn = torch.stack([theta.cos(), theta.sin()], -1)
            transition = torch.view_as_complex(transition[..., None] * turn)
        c = torch.view_as_complex(c) if self.complex_input else c[..., 0]
        hidden, h = scan(transition, c, state=h, reset=reset)
        state = self.conv.joined(tail, h)

        o = (torch.view_as_real(hidden).flatten(-2) if self.is_complex else hidden).to(x.dtype)
        activation = ACTIVATIONS[self.output_gate]
        if self.gate_before_norm:
            return self.out(self.norm(gated(o, g, activation))), state
        return self.out(gated(self.norm(o), g, activation)), state

    @classmethod
    def share(cls, layers: "Sequence[HGRU]") -> None:
        """Share lower bounds over the stack; see `linrec.nn.decays.share_lower_bounds`."""
        share_lower_bounds(layers, like=layers[0].out.weight)
