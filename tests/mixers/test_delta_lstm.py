import math

import pytest
import torch

from linrec.mixers import build
from linrec.mixers.delta_lstm import DeltaLSTM

from .fast_weights import TIME, D, check_equations, inputs, resets

VARIANTS = {
    "paper": {},
    "heads": {"n_heads": 2},
    "version 3": {"n_heads": 2, "version": 3},
    "version 2": {"n_heads": 2, "version": 2, "d_qk": 4, "d_v": 8},
    "version 1": {"n_heads": 2, "version": 1, "feature_map": "softmax"},
}


def make(d_model: int = D, **arguments) -> DeltaLSTM:
    torch.manual_seed(0)
    mixer = build("delta_lstm", d_model, **arguments)
    assert isinstance(mixer, DeltaLSTM)
    return mixer


def softmax(x):
    return x.exp() / x.exp().sum()


def elu(x):
    x = torch.where(x > 0, x + 1, x.exp())
    return x / x.sum()


def equations(mixer, x, reset, *, version=4, feature_map="elu", **_):
    """Outputs, and the last W, R, c and y of each sequence, parts and heads as the mixer has them."""
    h, dv = mixer.n_heads, mixer.d_value
    dk = mixer.features.d_features
    phi, sigmoid = {"elu": elu, "softmax": softmax}[feature_map], torch.sigmoid
    names = ("q", "k", "v", "beta", "recurrent_k", "recurrent_v", "recurrent_beta")
    outputs, states = torch.zeros(*x.shape[:2], h * dv, dtype=x.dtype), []
    for b in range(len(x)):
        for i in range(h):
            for t in range(x.shape[1]):
                if t == 0 or reset[b, t]:
                    W, R = torch.zeros(3, dv, dk, dtype=x.dtype), torch.zeros(3, dv, dv, dtype=x.dtype)
                    c = y = torch.zeros(dv, dtype=x.dtype)
                last, W_next, R_next, forward, z = y if version == 1 else softmax(y), [], [], [], []
                for g in range(3):
                    q, k, v, beta, k_R, v_R, beta_R = (
                        getattr(mixer, name).weight.chunk(3)[g].chunk(h)[i] @ x[b, t] for name in names
                    )
                    q, k, k_R = phi(q), phi(k), softmax(k_R)
                    W_next.append(W[g] + torch.outer(sigmoid(beta) * (v - W[g] @ k), k))
                    R_next.append(R[g] + torch.outer(sigmoid(beta_R) * (v_R - R[g] @ k_R), k_R))
                    forward.append(W_next[g] @ q)
                    z.append(forward[g] + R_next[g] @ last)
                W, R = torch.stack(W_next), torch.stack(R_next)
                update = z[1] if version == 4 else sigmoid(z[1])
                c = sigmoid(z[0]) * update + (1 - sigmoid(z[0])) * c
                y = sigmoid(z[2]) * c
                y = {1: softmax(y), 2: y, 3: y + forward[1], 4: y}[version]
                outputs[b, t, i * dv : (i + 1) * dv] = y
            states.append((W.mT, R.mT, c, y))
    W, R, c, y = (torch.stack(part).unflatten(0, (len(x), h)) for part in zip(*states, strict=True))
    return (
        outputs @ mixer.out.weight.T,
        W.transpose(1, 2).flatten(1, 2),
        R.transpose(1, 2).flatten(1, 2),
        c,
        y,
    )


@pytest.mark.parametrize("reset", [torch.zeros(2, TIME, dtype=torch.bool), resets()], ids=["one", "several"])
@pytest.mark.parametrize("name", VARIANTS)
def test_outputs_gradients_and_state_are_those_of_the_equations(name, reset):
    mixer = make(**VARIANTS[name]).double()
    x = inputs().requires_grad_()
    expected, *last = equations(mixer, x, reset, **VARIANTS[name])
    check_equations(mixer, x, reset, expected, last)


def test_parameters_are_those_of_the_papers_code():
    d, h, dv = 128, 8, 16
    for version in (1, 2, 3, 4):
        mixer = make(d, version=version)
        assert sum(p.numel() for p in mixer.parameters()) == d * h * (15 * dv + 6) + d * d
        for name, parameter in mixer.named_parameters():
            assert parameter.std().item() == pytest.approx(1 / math.sqrt(3 * d), rel=0.1), name


def test_state_size_counts_fast_weights_cells_and_outputs():
    assert make(n_heads=2, d_qk=8, d_v=6).state_size == 2 * (3 * (4 * 3 + 3 * 3) + 3 + 3)
    assert [make(width).n_heads for width in (6, 32, 128)] == [1, 2, 8]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_heads": 4}, "`d_qk` must be a positive multiple of `n_heads` = 4; got 6"),
        ({"n_heads": 2, "d_v": 5}, "`d_v` must be a positive multiple of `n_heads` = 2; got 5"),
        ({"version": 5}, "`version` must be 1, 2, 3 or 4; got 5"),
    ],
)
def test_argument_errors(arguments, message):
    with pytest.raises(ValueError) as error:
        make(**arguments)
    assert message in str(error.value)
