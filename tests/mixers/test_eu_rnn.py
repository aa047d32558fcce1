"""EURNN."""

import cmath
import math

import pytest
import torch

from linrec.mixers import build
from linrec.mixers.eu_rnn import EURNN
from linrec.nn import groups_of
from tests.mixers.orthogonality import trained

# an odd width leaves a channel without a pair, and a single channel has none
VARIANTS = [
    (8, {}),
    (7, {"capacity": 5}),
    (1, {}),
    (8, {"style": "fft"}),
    (2, {"style": "fft"}),
    (8, {"capacity": 3, "is_complex": False}),
    (4, {"style": "fft", "is_complex": False}),
]
every_variant = pytest.mark.parametrize(("d_model", "arguments"), VARIANTS)


def make(d_model: int, arguments) -> EURNN:
    torch.manual_seed(0)
    mixer = build("eu_rnn", d_model, **arguments).double()
    assert isinstance(mixer, EURNN)
    return mixer


def matrix(mixer: EURNN) -> torch.Tensor:
    """W, by the response to states along each axis without input; modReLU starts as the identity."""
    n = mixer.d_model
    torch.nn.init.constant_(mixer.b, 0.01 if mixer.is_complex else 0.0)
    eye = torch.eye(n, dtype=torch.complex128 if mixer.is_complex else torch.float64)
    with torch.no_grad():
        return mixer(torch.zeros(n, 1, n).double(), eye)[1].mT


def pairs_of(d_model: int, style: str = "tunable", capacity: int = 2, **_):
    """Lists of pairs, layer by layer, written out in the order of p."""
    if style == "fft":
        distances = [d_model // 2**k for k in range(1, int(math.log2(d_model)) + 1)]
        return [[(p, p + d) for p in range(d_model) if p // d % 2 == 0] for d in distances]
    return [[(p, p + 1) for p in range(layer % 2, d_model - 1, 2)] for layer in range(capacity)]


@every_variant
def test_the_matrix_is_the_product_of_the_rotations(d_model, arguments):
    mixer = make(d_model, arguments)
    theta = iter(mixer.theta.tolist())
    phi = iter([0.0] * len(mixer.theta) if mixer.phi is None else mixer.phi.tolist())
    W = torch.eye(d_model, dtype=torch.complex128)
    for layer in pairs_of(d_model, **arguments):
        F = torch.eye(d_model, dtype=torch.complex128)
        for p, q in layer:
            t, e = next(theta), cmath.exp(1j * next(phi))
            F[p, p], F[p, q] = math.cos(t), -math.sin(t) * e
            F[q, p], F[q, q] = math.sin(t), math.cos(t) * e
        W = F @ W
    assert next(theta, None) is None
    if mixer.omega is not None:
        W = torch.exp(1j * mixer.omega.detach())[:, None] * W
    assert (matrix(mixer) - W).abs().max() < 1e-12
    assert (W @ W.mH - torch.eye(d_model)).abs().max() < 1e-12


@pytest.mark.parametrize("arguments", [{"capacity": 4}, {"style": "fft"}, {"is_complex": False}])
def test_the_matrix_moves_and_stays_unitary_in_training(arguments):
    mixer = make(8, arguments)
    before = matrix(mixer)
    after = matrix(trained(mixer.float()).double())
    assert (after - before).abs().max() > 0.1
    assert (after @ after.mH - torch.eye(8)).abs().max() < 1e-9


@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        # as many as a unitary matrix has
        ({"capacity": 8}, 64),
        ({"capacity": 8, "is_complex": False}, 28),
        ({"style": "fft"}, 2 * 12 + 8),
    ],
)
def test_numbers_of_angles(arguments, count):
    mixer = make(8, arguments)
    angles = {name: x for name, x in mixer.named_parameters() if name not in ("U.weight", "b")}
    assert sum(x.numel() for x in angles.values()) == count
    groups = groups_of(mixer)
    assert {name for name, group in groups.items() if group.name == "transition"} == angles.keys()
    assert not any(groups[name].weight_decay for name in angles)


def test_initial_values():
    mixer = make(1024, {"style": "fft"})
    for parameter, bound in [
        (mixer.theta, math.pi),
        (mixer.phi, math.pi),
        (mixer.omega, math.pi),
        (mixer.U.weight, 0.01),
    ]:
        assert 0.99 * bound < parameter.abs().max() <= bound
        assert parameter.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)
    assert mixer.U.weight.shape == (2048, 1024)
    assert (mixer.b - 0.01).abs().max() < 1e-8


@pytest.mark.parametrize(
    ("d_model", "arguments", "message"),
    [
        (8, {"capacity": 0}, "`capacity` must be at least 1; got 0"),
        (8, {"capacity": 3, "style": "fft"}, r"`capacity` must be None in the FFT style, .*; got 3"),
        (6, {"style": "fft"}, "`d_model` must be a power of 2 above 1 in the FFT style; got 6"),
        (1, {"style": "fft"}, "`d_model` must be a power of 2 above 1 in the FFT style; got 1"),
        (8, {"style": "ftf"}, "there is no `style` 'ftf'; did you mean 'fft'"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(d_model, arguments, message):
    with pytest.raises(ValueError, match=message):
        make(d_model, arguments)
