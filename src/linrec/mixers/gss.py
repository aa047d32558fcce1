"""GSS: Long Range Language Modeling via Gated State Spaces (Mehta, Gupta, Cutkosky and Neyshabur, 2022).

    u_t = LayerNorm(GELU(W_u x_t + b_u))     v_t = GELU(W_v x_t + b_v)
    Lambda = -exp(Lambda_re) + i exp(Lambda_im)
    K_l = Re(sum_n C_n (exp(lambda_n) - 1) / lambda_n exp(lambda_n l))
    y = K * u + D u
    o_t = W_o ((W_c y_t + b_c) * v_t) + b_o

x input, u input of the state space, with a quarter of the channels, v gate, with four times as many, K kernel
and y output of a channel of the state space, o output, t time; Lambda is the same for all channels, C a row
and D a number per channel. The state space is DSS's with exponentials (`linrec.mixers.dss`) and steps of 1.
As a recurrence, h_t = exp(Lambda) h_{t-1} + b u_t and y_t = Re(C h_t) + D u_t, with b the fraction.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from linrec.nn.mixer import Mixer, State, Transitions
from linrec.nn.norms import Norm, make_norm
from linrec.nn.parameters import mark
from linrec.ops.diagonal_ssm import OPERATOR, diagonal_ssm
from linrec.ops.inspection import kernel_mixing
from linrec.ops.long_conv import discretize_diagonal, vandermonde_kernel

__all__ = ["GSS"]


class GSS(Mixer):
    """o_t = W_o ((W_c DSS(u)_t + b_c) * v_t) + b_o: a narrow state space, and a wide gate behind it.

    What takes time, filtering over long sequences, has `d_model` / 4 channels; what is cheap on accelerators,
    products of matrices, has 4 `d_model`. With its gate the layer mixes channels too, and stands alone in its
    block: `ModelConfig(mixer="gss", channel_mixing="none")`.

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
        >>> import torch
        >>> mixer = GSS(16, d_state=8)
        >>> y, state = mixer(torch.zeros(2, 50, 16))
        >>> y.shape, state.shape, state.dtype
        (torch.Size([2, 50, 16]), torch.Size([2, 4, 8]), torch.complex64)
    """

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
        OPERATOR.check_mode(mode)
        d_inner = 4 * d_model if d_inner is None else d_inner
        d_ssm = max(d_model // 4, 1) if d_ssm is None else d_ssm
        for name, size in (("d_inner", d_inner), ("d_ssm", d_ssm), ("d_state", d_state)):
            if size < 1:
                raise ValueError(f"`{name}` must be at least 1; got {size}.")
        self.mode = mode
        self.u = nn.Linear(d_model, d_ssm, bias=bias)
        self.v = nn.Linear(d_model, d_inner, bias=bias)
        self.norm = make_norm(norm, d_ssm)
        self.Lambda_re = nn.Parameter(torch.randn(d_state))
        self.Lambda_im = nn.Parameter(torch.randn(d_state))
        for name in ("Lambda_re", "Lambda_im"):
            mark(self, name, group="transition", weight_decay=False)
        self.keep_float32("Lambda_re", "Lambda_im")
        self.C = nn.Parameter(torch.randn(d_ssm, d_state, 2))
        # of single channels, not a matrix
        mark(self, "C", group="channel", weight_decay=True)
        self.D = nn.Parameter(torch.randn(d_ssm))
        self.c = nn.Linear(d_ssm, d_inner, bias=bias)
        self.out = nn.Linear(d_inner, d_model, bias=bias)

    def forward(
        self,
        x: Float[Tensor, "b t d_model"],
        state: State = None,
        *,
        reset: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b t d_model"], Tensor]:
        """Mix `x` over time; see `Mixer.forward`. The state is h of the recurrence, (b, d_ssm, N)."""
        self.check_input(x, reset, state)
        u, v = self.norm(functional.gelu(self.u(x))).to(x.dtype), functional.gelu(self.v(x))
        y, state = diagonal_ssm(u, *self._discrete(), state=state, reset=reset, mode=self.mode)
        y = y + self.D.to(y.dtype) * u
        return self.out(self.c(y) * v), state

    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> Tensor:
        """Zeros (batch, d_ssm, N), complex."""
        device = self.D.device if device is None else device
        dtype = self._state_dtype().to_complex()
        return torch.zeros(batch, *self.C.shape[:2], dtype=dtype, device=device)

    @property
    def state_size(self) -> int:
        """Elements of h: d_ssm N, counting a complex number once."""
        return self.C.shape[0] * self.C.shape[1]

    def transitions(self, x: Float[Tensor, "b t d_model"]) -> Transitions:
        """exp(Lambda) of all channels, constant in time; see `Mixer.transitions`."""
        a, _, C = self._discrete()
        a = a.expand_as(C).flatten()
        return Transitions(a.abs(), a.angle())

    def token_mixing(
        self, x: Float[Tensor, "b t d_model"], *, reset: Bool[Tensor, "b t"] | None = None
    ) -> Float[Tensor, "b t t"]:
        """Mean over channels of the state space of |K_(n - m)|, without D."""
        a, b, C = self._discrete()
        return kernel_mixing(vandermonde_kernel(a.expand_as(C), C * b, x.shape[1]), x, reset)

    def _discrete(self) -> tuple[Tensor, Tensor, Tensor]:
        """exp(Lambda) and b, (1, N), and C, (d_ssm, N)."""
        dtype = self._state_dtype()
        Lambda = torch.complex(-self.Lambda_re.to(dtype).exp(), self.Lambda_im.to(dtype).exp())
        a, b = discretize_diagonal(Lambda, torch.ones_like(Lambda), 1.0)
        return a[None], b[None], torch.view_as_complex(self.C.to(dtype))
