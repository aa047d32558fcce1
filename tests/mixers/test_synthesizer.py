"""Synthesizer's scores, each worked by hand; `tests/released` has HGRN's layers."""

import math

import pytest
import torch

from linrec.mixers import build
from linrec.mixers.synthesizer import Synthesizer
from linrec.testing import assert_agree, generator

D, H, N, TIME = 6, 2, 12, 9
KINDS = ("dense", "random", "factorized_dense", "factorized_random", "attention")


def make(scores="dense", **arguments) -> Synthesizer:
    torch.manual_seed(0)
    defaults = {"n_heads": H, "max_length": N, "factor": 3, "rank": 2}
    mixer = build("synthesizer", D, scores=scores, **defaults | arguments).double()
    with torch.no_grad():
        for seed, parameter in enumerate(mixer.parameters()):
            parameter += 0.5 * torch.randn(parameter.shape, generator=generator(seed), dtype=parameter.dtype)
    return mixer


def inputs(time: int = TIME) -> torch.Tensor:
    return torch.randn(2, time, D, generator=generator(), dtype=torch.float64)


def score(mixer: Synthesizer, name: str, x: torch.Tensor, h: int, i: int, j: int) -> float:
    """B_ij of a head h for a row (t, d) of inputs, by the equations."""

    def head(layer, vector):
        return layer(vector).reshape(H, -1)[h]

    if name == "dense":
        return mixer.dense[h, j] @ head(mixer.hidden, x[i]).clamp(min=0) + mixer.dense_bias[h, j]
    if name == "random":
        return mixer.R[h, i, j]
    if name == "factorized_dense":
        return head(mixer.a, x[i])[j % 3] * head(mixer.c, x[i])[j // 3]
    if name == "factorized_random":
        return mixer.R_1[h, i] @ mixer.R_2[h, j]
    return head(mixer.q, x[i]) @ head(mixer.k, x[j]) / math.sqrt(D // H)


def by_hand(mixer: Synthesizer, x: torch.Tensor) -> torch.Tensor:
    outputs = torch.zeros_like(x)
    alpha = mixer.alpha.exp() / mixer.alpha.exp().sum() if len(mixer.scores) > 1 else [1.0]
    for b in range(len(x)):
        v = mixer.v(x[b]).unflatten(-1, (H, -1))
        for i in range(x.shape[1]):
            heads = []
            for h in range(H):
                seen = range(i + 1 if mixer.causal else x.shape[1])
                scores = [
                    sum(
                        a * score(mixer, name, x[b], h, i, j)
                        for a, name in zip(alpha, mixer.scores, strict=True)
                    )
                    for j in seen
                ]
                share = torch.stack(scores).softmax(0)
                heads.append(share @ v[: len(scores), h])
            outputs[b, i] = mixer.out(torch.cat(heads))
    return outputs


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("scores", "second"),
    [*((name, "none") for name in KINDS), ("random", "attention"), ("dense", "factorized_random")],
)
@torch.no_grad()
def test_the_layer_is_its_equations(scores, second, causal):
    mixer, x = make(scores, second=second, causal=causal), inputs()
    assert_agree(mixer(x)[0], by_hand(mixer, x))


@pytest.mark.parametrize("name", KINDS[:4])
def test_no_score_depends_on_the_other_step(name):
    mixer, x = make(name), inputs()
    changed = x.clone()
    changed[:, 3] += 1
    shares, others = mixer.token_mixing(x), mixer.token_mixing(changed)
    rows = [i for i in range(TIME) if i != 3]
    assert_agree(others[:, rows], shares[:, rows])
    attention = make("attention")
    assert (attention.token_mixing(changed) - attention.token_mixing(x))[:, 4:].abs().max() > 1e-3


def test_positions_behind_the_last_have_its_row_and_column():
    mixer, x = make("random", n_heads=1), inputs(N + 3)
    place = torch.arange(N + 3).clamp(max=N - 1)
    B = mixer.R[0][place][:, place].masked_fill(~torch.ones(N + 3, N + 3).tril().bool(), -torch.inf)
    assert_agree(mixer.token_mixing(x)[0], B.softmax(-1))


def test_positions_start_again_at_a_reset():
    mixer, x = make("random", n_heads=1), inputs()
    reset = torch.zeros(2, TIME, dtype=torch.bool)
    reset[:, 4] = True
    y, state = mixer(x, reset=reset)
    assert_agree(y[:, 4:], mixer(x[:, 4:])[0])
    assert state.position[0].tolist() == [-1, -1, -1, -1, 0, 1, 2, 3, 4]


def test_parameters_are_those_of_hgrns_table_1():
    """Table 1 has 46.75M and 44.65M of 8 layers: width 512, FFN 2048, biases, tied embeddings of 50,265."""
    shared = {"n_heads": 1, "max_length": 512, "value_projection": False, "output_projection": False}
    rest = 2 * 512 * 2048 + 2048 + 512 + 2 * 2 * 512
    for scores, millions in (("dense", 46.75), ("random", 44.65)):
        with torch.device("meta"):
            mixer = build("synthesizer", 512, scores=scores, **shared)
        layer = sum(p.numel() for p in mixer.parameters()) + rest
        assert round((50_265 * 512 + 8 * layer + 2 * 512) / 1e6, 2) == millions


@torch.no_grad()
def test_where_parameters_start():
    torch.manual_seed(0)
    R = build("synthesizer", 8, scores="random", max_length=100, learned=False).R
    assert not R.requires_grad and abs(float(R.std()) - 1) < 0.03
    mixer = build("synthesizer", 8, scores="factorized_random", max_length=200, second="attention")
    assert abs(float((mixer.R_1 @ mixer.R_2.mT).std()) - 1) < 0.1
    assert mixer.alpha.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"scores": "densest"}, "there is no `scores` 'densest'; did you mean 'dense'"),
        ({"second": "dense"}, "`second` must differ from `scores`; got 'dense'"),
        (
            {"scores": "factorized_dense", "factor": 5},
            "`factor` must be a positive divisor of `max_length`",
        ),
        ({"max_length": 0}, "`max_length` must be at least 1; got 0"),
        ({"n_heads": 4}, "`d_model` must be a positive multiple of `n_heads` = 4; got 6"),
    ],
)
def test_errors(arguments, words):
    with pytest.raises(ValueError, match=words):
        make(**arguments)
