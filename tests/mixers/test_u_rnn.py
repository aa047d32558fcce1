"""uRNN."""

import math

import pytest
import torch

from linrec.mixers import build
from linrec.mixers.u_rnn import URNN
from linrec.nn import groups_of
from linrec.nn.activations import to_complex
from linrec.testing import assert_agree, generator
from tests.mixers.orthogonality import trained

D = 8


def make(d_model: int = D, **arguments) -> URNN:
    torch.manual_seed(0)
    mixer = build("u_rnn", d_model, **arguments).double()
    assert isinstance(mixer, URNN)
    return mixer


def matrix(mixer: URNN) -> torch.Tensor:
    """W, by the response to states along each axis without input."""
    torch.nn.init.zeros_(mixer.b)
    n, h_0 = mixer.d_state, to_complex(mixer.h_0.detach())
    # modReLU adds a small number to the magnitudes
    size = 1e8
    with torch.no_grad():
        _, state = mixer(torch.zeros(n, 1, D).double(), size * torch.eye(n) - h_0)
    return ((state + h_0) / size).mT


def test_the_matrix_is_the_product_of_the_paper():
    mixer = make(d_state=6)
    n = mixer.d_state
    eye, index = torch.eye(n, dtype=torch.complex128), torch.arange(n).double()
    F = torch.exp(-2j * math.pi / n * index[:, None] * index) / math.sqrt(n)
    D_1, D_2, D_3 = (torch.diag(torch.exp(1j * theta)) for theta in mixer.theta.detach())
    v = to_complex(mixer.v.detach())
    R_1, R_2 = (eye - 2 * torch.outer(v_i, v_i.conj()) / v_i.abs().square().sum() for v_i in v)
    Pi = eye[mixer.permutation]
    W = D_3 @ R_2 @ F.mH @ D_2 @ Pi @ R_1 @ F @ D_1
    assert (matrix(mixer) - W).abs().max() < 1e-12
    assert (W @ W.mH - eye).abs().max() < 1e-12


def test_the_matrix_moves_and_stays_unitary_in_training():
    mixer = make()
    before = matrix(mixer)
    after = matrix(trained(mixer.float()).double())
    assert (after - before).abs().max() > 0.1
    assert (after @ after.mH - torch.eye(D)).abs().max() < 1e-9


def test_sequences_start_from_the_learned_state():
    mixer = make()
    x = torch.randn(2, 3, D, generator=generator(0)).double()
    zeros = torch.zeros(2, D, dtype=torch.complex128)
    y, state = mixer(x)
    again, last = mixer(x, zeros)
    assert torch.equal(y, again) and torch.equal(state, last)
    with torch.no_grad():
        h_0 = mixer.h_0.clone()
        mixer.h_0.add_(1.0)
        # from the same h, the same outputs
        later, _ = mixer(x, zeros + to_complex(h_0 - mixer.h_0))
        assert_agree(later, y.detach())
        assert (mixer(x)[0] - y).abs().max() > 0.1


def test_initial_values_and_groups():
    n = 200
    mixer = make(100, d_state=n)
    for weight, bound in [
        (mixer.V.weight, (6 / 500) ** 0.5),
        (mixer.U.weight, (6 / 500) ** 0.5),
        (mixer.v, (6 / 402) ** 0.5),
        (mixer.h_0, (1.5 / n) ** 0.5),
        (mixer.b, 0.01),
        (mixer.theta, math.pi),
    ]:
        assert 0.97 * bound < weight.abs().max() <= bound
        assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.1)
    assert not mixer.U.bias.any()
    assert torch.equal(mixer.permutation.sort().values, torch.arange(n))
    # W and h_0, U and V, biases
    count = (3 + 4 + 2) * n + 2 * 2 * n * 100 + n + 100
    assert sum(parameter.numel() for parameter in mixer.parameters()) == count
    groups = groups_of(mixer)
    assert {name for name, group in groups.items() if group.name == "transition"} == {"theta", "v"}
    assert not groups["v"].weight_decay


def test_a_state_without_channels_is_refused():
    with pytest.raises(ValueError, match="`d_state` must be at least 1; got 0"):
        make(d_state=0)
