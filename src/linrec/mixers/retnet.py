"""RetNet: Retentive Network, a Successor to Transformer for Large Language Models (Sun and others, 2023).

    Q = X W_Q    K = X W_K / sqrt(dk)    V = X W_V                    (2, 5)
    gamma = 1 - 2^(-5 - arange(0, h))                                    (8)
    S_n = gamma e^(i theta) S_{n-1} + conj(K_n)^T V_n                 (4, 6)
    Retention(X_n) = Re(Q_n S_n)                                      (4, 6)
    Y = GroupNorm_h(Concat(head_1, .., head_h))                          (8)
    MSR(X) = (swish(X W_G) * Y) W_O                                      (8)

X input, Q query, K key, V value, gamma decay of a head, theta phases in radians per step, S state, n time. Q
and K are read as complex numbers, the channels 2j and 2j + 1 being the parts of number j: Q_n e^(in theta)
conj(K_m e^(im theta)) then depends on n - m alone, and the turn of eq. 5 becomes a phase of the transition.
"""

import math
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from linrec.nn.decays import multi_scale_decay
from linrec.nn.head_sizes import heads_of, split_width
from linrec.nn.mixer import Mixer, State, Transitions
from linrec.nn.norms import Norm, gated, make_norm
from linrec.nn.projections import projected, xavier_linear
from linrec.nn.rotary import Rotary, rotary_gate_loop
from linrec.ops.gate_loop import gate_loop
from linrec.rules import at_least, positive, require

__all__ = ["RetNet"]

Decay = Literal["multi_scale", "log_spaced", "single", "none"]

# of RetNet's language models, section 3.1
CHANNELS_PER_HEAD = 256
# of the released code, for all matrices but the last
GAIN = 2**-2.5


class RetNet(Mixer):
    """S_n = gamma e^(i theta) S_{n-1} + conj(K_n)^T V_n, one constant gamma per head (eq. 4, 6, 8).

    The defaults are the paper's layer. Its heads are wide; a model of a few hundred channels has one head and
    so one decay, unless `n_heads` says otherwise.

    | the paper's ablation (section 3.6) | argument |
    |---|---|
    | without swish gate | `output_gate=False` |
    | without GroupNorm | `output_norm="none"` |
    | without gamma decay | `decay="none"`: gamma = 1 |
    | without multi-scale decay | `decay="single"`: gamma = 127/128 in all heads |
    | reduced head dimension | `n_heads` = `d_model` / 64 |

    The paper's language models have `decay="log_spaced"`,
    gamma = 1 - exp(linspace(log(1/32), log(1/512), h)), the same range in models of all sizes (section 3.1).

    Phases are the same in every head, theta_j = base^(-j / (dk/2 - 1)) for j = 0 .. dk/2 - 1, as the released
    code has them. Of GroupNorm only the normalisation of each head is here: W_O holds its scale. It makes the
    size of the scores meaningless, so the divisions by which the released code bounds them in half precision
    are left out.

    When training starts, W_Q, W_K, W_V and W_G are Xavier uniform with gain 2^-2.5 and W_O with gain
    `out_gain`. The paper gives no gains. With the default, 1, norm and gains match the code that the authors
    released with the paper.

    | released code | arguments |
    |---|---|
    | torchscale, the current release | `output_norm="rms", out_gain=0.5` |
    | flash-linear-attention | `output_norm="rms", norm_eps=1e-5, rotary_base=10_000 ** (1 - 2 / dk)` |

    flash-linear-attention turns by theta_j = 10000^(-2j / dk), and pairs channel j with channel j + dk/2:
    reorder the rows of its W_Q and W_K. Multiply the columns of its W_O by the weights of its norm.

    Args:
        d_model: width of the sequence, and of Q and K over all heads.
        n_heads: heads h. None is the largest number that divides `d_model` and leaves at least 256 channels
            to each head, or 1.
        d_v: width of V over all heads. None is 2 `d_model`.
        decay: "multi_scale" (eq. 8), "log_spaced" (section 3.1), "single" or "none".
        rotation: whether states turn by theta; without it they are real.
        rotary_base: base of the phases.
        output_norm: of each head, "layer" (GroupNorm), "rms" (the current released code) or "none".
        norm_eps: added to the variance or the mean square in the norm.
        output_gate: whether Y is multiplied by swish(X W_G).
        out_gain: gain of W_O when training starts.

    Raises:
        ValueError: widths that the heads do not divide, an odd number of channels per head with `rotation`,
            a `rotary_base` below 1, a number out of range, or an unknown name of a variant.

    Source:
        RetNet (Sun and others, 2023), section 2, eq. 2 to 8. Constants missing in the paper come from the
        authors' torchscale.

    Example:
        >>> mixer = RetNet(64, n_heads=4)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.shape, state.dtype
        (torch.Size([2, 10, 64]), torch.Size([2, 4, 8, 32]), torch.complex64)
    """

    recurrence = "gate_loop"
    of_one_input = "q", "k", "v", "gate"

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int | None = None,
        d_v: int | None = None,
        decay: Decay = "multi_scale",
        rotation: bool = True,
        rotary_base: float = 10_000.0,
        output_norm: Norm = "layer",
        norm_eps: float = 1e-6,
        output_gate: bool = True,
        out_gain: float = 1.0,
    ) -> None:
        super().__init__(d_model)
        at_least(1, rotary_base=rotary_base, cure="RetNet's is 10000.")
        positive(norm_eps=norm_eps, out_gain=out_gain)
        d_v = 2 * d_model if d_v is None else d_v
        self.n_heads, self.d_key = split_width("d_model", d_model, n_heads, least=CHANNELS_PER_HEAD)
        self.d_value = heads_of("d_v", d_v, self.n_heads)
        require(
            not rotation or self.d_key % 2 == 0,
            f"`d_model` / `n_heads` must be even where pairs of channels turn; got {d_model} / "
            f"{self.n_heads} = {self.d_key}. Choose another `n_heads`, or `rotation=False`.",
        )
        self.decay = decay
        # Rotary's angles are base^(-2j / dk)
        half = self.d_key // 2
        base = rotary_base ** (half / max(1, half - 1))
        self.rotary = Rotary(self.d_key, base=base) if rotation else None
        self.norm = make_norm(output_norm, self.d_value, eps=norm_eps, affine=False)

        self.q = xavier_linear(d_model, d_model, gain=GAIN)
        self.k = xavier_linear(d_model, d_model, gain=GAIN)
        self.v = xavier_linear(d_model, d_v, gain=GAIN)
        self.gate = xavier_linear(d_model, d_v, gain=GAIN) if output_gate else None
        self.out = xavier_linear(d_v, d_model, gain=out_gain)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return y, and S (b, h, dk / 2, dv), complex; without `rotation`, S (b, h, dk, dv), real."""
        *qkv, g = projected(x, self.q, self.k, self.v, self.gate)
        q, k, v = (part.unflatten(-1, (self.n_heads, -1)) for part in qkv)
        k, like = k * self.d_key**-0.5, self.factory_kwargs(x.device)
        log_gamma = None if self.decay == "none" else _DECAYS[self.decay](self.n_heads, **like)
        if self.rotary is None:
            y, state = gate_loop(q, k, v, log_gamma, state=state, reset=reset)
        else:
            y, state = rotary_gate_loop(self.rotary, q, k, v, log_gamma, state=state, reset=reset)
        return self.out(gated(self.norm(y).flatten(-2).to(x.dtype), g)), state

    def transitions(self, x: Tensor) -> Transitions | None:
        """Return gamma and theta, constant in time; gamma is 1 with `decay="none"`."""
        return super().transitions(x) or Transitions.ones(self.d_model, **self.factory_kwargs(x.device))


def log_spaced_decay(
    n_heads: int, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> Float[Tensor, "h"]:
    """log gamma, gamma = 1 - exp(linspace(log(1/32), log(1/512), h)): 32 to 512 steps, however many heads.

    Source:
        RetNet (Sun and others, 2023), section 3.1.
    """
    steps = torch.linspace(math.log(32), math.log(512), n_heads, dtype=dtype, device=device).exp()
    return torch.log1p(-1 / steps)


def single_decay(
    n_heads: int, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> Float[Tensor, "h"]:
    """log gamma, gamma = 127/128 in all heads: they forget over 128 steps.

    Source:
        RetNet (Sun and others, 2023), section 3.6, the ablation without multi-scale decay.
    """
    return torch.full((n_heads,), 127 / 128, dtype=dtype, device=device).log()


_DECAYS = {"multi_scale": multi_scale_decay, "log_spaced": log_spaced_decay, "single": single_decay}
