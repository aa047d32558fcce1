import math

import pytest
import torch
from torch.nn import functional

from linrec.mixers import build
from linrec.mixers.transformer_ls import TransformerLS
from linrec.nn.visible_attention import sinusoids
from linrec.testing import assert_agree, generator
from tests import released

D, H, CHUNK, RANK, WINDOW, CHUNKS = 8, 2, 3, 2, 5, 3


def make(**arguments) -> TransformerLS:
    torch.manual_seed(0)
    defaults = {"n_heads": H, "segment_length": CHUNK, "rank": RANK, "window": WINDOW, "n_chunks": CHUNKS}
    mixer = build("transformer_ls", D, **defaults | arguments).double()
    with torch.no_grad():
        for seed, parameter in enumerate(mixer.parameters()):
            parameter += 0.5 * torch.randn(parameter.shape, generator=generator(seed), dtype=parameter.dtype)
    return mixer


def inputs(time: int) -> torch.Tensor:
    return torch.randn(2, time, D, generator=generator(), dtype=torch.float64)


@torch.no_grad()
def test_a_layer_of_one_head_is_the_released_one():
    numbers, about = released.read("transformer_ls"), released.cases()["transformer_ls"]
    mixer = build("transformer_ls", 8, n_heads=1, segment_length=4, rank=2, window=8, n_chunks=8).double()
    prefix = "weights."
    weights = {name.removeprefix(prefix): x for name, x in numbers.items() if name.startswith(prefix)}
    mixer.load_state_dict(weights)
    # the first steps are the released layer's cache
    time = numbers["y"].shape[1]
    assert released.error(mixer(numbers["x"])[0][:, -time:], numbers["y"]) < about["error"]
    mixer.load_state_dict({name: 1.01 * x for name, x in weights.items()})
    assert released.error(mixer(numbers["x"])[0][:, -time:], numbers["y"]) > 1e-3


def by_hand(mixer: TransformerLS, x: torch.Tensor) -> torch.Tensor:
    """The equations of one row (t, d), step by step."""
    d, outputs = D // H, []
    k, v, logits = mixer.k(x), mixer.v(x), mixer.p(x).unflatten(-1, (H, RANK))
    rows = []
    for begin in range(0, len(x) - CHUNK + 1, CHUNK):
        part = slice(begin, begin + CHUNK)
        P = logits[part].softmax(0)
        compressed = [torch.einsum("lhr,lhd->rhd", P, y[part].unflatten(-1, (H, d))) for y in (k, v)]
        rows.append([mixer.rows_norm(y.flatten(1)).unflatten(-1, (H, d)) for y in compressed])
    k, v = (mixer.window_norm(y).unflatten(-1, (H, d)) for y in (k, v))
    u, w = mixer.biases()
    for i in range(len(x)):
        q = mixer.q(x[i]).unflatten(-1, (H, d)) / math.sqrt(d)
        scores, values = [], []
        known = [
            row
            for chunk in rows[max(0, i // CHUNK - CHUNKS) : i // CHUNK]
            for row in zip(*chunk, strict=True)
        ]
        for place, (key, value) in enumerate(known):
            R = mixer.row_distance(sinusoids(torch.tensor([len(known) - 1 - place]), D, x.dtype)[0])
            scores.append((q * (key + R.unflatten(-1, (H, d)))).sum(-1))
            values.append(value)
        for j in range(max(0, i - WINDOW + 1), i + 1):
            R = mixer.distance.r(sinusoids(torch.tensor([i - j]), D, x.dtype)[0]).unflatten(-1, (H, d))
            scores.append(((q + u) * k[j] + (q + w) * R).sum(-1))
            values.append(v[j])
        share = torch.stack(scores).softmax(0)[..., None]
        outputs.append((share * torch.stack(values)).sum(0).flatten())
    return mixer.out(torch.stack(outputs))


@torch.no_grad()
def test_the_layer_is_its_equations():
    mixer, x = make(), inputs(17)
    assert_agree(mixer(x)[0], torch.stack([by_hand(mixer, row) for row in x]))


@torch.no_grad()
def test_after_a_reset_the_rest_of_a_chunk_is_compressed_alone():
    mixer, x = make(window=1), inputs(2 * CHUNK)
    reset = torch.zeros(2, 2 * CHUNK, dtype=torch.bool)
    reset[:, 1] = True
    _, state = mixer(x, reset=reset)
    P = mixer.p(x[0, 1:CHUNK]).unflatten(-1, (H, RANK)).softmax(0)
    k = torch.einsum("lhr,lhd->rhd", P, mixer.k(x[0, 1:CHUNK]).unflatten(-1, (H, D // H))).flatten(1)
    first = state.memory.rows[0, -2 * RANK : -RANK, :D]
    assert_agree(first, functional.layer_norm(k, (D,), mixer.rows_norm.weight, mixer.rows_norm.bias))
    assert state.memory.rows_alive[0].tolist() == [False] * RANK + [True] * 2 * RANK


def test_parameters_and_the_size_of_the_state():
    mixer = make(bias=True)
    # q, k, v, out, distances of rows; distances of steps; p; two norms; u and v
    expected = 5 * (D * D + D) + D * D + (D + 1) * H * RANK + 2 * 2 * D + 2 * D
    assert sum(p.numel() for p in mixer.parameters()) == expected
    biases = build("transformer_ls", D, n_heads=H).biases
    assert not biases.u.any() and not biases.v.any()
    window, rows, chunk = WINDOW - 1, CHUNKS * RANK, CHUNK - 1
    numbers = (window + rows + chunk) * 2 * D + chunk * H * RANK
    # flags of steps and rows, and the position
    assert mixer.state_size == numbers + window + rows + chunk + 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"rank": 0}, "`rank` must be at least 1; got 0"),
        ({"window": 0}, "`window` must be at least 1; got 0"),
        ({"n_chunks": 0}, "`n_chunks` must be at least 1; got 0"),
        ({"n_heads": 3}, "`d_model` must be a positive multiple of `n_heads` = 3; got 8"),
    ],
)
def test_errors(arguments, words):
    with pytest.raises(ValueError, match=words):
        make(**arguments)
