"""LSTM: Long Short-Term Memory (Hochreiter and Schmidhuber, 1997), with forget gates (Gers and others, 2000).

    i_t = sigmoid(W_i x_t + b_i + U_i h_{t-1} + c_i)
    f_t = sigmoid(W_f x_t + b_f + U_f h_{t-1} + c_f)
    g_t = tanh(W_g x_t + b_g + U_g h_{t-1} + c_g)
    o_t = sigmoid(W_o x_t + b_o + U_o h_{t-1} + c_o)
    s_t = f_t * s_{t-1} + i_t * g_t
    h_t = o_t * tanh(s_t)

x is the input, t time, i, f and o the gates of input, memory and output, g the new content, s the memory
(torch's c), and h the output. b and c are torch's two biases.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from linrec.nn.cells import NonlinearMixer
from linrec.nn.mixer import State
from linrec.nn.torch_rnn import RNNWeights, run_torch_rnn
from linrec.rules import at_least

__all__ = ["LSTM"]


class LSTM(NonlinearMixer):
    """s_t = f_t * s_{t-1} + i_t * g_t, h_t = o_t * tanh(s_t): the gates read x_t and h_{t-1}.

    The parameters `rnn` are those of torch.nn.LSTM, whose weights load. In mode "auto", calls without resets
    run torch's kernels (cuDNN on CUDA) where these take the call; see `linrec.nn.torch_rnn`.

    Args:
        d_model: width of the sequence, of h and of s.
        forget_bias: initial b_f + c_f, such as 1, which Jozefowicz and others recommend. None leaves all
            parameters uniform in +- 1 / sqrt(d_model), as in torch.
        mode: mode of `linrec.ops.nonlinear_scan`, or "auto".

    Raises:
        ValueError: `forget_bias` is negative or not finite, or the mode does not exist.

    Source:
        Hochreiter and Schmidhuber, Long Short-Term Memory (1997); Gers, Schmidhuber and Cummins, Learning to
        Forget (2000); Jozefowicz, Zaremba and Sutskever, An Empirical Exploration of Recurrent Network
        Architectures (2015). The form is that of torch.nn.LSTM, without peepholes.

    Example:
        >>> mixer = LSTM(64)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 128]))
    """

    def __init__(self, d_model: int, *, forget_bias: float | None = None, mode: str = "auto") -> None:
        super().__init__(d_model, mode, 2 * d_model)
        at_least(0, forget_bias=forget_bias, or_none=True, cure="Pass 1, so that memories last at first.")

        self.rnn = RNNWeights("LSTM", d_model)
        if forget_bias is not None:
            _, _, b, c = self.rnn.parameters()
            nn.init.constant_(b.chunk(4)[1], forget_bias)
            nn.init.zeros_(c.chunk(4)[1])

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return h of every step, and the last h and s, joined (b, 2 d_model)."""
        start = self.started(x, state)
        return run_torch_rnn(self.rnn, self._cell, x, start, reset, self.mode)

    @staticmethod
    def _cell(hs: Tensor, Wx: Tensor, U: Tensor, c: Tensor) -> Tensor:
        """Return h_t and s_t, joined."""
        h, s = hs.chunk(2, -1)
        i, f, g, o = (Wx + functional.linear(h, U, c)).chunk(4, -1)
        s = torch.sigmoid(f) * s + torch.sigmoid(i) * torch.tanh(g)
        return torch.cat([torch.sigmoid(o) * torch.tanh(s), s], -1)
