"""linrec's models under the names of transformers: loading, generation, padding, training."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from linrec import mixers
from linrec.hf import LinrecConfig, LinrecForCausalLM, StateCache, from_hugging_face, to_hugging_face
from linrec.models import LanguageModel, ModelConfig
from linrec.testing import generator
from tests.tiers import tiered

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

VOCAB = 11
# a vector, a matrix with a cache beside it, a growing cache, parameters that layers share
SOME = ["gate_loop", "mamba", "attention", "hgru", "lmu"]
some = pytest.mark.parametrize("name", SOME)
each = pytest.mark.parametrize("name", tiered(SOME, [name for name in mixers.names() if name not in SOME]))
GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}


def model_of(name: str | tuple[str, ...], **fields: Any) -> LanguageModel:
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=VOCAB, d_model=16, n_layers=2, mixer=name, **fields)
    model = LanguageModel(config).eval()
    # no two logits are near each other
    torch.nn.init.normal_(model.head.weight, std=0.7)
    return model


def prompt(batch: int = 2, time: int = 7) -> Tensor:
    return torch.randint(1, VOCAB, (batch, time), generator=generator())


@each
def test_a_model_survives_the_way_there_and_back(name: str, tmp_path: Path) -> None:
    model, tokens = model_of(name), prompt()
    logits, _ = model(tokens)
    assert torch.equal(to_hugging_face(model, tmp_path)(tokens).logits, logits)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert isinstance(loaded, LinrecForCausalLM)
    # tensors of a file may lie elsewhere in memory, for which products differ by rounding
    torch.testing.assert_close(loaded(tokens).logits, logits, rtol=0, atol=1e-6)
    assert torch.equal(from_hugging_face(loaded)(tokens)[0], loaded(tokens).logits)


@each
def test_half_precision_keeps_what_linrec_keeps_in_float32(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    to_hugging_face(model, tmp_path)
    loaded = LinrecForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    model.bfloat16()
    expected = {key: tensor.dtype for key, tensor in to_hugging_face(model).state_dict().items()}
    assert {key: tensor.dtype for key, tensor in loaded.state_dict().items()} == expected
    found, right = loaded(prompt()).logits, model(prompt())[0]
    torch.testing.assert_close(found, right, rtol=0, atol=0.01 * right.abs().max().item())


@each
def test_generation_with_a_cache_is_generation_without(name: str) -> None:
    model = to_hugging_face(model_of(name).double())
    tokens = prompt()
    options = GREEDY | {"attention_mask": torch.ones_like(tokens), "max_new_tokens": 6}
    whole = model.generate(tokens, use_cache=False, **options)
    assert torch.equal(model.generate(tokens, **options), whole)
    # several beams, and a prompt in pieces
    beams = model.generate(tokens, use_cache=False, num_beams=3, **options)
    assert torch.equal(model.generate(tokens, num_beams=3, **options), beams)
    assert torch.equal(model.generate(tokens, prefill_chunk_size=3, **options), whole)


@some
def test_padding_on_the_left_changes_nothing(name: str) -> None:
    model = to_hugging_face(model_of(name).double())
    tokens = prompt()
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.int64), tokens], 1)
    padded[1] = torch.cat([torch.zeros(5, dtype=torch.int64), tokens[1, :5]])
    found = model.generate(padded, attention_mask=(padded != 0).long(), max_new_tokens=5, **GREEDY)
    for row, text in enumerate((tokens[:1], tokens[1:, :5])):
        alone = model.generate(text, attention_mask=torch.ones_like(text), max_new_tokens=5, **GREEDY)
        assert torch.equal(found[row, -5:], alone[0, -5:])


@some
def test_a_cache_goes_on_and_goes_back(name: str) -> None:
    model, tokens = to_hugging_face(model_of(name).double()), prompt(time=9)
    whole = model(tokens).logits
    first = model(tokens[:, :4], use_cache=True)
    cache = first.past_key_values
    assert isinstance(cache, StateCache) and cache.get_seq_length() == 4
    before = cache.snapshot()
    torch.testing.assert_close(model(tokens[:, 4:], past_key_values=cache).logits, whole[:, 4:])
    cache.restore(before)
    assert cache.get_seq_length() == 4
    torch.testing.assert_close(model(tokens[:, 4:], past_key_values=cache).logits, whole[:, 4:])
    with pytest.raises(ValueError, match="restore a snapshot"):
        cache.crop(2)


def test_options_of_a_call() -> None:
    plain = model_of("gla")
    model, tokens = to_hugging_face(plain), prompt()
    whole = model(tokens).logits
    torch.testing.assert_close(model(tokens, logits_to_keep=1).logits, whole[:, -1:])
    torch.testing.assert_close(model(tokens, logits_to_keep=torch.tensor([0, 3])).logits, whole[:, [0, 3]])
    torch.testing.assert_close(model(inputs_embeds=plain.embedding(tokens)).logits, whole)
    assert model(tokens, use_cache=False).past_key_values is None
    with pytest.raises(ValueError, match="exactly one of"):
        model()


def test_documents_of_a_packed_batch_are_apart() -> None:
    model, tokens = to_hugging_face(model_of("gla")), prompt(1, 8)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    found = model(tokens, position_ids=positions).logits
    torch.testing.assert_close(found[:, 3:], model(tokens[:, 3:]).logits)


@pytest.mark.parametrize("tied", [False, True])
def test_loss_and_gradients_are_linrecs(tied: bool, tmp_path: Path) -> None:
    plain = model_of("hgru", tie_embeddings=tied).train()
    model, tokens = to_hugging_face(plain, tmp_path).train(), prompt()
    logits, _ = plain(tokens)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    for recompute in (False, True):
        again = copy.deepcopy(model)
        if recompute:
            again.gradient_checkpointing_enable()
        assert again.is_gradient_checkpointing == recompute
        found = again(tokens, labels=tokens)
        torch.testing.assert_close(found.loss, loss)
        found.loss.backward()
        expected = plain.embedding.weight.grad
        torch.testing.assert_close(again.get_input_embeddings().weight.grad, expected)
    loaded = LinrecForCausalLM.from_pretrained(tmp_path)
    assert (loaded.lm_head.weight is loaded.get_input_embeddings().weight) == tied


def test_a_configuration_repeats_the_names_that_transformers_reads() -> None:
    config = LinrecConfig({"vocab_size": 10, "d_model": 16, "mixer": ["gla", "hgru"], "n_layers": 2})
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (10, 16, 2)
    again = LinrecConfig.from_dict(config.to_dict())
    assert again.model_config() == config.model_config() and again.model_config().mixer == ("gla", "hgru")
