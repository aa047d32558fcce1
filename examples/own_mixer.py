"""Write a mixer of your own, and let the laws of `linrec.testing` say whether it is one.

The mixer is an exponential moving average whose rate each channel learns:

    h_t = r h_{t-1} + (1 - r) v_t,    v_t = Linear(x_t),    r = sigmoid(rho)

    python examples/own_mixer.py

It takes part in suites of tasks as any other mixer does:

    PYTHONPATH=examples linrec bench smoke --mixers own_mixer:MovingAverage gla
"""

import torch
from torch import nn

from linrec.mixers import Mixer
from linrec.nn import mark
from linrec.ops import scan
from linrec.testing import check_mixer


class MovingAverage(Mixer):
    """h_t = r h_{t-1} + (1 - r) v_t."""

    def __init__(self, d_model):
        super().__init__(d_model)
        self.value = nn.Linear(d_model, d_model)
        self.rho = nn.Parameter(torch.linspace(0, 5, d_model))
        # the optimiser gives "transition" parameters their own learning rate and no weight decay
        mark(self, "rho")

    def mix(self, x, state, reset):
        v = self.value(x)
        rate = torch.sigmoid(self.rho).to(v.dtype)
        return scan(rate, (1 - rate) * v, state=state, reset=reset)


class Centred(MovingAverage):
    """The same with the mean over time taken away: the future is in that mean."""

    def mix(self, x, state, reset):
        return super().mix(x - x.mean(dim=1, keepdim=True), state, reset)


if __name__ == "__main__":
    torch.manual_seed(0)
    for mixer in (MovingAverage(8), Centred(8)):
        name = type(mixer).__name__
        try:
            # compiler=None leaves torch.compile out, which takes some seconds; keep it for a mixer that stays
            check_mixer(mixer, time=20, long=2000, compiler=None)
        except AssertionError as broken:
            print(f"{name} breaks a law:\n{broken}")
        else:
            print(f"{name} obeys the laws: streaming, causality, batch rows, resets, saving, stability")
