"""RWKV-4: Reinventing RNNs for the Transformer Era (Peng and others, 2023), its time mixing.

    r_t = W_r (mu_r * x_t + (1 - mu_r) * x_{t-1})
    k_t = W_k (mu_k * x_t + (1 - mu_k) * x_{t-1})
    v_t = W_v (mu_v * x_t + (1 - mu_v) * x_{t-1})
    wkv_t = (sum_{i<t} exp(-(t - 1 - i) w + k_i) * v_i + exp(u + k_t) * v_t)
            / (sum_{i<t} exp(-(t - 1 - i) w + k_i) + exp(u + k_t))
    o_t = W_o (sigmoid(r_t) * wkv_t)

x is the input, t time, o the output, and * the product of channels. mu are shares of the current token, r the
receptance, k the key, v the value, w > 0 the decay and u the bonus of a channel. The sums a (with v) and b
(without) are recurrences. They are kept over exp(m_t), m_t the largest exponent in them, and read over
exp(p_t), so that nothing overflows:

    m_t = max(m_{t-1} - w, k_t)        p_t = max(m_{t-1}, u + k_t)
    a_t = exp(m_{t-1} - w - m_t) * a_{t-1} + exp(k_t - m_t) * v_t
    b_t = exp(m_{t-1} - w - m_t) * b_{t-1} + exp(k_t - m_t)
    wkv_t = (exp(m_{t-1} - p_t) * a_{t-1} + exp(u + k_t - p_t) * v_t)
            / (exp(m_{t-1} - p_t) * b_{t-1} + exp(u + k_t - p_t))
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from linrec.nn.gates import stable_exponential
from linrec.nn.mixer import Mixer, State
from linrec.nn.parameters import mark
from linrec.nn.projections import orthogonal_linear
from linrec.nn.running_maximum import maxima_around_steps
from linrec.nn.token_shift import Place, first_decay, ramp, token_shift, zigzag
from linrec.ops.gate_loop import gate_loop_matrix
from linrec.ops.inspection import note
from linrec.ops.scan import scan
from linrec.rules import at_least

__all__ = ["RWKV4", "RWKV4State"]

# log w of the slowest and the fastest channel when training starts
SLOWEST, FASTEST = -5.0, 3.0


class RWKV4State(NamedTuple):
    """The state of RWKV-4 between two pieces of a sequence.

    Attributes:
        last: the last input, (b, d_model); None without token shift.
        sums: a and b side by side, (b, 2 d_state).
        largest: m, (b, d_state); -inf at the start.
    """

    last: Float[Tensor, "b d"] | None
    sums: Float[Tensor, "b two_d"]
    largest: Float[Tensor, "b d_state"]


class RWKV4(Mixer):
    """o_t = W_o (sigmoid(r_t) * wkv_t), wkv_t a mean of values whose weights fade by exp(-w) per step.

    The defaults are the paper's layer. Its channel mixing is `linrec.nn.RWKVChannelMixing`.

    | variant | argument |
    |---|---|
    | without token shift | `token_shift=False`: mu = 1 |
    | without bonus | `bonus=False`: wkv_t = a_t / b_t |
    | without receptance | `receptance=False`: 1 in place of sigmoid(r_t) |

    When training starts, for channel i of d and layer l of L, as in the released code:

        mu_k = (i/d)^(1 - l/L)    mu_v = mu_k + 0.3 l/(L - 1)    mu_r = (i/d)^((1 - l/L) / 2)
        log w = -5 + 8 (i/(d - 1))^(0.7 + 1.3 l/(L - 1))         u = log 0.3 + 0, 0.5, -0.5, 0, ..

    W_v is orthogonal, and W_r, W_k and W_o are zero, so that every output is zero at first. Layers learn
    their places when a model calls `RWKV4.share`; a layer that stands alone is the first of one. w is marked
    as group "transition" without weight decay. The released code has no weight decay. It trains log w with
    twice and u with three times the learning rate of the other parameters.

    Args:
        d_model: width of the sequence.
        d_state: width of r, k, v, w and u; None is `d_model`.
        token_shift: whether r, k and v see the input of the step before.
        bonus: whether the current token has a weight of its own, exp(u + k_t).
        receptance: whether wkv is multiplied by sigmoid(r).
        zero_init: whether W_r, W_k and W_o start at zero; else orthogonal, as W_v.

    Raises:
        ValueError: a `d_state` below 1.

    Source:
        RWKV (Peng and others, 2023): time mixing, and the appendix on numerical stability; the initialisation
        comes from the authors' RWKV-LM.

    Example:
        >>> mixer = RWKV4(64)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.last.shape, state.sums.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 64]), torch.Size([2, 128]))
    """

    recurrence = "scan"

    def __init__(
        self,
        d_model: int,
        *,
        d_state: int | None = None,
        token_shift: bool = True,
        bonus: bool = True,
        receptance: bool = True,
        zero_init: bool = True,
    ) -> None:
        super().__init__(d_model)
        at_least(1, d_state=d_state, or_none=True)
        d_state = d_model if d_state is None else d_state
        self.d_state, self.token_shift = d_state, token_shift
        # a projection that widens keeps the size of each channel
        wide, first = math.sqrt(max(1, d_state / d_model)), 0.0 if zero_init else 1.0
        self.r = orthogonal_linear(d_model, d_state, gain=first * wide) if receptance else None
        self.k = orthogonal_linear(d_model, d_state, gain=first * wide)
        self.v = orthogonal_linear(d_model, d_state, gain=wide)
        self.out = orthogonal_linear(d_state, d_model, gain=first * math.sqrt(max(1, d_model / d_state)))
        shifted = (receptance and token_shift, token_shift, token_shift)
        self.mu_r, self.mu_k, self.mu_v = (
            nn.Parameter(torch.empty(d_model)) if on else None for on in shifted
        )
        self.log_w = nn.Parameter(torch.empty(d_state))
        mark(self, "log_w", float32=True)
        self.u = nn.Parameter(math.log(0.3) + 0.5 * zigzag(d_state)) if bonus else None
        self.share([self])

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return y, and an `RWKV4State`."""
        state = self.init_state(x.shape[0], device=x.device) if state is None else state
        x_r = x_k = x_v = x
        last = None
        if self.token_shift:
            past_x, last = token_shift(x, state.last, reset=reset)
            mus = (self.mu_r, self.mu_k, self.mu_v)
            x_r, x_k, x_v = (x if mu is None else past_x + mu * (x - past_x) for mu in mus)
        k, v = self.k(x_k).to(self.state_dtype), self.v(x_v).to(self.state_dtype)
        # -w
        log_decay = stable_exponential(self.log_w.to(self.state_dtype))
        # no gradient passes m and p, which cancel
        earlier, m, largest = maxima_around_steps(k, state.largest, log_decay, reset=reset)
        log_fade, weight = earlier + log_decay - m, (k - m).exp()
        fade, update = log_fade.exp(), torch.cat([weight * v, weight], -1)
        sums, end = scan(torch.cat([fade, fade], -1), update, state=state.sums, reset=reset)
        if self.u is not None:
            log_now = self.u.to(k.dtype) + k
            p = torch.maximum(earlier, log_now.detach())
            past, now = (earlier - p).exp(), (log_now - p).exp()
            before, _ = token_shift(sums, state.sums, reset=reset)
            sums = torch.cat([past, past], -1) * before + torch.cat([now * v, now], -1)
            note(past=past, now=now)
        a, b = sums.chunk(2, -1)
        note(log_decay=log_decay, weight=weight, log_fade=log_fade, b=b)
        wkv = (a / b).to(x.dtype)
        if self.r is not None:
            r = torch.sigmoid(self.r(x_r))
            note(r=r)
            wkv = r * wkv
        return self.out(wkv), RWKV4State(last, end, largest)

    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> RWKV4State:
        """Return zeros, and largest exponents of -inf."""
        sums = scan.empty_state(batch, 2 * self.d_state, **self.factory_kwargs(device))
        last = sums.new_zeros(batch, self.d_model) if self.token_shift else None
        return RWKV4State(last, sums, sums.new_full((batch, self.d_state), -torch.inf))

    def token_mixing(self, x: Tensor, *, reset: Tensor | None = None) -> Tensor:
        """Return the mean over channels of the weights that v is multiplied by, sigmoid(r) among them."""
        _, notes = self._memory(x, reset)
        b = notes["b"]
        read = notes.get("r", torch.ones_like(b)).to(b.dtype) / b / self.d_state
        now = torch.zeros_like(b)
        bonus = None
        if self.u is not None:
            read, now, bonus = read * notes["past"], read * notes["now"], b.new_zeros(1, self.d_state)
        # one head of all channels
        heads = (part[:, :, None] for part in (read, notes["weight"], notes["log_fade"]))
        return gate_loop_matrix(*heads, bonus=bonus)[:, 0] + torch.diag_embed(now.sum(-1))

    @classmethod
    @torch.no_grad()
    def share(cls, layers: "Sequence[RWKV4]") -> None:
        """Start mu and log w of each layer from its place in the stack."""
        for layer, mixer in enumerate(layers):
            place = Place(layer, len(layers))
            mixer.log_w.copy_(first_decay(mixer.d_state, place, low=SLOWEST, high=FASTEST))
            share = ramp(mixer.d_model, place.height)
            starts = (ramp(mixer.d_model, 0.5 * place.height), share, share + 0.3 * place.depth)
            for mu, start in zip((mixer.mu_r, mixer.mu_k, mixer.mu_v), starts, strict=True):
                if mu is not None:
                    mu.copy_(start)
