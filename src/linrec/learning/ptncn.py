"""Learning of P-TNCN: layers predict, compare and correct, and weights learn without gradients."""

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from linrec.learning.learner import Learner, Learnt, Piece
from linrec.learning.neural_coding import PTNCNNetwork
from linrec.rules import at_least, choice, positive
from linrec.trees import Tree

__all__ = ["PTNCN"]

Output = Literal["softmax", "sigmoid", "identity"]
Feedback = Literal["transpose", "temporal"]


class PTNCN(Learner):
    """P-TNCN: each layer corrects its state by the errors of its predictions, and all weights learn at once.

        ex = (out(f1 W1) - target) m,    e1 = (f2 W2 - f1) m
        y1 <- tanh(z1 - beta (ex E1 - alpha e1)),    y2 <- tanh(z2 - beta e1 E2)
        d1 = (f1 - y1) m,    d2 = (f2 - y2) m
        dW1 = f1^T ex,    dW2 = f2^T d1,    d{M1, V1, U1} = {x, y1', y2'}^T d1,    d{M2, V2} = {y1', y2'}^T d2
        dE = gamma dW^T,    or with "temporal"
        dE1 = -gamma ex^T (d1 - d1'),    dE2 = -gamma e1^T (d2 - d2')

    in the symbols of `PTNCNNetwork`; ' marks the last step, and m is 0 without a target. Each update is
    clipped to Frobenius norm 1 at its step. They are no gradients of a loss. Memory is that of the states.

    `memory["state"]` has y1 and y2, and `memory["errors"]` d1 and d2. A target is the next input, so that
    inputs and targets of a stream are those of every other learner.

    Args:
        beta: rate of the correction.
        alpha: weight of e1 beside ex.
        gamma: rate of E beside W.
        feedback: rule of E.
        output: out for real targets, "identity" or "sigmoid"; classes take "softmax".

    The other arguments are those of `Learner`; the model is a `PTNCNNetwork`. The released settings are an
    update per step by SGD with Nesterov momentum 0.95 and rate 0.075.

    Source:
        Ororbia, Mali, Giles and Kifer (2020), and the released code, which corrects states once per step.

    Example:
        >>> learner = PTNCN(PTNCNNetwork(None, 5, vocab_size=5, hidden=8))
        >>> step = learner.step(torch.tensor([1]), torch.tensor([2]))
        >>> learner.gradients()["W1"].norm() <= 1
        tensor(True)
    """

    name: ClassVar[str] = "ptncn"
    network: ClassVar[type[nn.Module] | None] = PTNCNNetwork
    model: PTNCNNetwork

    def __init__(
        self,
        *args: Any,
        beta: float = 0.1,
        alpha: float = 0.001,
        gamma: float = 1.0,
        feedback: Feedback = "transpose",
        output: Output = "identity",
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        positive(beta=beta)
        at_least(0, alpha=alpha, gamma=gamma)
        choice(Feedback, feedback=feedback)
        choice(Output, output=output)
        self.beta, self.alpha, self.gamma, self.feedback, self.output = beta, alpha, gamma, feedback, output

    @override
    def options(self) -> dict[str, Any]:
        names = ("beta", "alpha", "gamma", "feedback", "output")
        return super().options() | {name: getattr(self, name) for name in names}

    @override
    def piece_end(self, step: int) -> int | None:
        return step + 1

    @override
    def first_memory(self, rows: int, device: torch.device) -> dict[str, Tree]:
        memory = super().first_memory(rows, device)
        zeros = {f"d{name[1]}": torch.zeros_like(y) for name, y in memory["state"].items()}
        return memory | {"errors": zeros}

    @override
    @torch.no_grad()
    def learn(self, piece: Piece, memory: dict[str, Tree]) -> Learnt:
        P, targets = self._named, piece.targets[:, 0]
        state, last = memory["state"], memory["errors"]
        if piece.reset is not None:
            state, last = (
                {name: torch.where(piece.reset, 0, y) for name, y in of.items()} for of in (state, last)
            )
        x, z1, z2 = self.model.predict(piece.inputs[:, 0], state)
        f1, f2, y1, y2 = z1.tanh(), z2.tanh(), state["y1"], state["y2"]
        prediction, m = f1 @ P["W1"], torch.ones_like(f1[:, :1])
        if not targets.is_floating_point():
            m = m * (targets >= 0)[:, None]
            out, target = prediction.softmax(1), functional.one_hot(targets.clamp(min=0), prediction.shape[1])
        else:
            prediction = prediction.sigmoid() if self.output == "sigmoid" else prediction
            out, target = prediction, targets
        if piece.weight is not None:
            m = m * (piece.weight != 0)
        ex, e1 = (out - target) * m, (f2 @ P["W2"] - f1) * m
        after = {
            "y1": torch.tanh(z1 - self.beta * (ex @ P["E1"] - self.alpha * e1)),
            "y2": torch.tanh(z2 - self.beta * e1 @ P["E2"]),
        }
        d1, d2 = (f1 - after["y1"]) * m, (f2 - after["y2"]) * m
        changes = {"W1": (f1, ex), "W2": (f2, d1), "M1": (x, d1), "V1": (y1, d1), "U1": (y2, d1)}
        changes |= {"M2": (y1, d2), "V2": (y2, d2)}
        found = {name: _clipped(a.T @ b) for name, (a, b) in changes.items()}
        if self.feedback == "transpose":
            found |= {f"E{i}": self.gamma * found[f"W{i}"].T for i in (1, 2)}
        else:
            found["E1"] = _clipped(-self.gamma * ex.T @ (d1 - last["d1"]))
            found["E2"] = _clipped(-self.gamma * e1.T @ (d2 - last["d2"]))
        loss = self.loss(prediction[:, None], piece.targets)
        new = {"state": after, "errors": {"d1": d1, "d2": d2}}
        return Learnt(prediction[:, None], loss, [found[name] for name in self._named], new)


def _clipped(change: Tensor) -> Tensor:
    """Return the change with a Frobenius norm of at most 1."""
    return change / change.norm().clamp(min=1)
