"""Continuous fast weight programmers (Irie, Faccio and Schmidhuber, 2022): a learning rule as an ODE.

    k_t, v_t, beta_t, q_t = W_slow x_t
    dW/ds = sigmoid(beta_t) tanh(v_t) (x) softmax(k_t)                                         Hebb
    dW/ds = sigmoid(beta_t) tanh(v_t) (x) softmax(k_t - W^T tanh(v_t))                         Oja
    dW/ds = sigmoid(beta_t) tanh(v_t - W softmax(k_t)) (x) softmax(k_t)                        delta
    W_t = ODESolve(dW/ds, W_{t-1}, dt_t),   y_t = O (W_t softmax(q_t))

x is the input, t time, dt the time since the step before, and y the output. k are keys, v values and q
queries of a head, beta its learning rate, and W its fast weights, which are the state. (x) is the outer
product. The input holds during a step. With plain=True the rules have neither tanh nor softmax:

    dW/ds = sigmoid(beta) v (x) k,  sigmoid(beta) v (x) (k - W^T v),  or  sigmoid(beta) (v - W k) (x) k
    y_t = O (W_t q_t)
"""

from typing import Literal

import torch
from torch import Tensor, nn

from linrec.nn.cells import Fixed, NonlinearMixer, beside_times, solve
from linrec.nn.head_sizes import split_width
from linrec.nn.mixer import State
from linrec.rules import COUNT, at_least

__all__ = ["OdeFastWeights"]

CHANNELS_PER_HEAD = 16
Rule = Literal["hebb", "oja", "delta"]


class OdeFastWeights(NonlinearMixer):
    """W_t = ODESolve(learning rule of x_t, W_{t-1}, dt_t), y_t = O (W_t softmax(q_t)), in continuous time.

    With irregular steps, `dt` is the time that the learning rule runs. Without them, it is 1.

    This is the paper's direct form, in which x_t drives the equation. In other forms the derivative of x
    drives it; they need a smooth path through the inputs, and are not here. The released code first norms a
    projection of the input, which belongs to the block here. It starts at the weights that the first input
    makes, and reads the weights once, at the end.

    All parameters start as in torch's Linear.

    Args:
        d_model: width of the sequence.
        n_heads: heads, each with (d_model / n_heads)^2 fast weights. None is the largest number that divides
            `d_model` and leaves at least 16 channels to each head, or 1.
        rule: "hebb", "oja" or "delta".
        tanh_after: with "delta", whether tanh is taken of v_t - W softmax(k_t), as above, or of v_t alone.
        plain: whether the rules are the plain rules of Hebb, Oja, and Widrow and Hoff, as above. Their keys
            have any length: Oja's and delta need |v|^2 or |k|^2 below about 2 `n_steps` / dt.
        solver: "euler", "midpoint" or "rk4"; see `linrec.nn.cells.solve`.
        n_steps: steps of the solver for each dt.
        mode: mode of `linrec.ops.nonlinear_scan`; "auto" is the loop.

    Raises:
        ValueError: `n_heads` does not divide `d_model`, `n_steps` is below 1, or a name does not exist.

    Source:
        Irie, Faccio and Schmidhuber, Neural Differential Equations for Learning to Program Neural Nets
        Through Continuous Learning Rules (2022), and the released code, IDSIA/neuraldiffeq-fwp, which has no
        plain rules.

    Example:
        >>> mixer = OdeFastWeights(16, n_heads=2)
        >>> y, state = mixer(torch.zeros(2, 10, 16), dt=torch.rand(2, 10))
        >>> y.shape, state.shape
        (torch.Size([2, 10, 16]), torch.Size([2, 2, 64]))
    """

    takes_dt = True

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int | None = None,
        rule: Rule = "delta",
        tanh_after: bool = True,
        plain: bool = False,
        solver: Fixed = "rk4",
        n_steps: int = 1,
        mode: str = "auto",
    ) -> None:
        heads, width = split_width("d_model", d_model, n_heads, least=CHANNELS_PER_HEAD)
        super().__init__(d_model, mode, heads, width**2)
        at_least(1, most=COUNT, n_steps=n_steps)
        self.n_heads, self.d_head = heads, width
        self.rule, self.tanh_after, self.plain = rule, tanh_after, plain
        self.solver: Fixed = solver
        self.n_steps = n_steps

        # of each head: k, v and beta
        self.kvb = nn.Linear(d_model, 2 * d_model + self.n_heads)
        self.q = nn.Linear(d_model, d_model)
        self.out = nn.Linear(d_model, d_model)

    def mix(
        self, x: Tensor, state: State, reset: Tensor | None, dt: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Return y, and the last W (b, n_heads, d_head^2), row by row."""
        inputs = beside_times(self.kvb(x), dt)
        W, state = self.nonlinear_scan(self._cell, inputs, state=state, reset=reset)
        q = self._features(self.q(x).unflatten(-1, (self.n_heads, self.d_head))).to(W.dtype)
        read = (W.unflatten(-1, (self.d_head, self.d_head)) @ q[..., None])[..., 0]
        return self.out(read.flatten(-2).to(x.dtype)), state

    def _cell(self, W: Tensor, inputs: Tensor) -> Tensor:
        """Return W_t (b, n_heads, d_head^2)."""
        kvb, dt = inputs[..., :-1].unflatten(-1, (self.n_heads, -1)), inputs[..., None, -1:]
        k, v, beta = kvb.split([self.d_head, self.d_head, 1], -1)
        beta = torch.sigmoid(beta)

        def learning_rule(W: Tensor) -> Tensor:
            W = W.unflatten(-1, (self.d_head, self.d_head))
            left, right = v if self.plain else torch.tanh(v), self._features(k)
            if self.rule == "oja":
                right = self._features(k - (left[..., None, :] @ W)[..., 0, :])
            if self.rule == "delta":
                stored = (W @ right[..., None])[..., 0]
                after = self.tanh_after and not self.plain
                left = torch.tanh(v - stored) if after else left - stored
            return (beta[..., None] * left[..., None] * right[..., None, :]).flatten(-2)

        return solve(learning_rule, W, dt, self.solver, n_steps=self.n_steps)

    def _features(self, k: Tensor) -> Tensor:
        """Return softmax(k), or k itself in plain rules."""
        return k if self.plain else k.softmax(-1)
