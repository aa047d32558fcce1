"""LSTM: Long Short-Term Memory (Hochreiter and Schmidhuber, 1997), with forget gates (Gers and others, 2000).

    i_t = sigmoid(W_i x_t + b_i + U_i h_{t-1} + c_i)
    f_t = sigmoid(W_f x_t + b_f + U_f h_{t-1} + c_f)
    g_t = tanh(W_g x_t + b_g + U_g h_{t-1} + c_g)
    o_t = sigmoid(W_o x_t + b_o + U_o h_{t-1} + c_o)
    s_t = f_t * s_{t-1} + i_t * g_t
    h_t = o_t * tanh(s_t)

x is the input, t time, i, f and o the gates of input, memory and output, g the new content, s the memory
(torch's c), and h the output. b and c are torch's two biases.

With refine gates (UR-LSTM; Gu, Gulcehre, Paine, Hoffman and Pascanu, 2020), i refines f:

    e_t = i_t * (1 - (1 - f_t)^2) + (1 - i_t) * f_t^2
    s_t = e_t * s_{t-1} + (1 - e_t) * g_t
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from linrec.nn.cells import NonlinearMixer
from linrec.nn.gates import Gate, start_of_gates
from linrec.nn.mixer import State
from linrec.nn.torch_rnn import RNNWeights, run_torch_rnn
from linrec.rules import at_least, require

__all__ = ["LSTM"]


class LSTM(NonlinearMixer):
    """s_t = f_t * s_{t-1} + i_t * g_t, h_t = o_t * tanh(s_t): the gates read x_t and h_{t-1}.

    The parameters `rnn` are those of torch.nn.LSTM, whose weights load. In mode "auto", calls without resets
    run torch's kernels (cuDNN on CUDA) where these take the call; see `linrec.nn.torch_rnn`.

    | gates | arguments |
    |---|---|
    | torch's | the defaults |
    | open at first (Jozefowicz and others) | `forget_bias=1` |
    | of memories that last 2 to T steps at first (chrono initialisation) | `chrono=T` |
    | UR-LSTM | `refine=True, uniform_init=True` |

    The refine gate takes the place of the input gate, so UR-LSTM has the parameters of torch.nn.LSTM. With
    `refine`, the loop always runs.

    Args:
        d_model: width of the sequence, of h and of s.
        forget_bias: initial b_f + c_f. None leaves all parameters uniform in +- 1 / sqrt(d_model), as in
            torch, unless `chrono` or `uniform_init` sets b + c of f, and that of i to the negative.
        chrono: longest time T in steps that memories last at first, by b_f + c_f = log(u) with u uniform in
            [1, T - 1].
        refine: whether i refines f, as above.
        uniform_init: whether f starts uniformly spread in [1/d_model, 1 - 1/d_model] at x = 0 and h = 0.
        mode: mode of `linrec.ops.nonlinear_scan`, or "auto".

    Raises:
        ValueError: `forget_bias` is negative or not finite, `chrono` is below 2, more than one of
            `forget_bias`, `chrono` and `uniform_init` is given, or the mode does not exist.

    Source:
        Hochreiter and Schmidhuber, Long Short-Term Memory (1997); Gers, Schmidhuber and Cummins, Learning to
        Forget (2000); Jozefowicz, Zaremba and Sutskever, An Empirical Exploration of Recurrent Network
        Architectures (2015). The form is that of torch.nn.LSTM, without peepholes. `chrono`: Tallec and
        Ollivier, Can Recurrent Neural Networks Warp Time? (2018). `refine` and `uniform_init`: Gu and others,
        Improving the Gating Mechanism of Recurrent Neural Networks (2020).

    Example:
        >>> mixer = LSTM(64)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 128]))
    """

    def __init__(
        self,
        d_model: int,
        *,
        forget_bias: float | None = None,
        chrono: int | None = None,
        refine: bool = False,
        uniform_init: bool = False,
        mode: str = "auto",
    ) -> None:
        super().__init__(d_model, mode, 2 * d_model)
        at_least(0, forget_bias=forget_bias, or_none=True, cure="Pass 1, so that memories last at first.")
        start = start_of_gates(d_model, chrono=chrono, uniform_init=uniform_init)
        require(
            forget_bias is None or start is None,
            f"`forget_bias` must be None beside `chrono` and `uniform_init`; got {forget_bias}. Each says "
            "how the forget gate starts.",
        )
        self.refine = refine

        self.rnn = RNNWeights("LSTM", d_model)
        _, _, b, c = self.rnn.parameters()
        (b_i, b_f, _, _), (c_i, c_f, _, _) = b.chunk(4), c.chunk(4)
        if forget_bias is not None:
            nn.init.constant_(b_f, forget_bias)
            nn.init.zeros_(c_f)
        if start is not None:
            with torch.no_grad():
                b_f.copy_(start)
                b_i.copy_(-start)
            nn.init.zeros_(c_f)
            nn.init.zeros_(c_i)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return h of every step, and the last h and s, joined (b, 2 d_model)."""
        start = self.started(x, state)
        return run_torch_rnn(self.rnn, self._cell, x, start, reset, self.mode, fused=not self.refine)

    def _cell(self, hs: Tensor, Wx: Tensor, U: Tensor, c: Tensor) -> Tensor:
        """Return h_t and s_t, joined."""
        h, s = hs.chunk(2, -1)
        i, f, g, o = (Wx + functional.linear(h, U, c)).chunk(4, -1)
        if self.refine:
            kept, new = Gate.of_logits(f, i)
        else:
            kept, new = torch.sigmoid(f), torch.sigmoid(i)
        s = kept * s + new * torch.tanh(g)
        return torch.cat([torch.sigmoid(o) * torch.tanh(s), s], -1)
