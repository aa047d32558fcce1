import math

import pytest
import torch

from linrec.mixers import build
from linrec.mixers.sru import SRU
from linrec.nn import groups_of
from linrec.testing import assert_agree, generator

D, TIME = 6, 7
VARIANTS = [
    {},
    {"recurrent_gates": False, "highway_bias": -1.0},
    {"highway": False, "refine": True, "uniform_init": True},
    {"recurrent_gates": False, "refine": True, "scale": False},
    {"highway": False, "output_gate": True, "highway_bias": 1.0},
]


def make(d_model: int = D, **arguments) -> SRU:
    torch.manual_seed(0)
    mixer = build("sru", d_model, **arguments)
    assert isinstance(mixer, SRU)
    return mixer


def inputs() -> torch.Tensor:
    return 2 * torch.randn(2, TIME, D, generator=generator(), dtype=torch.float64)


def by_hand(mixer, x, c, alpha):
    """h, c and f of every step, one step at a time."""
    zero = torch.zeros(D, dtype=x.dtype)
    v_f, v_r = (zero if v is None else v for v in (mixer.v_f, mixer.v_r))
    rows = []
    for t in range(x.shape[1]):
        x_t = x[:, t]
        f = torch.sigmoid(x_t @ mixer.f.f.weight.T + v_f * c + mixer.f.f.bias)
        if mixer.f.r is not None:
            r = torch.sigmoid(x_t @ mixer.f.r.weight.T + mixer.f.r.bias)
            f = r * (1 - (1 - f) ** 2) + (1 - r) * f**2
        new = f * c + (1 - f) * (x_t @ mixer.W.weight.T)
        h = new
        if mixer.r is not None:
            r = torch.sigmoid(x_t @ mixer.r.weight.T + v_r * c + mixer.r.bias)
            h = r * new
            if mixer.highway:
                h = h + (1 - r) * x_t * alpha
        rows.append(torch.stack([h, new, f]))
        c = new
    return torch.stack(rows, 2)


@pytest.mark.parametrize("arguments", VARIANTS)
def test_outputs_state_and_gradients_are_the_papers_equations(arguments):
    mixer, x = make(**arguments).double(), inputs().requires_grad_()
    alpha = (
        math.sqrt(1 + 2 * math.exp(arguments.get("highway_bias", 0))) if arguments.get("scale", True) else 1
    )
    start = torch.randn(2, D, generator=generator(3), dtype=torch.float64).requires_grad_()
    y, state = mixer(x, start)
    expected, c, _ = by_hand(mixer, x, start, alpha)
    assert_agree((y, state), (expected, c[:, -1]))
    wanted = [x, start, *mixer.parameters()]
    weight = torch.randn(y.shape, generator=generator(5), dtype=y.dtype)
    found = torch.autograd.grad((weight * y).sum(), wanted, retain_graph=True)
    assert_agree(found, torch.autograd.grad((weight * expected).sum(), wanted), "gradients")


def test_without_v_the_scan_is_the_loop():
    mixer, x = make().double(), inputs()
    scanned = make(recurrent_gates=False).double()
    scanned.load_state_dict({k: v for k, v in mixer.state_dict().items() if not k.startswith("v_")})
    with torch.no_grad():
        mixer.v_f.zero_()
        mixer.v_r.zero_()
    assert_agree(scanned(x), mixer(x))


def test_inspection_tells_the_forget_gates():
    mixer, x = make().double(), inputs()
    *_, f = by_hand(mixer, x, torch.zeros(2, D, dtype=torch.float64), 1)
    found = mixer.transitions(x)
    assert found.phase is None
    assert_agree(found.magnitude, f)
    assert_agree(mixer.token_mixing(x)[:, 3, 1], ((1 - f[:, 1]) * f[:, 2] * f[:, 3]).mean(-1))
    assert mixer.transitions(x[:, :0]).magnitude.shape == (2, 0, D)


def test_initial_distribution():
    mixer = make(512, highway_bias=-2.0)
    for weight, variance in (
        (mixer.W.weight, 1 / 512),
        (mixer.f.f.weight, 0.5 / 512),
        (mixer.r.weight, 0.5 / 512),
    ):
        assert weight.var().item() == pytest.approx(variance, rel=0.02)
        assert weight.abs().max() <= math.sqrt(3 * variance)
    for v in (mixer.v_f, mixer.v_r):
        assert v.var().item() == pytest.approx(0.5, rel=0.1) and v.abs().max() <= math.sqrt(1.5)
    assert not mixer.f.f.bias.any() and (mixer.r.bias == -2).all()
    spread = torch.sigmoid(make(512, uniform_init=True).f.f.bias)
    assert spread.std().item() == pytest.approx(1 / math.sqrt(12), rel=0.1)
    # with alpha, outputs start with about the variance of the inputs
    x = torch.randn(8, 50, 512, generator=generator())
    assert make(512, highway_bias=-2.0)(x)[0].var().item() == pytest.approx(1, rel=0.1)


def test_parameters_state_and_groups():
    def count(**arguments):
        return sum(parameter.numel() for parameter in make(**arguments).parameters())

    assert count() == 3 * D * D + 4 * D
    assert count(recurrent_gates=False) == 3 * D * D + 2 * D
    assert count(highway=False) == 2 * D * D + 2 * D
    assert count(highway=False, output_gate=True) == count()
    assert make().state_size == D
    kept = {name for name, group in groups_of(make()).items() if not group.weight_decay}
    assert kept == {"f.f.weight", "f.f.bias", "v_f"}


def test_an_output_gate_beside_the_highway_connection_is_refused():
    with pytest.raises(ValueError, match="`output_gate` needs `highway=False`"):
        make(output_gate=True)


@pytest.mark.parametrize("bias", [1000.0, -1000.0, math.nan])
def test_a_bias_that_closes_a_gate_for_ever_is_refused(bias):
    with pytest.raises(ValueError, match=f"`highway_bias` must be .*; got {bias}"):
        make(highway_bias=bias)
