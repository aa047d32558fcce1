import pytest
import torch

from linrec import mixers
from linrec.nn.long_filters import LongFilter
from linrec.testing import generator


@pytest.mark.parametrize("name", ["hyena", "sgconv", "tnn"])
def test_steps_after_16384_agree_with_the_convolution_in_float32(name):
    torch.manual_seed(0)
    time = 16_384
    arguments = {"decay": 1.0} if name == "tnn" else {}
    mixer = mixers.build(name, 2, length=time, **arguments)
    x = torch.randn(1, time, 2, generator=generator())
    with torch.no_grad():
        whole, _ = mixer(x)
        _, state = mixer(x[:, :-3])
        steps = []
        for n in range(time - 3, time):
            y, state = mixer(x[:, n : n + 1], state)
            steps.append(y)
    difference = (torch.cat(steps, 1) - whole[:, -3:]).abs().max()
    assert float(difference) < 1e-3 * max(1.0, float(whole.abs().max()))


def test_a_filter_without_taps_is_refused():
    class Constant(LongFilter):
        def taps(self, length):
            return torch.ones(self.channels, length)

    assert Constant(2, 3).kernel(5).tolist() == [[1, 1, 1, 0, 0]] * 2
    with pytest.raises(ValueError, match=r"`length`.*1; got 0"):
        Constant(2, 0)
