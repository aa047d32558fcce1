"""Columnar, constructive and columnar-constructive networks, learnt exactly in real time.

    a_q = w_q x^ + u_q h + b_q, q in i, f, g, o;    i, f, o = sigmoid, g = tanh
    c' = f c + i g,    h' = o tanh(c'),    y = sum over columns of W (h' - m) / sqrt(s) + b

A column is an LSTM of a single unit. x^ are the observations, and the normalised outputs of all columns of
earlier stages. Columns of a stage do not see each other.
"""

import torch
from jaxtyping import Bool, Float, Num
from torch import Tensor, nn
from torch.nn import functional

from linrec.rules import at_least, positive, require

__all__ = ["ColumnarNetwork"]


class ColumnarNetwork(nn.Module):
    """Columns in stages, of which the first `grown` exist.

    One stage of all columns is a columnar network. Stages of one column are a constructive network, and
    other stages a columnar-constructive network (CCN). Weights start uniform in +- 0.01, the readout at 0.

    The outputs of a column are normalised by a running mean and variance, m <- decay m + (1 - decay) h' and
    s <- max(floor, decay s + (1 - decay) (h' - m)^2), from 0 and 1. Both are constants of the gradient, and
    stop with the column's learning.

    Args:
        n_features: number of observations, if they are numbers.
        n_outputs: number of predictions.
        vocab_size: number of tokens, if observations are tokens; they become one-hot.
        columns: number of columns.
        per_stage: columns of a stage; None is all of them.
        decay: of the mean and the variance; 1 disables the normalisation.
        floor: smallest variance.
        late: whether later stages see outputs of the last step, as in the released code.

    Source:
        Javed, Shah, Sutton and White, Scalable Real-Time Recurrent Learning Using Columnar-Constructive
        Networks (2023).
    """

    grown: Tensor

    def __init__(
        self,
        n_features: int | None,
        n_outputs: int,
        *,
        vocab_size: int | None = None,
        columns: int = 20,
        per_stage: int | None = None,
        decay: float = 0.99999,
        floor: float = 0.01,
        late: bool = False,
    ) -> None:
        super().__init__()
        per_stage = columns if per_stage is None else per_stage
        at_least(1, columns=columns, per_stage=per_stage)
        require(0 < decay <= 1, f"`decay` must be in (0, 1]; got {decay}. 1 disables the normalisation.")
        require(columns % per_stage == 0, f"`per_stage` must divide {columns} columns; got {per_stage}.")
        positive(floor=floor)
        self.vocab_size, self.columns, self.per_stage = vocab_size, columns, per_stage
        self.decay, self.floor, self.late = decay, floor, late
        width = vocab_size or n_features or 0
        # of each gate and column: the weights of x^, then u, then b
        self.stages = nn.ParameterList(
            torch.empty(4, per_stage, width + before + 2).uniform_(-0.01, 0.01)
            for before in range(0, columns, per_stage)
        )
        self.readout = nn.Linear(columns, n_outputs)
        for p in self.readout.parameters():
            nn.init.zeros_(p)
        self.register_buffer("grown", torch.tensor(1))

    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> dict[str, Tensor]:
        """Return h, c, the mean, the variance, and the normalised outputs of the last step, (b, columns)."""
        zeros = self.readout.weight.new_zeros(batch, self.columns, device=device)
        names = {name: zeros for name in ("h", "c", "mean", "features")}
        return names | {"variance": torch.ones_like(zeros)}

    def forward(
        self,
        x: Num[Tensor, "b t *n"],
        state: dict[str, Tensor] | None = None,
        *,
        reset: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b t o"], dict[str, Tensor]]:
        """Return predictions, and the state."""
        first = self.init_state(len(x), device=x.device)
        state, outputs = first if state is None else state, []
        for t in range(x.shape[1]):
            if reset is not None:
                cut = reset[:, t, None]
                state = {name: torch.where(cut, first[name], of) for name, of in state.items()}
            state = self.step(x[:, t], state)[0]
            outputs.append(self.readout(state["features"]))
        return torch.stack(outputs, 1), state

    def step(self, x: Tensor, state: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Return the state; and of the newest stage x^, h and 1 (b, k, m + 2), the gates, and the last c."""
        if self.vocab_size:
            x = functional.one_hot(x, self.vocab_size).to(self.readout.weight.dtype)
        new = {name: [*of.split(self.per_stage, 1)] for name, of in state.items()}
        seen, gates = [x], list[Tensor]()
        for stage in range(int(self.grown)):
            late = new["features"][stage]
            h, c, m, s = (new[name][stage] for name in ("h", "c", "mean", "variance"))
            own = torch.stack([h, torch.ones_like(h)], 2)
            inputs = torch.cat([torch.cat(seen, 1)[:, None].expand(-1, self.per_stage, -1), own], 2)
            i, f, g, o = torch.einsum("qkm,bkm->qbk", self.stages[stage], inputs).unbind()
            i, f, g, o = torch.sigmoid(i), torch.sigmoid(f), torch.tanh(g), torch.sigmoid(o)
            gates = [inputs, i, f, g, o, c]
            c = f * c + i * g
            h = o * torch.tanh(c)
            if stage == self.grown - 1 and self.decay < 1:
                m = self.decay * m + (1 - self.decay) * h.detach()
                s = (self.decay * s + (1 - self.decay) * (h.detach() - m) ** 2).clamp(min=self.floor)
            feature = (h - m) / s.sqrt()
            for name, of in (("h", h), ("c", c), ("mean", m), ("variance", s), ("features", feature)):
                new[name][stage] = of
            seen.append(late if self.late else feature)
        return {name: torch.cat(of, 1) for name, of in new.items()}, gates
