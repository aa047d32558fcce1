"""ON-LSTM: Ordered Neurons (Shen, Tan, Sordoni and Courville, 2019).

    f~_t = cumsum(softmax(W_F x_t + U_F h_{t-1} + b_F))
    i~_t = 1 - cumsum(softmax(W_I x_t + U_I h_{t-1} + b_I))
    w_t = f~_t * i~_t
    f^_t = f_t * w_t + (f~_t - w_t)
    i^_t = i_t * w_t + (i~_t - w_t)
    c_t = f^_t * c_{t-1} + i^_t * g_t
    h_t = o_t * tanh(c_t)

x is the input, t time, c the memory and h the output. The gates i, f, o and the new content g are those of an
LSTM. The master gates f~ and i~ have an entry for each chunk of channels. f~ grows and i~ falls along the
chunks: the first chunks forget early, and the last chunks keep long constituents.
"""

import torch
from torch import Tensor, nn

from linrec.nn.cells import NonlinearMixer
from linrec.nn.mixer import State
from linrec.nn.projections import affine_map
from linrec.rules import divisor

__all__ = ["OnLSTM"]


class OnLSTM(NonlinearMixer):
    """c_t = f^_t * c_{t-1} + i^_t * g_t, h_t = o_t * tanh(c_t): an LSTM whose gates are ordered.

    The paper's language model has 3 layers of 1150 channels in chunks of 10. All parameters start as in
    torch's Linear, as in the released code, whose drop connect on U is not here. The state has h and c.

    Args:
        d_model: width of the sequence, of h and of c.
        chunk_size: channels C that share an entry of the master gates. None means 10 if 10 divides
            `d_model`, or else 1.
        mode: mode of `linrec.ops.nonlinear_scan`; "auto" is the loop.

    Raises:
        ValueError: `chunk_size` does not divide `d_model`, or the mode does not exist.

    Source:
        Shen and others, Ordered Neurons: Integrating Tree Structures into Recurrent Neural Networks (2019),
        equations 9 to 14, and the released code, yikangshen/Ordered-Neurons.

    Example:
        >>> mixer = OnLSTM(64, chunk_size=8)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 128]))
    """

    def __init__(self, d_model: int, *, chunk_size: int | None = None, mode: str = "auto") -> None:
        super().__init__(d_model, mode, 2 * d_model)
        divisor("d_model", d_model, chunk_size=chunk_size, or_none=True, cure="The paper's is 10.")
        self.chunk_size = (1 if d_model % 10 else 10) if chunk_size is None else chunk_size

        # of i~, f~, o, g, i and f
        width = 2 * d_model // self.chunk_size + 4 * d_model
        self.W = nn.Linear(d_model, width)
        self.U = nn.Linear(d_model, width)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return h of every step, and the last h and c, joined (b, 2 d_model)."""
        U, c = affine_map(self.U, self.d_model, x.device)
        hc, state = self.nonlinear_scan(self._cell, self.W(x) + c, U, state=state, reset=reset)
        return hc[..., : self.d_model], state

    def _cell(self, hc: Tensor, Wx: Tensor, U: Tensor) -> Tensor:
        """Return h_t and c_t, joined."""
        h, c = hc.chunk(2, -1)
        n = self.d_model // self.chunk_size
        master_i, master_f, o, g, i, f = (Wx + h @ U.mT).split([n, n, *[self.d_model] * 4], -1)
        master_f, master_i = _cumsoftmax(master_f), 1 - _cumsoftmax(master_i)
        master_f, master_i = (gate.repeat_interleave(self.chunk_size, -1) for gate in (master_f, master_i))
        w = master_f * master_i
        f = torch.sigmoid(f) * w + (master_f - w)
        i = torch.sigmoid(i) * w + (master_i - w)
        c = f * c + i * torch.tanh(g)
        return torch.cat([torch.sigmoid(o) * torch.tanh(c), c], -1)


def _cumsoftmax(x: Tensor) -> Tensor:
    return x.softmax(-1).cumsum(-1)
