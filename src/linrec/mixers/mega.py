"""Mega: Moving Average Equipped Gated Attention (Ma and others, 2022).

    u_t = beta * x_t
    h_t = alpha * u_t + (1 - alpha * delta) * h_{t-1}        x'_t = eta^T h_t
    z_t = SiLU(x'_t W_z + b_z)
    q_t = kappa_q * z_t + mu_q     k_t = kappa_k * z_t + mu_k     v_t = SiLU(x_t W_v + b_v)
    o_n = sum_{m<=n} softmax_m(q_n . k_m / tau + b_{n-m}) v_m
    gamma_t = SiLU(x'_t W_gamma + b_gamma)     phi_t = sigmoid(x'_t W_phi + b_phi)
    H_t = SiLU(x'_t W_h + (gamma_t * o_t) U_h + b_h)
    y_t = phi_t * H_t + (1 - phi_t) * x_t

x is the input; u, h and x' are input, state and output of a damped moving average. It has several dimensions
for each channel, weights alpha and damping delta in (0, 1), expansion beta and projection eta. z the
projection that queries q and keys k share, s its width, tau = sqrt(s), v values, b_i = (R_i a) . b of learned
a and b, R_i the turn of pairs of channels, or a learned number b_i, o output of the attention's one head;
gamma reset gate, phi update gate, H candidate, y output, t time; vectors are rows. Laplace's function or
relu^2 in the place of softmax has as tau the number of steps that are seen.
"""

import math
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from linrec.nn.mixer import Mixer, State, Transitions
from linrec.nn.norms import Norm, make_norm
from linrec.nn.parameters import Float32Module, mark
from linrec.nn.positions import positions
from linrec.nn.projections import draw, output_kwargs
from linrec.nn.rotary import Rotary
from linrec.ops import inspection
from linrec.ops.attention import AttentionCache, laplace_attention, softmax_attention
from linrec.ops.core.call import recording
from linrec.ops.diagonal_ssm import diagonal_ssm
from linrec.rules import at_least, require

__all__ = ["Mega", "MegaState", "MovingAverage"]

Attention = Literal["softmax", "laplace", "relu2"]
PositionBias = Literal["rotary", "simple", "none"]

# standard deviations when training starts, in the released code: of matrices, kappa, a, b and beta, and
# of the logits of alpha and delta
STD, GATE_STD = 0.02, 0.2


class MegaState(NamedTuple):
    """The state of Mega between two pieces of a sequence.

    Attributes:
        h: the moving averages (b, d_model, n).
        cache: keys and values of past steps; with chunks, of no more than make one.
        position: steps since the sequence began, (b,) int64.
    """

    h: Float[Tensor, "b d n"]
    cache: AttentionCache
    position: Int[Tensor, "b"]


class Mega(Mixer):
    """y_t = phi_t * H_t + (1 - phi_t) * x_t, less x_t: gated attention whose queries and keys are averages.

    The paper's layer has its skip connection inside, weighed by phi. Here the block adds x, so the mixer
    returns phi_t * (H_t - x_t): with `norm_position="post"`, the block is exactly the paper's layer. In a
    pre-norm block the released code subtracts the block's input x, and everything else reads norm(x).
    `input_norm="layer"` does the same: the mixer has the norm, and the block leaves its own out. With the
    default, "none", a pre-norm block subtracts norm(x), unlike the paper and the released code.

    | variant | argument |
    |---|---|
    | Mega | the defaults |
    | Mega-chunk: attention within chunks, linear in time | `chunk_size=128` |
    | Laplace's function of scores divided by their number | `attention="laplace"` |
    | relu^2 of them, which it approximates | `attention="relu2"` |
    | the released code: x' = SiLU(eta^T h + omega * x) | `ema_skip=True` |
    | the released code's pre-norm blocks | `input_norm="layer"` |
    | the released code's learned bias for each distance, with chunks | `position_bias="simple"` |
    | without positional bias | `position_bias="none"` |
    | the paper's ablation without averages: x' = x | `n_averages=0` |

    Chunks are counted from the start of each sequence, so from each reset on, and only the averages pass
    from one to the next. Without chunks, the cache grows with every step.

    When training starts, matrices, kappa, a and b are normal with a standard deviation of 0.02, mu and the
    biases of projections zero.

    Args:
        d_model: width of the sequence.
        n_averages: n, moving averages of each channel; 0 disables them.
        d_qk: s, the width of z, queries and keys; even with a positional bias.
        expansion: v / d_model, of v channels of values.
        chunk_size: steps of a chunk; None disables chunks.
        attention: function of the scores, "softmax", "laplace" or "relu2"; see
            `linrec.ops.laplace_attention`.
        position_bias: b_i, "rotary", "simple" or "none". "simple" is a learned number for each distance in a
            chunk; the product of queries and keys adds it, whose channels grow by `chunk_size`.
        ema_skip: whether x' is SiLU(eta^T h + omega * x), with a learned omega for each channel.
        input_norm: norm of x inside the mixer, for all but the skip connection: "layer", "rms" or "none".

    Raises:
        ValueError: a size below 1, an odd `d_qk` with a rotary bias, an unknown name of a variant,
            `ema_skip` without averages, or a simple bias without chunks.

    Source:
        Mega (Ma and others, 2022), its moving average, gated attention and Mega-chunk.

    Example:
        >>> mixer = Mega(16, n_averages=4, d_qk=8, chunk_size=4)
        >>> y, state = mixer(torch.zeros(2, 10, 16))
        >>> y.shape, state.h.shape, state.cache.v.shape, state.position
        (torch.Size([2, 10, 16]), torch.Size([2, 16, 4]), torch.Size([2, 3, 1, 32]), tensor([10, 10]))
    """

    takes_turns = True

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
        input_norm: Norm = "none",
    ) -> None:
        super().__init__(d_model)
        at_least(1, d_qk=d_qk, cure="Try 64.")
        at_least(1, expansion=expansion, cure="Try 2.")
        at_least(1, chunk_size=chunk_size, or_none=True, cure="None is no chunks.")
        require(
            position_bias != "rotary" or d_qk % 2 == 0,
            f"`d_qk` must be even where pairs of channels turn; got {d_qk}. "
            'Pass an even one, or `position_bias="none"`.',
        )
        require(
            position_bias != "simple" or chunk_size is not None,
            '`position_bias="simple"` needs `chunk_size`, which limits the distances; got None. '
            'Pass `chunk_size`, or `position_bias="rotary"`.',
        )
        require(
            n_averages != 0 or not ema_skip,
            "`ema_skip` needs averages to skip; got `n_averages=0`. Leave one of them out.",
        )
        self.d_qk, self.d_value, self.n_averages = d_qk, expansion * d_model, n_averages
        self.chunk_size, self.attention = chunk_size, attention
        # the positional bias is a product of further channels: d_qk channels, or a channel per place in a
        # chunk
        self.d_key = d_qk + {"rotary": d_qk, "simple": chunk_size or 0, "none": 0}[position_bias]

        self.own_norm = input_norm != "none"
        self.norm = make_norm(input_norm, d_model)
        self.average = None if n_averages == 0 else MovingAverage(d_model, n_averages)
        self.omega: nn.Parameter | None = None
        if ema_skip:
            self.omega = nn.Parameter(torch.randn(d_model))
        self.z = nn.Linear(d_model, d_qk)
        # of queries and of keys
        self.kappa = nn.Parameter(STD * torch.randn(2, d_qk))
        self.mu = nn.Parameter(torch.zeros(2, d_qk))
        self.rotary = Rotary(d_qk) if position_bias == "rotary" else None
        self.bias: nn.Parameter | None = None
        if position_bias != "none":
            shape = (2, d_qk) if chunk_size is None or position_bias == "rotary" else (chunk_size,)
            self.bias = nn.Parameter(STD * torch.randn(shape))
        vectors = ["kappa", "mu"] if self.bias is None else ["kappa", "mu", "bias"]
        mark(self, *vectors, group="channel", weight_decay=False)
        self.v = nn.Linear(d_model, self.d_value)
        self.gamma = nn.Linear(d_model, self.d_value)
        self.phi = nn.Linear(d_model, d_model)
        self.h = nn.Linear(d_model, d_model)
        self.u = nn.Linear(self.d_value, d_model, bias=False)
        draw([self.z, self.v, self.gamma, self.phi, self.h, self.u], nn.init.normal_, std=STD)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return y less x, and a `MegaState`."""
        past = self.init_state(x.shape[0], device=x.device) if state is None else state
        skipped, x = x, self.norm(x)
        averaged, h = x, past.h
        if self.average is not None:
            averaged, h = diagonal_ssm(x, *self.average(), state=h, reset=reset)
        if self.omega is not None:
            averaged = functional.silu(averaged + self.omega.to(x.dtype) * x)
        z, v = (functional.silu(part)[:, :, None] for part in (self.z(averaged), self.v(x)))
        # apart, since the cache would keep the queries' memory too
        q, k = (z * kappa + mu for kappa, mu in zip(self.kappa, self.mu, strict=True))
        position, seen = positions(past.position, x.shape[1], reset=reset)
        in_chunk = position if self.chunk_size is None else position % self.chunk_size
        q = q / (math.sqrt(self.d_qk) if self.attention == "softmax" else 1 + in_chunk[..., None, None])
        if self.bias is not None:
            if self.rotary is not None:
                a, b = (part.expand(*position.shape, 1, -1) for part in self.bias)
                a, b = self.rotary(position, a, b)
            else:
                # of a step with each place m of its chunk: b_{n-m}, and whether the step is at m
                apart = in_chunk[..., None, None] - torch.arange(len(self.bias), device=x.device)
                a, b = self.bias[apart.clamp(min=0)], (apart == 0).to(self.bias.dtype)
            q, k = torch.cat([q, a], -1), torch.cat([k, b], -1)
        attend: Any = softmax_attention
        if self.attention != "softmax":
            attend = partial(laplace_attention, function=self.attention)
        # a chunk lies between two resets
        cut = reset if self.chunk_size is None else in_chunk == 0
        q, k = q.to(v.dtype), k.to(v.dtype)
        o, cache = attend(q, k, v, state=past.cache, reset=cut, scale=1.0, window=self.chunk_size)
        gamma, phi = functional.silu(self.gamma(averaged)), torch.sigmoid(self.phi(averaged))
        H = functional.silu(self.h(averaged) + self.u(gamma * o[:, :, 0]))
        return phi * (H - skipped), MegaState(h, cache, seen)

    @property
    def state_grows(self) -> bool:
        """Whether the cache grows without a bound: without chunks."""
        return self.chunk_size is None

    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> State:
        """Return zeros, and a cache of no steps in the dtype of values, at position 0."""
        h = diagonal_ssm.empty_state(batch, self.d_model, self.n_averages, **self.factory_kwargs(device))
        sizes = 1, self.d_key, self.d_value
        cache = softmax_attention.empty_state(batch, *sizes, **output_kwargs(self.v, device))
        if self.chunk_size is not None:
            # chunks are resets, which the cache has a flag for
            cache = cache._replace(alive=h.new_zeros(batch, 0, dtype=torch.bool))
        return MegaState(h, cache, h.new_zeros(batch, dtype=torch.int64))

    @property
    def state_size(self) -> int:
        """Elements per cached step: its key and value, and with chunks a flag.

        With chunks, there are at most `chunk_size` - 1 cached steps. h and the position are not counted.
        """
        return self.d_key + self.d_value + (self.chunk_size is not None)

    def transitions(self, x: Tensor) -> Transitions | None:
        """Return 1 - alpha * delta of the averages, None without them."""
        return None if self.average is None else Transitions(self.average()[0].flatten(), None)

    def token_mixing(self, x: Tensor, *, reset: Tensor | None = None) -> Tensor | None:
        """Return the weights that v is multiplied by in o."""
        with recording() as calls:
            self.forward(x, reset=reset)
        return inspection.token_mixing(calls[-1])


class MovingAverage(Float32Module):
    """h_t = alpha * beta * x_t + (1 - alpha * delta) * h_{t-1}, y_t = eta^T h_t: n averages of every channel.

    alpha and delta are sigmoids of normal numbers when training starts, with a standard deviation of 0.2;
    beta is 1, -1, 1, .. with one of 0.02, eta normal with variance 1 / n. All but eta are marked as group
    "transition" without weight decay.

    Args:
        channels: channels d.
        n_averages: averages n of each.

    Raises:
        ValueError: an `n_averages` below 1.

    Source:
        Mega (Ma and others, 2022), its multi-dimensional damped moving average; where numbers start is the
        released code's.
    """

    def __init__(self, channels: int, n_averages: int) -> None:
        super().__init__()
        at_least(1, n_averages=n_averages, cure="The paper's is 16.")
        shape = channels, n_averages
        self.alpha = nn.Parameter(GATE_STD * torch.randn(shape))
        self.delta = nn.Parameter(GATE_STD * torch.randn(shape))
        sign = 1.0 - 2.0 * (torch.arange(n_averages) % 2)
        self.beta = nn.Parameter(sign + STD * torch.randn(shape))
        self.eta = nn.Parameter(torch.randn(shape) / math.sqrt(n_averages))
        mark(self, "beta")
        mark(self, "alpha", "delta", float32=True)
        mark(self, "eta", group="channel", weight_decay=True)

    def forward(self) -> tuple[Float[Tensor, "d n"], Float[Tensor, "d n"], Float[Tensor, "d n"]]:
        """Return 1 - alpha * delta, alpha * beta and eta, in float32 or better."""
        dtype = self.state_dtype
        alpha, delta = torch.sigmoid(self.alpha.to(dtype)), torch.sigmoid(self.delta.to(dtype))
        return 1 - alpha * delta, alpha * self.beta.to(dtype), self.eta.to(dtype)
