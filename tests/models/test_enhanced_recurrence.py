"""Enhanced recurrence: memories of Transformer-XL that hold outputs of layers."""

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from linrec.models import LanguageModel, MemoryConfig, ModelConfig
from linrec.nn.segment_mixer import PastSteps
from linrec.testing import assert_agree, generator

LENGTH = 4


def make(memory_length: int = 6, n_layers: int = 3, **changes: Any) -> LanguageModel:
    torch.manual_seed(0)
    mixer_args = {"n_heads": 2, "segment_length": LENGTH, "memory_length": memory_length}
    given: dict[str, Any] = {"d_channel_mixing": 12, "norm_position": "post", "final_norm": False}
    given |= {"memory": MemoryConfig(kind="enhanced_recurrence", segment_length=LENGTH)}
    sizes = {"vocab_size": 7, "d_model": 8, "n_layers": n_layers}
    given |= {"mixer": "transformer_xl", "mixer_args": mixer_args}
    config = ModelConfig(**sizes, **given | changes)
    return LanguageModel(config).double()


def tokens(time: int = 18, batch: int = 2) -> Tensor:
    return torch.randint(7, (batch, time), generator=generator())


def by_layers(model: LanguageModel, x: Tensor) -> Tensor:
    """Return the outputs of the last block: a block attends to its own earlier outputs."""
    past: list[list[Tensor]] = [[] for _ in model.blocks]
    outputs = []
    for h in x.split(LENGTH, 1):
        for block, before in zip(model.blocks, past, strict=True):
            state = block.mixer.init_state(len(x))
            memory = state.memory
            for earlier in before:
                memory = memory.then(PastSteps.of(earlier, torch.ones(earlier.shape[:2], dtype=torch.bool)))
            h, _ = block(h, state._replace(memory=memory))
            before.append(h.detach())
        outputs.append(h)
    return torch.cat(outputs, 1)


@pytest.mark.parametrize("memory_length", [2, 4, 6, 9])
def test_a_layer_attends_to_its_own_outputs_of_earlier_segments(memory_length: int) -> None:
    model = make(memory_length)
    found = model.hidden(tokens())[0]
    expected = by_layers(model, model.embedding(tokens()))
    assert_agree(found, expected)
    wanted = [model.embedding.weight, model.blocks[0].mixer.k.weight]
    gradients = (torch.autograd.grad(y.square().sum(), wanted) for y in (found, expected))
    assert_agree(*gradients)


def test_without_memory_across_the_stack_it_is_transformer_xl() -> None:
    model = make()
    plain = make(memory=MemoryConfig())
    assert model.state_dict().keys() == plain.state_dict().keys()
    first, last = (m(tokens())[0].split([2 * LENGTH, 10], 1) for m in (model, plain))
    # memories of the first segment hold inputs of layers or outputs of layers
    assert_agree(first[0][:, :LENGTH], last[0][:, :LENGTH])
    assert (first[0] - last[0]).abs().max() > 1e-3


def test_the_reach_grows_with_every_segment() -> None:
    """One layer reaches the whole past, where Transformer-XL's reaches its memory alone."""
    reached = []
    for memory in (MemoryConfig(kind="enhanced_recurrence", segment_length=LENGTH), MemoryConfig()):
        model = make(LENGTH, n_layers=1, memory=memory)
        changed = tokens()
        changed[:, 0] += 1
        logits = [model(x % 7)[0] for x in (tokens(), changed)]
        reached.append((logits[0] - logits[1]).abs()[:, -1].max().item() > 0)
    assert reached == [True, False]


def test_a_document_that_is_fed_twice_starts_from_memories_of_its_end() -> None:
    """The retrospective feed of the paper: a second call with the state of the first."""
    model, document = make(), tokens(3 * LENGTH)
    _, skimmed = model.hidden(document)
    found, _ = model.hidden(document, skimmed)
    expected = by_layers(model, model.embedding(torch.cat([document, document], 1)))
    assert_agree(found, expected[:, 3 * LENGTH :])
    # its first step sees the last one
    changed = document.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 7
    other, _ = model.hidden(changed, model.hidden(changed)[1])
    assert (other - found).abs()[:, 0].max() > 1e-3


def test_mixers_with_a_norm_of_their_own_store_the_outputs_of_blocks() -> None:
    own = {"n_heads": 2, "segment_length": LENGTH, "memory_length": 6, "norm": "layer"}
    model = make(norm_position="pre", final_norm=False, mixer_args=own)
    _, state = model(tokens(LENGTH))
    h = model.embedding(tokens(LENGTH))
    for block, held in zip(model.blocks, state.memory, strict=True):
        h, _ = block(h)
        assert_agree(held.memory.h[:, -LENGTH:], h)


def test_the_last_block_reads_normalised_outputs() -> None:
    model = make(norm_position="pre", final_norm=True)
    _, state = model(tokens(LENGTH))
    x, _ = model.hidden(tokens(LENGTH))
    assert_agree(state.memory[-1].memory.h[:, -LENGTH:], x)
    below = model.embedding(tokens(LENGTH))
    for block, upper, held in zip(model.blocks, model.blocks[1:], state.memory, strict=False):
        below, _ = block(below)
        assert_agree(held.memory.h[:, -LENGTH:], upper.mixer_norm(below))


@pytest.mark.parametrize(("case", "memory_length"), [("plain", 6), ("pre", 6), ("shifted", 4)])
def test_it_is_the_released_code(case: str, memory_length: int) -> None:
    """lucidrains/x-transformers; the file's metadata has the commit.

    "plain" and "pre" are Transformer-XL with norms after and before the layers. "shifted" has
    `shift_mem_down=1`. It rotates the list of memories, so its last layer would get the inputs of the first
    layer; in the numbers it gets its own outputs.
    """
    numbers = safetensors.torch.load_file(Path(__file__).parent / "enhanced_recurrence.safetensors")
    norms = {"norm_position": "pre", "final_norm": True} if case == "pre" else {}
    memory = {} if case == "shifted" else {"memory": MemoryConfig()}
    model = make(memory_length, head_bias=False, **norms, **memory)
    weights = {name: torch.zeros_like(x) for name, x in model.state_dict().items()}
    prefix = f"{case}.weights."
    weights |= {n.removeprefix(prefix): x for n, x in numbers.items() if n.startswith(prefix)}
    model.load_state_dict(weights)
    logits, _ = model(numbers["tokens"])
    assert (logits - numbers[f"{case}.logits"]).abs().max() < 1e-13
    logits.logsumexp(-1).square().mean().backward()
    for name in ("embedding.weight", "blocks.0.mixer.k.weight"):
        gradient = model.get_parameter(name).grad
        assert (gradient - numbers[f"{case}.gradient.{name}"]).abs().max() < 1e-14


@pytest.mark.parametrize(
    ("stack", "found"),
    [
        ({"mixer": "lru"}, "got LRU"),
        (
            {
                "mixer": ("transformer_xl", "lru"),
                "mixer_args": {"transformer_xl": {"segment_length": LENGTH}},
            },
            "got LRU",
        ),
        ({"mixer": "transformer_xl", "mixer_args": {"segment_length": 3}}, "`segment_length` = 3"),
        (
            {"mixer": "transformer_xl", "mixer_args": {"segment_length": LENGTH, "memory_length": 0}},
            "got `memory_length` = 0",
        ),
    ],
)
def test_other_mixers_are_refused(stack: dict[str, Any], found: str) -> None:
    memory = MemoryConfig(kind="enhanced_recurrence", segment_length=LENGTH)
    with pytest.raises(ValueError, match=f"`mixer`.*'transformer_xl'.*{found}"):
        LanguageModel(ModelConfig(vocab_size=7, d_model=8, n_layers=2, memory=memory, **stack))


def test_the_state_size_is_that_of_the_largest_state() -> None:
    model = make()
    _, state = model(tokens(2 * LENGTH - 1))
    assert model.memory.state_size == state.segment[0].numel()
    assert model.state_size == 8 * (LENGTH - 1) + sum(mixer.state_size for mixer in model.mixers)
