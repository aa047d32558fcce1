import itertools
import math

import pytest
import torch

from linrec.mixers import build
from linrec.mixers.gated_delta_net import GatedDeltaNet
from linrec.nn import groups_of
from linrec.ops import delta_rule
from linrec.ops.core.call import recording
from linrec.ops.delta_rule.torch import DeltaRule
from linrec.testing import assert_agree, generator

D = 8


def make(d_model: int = D, **arguments) -> GatedDeltaNet:
    torch.manual_seed(0)
    # most tests are of what follows the convolution
    mixer = build("gated_delta_net", d_model, **{"conv_size": None} | arguments)
    assert isinstance(mixer, GatedDeltaNet)
    return mixer


def inputs(time: int = 7) -> torch.Tensor:
    return torch.randn(2, time, D, generator=generator(), dtype=torch.float64)


def memory(mixer, x: torch.Tensor, **options) -> DeltaRule:
    """Inputs of the mixer's call of the delta rule."""
    with recording() as calls:
        mixer(x, **options)
    return calls[-1].inputs


def silu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


def test_the_default_layer_is_the_papers_equations():
    # for one row and head after the other, S being (dv, dk) as there
    mixer, x = make(n_heads=2).double(), inputs()
    with torch.no_grad():
        mixer.norm.weight.copy_(torch.linspace(0.5, 2, 6))
    y, state = mixer(x)
    for b, row in enumerate(x):
        heads = []
        for h in range(2):
            q, k, v = (
                silu(row @ linear.weight.unflatten(0, (2, -1))[h].T) for linear in (mixer.q, mixer.k, mixer.v)
            )
            q, k = q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)
            dt = torch.log(1 + torch.exp(row @ mixer.alpha.weight[h] + mixer.dt_bias[h]))
            alpha = torch.exp(-torch.exp(mixer.A_log[h]) * dt)
            beta = torch.sigmoid(row @ mixer.beta.projection.weight[h])
            S, steps = torch.zeros(6, 3, dtype=x.dtype), []
            for t in range(len(row)):
                S = S @ (alpha[t] * (torch.eye(3) - beta[t] * torch.outer(k[t], k[t])))
                S = S + beta[t] * torch.outer(v[t], k[t])
                o = S @ q[t]
                steps.append(o / (o.square().mean() + 1e-5).sqrt() * mixer.norm.weight)
            heads.append(torch.stack(steps))
            assert_agree(state[b, h], S.T)
        o = torch.cat(heads, -1) * silu(row @ mixer.gate.weight.T)
        assert_agree(y[b], o @ mixer.out.weight.T)


def test_token_mixing_is_the_mean_over_heads_of_products_of_transitions():
    # o_n = sum_m beta_m (k_m^T A_{m+1} .. A_n q_n) v_m with A_j = alpha_j (I - beta_j k_j k_j^T)
    mixer, x = make(n_heads=2).double(), inputs()
    with torch.no_grad():
        # matrices as drawn make decays alike
        mixer.alpha.weight *= 10
    reset = torch.zeros(2, len(x[0]), dtype=torch.bool)
    reset[1, 3] = True
    expected = torch.zeros(2, 7, 7, dtype=torch.float64)
    q, k = (
        torch.nn.functional.normalize(silu(x @ linear.weight.T).unflatten(-1, (2, -1)), dim=-1)
        for linear in (mixer.q, mixer.k)
    )
    beta = torch.sigmoid(x @ mixer.beta.projection.weight.T)
    dt = torch.log(1 + torch.exp(x @ mixer.alpha.weight.T + mixer.dt_bias))
    alpha = torch.exp(-torch.exp(mixer.A_log) * dt)
    for b, h, n in itertools.product(range(2), range(2), range(7)):
        reached = q[b, n, h]
        for m in range(n, -1, -1):
            expected[b, n, m] += (beta[b, m, h] * k[b, m, h] @ reached).abs() / 2
            if reset[b, m]:
                break
            reached = alpha[b, m, h] * (reached - beta[b, m, h] * (k[b, m, h] @ reached) * k[b, m, h])
    assert_agree(mixer.token_mixing(x, reset=reset), expected)


def test_without_decay_it_is_delta_net():
    shared = {"n_heads": 2, "d_qk": 4, "d_v": 8, "output_gate": True}
    mixer = make(decay="none", **shared).double()
    other = build("delta_net", D, conv_size=None, **shared).double()
    other.load_state_dict(mixer.state_dict())
    assert_agree(mixer(inputs()), other(inputs()))
    assert memory(mixer, inputs()).log_decay is None


def test_decays_start_as_in_the_released_code():
    mixer = make(2048, n_heads=512, d_v=512).double()
    A, dt = mixer.A_log.exp(), torch.nn.functional.softplus(mixer.dt_bias)
    assert A.min() > 0 and 15.5 < A.max() <= 16
    # uniform in (0, 16]; log-uniform in (0.001, 0.1): means within four standard errors
    assert abs(A.mean() - 8) < 4 * 16 / math.sqrt(12 * 512)
    assert 0.00099 < dt.min() < 0.00105 and 0.095 < dt.max() < 0.101
    assert abs(dt.log10().mean() + 2) < 4 * 2 / math.sqrt(12 * 512)
    at_zero = memory(mixer, torch.zeros(1, 1, 2048, dtype=torch.float64)).log_decay
    assert_agree(at_zero[0, 0, :, 0], -A * dt)


def test_matrices_start_xavier_uniform_with_the_first_gain_of_fla():
    mixer = make(128)
    for linear in (mixer.q, mixer.v, mixer.alpha, mixer.gate, mixer.out):
        bound = 2**-2.5 * math.sqrt(6 / (linear.in_features + linear.out_features))
        sample = linear.weight.detach() / bound
        assert 0.97 < sample.abs().max() <= 1
        assert abs(sample.square().mean() - 1 / 3) < 0.06


def test_the_default_convolution_has_four_taps():
    assert build("gated_delta_net", D).conv.weight.shape == (6 + 6 + 12, 4)


def test_an_eps_far_from_rounding_is_that_of_the_norm():
    mixer, x = make(norm_eps=0.5, output_gate=False).double(), inputs()
    o, _ = delta_rule(*memory(mixer, x)[:5])
    expected = o / (o.square().mean(-1, keepdim=True) + 0.5).sqrt()
    assert_agree(mixer(x)[0], expected.flatten(-2) @ mixer.out.weight.T)


def test_decays_stay_in_float32():
    mixer = make(n_heads=2)
    expected = memory(mixer.double(), inputs()).log_decay
    mixer = mixer.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = memory(mixer, inputs().float()).log_decay
    assert found.dtype == torch.float32
    assert_agree(found, expected)


def test_no_weight_decay_for_what_makes_the_decay_of_a_head():
    kept = {name for name, group in groups_of(make()).items() if not group.weight_decay}
    assert kept == {"A_log", "dt_bias"}
    assert {group.name for group in groups_of(make()).values()} == {"default"}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        # dk = 6, dv = 12: q and k, v, gate and out; rows of alpha and beta, A_log and dt_bias; the norm
        ({}, 2 * 6 * D + 3 * 12 * D + 2 * D + 2 + 12),
        ({"n_heads": 2}, 2 * 6 * D + 3 * 12 * D + 2 * (2 * D + 2) + 6),
        ({"decay": "none", "output_gate": False, "output_norm": "none"}, 2 * 6 * D + 2 * 12 * D + D),
    ],
)
def test_parameter_counts(arguments, expected):
    assert sum(parameter.numel() for parameter in make(**arguments).parameters()) == expected


def test_widths_are_those_of_the_released_code():
    # 6 d_model^2 parameters in matrices, in heads of 256 keys and 512 values
    mixer = make(1024)
    assert (mixer.n_heads, mixer.features.d_features, mixer.d_value) == (3, 256, 512)
    matrices = sum(linear.weight.numel() for linear in (mixer.q, mixer.k, mixer.v, mixer.gate, mixer.out))
    assert matrices == 6 * 1024**2
    # a width that the heads do not divide is cut
    assert make(10, n_heads=2).features.d_features == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_heads": 0}, "`n_heads` must be at least 1; got 0"),
        ({"d_qk": 5, "n_heads": 2}, "`d_qk` must be a positive multiple of `n_heads` = 2; got 5"),
        ({"decay": "fixed"}, "there is no `decay` 'fixed'"),
        ({"beta": "two"}, "there is no `beta` 'two'"),
    ],
)
def test_argument_errors(arguments, message):
    with pytest.raises(ValueError) as error:
        make(**arguments)
    assert message in str(error.value)
