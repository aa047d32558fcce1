import math

import pytest
import torch
from torch.nn import functional

from linrec.mixers import build
from linrec.mixers.qrnn import QRNN
from linrec.nn import groups_of
from linrec.testing import assert_agree, generator

D, TIME = 6, 7


def make(d_model: int = D, **arguments) -> QRNN:
    torch.manual_seed(0)
    mixer = build("qrnn", d_model, **arguments)
    assert isinstance(mixer, QRNN)
    return mixer


def inputs() -> torch.Tensor:
    return 2 * torch.randn(2, TIME, D, generator=generator(), dtype=torch.float64)


def convolved(linear, x, width):
    """torch's convolution, whose taps are the other way round."""
    taps = linear.weight.unflatten(1, (width, -1)).movedim(1, 2).flip(-1)
    return functional.conv1d(functional.pad(x.mT, (width - 1, 0)), taps, linear.bias).mT


def by_hand(mixer, x):
    """f, i and c of every step from zeros, one step at a time, and h."""
    f = torch.sigmoid(convolved(mixer.f.f, x, mixer.width))
    if mixer.f.r is not None:
        r = torch.sigmoid(convolved(mixer.f.r, x, mixer.width))
        f = r * (1 - (1 - f) ** 2) + (1 - r) * f**2
    z = torch.tanh(convolved(mixer.z, x, mixer.width))
    i = 1 - f if mixer.i is None else torch.sigmoid(convolved(mixer.i.f, x, mixer.width))
    c, cells = torch.zeros(2, D, dtype=x.dtype), []
    for t in range(x.shape[1]):
        c = f[:, t] * c + i[:, t] * z[:, t]
        cells.append(c)
    c = torch.stack(cells, 1)
    return f, i, c, c if mixer.o is None else torch.sigmoid(convolved(mixer.o, x, mixer.width)) * c


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"pooling": "f", "width": 1},
        {"pooling": "ifo", "width": 3},
        {"width": 4, "refine": True, "uniform_init": True},
    ],
)
def test_outputs_state_and_gradients_are_the_papers_equations(arguments):
    mixer, x = make(**arguments).double(), inputs().requires_grad_()
    y, state = mixer(x)
    _, _, c, expected = by_hand(mixer, x)
    assert_agree((y, state.cell), (expected, c[:, -1]))
    if mixer.width > 1:
        # newest first
        assert_agree(state.tail, x[:, 1 - mixer.width :].flip(1))
    wanted = [x, *mixer.parameters()]
    weight = torch.randn(y.shape, generator=generator(5), dtype=y.dtype)
    found = torch.autograd.grad((weight * y).sum(), wanted, retain_graph=True)
    assert_agree(found, torch.autograd.grad((weight * expected).sum(), wanted), "gradients")


def test_a_reset_within_the_window_hides_the_steps_before_it():
    mixer, x = make(width=4).double(), inputs()
    reset = torch.zeros(2, TIME, dtype=torch.bool)
    reset[0, [2, 3, 6]] = True
    y, state = mixer(x, reset=reset)
    pieces = [by_hand(mixer, x[:, start:stop])[3] for start, stop in ((0, 2), (2, 3), (3, 6), (6, 7))]
    assert_agree(y[:1], torch.cat(pieces, 1)[:1])
    assert_agree(y[1:], by_hand(mixer, x)[3][1:])
    assert not state.tail[0, 1:].any() and torch.equal(state.tail[0, 0], x[0, -1])


def test_zoneout_keeps_cells_in_training_and_their_share_otherwise():
    mixer, x = make(zoneout=0.3).double(), inputs()
    f, i, *_ = by_hand(mixer, x)
    mixer.train()
    torch.manual_seed(0)
    found = torch.stack([mixer.transitions(x).magnitude for _ in range(300)])
    kept = found == 1
    assert_agree(found[~kept], f.expand_as(found)[~kept])
    assert kept.double().mean().item() == pytest.approx(0.3, abs=4 * math.sqrt(0.21 / kept.numel()))
    # a cell that is kept takes nothing in: its channel stays what it was
    start = mixer.init_state(2)._replace(cell=torch.full((2, D), 9.0, dtype=x.dtype))
    torch.manual_seed(1)
    kept = mixer.transitions(x[:, :1]).magnitude[:, 0] == 1
    torch.manual_seed(1)
    _, state = mixer(x[:, :1], start)
    assert kept.any() and torch.equal(state.cell == 9, kept)
    mixer.eval()
    assert_agree(mixer.transitions(x).magnitude, 1 - 0.7 * (1 - f))
    assert_agree(mixer.token_mixing(x)[:, 0, 0], 0.7 * i[:, 0].mean(-1))


def test_inspection_tells_the_gates():
    mixer, x = make(pooling="ifo").double(), inputs()
    f, i, *_ = by_hand(mixer, x)
    found = mixer.transitions(x)
    assert found.phase is None
    assert_agree(found.magnitude, f)
    assert_agree(mixer.token_mixing(x)[:, 3, 1], (i[:, 1] * f[:, 2] * f[:, 3]).mean(-1))


def test_parameters_state_and_groups():
    for pooling, matrices in (("f", 2), ("fo", 3), ("ifo", 4)):
        mixer = make(pooling=pooling, width=3)
        assert sum(p.numel() for p in mixer.parameters()) == matrices * (3 * D * D + D)
        assert mixer.state_size == 2 * D + D
    kept = {name for name, group in groups_of(make(pooling="ifo")).items() if not group.weight_decay}
    assert kept == {f"{gate}.f.{part}" for gate in "fi" for part in ("weight", "bias")}
    # as torch's Conv1d
    bound = 1 / math.sqrt(2 * 128)
    for linear in (make(128).z, make(128).f.f, make(128).o):
        assert linear.weight.abs().max() <= bound
        assert linear.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"width": 0}, "`width` must be at least 1; got 0"),
        ({"pooling": "ifoo"}, "there is no `pooling` 'ifoo'; did you mean 'ifo'"),
        ({"zoneout": 1.0}, "`zoneout` must be in [0, 1); got 1.0"),
    ],
)
def test_argument_errors(arguments, message):
    with pytest.raises(ValueError) as error:
        make(**arguments)
    assert message in str(error.value)
