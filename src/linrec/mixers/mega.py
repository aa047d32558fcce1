"""Mega: Moving Average Equipped Gated Attention (Ma and others, 2022).

    u_t = beta * x_t
    h_t = alpha * u_t + (1 - alpha * delta) * h_{t-1}        x'_t = eta^T h_t
    z_t = SiLU(x'_t W_z + b_z)
    q_t = kappa_q * z_t + mu_q     k_t = kappa_k * z_t + mu_k     v_t = SiLU(x_t W_v + b_v)
    o_n = sum_{m<=n} softmax_m(q_n . k_m / tau + b_{n-m}) v_m
    gamma_t = SiLU(x'_t W_gamma + b_gamma)     phi_t = sigmoid(x'_t W_phi + b_phi)
    H_t = SiLU(x'_t W_h + (gamma_t * o_t) U_h + b_h)
    y_t = phi_t * H_t + (1 - phi_t) * x_t

x input; u, h and x' input, state and output of a damped moving average, of several dimensions for each
channel, with weights alpha and damping delta in (0, 1), expansion beta and projection eta; z what queries q
and keys k share, s its width, tau = sqrt(s), v values, b_i = (R_i a) . b of learned a and b, R_i the turn of
pairs of channels, o output of the attention's one head; gamma reset gate, phi update gate, H candidate, y
output, t time; vectors are rows. Laplace's function or relu^2 in the place of softmax has as tau the number
of steps that are seen.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional

from linrec.errors import unknown
from linrec.nn.float32 import Float32Module
from linrec.nn.mixer import Mixer, State, Transitions
from linrec.nn.parameters import mark
from linrec.nn.positions import positions
from linrec.nn.rotary import Rotary
from linrec.ops.attention import AttentionCache, laplace_attention, softmax_attention
from linrec.ops.core.handlers import refuse_split_time
from linrec.ops.diagonal_ssm import diagonal_ssm

__all__ = ["Mega", "MegaState", "MovingAverage"]

Attention = Literal["softmax", "laplace", "relu2"]
ATTENTIONS = ("softmax", "laplace", "relu2")
PositionBias = Literal["rotary", "none"]

# of the released code: standard deviations of matrices and gains, and of what makes alpha and delta
STD = 0.02
GATE_STD = 0.2


class MegaState(NamedTuple):
    """What Mega carries from one piece of a sequence to the next.

    Attributes:
        h: the moving averages (b, d_model, n).
        cache: keys and values of past steps; with chunks, of no more than make one.
        position: steps since the sequence began, (b,) int64.
    """

    h: Float[Tensor, "b d n"]
    cache: AttentionCache
    position: Int[Tensor, "b"]


class MovingAverage(Float32Module):
    """h_t = alpha * beta * x_t + (1 - alpha * delta) * h_{t-1}, y_t = eta^T h_t: n averages of every channel.

    It runs as a convolution on long sequences and as a recurrence on short ones; see
    `linrec.ops.diagonal_ssm`. alpha and delta are sigmoids of normal numbers when training starts, with a
    standard deviation of 0.2; beta is 1, -1, 1, .. with one of 0.02, eta normal with variance 1 / n. All but
    eta are marked as group "transition" without weight decay.

    Args:
        channels: channels d.
        n: averages of each.

    Raises:
        ValueError: an `n` below 1.

    Source:
        Mega (Ma and others, 2022), its multi-dimensional damped moving average; where numbers start is the
        released code's.

    Example:
        >>> import torch
        >>> y, state = MovingAverage(8, 4)(torch.zeros(2, 10, 8))
        >>> y.shape, state.shape
        (torch.Size([2, 10, 8]), torch.Size([2, 8, 4]))
    """

    def __init__(self, channels: int, n: int) -> None:
        super().__init__()
        if n < 1:
            raise ValueError(f"`n_averages` must be at least 1 for each channel; got {n}. The paper's is 16.")
        self.alpha = nn.Parameter(GATE_STD * torch.randn(channels, n))
        self.delta = nn.Parameter(GATE_STD * torch.randn(channels, n))
        sign = 1.0 - 2.0 * (torch.arange(n) % 2)
        self.beta = nn.Parameter(sign + STD * torch.randn(channels, n))
        self.eta = nn.Parameter(torch.randn(channels, n) / math.sqrt(n))
        for name in ("alpha", "delta", "beta"):
            mark(self, name, group="transition", weight_decay=False)
        self.keep_float32("alpha", "delta")
        mark(self, "eta", group="channel", weight_decay=True)

    def forward(
        self,
        x: Float[Tensor, "b t d"],
        state: Float[Tensor, "b d n"] | None = None,
        *,
        reset: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b t d"], Float[Tensor, "b d n"]]:
        """Average `x` (b, t, d); arguments and results are those of `linrec.ops.diagonal_ssm`."""
        dtype = torch.promote_types(self.alpha.dtype, torch.float32)
        alpha, beta, eta = torch.sigmoid(self.alpha.to(dtype)), self.beta.to(dtype), self.eta.to(dtype)
        return diagonal_ssm(x, self.transitions(), alpha * beta, eta, state=state, reset=reset)

    def transitions(self) -> Float[Tensor, "d n"]:
        """1 - alpha * delta, in float32 or better."""
        dtype = torch.promote_types(self.alpha.dtype, torch.float32)
        return 1 - torch.sigmoid(self.alpha.to(dtype)) * torch.sigmoid(self.delta.to(dtype))


class Mega(Mixer):
    """y_t = phi_t * H_t + (1 - phi_t) * x_t, less x_t: gated attention whose queries and keys are averages.

    The paper's layer has its skip connection inside, weighed by phi. Here the block adds x, so the mixer
    returns phi_t * (H_t - x_t): `norm_position="post"` makes the paper's layer of it, to the letter.

    | variant | argument |
    |---|---|
    | Mega | the defaults |
    | Mega-chunk: attention within chunks, linear in time | `chunk_size=128` |
    | Laplace's function of scores divided by their number | `attention="laplace"` |
    | relu^2 of them, which it approximates | `attention="relu2"` |
    | the released code: x' = SiLU(eta^T h + omega * x) | `ema_skip=True` |
    | without positional bias | `position_bias="none"` |
    | the paper's ablation without averages: x' = x | `n_averages=0` |

    Chunks are counted from the start of each sequence, so from each reset on, and only the averages pass
    from one to the next. Without chunks, the cache grows with every step.

    When training starts, matrices, kappa, a and b are normal with a standard deviation of 0.02, mu and the
    biases of projections zero.

    Args:
        d_model: width of the sequence.
        n_averages: n, moving averages of each channel; 0 is none.
        d_qk: s, the width of z, queries and keys; even with a positional bias.
        expansion: v / d_model, of v channels of values.
        chunk_size: steps of a chunk; None is no chunks.
        attention: function of the scores, "softmax", "laplace" or "relu2"; see
            `linrec.ops.laplace_attention`.
        position_bias: b_i, "rotary" or "none".
        ema_skip: whether x' is SiLU(eta^T h + omega * x), with a learned omega for each channel.

    Raises:
        ValueError: a size below 1, an odd `d_qk` with a positional bias, an unknown name of a variant, or
            `ema_skip` without averages.

    Source:
        Mega (Ma and others, 2022), its moving average, gated attention and Mega-chunk. The released code has
        a learned bias for each distance too.

    Example:
        >>> import torch
        >>> mixer = Mega(16, n_averages=4, d_qk=8, chunk_size=4)
        >>> y, state = mixer(torch.zeros(2, 10, 16))
        >>> y.shape, state.h.shape, state.cache.v.shape, state.position
        (torch.Size([2, 10, 16]), torch.Size([2, 16, 4]), torch.Size([2, 3, 1, 32]), tensor([10, 10]))
    """

    def __init__(
        self,
        d_model: int,
        *,
        n_averages: int = 16,
        d_qk: int = 64,
        expansion: int = 2,
        chunk_size: int | None = None,
        attention: Attention = "softmax",
        position_bias: PositionBias = "rotary",
        ema_skip: bool = False,
    ) -> None:
        super().__init__(d_model)
        if min(d_qk, expansion) < 1:
            raise ValueError(
                f"`d_qk` and `expansion` must be at least 1; got {d_qk} and {expansion}. Try 64 and 2."
            )
        if chunk_size is not None and chunk_size < 1:
            raise ValueError(f"`chunk_size` must be at least 1, or None for no chunks; got {chunk_size}.")
        if attention not in ATTENTIONS:
            raise unknown("`attention`", attention, ATTENTIONS)
        if position_bias not in ("rotary", "none"):
            raise unknown("`position_bias`", position_bias, ["rotary", "none"])
        if position_bias == "rotary" and d_qk % 2:
            raise ValueError(
                f"`d_qk` must be even where pairs of channels turn; got {d_qk}. "
                'Pass an even one, or `position_bias="none"`.'
            )
        if ema_skip and n_averages == 0:
            raise ValueError("`ema_skip` needs averages to skip; got `n_averages=0`. Leave one of them out.")
        self.d_qk, self.d_value, self.n_averages = d_qk, expansion * d_model, n_averages
        self.chunk_size, self.attention = chunk_size, attention

        self.average = None if n_averages == 0 else MovingAverage(d_model, n_averages)
        self.omega: nn.Parameter | None = None
        if ema_skip:
            self.omega = nn.Parameter(torch.randn(d_model))
        self.z = nn.Linear(d_model, d_qk)
        # of queries and of keys
        self.kappa = nn.Parameter(STD * torch.randn(2, d_qk))
        self.mu = nn.Parameter(torch.zeros(2, d_qk))
        self.rotary: Rotary | None = None
        if position_bias == "rotary":
            self.rotary = Rotary(d_qk)
            self.bias = nn.Parameter(STD * torch.randn(2, d_qk))
        for name in ("kappa", "mu") if self.rotary is None else ("kappa", "mu", "bias"):
            mark(self, name, group="channel", weight_decay=False)
        self.v = nn.Linear(d_model, self.d_value)
        self.gamma = nn.Linear(d_model, self.d_value)
        self.phi = nn.Linear(d_model, d_model)
        self.h = nn.Linear(d_model, d_model)
        self.u = nn.Linear(self.d_value, d_model, bias=False)
        for linear in (self.z, self.v, self.gamma, self.phi, self.h, self.u):
            nn.init.normal_(linear.weight, std=STD)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)

    def forward(
        self,
        x: Float[Tensor, "b t d_model"],
        state: State = None,
        *,
        reset: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b t d_model"], MegaState]:
        """Mix `x` over time; see `Mixer.forward`. The state is a `MegaState`."""
        self.check_input(x, reset, state)
        refuse_split_time("mega")
        past = self.init_state(x.shape[0], device=x.device) if state is None else state
        averaged, h = self._averaged(x, past.h, reset)
        v = functional.silu(self.v(x))
        o, cache, position = self._attend(averaged, v[:, :, None], past, reset)
        gamma, phi = functional.silu(self.gamma(averaged)), torch.sigmoid(self.phi(averaged))
        candidate = functional.silu(self.h(averaged) + self.u(gamma * o[:, :, 0]))
        return phi * (candidate - x), MegaState(h, cache, position)

    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> MegaState:
        """Zeros, a cache of no steps, at position 0."""
        weight = self.z.weight
        device = weight.device if device is None else device
        size = (batch, self.d_model, self.n_averages)
        h = torch.zeros(size, dtype=self._state_dtype(), device=device)
        k, v = (
            torch.zeros(batch, 0, 1, width, dtype=weight.dtype, device=device)
            for width in (self._d_key, self.d_value)
        )
        position = torch.zeros(batch, dtype=torch.int64, device=device)
        # chunks are resets, which the cache has a flag for
        alive = None if self.chunk_size is None else k.new_zeros(batch, 0, dtype=torch.bool)
        return MegaState(h, AttentionCache(k, v, None, None, alive), position)

    @property
    def state_size(self) -> int:
        """Elements per cached step, of which there are at most `chunk_size` - 1: its key and value.

        With chunks, also whether it is of the current one. Beside them are h and the position, whatever the
        length.
        """
        return self._d_key + self.d_value + (self.chunk_size is not None)

    def transitions(self, x: Float[Tensor, "b t d_model"]) -> Transitions | None:
        """1 - alpha * delta of the averages, None without them; see `Mixer.transitions`."""
        if self.average is None:
            return None
        return Transitions(self.average.transitions().flatten(), None)

    def token_mixing(
        self, x: Float[Tensor, "b t d_model"], *, reset: Bool[Tensor, "b t"] | None = None
    ) -> Float[Tensor, "b t t"]:
        """The weights that v is multiplied by in o."""
        start = self.init_state(x.shape[0], device=x.device)
        averaged, _ = self._averaged(x, start.h, reset)
        # what attention makes of the identity is the matrix
        identity = torch.eye(x.shape[1], dtype=averaged.dtype, device=x.device)[None, :, None]
        cache = start.cache._replace(v=identity[:, :0].expand(len(x), -1, -1, -1))
        identity = identity.expand(len(x), -1, -1, -1)
        return self._attend(averaged, identity, start._replace(cache=cache), reset)[0][:, :, 0]

    @property
    def _d_key(self) -> int:
        return self.d_qk if self.rotary is None else 2 * self.d_qk

    def _averaged(self, x: Tensor, h: Tensor, reset: Tensor | None) -> tuple[Tensor, Tensor]:
        """x' and the averages after the last step."""
        if self.average is None:
            return x, h
        averaged, h = self.average(x, h, reset=reset)
        if self.omega is not None:
            averaged = functional.silu(averaged + self.omega.to(x.dtype) * x)
        return averaged, h

    def _attend(
        self, averaged: Tensor, v: Tensor, past: MegaState, reset: Tensor | None
    ) -> tuple[Tensor, AttentionCache, Tensor]:
        """o of values (b, t, 1, v), the cache with the new steps, and the next step's position."""
        position, seen = positions(past.position, v.shape[1], reset=reset)
        z = functional.silu(self.z(averaged))[:, :, None]
        # apart, since the cache would keep the queries' memory too
        q, k = (z * kappa + mu for kappa, mu in zip(self.kappa, self.mu, strict=True))
        in_chunk = position if self.chunk_size is None else position % self.chunk_size
        q = q / (math.sqrt(self.d_qk) if self.attention == "softmax" else 1 + in_chunk[..., None, None])
        if self.rotary is not None:
            # a product of more channels: the bias is one of what turns
            a, b = (part.expand(*position.shape, 1, -1) for part in self.bias)
            a, b = self.rotary(position, a, b)
            q, k = torch.cat([q, a], -1), torch.cat([k, b], -1)
        # a chunk is what lies between two resets
        cut = reset if self.chunk_size is None else in_chunk == 0
        q, k = q.to(v.dtype), k.to(v.dtype)
        attend: Callable[..., tuple[Tensor, AttentionCache | None]] = softmax_attention
        if self.attention != "softmax":
            attend = partial(laplace_attention, function=self.attention)
        o, cache = attend(q, k, v, state=past.cache, reset=cut, scale=1.0, window=self.chunk_size)
        # there is none without `causal` alone
        assert cache is not None
        return o, cache, seen
