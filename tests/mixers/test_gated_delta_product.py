import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from linrec import mixers
from linrec.mixers.gated_delta_product import GatedDeltaProduct
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
                    reached = alpha[b, m, h] * reached
    assert_agree(mixer.token_mixing(x), expected)
    assert mixer.transitions(x) is None


def test_parameter_count():
    mixer = mixers.build("gated_delta_product", 64, n_heads=4, n_householder=3)
    d_qk, d_v, n = 48, 96, 3
    matrices = 64 * (d_qk + n * d_qk + n * d_v + 4 + n * 4 + d_v) + d_v * 64
    others = 4 * (d_qk + n * d_qk + n * d_v) + 4 + 4 + d_v // 4
    assert sum(parameter.numel() for parameter in mixer.parameters()) == matrices + others


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
