"""SRWM: A Modern Self-Referential Weight Matrix That Learns to Modify Itself (Irie and others, 2022).

    y_t, k_t, q_t, beta_t = W_{t-1} phi(x_t)
    v_t = W_{t-1} phi(q_t)     vbar_t = W_{t-1} phi(k_t)
    W_t = W_{t-1} + (sigmoid(beta_t) * (v_t - vbar_t)) phi(k_t)^T

x is the input and y the output of a head, W_t its weight matrix, phi softmax, and t time. W_t changes itself
by the key k and the query q; v and vbar are the answers of W_{t-1} to the query and to the key. beta are four
learning rates. Each of the groups of rows that make y, k, q and beta has a learning rate of its own. The
answer of W to the key moves towards its answer to the query. W_0 is learned; the state is W_t - W_0,
transposed. Heads side by side are projected. Keys and rates depend nonlinearly on all earlier steps, so steps
run one by one.
"""

import math
from typing import Literal

import torch
from torch import Tensor, nn

from linrec.nn.cells import Step, Tensors, step_by_step
from linrec.nn.fast_weights import CHANNELS_PER_HEAD
from linrec.nn.head_sizes import split_width
from linrec.nn.mixer import Mixer, State

__all__ = ["SRWM"]

Rates = Literal["separate", "one"]


class SRWM(Mixer):
    """W_t = W_{t-1} + (sigmoid(beta_t) * (v_t - vbar_t)) phi(k_t)^T: a layer whose weights change themselves.

    The defaults are the paper's layer.

    | variant | argument |
    |---|---|
    | one learning rate for all rows | `rates="one"` |
    | inputs as they are, an option of the released code: W_{t-1} x_t | `input_softmax=False` |

    Nothing bounds W_t: along phi(k_t), an update multiplies by 1 + sigmoid(beta_t) phi(k_t) . (phi(q_t) -
    phi(k_t)), which may exceed 1 at many steps. Heads of few channels can grow beyond float32 within some
    hundred steps. With 16 channels, initial weights stay small for thousands of steps. `reset` starts from
    W_0.

    When training starts, W_0 is normal with a standard deviation of `init_scale` / sqrt(d), d channels of a
    head, and a mean of zero, or of `beta_init` in the rows of beta; the projection is torch's own.

    Args:
        d_model: width of the sequence.
        n_heads: heads h. None is the largest number that divides `d_model` and leaves at least 16 channels to
            each head, or 1.
        rates: "separate", of the four groups of rows, or "one".
        input_softmax: whether x_t passes through phi.
        beta_init: the mean of the rows of beta in W_0, which is the mean of beta, since phi(x) sums to 1. The
            released code has -1 in supervised learning and 0 in reinforcement learning.
        init_scale: factor on W_0 without that mean. With 1, initial keys and queries are close to each other,
            so that the first changes are small. With 3 and `input_softmax=False`, learning starts sooner.

    Raises:
        ValueError: `n_heads` that does not divide `d_model`, or an unknown name in `rates`.

    Source:
        Irie, Schlag, Csordás and Schmidhuber, A Modern Self-Referential Weight Matrix That Learns to Modify
        Itself (2022); the initialisation comes from the released code.

    Example:
        >>> mixer = SRWM(64)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 4, 16, 52]))
    """

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int | None = None,
        rates: Rates = "separate",
        input_softmax: bool = True,
        beta_init: float = -1.0,
        init_scale: float = 1.0,
    ) -> None:
        super().__init__(d_model)
        self.n_heads, self.d_head = split_width("d_model", d_model, n_heads, least=CHANNELS_PER_HEAD)
        self.input_softmax = input_softmax
        # channels of y, k, q and beta
        self.widths = [self.d_head] * 3 + [4 if rates == "separate" else 1]

        W = torch.randn(self.n_heads, self.d_head, sum(self.widths)) * init_scale / math.sqrt(self.d_head)
        W[..., 3 * self.d_head :] += beta_init
        self.W = nn.Parameter(W)
        self.out = nn.Linear(d_model, d_model, bias=False)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return y, and W_t - W_0, transposed (b, h, d, rows)."""
        change = self.init_state(x.shape[0], device=x.device) if state is None else state
        W_0 = self.W.to(change.dtype)
        inputs = x.to(W_0.dtype).unflatten(-1, (self.n_heads, 1, self.d_head))
        if self.input_softmax:
            inputs = inputs.softmax(-1)
        # for each learning rate, the columns of W that it moves
        owned = [W_0.new_ones(1, width) for width in self.widths]
        columns = torch.block_diag(*owned) if self.widths[-1] == 4 else torch.cat(owned, -1)

        def step(state: Tensors, x_t: Tensor) -> Step:
            (W,) = state
            y, k, q, beta = (x_t @ W).split(self.widths, -1)
            k, q = k.softmax(-1), q.softmax(-1)
            # v - vbar
            difference = (q - k) @ W
            W = W + k.mT * ((torch.sigmoid(beta) @ columns) * difference)
            return (W,), (y,)

        (W,), (y,) = step_by_step("srwm", step, [W_0 + change], [inputs], reset=reset, fresh=[W_0])
        return self.out(y.flatten(2).to(x.dtype)), W - W_0

    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> Tensor:
        """Return zeros (batch, h, d, 3 d + 4), or (batch, h, d, 3 d + 1) with one learning rate."""
        sizes = self.n_heads, self.d_head, sum(self.widths)
        return torch.zeros(batch, *sizes, **self.factory_kwargs(device))
