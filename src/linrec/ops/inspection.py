"""Transitions and token-mixing matrices of a recorded operator call.

`linrec.ops.core.call.recording` records calls. Token mixing needs memory quadratic in the length.
"""

import contextlib
from collections.abc import Iterator, Mapping

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from linrec.ops.core.ambient import Ambient
from linrec.ops.core.call import Call
from linrec.ops.core.isolation import documents
from linrec.ops.core.precision import wide, widened
from linrec.ops.gate_loop import gate_loop_matrix

__all__ = ["elementwise_mixing", "kernel_mixing", "note", "noting", "token_mixing", "transitions"]

_NOTES: Ambient[dict[str, Tensor] | None] = Ambient("notes", None)
_NO_NOTES: Mapping[str, Tensor] = {}


def note(**values: Tensor) -> None:
    """Store values for inspection by name; outside of an inspection, do nothing.

    A mixer notes quantities that its operator does not receive. On `scan` it notes the `gate` that multiplies
    the input, and the `phase` of complex factors if phases may exceed pi. On an operator with values it notes
    the `gate` of the values and the `divisor` of the outputs. If the operator receives stabilised decays, the
    mixer notes the decays of the paper as `log_decay` (b, t, ..) or (c,).
    """
    if (notes := _NOTES.get()) is not None:
        notes.update(values)


@contextlib.contextmanager
def noting() -> Iterator[dict[str, Tensor]]:
    """Collect the values that this thread notes within the context, in calls that are not compiled."""
    notes: dict[str, Tensor] = {}
    with _NOTES.set(notes, compiled=False):
        yield notes


def transitions(
    call: Call | None, notes: Mapping[str, Tensor] = _NO_NOTES
) -> tuple[Tensor, Tensor | None] | None:
    """Return magnitude and phase of the state's decay factors, or None if the state has no such factors.

    Args:
        call: a recorded call of an operator, or None.
        notes: values noted in the same run: `log_decay` replaces the factors of the call, and `phase` their
            phase.

    Returns:
        Magnitudes (b, t, c), or (c,) if constant over time, and phases of the same shape in radians, or None
        for real factors. The channels c are the key channels of all heads, concatenated.
    """
    if (log_decay := notes.get("log_decay")) is not None:
        return (log_decay if log_decay.dim() == 1 else log_decay.flatten(2)).exp(), None
    found = None if call is None else _factors(call)
    # the angle of a complex factor is known only modulo 2 pi
    return found if found is None else (found[0], notes.get("phase", found[1]))


def _factors(call: Call) -> tuple[Tensor, Tensor | None] | None:
    given = call.inputs
    match call.operator.name:
        case "scan":
            a = _over_channels(given.a, given.x.shape[2:], given.x)
            return a.abs(), a.angle() if a.is_complex() else None
        case "diagonal_ssm":
            a = given.a.expand(given.c.shape).flatten()
            return a.abs(), a.angle()
        case "growing_ssm":
            return (given.a.abs() * given.growth.exp()).flatten(), given.a.angle().flatten()
        case "delta_rule" | "generalized_delta_rule":
            # their transitions are matrices, not a factor per channel
            return None
        case "selective_scan":
            return (wide(given.dt)[..., None] * given.A).exp().flatten(2), None
    log_decay, phase = getattr(given, "log_decay", None), getattr(given, "phase", None)
    if log_decay is None and phase is None:
        return None
    keys = given.k.shape[2:]
    angle = None if phase is None else _over_channels(wide(phase), keys, given.q)
    if log_decay is None:
        assert angle is not None
        return torch.ones_like(angle), angle
    return _over_channels(wide(log_decay), keys, given.q).exp(), angle


def _over_channels(gate: Tensor, sizes: torch.Size, sequence: Tensor) -> Tensor:
    """Return a gate (b or 1, t or 1, ..) for all channels, (b, t, c), or (c,) if constant over time."""
    gate = gate.expand(*gate.shape[:2], *sizes).flatten(2)
    if gate.shape[:2] == (1, 1) and sequence.shape[:2] != (1, 1):
        return gate[0, 0]
    return gate.expand(*sequence.shape[:2], -1)


def token_mixing(call: Call | None, notes: Mapping[str, Tensor] = _NO_NOTES) -> Float[Tensor, "b t t"] | None:
    """Return the weight of step m in step n, as the mean magnitude over heads or channels.

    For operators with values v, the values are set to the rows of the identity: the outputs are then the
    weights. For operators that filter, the input is an impulse: the outputs are then the taps.

    Args:
        call: a recorded call of an operator, or None.
        notes: values noted in the same run: `gate`, the factor on the input of a `scan`, real or complex,
            (b, t, c) or (c,), or on values, (b, t, h); `divisor` of an operator's outputs, (b, t, h, 1).

    Returns:
        Lower triangular matrices, or None for an operator whose weights depend on the values too.
    """
    if call is None:
        return None
    given, gate, divisor = call.inputs, notes.get("gate"), notes.get("divisor")
    if call.operator.name == "selective_scan":
        dt = wide(given.dt)[..., None]
        # every channel is a head of its own
        B, C = (part.to(dt.dtype).repeat_interleave(dt.shape[2] // part.shape[2], 2) for part in given[3:5])
        return gate_loop_matrix(C, B * dt, dt * given.A, reset=given.reset).abs().mean(1)
    if call.operator.name == "scan":
        magnitude = _over_channels(given.a, given.x.shape[2:], given.x).abs()
        gate = torch.ones_like(magnitude) if gate is None else gate.abs()
        return elementwise_mixing(magnitude, gate, given.x, given.reset)
    if hasattr(given, "v"):
        batch, time, heads, _ = given.v.shape
        identity = torch.eye(time, dtype=given.v.dtype, device=given.v.device)[:, None]
        if gate is not None:
            identity = identity * gate[..., None].to(identity.dtype)
        inputs = given._replace(v=identity.expand(batch, -1, heads, -1), state=None)
        if hasattr(given, "dropout"):
            # an empty cache, because there is no state
            cache = given.state._replace(v=inputs.v[:, :0].to(given.state.v.dtype))
            inputs = inputs._replace(state=cache, dropout=0.0)
        y, _ = call.operator.proceed(inputs, "auto", "auto")
        return (y if divisor is None else y / divisor).abs().mean(2)
    if hasattr(given, "u"):
        given = widened(given)
        impulse = given.u.new_zeros(1, *given.u.shape[1:])
        impulse[:, :1] = 1
        inputs = given._replace(u=impulse, state=None, reset=None)
        y, _ = call.operator.proceed(inputs, "auto", "auto")
        # a channel may have several outputs, which are flattened into channels
        return kernel_mixing(y[0].flatten(1).mT, given.u, given.reset)
    return None


def elementwise_mixing(
    magnitude: Float[Tensor, "*bt c"],
    gate: Float[Tensor, "*bt c"],
    x: Float[Tensor, "b t _"],
    reset: Bool[Tensor, "b t"] | None,
) -> Float[Tensor, "b t t"]:
    """Return W_nm = mean_c gate_mc prod_{j=m+1..n} |a_jc|: token mixing of h_n = a_n h_{n-1} + gate_n c_n.

    Args:
        magnitude: |a|, (b, t, c) or (c,).
        gate: factor >= 0 on the input, (b, t, c) or (c,).
        x: the sequence, used for its batch size and length.
        reset: (b, t) bool, or None.

    Source:
        HGRN (Qin, Yang and Zhong, 2023), eq. 7: the matrix Lambda, shown in figure 4.
    """
    keys = gate.expand(*x.shape[:2], -1)[:, :, None]
    mean = torch.full_like(keys, 1 / keys.shape[-1])
    return gate_loop_matrix(mean, keys, magnitude.log()[..., None, :], reset=reset)[:, 0]


def kernel_mixing(
    kernel: Float[Tensor, "c t"],
    x: Float[Tensor, "b t _"],
    reset: Bool[Tensor, "b t"] | None,
    weights: Float[Tensor, "b c t t"] | None = None,
) -> Float[Tensor, "b t t"]:
    """Return W_nm = mean_c |K_c,n-m g_c,nm|: token mixing of a convolution with the kernel K.

    Args:
        kernel: K (c, t), the tap of the current step first.
        x: the sequence, used for its batch size and length.
        reset: (b, t) bool, or None.
        weights: g, a factor on each pair of steps; None means 1.
    """
    batch, time, _ = x.shape
    steps = torch.arange(time, device=x.device)
    apart = steps[:, None] - steps
    seen = (apart >= 0).expand(batch, time, time)
    if reset is not None:
        document = documents(reset)
        seen = seen & (document[:, :, None] == document[:, None])
    if weights is None:
        return kernel.abs().mean(0)[apart.clamp(min=0)] * seen
    return (kernel[:, apart.clamp(min=0)] * weights).abs().mean(1) * seen
