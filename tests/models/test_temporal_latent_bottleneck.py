"""Temporal Latent Bottleneck: a slow stream that some blocks of a model read, and that chunks change."""

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from linrec.models import LanguageModel, MemoryConfig, ModelConfig
from linrec.testing import assert_agree, generator

LENGTH, N, D = 4, 3, 6


def make(**memory: Any) -> LanguageModel:
    torch.manual_seed(0)
    given = {"segment_length": LENGTH, "n_tokens": N, "n_heads": 2, "read_every": 2} | memory
    attention = {"n_heads": 2, "positions": "none", "bias": True, "causal": given.get("form") != "encoder"}
    sizes = {"vocab_size": 7, "d_model": D, "n_layers": 3, "d_channel_mixing": 4 * D}
    config = MemoryConfig(kind="temporal_latent_bottleneck", **given)
    return LanguageModel(
        ModelConfig(**sizes, mixer="attention", mixer_args=attention, memory=config)
    ).double()


def test_it_is_the_example_of_keras() -> None:
    """keras-team/keras-io, whose layers ran in the order of the paper; the file's metadata has the commit.

    Its example runs one layer as both self-attention and cross-attention, and starts at zeros.
    """
    numbers = safetensors.torch.load_file(Path(__file__).parent / "temporal_latent_bottleneck.safetensors")
    model, prefix = make(form="encoder"), "weights."
    weights = {n.removeprefix(prefix): x for n, x in numbers.items() if n.startswith(prefix)}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == (["embedding.weight", "head.weight", "head.bias"], [])
    x, state = model.transformed(numbers["inputs"])
    assert_agree(x, model.norm(numbers["outputs"]))
    assert_agree(state.memory, numbers["memory"])


def test_the_slow_stream_reaches_blocks_of_the_next_chunk_alone() -> None:
    model = make()
    x = torch.randn(1, 3 * LENGTH, D, generator=generator(), dtype=torch.float64)
    changed = x.clone()
    changed[:, 1] += 1
    difference = (model.transformed(x)[0] - model.transformed(changed)[0]).abs().amax(-1)[0]
    assert difference[0] == 0 and (difference[1:] > 0).all()
    blocks = [block.reading is not None for block in model.blocks]
    assert blocks == [True, False, True]
    torch.nn.init.zeros_(model.memory.attention.out.weight)
    difference = (model.transformed(x)[0] - model.transformed(changed)[0]).abs().amax(-1)[0]
    assert difference[LENGTH:].max() == 0


def test_a_block_reads_after_its_channel_mixing() -> None:
    model = make(read_every=1)
    h = x = torch.randn(1, LENGTH, D, generator=generator(), dtype=torch.float64)
    X = model.memory.M[None]
    for block in model.blocks:
        h = h + block.mixer(block.mixer_norm(h))[0]
        h = h + block.channel_mixing(block.channel_mixing_norm(h))
        h = h + block.reading.attention(block.reading_norm(h), block.reading.norm(X))
        h = h + block.reading_channels(block.reading_channels_norm(h))
    y, state = model.transformed(x)
    assert_agree(y, model.norm(h))
    memory = model.memory
    X = X + memory.attention(memory.attention_norm(X), y)
    assert_agree(state.memory, X + memory.ffn(memory.ffn_norm(X)))


def test_wrong_configurations() -> None:
    with pytest.raises(ValueError, match="`read_every` must be at least 1"):
        make(read_every=0)
    with pytest.raises(ValueError, match=r"`memory\.read_every` must be 1 with `memory\.kind` = 'memformer'"):
        MemoryConfig(kind="memformer", read_every=2)
