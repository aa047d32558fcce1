"""Rotary position embeddings, and a matrix memory whose pairs of channels turn as they do."""

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Bool, Complex, Float, Int
from torch import Tensor, nn

from linrec.ops.core.ambient import exporting
from linrec.ops.core.call import handled
from linrec.ops.core.kernel import Memory, forward_op
from linrec.ops.core.precision import accumulation
from linrec.ops.gate_loop import gate_loop
from linrec.ops.scan import scan

__all__ = ["Rotary", "rotary_gate_loop", "running_turns", "turned"]


class Rotary(nn.Module):
    """z'_nj = z_nj exp(i n theta_j), with theta_j = base^(-2j / d_head) for j = 0 .. d_head / 2 - 1.

    z_nj is the complex number whose parts are the channels 2j and 2j + 1 of a query or key at position n. The
    product of a query and a key so depends on the difference of their positions alone. With a `fraction`, the
    first channels turn, like a head with only these channels, and the other channels do not.

    It has no parameters. Angles are formed in float64, from whole positions: in float32 they are off by up to
    0.03 radians at a position of a million. The results are rounded once, to the dtype of the inputs.

    Args:
        d_head: channels per head, even.
        base: of the frequencies.
        fraction: of the channels that turn, rounded down to whole ones; above 0, at most 1.

    Raises:
        ValueError: an odd number of channels to turn, or a `base` or `fraction` out of range.

    Source:
        Su and others, RoFormer: Enhanced Transformer with Rotary Position Embedding (2021), eq. 14 and 15. A
        fraction of the channels is GPT-J's and GPT-NeoX's.

    Example:
        >>> import torch
        >>> rotary = Rotary(2)
        >>> positions = torch.tensor([[0, 1, 2]])
        >>> (turned,) = rotary(positions, torch.tensor([1.0, 0.0]).expand(1, 3, 1, 2))
        >>> turned[0, 2, 0].acos()[0]
        tensor(2.)
    """

    def __init__(self, d_head: int, *, base: float = 10_000.0, fraction: float = 1.0) -> None:
        super().__init__()
        if d_head < 2 or d_head % 2:
            raise ValueError(
                f"`d_head` must be a positive even number for rotary positions; got {d_head}. Choose another "
                "number of heads: pairs of channels turn."
            )
        self.d_turned = int(d_head * fraction)
        if not 0 < fraction <= 1 or self.d_turned < 2 or self.d_turned % 2:
            raise ValueError(
                "`fraction` (`rotary_fraction` of mixers) must be in (0, 1] and leave a positive even number "
                f"of the {d_head} channels to turn; got {fraction}. Try 0.5."
            )
        if base <= 0:
            raise ValueError(
                f"`base` (`rotary_base` of mixers) must be positive; got {base}. RoFormer's is 10000."
            )
        self.d_head, self.base = d_head, base

    def forward(
        self, positions: Int[Tensor, "#b t"], *x: Float[Tensor, "b t h d"]
    ) -> tuple[Float[Tensor, "b t h d"], ...]:
        """Turn each of `x` (b, t, h, d) by the angles of `positions` (b or 1, t), int64."""
        cos, sin = self.turns(positions, torch.promote_types(x[0].dtype, torch.float32))
        return tuple(turned(z, cos, sin) for z in x)

    if TYPE_CHECKING:
        __call__ = forward

    def turns(
        self, positions: Int[Tensor, "#b t"], dtype: torch.dtype
    ) -> tuple[Float[Tensor, "#b t 1 pairs"], Float[Tensor, "#b t 1 pairs"]]:
        """Return the cosines and sines of the angles of `positions` (b or 1, t), int64."""
        # an exported program holds no operator of linrec, and for one step, a compiler fuses the angles
        turns = _turns if exporting() or positions.shape[1] <= 1 else _turns_at_once
        return turns(_Angles(positions, self.d_turned, self.base, dtype))

    def frequencies(self, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "pairs"]:
        """Return theta_j, in radians per step."""
        return _frequencies(self.d_turned, self.base, dtype, device)

    def extra_repr(self) -> str:
        """Return the text that `print` shows."""
        return f"d_head={self.d_head}, base={self.base}, d_turned={self.d_turned}"


def running_turns(
    angles: Float[Tensor, "b t h pairs"],
    last: Float[Tensor, "b angles"] | None = None,
    *,
    reset: Bool[Tensor, "b t"] | None = None,
) -> tuple[tuple[Float[Tensor, "b t h pairs"], Float[Tensor, "b t h pairs"]], Float[Tensor, "b angles"]]:
    """Return the cosines and sines of the sums of `angles` up to each step, and the last sums modulo 2 pi.

    Sums are formed in float64, from zero at resets: in float32, sums of thousands of radians lose digits.

    Args:
        angles: radians per step.
        last: the sums that an earlier call returned, heads side by side; None means zeros.
        reset: steps that start a new sequence.

    Source:
        Lahoti and others, Mamba-3 (2026), proposition 3.
    """
    steps = angles.flatten(2).to(_wide(angles.device))
    sums, end = scan(steps.new_ones(()), steps, state=last, reset=reset)
    sums, end = (total.remainder(2 * math.pi).to(angles.dtype) for total in (sums, end))
    cos, sin = (part.unflatten(-1, angles.shape[2:]) for part in (sums.cos(), sums.sin()))
    return (cos, sin), end


def _wide(device: torch.device) -> torch.dtype:
    # MPS has nothing wider than float32
    return torch.float32 if device.type == "mps" else torch.float64


class _Angles(NamedTuple):
    positions: Tensor
    d_head: int
    base: float
    dtype: torch.dtype


class _Turns(NamedTuple):
    cos: Tensor
    sin: Tensor


def _turns(given: _Angles) -> _Turns:
    positions, d_head, base, dtype = given
    device = positions.device
    angle = (positions[..., None] * _frequencies(d_head, base, _wide(device), device))[:, :, None]
    return _Turns(angle.cos().to(dtype), angle.sin().to(dtype))


def _frequencies(d_head: int, base: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    powers: Tensor = base ** (-torch.arange(0, d_head, 2, dtype=dtype, device=device) / d_head)
    return powers


def _memory(given: _Angles, keep: bool) -> tuple[Memory, Memory]:
    space = Memory((*given.positions.shape, 1, given.d_head // 2), given.dtype)
    return space, space


def _fill(out: _Turns, given: _Angles) -> None:
    for made, turns in zip(out, _turns(given), strict=True):
        made.copy_(turns)


# one operation for compilers, which would else form the same angles again for each head, in float64
_turns_at_once = forward_op("rotary_turns", _Angles, _Turns, _memory, _fill)


def turned(
    x: Float[Tensor, "*bth d"], cos: Float[Tensor, "*#bth pairs"], sin: Float[Tensor, "*#bth pairs"]
) -> Float[Tensor, "*bth d"]:
    """Turn the channels 2j and 2j + 1 of `x` by angle j, of the given cosine and sine.

    The channels after the last pair do not turn. The result is rounded once, to the dtype of `x`.
    """
    first, rest = x.tensor_split([2 * cos.shape[-1]], dim=-1)
    parts = first.to(cos.dtype).unflatten(-1, (-1, 2))
    # a compiler fuses real products into one kernel, and leaves complex products alone; without a compiler
    # each product is a kernel, and a complex product needs the fewest
    if torch.compiler.is_compiling():
        real, imaginary = parts.unbind(-1)
        pairs = torch.stack([real * cos - imaginary * sin, real * sin + imaginary * cos], dim=-1)
    else:
        pairs = torch.view_as_real(torch.view_as_complex(parts.contiguous()) * torch.complex(cos, sin))
    y = pairs.flatten(-2).to(x.dtype)
    return torch.cat([y, rest], dim=-1) if rest.shape[-1] else y


def rotary_gate_loop(
    rotary: Rotary,
    q: Float[Tensor, "b t h dk"],
    k: Float[Tensor, "b t h dk"],
    v: Float[Tensor, "b t h dv"],
    log_decay: Float[Tensor, "..."] | None = None,
    *,
    state: Complex[Tensor, "b h pairs dv"] | None = None,
    reset: Bool[Tensor, "b t"] | None = None,
) -> tuple[Float[Tensor, "b t h dv"], Complex[Tensor, "b h pairs dv"]]:
    """S_n = a_n e^(i theta) S_{n-1} + conj(k_n)^T v_n and y_n = Re(q_n S_n), for constant phases theta.

    The channels 2j and 2j + 1 of q and k are the parts of complex number j, which turns by theta_j.

    Re(q_n e^(i (n - m) theta) conj(k_m)) is the product of q_n turned by n theta and k_m turned by m theta.
    Several steps therefore run as a real recurrence of the turned q and k, which keep their dtype; its states
    are e^(-i n theta) S_n, with n counted from the state that is passed. A single step multiplies S instead,
    and so do calls that a handler observes or splits over processes.

    Args:
        rotary: has the phases theta, and turns all channels.
        q: queries.
        k: keys.
        v: values.
        log_decay: log a_n per head (h,) or per pair of channels (b, t, h, dk / 2); None is a_n = 1.
        state: S before the first step, (b, h, dk / 2, dv); None is zeros.
        reset: steps that start a new sequence.

    Returns:
        y in the dtype of q, k and v, and S after the last step.

    Source:
        RetNet (Sun and others, 2023), eq. 5 and 6; RoFormer (Su and others, 2021), eq. 16.
    """
    dtype = accumulation(q.dtype)
    if q.shape[1] < 2 or handled():
        q, k = (part.to(dtype).unflatten(-1, (-1, 2)) for part in (q, k))
        # conjugated as pairs, because compilers fuse real numbers only
        k = torch.stack([k[..., 0], -k[..., 1]], dim=-1)
        q, k = torch.view_as_complex(q), torch.view_as_complex(k)
        theta = rotary.frequencies(dtype, q.device).expand(q.shape[2], -1)
        y, state = gate_loop(q, k, v.to(dtype), log_decay, theta, state=state, reset=reset)
        return y.to(v.dtype), state
    if log_decay is not None and log_decay.dim() > 1:
        log_decay = log_decay.repeat_interleave(2, -1)
    if state is not None:
        state = torch.view_as_real(state.conj().resolve_conj()).mT.flatten(2, 3)
    steps = torch.arange(1, q.shape[1] + 1, device=q.device)
    q, k = rotary(steps[None], q, k)
    y, state = gate_loop(q, k, v, log_decay, state=state, reset=reset)
    real, imaginary = state.unflatten(2, (-1, 2)).unbind(3)
    cos, sin = rotary.turns(steps[None, -1:], dtype)
    return y, torch.complex(real, -imaginary) * torch.complex(cos, sin).squeeze(1)[..., None]
