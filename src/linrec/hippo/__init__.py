"""HiPPO: state-space matrices whose state encodes the past of a signal, and the online approximation itself.

`matrices` returns A and B as the papers define them. `normal_plus_low_rank` and `diagonal` return the forms
that initialise structured state-space models. `OnlineApproximation` applies HiPPO to signals directly.
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
