"""Mixers that a user might bring, by import path."""

import os
import signal

import torch

from linrec.mixers import Mixer, build


class Identity(Mixer):
    """y_t = x_t."""

    def __init__(self, d_model):
        super().__init__(d_model)
        self.scale = torch.nn.Parameter(torch.ones(d_model))

    def forward(self, x, state=None, *, reset=None):
        return self.out(x * self.scale), x.new_zeros(len(x), 0)

    def out(self, y):
        return y

    def init_state(self, batch, *, device=None):
        return self.scale.new_zeros(batch, 0, device=device)

    @property
    def state_size(self):
        return 0


class Centred(Identity):
    """Sees the next step."""

    def forward(self, x, state=None, *, reset=None):
        return x * self.scale + x.roll(-1, 1), None

    def init_state(self, batch, *, device=None):
        return None


class Narrow(Centred):
    """Would be broadcast."""

    def forward(self, x, state=None, *, reset=None):
        return (x * self.scale)[..., :1], None


class Pointwise(Centred):
    """Sees a step alone, without a state."""

    def forward(self, x, state=None, *, reset=None):
        return x * self.scale, None


class Killed(Identity):
    """Ends its process as the system does where memory runs out."""

    def out(self, y):
        os.kill(os.getpid(), signal.SIGKILL)


def raising(error):
    """Return a mixer that fails."""

    class Raising(Identity):
        def out(self, y):
            raise error

    return Raising


# finds no memory on its device; says no more than that; says it with words that colour a terminal
Hungry = raising(torch.OutOfMemoryError("tried to allocate 900 GiB\nof 80"))
Wordless = raising(MemoryError())
Mute = raising(RuntimeError("no [/red] and [bold]"))


class Huge(Identity):
    """Finds no memory on the CPU."""

    def out(self, y):
        return y.new_empty(2**50)


class Divergent(Identity):
    """Has no finite loss."""

    def out(self, y):
        return y * torch.inf


class DivergentLater(Identity):
    """Has a finite loss in training alone."""

    def out(self, y):
        return y if self.training else y * torch.nan


class Wide(Identity):
    """Can have few widths."""

    def __init__(self, d_model):
        if d_model % 48:
            raise ValueError(f"`d_model` must be a multiple of 48; got {d_model}.")
        super().__init__(d_model)
        self.inner = build("gla", d_model)


class Powers(Identity):
    """Has arguments."""

    def __init__(self, d_model, *, n=2, named=""):
        super().__init__(d_model)
        self.n = n


class Halved(Identity):
    """Can have few widths, and says so as users do."""

    def __init__(self, d_model):
        assert d_model % 16 == 0, "heads"
        super().__init__(d_model)


class Rounded(Identity):
    """Looks at its numbers when it is made."""

    def __init__(self, d_model):
        super().__init__(d_model)
        self.radius = torch.linalg.eigvals(0.5 * torch.eye(d_model)).abs().max().item()


class Streamless(Identity):
    """Cannot start a state."""

    def init_state(self, batch, *, device=None):
        raise NotImplementedError


class Large(Identity):
    """Has most of its parameters whatever its width."""

    def __init__(self, d_model):
        super().__init__(d_model)
        self.table = torch.nn.Parameter(torch.zeros(5000))


class Impossible(Identity):
    """Can have no width at all."""

    def __init__(self, d_model):
        raise RuntimeError("there is no such layer")


class NotAMixer:
    """Something else."""
