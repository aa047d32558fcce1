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
from torch import Tensor, nn

from linrec.nn.gates import Gate, positive
from linrec.nn.mixer import Mixer, State
from linrec.ops.inspection import note
from linrec.ops.scan import scan
from linrec.rules import at_least, require

__all__ = ["MinLSTM"]

Candidate = Literal["positive", "linear"]


class MinLSTM(Mixer):
    """h_t = f'_t * h_{t-1} + i'_t * g(Linear_h(x_t)), f' and i' forget and input gate over their sum.

    As in the paper's version in log space, f'_t is the sigmoid of log f_t - log i_t, and i'_t the sigmoid of
    log i_t - log f_t. So no small gate is divided by another. `scan` needs no logarithm of the state; see
    `MinGRU` for the reason. A sequence starts from h_0 = 0.

    | variant of the paper | argument |
    |---|---|
    | in log space | the defaults |
    | in plain space, h~_t = Linear_h(x_t) | `candidate="linear"` |
    | before gates are normalised, f' = f and i' = i | `normalize=False` |
    | a bias that remembers when training starts | `forget_bias` |

    The code that the authors released learns h_0, always has Linear_y, and its models are `normalize=False,
    forget_bias=3.0, learned_start=True, output_projection=True`.

    Weights start as torch's Linear draws them. Linear_f and Linear_i are marked as group "transition" without
    weight decay.

    Args:
        d_model: width of the sequence.
        d_state: width of h. None is `d_model`; the paper widens it 1 to 4 times.
        output_projection: whether there is a Linear_y. With None, there is a Linear_y where `d_state` is not
            `d_model`.
        candidate: "positive", or "linear" for a candidate of any sign.
        learned_start: whether h_0 is learned: g of a parameter of random normal numbers, or the parameter
            itself with `candidate="linear"`. The state is then h_t - h_0.
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
        >>> mixer = MinLSTM(64, forget_bias=2.0)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 64]))
    """

    recurrence = "scan"

    def __init__(
        self,
        d_model: int,
        *,
        d_state: int | None = None,
        output_projection: bool | None = None,
        candidate: Candidate = "positive",
        learned_start: bool = False,
        normalize: bool = True,
        forget_bias: float = 0.0,
        refine: bool = False,
        uniform_init: bool = False,
    ) -> None:
        super().__init__(d_model)
        at_least(1, d_state=d_state, or_none=True, cure="None is `d_model`.")
        self.d_state = d_model if d_state is None else d_state
        self.positive, self.normalize = candidate == "positive", normalize

        self.f = Gate(d_model, self.d_state, refine=refine, uniform_init=uniform_init)
        with torch.no_grad():
            self.f.f.bias.add_(forget_bias)
        self.i = Gate(d_model, self.d_state)
        self.h = nn.Linear(d_model, self.d_state)
        if output_projection is None:
            output_projection = self.d_state != d_model
        require(
            output_projection or self.d_state == d_model,
            f"`output_projection` must be True or None where `d_state` = {self.d_state} is not `d_model` = "
            f"{d_model}; got False.",
        )
        self.y = nn.Linear(self.d_state, d_model) if output_projection else None
        self.start = nn.Parameter(torch.randn(self.d_state)) if learned_start else None

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return y, and h (b, d_state)."""
        if self.normalize:
            difference = self.f.log(x) - self.i.log(x)
            f, i = torch.sigmoid(difference), torch.sigmoid(-difference)
        else:
            (f, _), (i, _) = self.f(x), self.i(x)
        candidate = self.h(x).to(f.dtype)
        start = None if self.start is None else self.start.to(candidate.dtype)
        if self.positive:
            candidate = positive(candidate)
            start = None if start is None else positive(start)
        note(gate=i)
        if start is None:
            h, state = scan(f, i * candidate, state=state, reset=reset)
        else:
            # of h - h_0, which starts from zero
            rest = i if self.normalize else 1 - f
            h, state = scan(f, i * candidate - rest * start, state=state, reset=reset)
            h = h + start
        h = h.to(x.dtype)
        return h if self.y is None else self.y(h), state
