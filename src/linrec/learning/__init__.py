"""Learning online: gradients of a stream in memory that does not grow with time.

learner = build_learner("rtrl", model, optimizer)
for inputs, targets in stream:
    step = learner.step(inputs, targets)
"""

import inspect
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from linrec.errors import unknown, unknown_argument
from linrec.learning.columnar import Columnar
from linrec.learning.columns import ColumnarNetwork
from linrec.learning.e_prop import EProp
from linrec.learning.eligibility import DRTRL, OSTL, RFLO
from linrec.learning.fixed_points import CGRBP, RBP, NeumannRBP
from linrec.learning.fptt import FPTT
from linrec.learning.frozen_rls import FrozenRLS
from linrec.learning.hebb import Hebb
from linrec.learning.learner import Learner, Learnt, Piece, Step, step_losses
from linrec.learning.lifted import Lifted
from linrec.learning.neural_coding import PTNCNNetwork
from linrec.learning.pp_prop import PPProp
from linrec.learning.predictive_coding import PredictiveCoding, TemporalPredictiveCoding
from linrec.learning.ptncn import PTNCN
from linrec.learning.rtrl import LSTM1997, RTRL, DenseRTRL, FocusedBackpropagation, OnlineLRU
from linrec.learning.snap import SnAp
from linrec.learning.stochastic import KFRTRL, UORO
from linrec.learning.teacher_forcing import GTF, ShallowPLRNN
from linrec.learning.windows import BPTT, TBPTT

__all__ = [
    "BPTT", "CGRBP", "DRTRL", "FPTT", "GTF", "KFRTRL", "LSTM1997", "OSTL", "PTNCN", "RBP", "RFLO", "RTRL",
    "TBPTT", "UORO", "Columnar", "ColumnarNetwork", "DenseRTRL", "EProp", "FocusedBackpropagation",
    "FrozenRLS", "Hebb", "Learner", "Learnt", "Lifted", "NeumannRBP", "OnlineLRU", "PPProp", "PTNCNNetwork",
    "Piece", "PredictiveCoding", "ShallowPLRNN", "SnAp", "Step", "TemporalPredictiveCoding", "build_learner",
    "get", "names", "step_losses",
]  # fmt: skip

_LEARNERS: dict[str, type[Learner]] = {
    learner.name: learner
    for learner in (
        *(BPTT, TBPTT, FPTT, RTRL, DenseRTRL, OnlineLRU, FocusedBackpropagation, LSTM1997),
        *(UORO, KFRTRL, SnAp, DRTRL, RFLO, OSTL, EProp, PPProp),
        *(RBP, CGRBP, NeumannRBP),
        *(Columnar, PredictiveCoding, TemporalPredictiveCoding, Lifted, Hebb, PTNCN, GTF),
        FrozenRLS,
    )
}


def names() -> list[str]:
    """Return the names of all learners.

    Example:
        >>> names()[:2]
        ['bptt', 'tbptt']
    """
    return [*_LEARNERS]


def get(name: str) -> type[Learner]:
    """Return the class of a learner; raise ValueError with the nearest name for an unknown one."""
    if name not in _LEARNERS:
        raise unknown("learner", name, names())
    return _LEARNERS[name]


def build_learner(
    name: str,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    **options: Any,
) -> Learner:
    """Return a learner of a model.

    Args:
        name: one of `names()`.
        model: a causal model with a state of fixed size; see `Learner`.
        optimizer: an optimiser of its parameters, or several, or None to compute gradients only.
        options: keyword arguments of the learner's class.

    Raises:
        ValueError: an unknown name or option, or a model that the learner cannot train; the message names the
            layer.

    Example:
        >>> import torch
        >>> from linrec import mixers
        >>> model = mixers.build("min_gru", 4)
        >>> learner = build_learner("rtrl", model, torch.optim.Adam(model.parameters()))
        >>> learner.chunk(torch.ones(1, 6, 4), torch.ones(1, 6, 4)).updated
        True
    """
    kind = get(name)
    # each class passes on what its parent takes
    signatures = [inspect.signature(part) for part in kind.__mro__ if issubclass(part, Learner)]
    known = [p.name for of in signatures for p in of.parameters.values() if p.kind is p.KEYWORD_ONLY]
    for option in options:
        if option not in known:
            raise unknown_argument(f"learner {name!r}", option, known)
    return kind(model, optimizer, **options)
