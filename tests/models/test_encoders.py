"""Encoders of an encoder-decoder: attentive recurrent networks, two encoders of one source, a memory."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor
from torch.nn import functional

from linrec.models import (
    AttentiveRecurrence,
    AttentiveRecurrenceConfig,
    EncoderConfig,
    EncoderDecoder,
    EncoderDecoderConfig,
)
from linrec.testing import assert_agree, generator
from tests.models.test_encoder_decoder import LENGTHS, SOURCE, make, sources, targets


def attended(attention: Any, h: Tensor, u: Tensor, n_heads: int = 1) -> Tensor:
    """Return the output of a cross-attention, written out."""
    q, k, v = (
        layer(x).unflatten(-1, (n_heads, -1)).transpose(1, 2)
        for layer, x in ((attention.q, h), (attention.k, u), (attention.v, u))
    )
    o = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v
    return attention.out(o.transpose(1, 2).flatten(-2))


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_an_attentive_recurrent_network_written_out(cell: Any) -> None:
    torch.manual_seed(0)
    config = AttentiveRecurrenceConfig(n_steps=4, n_layers=2, cell=cell, n_heads=2)
    network = AttentiveRecurrence(config, 8).double()
    U = torch.randn(3, SOURCE, 8, generator=generator(5), dtype=torch.float64)
    for row, length in enumerate(LENGTHS.tolist()):
        read = U[row : row + 1, :length]
        for attention, F in zip(network.attentions, network.cells, strict=True):
            x, c, steps = torch.zeros(1, 8).double(), torch.zeros(1, 8).double(), []
            for _ in range(4):
                context = attended(attention, x[:, None], read, 2)[:, 0]
                gates = F.weight_ih @ context[0] + F.bias_ih, F.weight_hh @ x[0] + F.bias_hh
                if cell == "lstm":
                    i, f, g, o = (gates[0] + gates[1]).chunk(4)
                    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
                    x = o.sigmoid() * c.tanh()
                else:
                    (r, z, n), (r_h, z_h, n_h) = (part.chunk(3) for part in gates)
                    z = (z + z_h).sigmoid()
                    x = (1 - z) * (n + (r + r_h).sigmoid() * n_h).tanh() + z * x
                steps.append(x)
            read = torch.stack(steps, 1)
        found = network(U, torch.arange(SOURCE) < LENGTHS[:, None])
        assert_agree(found[row : row + 1], read)


def test_a_gate_mixes_what_the_last_blocks_read_of_two_encoders() -> None:
    model = make("arn")
    u = model.encoder(sources())
    x = model.second(model.encoder.input(sources()))
    h = model.embedding(targets())
    for layer, block in enumerate(model.blocks):
        h = h + block.mixer(block.mixer_norm(h))[0]
        z = block.reading_norm(h)
        C = attended(block.reading.attention, z, u)
        if layer == 1:
            second = attended(block.reading.second.attention, z, x)
            g = block.reading.gate(torch.cat([C, second], -1)).sigmoid()
            C = g * C + (1 - g) * second
        h = h + C
        h = h + block.channel_mixing(block.channel_mixing_norm(h))
    assert_agree(model(targets(), source=sources())[0], model.head(model.norm(h)))
    assert not hasattr(model.blocks[0].reading, "second")


def test_columns_are_normalised_and_projected_to_one_source() -> None:
    model = make("columns")
    u = [
        functional.layer_norm(encoder(sources()), (d,))
        for encoder, d in ((model.encoder, 8), (model.second, 12))
    ]
    project = model.merge.project
    u = torch.cat(u, -1) @ project.weight.T + project.bias
    state = model.encode(sources())
    for block, (*_, source) in zip(model.blocks, state, strict=True):
        assert_agree(source.k.flatten(-2), block.reading.attention.k(u))


MEMORY = {"kind": "memformer", "form": "encoder", "segment_length": 5, "n_tokens": 3, "n_heads": 2}


def memformer(**changes: Any) -> EncoderDecoder:
    torch.manual_seed(0)
    attention = {"n_heads": 2, "positions": "none", "bias": True}
    sizes = {"d_model": 8, "n_layers": 1, "d_channel_mixing": 32, "mixer": "attention"}
    encoder = EncoderConfig(vocab_size=7, mixer_args=attention | {"causal": False}, **sizes)
    given = {"memory": MEMORY, "mixer_args": attention, "cross_heads": 2} | sizes | changes
    return EncoderDecoder(EncoderDecoderConfig(vocab_size=6, encoder=encoder, **given)).double().eval()


def test_memformer_is_the_released_encoder_and_decoder() -> None:
    """lucidrains/memformer; the file's metadata has the commit, and the function of the gradients."""
    numbers = safetensors.torch.load_file(Path(__file__).parent / "memformer_decoder.safetensors")
    model, prefix = memformer(), "weights."
    model.load_state_dict({n.removeprefix(prefix): x for n, x in numbers.items() if n.startswith(prefix)})
    memory, logits = None, []
    for source, target in zip(numbers["sources"].split(5, 1), numbers["targets"].unbind(1), strict=True):
        state, memory = model.encode_segments(source, memory)
        logits.append(model(target, state)[0])
    found = torch.stack(logits, 1)
    assert (found - numbers["logits"]).abs().max() < 1e-13
    assert (memory.memory - numbers["memory"]).abs().max() < 1e-13
    ((found.square() * found.sin()).mean() + memory.memory.square().mean()).backward()
    gradients = {n: x for n, x in numbers.items() if n.startswith("gradient.")}
    assert len(gradients) == 4
    for name, gradient in gradients.items():
        assert (model.get_parameter(name.removeprefix("gradient.")).grad - gradient).abs().max() < 1e-13


@pytest.mark.parametrize("kind", ["memformer", "recurrent_memory", "token_turing_machine"])
def test_any_memory_passes_from_source_to_source(kind: str) -> None:
    memory = {name: x for name, x in MEMORY.items() if name != "n_heads"} | {"kind": kind}
    model, long = memformer(memory=memory), torch.randint(7, (3, 15), generator=generator(6))
    first, kept = model.encode_segments(long[:, :10])
    last, _ = model.encode_segments(long[:, 10:], kept)
    # one call reads the same outputs as two
    whole, _ = model.encode_segments(long)
    assert_agree(torch.cat([first[0][-1].k, last[0][-1].k], 1), whole[0][-1].k)
    # a call with a source begins with the initial memory
    assert_agree(model(targets(), source=long[:, :10])[0], model(targets(), first)[0])
    assert not torch.equal(model(targets(), last)[0], model(targets(), source=long[:, 10:])[0])
    with pytest.raises(ValueError, match="`lengths` and `dt` must be None with a memory"):
        model.encode(long, torch.tensor([15, 10, 5]))
    with pytest.raises(ValueError, match="whole segments of `segment_length` = 5 steps; got 2"):
        model.encode(long[:, :7])


def test_what_is_refused() -> None:
    model = make()
    with pytest.raises(ValueError, match="`remember` needs an encoder with a memory"):
        model.encode_segments(sources())
    with pytest.raises(ValueError, match="`second` and `arn` must not both be given"):
        replace(model.config, second=model.config.encoder, arn=AttentiveRecurrenceConfig())
    with pytest.raises(ValueError, match="`merge` = 'concatenate' needs a `second` encoder"):
        make("arn", merge="concatenate")
    with pytest.raises(ValueError, match="`n_reading_second` must be at least 1 and at most 2; got 3"):
        make("beside", n_reading_second=3)
    with pytest.raises(ValueError, match="`n_reading_second` must be None without `second` and `arn`"):
        make(n_reading_second=1)
    with pytest.raises(ValueError, match="did you mean 'lstm'"):
        AttentiveRecurrenceConfig(cell="lstn")  # type: ignore[arg-type]
