"""minGRU: Were RNNs All We Needed? (Feng and others, 2024): a GRU whose gates do not see its state.

    z_t = sigmoid(Linear_z(x_t))
    h~_t = g(Linear_h(x_t)),    g(u) = u + 1/2 where u >= 0, sigmoid(u) elsewhere
    h_t = (1 - z_t) * h_{t-1} + z_t * h~_t
    y_t = Linear_y(h_t)

x input, z update gate, h~ candidate, h hidden state, y output, * the product of channels. g keeps candidates
above zero, so that their logarithms exist: the paper's version in log space. Linear_y is there where h is
wider or narrower than x.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from linrec.nn.gates import Gate, positive
from linrec.nn.mixer import Mixer, State
from linrec.ops.inspection import note
from linrec.ops.scan import scan
from linrec.rules import at_least, require

__all__ = ["MinGRU"]

Candidate = Literal["positive", "linear"]


class MinGRU(Mixer):
    """h_t = (1 - z_t) * h_{t-1} + z_t * g(Linear_h(x_t)), z_t = sigmoid(Linear_z(x_t)).

    The paper divides by a product of decays, so it trains in log space: h_t = exp(a_t + logcumsumexp(log z_t
    + log h~_t - a_t)), with a_t the sum of log(1 - z) so far. `scan` does not divide, so the recurrence
    itself gives the same results. 1 - z_t is the sigmoid of the negative logit, which keeps its digits. A
    sequence starts from h_0 = 0, as the paper's steps do. The paper's code in log space starts from g(0) =
    1/2, which can be passed as `state`. The code that the authors released later learns h_0 and always has
    Linear_y: `learned_start=True, output_projection=True`.

    | variant of the paper | argument |
    |---|---|
    | in log space | the defaults |
    | in plain space, h~_t = Linear_h(x_t) | `candidate="linear"` |

    Weights start as torch's Linear draws them. Linear_z is marked as group "transition" without weight decay.

    Args:
        d_model: width of the sequence.
        d_state: width of h. None is `d_model`; the paper widens it 1 to 4 times.
        output_projection: whether there is a Linear_y. With None, there is a Linear_y where `d_state` is not
            `d_model`.
        candidate: "positive", or "linear" for a candidate of any sign.
        learned_start: whether h_0 is learned: g of a parameter of random normal numbers, or the parameter
            itself with `candidate="linear"`. The state is then h_t - h_0.
        refine: whether z has a refine gate; see `linrec.nn.Gate`.
        uniform_init: whether gates start uniformly spread; see `linrec.nn.Gate`.

    Raises:
        ValueError: a `d_state` below 1, or an unknown `candidate`.

    Source:
        Feng, Tung, Ahmed, Bengio and Hajimirsadeghi, Were RNNs All We Needed? (2024), minGRU; refine gate and
        uniform initialisation: Gu and others (2020).

    Example:
        >>> mixer = MinGRU(64)
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
        refine: bool = False,
        uniform_init: bool = False,
    ) -> None:
        super().__init__(d_model)
        at_least(1, d_state=d_state, or_none=True, cure="None is `d_model`.")
        self.d_state = d_model if d_state is None else d_state
        self.positive = candidate == "positive"

        self.z = Gate(d_model, self.d_state, refine=refine, uniform_init=uniform_init)
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
        z, kept = self.z(x)
        candidate = self.h(x).to(z.dtype)
        start = None if self.start is None else self.start.to(candidate.dtype)
        if self.positive:
            candidate = positive(candidate)
            start = None if start is None else positive(start)
        note(gate=z)
        if start is None:
            h, state = scan(kept, z * candidate, state=state, reset=reset)
        else:
            # of h - h_0, which starts from zero
            h, state = scan(kept, z * (candidate - start), state=state, reset=reset)
            h = h + start
        h = h.to(x.dtype)
        return h if self.y is None else self.y(h), state
