"""Numbers about forget values, against Python's own statistics and plain loops."""

import json
import math
import statistics

import numpy as np
import pytest
import torch

from linrec.lab.inspection import Layer, forgetting, histogram, reach, time_scales
from linrec.testing import generator

VALUES = torch.rand(2, 7, 3, generator=generator(), dtype=torch.float64) ** 0.1
LAYER = Layer("1", VALUES)


def test_forget_values():
    found, values = forgetting(LAYER), VALUES.flatten().tolist()
    assert found.mean == pytest.approx(statistics.fmean(values), rel=1e-12)
    assert found.median == pytest.approx(statistics.median(values), rel=1e-12)
    assert found.above_090 == sum(value > 0.9 for value in values) / 42
    assert found.above_099 == sum(value > 0.99 for value in values) / 42
    assert 0 < found.above_099 < found.above_090 < 1
    assert found.channels == 3 and not found.constant
    assert forgetting(Layer("1", VALUES[0, 0])).constant
    assert forgetting(Layer("1")) is None


def test_time_scales_are_those_of_the_product_of_all_steps():
    # what is left of a channel after 14 steps is exp(-14 / tau)
    left = VALUES.flatten(0, 1).prod(0)
    assert np.exp(-14 / time_scales(LAYER)) == pytest.approx(left.numpy(), rel=1e-12)
    scales = sorted(time_scales(LAYER).tolist())
    found = forgetting(LAYER)
    assert (found.time_scale, found.longest) == (scales[1], scales[2])


def test_channels_that_never_or_always_forget():
    found = forgetting(Layer("1", torch.tensor([0.0, 0.5, 1.0])))
    assert (found.time_scale, found.longest) == (pytest.approx(1 / math.log(2)), math.inf)
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["longest"] is None
    assert time_scales(Layer("1", torch.tensor([0.0, 1.0]))).tolist() == [0, math.inf]


def test_histogram():
    shares = histogram(Layer("1", torch.tensor([0.0, 0.019, 0.021, 1.0])))
    assert shares.nonzero()[0].tolist() == [0, 1, 49]
    assert shares[[0, 1, 49]].tolist() == [0.5, 0.25, 0.25]
    with pytest.raises(ValueError, match="`layer` must have transitions; layer '3' has none"):
        histogram(Layer("3"))


def test_reach_is_the_mean_distance():
    W = torch.rand(2, 6, 6, generator=generator(), dtype=torch.float64).tril()
    # no step reaches this one
    W[1, 2] = 0
    distances = [
        sum(W[b, n, m].item() * abs(n - m) for m in range(6)) / W[b, n].sum().item()
        for b in range(2)
        for n in range(6)
        if (b, n) != (1, 2)
    ]
    assert reach(Layer("1", mixing=W)) == pytest.approx(statistics.fmean(distances), rel=1e-12)
    # and in the other direction it is as far
    assert reach(Layer("1", mixing=W.flip(1, 2))) == pytest.approx(statistics.fmean(distances), rel=1e-12)
    assert reach(Layer("1", mixing=torch.zeros(1, 2, 2))) is None
    assert reach(Layer("1")) is None
