"""LS-LSTM: Parallelizing Linear Recurrent Neural Nets Over Sequence Length (Martin and Cundy, 2018).

    h~_t = GILR(x)_t
    f_t, i_t, o_t = sigmoid(U_{f,i,o} h~_{t-1} + V_{f,i,o} x_t + b_{f,i,o})
    z_t = tau(U_z h~_{t-1} + V_z x_t + b_z)
    c_t = f_t * c_{t-1} + i_t * z_t
    h_t = o_t * c_t
    y_t = h_t

The linear surrogate LSTM: its gates see a linear recurrence in the place of its own output, the gated impulse
of `linrec.mixers.gilr`, which makes it the paper's GILR-LSTM. x input, h~ surrogate, f forget, i input and o
output gate, z candidate, tau tanh, c cell, y output, t time.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from linrec.mixers.gilr import GILR, Impulse, impulse_of
from linrec.nn.gates import Gate
from linrec.nn.mixer import Mixer, State, Transitions
from linrec.nn.token_shift import token_shift
from linrec.ops.inspection import elementwise_mixing
from linrec.ops.scan import scan

__all__ = ["LSLSTM"]


class LSLSTM(Mixer):
    """c_t = f_t * c_{t-1} + i_t * z_t, whose gates see h~_{t-1} and x_t: an LSTM that is two scans.

    An LSTM's gates see h_{t-1}, so that its steps have to follow one another. Here h~, which needs no more
    than x, is known of all steps before c begins.

    Weights start as torch's Linear draws them. What makes f and the gate of h~ is marked as group
    "transition" without weight decay.

    Args:
        d_model: width of the sequence, of h~ and of c.
        impulse: tau, of z and of h~: "tanh", "relu" or "leaky_relu".
        output_projection: whether y_t = W h_t + b.
        refine: whether f and the gate of h~ have refine gates; see `linrec.nn.Gate`.
        uniform_init: whether these two start uniformly spread; see `linrec.nn.Gate`.
        forget_bias_init: initial b_f, None for torch's own. The authors' code has 5: cells start to forget
            after 150 steps, where torch's biases make it two.

    Raises:
        ValueError: an unknown `impulse`, or `forget_bias_init` beside `uniform_init`.

    Source:
        Martin and Cundy (2018), the linear surrogate LSTM and GILR-LSTM; its code (layers_new.py) for the
        bias; refine gate and uniform initialisation: Gu and others (2020).

    Example:
        >>> import torch
        >>> mixer = LSLSTM(64)
        >>> y, (surrogate, c) = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, surrogate.shape, c.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 64]), torch.Size([2, 64]))
    """

    def __init__(
        self,
        d_model: int,
        *,
        impulse: Impulse = "tanh",
        output_projection: bool = False,
        refine: bool = False,
        uniform_init: bool = False,
        forget_bias_init: float | None = None,
    ) -> None:
        if uniform_init and forget_bias_init is not None:
            raise ValueError(
                "`forget_bias_init` and `uniform_init` both say how the forget gate starts; "
                f"got {forget_bias_init} beside uniform_init=True. Leave one out."
            )
        super().__init__(d_model)
        self.impulse = impulse_of(impulse)
        self.surrogate = GILR(d_model, impulse=impulse, refine=refine, uniform_init=uniform_init)
        # U and V side by side
        self.f = Gate(2 * d_model, d_model, refine=refine, uniform_init=uniform_init)
        if forget_bias_init is not None:
            nn.init.constant_(self.f.f.bias, forget_bias_init)
        self.i = nn.Linear(2 * d_model, d_model)
        self.o = nn.Linear(2 * d_model, d_model)
        self.z = nn.Linear(2 * d_model, d_model)
        self.out = nn.Linear(d_model, d_model) if output_projection else None

    def forward(
        self,
        x: Float[Tensor, "b t d_model"],
        state: State = None,
        *,
        reset: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b t d_model"], tuple[Tensor, Tensor]]:
        """Mix `x` over time; see `Mixer.forward`. The state is h~ and c, each (b, d_model)."""
        self.check_input(x, reset, state)
        surrogate, c = (None, None) if state is None else state
        seen, surrogate = self._seen(x, surrogate, reset)
        f, _ = self.f(seen)
        candidate = torch.sigmoid(self.i(seen)) * self.impulse(self.z(seen))
        cells, c = scan(f, candidate.to(f.dtype), state=c, reset=reset)
        y = torch.sigmoid(self.o(seen)) * cells.to(x.dtype)
        return y if self.out is None else self.out(y), (surrogate, c)

    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> tuple[Tensor, Tensor]:
        """Zeros (batch, d_model), twice."""
        start = self.surrogate.init_state(batch, device=device)
        return start, torch.zeros_like(start)

    @property
    def state_size(self) -> int:
        """Elements of h~ and c: 2 d_model."""
        return 2 * self.d_model

    def transitions(self, x: Float[Tensor, "b t d_model"]) -> Transitions:
        """f_t, what the cells are multiplied by; see `Mixer.transitions`."""
        return Transitions(self.f(self._seen(x, None, None)[0])[0], None)

    def token_mixing(
        self, x: Float[Tensor, "b t d_model"], *, reset: Bool[Tensor, "b t"] | None = None
    ) -> Float[Tensor, "b t t"]:
        """Mean over channels of what z is multiplied by in c."""
        seen, _ = self._seen(x, None, reset)
        return elementwise_mixing(self.f(seen)[0], torch.sigmoid(self.i(seen)), x, reset)

    def _seen(self, x: Tensor, surrogate: Tensor | None, reset: Tensor | None) -> tuple[Tensor, Tensor]:
        """What the gates see, h~_{t-1} and x_t side by side, and the last h~."""
        h, last = self.surrogate(x, surrogate, reset=reset)
        before, _ = token_shift(h, surrogate, reset=reset)
        return torch.cat([before, x], dim=-1), last
