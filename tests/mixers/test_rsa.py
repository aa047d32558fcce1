import math

import pytest
import torch

from linrec.mixers.rsa import RSA
from linrec.nn import groups_of
from linrec.testing import assert_agree, generator

TIME, D = 9, 6


def build(**arguments):
    torch.manual_seed(0)
    return RSA(D, **({"n_heads": 4, "d_head": 3} | arguments)).double()


def encoding(mixer, head):
    """P of a head, entry by entry."""
    P = torch.zeros(TIME, TIME, dtype=torch.float64)
    regular = mixer.n_heads - mixer.n_cosine - mixer.n_sine
    for n in range(TIME):
        for m in range(n):
            if head < regular:
                P[n, m] = math.tanh(mixer.eta[head]) ** (n - m)
                continue
            gamma, theta = torch.sigmoid(mixer.nu[head - regular]), mixer.theta[head - regular]
            wave = math.cos if head < mixer.n_heads - mixer.n_sine else math.sin
            P[n, m] = gamma ** (n - m) * wave((n - m) * theta)
    return P


def weights_of(mixer, x):
    """The matrices that V is multiplied by in each head."""
    q, k = (linear(x).unflatten(-1, (mixer.n_heads, -1)) for linear in (mixer.q, mixer.k))
    future, found = torch.ones(TIME, TIME, dtype=torch.bool).triu(1), []
    for head in range(mixer.n_heads):
        scores = q[:, head] @ k[:, head].T / math.sqrt(mixer.d_head)
        gate = torch.sigmoid(mixer.mu.expand(mixer.n_heads)[head])
        softmax = scores.masked_fill(future, -math.inf).softmax(-1)
        found.append((1 - gate) * softmax + gate * encoding(mixer, head))
    return found


@pytest.mark.parametrize(
    "arguments",
    [{}, {"gate": "layer", "bias": True}, {"n_cosine": 0, "n_sine": 0}, {"n_cosine": 3, "n_sine": 1}],
)
def test_outputs_are_the_matrices_of_the_paper(arguments):
    mixer, x = build(**arguments), torch.randn(1, TIME, D, generator=generator(), dtype=torch.float64)
    with torch.no_grad():
        v = mixer.v(x[0]).unflatten(-1, (mixer.n_heads, -1))
        weights = weights_of(mixer, x[0])
        heads = torch.stack([W @ v[:, head] for head, W in enumerate(weights)], 1)
        assert_agree(mixer(x)[0][0], mixer.out(heads.flatten(-2)))
        assert_agree(mixer.token_mixing(x)[0], torch.stack(weights).abs().mean(0))


def test_a_gate_that_is_shut_leaves_causal_attention():
    mixer, x = build(), torch.randn(2, TIME, D, generator=generator(), dtype=torch.float64)
    q, k, v = (linear(x).unflatten(-1, (4, 3)).transpose(1, 2) for linear in (mixer.q, mixer.k, mixer.v))
    torch.nn.init.constant_(mixer.mu, -math.inf)
    attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert_agree(mixer(x)[0], mixer.out(attended.transpose(1, 2).flatten(-2)))


def test_numbers_start_as_the_papers():
    torch.manual_seed(0)
    mixer = RSA(800, n_heads=800)
    assert (len(mixer.eta), len(mixer.nu), mixer.n_cosine, mixer.n_sine) == (400, 400, 200, 200)
    assert mixer.mu.abs().max() < 3 and mixer.mu.std().item() == pytest.approx(math.sqrt(3), rel=0.05)
    for magnitude in (mixer.eta.abs(), mixer.nu):
        assert magnitude.min() >= 1 and magnitude.max() <= 2 and 1.4 < magnitude.mean() < 1.6
    assert 0.4 < (mixer.eta < 0).double().mean() < 0.6
    assert (mixer.theta == math.pi / 4).all()


def test_parameters_and_their_groups():
    mixer = build(bias=True)
    # q, k, v and the output with biases; four gates; two real and two complex eigenvalues
    assert sum(p.numel() for p in mixer.parameters()) == 3 * (D + 1) * 12 + 13 * D + 4 + 2 + 2 * 2
    transitions = {name for name, group in groups_of(mixer).items() if group.name == "transition"}
    assert transitions == {"mu", "eta", "nu", "theta"}
    assert mixer.bfloat16().eta.dtype == torch.float32


def test_transitions_are_the_eigenvalues():
    mixer = build()
    found = mixer.transitions(torch.zeros(1, TIME, D, dtype=torch.float64))
    expected = torch.cat([torch.tanh(mixer.eta).abs(), torch.sigmoid(mixer.nu)]).repeat_interleave(3)
    assert_agree(found.magnitude, expected)
    assert_agree(found.phase[6:], mixer.theta.repeat_interleave(3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_cosine": 3, "n_sine": 2}, "`n_cosine` and `n_sine`"),
        ({"gate": "step"}, "`gate`"),
        ({"n_heads": 4, "d_head": None}, "`d_model`"),
        ({"dropout": 1.0}, "`dropout`"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        build(**arguments)
