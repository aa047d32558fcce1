"""GSS: Long Range Language Modeling via Gated State Spaces (Mehta, Gupta, Cutkosky and Neyshabur, 2022).

    u_t = LayerNorm(GELU(W_u x_t + b_u))     v_t = GELU(W_v x_t + b_v)
    Lambda = -exp(Lambda_re) + i exp(Lambda_im)
    K_l = Re(sum_n C_n (exp(lambda_n) - 1) / lambda_n exp(lambda_n l))
    y = K * u + D u
    o_t = W_o ((W_c y_t + b_c) * v_t) + b_o

x is the input, t time, and o the output. u, with a quarter of the channels, is the input of the state space;
v, with four times as many, is the gate. K is the kernel and y the output of a channel of the state space.
Lambda is the same for all channels; each channel has a row C and a number D. The state space is DSS's with
exponentials (`linrec.mixers.dss`) and steps of 1. As a recurrence, h_t = exp(Lambda) h_{t-1} + b u_t and y_t
= Re(C h_t) + D u_t, with b the fraction.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from linrec.nn.mixer import Mixer, State
from linrec.nn.norms import Norm, make_norm
from linrec.nn.parameters import mark
from linrec.nn.state_space import add_transition
from linrec.ops.diagonal_ssm import diagonal_ssm
from linrec.ops.long_conv import discretize_diagonal
from linrec.rules import at_least

__all__ = ["GSS"]


class GSS(Mixer):
    """o_t = W_o ((W_c DSS(u)_t + b_c) * v_t) + b_o: a narrow state space, and a wide gate behind it.

    Filtering over long sequences takes most of the time and has `d_model` / 4 channels. Products of matrices
    are cheap on accelerators and have 4 `d_model` channels. The gate mixes channels too, so the layer stands
    alone in its block: `ModelConfig(mixer="gss", channel_mixing="none")`.

    When training starts, logarithms of both parts of Lambda, both parts of C, and D are standard normal: the
    paper needs no HiPPO. Lambda is marked as group "transition" without weight decay.

    Args:
        d_model: width of the sequence, E of the paper.
        d_inner: channels of the gate, F. None is 4 `d_model`.
        d_ssm: channels of the state space, H. None is `d_model` / 4, at least 1.
        d_state: N, complex numbers of the state of each of these.
        norm: of u, "layer", "rms" or "none".
        bias: whether the projections have biases.
        mode: "auto", "convolution", "recurrent" or "scan"; see `linrec.ops.diagonal_ssm`.

    Raises:
        ValueError: a width or a `d_state` below 1, or an unknown norm.

    Source:
        Mehta and others (2022), the pseudocode of the layer, of its state space and of the kernel.

    Example:
        >>> mixer = GSS(16, d_state=8)
        >>> y, state = mixer(torch.zeros(2, 50, 16))
        >>> y.shape, state.shape, state.dtype
        (torch.Size([2, 50, 16]), torch.Size([2, 4, 8]), torch.complex64)
    """

    recurrence = "diagonal_ssm"

    Lambda_re: Tensor
    Lambda_im: Tensor

    def __init__(
        self,
        d_model: int,
        *,
        d_inner: int | None = None,
        d_ssm: int | None = None,
        d_state: int = 512,
        norm: Norm = "layer",
        bias: bool = True,
        mode: str = "auto",
    ) -> None:
        super().__init__(d_model)
        diagonal_ssm.operator.check_mode(mode)
        at_least(1, d_state=d_state)
        at_least(1, d_inner=d_inner, d_ssm=d_ssm, or_none=True)
        d_inner = 4 * d_model if d_inner is None else d_inner
        d_ssm = max(d_model // 4, 1) if d_ssm is None else d_ssm
        self.d_ssm, self.d_state, self.mode = d_ssm, d_state, mode
        self.u = nn.Linear(d_model, d_ssm, bias=bias)
        self.v = nn.Linear(d_model, d_inner, bias=bias)
        self.norm = make_norm(norm, d_ssm)
        add_transition(self, Lambda_re=torch.randn(d_state), Lambda_im=torch.randn(d_state))
        self.C = nn.Parameter(torch.randn(d_ssm, d_state, 2))
        # of single channels, not a matrix
        mark(self, "C", group="channel", weight_decay=True)
        self.D = nn.Parameter(torch.randn(d_ssm))
        self.c = nn.Linear(d_ssm, d_inner, bias=bias)
        self.out = nn.Linear(d_inner, d_model, bias=bias)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return o, and h (b, d_ssm, N), complex."""
        u, v = self.norm(functional.gelu(self.u(x))).to(x.dtype), functional.gelu(self.v(x))
        dtype = self.state_dtype
        Lambda = torch.complex(-self.Lambda_re.to(dtype).exp(), self.Lambda_im.to(dtype).exp())
        a, b = discretize_diagonal(Lambda[None], torch.ones_like(Lambda)[None], 1.0)
        C = torch.view_as_complex(self.C.to(dtype))
        y, state = diagonal_ssm(u, a, b, C, state=state, reset=reset, mode=self.mode)
        y = y + self.D.to(y.dtype) * u
        return self.out(self.c(y) * v), state
