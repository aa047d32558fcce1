"""Forward propagation through time: each update has a regulariser that stands for the rest of the sequence."""

from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Num
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from linrec.learning.learner import Piece, Step
from linrec.learning.windows import TBPTT
from linrec.rules import at_least, positive, require

__all__ = ["FPTT"]


class FPTT(TBPTT):
    """Forward propagation through time: truncated gradients with a regulariser per parameter.

        minimise l_t(theta) - <theta, lam> + alpha / 2 |theta - m|^2    by one step of the optimiser
        lam <- lam - alpha (theta - m),    m <- (1 - beta) m + beta theta - beta / alpha lam

    m is a running mean of the parameters, and lam an estimate of the gradient of l_t at the new ones: where
    the minimisation is exact, lam is this gradient. At the start, m is theta, and lam is 0. Each update is a
    part of the sequence; gradients do not pass its start.

    m and lam are in the optimiser's state of each parameter, as "fptt_mean" and "fptt_dual", so that a
    checkpoint has them. `means()` and `duals()` return them.

    Args:
        alpha: strength of the regulariser; 0 disables it, as the released loop for the adding problem does.
        beta: share of the new parameters in m, in (0, 1].
        exact: whether lam is the gradient of the loss at the new parameters, by a further backward pass over
            the last piece, as in the paper's equation. The released code estimates it by default.

    The other arguments are those of `TBPTT`.

    Source:
        Kag and Saligrama, Training Recurrent Neural Networks via Forward Propagation Through Time (2021), in
        the form of the released code. Equation 75 of the survey has 1 / (2 alpha) for 1 / alpha.

    Example:
        >>> from linrec import mixers
        >>> mixer = mixers.build("lstm", 4)
        >>> learner = FPTT(mixer, torch.optim.Adam(mixer.parameters()))
        >>> learner.chunk(torch.ones(1, 6, 4), torch.ones(1, 6, 4)).updated
        True
        >>> learner.duals()["rnn.bias_hh_l0"].shape
        torch.Size([16])
    """

    name: ClassVar[str] = "fptt"
