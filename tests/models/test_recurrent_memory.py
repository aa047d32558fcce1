"""Recurrent Memory Transformer: a memory across the stack of a language model."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from linrec.models import InitialState, LanguageModel, MemoryConfig, ModelConfig
from linrec.nn.parameters import groups_of
from linrec.testing import (
    assert_agree,
    generator,
)

LENGTH, N, TIME = 4, 2, 11
STACKS: dict[str, dict[str, Any]] = {
    "attention": {"mixer": "attention", "mixer_args": {"n_heads": 2}},
    "window": {"mixer": "attention", "mixer_args": {"window": 3}},
    "gate_loop": {"mixer": "gate_loop"},
    "hybrid": {"mixer": ("mamba2", "attention"), "channel_mixing": "rwkv"},
    "transformer_xl": {"mixer": "transformer_xl", "mixer_args": {"segment_length": 3}},
}
each = pytest.mark.parametrize("name", STACKS)
# mixers with segments of their own count the steps before a reset
fixed = pytest.mark.parametrize("name", [name for name in STACKS if name != "transformer_xl"])
ENCODER: dict[str, Any] = {"mixer": "attention", "mixer_args": {"causal": False}}


def make(name: str = "attention", **memory: Any) -> LanguageModel:
    stack = ENCODER if memory.get("form") == "encoder" else STACKS[name]
    torch.manual_seed(0)
    given = {"kind": "recurrent_memory", "segment_length": LENGTH, "n_tokens": N} | memory
    config = ModelConfig(
        vocab_size=7, d_model=8, n_layers=2, d_channel_mixing=12, memory=MemoryConfig(**given), **stack
    )
    return LanguageModel(config).double()


def tokens(time: int = TIME, batch: int = 3) -> Tensor:
    return torch.randint(7, (batch, time), generator=generator())


def resets(rate: float = 0.3) -> Tensor:
    return torch.rand(3, TIME, generator=generator(5)) < rate


def of_embeddings(model: LanguageModel) -> Any:
    # the laws change inputs continuously, so they enter behind the embedding
    return lambda x, state=None, *, reset=None: model.transformed(x, state, reset=reset)


def by_segments(model: LanguageModel, sequence: Tensor, *, begin: int = 0) -> Tensor:
    """Return logits of one row that starts at step `begin` of a stream: the stack on [M | x | M] at once."""
    stack = LanguageModel(dataclasses.replace(model.config, memory=MemoryConfig())).double()
    stack.load_state_dict({name: x for name, x in model.state_dict().items() if name != "memory.M"})
    memory, outputs, is_decoder = model.memory.M[None], [], model.config.memory.form == "decoder"
    x = model.embedding(sequence)[None]
    cuts = [0, *(step for step in range(1, len(sequence)) if (begin + step) % LENGTH == 0), len(sequence)]
    for start, end in itertools.pairwise(cuts):
        parts = [memory, x[:, start:end], memory] if is_decoder else [memory, x[:, start:end]]
        y, _ = stack.transformed(torch.cat(parts, 1))
        outputs.append(y[:, N : N + end - start])
        memory = y[:, -N:] if is_decoder else y[:, :N]
    return model.head(torch.cat(outputs, 1))[0]


@each
def test_each_segment_is_the_stack_between_memory_tokens(name: str) -> None:
    model, rows = make(name), tokens()
    logits, state = model(rows)
    for row in range(3):
        assert_agree(logits[row], by_segments(model, rows[row]))
    expected = torch.stack([by_segments(model, row) for row in rows])
    got, wanted = (
        torch.autograd.grad(y.square().sum(), [model.memory.M, model.embedding.weight])
        for y in (logits, expected)
    )
    assert_agree(got, wanted, "gradients")
    assert state.alive.shape == (3, TIME % LENGTH)


@fixed
def test_documents_are_the_segments_from_their_position_on(name: str) -> None:
    model, rows, reset = make(name), tokens(), resets()
    reset[0, 0] = reset[1, LENGTH] = reset[2, TIME - 1] = True
    logits, state = model(rows, reset=reset)
    following, _ = model(rows, state)
    for row in range(3):
        cuts = sorted({0, *reset[row].nonzero().flatten().tolist()})
        for begin, end in zip(cuts, [*cuts[1:], TIME], strict=True):
            assert_agree(logits[row, begin:end], by_segments(model, rows[row, begin:end], begin=begin))
        document = torch.cat([rows[row, cuts[-1] :], rows[row]])
        expected = by_segments(model, document, begin=cuts[-1])
        assert_agree(following[row], expected[TIME - cuts[-1] :])


@pytest.mark.parametrize("position", [0, 3, LENGTH, 6])
@fixed
def test_a_stream_may_start_anywhere(name: str, position: int) -> None:
    model, rows = make(name), tokens()
    logits, _ = model(rows, model.init_state(3, position=position))
    assert_agree(logits[0], by_segments(model, rows[0], begin=position))


def test_it_is_the_released_code() -> None:
    """booydar/recurrent-memory-transformer; the file's metadata has the commit."""
    numbers = safetensors.torch.load_file(Path(__file__).parent / "recurrent_memory.safetensors")
    model = make(segment_length=5, n_tokens=3)
    prefix = "weights."
    model.load_state_dict({n.removeprefix(prefix): x for n, x in numbers.items() if n.startswith(prefix)})
    logits, _ = model(numbers["tokens"])
    assert (logits - numbers["logits"]).abs().max() < 1e-14
    logits.logsumexp(-1).square().mean().backward()
    assert (model.memory.M.grad - numbers["gradient.memory.M"]).abs().max() < 1e-14
    assert (model.embedding.weight.grad - numbers["gradient.embedding.weight"]).abs().max() < 1e-14


def test_memory_tokens_start_like_token_embeddings() -> None:
    memory = MemoryConfig(kind="recurrent_memory", n_tokens=64)
    model = LanguageModel(ModelConfig(vocab_size=50, d_model=64, tie_embeddings=True, memory=memory))
    assert model.memory.M.std().item() == pytest.approx(1 / 8, rel=0.05)
    assert groups_of(model)["memory.M"].name == "vocabulary"
    assert model.state_size == 64 * 64 + sum(mixer.state_size for mixer in model.mixers)


def test_a_trained_initial_state_starts_at_the_memory_tokens() -> None:
    model = make("gate_loop")
    start = InitialState(model).double()
    assert_agree(model(tokens(), start(model.init_state(3)))[0], model(tokens())[0])


class TestEncoder:
    def test_the_next_memory_is_the_output_of_the_memory_tokens(self) -> None:
        model, rows = make(form="encoder"), tokens(3 * LENGTH)
        logits, _ = model(rows)
        assert_agree(logits[1], by_segments(model, rows[1]))


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        ({"kind": "recurent_memory"}, "did you mean 'recurrent_memory'"),
        ({"form": "encode"}, "did you mean 'encoder'"),
        ({"n_tokens": 0}, "`n_tokens` must be at least 1; got 0"),
        ({"segment_length": 0}, "`segment_length` must be at least 1; got 0"),
        ({"kind": "enhanced_recurrence", "n_tokens": 2}, "`memory.n_tokens` must be 10 with .*; got 2"),
        ({"kind": "enhanced_recurrence", "form": "encoder"}, "`memory.form` must be 'decoder' with"),
        ({"detach": 0}, '`detach` must be "never", "segment", or a number'),
    ],
)
def test_wrong_configurations(memory: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MemoryConfig(**memory)


def test_mixers_must_fit_the_form() -> None:
    memory = {"kind": "recurrent_memory"}
    with pytest.raises(ValueError, match=r"'decoder'; 'attention'"):
        LanguageModel(ModelConfig(vocab_size=7, d_model=8, memory=memory, **ENCODER))
    memory["form"] = "encoder"
    with pytest.raises(ValueError, match=r"'encoder'; 'lru'"):
        LanguageModel(ModelConfig(vocab_size=7, d_model=8, mixer="lru", memory=memory))


def test_states_must_be_of_segments_of_this_length() -> None:
    model = make()
    with pytest.raises(ValueError, match="2 steps; got 3 steps"):
        make(segment_length=2)(tokens(), model(tokens())[1])
