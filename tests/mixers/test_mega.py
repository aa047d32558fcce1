"""Mega against its equations in float64; test_laws.py has the laws."""

import math

import pytest
import torch

from linrec.mixers import build
from linrec.mixers.mega import Mega, MovingAverage
from linrec.models import Bidirectional, Block
from linrec.nn import FeedForward, groups_of
from linrec.testing import assert_agree, check_mixer, generator, reset_mask

D, TIME = 4, 11
CASES = {
    "paper": {},
    "chunks": {"chunk_size": 3},
    "released": {"ema_skip": True, "chunk_size": 4, "expansion": 1},
    "no bias": {"position_bias": "none", "d_qk": 5},
    "one average": {"n_averages": 1},
    "no averages": {"n_averages": 0, "chunk_size": 4},
    "Laplace": {"attention": "laplace"},
    "squared ReLU": {"attention": "relu2"},
    "simple bias": {"chunk_size": 4, "position_bias": "simple", "d_qk": 5},
    "simple bias of squares": {"chunk_size": 3, "position_bias": "simple", "attention": "relu2"},
    "own norm": {"input_norm": "layer", "ema_skip": True},
    "Laplace in chunks": {"attention": "laplace", "chunk_size": 3, "position_bias": "none"},
}
every_case = pytest.mark.parametrize("case", CASES)


def make(d_model: int = D, **arguments) -> Mega:
    torch.manual_seed(0)
    mixer = build("mega", d_model, **{"d_qk": 6, "n_averages": 3} | arguments)
    assert isinstance(mixer, Mega)
    return mixer


def moved(mixer: Mega) -> Mega:
    """The mixer in float64, every parameter away from where it starts: matrices are not small."""
    mixer = mixer.double()
    with torch.no_grad():
        for seed, parameter in enumerate(mixer.parameters()):
            parameter += 0.7 * torch.randn(parameter.shape, generator=generator(seed), dtype=parameter.dtype)
    return mixer


def inputs(time: int = TIME) -> torch.Tensor:
    return torch.randn(2, time, D, generator=generator(), dtype=torch.float64)


def sigmoid(z):
    return 1 / (1 + torch.exp(-z))


def silu(z):
    return z * sigmoid(z)


def linear(module, x):
    return x @ module.weight.T + (0 if module.bias is None else module.bias)


def averages_by_hand(average: MovingAverage, x, reset):
    """x' of one row (t, d), step by step."""
    alpha, delta = sigmoid(average.alpha), sigmoid(average.delta)
    h, outputs = torch.zeros_like(alpha), []
    for x_t, cut in zip(x, reset, strict=True):
        h = alpha * (average.beta * x_t[:, None]) + (1 - alpha * delta) * (0 if cut else h)
        outputs.append((average.eta * h).sum(1))
    return torch.stack(outputs)


def turned(vector, position):
    """Pairs of channels of a vector as complex numbers, turned."""
    theta = 10_000.0 ** (-torch.arange(0, len(vector), 2, dtype=torch.float64) / len(vector))
    return torch.view_as_complex(vector.unflatten(0, (-1, 2))) * torch.exp(1j * position * theta)


def by_hand(mixer: Mega, x, reset):
    """The file's equations row by row and pair by pair, less the skip connection; shares too."""
    outputs, matrices = [], []
    for skipped, cuts in zip(x, reset, strict=True):
        row = skipped
        if isinstance(mixer.norm, torch.nn.LayerNorm):
            centred = row - row.mean(-1, keepdim=True)
            row = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
            row = row * mixer.norm.weight + mixer.norm.bias
        averaged = row if mixer.average is None else averages_by_hand(mixer.average, row, cuts)
        if mixer.omega is not None:
            averaged = silu(averaged + mixer.omega * row)
        z = silu(linear(mixer.z, averaged))
        q, k = (z * mixer.kappa[i] + mixer.mu[i] for i in (0, 1))
        v, begin, attended, shares = silu(linear(mixer.v, row)), 0, [], []
        for n in range(len(row)):
            begin = n if cuts[n] else begin
            chunk = mixer.chunk_size or TIME
            first = begin + (n - begin) // chunk * chunk
            scores = []
            for m in range(first, n + 1):
                tau = math.sqrt(mixer.d_qk) if mixer.attention == "softmax" else n + 1 - first
                scores.append(q[n] @ k[m] / tau)
                if mixer.rotary is not None:
                    a, b = (turned(mixer.bias[i], position) for i, position in ((0, n - m), (1, 0)))
                    scores[-1] = scores[-1] + (a * b.conj()).real.sum()
                elif mixer.bias is not None:
                    scores[-1] = scores[-1] + mixer.bias[n - m]
            scores = torch.stack(scores)
            weights = torch.softmax(scores, 0)
            if mixer.attention == "relu2":
                weights = scores.clamp(min=0) ** 2
            elif mixer.attention == "laplace":
                weights = (1 + torch.erf((scores - math.sqrt(1 / 2)) * math.sqrt(2 * math.pi))) / 2
            attended.append(weights @ v[first : n + 1])
            shares.append(torch.cat([weights.new_zeros(first), weights, weights.new_zeros(len(row) - n - 1)]))
        gamma, phi = silu(linear(mixer.gamma, averaged)), sigmoid(linear(mixer.phi, averaged))
        candidate = silu(linear(mixer.h, averaged) + linear(mixer.u, gamma * torch.stack(attended)))
        outputs.append(phi * candidate + (1 - phi) * skipped - skipped)
        matrices.append(torch.stack(shares))
    return torch.stack(outputs), torch.stack(matrices)


@every_case
def test_the_layer_and_its_gradients_are_the_papers_equations(case):
    mixer, reset = moved(make(**CASES[case])), reset_mask(2, TIME, rate=0.2)
    x = inputs().requires_grad_()
    ours, (theirs, matrices) = mixer(x, reset=reset)[0], by_hand(mixer, x, reset)
    assert_agree(ours, theirs)
    assert_agree(mixer.token_mixing(x, reset=reset), matrices)
    wanted = [x, *mixer.parameters()]
    cotangent = torch.randn(ours.shape, generator=generator(2), dtype=ours.dtype)
    assert_agree(torch.autograd.grad(ours, wanted, cotangent), torch.autograd.grad(theirs, wanted, cotangent))


def test_without_averages_nothing_passes_from_chunk_to_chunk():
    mixer, x = moved(make(n_averages=0, chunk_size=4)), inputs()
    check_mixer(mixer, time=9, long=256, compiler=None)
    assert mixer.transitions(x) is None
    changed = x.clone()
    changed[:, :4] += 1
    y, z = mixer(x)[0], mixer(changed)[0]
    assert torch.equal(y[:, 4:], z[:, 4:]) and not torch.equal(y[:, :4], z[:, :4])


def test_pieces_know_where_chunks_begin():
    mixer, x = moved(make(chunk_size=4)), inputs()
    expected, _ = by_hand(mixer, x, torch.zeros(2, TIME, dtype=torch.bool))
    for cuts in ((1, 6, 4), (3, 3, 5), (4, 4, 3), (5, 5, 1)):
        state, pieces = None, []
        for piece in x.split(cuts, 1):
            y, state = mixer(piece, state)
            pieces.append(y)
            assert state.cache.k.shape[1] <= 3
        assert_agree(torch.cat(pieces, 1), expected)
        assert state.position.tolist() == [TIME, TIME]


def test_long_sequences_average_by_convolution():
    """Past the length from which the operator is a convolution; and what a chunk cannot see is averaged."""
    mixer = moved(make(chunk_size=8))
    x = torch.randn(1, 200, D, generator=generator(), dtype=torch.float64)
    expected, _ = by_hand(mixer, x, torch.zeros(1, 200, dtype=torch.bool))
    y, _ = mixer(x)
    assert_agree(y, expected)
    changed = x.clone()
    changed[:, 100] += 1
    moves = (mixer(changed)[0] - y).abs().amax((0, 2))
    assert moves[:100].max() < 1e-14 and moves[104:120].min() > 1e-9


def test_a_block_with_norms_behind_is_the_papers_layer():
    mixer, x = moved(make()), inputs()
    block = Block(mixer, None, norm_position="post").double()
    expected = by_hand(mixer, x, torch.zeros(2, TIME, dtype=torch.bool))[0] + x
    assert_agree(block(x)[0], torch.nn.functional.layer_norm(expected, (D,)))


def test_a_block_with_norms_before_is_the_released_layer():
    mixer, x = moved(make(input_norm="layer", ema_skip=True)), inputs()
    block = Block(mixer, FeedForward(D, 8), norm_position="pre").double()
    assert isinstance(block.mixer_norm, torch.nn.Identity) and block.channel_mixing_norm.weight.shape == (D,)
    expected = by_hand(mixer, x, torch.zeros(2, TIME, dtype=torch.bool))[0] + x
    z = torch.nn.functional.layer_norm(expected, (D,))
    assert_agree(block(x)[0], expected + block.channel_mixing(z))
    # directions pass the input on as it is
    both = Block(Bidirectional(mixer), None).double()
    (reversed_,) = by_hand(mixer, x.flip(1), torch.zeros(2, TIME, dtype=torch.bool))[:1]
    assert_agree(both(x)[0], expected + reversed_.flip(1))
    # post-norm blocks normalise what they return, whatever the mixer has inside
    post = Block(mixer, None, norm_position="post").double()
    assert_agree(post(x)[0], z)


def test_where_parameters_start():
    mixer = make(512, n_averages=16, d_qk=128, ema_skip=True)
    average = mixer.average
    assert average.alpha.std().item() == pytest.approx(0.2, rel=0.05)
    assert average.delta.std().item() == pytest.approx(0.2, rel=0.05)
    assert average.beta[:, 0::2].mean().item() == pytest.approx(1.0, abs=0.002)
    assert average.beta[:, 1::2].mean().item() == pytest.approx(-1.0, abs=0.002)
    assert average.beta[:, 0::2].std().item() == pytest.approx(0.02, rel=0.05)
    assert average.eta.std().item() == pytest.approx(0.25, rel=0.05)
    assert mixer.omega.std().item() == pytest.approx(1.0, rel=0.1)
    for matrix in (mixer.z, mixer.v, mixer.gamma, mixer.phi, mixer.h, mixer.u):
        assert matrix.weight.std().item() == pytest.approx(0.02, rel=0.05)
        assert matrix.bias is None or (matrix.bias == 0).all()
    simple = make(8, chunk_size=2000, position_bias="simple").bias
    assert simple.shape == (2000,)
    for part in (mixer.kappa, mixer.bias, simple):
        assert part.std().item() == pytest.approx(0.02, rel=0.15)
    assert (mixer.mu == 0).all()


def test_parameter_counts():
    def expected(d, s, v, n):
        projections = (d * s + s) + 2 * (d * v + v) + 2 * (d * d + d) + v * d
        return projections + 4 * d * n + 4 * s

    def count(**arguments):
        return sum(p.numel() for p in make(10, **arguments).parameters())

    assert count() == expected(10, 6, 20, 3) + 2 * 6
    assert count(expansion=3, ema_skip=True, position_bias="none", d_qk=7, n_averages=5) == (
        expected(10, 7, 30, 5) + 10
    )


def test_what_makes_the_averages_forget_is_marked():
    groups = groups_of(make(ema_skip=True))
    marked = {name for name, group in groups.items() if group.name == "transition"}
    assert marked == {"average.alpha", "average.delta", "average.beta"}
    assert not any(groups[name].weight_decay for name in (*marked, "kappa", "mu", "bias"))
    assert groups["average.eta"].name == "channel"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_averages": -1}, "`n_averages` must be at least 1; got -1"),
        ({"n_averages": 0, "ema_skip": True}, "`ema_skip` needs averages to skip; got `n_averages=0`"),
        ({"d_qk": 0}, "`d_qk` must be at least 1; got 0. Try 64"),
        ({"expansion": 0}, "`expansion` must be at least 1; got 0. Try 2"),
        ({"d_qk": 5}, "`d_qk` must be even where pairs of channels turn; got 5"),
        ({"position_bias": "simple"}, '`position_bias="simple"` needs `chunk_size`, which limits the'),
        ({"input_norm": "layers"}, "did you mean 'layer'"),
        ({"chunk_size": 0}, "`chunk_size` must be at least 1; got 0. None is no chunks"),
        ({"attention": "laplac"}, "there is no `attention` 'laplac'; did you mean 'laplace'"),
        ({"position_bias": "rotry"}, "there is no `position_bias` 'rotry'; did you mean 'rotary'"),
    ],
)
def test_argument_errors(arguments, message):
    with pytest.raises(ValueError) as error:
        make(**arguments)
    assert message in str(error.value)
