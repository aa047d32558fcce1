"""DSS: Diagonal State Spaces are as Effective as Structured State Spaces (Gupta, Gu and Berant, 2022).

    DSS-exp      Lambda = -exp(Lambda_re) + i Lambda_im
                 K_l = Re(sum_n w_n (exp(dt lambda_n) - 1) / lambda_n exp(dt lambda_n l))
    DSS-softmax  Lambda = Lambda_re + i Lambda_im
                 K_l = Re(sum_n w_n / lambda_n softmax_l(dt lambda_n (0 .. L - 1)))
    no scale     Lambda as DSS-exp
                 K_l = Re(sum_n w_n exp(dt lambda_n l))
    y = K * u + D u
    o_t = W_o GELU(y_t) + b_o

u input of a channel, K its kernel, y its output, o output of the layer; Lambda diagonal of the transition,
the same for all channels, dt step size, w a row and D a number per channel. As a recurrence, for every
kernel, x_t = exp(dt Lambda) x_{t-1} + b u_t and y_t = Re(w x_t) + D u_t, where b is the factor between w_n
and the powers of exp(dt lambda_n).
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from linrec.nn.mixer import Mixer, State
from linrec.nn.parameters import mark
from linrec.nn.state_space import add_transition, log_steps, spectrum
from linrec.ops.diagonal_ssm import diagonal_ssm, growing_ssm
from linrec.ops.diagonal_ssm.torch import GrowingSSM
from linrec.ops.long_conv import discretize_diagonal
from linrec.ops.long_conv.discretization import softmax_factors
from linrec.rules import at_least, require

__all__ = ["DSS"]

Kernel = Literal["exp", "softmax", "exp_no_scale"]
Spectrum = Literal["legs", "lin", "inv"]


class DSS(Mixer):
    """y = K * u + D u, K_l = Re(sum_n w_n b_n exp(dt lambda_n l)) per channel, then GELU and a projection.

    Each channel has N complex numbers, which are not conjugate pairs; its output is the real part of a sum.
    With the softmax, the taps of an entry add up to w_n / lambda_n over L steps, and the real part of Lambda
    is free: a negative real part weighs recent steps, a positive one the steps L steps ago. It starts at
    -1/2. Where training makes it positive, states of sequences much longer than L grow without bound; "exp"
    cannot do that. States are scaled with time, so that outputs of up to L steps are exact in every mode,
    even where an entry grows fast. The returned state is e^(g (L - 1) / 2) x with g = max(dt Re lambda_n, 0).
    In float32, a later call can start from the state while g L is below 170.

    The released code has no L: it takes the length of each input. A mixer that streams cannot know the
    length, so L is fixed: set `length` to the length of the sequences in training. With the default, outputs
    of 64 steps differ from the released code by about a quarter.

    Lambda starts as the N eigenvalues above the real axis of the normal part of HiPPO-LegS with 2 N
    coefficients; parts of w and D are standard normal, steps log-uniform. Lambda, the steps and w are marked
    as group "transition" without weight decay: the authors train all parameters of a kernel without weight
    decay.

    | the paper's variant | argument |
    |---|---|
    | DSS-exp, DSS-softmax | `kernel="exp"`, "softmax" |
    | DSS-exp-no-scale, of the paper's ablation: inputs are not scaled by the step | `kernel="exp_no_scale"` |
    | the released code: steps of their own for decays and for angles | `separate_steps=True` |

    Args:
        d_model: width of the sequence, and channels.
        d_state: N, complex numbers of each channel's state.
        kernel: "softmax", "exp" or "exp_no_scale".
        length: L, steps of the softmax: the length of the sequences in training. None is 1024; with the other
            kernels, which have no such number, it must be None.
        init: where Lambda starts, "legs", "lin" or "inv"; see `linrec.nn.state_space.spectrum`.
        dt_min: smallest step size when training starts.
        dt_max: largest step size when training starts.
        separate_steps: whether the real and the imaginary part of Lambda have steps of their own, which start
            equal: exp(dt_1 Re lambda_n + i dt_2 Im lambda_n).
        mode: "auto", "convolution", "recurrent" or "scan"; see `linrec.ops.diagonal_ssm`.

    Raises:
        ValueError: an unknown name, a `d_state` or `length` below 1, a `length` with "exp", or a step size
            that is not positive.

    Source:
        DSS (Gupta, Gu and Berant, 2022): proposition 1 for the kernels, and its section on initialisation;
        `separate_steps` and the parameters without weight decay come from the released code.

    Example:
        >>> mixer = DSS(16, d_state=8)
        >>> y, state = mixer(torch.zeros(2, 50, 16))
        >>> y.shape, state.shape, state.dtype
        (torch.Size([2, 50, 16]), torch.Size([2, 16, 8]), torch.complex64)
    """

    dt_log: Tensor
    Lambda_re: Tensor
    Lambda_im: Tensor

    def __init__(
        self,
        d_model: int,
        *,
        d_state: int = 64,
        kernel: Kernel = "softmax",
        length: int | None = None,
        init: Spectrum = "legs",
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        separate_steps: bool = False,
        mode: str = "auto",
    ) -> None:
        super().__init__(d_model)
        diagonal_ssm.operator.check_mode(mode)
        require(
            length is None or (kernel == "softmax" and length >= 1),
            f"`length` must be the steps of the softmax, at least 1, or None; got {length} with "
            f"`kernel={kernel!r}`. Only the softmax has a length.",
        )
        at_least(1, d_state=d_state)
        self.recurrence = "growing_ssm" if kernel == "softmax" else "diagonal_ssm"
        self.d_state, self.separate_steps, self.mode = d_state, separate_steps, mode
        self.kernel, self.length = kernel, length or 1024 if kernel == "softmax" else None

        # of 2 N eigenvalues in conjugate pairs, N are above the real axis
        Lambda, _ = spectrum(init, 2 * d_state)
        dt_log = log_steps(d_model, dt_min, dt_max)
        real = (Lambda.real if kernel == "softmax" else (-Lambda.real).log()).to(dt_log)
        steps = dt_log.repeat(2, 1) if separate_steps else dt_log
        add_transition(self, dt_log=steps, Lambda_re=real, Lambda_im=Lambda.imag.to(dt_log))
        self.w = nn.Parameter(torch.randn(d_model, d_state, 2))
        mark(self, "w")
        self.D = nn.Parameter(torch.randn(d_model))
        self.out = nn.Linear(d_model, d_model)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return o, and x of the recurrence (b, d_model, N), complex; with "softmax", scaled."""
        u, dtype = x, self.state_dtype
        real, imaginary = self.Lambda_re.to(dtype), self.Lambda_im.to(dtype)
        Lambda = torch.complex(real if self.kernel == "softmax" else -real.exp(), imaginary)
        dt = self.dt_log.to(dtype).exp()[..., None]
        A, B = Lambda, torch.ones_like(Lambda)
        if self.separate_steps:
            # a step of 1 of dt_1 Re(Lambda) + i dt_2 Im(Lambda); kernels keep their factor 1 / lambda_n
            A = torch.complex(dt[0] * Lambda.real, dt[1] * Lambda.imag)
            B, dt = A / Lambda, torch.ones_like(dt[0])
        w = torch.view_as_complex(self.w.to(dtype))
        if self.length is None:
            a, b = discretize_diagonal(A, B, dt)
            b = torch.ones_like(b) if self.kernel == "exp_no_scale" else b
            y, state = diagonal_ssm(u, a, b, w, state=state, reset=reset, mode=self.mode)
        else:
            # exp(dt Lambda) = a e^growth
            a, b, growth = softmax_factors(A, B, dt, self.length)
            y, state = growing_ssm(GrowingSSM(u, a, growth, b, w, self.length - 1, state, reset), self.mode)
        y = y + self.D.to(y.dtype) * u
        return self.out(functional.gelu(y)), state
