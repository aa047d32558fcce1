"""HiPPO: matrices of systems whose states are the past, their diagonal forms, and the approximation itself.

`matrices` has them as the papers write them; `normal_plus_low_rank` and `diagonal` are what structured
state-space models start from; `OnlineApproximation` is a tool of its own.
"""

from linrec.hippo.discretization import Discretization, discretize
from linrec.hippo.forms import Diagonal, NormalPlusLowRank, diagonal, normal_plus_low_rank
from linrec.hippo.functions import basis
from linrec.hippo.measures import MEASURES, Measure, StateSpace, matrices
from linrec.hippo.online import OnlineApproximation, Past

__all__ = [
    "MEASURES",
    "Diagonal",
    "Discretization",
    "Measure",
    "NormalPlusLowRank",
    "OnlineApproximation",
    "Past",
    "StateSpace",
    "basis",
    "diagonal",
    "discretize",
    "matrices",
    "normal_plus_low_rank",
]
