"""HGRN: Hierarchically Gated Recurrent Neural Network for Sequence Modeling (Qin, Yang and Zhong, 2023).

    c_t = SiLU(x_t W_cr + b_cr) + i SiLU(x_t W_ci + b_ci)
    gamma^k = Cumsum(Softmax(Gamma))_k, without the first layer's part
    mu_t = Sigmoid(x_t W_mu + b_mu)
    lambda_t = gamma^k + (1 - gamma^k) mu_t
    h_t = lambda_t exp(i theta) h_{t-1} + (1 - lambda_t) c_t             (2)
    g_t = Sigmoid(x_t W_g + b_g)
    o'_t = LayerNorm(g_t [Re(h_t), Im(h_t)])
    o_t = o'_t W_o + b_o                                                 (3)

HGRU is its token mixer. x input, c candidate, mu forget gate before its lower bound gamma^k in layer k,
lambda magnitude and theta phase of the transition, 1 - lambda the input gate that is tied to it, h hidden
state, g output gate, o output. [Re(h_t), Im(h_t)] has the two parts of each channel side by side, as they lie
in memory; the paper's order is a permutation of the columns of W_g and W_o. Equation 1, forget and input
gates of their own and all real, is where the paper starts from.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from linrec.errors import unknown
from linrec.nn.gates import Gate, GateLinear, spread
from linrec.nn.lower_bounds import LowerBoundKind, make_lower_bounds, share_lower_bounds
from linrec.nn.mixer import Mixer, State, Transitions
from linrec.nn.norms import Norm, make_norm
from linrec.nn.parameters import mark
from linrec.ops.inspection import elementwise_mixing
from linrec.ops.scan import scan

__all__ = ["HGRU"]

ForgetGate = Literal["data", "bound", "none"]
OutputGate = Literal["sigmoid", "silu", "none"]
Phase = Literal["learned", "data", "none"]
_OUTPUT_GATES = {"sigmoid": functional.sigmoid, "silu": functional.silu}


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

    Where the paper gives words and no formula (the forget gate that is left out, the data-dependent theta,
    the bounds but the increasing ones), these are the readings taken here. "Without complex" is theta
    removed, to the letter; the second argument takes Im(c) away too, and halves the width of norm and gate.

    `refine` and `uniform_init` are the UR gates of Gu and others: mu_t refined by a gate of its own, and mu
    spread over time scales of 1 to d steps when training starts.

    The authors' released code is `output_gate="silu", gate_before_norm=False, phase_base=1e8`.

    Args:
        d_model: width d of the sequence and of the state.
        lower_bound: "increasing", "decreasing" or "random" over the layers (`linrec.nn.LowerBounds`), or a
            number in [0, 1), which is then the bound of every layer and is not learned.
        forget_gate: "data"; "bound", constant in time; or "none".
        input_gate: whether the input is multiplied by 1 - lambda_t.
        output_gate: activation of g_t, "sigmoid" or "silu", or "none".
        gate_before_norm: LayerNorm(g_t [...]), eq. 3; False is g_t LayerNorm([...]).
        output_norm: "layer", "rms" or "none".
        phase: "learned" constants per channel, "data", or "none".
        phase_base: theta_k = phase_base^(-k/d) for k = 0 .. d - 1 when training starts, in radians per step:
            RoPE over the 2d numbers of the state. 1e8 is RoPE's formula over d with k counted up to d.
        complex_input: whether c_t has an imaginary part.
        refine: whether mu has a refine gate; see `linrec.nn.Gate`.
        uniform_init: whether mu starts uniformly spread; see `linrec.nn.Gate`.

    Raises:
        ValueError: an unknown name of a variant, a `lower_bound` out of [0, 1), a `phase_base` below 1,
            neither forget nor input gate, or `refine` or `uniform_init` of mu where there is none.

    Source:
        HGRN (Qin, Yang and Zhong, 2023), section 3.2, eq. 1 to 3, algorithm 1, tables 8 to 11; refine gate
        and uniform initialisation: Gu and others (2020).

    Example:
        >>> import torch
        >>> mixer = HGRU(64)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.shape, state.dtype
        (torch.Size([2, 10, 64]), torch.Size([2, 64]), torch.complex64)
    """

    def __init__(
        self,
        d_model: int,
        *,
        lower_bound: LowerBoundKind | float = "increasing",
        forget_gate: ForgetGate = "data",
        input_gate: bool = True,
        output_gate: OutputGate = "sigmoid",
        gate_before_norm: bool = True,
        output_norm: Norm = "layer",
        phase: Phase = "learned",
        phase_base: float = 10_000.0,
        complex_input: bool = True,
        refine: bool = False,
        uniform_init: bool = False,
    ) -> None:
        super().__init__(d_model)
        if forget_gate not in ("data", "bound", "none"):
            raise unknown("`forget_gate`", forget_gate, ["data", "bound", "none"])
        if output_gate not in (*_OUTPUT_GATES, "none"):
            raise unknown("`output_gate`", output_gate, [*_OUTPUT_GATES, "none"])
        if phase not in ("learned", "data", "none"):
            raise unknown("`phase`", phase, ["learned", "data", "none"])
        if forget_gate == "none" and not input_gate:
            raise ValueError(
                '`forget_gate="none"` needs `input_gate=True`; got False, which leaves the gates no use. '
                "Leave out one of the two."
            )
        if forget_gate == "bound" and (refine or uniform_init):
            raise ValueError(
                '`refine` and `uniform_init` are of mu, which `forget_gate="bound"` leaves out. '
                "Leave them out too, or keep the gate."
            )
        if phase_base < 1:
            raise ValueError(f"`phase_base` must be at least 1; got {phase_base}. RoPE's is 10000.")
        self.lower_bound = lower_bound
        self.forget_gate, self.input_gate = forget_gate, input_gate
        self.output_gate, self.gate_before_norm = output_gate, gate_before_norm

        # real and imaginary part of each channel side by side, so that no part is ever copied
        self.complex_input = complex_input
        self.c = nn.Linear(d_model, 2 * d_model if complex_input else d_model)
        self.layer = 0
        self.bounds = make_lower_bounds(lower_bound, d_model)
        self.mu: GateLinear | None = None
        self.r: GateLinear | None = None
        if forget_gate != "bound":
            self.mu = mark(GateLinear(d_model, d_model), group="transition", weight_decay=False)
            if refine:
                self.r = mark(GateLinear(d_model, d_model), group="transition", weight_decay=False)
            if uniform_init:
                spread(self.mu, self.r)
        self.theta: nn.Parameter | GateLinear | None = None
        start = phase_base ** (-torch.arange(d_model) / d_model)
        if phase == "learned":
            self.theta = nn.Parameter(start)
            mark(self, "theta", group="transition", weight_decay=False)
            self.keep_float32("theta")
        elif phase == "data":
            self.theta = mark(GateLinear(d_model, d_model), group="transition", weight_decay=False)
            with torch.no_grad():
                self.theta.bias.copy_(start)
        self.is_complex = complex_input or phase != "none"
        width = 2 * d_model if self.is_complex else d_model
        self.gate = None if output_gate == "none" else nn.Linear(d_model, width)
        self.norm = make_norm(output_norm, width)
        self.out = nn.Linear(width, d_model)

    def forward(
        self,
        x: Float[Tensor, "b t d_model"],
        state: State = None,
        *,
        reset: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b t d_model"], Tensor]:
        """Mix `x` over time; see `Mixer.forward`. The state is h, (b, d_model)."""
        self.check_input(x, reset, state)
        magnitude = self._lambda(x)
        c = functional.silu(self.c(x)).to(magnitude.dtype)
        # pairs of real numbers up to the scan: compilers fuse them, and leave complex ones alone
        c = c.unflatten(-1, (self.d_model, -1))
        if self.input_gate:
            c = (1 - magnitude)[..., None] * c
        c = torch.view_as_complex(c) if self.complex_input else c[..., 0]
        transition, theta = self._forget(magnitude), self._theta(x)
        if theta is not None:
            turn = torch.stack([theta.cos(), theta.sin()], -1)
            transition = torch.view_as_complex(transition[..., None] * turn)
        h, state = scan(transition, c, state=state, reset=reset)
        o = (torch.view_as_real(h).flatten(-2) if self.is_complex else h).to(x.dtype)
        if self.gate is None:
            return self.out(self.norm(o)), state
        g = _OUTPUT_GATES[self.output_gate](self.gate(x))
        return self.out(self.norm(g * o) if self.gate_before_norm else g * self.norm(o)), state

    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> Tensor:
        """Zeros (batch, d_model): complex, or real with `complex_input=False` and `phase="none"`."""
        dtype = self._state_dtype()
        device = self.out.weight.device if device is None else device
        return torch.zeros(
            batch, self.d_model, dtype=dtype.to_complex() if self.is_complex else dtype, device=device
        )

    @property
    def state_size(self) -> int:
        """Elements of h: d_model, counting a complex number once."""
        return self.d_model

    def transitions(self, x: Float[Tensor, "b t d_model"]) -> Transitions:
        """lambda_t and theta of eq. 2; see `Mixer.transitions`."""
        return Transitions(self._forget(self._lambda(x)), self._theta(x))

    def token_mixing(
        self, x: Float[Tensor, "b t d_model"], *, reset: Bool[Tensor, "b t"] | None = None
    ) -> Float[Tensor, "b t t"]:
        """Mean over channels of the matrix Lambda that c is multiplied by (eq. 7)."""
        magnitude = self._lambda(x)
        gate = 1 - magnitude if self.input_gate else torch.ones_like(magnitude)
        return elementwise_mixing(self._forget(magnitude), gate, x, reset)

    @classmethod
    def share(cls, layers: "Sequence[HGRU]") -> None:
        """Share lower bounds over the stack; see `linrec.nn.lower_bounds.share_lower_bounds`."""
        share_lower_bounds(layers, like=layers[0].out.weight)

    def _lambda(self, x: Tensor) -> Tensor:
        """lambda_t, also where it is the input gate's alone; one per channel where it is the bound."""
        gamma = self._gamma()
        if self.mu is None:
            return gamma
        mu, _ = Gate.of_logits(self.mu(x), None if self.r is None else self.r(x))
        return gamma + (1 - gamma) * mu

    def _forget(self, magnitude: Tensor) -> Tensor:
        return magnitude.new_ones(self.d_model) if self.forget_gate == "none" else magnitude

    def _theta(self, x: Tensor) -> Tensor | None:
        if isinstance(self.theta, GateLinear):
            return self.theta(x)
        return None if self.theta is None else self.theta.to(self._state_dtype())

    def _gamma(self) -> Tensor:
        if self.bounds is not None:
            return self.bounds(self.layer)
        # the same for every channel, but as wide as theirs, since it may be all there is of the transition
        shape, device = (self.d_model,), self.out.weight.device
        return torch.full(shape, float(self.lower_bound), dtype=self._state_dtype(), device=device)
