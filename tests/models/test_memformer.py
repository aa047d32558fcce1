"""Memformer: slots that the blocks of a language model read, and that change after each segment."""

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor
from torch.nn import functional

from linrec.models import LanguageModel, MemoryConfig, ModelConfig
from linrec.nn.parameters import groups_of
from linrec.testing import assert_agree, generator

LENGTH, N = 5, 3


def make(**memory: Any) -> LanguageModel:
    torch.manual_seed(0)
    given = {"kind": "memformer", "segment_length": LENGTH, "n_tokens": N, "n_heads": 2} | memory
    attention = {"n_heads": 2, "positions": "none", "bias": True, "causal": given.get("form") != "encoder"}
    sizes = {"vocab_size": 7, "d_model": 8, "n_layers": 2, "d_channel_mixing": 32}
    config = ModelConfig(**sizes, mixer="attention", mixer_args=attention, memory=MemoryConfig(**given))
    return LanguageModel(config).double()


def tokens(time: int = 12, batch: int = 2) -> Tensor:
    return torch.randint(7, (batch, time), generator=generator())


def test_it_is_the_released_code() -> None:
    """lucidrains/memformer; the file's metadata has the commit, and the function of the gradients.

    The branches of its position bias for causal and other models are exchanged. The bias is zero here.
    """
    numbers = safetensors.torch.load_file(Path(__file__).parent / "memformer.safetensors")
    model, prefix = make(form="encoder"), "weights."
    weights = {n.removeprefix(prefix): x for n, x in numbers.items() if n.startswith(prefix)}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == (["head.weight", "head.bias"], [])
    x, state = model.hidden(numbers["tokens"])
    assert (x - numbers["outputs"]).abs().max() < 1e-13
    assert (state.memory - numbers["memory"]).abs().max() < 1e-13
    ((x.square() * x.sin()).mean() + state.memory.square().mean()).backward()
    gradients = {n: x for n, x in numbers.items() if n.startswith("gradient.")}
    assert len(gradients) == 4
    for name, gradient in gradients.items():
        assert (model.get_parameter(name.removeprefix("gradient.")).grad - gradient).abs().max() < 1e-13


def test_several_updates_are_those_of_the_released_code() -> None:
    """The file's metadata has the commit and the layer."""
    numbers = safetensors.torch.load_file(Path(__file__).parent / "memformer_updates.safetensors")
    memory, prefix = make(n_updates=3).memory, "weights."
    memory.load_state_dict({n.removeprefix(prefix): x for n, x in numbers.items() if n.startswith(prefix)})
    alive = torch.ones(2, LENGTH, dtype=torch.bool)
    found = memory.written(memory.M.expand(2, -1, -1), numbers["outputs"], alive)
    assert (found - numbers["memory"]).abs().max() < 1e-13


@pytest.mark.parametrize("form", ["decoder", "encoder"])
def test_slots_change_by_themselves_and_the_segment_alone(form: str) -> None:
    model = make(form=form).memory
    M, Y = (torch.randn(2, n, 8, dtype=torch.float64, generator=generator(n)) for n in (N, LENGTH))
    alive = torch.ones(2, LENGTH, dtype=torch.bool)
    alive[1, :2] = False
    jacobian = torch.autograd.functional.jacobian(lambda M, Y: model.written(M, Y, alive).sum(-1), (M, Y))
    of_slots, of_steps = (x.abs().amax(-1) > 0 for x in jacobian)
    own = torch.eye(2, dtype=torch.bool)[:, None, :, None] & torch.eye(N, dtype=torch.bool)[None, :, None]
    assert torch.equal(of_slots, own)
    seen = torch.eye(2, dtype=torch.bool)[:, None, :, None] & alive
    assert torch.equal(of_steps, seen.expand_as(of_steps))


def test_the_normalised_update_is_an_attention_a_bias_and_a_length_of_one() -> None:
    memory = make(update="normalised", temperature=0.25).memory
    M, Y = (torch.randn(2, n, 8, dtype=torch.float64, generator=generator(n)) for n in (N, LENGTH))
    found = memory.written(M, Y, torch.ones(2, LENGTH, dtype=torch.bool))
    attention = memory.attention
    for i in range(N):
        other = torch.cat([M[:, i : i + 1], Y], 1)
        q = attention.q(M[:, i : i + 1]).unflatten(-1, (2, 4))
        k, v = (layer(other).unflatten(-1, (2, 4)) for layer in (attention.k, attention.v))
        scores = torch.einsum("bthd,bshd->bhts", q, k) / 4**0.5 / 0.25
        m = torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v).flatten(-2)
        m = attention.out(m)[:, 0] + memory.M[i]
        assert_agree(found[:, i], m / m.norm(dim=-1, keepdim=True))
    _, state = make(update="normalised")(tokens(0))
    assert_agree(state.memory, functional.normalize(memory.M, dim=-1).expand(2, -1, -1))


def test_every_block_reads_the_slots_between_its_mixings() -> None:
    model = make()
    M = torch.randn(2, N, 8, dtype=torch.float64, generator=generator())
    state = model.init_state(2)._replace(memory=M)
    found, _ = model.hidden(tokens(LENGTH), state)
    h = model.embedding(tokens(LENGTH))
    for block in model.blocks:
        h = h + block.mixer(block.mixer_norm(h))[0]
        h = h + block.reading.attention(block.reading_norm(h), M)
        h = h + block.channel_mixing(block.channel_mixing_norm(h))
    assert_agree(found, model.norm(h))


def test_steps_after_a_reset_read_the_slots_of_the_start() -> None:
    model, reset = make(), torch.zeros(2, 12, dtype=torch.bool)
    reset[1, 7] = True
    logits, state = model(tokens(), reset=reset)
    changed = model.init_state(2)._replace(memory=torch.randn(2, N, 8).double())
    other, after = model(tokens(), changed, reset=reset)
    assert (logits - other)[1, :7].abs().amin(-1).min() > 0
    assert_agree(other[1, 7:], logits[1, 7:])
    assert_agree(after.memory[1], state.memory[1])
    assert (after.memory[0] - state.memory[0]).abs().max() > 1e-6


def test_slots_that_a_reset_discards_have_no_effect_even_if_their_products_overflow() -> None:
    model, found = make(), []
    for block in model.blocks:
        torch.nn.init.ones_(block.reading.attention.k.weight)
    reset = torch.zeros(2, LENGTH, dtype=torch.bool)
    reset[:, 0] = True
    for size in (0.0, 1e308):
        state = model.init_state(2)._replace(memory=torch.full((2, N, 8), size, dtype=torch.float64))
        x, _ = model.hidden(tokens(LENGTH), state, reset=reset)
        wanted = [p for name, p in model.named_parameters() if name.startswith("blocks")]
        found.append((x, torch.autograd.grad(x.square().sum(), wanted)))
    assert_agree(found[1], found[0])


def test_sizes_and_groups() -> None:
    model = make()
    _, state = model(tokens(2 * LENGTH - 1))
    assert model.memory.state_size == state.memory[0].numel() + state.segment[1][0].numel()
    assert groups_of(model)["memory.M"].name == "vocabulary"
    assert groups_of(model)["memory.cell.weight_hh"].name == "default"
    assert model.memory.M.std().item() == pytest.approx(1, rel=0.3)


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        ({"update": "gr"}, "did you mean 'gru'"),
        ({"temperature": 0.0}, "`temperature` must be positive"),
        ({"n_updates": 0}, "`n_updates` must be at least 1; got 0"),
        ({"n_heads": 0}, "`n_heads` must be at least 1; got 0"),
        ({"n_heads": 3}, "`d_model` must be a positive multiple of `n_heads` = 3; got 8"),
        (
            {"kind": "recurrent_memory"},
            "`memory.n_heads` must be None with `memory.kind`",
        ),
    ],
)
def test_wrong_configurations(memory: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**memory)
