import math

import pytest
import torch
from torch import nn

from linrec import mixers
from linrec.mixers.transformer_xl import TransformerXL
from linrec.models import LanguageModel, ModelConfig
from linrec.testing import assert_agree
from tests import released


def build(**arguments):
    torch.manual_seed(0)
    defaults = {"n_heads": 2, "d_head": 3, "segment_length": 4, "init_std": 0.7}
    return mixers.build("transformer_xl", 6, **(defaults | arguments)).double()


def by_pairs(mixer, x, *, begin=0):
    """One row, pair by pair: A_ij = q.k_j + q.W R_{i-j} + u.k_j + v.W R_{i-j}, from step `begin` on."""
    T, M, d = mixer.segment_length, mixer.memory_length, mixer.d_model
    heads, width = (mixer.n_heads, mixer.d_head), mixer.d_head
    q, k, v = (linear(x).unflatten(-1, heads) for linear in (mixer.q, mixer.k, mixer.v))
    outputs = []
    for i in range(begin, len(x)):
        first = max(begin, i // T * T - M)
        if mixer.same_length:
            first = max(first, i - M + 1)
        scores = []
        for j in range(first, i + 1):
            distance = i - j if mixer.distance.clamp is None else min(i - j, mixer.distance.clamp)
            angles = [distance / 10_000 ** (2 * c / d) for c in range(d // 2)]
            R = torch.tensor([f(a) for f in (math.sin, math.cos) for a in angles], dtype=torch.float64)
            WR = (mixer.distance.r.weight @ R).unflatten(-1, heads)
            u, bias = mixer.biases.u, mixer.biases.v
            terms = q[i] * k[j] + q[i] * WR + u * k[j] + bias * WR
            scores.append(terms.sum(-1) / math.sqrt(width))
        weights = torch.stack(scores).softmax(0)
        outputs.append((weights[..., None] * v[first : i + 1]).sum(0).flatten())
    return mixer.out(torch.stack(outputs))


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"memory_length": 9},
        {"memory_length": 2, "clamp": 3},
        {"memory_length": 0},
        {"memory_length": 5, "same_length": True},
        {"segment_length": 6, "memory_length": 3, "same_length": True, "clamp": 2},
    ],
)
def test_outputs_are_the_papers_sums_over_pairs(arguments):
    mixer, x = build(**arguments), torch.randn(1, 15, 6, dtype=torch.float64)
    assert_agree(mixer(x)[0][0], by_pairs(mixer, x[0]))
    reset = torch.zeros(1, 15, dtype=torch.bool)
    reset[0, 6] = True
    y, _ = mixer(x, reset=reset)
    assert_agree(y[0, 6:], by_pairs(mixer, x[0], begin=6))


def by_pairs_of_other_positions(mixer, x):
    """One row, pair by pair, with rotary positions as complex numbers, or with T5's biases."""
    T, M, heads = mixer.segment_length, mixer.memory_length, (mixer.n_heads, mixer.d_head)
    q, k, v = (linear(x).unflatten(-1, heads) for linear in (mixer.q, mixer.k, mixer.v))
    outputs = []
    for i in range(len(x)):
        first, scores = max(0, i // T * T - M), []
        for j in range(first, i + 1):
            if mixer.bias is None:
                angles = [(i - j) / 10_000 ** (2 * c / mixer.d_head) for c in range(mixer.d_head // 2)]
                turn = torch.tensor(
                    [complex(math.cos(a), math.sin(a)) for a in angles], dtype=torch.complex128
                )
                left, right = (torch.view_as_complex(z.unflatten(-1, (-1, 2))) for z in (q[i], k[j]))
                product = (left * turn * right.conj()).real.sum(-1)
                scores.append(product / math.sqrt(mixer.d_head))
            else:
                # 16 distances have a bucket of their own
                scores.append((q[i] * k[j]).sum(-1) / math.sqrt(mixer.d_head) + mixer.bias.w[:, i - j])
        weights = torch.stack(scores).softmax(0)
        outputs.append((weights[..., None] * v[first : i + 1]).sum(0).flatten())
    return mixer.out(torch.stack(outputs))


@pytest.mark.parametrize("positions", ["rotary", "t5"])
def test_other_positions_are_sums_over_pairs(positions):
    mixer, x = build(d_head=4, positions=positions), torch.randn(1, 15, 6, dtype=torch.float64)
    if positions == "t5":
        nn.init.normal_(mixer.bias.w)
    assert_agree(mixer(x)[0][0], by_pairs_of_other_positions(mixer, x[0]))
    own = 0 if positions == "rotary" else 2 * 32
    assert sum(p.numel() for p in mixer.parameters()) == 4 * 6 * 8 + own


def test_layers_without_u_and_v_share_nothing():
    arguments = {"segment_length": 4, "positions": "t5"}
    config = ModelConfig(vocab_size=5, d_model=8, n_layers=2, mixer="transformer_xl", mixer_args=arguments)
    first, second = (mixer.bias for mixer in LanguageModel(config).mixers)
    assert first is not second
    with pytest.raises(ValueError, match=r"`clamp` and `untie_biases` are of .*; got positions='rotary'"):
        build(d_head=4, positions="rotary", clamp=4)


def test_no_gradient_reaches_the_inputs_of_a_segment_before():
    mixer, x = build(), torch.randn(1, 12, 6, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(mixer(x)[0][:, 8:].sum(), x)
    assert not gradient[:, :8].any() and gradient[:, 8:].all()
    through = build(detach="never")
    (gradient,) = torch.autograd.grad(through(x)[0][:, 8:].sum(), x)
    assert not gradient[:, :4].any() and gradient[:, 4:].all()


def test_keys_of_the_memory_train_their_projection():
    """As in the released code, where W_k maps memory and segment together."""
    mixer, x = build(), torch.randn(1, 8, 6, dtype=torch.float64)
    _, state = mixer(x[:, :4])
    last = x[:, 4:5]
    y, _ = mixer(last, state)
    (with_memory,) = torch.autograd.grad(y.sum(), mixer.v.weight)
    (alone,) = torch.autograd.grad(mixer(last)[0].sum(), mixer.v.weight)
    # a single step sees itself alone, so that the gradient has a rank of one for each head
    assert torch.linalg.matrix_rank(alone) == 1 < torch.linalg.matrix_rank(with_memory)


def test_the_layers_of_a_model_share_u_and_v():
    arguments = {"segment_length": 4}
    config = ModelConfig(vocab_size=5, d_model=8, n_layers=3, mixer="transformer_xl", mixer_args=arguments)
    tied = [mixer.biases for mixer in LanguageModel(config).mixers]
    assert tied[0] is tied[1] is tied[2]
    config = ModelConfig(
        vocab_size=5,
        d_model=8,
        n_layers=3,
        mixer="transformer_xl",
        mixer_args=arguments | {"untie_biases": True},
    )
    untied = [mixer.biases for mixer in LanguageModel(config).mixers]
    assert len({id(biases) for biases in untied}) == 3


def test_parameters_and_initial_values_are_the_released_ones():
    torch.manual_seed(0)
    mixer = TransformerXL(256)
    assert mixer.n_heads == 4 and mixer.memory_length == 512
    assert sum(p.numel() for p in mixer.parameters()) == 5 * 256 * 256 + 2 * 256
    for parameter in mixer.parameters():
        assert abs(parameter.std() / 0.02 - 1) < 0.15 and abs(parameter.mean()) < 0.005


def test_another_length_of_segments_and_memory_takes_the_same_weights():
    """The paper evaluates with a longer memory than it trains with."""
    longer = build(segment_length=2, memory_length=40)
    longer.load_state_dict(build().state_dict())
    x = torch.randn(1, 15, 6, dtype=torch.float64)
    assert_agree(longer(x)[0][0], by_pairs(longer, x[0]))


def test_dropout_is_of_attention_weights_in_training_alone():
    mixer, x = build(dropout=0.5), torch.randn(1, 9, 6, dtype=torch.float64)
    mixer.out = nn.Identity()
    assert_agree(mixer.eval()(x)[0], mixer(x)[0])
    first = mixer.train()(x)[0][:, 0].unflatten(-1, (2, 3))
    v = mixer.v(x[:, 0]).unflatten(-1, (2, 3))
    # the first step sees itself alone, with a weight of 0 or 2
    assert all(torch.equal(h, 0 * w) or torch.allclose(h, 2 * w) for h, w in zip(first[0], v[0], strict=True))


def test_same_length_without_a_memory_is_refused():
    with pytest.raises(ValueError, match="`same_length` needs a `memory_length` of at least 1; got 0"):
        build(memory_length=0, same_length=True)


@pytest.mark.parametrize("name", ["segment_length", "memory_length", "clamp"])
def test_lengths_out_of_range_are_refused(name):
    with pytest.raises(ValueError, match=f"`{name}` must be at least [01]; got -1"):
        build(**{name: -1})


def test_with_its_own_norm_the_memory_holds_steps_before_the_norm():
    numbers, about = released.read("transformer_xl_pre_norm"), released.cases()["transformer_xl_pre_norm"]
    mixer = mixers.build("transformer_xl", 6, **about["arguments"]).double()
    mixer.load_state_dict({n[8:]: x for n, x in numbers.items() if n.startswith("weights.")})
    y, state = mixer(numbers["x"])
    assert_agree(state.memory.h[:, -4:], numbers["x"][:, 4:8])
    weight, bias = torch.autograd.grad(y.sin().sum(), [mixer.norm.weight, mixer.norm.bias])
    for found, name in [(weight, "weight"), (bias, "bias")]:
        assert released.error(found, numbers[f"gradients.{name}"]) < about["error"]
    # a norm before the mixer gives the same outputs, and other gradients
    plain = mixers.build("transformer_xl", 6, **about["arguments"] | {"norm": "none"}).double()
    plain.load_state_dict({n: x for n, x in mixer.state_dict().items() if not n.startswith("norm.")})
    outside = nn.LayerNorm(6, dtype=torch.float64)
    outside.load_state_dict(mixer.norm.state_dict())
    z, _ = plain(outside(numbers["x"]))
    assert_agree(z, y)
    other = torch.autograd.grad(z.sin().sum(), outside.weight)[0]
    assert (other - weight).abs().max() > 0.01 * weight.abs().max()


def test_a_pre_norm_block_leaves_the_norm_to_the_mixer():
    arguments = {"n_heads": 2, "segment_length": 4, "norm": "rms"}
    stack = {"d_model": 6, "n_layers": 1, "mixer": "transformer_xl", "mixer_args": arguments, "norm": "rms"}
    model = LanguageModel(ModelConfig(vocab_size=5, **stack))
    block = model.blocks[0]
    assert isinstance(block.mixer_norm, nn.Identity) and isinstance(block.mixer.norm, nn.Module)
    names = [name for name, _ in block.named_parameters() if "norm" in name]
    assert names == ["mixer.norm.weight", "channel_mixing_norm.weight"]
