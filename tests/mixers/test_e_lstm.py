import pytest
import torch

from linrec.mixers import build
from linrec.nn import groups_of
from linrec.ops.core.call import recording
from linrec.ops.nonlinear_scan import newton_options


def test_initial_values_and_the_number_of_parameters_are_those_of_the_released_code():
    torch.manual_seed(0)
    mixer = build("e_lstm", 100, forget_bias=2.0)
    assert sum(p.numel() for p in mixer.parameters()) == 2 * 100 * 100 + 4 * 100 + 200 * 100 + 100
    for weight, mean in ((mixer.F.weight, 0), (mixer.Z.bias, 0), (mixer.w_f, 0), (mixer.F.bias, 2)):
        assert weight.mean().item() == pytest.approx(mean, abs=0.03)
        assert weight.std().item() == pytest.approx(0.1, rel=0.2)
    assert mixer.state_size == 100
    assert {name for name, group in groups_of(mixer).items() if not group.weight_decay} == {"w_f", "w_z"}


def test_a_step_by_hand():
    mixer = build("e_lstm", 1).double()
    values = {"F.weight": 1.0, "F.bias": 0.5, "Z.weight": -2.0, "Z.bias": 0.25, "w_f": 0.75, "w_z": -1.5}
    with torch.no_grad():
        for name, value in values.items():
            mixer.get_parameter(name).fill_(value)
        mixer.o.weight.copy_(torch.tensor([[3.0, -4.0]]))
        mixer.o.bias.fill_(0.1)
    u, c = torch.tensor(0.3, dtype=torch.float64), torch.tensor(0.8, dtype=torch.float64)
    f, z = torch.sigmoid(u + 0.75 * c + 0.5), torch.tanh(-2 * u - 1.5 * c + 0.25)
    after = f * c + (1 - f) * z
    h, state = mixer(u.view(1, 1, 1), c.view(1, 1))
    assert torch.allclose(state, after, rtol=1e-12)
    assert torch.allclose(h, torch.sigmoid(3 * u - 4 * after + 0.1) * after, rtol=1e-12)


def test_newtons_jacobian_is_its_diagonal():
    mixer = build("e_lstm", 32, mode="newton")
    with recording() as calls, newton_options(max_iterations=8):
        mixer(torch.randn(1, 60, 32))
    # no matrix of 32 x 32 entries per step
    assert calls[0].inputs.state.shape == (1, 32, 1)


def test_a_forget_bias_must_be_finite():
    with pytest.raises(ValueError, match="`forget_bias` must be"):
        build("e_lstm", 8, forget_bias=float("nan"))
