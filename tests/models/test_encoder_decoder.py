"""Encoder-decoders: any mixers on both sides, a decoder that streams, padded sources."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from linrec import mixers
from linrec.generation import GenerationState, generate, load_state, save_state
from linrec.generation.steps import CacheRings
from linrec.models import (
    AttentiveRecurrenceConfig,
    EncoderConfig,
    EncoderDecoder,
    EncoderDecoderConfig,
)
from linrec.models.ragged import RaggedState
from linrec.testing import (
    assert_agree,
    check_causality,
    check_split,
    check_steps,
    generator,
)
from tests.mixers.variants import OF_FAMILIES
from tests.tiers import thorough, tiered

SOURCE, TIME = 7, 9
LENGTHS = torch.tensor([7, 4, 1])
SIZES = {"d_model": 8, "n_layers": 2, "d_channel_mixing": 12}
SEES_ALL = {"mixer": "attention", "mixer_args": {"n_heads": 2, "causal": False}}
PAIRS: dict[str, dict[str, Any]] = {
    "transformer": {"encoder": SEES_ALL, "mixer": "attention", "mixer_args": {"n_heads": 2}},
    "recurrent": {"encoder": {"mixer": "lstm"}, "mixer": "gru"},
    # a cascaded encoder; a decoder whose blocks have states of three parts
    "hybrid": {
        "encoder": {"mixer": ("lru", "attention"), "mixer_args": {"attention": {"causal": False}}},
        "mixer": ("mamba2", "attention"),
        "channel_mixing": "rwkv",
        "norm_position": ("post", "output"),
    },
    "causal": {"encoder": {"mixer": "gla", "bidirectional": False, "d_model": 12}, "cross_heads": 2},
    "columns": {
        "encoder": SEES_ALL,
        "second": EncoderConfig(vocab_size=5, d_model=12, n_layers=1, mixer="lstm"),
        "merge": "concatenate",
        "mixer": "lru",
    },
    # a bidirectional recurrent network beside a Transformer
    "beside": {
        "encoder": SEES_ALL,
        "second": EncoderConfig(vocab_size=5, d_model=12, n_layers=1, mixer="gru"),
        "mixer": "attention",
    },
    "arn": {
        "encoder": SEES_ALL,
        "arn": AttentiveRecurrenceConfig(n_steps=3, n_heads=2),
        "n_reading_second": 1,
        "mixer": "attention",
    },
    "stacked": {
        "encoder": SEES_ALL,
        "arn": AttentiveRecurrenceConfig(n_steps=3, n_heads=2, cell="gru"),
        "merge": "stack",
        "norm_position": ("pre", "post"),
        "mixer": "lru",
    },
}
each = pytest.mark.parametrize("name", PAIRS)


def make(name: str = "transformer", *, of_encoder: dict[str, Any] | None = None, **changes: Any) -> Any:
    torch.manual_seed(0)
    given = PAIRS[name] | changes
    encoder = {"vocab_size": 5, **SIZES} | given.pop("encoder") | (of_encoder or {})
    config = EncoderDecoderConfig(vocab_size=6, encoder=EncoderConfig(**encoder), **SIZES | given)
    return EncoderDecoder(config).double().eval()


def sources(time: int = SOURCE) -> Tensor:
    return torch.randint(5, (3, time), generator=generator(1))


def targets(time: int = TIME) -> Tensor:
    return torch.randint(6, (3, time), generator=generator(2))


class Decoder(torch.nn.Module):
    """The decoder as the laws call it: a state of None stands for the sources of all rows."""

    def __init__(self, model: EncoderDecoder) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, state: Any = None, *, reset: Tensor | None = None) -> Any:
        if state is None:
            return self.model(x, source=sources()[: len(x)], reset=reset)
        return self.model(x, state, reset=reset)


def of_embeddings(model: EncoderDecoder) -> Any:
    # the laws change inputs continuously, so they enter behind the embedding
    return lambda x, state=None: model.transformed(x, model.encode(sources()) if state is None else state)


def test_the_model_written_out() -> None:
    model = make(norm_position="pre")
    encoder = model.encoder
    u = encoder.input.weight[sources()]
    for block in encoder.blocks:
        u = u + block.mixer(block.mixer_norm(u))[0]
        u = u + block.channel_mixing(block.channel_mixing_norm(u))
    u = encoder.norm(u)
    h = model.embedding.weight[targets()]
    for block in model.blocks:
        h = h + block.mixer(block.mixer_norm(h))[0]
        attention = block.reading.attention
        q, k, v = attention.q(block.reading_norm(h)), attention.k(u), attention.v(u)
        o = (q @ k.mT / 8**0.5).softmax(-1) @ v
        h = h + attention.out(o)
        h = h + block.channel_mixing(block.channel_mixing_norm(h))
    assert_agree(model(targets(), source=sources())[0], model.head(model.norm(h)))


def test_a_stack_of_two_attentions_written_out() -> None:
    model = make("stacked")
    encoded, visible = model.encoder.encoded(sources(), LENGTHS, None)
    encoded = encoded.masked_fill(~visible[..., None], 0)
    others = model.second(model.encoder.embedded(sources(), visible), visible)

    def attended(attention: Any, x: Tensor, u: Tensor, seen: Tensor | None) -> Tensor:
        q, k, v = attention.q(x), attention.k(u), attention.v(u)
        scores = q @ k.mT / 8**0.5
        if seen is not None:
            scores = scores.masked_fill(~seen[:, None], -torch.inf)
        return attention.out(scores.softmax(-1) @ v)

    h = model.embedding.weight[targets()]
    first, last = model.blocks
    h = h + first.mixer(first.mixer_norm(h))[0]
    h = h + attended(first.reading.attention, first.reading_norm(h), encoded, visible)
    h = h + attended(first.reading.second.attention, first.reading.second_norm(h), others, None)
    h = h + first.channel_mixing(first.channel_mixing_norm(h))
    h = last.mixer_norm(h + last.mixer(h)[0])
    h = last.reading_norm(h + attended(last.reading.attention, h, encoded, visible))
    h = last.reading.second_norm(h + attended(last.reading.second.attention, h, others, None))
    h = last.channel_mixing_norm(h + last.channel_mixing(h))
    y, _ = model(targets(), source=sources(), source_lengths=LENGTHS)
    assert_agree(y, model.head(model.norm(h)))


@each
def test_laws_of_the_decoder(name: str) -> None:
    """Pieces equal a whole, in outputs, states and gradients of all parameters, the encoder's included."""
    decoder = Decoder(make(name))
    check_split(decoder, targets())
    check_steps(decoder, targets())
    check_causality(of_embeddings(decoder.model), torch.randn(3, TIME, 8, generator=generator()).double())
    logits, _ = decoder(targets())
    for row in range(3):
        alone, _ = decoder.model(targets()[row : row + 1], source=sources()[row : row + 1])
        assert_agree(alone, logits[row : row + 1])


@each
def test_a_call_with_a_source_is_a_call_from_its_encoding(name: str) -> None:
    model = make(name)
    logits, state = model(targets(), source=sources(), source_lengths=LENGTHS)
    from_state, last = model(targets(), model.encode(sources(), LENGTHS))
    assert_agree(from_state, logits)
    assert_agree(last, state)


def gradients(y: Tensor, model: EncoderDecoder) -> list[Tensor]:
    weights = torch.randn(y.shape, generator=generator(3), dtype=y.dtype)
    return list(torch.autograd.grad((y * weights).sum(), [*model.parameters()]))


def agrees_with_each_source_alone(model: EncoderDecoder) -> None:
    padded = sources().masked_fill(torch.arange(SOURCE) >= LENGTHS[:, None], -1)
    logits, state = model(targets(), source=padded, source_lengths=LENGTHS)
    alone = [
        model(targets()[row : row + 1], source=sources()[row : row + 1, :length])[0]
        for row, length in enumerate(LENGTHS.tolist())
    ]
    assert_agree(logits, torch.cat(alone))
    assert_agree(gradients(logits, model), gradients(torch.cat(alone), model), "gradients")
    # steps from the state do not see padding either
    steps, _ = model(targets(), state)
    assert_agree(steps, model(targets(), model(targets(), source=padded, source_lengths=LENGTHS)[1])[0])


@each
def test_a_padded_source_is_the_source_alone(name: str) -> None:
    agrees_with_each_source_alone(make(name))


# positions of the first cell of a window count from the padding
PADDED_APART = {"recurrent_attention_network"}


@pytest.mark.parametrize(
    "name", tiered(OF_FAMILIES, [], [n for n in mixers.names() if n not in PADDED_APART])
)
def test_padded_sources_with_any_mixer(name: str) -> None:
    model = make(of_encoder={"mixer": name, "mixer_args": {}})
    padded, _ = model(targets(), source=sources(), source_lengths=LENGTHS)
    for row, length in enumerate(LENGTHS.tolist()):
        alone, _ = model(targets()[row : row + 1], source=sources()[row : row + 1, :length])
        assert_agree(padded[row : row + 1], alone)


@pytest.mark.parametrize("name", tiered(["lru"], [], mixers.names()))
def test_steps_with_any_mixer_in_the_decoder(name: str) -> None:
    try:
        model = make(mixer=name, mixer_args={})
    except ValueError as error:
        assert "`mixer` must be causal in the decoder" in str(error)
        return
    check_steps(Decoder(model), targets(5))


def test_sources_of_real_numbers_ignore_what_padding_holds() -> None:
    model = make(of_encoder={"vocab_size": None, "n_features": 3})
    x = torch.randn(3, SOURCE, 3, generator=generator(4), dtype=torch.float64)
    spoilt = x.clone()
    spoilt[1, 4:], spoilt[2, 1:] = torch.nan, torch.inf
    found = [model(targets(), source=source, source_lengths=LENGTHS)[0] for source in (x, spoilt)]
    assert_agree(found[1], found[0])
    assert not torch.equal(found[0], model(targets(), source=x)[0])


def test_steps_do_not_compute_keys_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    _, state = model(targets(), source=sources())
    expected, last = model(targets(1), state)
    for block in model.blocks:
        for name in ("k", "v"):
            monkeypatch.setattr(block.reading.attention, name, None)
    monkeypatch.setattr(model, "encoder", None)
    assert_agree(model(targets(1), state)[0], expected)
    # the very tensors, not copies
    assert all(new[-1].k is old[-1].k for new, old in zip(last, state, strict=True))


def test_a_reset_starts_another_target_of_the_same_source() -> None:
    model, reset = make("hybrid"), torch.zeros(3, TIME, dtype=torch.bool)
    reset[1, 5] = True
    logits, _ = model(targets(), source=sources(), reset=reset)
    begun, _ = model(targets()[1:2, 5:], source=sources()[1:2])
    assert_agree(logits[1:2, 5:], begun)


def test_masked_steps_are_not_there() -> None:
    model, mask = make("hybrid"), torch.ones(3, TIME, dtype=torch.bool)
    mask[1, 3:5], mask[2, 6:] = False, False
    _, state = model(targets(), source=sources(), source_lengths=LENGTHS, mask=mask)
    assert isinstance(state, RaggedState)
    following, _ = model(targets(2), state)
    for row in range(3):
        one = slice(row, row + 1)
        encoded = model.encode(sources()[one], LENGTHS[one])
        _, alone = model(targets()[one, mask[row]], encoded)
        assert_agree(following[one], model(targets(2)[one], alone)[0])


@each
def test_generation_takes_the_likeliest_tokens(name: str, tmp_path: Path) -> None:
    model, begin = make(name), torch.tensor([0, 0, 3])
    start = GenerationState(model.encode(sources(), LENGTHS), begin)
    found, state = generate(model, state=start, n_tokens=6, temperature=0)
    text = torch.cat([begin[:, None], found], 1)
    logits, _ = model(text, source=sources(), source_lengths=LENGTHS)
    assert torch.equal(logits[:, :-1].argmax(-1), found)
    # a state on disk goes on like the state itself
    save_state(tmp_path / "state", state, model)
    for again in (state, load_state(tmp_path / "state", model)):
        further, _ = generate(model, state=again, n_tokens=3, temperature=0)
        longer, _ = generate(model, state=start, n_tokens=9, temperature=0)
        assert torch.equal(further, longer[:, 6:])


def test_sampled_tokens_do_not_depend_on_other_rows() -> None:
    model = make()
    start = GenerationState(model.encode(sources(), LENGTHS), torch.tensor([0, 0, 0]))
    found, _ = generate(model, state=start, n_tokens=12, seed=5, top_k=4)
    alone = GenerationState(model.encode(sources()[:1], LENGTHS[:1]), torch.tensor([0]))
    assert torch.equal(generate(model, state=alone, n_tokens=12, seed=5, top_k=4).tokens, found[:1])
    assert len(found.unique()) > 2


def test_rings_of_caches_leave_the_source_as_it_is() -> None:
    model = make("hybrid")
    _, layers = model(targets(), source=sources())
    rings = CacheRings.of(model)
    assert rings is not None
    made = rings.made(layers)
    assert made[1][2] is layers[1][2] and made[1][0].cache.k.shape[1] > TIME
    expected, _ = model(targets(1), layers)
    with torch.no_grad():
        found, _ = model(targets(1), made)
    assert_agree(found, expected)


def test_generation_in_half_precision_reads_keys_in_full_precision() -> None:
    model = make("hybrid").float()
    start = GenerationState(model.encode(sources(), LENGTHS), torch.tensor([0, 0, 0]))
    tokens, _ = generate(model, state=start, n_tokens=3, precision="bf16-mixed")
    assert tokens.shape == (3, 3)


@thorough
def test_compile() -> None:
    torch.compiler.reset()
    model = make("hybrid")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    logits, state = compiled(targets(), source=sources(), source_lengths=LENGTHS)
    expected, kept = model(targets(), source=sources(), source_lengths=LENGTHS)
    assert_agree(logits, expected)
    assert_agree(compiled(targets(1), state)[0], model(targets(1), kept)[0])


def test_shared_embeddings_stay_shared() -> None:
    model = make(of_encoder={"vocab_size": 6}, share_embeddings=True, tie_embeddings=True)
    assert model.encoder.input.weight is model.embedding.weight is model.head.weight
    with torch.device("meta"):
        empty = EncoderDecoder(model.config)
    empty.load_state_dict(model.state_dict(), assign=True)
    assert empty.encoder.input.weight is empty.embedding.weight is empty.head.weight
    assert_agree(empty.eval()(targets(), source=targets())[0], model(targets(), source=targets())[0])
    with pytest.raises(ValueError, match=r"`share_embeddings` needs an encoder .*'vocab_size': 6.*: 5"):
        make(share_embeddings=True)


@each
def test_state_dicts_and_configurations_are_stored(name: str) -> None:
    model = make(name)
    stored = json.loads(json.dumps(asdict(model.config)))
    again = EncoderDecoder(EncoderDecoderConfig(**stored)).double().eval()
    assert again.config == model.config
    again.load_state_dict(model.state_dict())
    assert_agree(again(targets(), source=sources())[0], model(targets(), source=sources())[0])


def test_directions_of_a_cascaded_encoder() -> None:
    first, second = make("hybrid").encoder.blocks
    assert [type(mixer).__name__ for mixer in first.mixer.mixers] == ["LRU", "LRU"]
    assert type(second.mixer).__name__ == "Attention"


def test_import_paths_are_of_both_sides() -> None:
    encoder = EncoderConfig(vocab_size=5, mixer_args={"inner": "one.two:Three"})
    second = EncoderConfig(vocab_size=5, mixer_args={"inner": "six:Seven"})
    given = {"mixer_args": {"inner": "four:Five"}, "second": second}
    config = EncoderDecoderConfig(vocab_size=5, encoder=encoder, **given)
    assert config.import_paths == {"one.two:Three", "four:Five", "six:Seven"}


def test_sizes() -> None:
    model = make(name="recurrent")
    state = model.init_state(1)
    # keys and values grow with the source, and are not counted
    assert model.state_size == sum(part[0].numel() for part in state)
    encoded = model.encode(sources()[:1])
    assert [tuple(part[-1].k.shape) for part in encoded] == [(1, SOURCE, 1, 8)] * 2


def test_what_is_refused() -> None:
    model = make()
    with pytest.raises(ValueError, match=r"`state` must hold the source.*`encode\(source\)`"):
        model(targets())
    with pytest.raises(ValueError, match="`state` must hold the source"):
        generate(model, targets(), n_tokens=1)
    with pytest.raises(ValueError, match="`state` must be None with a `source`"):
        model(targets(), model.encode(sources()), source=sources())
    with pytest.raises(ValueError, match="`source` must have a row for each of the 3 targets; got 2"):
        model(targets(), source=sources()[:2])
    with pytest.raises(ValueError, match=r"`source_lengths`.*None without a `source`"):
        model(targets(), model.encode(sources()), source_lengths=LENGTHS)
    with pytest.raises(ValueError, match=r"`lengths` must be in \[1, 7\].*got 8"):
        model(targets(), source=sources(), source_lengths=LENGTHS + 1)
    with pytest.raises(ValueError, match=r"`mixer` must be causal in the decoder.*'attention' is not"):
        make(mixer_args={"causal": False})
    with pytest.raises(ValueError, match=r"`memory` must be of the encoder.*got 'decoder' and None"):
        replace(model.config, memory={"kind": "memformer"})
    with pytest.raises(ValueError, match="`merge` = 'stack' needs a `second` encoder or `arn`; got neither"):
        make(merge="stack")
    hf = pytest.importorskip("linrec.hf", reason='the extra "hf" is not installed')
    with pytest.raises(ValueError, match="got an `EncoderDecoder`"):
        hf.to_hugging_face(model)
    with pytest.raises(ValueError, match="`cross_heads` must be at least 1"):
        replace(model.config, cross_heads=0)


@thorough
def test_it_learns_to_reverse_which_takes_the_source() -> None:
    torch.manual_seed(0)
    model = make("recurrent", of_encoder={"vocab_size": 6, "d_model": 32}, d_model=32).float().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    random = generator(2)
    for step in range(200):
        # a constant rate leaves the score to the last steps
        optimizer.param_groups[0]["lr"] = 0.01 * (1 - step / 200)
        x = torch.randint(1, 6, (32, 6), generator=random)
        y = x.flip(1)
        given = functional.pad(y[:, :-1], (1, 0))
        loss = functional.cross_entropy(model(given, source=x)[0].flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    x = torch.randint(1, 6, (100, 6), generator=random)
    start = GenerationState(model.eval().encode(x), torch.zeros(100, dtype=torch.int64))
    found, _ = generate(model, state=start, n_tokens=6, temperature=0)
    assert (found == x.flip(1)).all(1).float().mean() > 0.9
