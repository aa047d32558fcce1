"""Language models of mixers with a memory of segments."""

from collections.abc import Sequence

import pytest
import torch

from linrec.models import LanguageModel, ModelConfig
from linrec.testing import assert_agree, generator
from linrec.trees import leaves

LENGTH = 4
MIXERS = {
    "transformer_xl": {"segment_length": LENGTH},
    "infini_attention": {"segment_length": LENGTH},
    "block_recurrent": {"segment_length": LENGTH, "n_states": 3},
    "compressive_transformer": {"segment_length": LENGTH},
    "block_state": {"segment_length": LENGTH, "n_states": 3},
}
each = pytest.mark.parametrize("name", MIXERS)


def make(name: str) -> LanguageModel:
    torch.manual_seed(0)
    # a mixer without segments between, whose start does not depend on the position
    mixers = (name, "gate_loop", name)
    config = ModelConfig(vocab_size=7, d_model=8, n_layers=3, mixer=mixers, mixer_args={name: MIXERS[name]})
    return LanguageModel(config).double()


@each
def test_a_state_made_outside_of_autocast_is_the_start(name: str) -> None:
    model = make(name).float()
    state = model.init_state(2)
    with torch.autocast("cpu", torch.bfloat16):
        (y, end), (expected, at_end) = model(tokens(6), state), model(tokens(6))
    assert torch.equal(y, expected)
    assert [x.dtype for x in leaves(end)] == [x.dtype for x in leaves(at_end)]


def tokens(time: int) -> torch.Tensor:
    return torch.randint(7, (2, time), generator=generator())


@each
@pytest.mark.parametrize("position", [3, LENGTH, 6])
def test_a_document_runs_as_from_its_position_in_the_stream(name: str, position: int) -> None:
    model, stream = make(name), tokens(15)
    reset = torch.zeros(2, 15, dtype=torch.bool)
    reset[1, position] = True
    packed, state = model(stream, reset=reset)
    start = model.init_state(1, position=position)
    alone, end = model(stream[1:, position:], start)
    assert_agree(packed[1:, position:], alone)
    following, _ = model(stream, state)
    assert_agree(following[1:], model(stream[1:], end)[0])
    # its boundaries are those of the stream
    if position % LENGTH:
        other, _ = model(stream[1:, position:])
        assert (other - alone).abs().max() > 1e-6


# Block-State's gradients pass through its state-space models, as those of all recurrences
@pytest.mark.parametrize("name", [name for name in MIXERS if name != "block_state"])
def test_training_by_segments_keeps_no_graph_and_a_constant_state(name: str) -> None:
    arguments = MIXERS[name] | {"detach": "segment"}
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=7, d_model=8, n_layers=2, mixer=name, mixer_args=arguments)
    sizes = sizes_in_training(LanguageModel(config).double(), tokens(10 * LENGTH).split(2 * LENGTH, 1))
    assert len(set(sizes)) == 1


def sizes_in_training(model: LanguageModel, segments: Sequence[torch.Tensor]) -> list[int]:
    """Train on one segment after the other; return the bytes that each state keeps alive."""
    state, sizes = None, []
    for segment in segments:
        logits, state = model(segment, state)
        # fails if the state has a graph of the segment before
        logits.logsumexp(-1).mean().backward()
        storages = [tensor.untyped_storage() for tensor in leaves(state)]
        # tensors may share a storage
        sizes.append(sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()))
        assert not any(tensor.requires_grad for tensor in leaves(state))
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    return sizes
