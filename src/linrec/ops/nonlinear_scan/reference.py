"""The nonlinear recurrence as a loop over time with gradients by autograd: the reference for tests."""

import torch

from linrec.ops.core.isolation import beside
from linrec.ops.core.precision import wide
from linrec.ops.nonlinear_scan.torch import NonlinearScan, Values


def nonlinear_scan_reference(given: NonlinearScan) -> Values:
    """Compute h_t = cell(h_{t-1}, x_t) step by step."""
    h, hs = given.state, []
    for t in range(given.x.shape[1]):
        if given.reset is not None:
            h = torch.where(beside(given.reset[:, t], h), 0, h)
        h = given.cell(h, given.x[:, t], *map(wide, given.parameters))
        hs.append(h)
    return torch.stack(hs, 1), h
