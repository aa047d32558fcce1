"""State transitions a = |a| exp(i arg a), and gates in (0, 1): activations and their initialisation."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from linrec.nn.parameters import Float32Module, mark
from linrec.nn.projections import readable
from linrec.nn.row_linear import row_linear
from linrec.ops.core.precision import without_autocast
from linrec.rules import at_least, choice, require, span

__all__ = [
    "Gate",
    "GateLinear",
    "MagnitudeActivation",
    "PhaseActivation",
    "Transition",
    "TransitionKind",
    "gate_projected",
    "log_refined",
    "positive",
    "spread",
    "stable_exponential",
    "start_of_gates",
]

MagnitudeActivation = Literal["sigmoid", "stable_exp"]
PhaseActivation = Literal["identity", "tanh", "none"]
TransitionKind = Literal["data", "fixed"]


class _Activation(NamedTuple):
    forward: Callable[[Tensor], Tensor]
    inverse: Callable[[Tensor], Tensor]


# exp(-exp(7)) is zero in double precision too, so the bound changes no transition; without it, exp overflows
# for large gamma and the gradient is inf * 0
_LARGEST_EXPONENT = 7.0


def stable_exponential(gamma: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """log |a| = -exp(gamma): |a| = exp(-exp(gamma)) is in (0, 1) whatever gamma is.

    Args:
        gamma: any shape; above 7, where |a| is zero in every precision, its gradient is zero.

    Returns:
        log |a| < 0, of gamma's shape.

    Source:
        LRU (Orvieto et al., 2023), section 3.3.
    """
    return -torch.exp(gamma.clamp(max=_LARGEST_EXPONENT))


# forward gives log |a|, which the operators take; inverse takes |a|
_MAGNITUDES = {
    "sigmoid": _Activation(functional.logsigmoid, torch.logit),
    "stable_exp": _Activation(stable_exponential, lambda magnitude: torch.log(-torch.log(magnitude))),
}
_PHASES = {
    "identity": _Activation(lambda theta: theta, lambda phase: phase),
    "tanh": _Activation(
        lambda theta: math.pi * torch.tanh(theta), lambda phase: torch.atanh(phase / math.pi)
    ),
}


class GateLinear(Float32Module, nn.Linear):
    """y = W x + b in float32 (float64 for float64 weights), under autocast too.

    A transition acts once per step, and so does its rounding error. bfloat16 has 8 significant bits: a phase
    of 1 rad is off by up to 0.004 rad, and a thousand steps add these errors up to half a turn. Near
    |a| = 1, the error of the logit is the relative error of the time scale. The projection is a small part
    of a layer's work, so it is always computed in float32. In a module in half precision, b stays in float32.

    Example:
        >>> import torch
        >>> with torch.autocast("cpu", dtype=torch.bfloat16):
        ...     GateLinear(2, 2)(torch.ones(1, 2, dtype=torch.bfloat16)).dtype
        torch.float32
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias)
        self.keep_float32("bias")

    def forward(self, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch d_out"]:
        """Apply the projection to `x` (..., d_in)."""
        return _exact(x, self)[0]

    if TYPE_CHECKING:
        __call__ = forward


def gate_projected(x: Float[Tensor, "*batch d_in"], *gates: GateLinear) -> tuple[Tensor, ...]:
    """Return the outputs of gates for the same input, as one product if all are plain gates.

    Either all gates have a bias, or none has.
    """
    return _exact(x, *gates) if readable(GateLinear, *gates) else tuple(gate(x) for gate in gates)


def _exact(x: Tensor, *gates: GateLinear) -> tuple[Tensor, ...]:
    """Return the outputs of gates in float32 or better, of their tensors."""
    dtype = torch.promote_types(gates[0].weight.dtype, torch.float32)

    def joined(parts: Sequence[Tensor]) -> Tensor:
        return (torch.cat([*parts]) if len(parts) > 1 else parts[0]).to(dtype)

    with without_autocast(x.device.type):
        biases = [gate.bias for gate in gates if gate.bias is not None]
        bias = joined(biases) if biases else None
        y = row_linear(x.to(dtype), joined([gate.weight for gate in gates]), bias)
    return y.split([gate.out_features for gate in gates], -1) if len(gates) > 1 else (y,)


def log_refined(
    f: Float[Tensor, "*shape"], r: Float[Tensor, "*shape"]
) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
    """Return log g and log(1 - g) of the refined gate g = r (1 - (1 - f)^2) + (1 - r) f^2.

    r moves the gate between f^2 and 1 - (1 - f)^2, so that g comes near to 0 and 1 where the gradient of f is
    not yet lost. Written as g = f (r (2 - f) + (1 - r) f) and 1 - g = (1 - f) (r (1 - f) + (1 - r) (1 + f)),
    nothing is subtracted, and neither loses digits.

    Args:
        f: logit of f, the gate to refine.
        r: logit of r, the refine gate.

    Source:
        Gu, Gulcehre, Paine, Hoffman and Pascanu, Improving the Gating Mechanism of Recurrent Neural Networks
        (2020), the refine gate.
    """
    log_f, log_not_f = functional.logsigmoid(f), functional.logsigmoid(-f)
    log_r, log_not_r = functional.logsigmoid(r), functional.logsigmoid(-r)
    up = torch.logaddexp(log_r + torch.log1p(torch.sigmoid(-f)), log_not_r + log_f)
    down = torch.logaddexp(log_r + log_not_f, log_not_r + torch.log1p(torch.sigmoid(f)))
    return log_f + up, log_not_f + down


def positive(u: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """g(u) = u + 1/2 where u >= 0, sigmoid(u) elsewhere: above zero, continuous, linear upwards.

    Source:
        Feng and others, Were RNNs All We Needed? (2024), candidates in log space.
    """
    return torch.where(u >= 0, u + 0.5, torch.sigmoid(u))


def start_of_gates(
    width: int, *, chrono: int | None = None, uniform_init: bool = False
) -> Float[Tensor, "width"] | None:
    """Return the logits at which `width` gates that keep a memory start, or None to leave them as they are.

    Args:
        width: gates d.
        chrono: T, for log(u) with u uniform in [1, T - 1]: memories last 1 + u steps (Tallec and Ollivier,
            Can Recurrent Neural Networks Warp Time?, 2018).
        uniform_init: for logit(u) with u uniform in [1/d, 1 - 1/d]; see `Gate`.
    """
    at_least(2, chrono=chrono, or_none=True, cure="It is the longest time that memories last, in steps.")
    require(
        chrono is None or not uniform_init,
        f"`chrono` must be None beside `uniform_init=True`; got {chrono}. Both say how the gate starts.",
    )
    if chrono is not None:
        return torch.empty(width).uniform_(1, chrono - 1).log()
    # of a single gate, one half
    least = 1 / max(width, 2)
    return torch.empty(width).uniform_(least, 1 - least).logit() if uniform_init else None


def spread(f: GateLinear, r: GateLinear | None) -> None:
    """Start the d gates of `f` uniformly in [1/d, 1 - 1/d] at x = 0, refined by `r` or not: see `Gate`."""
    start = start_of_gates(len(f.bias), uniform_init=True)
    assert start is not None
    with torch.no_grad():
        f.bias.copy_(start)
        if r is not None:
            r.bias.copy_(-start)


class Gate(nn.Module):
    """g = sigmoid(W_f x + b_f), or refined by r = sigmoid(W_r x + b_r): g = r (1 - (1 - f)^2) + (1 - r) f^2.

    | the paper's gates | argument |
    |---|---|
    | none: biases as torch's Linear draws them | the defaults |
    | U, uniform initialisation | `uniform_init=True`: b_f = logit(u), u uniform in [1/d, 1 - 1/d] |
    | R, refine gate | `refine=True` |
    | UR, both | both; then b_r = -b_f |

    With U, the time scales 1 / (1 - g) of the d channels start spread over 1 to d steps. Every parameter is
    marked as group "transition" without weight decay.

    Args:
        d_in: width of the input.
        d_out: gates d.
        refine: whether there is a refine gate.
        uniform_init: whether gates start uniformly spread.

    Source:
        Gu, Gulcehre, Paine, Hoffman and Pascanu, Improving the Gating Mechanism of Recurrent Neural Networks
        (2020), refine gate and uniform gate initialisation.

    Example:
        >>> import torch
        >>> g, rest = Gate(8, 4, refine=True, uniform_init=True)(torch.zeros(2, 5, 8))
        >>> g.shape, bool(torch.allclose(g + rest, torch.ones(2, 5, 4)))
        (torch.Size([2, 5, 4]), True)
    """

    def __init__(self, d_in: int, d_out: int, *, refine: bool = False, uniform_init: bool = False) -> None:
        super().__init__()
        self.f = GateLinear(d_in, d_out)
        self.r = GateLinear(d_in, d_out) if refine else None
        if uniform_init:
            spread(self.f, self.r)
        mark(self)

    def forward(
        self, x: Float[Tensor, "*batch d_in"]
    ) -> tuple[Float[Tensor, "*batch d_out"], Float[Tensor, "*batch d_out"]]:
        """Return g and 1 - g for `x` (..., d_in), in float32 (float64 for float64 weights)."""
        return self.of_logits(*self.logits(x))

    if TYPE_CHECKING:
        __call__ = forward

    def logits(
        self, x: Float[Tensor, "*batch d_in"]
    ) -> tuple[Float[Tensor, "*batch d_out"], Float[Tensor, "*batch d_out"] | None]:
        """Return the logits of f and r; the second is None without refine gate."""
        return self.f(x), None if self.r is None else self.r(x)

    @staticmethod
    def of_logits(
        f: Float[Tensor, "*shape"], r: Float[Tensor, "*shape"] | None
    ) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
        """Return g and 1 - g of logits, for gates of more inputs than one; r is None without refine gate."""
        if r is None:
            return torch.sigmoid(f), torch.sigmoid(-f)
        log_g, log_rest = log_refined(f, r)
        return log_g.exp(), log_rest.exp()

    def log(self, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch d_out"]:
        """Return log g for `x` (..., d_in)."""
        f = self.f(x)
        return functional.logsigmoid(f) if self.r is None else log_refined(f, self.r(x))[0]


class _Constant(Float32Module):
    """GateLinear without its weight: y = b, whatever x is. Drawn as a Linear's bias is."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        bound = 1 / math.sqrt(d_in)
        self.bias = nn.Parameter(torch.empty(d_out).uniform_(-bound, bound))
        self.keep_float32("bias")

    def forward(self, x: Tensor) -> Tensor:
        return self.bias.to(torch.promote_types(self.bias.dtype, torch.float32))


class Transition(nn.Module):
    """a_n = f(Linear_gamma(x_n)) exp(i g(Linear_theta(x_n)))   (eq. 25), as log |a_n| and arg a_n.

    Magnitude and phase come from two separate real projections of the input:

        gamma_n = Linear_gamma(x_n)        log_decay_n = log f(gamma_n)
        theta_n = Linear_theta(x_n)        phase_n     = g(theta_n)

    | `magnitude_activation` | f(gamma)          | log_decay           |
    |------------------------|-------------------|---------------------|
    | "sigmoid"              | sigmoid(gamma)    | logsigmoid(gamma)   |
    | "stable_exp" (LRU)     | exp(-exp(gamma))  | -exp(gamma)         |

    Both reach all of (0, 1). The sigmoid is of the real projection itself; public ports that take the
    sigmoid of an absolute value cannot forget faster than one half per step.

    | `phase_activation` | g(theta)        | phases reached      |
    |--------------------|-----------------|---------------------|
    | "identity"         | theta           | all                 |
    | "tanh"             | pi tanh(theta)  | (-pi, pi), each once|
    | "none"             |                 | 0: a real transition|

    The paper names no phase activation but the identity, and mentions restricting the phase to an interval.
    The interval (-pi, pi) holds every phase once, hence the factor pi.

    Every parameter is marked as group "transition" without weight decay (C.2).

    Args:
        d_model: width of the input.
        n_heads: heads h.
        d_head: key channels per head dk; there is one transition per key channel.
        magnitude_activation: f, "sigmoid" or "stable_exp".
        phase_activation: g, "identity", "tanh" or "none".
        transition: "data" for projections of the input; "fixed" for the same layer with learned
            constants, that is, with the two biases alone.
        magnitude_init: (low, high), the range of |a| at x = 0 when training starts. The time scale
            1 / (1 - |a|) is drawn log-uniformly between 1 / (1 - low) and 1 / (1 - high), per channel.
            None leaves the biases as torch's Linear draws them: |a| is then near f(0).
        phase_init: the largest phase at x = 0 when training starts, in radians, in (0, pi]. A phase is drawn
            in each of n equal parts of [0, phase_init], for the n channels in random order. So phases are
            evenly spread, and differ from layer to layer. Positive phases suffice: with real weights, the
            real part of the output does not depend on the sign of a channel's phases. None leaves the biases
            as torch's Linear draws them.
        transition_weight_scale: factor on the initial weights of the two projections. With 0, training
            starts at a time-invariant recurrence. "fixed" has no weights to scale.
        bias: whether the projections have biases. The two init arguments need them.

    Raises:
        ValueError: an unknown activation or transition, or init arguments out of range.

    Source:
        GateLoop (Katsch, 2023), section 4, eq. 25; the stable exponential comes from LRU (Orvieto et al.,
        2023).

    Example:
        >>> import torch
        >>> _ = torch.manual_seed(0)
        >>> gates = Transition(16, n_heads=4, d_head=2, magnitude_init=(0.9, 0.99))
        >>> log_decay, phase = gates(torch.zeros(1, 3, 16))
        >>> log_decay.shape, phase.shape
        (torch.Size([1, 3, 4, 2]), torch.Size([1, 3, 4, 2]))
        >>> bool((log_decay.exp() > 0.8999).all() and (log_decay.exp() < 0.9901).all())
        True
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        d_head: int,
        *,
        magnitude_activation: MagnitudeActivation = "sigmoid",
        phase_activation: PhaseActivation = "identity",
        transition: TransitionKind = "data",
        magnitude_init: tuple[float, float] | None = None,
        phase_init: float | None = None,
        transition_weight_scale: float = 1.0,
        bias: bool = True,
    ) -> None:
        super().__init__()
        choice(MagnitudeActivation, magnitude_activation=magnitude_activation)
        choice(PhaseActivation, phase_activation=phase_activation)
        choice(TransitionKind, transition=transition)
        span(0, 1, magnitude_init=magnitude_init, or_none=True)
        require(
            phase_init is None or 0 < phase_init <= math.pi,
            f"`phase_init` must be a phase in radians in (0, pi]; got {phase_init}.",
        )
        require(
            transition == "fixed" or bias or (magnitude_init is None and phase_init is None),
            "`magnitude_init` and `phase_init` are the biases of the transition's projections and need "
            "`bias=True`; got `bias=False`. Leave the two at None or keep the biases.",
        )
        self.n_heads, self.d_head = n_heads, d_head
        self.magnitude_activation, self.phase_activation = magnitude_activation, phase_activation

        def projection() -> GateLinear | _Constant:
            if transition == "fixed":
                return _Constant(d_model, n_heads * d_head)
            linear = GateLinear(d_model, n_heads * d_head, bias=bias)
            with torch.no_grad():
                linear.weight.mul_(transition_weight_scale)
            return linear

        self.magnitude = mark(projection())
        self.phase: GateLinear | _Constant | None = None
        if phase_activation != "none":
            self.phase = mark(projection())
        with torch.no_grad():
            if magnitude_init is not None:
                self._init_magnitudes(self.magnitude.bias, *magnitude_init)
            if phase_init is not None and self.phase is not None:
                self._init_phases(self.phase.bias, phase_init)

    def forward(
        self, x: Float[Tensor, "b t d_model"]
    ) -> tuple[Float[Tensor, "*bt h dk"], Float[Tensor, "*bt h dk"] | None]:
        """Return the transitions of the steps of `x` (b, t, d_model).

        Returns:
            log_decay, log |a| <= 0, and phase, arg a in radians, or None with `phase_activation="none"`;
            both (b, t, h, dk), or (h, dk) with `transition="fixed"`, in float32 (float64 in a float64
            module).
        """
        gamma = self.magnitude(x).unflatten(-1, (self.n_heads, self.d_head))
        log_decay = _MAGNITUDES[self.magnitude_activation].forward(gamma)
        if self.phase is None:
            return log_decay, None
        theta = self.phase(x).unflatten(-1, (self.n_heads, self.d_head))
        return log_decay, _PHASES[self.phase_activation].forward(theta)

    if TYPE_CHECKING:
        __call__ = forward

    def _init_magnitudes(self, bias: Tensor, low: float, high: float) -> None:
        longest, shortest = -math.log1p(-high), -math.log1p(-low)
        time_scale = torch.exp(torch.empty_like(bias).uniform_(shortest, longest))
        bias.copy_(_MAGNITUDES[self.magnitude_activation].inverse(1 - 1 / time_scale))

    def _init_phases(self, bias: Tensor, largest: float) -> None:
        part = torch.randperm(len(bias), device=bias.device).to(bias.dtype)
        phase = largest * (part + torch.rand_like(bias)) / len(bias)
        bias.copy_(_PHASES[self.phase_activation].inverse(phase))
