"""LRU: Resurrecting Recurrent Neural Networks for Long Sequences (Orvieto and others, 2023).

    Lambda = diag(exp(-exp(nu_log) + i exp(theta_log)))                             (3.3)
    gamma = exp(gamma_log), which starts at sqrt(1 - |Lambda|^2)                    (3.4)
    h_t = Lambda h_{t-1} + gamma * (B x_t)                                     (3.4, A)
    y_t = Re(C h_t) + D * x_t                                                  (3.2, A)

x input, h hidden state, y output (the paper's u, x, y); Lambda diagonal of the transition, exp(-exp(nu_log))
its magnitudes and exp(theta_log) its phases in radians per step, gamma normalisation of the input, B and C
complex matrices, D a real factor per channel. Numbers are the paper's sections; A is its pseudocode.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from linrec.nn.gates import GateLinear, stable_exponential
from linrec.nn.mixer import Mixer, State
from linrec.nn.parameters import mark
from linrec.ops.inspection import note
from linrec.ops.scan import scan
from linrec.rules import at_least, require

__all__ = ["LRU"]


class LRU(Mixer):
    """h_t = Lambda h_{t-1} + gamma * (B x_t), y_t = Re(C h_t) + D * x_t with Lambda constant in time.

    The mixer is the recurrence alone. The rest of the paper's layer belongs to the block: the norm before the
    recurrence, the nonlinearity and the gated linear unit after the recurrence, and the skip connection.

    When training starts, the transitions are spread evenly over the area of a ring in the complex plane,
    r_min <= |lambda| <= r_max and 0 <= arg lambda <= max_phase. B, C and gamma start such that white noise of
    unit variance makes states and Re(C h) of unit variance: the parts of B have variance 1 / (2 d_model), the
    parts of C have variance 1 / d_state, and D is standard normal. Longer memory starts nearer to the circle:
    r_min = 0.9, r_max = 0.999, and a small max_phase such as pi / 10 where the sequence is very long.

    | HGRN's ablation (table 8) | argument |
    |---|---|
    | LRU | the defaults |
    | LRU with forget gate | `forget_gate=True`: abs(lambda_t) = exp(-exp(W x_t + nu_log)) |

    HGRN describes the LRU with forget gate in words, without a formula. Here, only the magnitude of Lambda
    depends on the input. The constant nu_log becomes the bias of a projection W, which is initialised by
    torch's Linear. Phases and gamma stay constants. At an input of zero, the state decays as in the LRU.

    With irregular steps, the transition is Lambda^dt: the logarithm of the magnitude and the phase are
    multiplied by `dt`. gamma stays the paper's, for steps of length 1, so every input has the same weight.

    B and C are real matrices of pairs, so that optimisers and autocast see real numbers. Rows 2j and 2j + 1
    of `B` are the real and the imaginary part of B's row j. Columns 2j and 2j + 1 of `C` are the real part
    and minus the imaginary part of C's column j. Lambda, gamma and B are marked as group "transition" without
    weight decay; ports of the paper train these parameters with a smaller learning rate.

    Args:
        d_model: width of the sequence.
        d_state: complex numbers of the state N. None is `d_model`.
        r_min: smallest abs(lambda) when training starts.
        r_max: largest abs(lambda) when training starts.
        max_phase: largest phase when training starts, in radians per step.
        forget_gate: whether abs(lambda) depends on the input.

    Raises:
        ValueError: a `d_state` below 1, radii without 0 <= r_min < r_max <= 1, or a `max_phase` out of
            (0, 2 pi].

    Source:
        LRU (Orvieto et al., 2023), sections 3.2 (ring), 3.3 (exponential), 3.4 (gamma), appendix A; HGRN
        (Qin, Yang and Zhong, 2023), section 4.3, table 8.

    Example:
        >>> mixer = LRU(64, d_state=32, r_min=0.9, r_max=0.999)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.shape, state.dtype
        (torch.Size([2, 10, 64]), torch.Size([2, 32]), torch.complex64)
    """

    recurrence = "scan"
    takes_dt = True

    def __init__(
        self,
        d_model: int,
        *,
        d_state: int | None = None,
        r_min: float = 0.0,
        r_max: float = 1.0,
        max_phase: float = math.tau,
        forget_gate: bool = False,
    ) -> None:
        super().__init__(d_model)
        at_least(1, d_state=d_state, or_none=True, cure="None is `d_model`.")
        require(
            0 <= r_min < r_max <= 1,
            f"`r_min` and `r_max` must be radii with 0 <= r_min < r_max <= 1; got {r_min} and {r_max}. "
            "The paper's are 0 and 1, or 0.9 and 0.999 for long memory.",
        )
        require(
            0 < max_phase <= math.tau,
            f"`max_phase` must be a phase in radians in (0, 2 pi]; got {max_phase}. 2 pi is the whole ring.",
        )
        self.d_state = d_model if d_state is None else d_state

        nu_log, theta_log = _ring(self.d_state, r_min, r_max, max_phase)
        self.nu_log: nn.Parameter | GateLinear
        if forget_gate:
            self.nu_log = mark(GateLinear(d_model, self.d_state))
            with torch.no_grad():
                self.nu_log.bias.copy_(nu_log)
        else:
            self.nu_log = nn.Parameter(nu_log)
            mark(self, "nu_log", float32=True)
        self.theta_log = nn.Parameter(theta_log)
        # log sqrt(1 - |lambda|^2), which keeps its digits near |lambda| = 1
        gamma_log = torch.log(-torch.expm1(2 * stable_exponential(nu_log))) / 2
        self.gamma_log = nn.Parameter(gamma_log)
        B = torch.randn(2 * self.d_state, d_model) / math.sqrt(2 * d_model)
        self.B = nn.Parameter(B)
        mark(self, "B")
        mark(self, "theta_log", "gamma_log", float32=True)
        self.C = nn.Parameter(torch.randn(d_model, 2 * self.d_state) / math.sqrt(self.d_state))
        self.D = nn.Parameter(torch.randn(d_model))

    def mix(
        self, x: Tensor, state: State, reset: Tensor | None, dt: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Return y, and h (b, d_state)."""
        dtype = self.state_dtype
        nu_log = self.nu_log.to(dtype) if isinstance(self.nu_log, Tensor) else self.nu_log(x)
        theta, gamma = self.theta_log.to(dtype).exp(), self.gamma_log.to(dtype).exp()
        elapsed = torch.ones_like(theta) if dt is None else dt.to(dtype)[..., None]
        phase = elapsed * theta
        Lambda = (elapsed * stable_exponential(nu_log)).exp() * torch.polar(torch.ones_like(phase), phase)
        # gamma scales the rows of B, which are fewer than the steps of x
        B = (gamma.repeat_interleave(2)[:, None] * self.B).to(self.B.dtype)
        Bx = functional.linear(x, B).to(dtype).unflatten(-1, (-1, 2))
        note(gate=gamma, phase=theta)
        h, state = scan(Lambda, torch.view_as_complex(Bx), state=state, reset=reset)
        y = functional.linear(torch.view_as_real(h).flatten(-2).to(x.dtype), self.C)
        return y + self.D * x, state


def _ring(n: int, r_min: float, r_max: float, max_phase: float) -> tuple[Tensor, Tensor]:
    """nu_log and theta_log of n transitions, uniform on the area of the ring (lemma 3.2)."""
    u_1, u_2 = torch.rand(2, n)
    # zero and one are drawn now and then, and have no logarithm of a logarithm
    eps = torch.finfo(u_1.dtype).eps
    nu = -torch.log((u_1 * (r_max**2 - r_min**2) + r_min**2).clamp(eps, 1 - eps)) / 2
    return torch.log(nu), torch.log(max_phase * u_2.clamp(min=eps))
