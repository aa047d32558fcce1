"""Linear recurrent sequence models on one idea: S_t = diag(a_t) S_{t-1} + k_t^T v_t, y_t = Re(q_t S_t).

`linrec.convert`, `linrec.train`, `linrec.report` and `linrec.testing`, which need more than torch, are
imported by name.
"""

from linrec import hippo as hippo
from linrec import mixers as mixers
from linrec import models as models
from linrec import nn as nn
from linrec import ops as ops
from linrec import tasks as tasks

__version__ = "0.1.0"
