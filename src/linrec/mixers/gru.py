"""GRU: gated recurrent unit (Cho, van Merrienboer, Gulcehre, Bahdanau, Bougares, Schwenk and Bengio, 2014).

    r_t = sigmoid(W_r x_t + b_r + U_r h_{t-1} + c_r)
    z_t = sigmoid(W_z x_t + b_z + U_z h_{t-1} + c_z)
    n_t = tanh(W_n x_t + b_n + r_t * (U_n h_{t-1} + c_n))
    h_t = (1 - z_t) * n_t + z_t * h_{t-1}

x is the input, t time, r the reset gate, z the update gate, n the new content, and h the hidden state and
output. These are torch's equations, with its two biases b and c. The paper's reset gate acts before U_n:
U_n (r_t * h_{t-1}) + c_n.
"""

import torch
from torch import Tensor
from torch.nn import functional

from linrec.nn.cells import NonlinearMixer
from linrec.nn.mixer import State
from linrec.nn.torch_rnn import RNNWeights, run_torch_rnn

__all__ = ["GRU"]


class GRU(NonlinearMixer):
    """h_t = (1 - z_t) * n_t + z_t * h_{t-1}, where n_t reads h_{t-1} through the reset gate r_t.

    The parameters `rnn` are those of torch.nn.GRU, whose weights load. All start uniform in
    +- 1 / sqrt(d_model). In mode "auto", calls without resets run torch's kernels (cuDNN on CUDA) where these
    take the call; see `linrec.nn.torch_rnn`.

    Args:
        d_model: width of the sequence and of the state.
        reset_after: whether r_t acts after U_n, as in torch and cuDNN, or before it, as in the paper. Before
            it, the loop always runs.
        mode: mode of `linrec.ops.nonlinear_scan`, or "auto".

    Raises:
        ValueError: the mode does not exist.

    Source:
        Cho and others, Learning Phrase Representations using RNN Encoder-Decoder for Statistical Machine
        Translation (2014), equations 5 to 8, in the form of torch.nn.GRU.

    Example:
        >>> mixer = GRU(64)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 64]))
    """

    def __init__(self, d_model: int, *, reset_after: bool = True, mode: str = "auto") -> None:
        super().__init__(d_model, mode)
        self.reset_after = reset_after
        self.rnn = RNNWeights("GRU", d_model)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return h of every step, and the last h (b, d_model)."""
        start = self.started(x, state)
        return run_torch_rnn(self.rnn, self._cell, x, start, reset, self.mode, fused=self.reset_after)

    def _cell(self, h: Tensor, Wx: Tensor, U: Tensor, c: Tensor) -> Tensor:
        """Return h_t."""
        d = self.d_model
        (W_rz, W_n), (U_rz, U_n), (c_rz, c_n) = (
            given.split([2 * d, d], axis) for given, axis in ((Wx, -1), (U, 0), (c, 0))
        )
        r, z = torch.sigmoid(W_rz + functional.linear(h, U_rz, c_rz)).chunk(2, -1)
        if self.reset_after:
            n = torch.tanh(W_n + r * functional.linear(h, U_n, c_n))
        else:
            n = torch.tanh(W_n + functional.linear(r * h, U_n, c_n))
        return (1 - z) * n + z * h
