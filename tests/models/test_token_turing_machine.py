"""Token Turing Machine: a memory of a language model that summaries of tokens read and write."""

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from linrec.models import LanguageModel, MemoryConfig, ModelConfig
from linrec.models.token_turing_machine import TokenSummary
from linrec.testing import assert_agree, generator

LENGTH, N, D = 4, 3, 6


def make(**memory: Any) -> LanguageModel:
    torch.manual_seed(0)
    given = {"segment_length": LENGTH, "n_tokens": N, **memory}
    causal = given.get("form") != "encoder"
    attention = {"n_heads": 2, "positions": "none", "bias": True, "causal": causal}
    sizes = {"vocab_size": 7, "d_model": D, "n_layers": 2, "d_channel_mixing": 4 * D, "norm_eps": 1e-6}
    config = MemoryConfig(kind="token_turing_machine", **given)
    model = LanguageModel(ModelConfig(**sizes, mixer="attention", mixer_args=attention, memory=config))
    return model.double()


def steps(time: int) -> torch.Tensor:
    return torch.randn(1, time, D, generator=generator(), dtype=torch.float64)


def test_it_is_the_released_code() -> None:
    """google-research/scenic; the file's metadata has the commit and the arguments."""
    numbers = safetensors.torch.load_file(Path(__file__).parent / "token_turing_machine.safetensors")
    model, prefix = make(form="encoder"), "weights."
    weights = {n.removeprefix(prefix): x for n, x in numbers.items() if n.startswith(prefix)}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == (["embedding.weight", "head.weight", "head.bias"], [])
    x, state = model.transformed(numbers["inputs"])
    assert (x - numbers["outputs"]).abs().max() < 1e-13
    assert (state.memory - numbers["memory"]).abs().max() < 1e-13


def test_a_summary_is_a_mean_of_tokens_that_are_alive() -> None:
    torch.manual_seed(0)
    summary, tokens = TokenSummary(D, 2).double(), steps(5)
    alive = torch.tensor([[True, True, False, True, False]])
    assert_agree(summary(tokens, alive), summary(tokens[:, [0, 1, 3]]))
    assert_agree(summary(tokens[:, :1]), tokens[:, :1].expand(-1, 2, -1))


def test_a_decoder_reads_summaries_of_the_memory_before_the_steps() -> None:
    model, x = make(n_read=2), steps(LENGTH)
    memory = torch.randn(1, N, D, generator=generator(1), dtype=torch.float64)
    state = model.init_state(1)._replace(memory=memory)
    y, after = model.transformed(x, state)
    read = model.memory.reading(memory + model.memory.read_positions)
    assert read.shape == (1, 2, D)
    plain, _ = model._stack(torch.cat([read, x], 1), None, None)
    assert_agree(y, plain[:, 2:])
    written = torch.cat([memory, x, y], 1) + model.memory.write_positions
    assert_agree(after.memory, model.memory.writing(written))


def test_the_memory_starts_at_zeros() -> None:
    memory = make().memory
    assert not memory.M.any()
    assert memory.write_positions.std().item() == pytest.approx(0.02, rel=0.3)


def test_wrong_configurations() -> None:
    with pytest.raises(ValueError, match="`n_read` must be at least 1"):
        make(n_read=0)
    with pytest.raises(ValueError, match=r"`memory\.n_heads` must be None with `memory\.kind`"):
        make(n_heads=2)
