"""minLSTM: Were RNNs All We Needed? (Feng and others, 2024): an LSTM whose gates do not see its state.

    f_t = sigmoid(Linear_f(x_t))      i_t = sigmoid(Linear_i(x_t))
    f'_t = f_t / (f_t + i_t)          i'_t = i_t / (f_t + i_t)
    h~_t = g(Linear_h(x_t)),    g(u) = u + 1/2 where u >= 0, sigmoid(u) elsewhere
    h_t = f'_t * h_{t-1} + i'_t * h~_t
    y_t = Linear_y(h_t)

x input, f forget and i input gate, f' and i' the two over their sum, h~ candidate, h hidden state, y output,
* the product of channels. g keeps candidates above zero, so that their logarithms exist: the paper's version
in log space. Linear_y is there where h is wider or narrower than x.
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from linrec.errors import unknown
from linrec.nn.gates import Gate, positive
from linrec.nn.mixer import Mixer, State, Transitions
from linrec.ops.inspection import elementwise_mixing
from linrec.ops.scan import scan

__all__ = ["MinLSTM"]

Candidate = Literal["positive", "linear"]


class MinLSTM(Mixer):
    """h_t = f'_t * h_{t-1} + i'_t * g(Linear_h(x_t)), f' and i' forget and input gate over their sum.

    As in the paper's version in log space, f'_t is the sigmoid of log f_t - log i_t, and i'_t that of its
    negative, so that no small gate is divided by another. `scan` runs the recurrence as it stands; see
    `MinGRU` for why it needs no logarithm of the state. A sequence starts from h_0 = 0.

    | variant of the paper | argument |
    |---|---|
    | in log space | the defaults |
    | in plain space, h~_t = Linear_h(x_t) | `candidate="linear"` |
    | before gates are normalised, f' = f and i' = i | `normalize=False` |
    | a bias that remembers when training starts | `forget_bias` |

    Weights start as torch's Linear draws them. Linear_f and Linear_i are marked as group "transition" without
    weight decay.

    Args:
        d_model: width of the sequence.
        d_state: width of h. None is `d_model`; the paper widens it 1 to 4 times. Another width than `d_model`
            adds Linear_y.
        candidate: "positive", or "linear" for a candidate of any sign.
        normalize: whether the gates add up to one.
        forget_bias: added to the bias of Linear_f when training starts.
        refine: whether f has a refine gate; see `linrec.nn.Gate`.
        uniform_init: whether f starts uniformly spread; see `linrec.nn.Gate`.

    Raises:
        ValueError: a `d_state` below 1, or an unknown `candidate`.

    Source:
        Feng, Tung, Ahmed, Bengio and Hajimirsadeghi, Were RNNs All We Needed? (2024), minLSTM; refine gate
        and uniform initialisation: Gu and others (2020).

    Example:
        >>> import torch
        >>> mixer = MinLSTM(64, forget_bias=2.0)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 64]))
    """

    def __init__(
        self,
        d_model: int,
        *,
        d_state: int | None = None,
        candidate: Candidate = "positive",
        normalize: bool = True,
        forget_bias: float = 0.0,
        refine: bool = False,
        uniform_init: bool = False,
    ) -> None:
        super().__init__(d_model)
        self.d_state = d_model if d_state is None else d_state
        if self.d_state < 1:
            raise ValueError(f"`d_state` must be at least 1; got {d_state}. None is `d_model`.")
        if candidate not in ("positive", "linear"):
            raise unknown("`candidate`", candidate, ["positive", "linear"])
        self.positive, self.normalize = candidate == "positive", normalize

        self.f = Gate(d_model, self.d_state, refine=refine, uniform_init=uniform_init)
        with torch.no_grad():
            self.f.f.bias.add_(forget_bias)
        self.i = Gate(d_model, self.d_state)
        self.h = nn.Linear(d_model, self.d_state)
        self.y = None if self.d_state == d_model else nn.Linear(self.d_state, d_model)

    def forward(
        self,
        x: Float[Tensor, "b t d_model"],
        state: State = None,
        *,
        reset: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b t d_model"], Tensor]:
        """Mix `x` over time; see `Mixer.forward`. The state is h, (b, d_state)."""
        self.check_input(x, reset, state)
        f, i = self._gates(x)
        candidate = self.h(x).to(f.dtype)
        if self.positive:
            candidate = positive(candidate)
        h, state = scan(f, i * candidate, state=state, reset=reset)
        h = h.to(x.dtype)
        return h if self.y is None else self.y(h), state

    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> Tensor:
        """Zeros (batch, d_state)."""
        device = self.h.weight.device if device is None else device
        return torch.zeros(batch, self.d_state, dtype=self._state_dtype(), device=device)

    @property
    def state_size(self) -> int:
        """Elements of h: d_state."""
        return self.d_state

    def transitions(self, x: Float[Tensor, "b t d_model"]) -> Transitions:
        """f'_t; see `Mixer.transitions`."""
        return Transitions(self._gates(x)[0], None)

    def token_mixing(
        self, x: Float[Tensor, "b t d_model"], *, reset: Bool[Tensor, "b t"] | None = None
    ) -> Float[Tensor, "b t t"]:
        """Mean over channels of what h~ is multiplied by in h."""
        return elementwise_mixing(*self._gates(x), x, reset)

    def _gates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """f' and i'."""
        if not self.normalize:
            return self.f(x)[0], self.i(x)[0]
        difference = self.f.log(x) - self.i.log(x)
        return torch.sigmoid(difference), torch.sigmoid(-difference)
