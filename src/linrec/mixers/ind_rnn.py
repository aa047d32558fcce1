"""IndRNN: Independently Recurrent Neural Network (Li, Li, Cook, Zhu and Gao, 2018).

    h_t = sigma(W x_t + u * h_{t-1} + b)
    |u| <= gamma^(1/T)

x is the input, t time, * the product of channels, h the hidden state and output, u a recurrent weight per
channel, and sigma an activation. Over T steps, a gradient grows by at most a factor gamma.

sigma stands between h_{t-1} and h_t, so steps run one by one: the recurrence is not linear, and no scan
computes it.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from linrec.nn.activations import ACTIVATIONS
from linrec.nn.cells import Step, Tensors, step_by_step
from linrec.nn.mixer import Mixer, State
from linrec.nn.parameters import mark
from linrec.ops.scan import scan
from linrec.rules import at_least

__all__ = ["IndRNN"]

Activation = Literal["relu", "tanh"]
RecurrentInit = Literal["uniform", "long"]
Init = Literal["torch", "released"]

# of the released code: the slope below zero that Kaiming's start is told
LEAK = 8


class IndRNN(Mixer):
    """h_t = sigma(W x_t + u * h_{t-1} + b), |u| <= gamma^(1/T): each channel sees its own past alone.

    W x is computed for all steps at once. The rest is a loop over time in plain torch, with three operations
    on channels per step, which learners such as `rtrl` go through too. Stacked layers mix the channels,
    through W and the channel mixing.

    The paper clips u after every update, and so does the released code. `after_update` does this, which
    `linrec train` and learners call; other training loops call it themselves. Between an update and this
    call, the recurrence uses the clipped u, and the gradient of u is that of the clipped value: it passes
    straight through. So gradients of parts of a sequence add up to the gradient of the whole.

    The paper has no initial W and b, which start as in torch's Linear. The released code is
    `init="released"`, with gamma 5 on pixels and actions, and 2 on words. It has a batch norm before or after
    the recurrence, which is not here. u is marked as group "transition" without weight decay.

    Args:
        d_model: width of the sequence and of the state.
        activation: "relu" or "tanh".
        max_length: steps T of the sequences to train on.
        gamma: largest factor by which a gradient grows over T steps.
        recurrent_init: of u, "uniform" in [0, gamma^(1/T)], or "long" in [gamma^(-1/T), gamma^(1/T)], which
            the paper has in the last layer of tasks that need the first steps at the end.
        init: where W and b start. "torch": as torch's Linear draws them. "released": W uniform in
            +- sqrt(6 / (65 d_model)) and b at zero, as in the released code.

    Raises:
        ValueError: an unknown `activation`, `recurrent_init` or `init`, a `max_length` or a `gamma` below 1,
            or a `gamma` that is NaN.

    Source:
        IndRNN (Li and others, 2018): its equation, the range of recurrent weights, and its initialisation;
        the released code is Sunnydreamrain/IndRNN_pytorch.

    Example:
        >>> mixer = IndRNN(64)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 64]))
    """

    def __init__(
        self,
        d_model: int,
        *,
        activation: Activation = "relu",
        max_length: int = 1000,
        gamma: float = 2.0,
        recurrent_init: RecurrentInit = "uniform",
        init: Init = "torch",
    ) -> None:
        super().__init__(d_model)
        at_least(1, max_length=max_length, cure="It is the number of steps T.")
        at_least(1, gamma=gamma, cure="At 1, gradients do not grow.")
        self.activation = activation
        self.bound = gamma ** (1 / max_length)

        self.W = nn.Linear(d_model, d_model)
        if init == "released":
            nn.init.kaiming_uniform_(self.W.weight, a=LEAK)
            nn.init.zeros_(self.W.bias)
        least = 1 / self.bound if recurrent_init == "long" else 0.0
        self.u = nn.Parameter(torch.empty(d_model).uniform_(least, self.bound))
        mark(self, "u", float32=True)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return h of every step, and the last h (b, d_model)."""
        dtype = self.state_dtype
        h = self.init_state(x.shape[0], device=x.device) if state is None else state.to(dtype)
        u, sigma = self.u.to(dtype), ACTIVATIONS[self.activation]
        # straight through: the value is clipped, and the gradient is not
        u = u.clamp(-self.bound, self.bound).detach() + (u - u.detach())

        def step(state: Tensors, Wx: Tensor) -> Step:
            h = sigma(Wx + u * state[0])
            return (h,), (h,)

        (h,), (hidden,) = step_by_step("ind_rnn", step, [h], [self.W(x).to(dtype)], reset=reset)
        return hidden.to(x.dtype), h

    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> State:
        """Return zeros (batch, d_model)."""
        return scan.empty_state(batch, self.d_model, **self.factory_kwargs(device))

    def after_update(self, updates: int) -> None:
        """Clip u to the bound, as the paper does after every update."""
        with torch.no_grad():
            self.u.clamp_(-self.bound, self.bound)
