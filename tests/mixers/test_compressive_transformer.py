import math

import pytest
import torch
from torch.nn import functional

from linrec import mixers
from linrec.mixers.compressive_transformer import CompressiveTransformer
from linrec.models import LanguageModel, ModelConfig
from linrec.nn.segment_mixer import PastSteps
from linrec.testing import assert_agree
from tests import released
from tests.tiers import tiered


def build(**arguments):
    torch.manual_seed(0)
    defaults = {"n_heads": 2, "segment_length": 4, "compression_rate": 2, "init_std": 0.5}
    return mixers.build("compressive_transformer", 6, **(defaults | arguments)).double()


X = torch.randn(2, 18, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_without_compressed_vectors_it_is_transformer_xl():
    mixer = build(compressed_length=0, memory_length=5)
    other = mixers.build("transformer_xl", 6, n_heads=2, segment_length=4, memory_length=5).double()
    other.load_state_dict({name: x for name, x in mixer.state_dict().items() if not name.startswith("f.")})
    assert_agree(mixer(X)[0], other(X)[0])


@pytest.mark.parametrize("compression", ["conv", "mean", "max"])
def test_memories_hold_the_last_steps_and_the_compressed_steps_before(compression):
    mixer = build(memory_length=3, compressed_length=4, compression=compression)
    _, state = mixer(X)
    recent, compressed = state.memory
    assert torch.equal(recent.h, X[:, 13:16]) and recent.alive.all()
    # steps up to 12 have left the memory; the first of them were evicted beside steps that do not exist
    pairs = [X[:, n : n + 2] for n in (5, 7, 9, 11)]
    expected = {
        "mean": [pair.mean(1) for pair in pairs],
        "max": [pair.amax(1) for pair in pairs],
    }
    if compression == "conv":
        f = mixer.f.weight, mixer.f.bias
        expected["conv"] = [functional.linear(pair.flatten(1), *f) for pair in pairs]
    assert_agree(compressed.h, torch.stack(expected[compression], 1))


def test_a_vector_of_no_step_of_the_sequence_is_not_seen():
    mixer = build()
    reset = torch.zeros(2, 18, dtype=torch.bool)
    reset[0, 7] = True
    _, state = mixer(X, reset=reset)
    # of steps 4 to 7, and 8 to 11, by pairs: only step 7 of the first two pairs is of the sequence
    assert state.memory.compressed.alive.tolist() == [[True, True], [True, True]]
    _, state = mixer(X[:, :12], reset=reset[:, :12])
    assert state.memory.compressed.alive.tolist() == [[False, True], [True, True]]


def gradients(mixer, y):
    wanted = dict(mixer.named_parameters())
    found = torch.autograd.grad(y.sum(), list(wanted.values()), allow_unused=True)
    return dict(zip(wanted, found, strict=True))


def test_the_loss_trains_the_compression_alone_and_as_in_the_released_code():
    numbers, about = released.read("compressive_transformer"), released.cases()["compressive_transformer"]
    mixer = mixers.build("compressive_transformer", 6, **about["arguments"]).double()
    weights = {n.removeprefix("weights."): x for n, x in numbers.items() if n.startswith("weights.")}
    mixer.load_state_dict(weights)
    found = gradients(mixer, mixer(numbers["x"])[0])
    for name in ("f.weight", "f.bias"):
        assert released.error(found[name], numbers[f"gradients.{name}"]) < about["error"]
    without = gradients(mixer.eval(), mixer(numbers["x"])[0])
    assert without.pop("f.weight") is None and without.pop("f.bias") is None
    for name, gradient in without.items():
        assert torch.equal(found[name], gradient)


def test_the_loss_is_the_difference_of_attention_to_steps_and_to_their_vectors():
    """Worked by hand for a single head, and without what a reset hides."""
    mixer = build(n_heads=1, loss_weight=3.0)
    h, old = X[:1, 4:8], X[:1, :4]
    c = mixer.f(PastSteps.of(old, torch.ones(1, 4, dtype=torch.bool))).h

    def attn(steps):
        weights = (mixer.q(h) @ mixer.k(steps).mT / 6**0.5).softmax(-1)
        return weights @ mixer.v(steps)

    loss = (attn(old) - attn(c)).square().mean()
    (expected,) = torch.autograd.grad(3 * loss, mixer.f.weight)
    twice = X[:1, :8].repeat(2, 1, 1)
    assert_agree(gradients(mixer, mixer(twice)[0])["f.weight"], expected)
    reset = torch.zeros(2, 8, dtype=torch.bool)
    reset[1, 5] = True
    assert_agree(gradients(mixer, mixer(twice, reset=reset)[0])["f.weight"], expected)
    pieces, state = mixer(twice[:, :6])
    rest, _ = mixer(twice[:, 6:], state)
    assert_agree(gradients(mixer, torch.cat([pieces, rest], 1))["f.weight"], expected)


def test_a_language_model_trains_the_compression():
    arguments = {"segment_length": 4, "compression_rate": 2, "init_std": 0.5}
    config = ModelConfig(
        vocab_size=5, d_model=8, n_layers=2, mixer="compressive_transformer", mixer_args=arguments
    )
    torch.manual_seed(0)
    model = LanguageModel(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [mixer.f.weight.clone() for mixer in model.mixers]
    logits, _ = model(torch.randint(5, (2, 12)))
    logits.logsumexp(-1).mean().backward()
    optimizer.step()
    assert not any(map(torch.equal, before, [mixer.f.weight for mixer in model.mixers]))


def test_parameters():
    mixer = CompressiveTransformer(128)
    assert (mixer.memory_length, mixer.compressed_length) == (512, 128)
    assert sum(p.numel() for p in mixer.parameters()) == 5 * 128**2 + 2 * 128 + 4 * 128**2 + 128
    assert sum(p.numel() for p in CompressiveTransformer(128, compression="max").parameters()) == (
        5 * 128**2 + 2 * 128
    )


def sinusoid(distance, d):
    angle = [distance * 10_000 ** (-2 * i / d) for i in range(d // 2)]
    return torch.tensor([math.sin(a) for a in angle] + [math.cos(a) for a in angle], dtype=torch.float64)


def by_steps(mixer, x, compress, begin=0):
    """Outputs of one row from `begin` on, and its compressed steps; None is a step that does not exist."""
    T, heads = mixer.segment_length, mixer.n_heads
    q = mixer.q(x).unflatten(-1, (heads, -1))
    d = q.shape[-1]
    compressed, recent = [None] * mixer.compressed_length, [None] * mixer.memory_length
    outputs = []
    for first in range(0, len(x) - T + 1, T):
        segment = [x[n] if n >= begin else None for n in range(first, first + T)]
        joined = [*compressed, *recent, *segment]
        usage = [0.0] * len(joined)
        for n in range(max(begin, first), first + T):
            query = len(joined) - T + n - first
            seen = [j for j in range(query + 1) if joined[j] is not None]
            keys = mixer.k(torch.stack([joined[j] for j in seen])).unflatten(-1, (heads, d))
            values = mixer.v(torch.stack([joined[j] for j in seen])).unflatten(-1, (heads, d))
            R = torch.stack([mixer.distance.r(sinusoid(query - j, x.shape[1])) for j in seen])
            a = []
            for i in range(heads):
                content = keys[:, i] @ (q[n, i] + mixer.biases.u[i])
                distance = R.unflatten(-1, (heads, d))[:, i] @ (q[n, i] + mixer.biases.v[i])
                weights = ((content + distance) / math.sqrt(d)).softmax(0)
                a.append(weights @ values[:, i])
                for j, weight in zip(seen, weights.tolist(), strict=True):
                    usage[j] += weight
            outputs.append(mixer.out(torch.cat(a)))
        both, used = [*recent, *segment], usage[mixer.compressed_length :]
        compressed = [*compressed, *compress(both[:T], used[:T])][-mixer.compressed_length :]
        recent = both[T:]
    return torch.stack(outputs), compressed


def most_used(rate):
    def compress(old, usage):
        exists = [n for n, step in enumerate(old) if step is not None]
        best = sorted(sorted(exists, key=lambda n: -usage[n])[: len(old) // rate])
        return [None] * (len(old) // rate - len(best)) + [old[n] for n in best]

    return compress


def dilated(mixer, rate, dilation):
    taps = mixer.f.weight.unflatten(1, (rate, -1))

    def compress(old, usage):
        vectors = []
        for last in range(rate - 1, len(old), rate):
            places = [last - dilation * tap for tap in range(rate)][::-1]
            steps = [old[n] if n >= 0 else None for n in places]
            vector = mixer.f.bias + sum(
                tap @ step for tap, step in zip(taps.unbind(1), steps, strict=True) if step is not None
            )
            vectors.append(None if old[last] is None else vector)
        return vectors

    return compress


@pytest.mark.parametrize("sizes", tiered([((6, 5),)], [((4, 4),), ((6, 8),), ((6, 0),)]))
@pytest.mark.parametrize("compression", ["most_used", "dilated", "dilated by 3"])
def test_outputs_are_those_of_the_loop(sizes, compression):
    name, dilation = ("dilated", 3) if compression == "dilated by 3" else (compression, 2)
    T, M = sizes
    arguments = {"segment_length": T, "memory_length": M, "compressed_length": 5}
    mixer = build(compression=name, dilation=dilation, init_std=1.0, **arguments).requires_grad_(False)
    x = 2 * torch.randn(1, 4 * T, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    compress = most_used(2) if name == "most_used" else dilated(mixer, 2, dilation)
    reset = torch.zeros(1, 4 * T, dtype=torch.bool)
    for begin in (0, 1, T, T + 3):
        expected, compressed = by_steps(mixer, x[0], compress, begin)
        reset[:] = False
        reset[0, begin] = True
        y, state = mixer(x, reset=reset)
        assert_agree(y[0, begin:], expected)
        last = state.memory.compressed
        assert last.alive[0].tolist() == [vector is not None for vector in compressed]
        kept = [vector for vector in compressed if vector is not None]
        assert_agree(last.h[0][last.alive[0]], torch.stack(kept) if kept else x[0, :0])
        pieces, end = [], None
        for n in range(4 * T):
            piece, end = mixer(x[:, n : n + 1], end, reset=reset[:, n : n + 1])
            pieces.append(piece)
        assert_agree(torch.cat(pieces, 1), y)
        assert_agree(end, state)


def test_steps_from_before_a_reset_do_not_change_the_usage():
    mixer = build(compression="most_used", memory_length=0, segment_length=6)
    memory, _ = mixer.start(1, None)
    alive = torch.tensor([[False, False, True, True, True, True]])
    h = X[:1, :6].masked_fill(~alive[..., None], 0)
    usage = mixer.usage(memory, h, alive)
    assert_agree(usage[:, 2:], mixer.usage(memory, h[:, 2:], alive[:, 2:]))


def test_a_dilation_of_one_step_is_the_convolution():
    assert_agree(build(compression="dilated", dilation=1)(X)[0], build()(X)[0])


def test_the_loss_trains_a_dilated_compression_and_most_used_has_none():
    assert gradients(mixer := build(compression="dilated"), mixer(X)[0])["f.weight"].any()
    mixer = build(compression="most_used", detach="never")
    assert not list(mixer.f.parameters())
    x = X.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(mixer(x)[0][:, -1].sum(), x)
    # steps 12 to 15 are the memory, and half of the earlier steps that two compressed pairs replaced remain
    assert gradient[0].any(-1).tolist()[12:] == [True] * 6
    assert int(gradient[0, :12].any(-1).sum()) == mixer.compressed_length


def test_a_rate_that_does_not_divide_the_segment_is_refused():
    with pytest.raises(
        ValueError, match="`compression_rate` must be a positive divisor of `segment_length` = 4; got 3"
    ):
        build(compression_rate=3)


@pytest.mark.parametrize("memory_length", [0, 2, 4])
@pytest.mark.parametrize("pieces", [[6, 6], [1] * 12])
def test_the_gradient_of_f_does_not_depend_on_pieces(memory_length, pieces):
    mixer, reset = build(memory_length=memory_length), torch.zeros(2, 12, dtype=torch.bool)
    reset[1, 5] = True

    def gradient(pieces):
        state, outputs = None, []
        for x, cut in zip(X[:, :12].split(pieces, 1), reset.split(pieces, 1), strict=True):
            y, state = mixer(x, state, reset=cut)
            outputs.append(y)
        return torch.autograd.grad(torch.cat(outputs, 1).sum(), mixer.f.weight)[0]

    assert_agree(gradient(pieces), gradient([12]))


def test_without_gradients_training_weight_or_weights_there_is_no_loss(monkeypatch):
    mixer, weightless, pooled = build(), build(loss_weight=0.0), build(compression="mean")
    place = "linrec.mixers.compressive_transformer.reconstruction_loss"
    monkeypatch.setattr(place, lambda *given: pytest.fail("called"))
    with torch.no_grad():
        mixer(X)
    mixer.eval()(X), weightless(X), pooled(X)
