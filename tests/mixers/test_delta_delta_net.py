import pytest
import torch

from linrec.mixers import build
from linrec.mixers.delta_delta_net import DeltaDeltaNet
from tests.tiers import tiered

from .fast_weights import TIME, D, check_equations, inputs, resets

VARIANTS = {
    "paper": {},
    "heads": {"n_heads": 2},
    "widths": {"n_heads": 2, "d_qk": 4, "d_v": 8},
    "base weights": {"n_heads": 2, "base_weights": True},
    "sums that are larger": {"qk_eps": 0.1, "feature_map": "softmax"},
}


def make(d_model: int = D, **arguments) -> DeltaDeltaNet:
    torch.manual_seed(0)
    mixer = build("delta_delta_net", d_model, **arguments)
    assert isinstance(mixer, DeltaDeltaNet)
    return mixer


def phi(x, name, eps):
    x = torch.where(x > 0, x + 1, x.exp()) if name == "elu" else x.exp() / x.exp().sum()
    return x / (x.sum() + eps)


def equations(mixer, x, reset, *, feature_map="elu", qk_eps=0.0, **_):
    """Outputs, and the last F - F_0 and W of each sequence and head, transposed."""
    h, dk, dv = mixer.n_heads, mixer.widths[0], mixer.widths[2]
    outputs, states = torch.zeros(*x.shape[:2], h * dv, dtype=x.dtype), []
    rows = lambda module, i: module.weight.chunk(h)[i]  # noqa: E731
    for b in range(len(x)):
        for i in range(h):
            F_0 = torch.zeros(2 * dk + dv + 1, dk, dtype=x.dtype) if mixer.F is None else mixer.F[i].T
            for t in range(x.shape[1]):
                if t == 0 or reset[b, t]:
                    F, W = F_0, torch.zeros(dv, dk, dtype=x.dtype)
                q, k, v, beta = (rows(part, i) @ x[b, t] for part in (mixer.q, mixer.k, mixer.v, mixer.beta))
                q, k = phi(q, feature_map, qk_eps), phi(k, feature_map, qk_eps)
                F = F + torch.outer(torch.sigmoid(beta) * (v - F @ k), k)
                made = F @ q
                q, k = phi(made[:dk], feature_map, qk_eps), phi(made[dk : 2 * dk], feature_map, qk_eps)
                v, beta = made[2 * dk : -1], made[-1]
                W = W + torch.outer(torch.sigmoid(beta) * (v - W @ k), k)
                outputs[b, t, i * dv : (i + 1) * dv] = W @ q
            states.append(((F - F_0).T, W.T))
    F, W = (torch.stack(part).unflatten(0, (len(x), h)) for part in zip(*states, strict=True))
    return outputs @ mixer.out.weight.T, F, W


@pytest.mark.parametrize("reset", [torch.zeros(2, TIME, dtype=torch.bool), resets()], ids=["one", "several"])
@pytest.mark.parametrize("name", tiered(["paper"], [name for name in VARIANTS if name != "paper"]))
def test_outputs_gradients_and_state_are_those_of_the_equations(name, reset):
    mixer = make(**VARIANTS[name]).double()
    x = inputs().requires_grad_()
    expected, *last = equations(mixer, x, reset, **VARIANTS[name])
    check_equations(mixer, x, reset, expected, last)


def test_parameters_are_those_of_the_papers_code():
    d, h, dk = 128, 8, 16
    projections = d * h * (5 * dk + 2) + d * d
    assert sum(p.numel() for p in make(d).parameters()) == projections
    mixer = make(d, base_weights=True)
    assert sum(p.numel() for p in mixer.parameters()) == projections + h * dk * (3 * dk + 1)
    assert 1 <= mixer.F.min() < 1.01 and 1.99 < mixer.F.max() < 2
    assert mixer.F.mean().item() == pytest.approx(1.5, abs=0.02)


def test_state_size_counts_both_fast_weights():
    assert make(n_heads=2).state_size == 2 * (3 * 10 + 3 * 3)
    assert [make(width).n_heads for width in (6, 32, 128)] == [1, 2, 8]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_heads": 4}, "`d_qk` must be a positive multiple of `n_heads` = 4; got 6"),
        ({"qk_eps": -1.0}, "`qk_eps` must be at least 0; got -1.0"),
        ({"feature_map": "cosformer"}, "`feature_map` of the delta rule must have no phase"),
    ],
)
def test_argument_errors(arguments, message):
    with pytest.raises(ValueError) as error:
        make(**arguments)
    assert message in str(error.value)
