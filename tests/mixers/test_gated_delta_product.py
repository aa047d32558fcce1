import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from linrec import mixers
from linrec.mixers.gated_delta_product import GatedDeltaProduct
from linrec.nn import groups_of
from linrec.ops.core.call import recording
from linrec.testing import assert_agree, generator

D = 8


def make(d_model: int = D, **arguments) -> GatedDeltaProduct:
    torch.manual_seed(0)
    mixer = mixers.build("gated_delta_product", d_model, **{"conv_size": None} | arguments)
    assert isinstance(mixer, GatedDeltaProduct)
    return mixer.double()


def inputs(time: int = 7) -> Tensor:
    return torch.randn(2, time, D, generator=generator(), dtype=torch.float64)


def parts(mixer: GatedDeltaProduct, x: Tensor) -> tuple[Tensor, ...]:
    """Return q (b, t, h, dk), k and v (b, t, n, h, d), beta (b, t, n, h) and alpha (b, t, h)."""
    n, h = mixer.n_householder, mixer.n_heads
    q = functional.silu(mixer.q(x)).unflatten(-1, (h, -1))
    k, v = (functional.silu(part(x)).unflatten(-1, (n, h, -1)) for part in (mixer.k, mixer.v))
    q, k = (part / part.norm(dim=-1, keepdim=True) for part in (q, k))
    beta = 2 * torch.sigmoid(x @ mixer.beta.projection.weight.T).unflatten(-1, (n, h))
    alpha = torch.ones(*x.shape[:2], h, dtype=x.dtype)
    if mixer.alpha is not None:
        dt = torch.log(1 + torch.exp(x @ mixer.alpha.weight.T + mixer.dt_bias))
        alpha = torch.exp(-torch.exp(mixer.A_log) * dt)
    return q, k, v, beta, alpha


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("decay", ["data", "none"])
def test_the_layer_is_its_equations(n, decay):
    mixer, x = make(n_heads=2, n_householder=n, decay=decay), inputs()
    with torch.no_grad():
        mixer.norm.weight.uniform_(0.5, 2)
    reset = torch.zeros(2, 7, dtype=torch.bool)
    reset[1, 3] = True
    q, k, v, beta, alpha = parts(mixer, x)
    made = torch.zeros(2, 7, 2, v.shape[-1], dtype=x.dtype)
    states = torch.zeros(2, 2, q.shape[-1], v.shape[-1], dtype=x.dtype)
    for b in range(2):
        for h in range(2):
            H = torch.zeros_like(states[b, h])
            for t in range(7):
                H = torch.zeros_like(H) if reset[b, t] else alpha[b, t, h] * H
                for j in range(n):
                    key, strength = k[b, t, j, h], beta[b, t, j, h]
                    H = H - strength * torch.outer(key, key @ H) + strength * torch.outer(key, v[b, t, j, h])
                o = H.T @ q[b, t, h]
                made[b, t, h] = o / (o.square().mean() + 1e-5).sqrt() * mixer.norm.weight
            states[b, h] = H
    y, state = mixer(x, reset=reset)
    assert_agree(state, states)
    assert_agree(y, mixer.out(functional.silu(mixer.gate(x)) * made.flatten(-2)))


@pytest.mark.parametrize(("beta", "scale"), [("sigmoid", 1), ("double_sigmoid", 2)])
def test_strengths_have_their_bounds(beta, scale):
    mixer, x = make(n_heads=2, n_householder=3, beta=beta), inputs()
    with recording() as calls:
        mixer(x)
    expected = scale * torch.sigmoid(x @ mixer.beta.projection.weight.T)
    assert_agree(calls[-1].inputs.beta, expected.unflatten(-1, (3, 2)).flatten(1, 2))


def test_a_single_step_is_gated_delta_net():
    mixer = make(n_heads=2, n_householder=1)
    other = mixers.build(
        "gated_delta_net", D, n_heads=2, conv_size=None, beta="double_sigmoid", d_qk=6
    ).double()
    other.load_state_dict(mixer.state_dict())
    assert_agree(mixer(inputs()), other(inputs()))


def test_two_steps_turn_what_they_find():
    """The product of two reflections turns the plane of their keys by twice the angle between the keys."""
    mixer = make(2, n_heads=1, d_qk=2, d_v=2, decay="none", output_gate=False, beta="double_sigmoid")
    angle = 0.7
    keys = torch.tensor([[1.0, 0.0], [math.cos(angle), math.sin(angle)]], dtype=torch.float64)
    with torch.no_grad():
        # SiLU keeps the direction of large positive numbers; values are zero, and strengths nearly two
        mixer.k.weight.copy_(
            torch.stack([*(100 * keys.flatten()), torch.zeros(4)][:4])[:, None].expand(4, 2) / 2
        )
        mixer.v.weight.zero_()
        mixer.beta.projection.weight.fill_(50)
    x, H = torch.ones(1, 1, 2, dtype=torch.float64), torch.eye(2, dtype=torch.float64)[None, None]
    _, turned = mixer(x, H)
    c, s = math.cos(2 * angle), math.sin(2 * angle)
    torch.testing.assert_close(turned[0, 0], torch.tensor([[c, -s], [s, c]]).double(), rtol=0, atol=1e-6)


def test_inspection_is_of_tokens():
    mixer, x = make(n_heads=2, n_householder=2), inputs()
    with torch.no_grad():
        mixer.alpha.weight *= 10
    reset = torch.zeros(2, 7, dtype=torch.bool)
    reset[1, 3] = True
    q, k, _, beta, alpha = parts(mixer, x)
    expected = torch.zeros(2, 7, 7, dtype=torch.float64)
    for b in range(2):
        for h in range(2):
            for n in range(7):
                reached = q[b, n, h]
                for m in range(n, -1, -1):
                    for j in (1, 0):
                        key, strength = k[b, m, j, h], beta[b, m, j, h]
                        expected[b, n, m] += (strength * key @ reached).abs() / 2
                        reached = reached - strength * (key @ reached) * key
                    if reset[b, m]:
                        break
                    reached = alpha[b, m, h] * reached
    assert_agree(mixer.token_mixing(x, reset=reset), expected)
    assert mixer.transitions(x) is None


def test_parameter_count():
    mixer = mixers.build("gated_delta_product", 64, n_heads=4, n_householder=3)
    d_qk, d_v, n = 48, 96, 3
    matrices = 64 * (d_qk + n * d_qk + n * d_v + 4 + n * 4 + d_v) + d_v * 64
    others = 4 * (d_qk + n * d_qk + n * d_v) + 4 + 4 + d_v // 4
    assert sum(parameter.numel() for parameter in mixer.parameters()) == matrices + others


def test_decays_start_as_in_the_released_code():
    mixer = make(2048, n_heads=512, d_qk=512, d_v=512)
    A, dt = mixer.A_log.exp(), functional.softplus(mixer.dt_bias)
    assert A.min() > 0 and 15.5 < A.max() <= 16
    # uniform in (0, 16]; log-uniform in (0.001, 0.1): means within four standard errors
    assert abs(A.mean() - 8) < 4 * 16 / math.sqrt(12 * 512)
    assert 0.00099 < dt.min() < 0.00105 and 0.095 < dt.max() < 0.101
    assert abs(dt.log10().mean() + 2) < 4 * 2 / math.sqrt(12 * 512)
    assert {name for name, group in groups_of(mixer).items() if not group.weight_decay} == {
        "A_log",
        "dt_bias",
    }


def test_matrices_start_xavier_uniform():
    mixer = make(128, n_householder=3)
    for linear in (mixer.q, mixer.k, mixer.v, mixer.alpha, mixer.beta.projection, mixer.gate, mixer.out):
        bound = 2**-2.5 * math.sqrt(6 / (linear.in_features + linear.out_features))
        sample = linear.weight.detach() / bound
        assert 0.97 < sample.abs().max() <= 1
        assert abs(sample.square().mean() - 1 / 3) < 0.06


def test_widths_are_those_of_the_released_layer():
    mixer = mixers.build("gated_delta_product", 2048)
    assert (mixer.n_heads, mixer.features.d_features, mixer.d_value) == (6, 256, 512)
    # a width that the heads do not divide is cut
    assert make(10, n_heads=2).features.d_features == 3


def test_only_the_first_step_of_a_token_decays_and_resets():
    mixer = make(n_heads=2, n_householder=3)
    reset = torch.zeros(2, 7, dtype=torch.bool)
    reset[1, 4] = True
    # in float32, as decays stay under autocast
    with recording() as calls, torch.autocast("cpu", dtype=torch.bfloat16):
        mixer.float()(inputs().float(), reset=reset)
    given = calls[-1].inputs
    assert given.log_decay.dtype == torch.float32
    decayed = (given.log_decay != 0).all(-1).flatten(2).any(2)
    assert decayed.tolist() == [[True, False, False] * 7] * 2
    assert given.reset.nonzero().tolist() == [[1, 12]]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"n_householder": 0}, "`n_householder` must be at least 1; got 0. The paper's models have 2 to 4"),
        ({"decay": "channel"}, "decay"),
        ({"n_heads": 4, "d_qk": 6}, "`d_qk`"),
        ({"n_heads": 2, "d_v": 5}, "`d_v`"),
    ],
)
def test_argument_errors(arguments, words):
    with pytest.raises(ValueError, match=words):
        make(**arguments)
