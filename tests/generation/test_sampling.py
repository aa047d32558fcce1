import math

import numpy as np
import pytest
import torch

from linrec.generation import Candidates, Sampling, candidates, draw
from linrec.generation.noise import uniforms

LOGITS = np.random.default_rng(0).normal(size=(3, 40)) * 2
FILTERS = [
    {},
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 1000},
    {"top_p": 0.3},
    {"top_p": 0.95},
    {"top_p": 1.0},
    {"top_p": 1e-9},
    {"temperature": 0.7, "top_k": 12, "top_p": 0.8},
]


def reference(
    logits: np.ndarray, temperature: float = 1.0, top_k: int = 10**9, top_p: float = 1.0
) -> np.ndarray:
    """Probabilities by token, one step of the definition after the other."""
    likely = sorted(range(len(logits)), key=lambda token: -logits[token])[:top_k]
    weights = {token: math.exp(logits[token] / temperature) for token in likely}
    share = {token: weight / sum(weights.values()) for token, weight in weights.items()}
    kept, together = [], 0.0
    for token in likely:
        if kept and together >= top_p:
            break
        kept.append(token)
        together += share[token]
    p = np.zeros(len(logits))
    p[kept] = [share[token] / together for token in kept]
    return p


def by_token(found: Candidates, vocabulary: int) -> np.ndarray:
    p = torch.zeros(len(found.ids), vocabulary, dtype=found.probabilities.dtype)
    p.scatter_(1, found.ids, found.probabilities)
    return (p / p.sum(-1, keepdim=True)).numpy()


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_what_is_kept_and_how_likely_it_is(options):
    found = by_token(candidates(torch.from_numpy(LOGITS), Sampling(**options)), LOGITS.shape[1])
    for mine, logits in zip(found, LOGITS, strict=True):
        expected = reference(logits, **options)
        assert ((mine > 0) == (expected > 0)).all()
        np.testing.assert_allclose(mine, expected, rtol=1e-12)


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_tokens_are_drawn_as_often_as_they_are_likely(options):
    n, logits = 20_000, LOGITS[0]
    found = candidates(torch.from_numpy(logits).expand(n, -1), Sampling(**options))
    drawn = draw(found, torch.from_numpy(uniforms(3, 0, 0, n))[:, None])
    counts = np.bincount(drawn, minlength=len(logits))
    expected = n * reference(logits, **options)
    assert not counts[expected == 0].any()
    # Pearson's statistic has mean `freedom` and variance 2 `freedom`
    often = expected > 0
    statistic, freedom = ((counts - expected)[often] ** 2 / expected[often]).sum(), often.sum() - 1
    assert statistic <= freedom + 4 * math.sqrt(2 * freedom)


def test_temperature_zero_takes_the_likeliest():
    found = candidates(torch.from_numpy(LOGITS), Sampling(temperature=0, top_k=5, top_p=0.5))
    assert found.ids[:, 0].tolist() == LOGITS.argmax(-1).tolist() and (found.probabilities == 1).all()


def test_of_equal_tokens_top_p_keeps_the_first():
    ids, p = candidates(torch.zeros(1, 8), Sampling(top_p=0.5))
    assert ids[p > 0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"top_p": 0.9}], ids=str)
@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2.0**-53])
def test_an_impossible_token_is_never_drawn(options, uniform):
    logits = torch.full((1, 7), -math.inf)
    logits[0, [2, 4]] = torch.tensor([0.0, 0.1])
    found = candidates(logits, Sampling(**options))
    assert draw(found, torch.full((1, 1), uniform, dtype=torch.float64)).item() in (2, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tiny_temperature_is_greedy_and_overflows_nothing(dtype):
    logits = torch.tensor([[300.0, -300.0, 310.0]], dtype=dtype)
    ids, p = candidates(logits, Sampling(temperature=1e-300))
    assert ids.tolist() == [[0, 1, 2]] and p.tolist() == [[0, 0, 1]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "`temperature` must be at least 0 and finite; got -0.1. 0 is greedy."),
        ({"temperature": math.nan}, "`temperature` must be at least 0 and finite; got nan"),
        ({"temperature": math.inf}, "`temperature` must be at least 0 and finite; got inf"),
        ({"top_k": 0}, "`top_k` must be at least 1, or None for all tokens; got 0."),
        ({"top_p": 0.0}, r"`top_p` must be in \(0, 1\], or None for all tokens; got 0.0."),
        ({"top_p": 1.1}, r"`top_p` must be in \(0, 1\], or None for all tokens; got 1.1."),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**options)
