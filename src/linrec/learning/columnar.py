"""Exact real-time recurrent learning of columns.

A column's weights change its own (h, c) alone, so that each weight has two traces, dh/dp and dc/dp:

    T_c <- f T_c + c f' A_f + i g' A_g + g i' A_i,    T_h <- o (1 - tanh^2 c') T_c + tanh(c') o' A_o
    A_q = da_q / dp + u_q T_h

in the symbols of `linrec.learning.columns`.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from linrec.learning.columns import ColumnarNetwork
from linrec.learning.learner import Learner, Learnt, Piece
from linrec.rules import at_least
from linrec.trees import Tree

__all__ = ["Columnar"]


class Columnar(Learner):
    """Exact real-time recurrent learning of a `ColumnarNetwork`, whose stages learn one after the other.

    Stage l learns for `stage_steps` steps, from step l `stage_steps` on; then its columns are frozen, and the
    next stage exists. The readout of all columns keeps learning. The last stage learns on.

    `memory["traces"]` has "h" and "c", T_h and T_c (b, 4, columns of the stage, weights) of the stage that
    learns.

    Args:
        stage_steps: steps of a stage; None learns the first stage alone.

    The other arguments are those of `Learner`; the model is a `ColumnarNetwork`.

    Source:
        Javed, Shah, Sutton and White (2023), appendix.

    Example:
        >>> learner = Columnar(ColumnarNetwork(3, 1, columns=4, per_stage=2), stage_steps=5)
        >>> step = learner.chunk(torch.ones(1, 6, 3), torch.ones(1, 6, 1))
        >>> learner.memory["traces"]["h"].shape
        torch.Size([1, 4, 2, 7])
    """

    name: ClassVar[str] = "columnar"
    network: ClassVar[type[nn.Module] | None] = ColumnarNetwork
    model: ColumnarNetwork

    def __init__(self, *args: Any, stage_steps: int | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        at_least(1, stage_steps=stage_steps, or_none=True)
        self.stage_steps = stage_steps

    @override
    def options(self) -> dict[str, Any]:
        return super().options() | {"stage_steps": self.stage_steps}

    @property
    def stage(self) -> int:
        """The stage that learns at this step."""
        return (
            0 if self.stage_steps is None else min(self.steps // self.stage_steps, len(self.model.stages) - 1)
        )

    @override
    def piece_end(self, step: int) -> int | None:
        return step + 1

    @override
    def first_memory(self, rows: int, device: torch.device) -> dict[str, Tree]:
        weights = self.model.stages[self.stage]
        traces = {name: weights.new_zeros(rows, *weights.shape, device=device) for name in ("h", "c")}
        return super().first_memory(rows, device) | {"traces": traces}

    @override
    def learn(self, piece: Piece, memory: dict[str, Tree]) -> Learnt:
        network, stage = self.model, self.stage
        # a function of the number of steps alone
        network.grown.fill_(stage + 1)
        first = self.first_memory(len(piece.inputs), piece.inputs.device)
        T, before = memory["traces"], memory["state"]
        if T["h"].shape != first["traces"]["h"].shape:
            T = first["traces"]
        if piece.reset is not None:
            fresh = piece.reset[:, 0]
            T = {name: torch.where(fresh[:, None, None, None], 0, of) for name, of in T.items()}
            before = {
                name: torch.where(fresh[:, None], first["state"][name], of) for name, of in before.items()
            }
        with torch.no_grad():
            state, gates = network.step(piece.inputs[:, 0], before)
        features = state["features"].clone().requires_grad_()
        with torch.enable_grad():
            prediction = network.readout(features)[:, None]
            loss = self.loss(prediction, piece.targets)
        wanted = [*network.readout.parameters(), features]
        *of_readout, by_features = torch.autograd.grad(self.weighted(loss, piece.weight), wanted)
        own = slice(stage * network.per_stage, (stage + 1) * network.per_stage)
        T = _followed(network.stages[stage], gates, T)
        error = by_features[:, own] / state["variance"][:, own].sqrt()
        gradients: dict[Tensor, Tensor] = dict(zip(network.readout.parameters(), of_readout, strict=True))
        gradients[network.stages[stage]] = torch.einsum("bk,bqkm->qkm", error, T["h"])
        found = [gradients.get(p) for p in self.parameters]
        return Learnt(prediction, loss, found, {"state": state, "traces": T})


def _followed(weights: Tensor, gates: list[Tensor], T: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the traces after a step, (b, gate of the weight, column, weight)."""
    inputs, *of_gates, c = gates
    # A (b, gate, gate of the weight, column, weight)
    A = weights[None, :, None, :, -2, None] * T["h"][:, None]
    A = A + torch.eye(4, dtype=A.dtype, device=A.device)[:, :, None, None] * inputs[:, None, None]
    i, f, g, o, c = (of[:, None, :, None] for of in (*of_gates, c))
    T_c = f * T["c"] + c * f * (1 - f) * A[:, 1] + i * (1 - g**2) * A[:, 2] + g * i * (1 - i) * A[:, 0]
    read = torch.tanh(f * c + i * g)
    return {"h": o * (1 - read**2) * T_c + read * o * (1 - o) * A[:, 3], "c": T_c}
