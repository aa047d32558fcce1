import math

import pytest
import torch

from linrec.mixers import build
from linrec.mixers.delta_net import DeltaNet
from linrec.ops import delta_rule
from linrec.ops.core.call import recording
from linrec.ops.delta_rule.torch import DeltaRule
from linrec.testing import assert_agree, generator

D = 6


def make(d_model: int = D, **arguments) -> DeltaNet:
    torch.manual_seed(0)
    # most tests are of what follows the convolution
    mixer = build("delta_net", d_model, **{"conv_size": None} | arguments)
    assert isinstance(mixer, DeltaNet)
    return mixer


def inputs(time: int = 7, seed: int = 0) -> torch.Tensor:
    return torch.randn(2, time, D, generator=generator(seed), dtype=torch.float64)


def memory(mixer, x: torch.Tensor, **options) -> DeltaRule:
    """Inputs of the mixer's call of the delta rule."""
    with recording() as calls:
        mixer(x, **options)
    return calls[-1].inputs


def by_hand(mixer: DeltaNet, x: torch.Tensor, *, scale: float, gate: bool) -> tuple:
    """The paper's equations for one row and head after the other, S being (dv, dk) as there."""
    outputs, states = [], []
    for row in x:
        heads, final = [], []
        for h in range(mixer.n_heads):
            pick = [
                linear.weight.unflatten(0, (mixer.n_heads, -1))[h] for linear in (mixer.q, mixer.k, mixer.v)
            ]
            q, k, v = (row @ weight.T for weight in pick)
            q, k, v = q * torch.sigmoid(q), k * torch.sigmoid(k), v * torch.sigmoid(v)
            q, k = q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)
            beta = scale * torch.sigmoid(row @ mixer.beta.projection.weight[h])
            S, steps = torch.zeros(v.shape[1], k.shape[1], dtype=x.dtype), []
            for t in range(len(row)):
                old = S @ k[t]
                S = S + beta[t] * torch.outer(v[t] - old, k[t])
                o = S @ q[t]
                steps.append(o / (o.square().mean() + 1e-5).sqrt() * mixer.norm.weight)
            heads.append(torch.stack(steps))
            final.append(S.T)
        o = torch.cat(heads, -1)
        if gate:
            g = row @ mixer.gate.weight.T
            o = o * g * torch.sigmoid(g)
        outputs.append(o @ mixer.out.weight.T)
        states.append(torch.stack(final))
    return torch.stack(outputs), torch.stack(states)


def test_the_default_layer_is_the_papers_equations():
    mixer, x = make().double(), inputs()
    assert_agree(mixer(x), by_hand(mixer, x, scale=1, gate=False))


def test_heads_gate_and_negative_eigenvalues():
    mixer = make(n_heads=2, d_qk=4, d_v=10, beta="double_sigmoid", output_gate=True).double()
    with torch.no_grad():
        # all strengths above one, and a norm that has learned something
        mixer.beta.projection.weight.copy_(torch.eye(6)[:2])
        mixer.norm.weight.copy_(torch.arange(1.0, 6.0))
    x = inputs()
    x[..., :2] = x[..., :2].abs()
    assert mixer.beta(x).min() > 1
    assert_agree(mixer(x), by_hand(mixer, x, scale=2, gate=True))


def test_it_recalls_what_was_bound_to_a_key():
    # strengths of one and orthogonal keys, one for each token: the last value of each is found exactly
    mixer = make(4, beta="one", feature_map="relu", output_norm="none").double()
    with torch.no_grad():
        for linear in (mixer.q, mixer.k, mixer.out):
            linear.weight.copy_(torch.eye(4))
        mixer.v.weight.copy_(torch.randn(4, 4, generator=generator()))
    tokens = torch.tensor([0, 1, 2, 0, 1, 3, 2, 0])
    strength = torch.arange(1.0, 9.0, dtype=torch.float64)
    x = strength[:, None] * torch.eye(4, dtype=torch.float64)[tokens]
    y, _ = mixer(x[None])
    assert_agree(y[0], torch.nn.functional.silu(mixer.v(x)))
    _, state = mixer(x[None])
    last = [7, 4, 6, 5]
    assert_agree(state[0, 0], torch.nn.functional.silu(mixer.v(x[last])))


def test_parity_with_negative_eigenvalues():
    # one key, v = 0 by construction: the state changes its sign at every one, and keeps it at every zero
    mixer = make(2, n_heads=1, d_qk=2, d_v=2, beta="double_sigmoid", feature_map="relu").double()
    with torch.no_grad():
        mixer.k.weight.copy_(torch.tensor([[1.0, 1.0], [0.0, 0.0]]))
        mixer.beta.projection.weight.copy_(torch.tensor([[50.0, -50.0]]))
        mixer.v.weight.zero_()
    bits = torch.arange(101) % 3 == 0
    x = torch.nn.functional.one_hot((~bits).long(), 2).double()[None]
    start = torch.zeros(1, 1, 2, 2, dtype=torch.float64)
    start[0, 0, 0] = 1
    _, state = mixer(x, start)
    assert bits.sum() % 2 == 0
    assert_agree(state, start)
    _, state = mixer(x[:, :100], start)
    assert_agree(state, start)
    _, state = mixer(x[:, :1], start)
    assert_agree(state, -start)


def test_token_mixing_is_what_values_are_multiplied_by():
    mixer = make(n_heads=2, output_norm="none").double()
    x = inputs()
    reset = torch.zeros(2, 7, dtype=torch.bool)
    reset[1, 3] = True
    mixing = mixer.token_mixing(x, reset=reset)
    assert torch.equal(mixing, mixing.tril()) and mixing[1, 3:, :3].count_nonzero() == 0
    given = memory(mixer, x)
    v = given.v.detach().requires_grad_()
    o, _ = delta_rule(given.q, given.k, v, given.beta, reset=reset)
    for n in range(7):
        (gradient,) = torch.autograd.grad(o[:, n].sum(), v, retain_graph=True)
        # every value channel of a head is multiplied by the same
        assert_agree(mixing[:, n], gradient[..., 0].abs().mean(-1))


def test_a_convolution_filters_what_the_projections_give():
    mixer, x = make(conv_size=3).double(), inputs()
    taps = mixer.conv.weight
    assert taps.shape == (18, 3) and taps.abs().max() <= 3**-0.5
    filtered = []
    for linear, rows in zip((mixer.q, mixer.k, mixer.v), taps.split(6), strict=True):
        channels = torch.nn.functional.pad(linear(x), (0, 0, 2, 0))
        y = sum(rows[:, j] * channels[:, 2 - j : 9 - j] for j in range(3))
        filtered.append(y * torch.sigmoid(y))
    (_, (tail, _)), (q, k, v, *_) = mixer(x), memory(mixer, x)
    assert_agree((q[:, :, 0], k[:, :, 0]), tuple(mixer.features(part) for part in filtered[:2]))
    assert_agree(v[:, :, 0], filtered[2])
    assert_agree(tail, torch.cat([linear(x)[:, -2:] for linear in (mixer.q, mixer.k, mixer.v)], -1))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        # q, k, v and out, one row of beta, and the norm of a head
        ({}, 4 * D * D + D + D),
        ({"n_heads": 3}, 4 * D * D + 3 * D + 2),
        ({"d_qk": 4, "d_v": 8}, 2 * 4 * D + 2 * 8 * D + D + 8),
        ({"output_gate": True, "output_norm": "none", "beta": "one"}, 5 * D * D),
        ({"conv_size": 4}, 4 * D * D + D + D + 3 * D * 4),
    ],
)
def test_parameter_counts(arguments, expected):
    assert sum(parameter.numel() for parameter in make(**arguments).parameters()) == expected


def test_matrices_start_xavier_uniform_with_the_papers_gain():
    mixer = make(128, d_v=384)
    for linear in (mixer.q, mixer.v, mixer.out):
        bound = 2**-2.5 * math.sqrt(6 / (linear.in_features + linear.out_features))
        sample = linear.weight.detach() / bound
        assert 0.99 < sample.abs().max() <= 1
        assert abs(sample.square().mean() - 1 / 3) < 0.01


def test_the_default_convolution_has_four_taps_and_its_tail_is_in_the_states_dtype():
    mixer = build("delta_net", D).double()
    assert mixer.conv.weight.shape == (3 * D, 4)
    assert [part.dtype for part in mixer.init_state(2)] == [torch.float64, torch.float64]


def test_heads_are_as_wide_as_the_papers():
    assert [make(width).n_heads for width in (64, 128, 384, 1024)] == [1, 1, 3, 8]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"conv_size": 0},
            "`width` of a short convolution, a mixer's `conv_size`, must be at least 1 tap; got 0",
        ),
        ({"d_v": 6, "d_qk": 8, "n_heads": 4}, "`d_v` must be a positive multiple of `n_heads` = 4; got 6"),
        ({"d_qk": 5, "n_heads": 2}, "`d_qk` must be a positive multiple of `n_heads` = 2; got 5"),
        ({"qk_norm": "L2"}, "there is no `qk_norm` 'L2'; did you mean"),
        ({"beta": "sigmod"}, "there is no `beta` 'sigmod'; did you mean 'sigmoid'"),
        ({"feature_map": "selu"}, "there is no `feature_map` 'selu'; did you mean"),
        ({"output_norm": "batch"}, "there is no `output_norm` 'batch'"),
    ],
)
def test_argument_errors(arguments, message):
    with pytest.raises(ValueError) as error:
        make(**arguments)
    assert message in str(error.value)
