"""Attention within buckets, worked by hand; `tests/released` has the sorted chunks of the authors' layer."""

import pytest
import torch

from linrec.mixers import build
from linrec.mixers.reformer import Reformer
from linrec.testing import assert_agree, check_batch_independence, check_compile, check_layout, generator

D, H, TIME = 8, 2, 12


def make(**arguments) -> Reformer:
    torch.manual_seed(0)
    return build("reformer", D, **{"n_heads": H, "n_hashes": 2, "n_buckets": 4} | arguments).double()


def inputs(time: int = TIME) -> torch.Tensor:
    return torch.randn(2, time, D, generator=generator(), dtype=torch.float64)


def by_hand(mixer: Reformer, x: torch.Tensor, rounds: int) -> torch.Tensor:
    """A sum over rounds, each a softmax of its own buckets, weighed by its normaliser.

    Without duplicates a round leaves out pairs of steps that an earlier round had.
    """
    outputs = torch.zeros_like(x)
    for b in range(len(x)):
        q, v = (layer(x[b]).unflatten(-1, (H, -1)) for layer in (mixer.q, mixer.v))
        for i in range(x.shape[1]):
            heads = []
            for h in range(H):
                codes = [
                    torch.cat([z, -z], -1).argmax(-1)
                    for z in (q[:, h] @ mixer.G[h, :, r] for r in range(rounds))
                ]
                total, weights = torch.zeros(D // H, dtype=x.dtype), 0.0
                seen = range(i) if mixer.causal else [j for j in range(x.shape[1]) if j != i]
                for r, code in enumerate(codes):
                    for j in seen:
                        had = not mixer.duplicates and any(c[j] == c[i] for c in codes[:r])
                        if code[j] == code[i] and not had:
                            weight = (q[i, h] @ q[j, h] / (q[j, h].square().sum() + 4e-6).sqrt()).exp()
                            total, weights = total + weight * v[j, h], weights + weight
                # nothing but itself
                heads.append(total / weights if weights > 0 else v[i, h])
            outputs[b, i] = mixer.out(torch.cat(heads))
    return outputs


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("rounds", "duplicates"), [(1, True), (3, True), (3, False)])
@torch.no_grad()
def test_the_layer_is_a_sum_over_rounds(rounds, duplicates, causal):
    mixer, x = make(n_hashes=rounds, duplicates=duplicates, causal=causal), inputs()
    assert_agree(mixer(x)[0], by_hand(mixer, x, rounds))


@torch.no_grad()
def test_without_duplicates_equal_rounds_are_a_single_round():
    many, single = make(n_hashes=3, duplicates=False), make(n_hashes=1)
    single.load_state_dict(many.state_dict() | {"G": many.G[:, :, :1]})
    many.G[:, :, 1:] = many.G[:, :, :1]
    assert_agree(many(inputs())[0], single(inputs())[0])


@torch.no_grad()
def test_with_one_chunk_of_all_steps_every_step_sees_every_step():
    mixer, x = make(n_hashes=1, chunk_size=TIME), inputs()
    q, v = (layer(x).unflatten(-1, (H, -1)) for layer in (mixer.q, mixer.v))
    k = q / (q.square().sum(-1, keepdim=True) + 4e-6).sqrt()
    scores = torch.einsum("bihd,bjhd->bhij", q, k).tril(-1)
    scores = scores.masked_fill(torch.ones(TIME, TIME).triu(1).bool(), -torch.inf)
    scores[..., torch.arange(TIME), torch.arange(TIME)] = -1e5
    # the chunk before the only chunk is the chunk itself: every step twice
    expected = mixer.out(torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v).flatten(-2))
    assert_agree(mixer(x)[0], expected)


def test_more_rounds_come_nearer_to_attention_to_all_steps():
    x = torch.randn(4, 64, 16, generator=generator())
    errors = []
    for rounds in (1, 4, 16):
        torch.manual_seed(0)
        mixer = build("reformer", 16, n_hashes=rounds, n_buckets=4)
        whole = build("reformer", 16, n_hashes=1, n_buckets=2)
        for layer in ("q", "v", "out"):
            getattr(whole, layer).load_state_dict(getattr(mixer, layer).state_dict())
        # one bucket of all steps
        whole.G.zero_()
        errors.append(float((mixer(x)[0] - whole(x)[0]).detach().square().mean()))
    assert errors[0] > 1.5 * errors[1] > 1.5**2 * errors[2]


def test_laws_of_chunks():
    mixer, x = make(chunk_size=4), inputs()
    assert not mixer.is_causal and mixer.init_state(2) is None and mixer.state_size == 0
    check_batch_independence(mixer, x)
    check_layout(mixer, x)
    check_compile(mixer, x.repeat(1, 2, 1), compiler="eager")
    assert mixer.token_mixing(x) is None


def test_parameters_and_rotations():
    mixer = make(bias=True)
    assert sum(p.numel() for p in mixer.parameters()) == 3 * (D * D + D)
    assert mixer.G.shape == (H, D // H, 2, 2) and "G" in mixer.state_dict()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"n_buckets": 3}, "`n_buckets` must be even, at least 2: each rotation has two signs; got 3"),
        ({"n_hashes": 0}, "`n_hashes` must be at least 1; got 0"),
        ({"chunk_size": 0}, "`chunk_size` must be at least 1; got 0"),
        ({"chunk_size": 4, "duplicates": False}, "`duplicates` must be True with `chunk_size`"),
    ],
)
def test_errors(arguments, words):
    with pytest.raises(ValueError, match=words):
        make(**arguments)


def test_chunks_refuse_what_they_cannot_take():
    mixer, x = make(chunk_size=4), inputs()
    with pytest.raises(ValueError, match="`reset` must be None with `chunk_size`"):
        mixer(x, reset=torch.zeros(2, TIME, dtype=torch.bool))
    with pytest.raises(ValueError, match="`x` must have a multiple of `chunk_size` = 4 steps; got 11"):
        mixer(x[:, 1:])
