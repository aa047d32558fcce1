"""S4: Efficiently Modeling Long Sequences with Structured State Spaces (Gu, Goel and Ré, 2022).

    A = diag(Lambda) - P P^*     Lambda = -exp(A_log) + i A_imag
    Abar = (I - dt/2 A)^-1 (I + dt/2 A)     Bbar = (I - dt/2 A)^-1 dt B
    x_t = Abar x_{t-1} + Bbar u_t     y_t = 2 Re(C x_t) + D u_t
    o_t = W GELU(y_t) + b

u input of a channel, x state with one entry of each conjugate pair, y output of the channel, o output of the
layer; Lambda and P the normal and the low-rank part of A, B a column, C a row, D a number and dt the step
size, all per channel. As a convolution, y = K * u + D u with K_l = 2 Re(C Abar^l Bbar). That P stands at both
sides and that the real part of Lambda is negative keeps A stable: SaShiMi (Goel, Gu, Donahue and Ré, 2022).
"""

import math
from typing import Literal

import torch
from torch import Tensor, nn

from linrec.hippo import StateSpace, discretize, normal_plus_low_rank
from linrec.nn.channel_mixing import Output, PositionWise
from linrec.nn.mixer import Mixer, State
from linrec.nn.parameters import mark
from linrec.nn.state_space import Measure, Start, add_transition, log_steps, per_channel, released_start
from linrec.ops.dense_ssm import dense_ssm
from linrec.ops.dplr_ssm import dplr_ssm
from linrec.ops.long_conv.discretization import bilinear_low_rank
from linrec.rules import COUNT, at_least, divisor, require

__all__ = ["S4"]

Discretization = Literal["bilinear", "zoh"]

# the normal parts of "legt" and "fout" do not decay, and have no logarithm
SMALLEST_DECAY = 1e-4


class S4(Mixer):
    """x_t = Abar x_{t-1} + Bbar u_t, y_t = 2 Re(C x_t) + D u_t with A normal plus low rank, then GELU and W.

    The layer is trained as a convolution and streamed as a recurrence, with the same results; `mode` chooses.
    After the bilinear transform Abar is diagonal plus low rank again, and `linrec.ops.dplr_ssm` runs it: a
    step costs N numbers per channel, and `linrec.ops.cauchy_kernel` makes the kernel from its spectrum,
    exactly for any length. With "zoh" Abar is a whole matrix, and `linrec.ops.dense_ssm` runs it.

    The state is kept as real numbers, the real parts of all entries and then the imaginary ones. In these, A
    has the symmetric part diag(Re Lambda) - 2 P P^T, which is negative: A and every discretisation stay
    stable during training.

    | the paper's ablation | argument |
    |---|---|
    | A, B and the steps stay where they start | `learn_transition=False` |

    | the released code's | argument |
    |---|---|
    | A and B shared by channels, `n_ssm` | `n_ssm` |
    | several outputs for each channel, `channels` | `n_outputs` |
    | half of A and B of "legt" and "fout", and a clipped B | `start="released"` |

    A and B start as HiPPO's, in the basis where its normal part is diagonal; C is normal with variance 1, D
    normal, and steps are log-uniform. A, B and the steps are marked as group "transition" without weight
    decay.

    Args:
        d_model: width of the sequence, and channels.
        d_state: N, numbers of the real state of each channel; even.
        init: measure of HiPPO that A and B start from, "legs", "legt" or "fout".
        discretization: "bilinear" or "zoh".
        dt_min: smallest step size when training starts.
        dt_max: largest step size when training starts.
        learn_transition: whether A, B and the steps are learned.
        activation: whether y goes through GELU.
        output: "linear", "glu" or "none", the map that mixes the channels at the end. Later releases have
            "glu".
        mode: "auto", "convolution" or "recurrent".
        n_ssm: how many A and B there are; None is `d_model`. Channel c has the A and B of index c mod
            `n_ssm`, and a C, a D and a step size of its own.
        n_outputs: outputs of each channel, with a C and a D each, which the map at the end takes to
            `d_model`.
        start: where A and B start, "paper" or "released"; see `linrec.nn.state_space.released_start`.

    Raises:
        ValueError: an unknown name, a `d_state` that is odd or not positive, a step size that is not
            positive, an `n_ssm` that does not divide `d_model`, or `n_outputs` above 1 without a map.

    Source:
        S4 (Gu, Goel and Ré, 2022); SaShiMi (Goel et al., 2022) for the stable form; How to Train Your HiPPO
        (Gu, Johnson, Timalsina, Rudra and Ré, 2022) for "legt" and "fout".

    Example:
        >>> mixer = S4(16, d_state=8)
        >>> y, state = mixer(torch.zeros(2, 50, 16))
        >>> y.shape, state.shape, state.dtype
        (torch.Size([2, 50, 16]), torch.Size([2, 16, 8]), torch.float32)
    """

    dt_log: Tensor
    A_log: Tensor
    A_imag: Tensor
    P: Tensor
    B: Tensor

    def __init__(
        self,
        d_model: int,
        *,
        d_state: int = 64,
        init: Measure = "legs",
        discretization: Discretization = "bilinear",
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        learn_transition: bool = True,
        activation: bool = True,
        output: Output = "linear",
        mode: str = "auto",
        n_ssm: int | None = None,
        n_outputs: int = 1,
        start: Start = "paper",
    ) -> None:
        super().__init__(d_model)
        # `dense_ssm` has the same modes
        dplr_ssm.operator.check_mode(mode)
        divisor("d_model", d_model, n_ssm=n_ssm, or_none=True)
        at_least(1, most=COUNT, n_outputs=n_outputs)
        require(
            d_state >= 1 and d_state % 2 == 0,
            f"`d_state` must be a positive even number, of conjugate pairs; got {d_state}. "
            f"Pass {max(2, d_state + d_state % 2)}.",
        )
        self.recurrence = "dplr_ssm" if discretization == "bilinear" else "dense_ssm"
        self.d_state, self.discretization, self.mode = d_state, discretization, mode
        self.n_outputs = n_outputs

        steps = log_steps(d_model, dt_min, dt_max)
        Lambda, P, B, _ = (normal_plus_low_rank if start == "paper" else released_start)(init, d_state)
        of_all_channels = {
            "A_log": (-Lambda.real).clamp(min=SMALLEST_DECAY).log(),
            "A_imag": Lambda.imag,
            "P": torch.view_as_real(P),
            "B": torch.view_as_real(B),
        }
        initial = {
            name: torch.stack([tensor.to(steps.dtype)] * (d_model if n_ssm is None else n_ssm))
            for name, tensor in of_all_channels.items()
        }
        add_transition(self, learn=learn_transition, dt_log=steps, **initial)
        # of variance 1, half in either part
        self.C = nn.Parameter(torch.randn(n_outputs * d_model, *self.B.shape[1:]) / math.sqrt(2))
        # of single channels, not a matrix
        mark(self, "C", group="channel", weight_decay=True)
        self.D = nn.Parameter(torch.randn(n_outputs * d_model))
        self.out = PositionWise(d_model, output=output, n_outputs=n_outputs, activation=activation)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return o, and x of the equations (b, n_outputs d_model, N), real."""
        # of all channels for the first output, then for the second
        u, dtype = x if self.n_outputs == 1 else x.repeat(1, 1, self.n_outputs), self.state_dtype
        Lambda = torch.complex(-self.A_log.to(dtype).exp(), self.A_imag.to(dtype))
        P, B, C = (torch.view_as_complex(part.to(dtype)) for part in (self.P, self.B, self.C))
        dt = self.dt_log.to(dtype).exp()
        Lambda, P, B, dt = per_channel(u.shape[-1], Lambda, P, B, dt)
        if self.discretization == "bilinear":
            if state is not None:
                state = torch.complex(*state.to(dtype).chunk(2, -1))
            factors = bilinear_low_rank(Lambda, P, B, dt)
            y, state = dplr_ssm(u, *factors, 2 * C, state=state, reset=reset, mode=self.mode)
            state = torch.cat([state.real, state.imag], -1)
        else:
            # an exponential of A is not diagonal plus low rank: the real system, of real parts and imaginary
            real, imaginary = torch.diag_embed(Lambda.real), torch.diag_embed(Lambda.imag)
            normal = torch.cat([torch.cat([real, -imaginary], -1), torch.cat([imaginary, real], -1)], -2)
            # P^* x of both entries of a pair is twice the real part of one
            P, B = torch.cat([P.real, P.imag], 1), torch.cat([B.real, B.imag], -1)
            C = 2 * torch.cat([C.real, -C.imag], -1)[:, None]
            Abar, Bbar = discretize(StateSpace(normal - 2 * P @ P.mT, B), dt, "zoh")
            y, state = dense_ssm(u, Abar, Bbar, C, state=state, reset=reset, mode=self.mode)
            y = y.squeeze(-1)
        y = y + self.D.to(y.dtype) * u
        return self.out(y), state
