"""GRU: gated recurrent unit (Cho, van Merrienboer, Gulcehre, Bahdanau, Bougares, Schwenk and Bengio, 2014).

    r_t = sigmoid(W_r x_t + b_r + U_r h_{t-1} + c_r)
    z_t = sigmoid(W_z x_t + b_z + U_z h_{t-1} + c_z)
    n_t = tanh(W_n x_t + b_n + r_t * (U_n h_{t-1} + c_n))
    h_t = (1 - z_t) * n_t + z_t * h_{t-1}

x is the input, t time, r the reset gate, z the update gate, n the new content, and h the hidden state and
output. These are torch's equations, with its two biases b and c. The paper's reset gate acts before U_n:
U_n (r_t * h_{t-1}) + c_n.

With refine gates (Gu, Gulcehre, Paine, Hoffman and Pascanu, 2020), a further gate e refines z:

    e_t = sigmoid(W_e x_t + b_e + U_e h_{t-1} + c_e)
    z'_t = e_t * (1 - (1 - z_t)^2) + (1 - e_t) * z_t^2        in place of z_t in h_t
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from linrec.nn.cells import NonlinearMixer
from linrec.nn.gates import Gate, start_of_gates
from linrec.nn.mixer import State
from linrec.nn.torch_rnn import RNNWeights, run_torch_rnn

__all__ = ["GRU"]


class GRU(NonlinearMixer):
    """h_t = (1 - z_t) * n_t + z_t * h_{t-1}, where n_t reads h_{t-1} through the reset gate r_t.

    The parameters `rnn` are those of torch.nn.GRU, whose weights load. All start uniform in
    +- 1 / sqrt(d_model). In mode "auto", calls without resets run torch's kernels (cuDNN on CUDA) where these
    take the call; see `linrec.nn.torch_rnn`.

    z_t keeps the state, so chrono initialisation and the uniform start, which other papers state for the gate
    of the new content, are those of z_t here.

    Args:
        d_model: width of the sequence and of the state.
        reset_after: whether r_t acts after U_n, as in torch and cuDNN, or before it, as in the paper. Before
            it, the loop always runs.
        chrono: longest time T in steps that memories last at first (chrono initialisation), by b_z + c_z =
            log(u) with u uniform in [1, T - 1].
        refine: whether e refines z, as above. The parameters have a fourth block of rows, for e, and the loop
            always runs.
        uniform_init: whether z starts uniformly spread in [1/d_model, 1 - 1/d_model] at x = 0 and h = 0.
        mode: mode of `linrec.ops.nonlinear_scan`, or "auto".

    Raises:
        ValueError: `chrono` is below 2 or beside `uniform_init`, or the mode does not exist.

    Source:
        Cho and others, Learning Phrase Representations using RNN Encoder-Decoder for Statistical Machine
        Translation (2014), equations 5 to 8, in the form of torch.nn.GRU. Tallec and Ollivier, Can Recurrent
        Neural Networks Warp Time? (2018); Gu and others, Improving the Gating Mechanism of Recurrent Neural
        Networks (2020), whose refined gate of a GRU this is.

    Example:
        >>> mixer = GRU(64)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 64]))
    """

    def __init__(
        self,
        d_model: int,
        *,
        reset_after: bool = True,
        chrono: int | None = None,
        refine: bool = False,
        uniform_init: bool = False,
        mode: str = "auto",
    ) -> None:
        super().__init__(d_model, mode)
        start = start_of_gates(d_model, chrono=chrono, uniform_init=uniform_init)
        self.reset_after, self.refine = reset_after, refine

        # a layer of four blocks of rows has the shapes of torch's LSTM
        self.rnn = RNNWeights("LSTM" if refine else "GRU", d_model)
        if start is not None:
            _, _, b, c = (weight.split(d_model) for weight in self.rnn.parameters())
            with torch.no_grad():
                b[1].copy_(start)
                if refine:
                    b[3].copy_(-start)
            for bias in c[1::2]:
                nn.init.zeros_(bias)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return h of every step, and the last h (b, d_model)."""
        start, fused = self.started(x, state), self.reset_after and not self.refine
        return run_torch_rnn(self.rnn, self._cell, x, start, reset, self.mode, fused=fused)

    def _cell(self, h: Tensor, Wx: Tensor, U: Tensor, c: Tensor) -> Tensor:
        """Return h_t."""
        blocks = [2 * self.d_model, self.d_model, Wx.shape[-1] - 3 * self.d_model]
        (W_rz, W_n, W_e), (U_rz, U_n, U_e), (c_rz, c_n, c_e) = (
            given.split(blocks, axis) for given, axis in ((Wx, -1), (U, 0), (c, 0))
        )
        r, z = (W_rz + functional.linear(h, U_rz, c_rz)).chunk(2, -1)
        r = torch.sigmoid(r)
        if self.reset_after:
            n = torch.tanh(W_n + r * functional.linear(h, U_n, c_n))
        else:
            n = torch.tanh(W_n + functional.linear(r * h, U_n, c_n))
        if self.refine:
            z, rest = Gate.of_logits(z, W_e + functional.linear(h, U_e, c_e))
        else:
            z = torch.sigmoid(z)
            rest = 1 - z
        return rest * n + z * h
