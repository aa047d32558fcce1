"""linrec's models under the names of transformers: loading, generation, padding, training."""

import copy
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError
from safetensors.torch import load_file, save_file
from torch import Tensor

from linrec.hf import (
    LinrecConfig,
    LinrecForCausalLM,
    LinrecForSequenceClassification,
    StateCache,
    from_hugging_face,
    to_hugging_face,
)
from linrec.hf.cache import CACHE
from linrec.hf.tokenizer import fast_tokenizer
from linrec.models import LanguageModel, ModelConfig
from linrec.testing import generator
from linrec.text import CharacterTokenizer
from tests.mixers.variants import CAUSAL, OF_FAMILIES
from tests.tiers import tiered

transformers = pytest.importorskip("transformers")

VOCAB = 11
# a vector, a matrix with a cache beside it, a growing cache, parameters that layers share
SOME = ["gate_loop", "mamba", "attention", "hgru", "lmu"]
some = pytest.mark.parametrize("name", SOME)
each = pytest.mark.parametrize("name", tiered(SOME, OF_FAMILIES, CAUSAL))
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
    made = to_hugging_face(model, tmp_path)
    assert torch.equal(made(tokens).logits, logits)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert isinstance(loaded, LinrecForCausalLM)
    # bits of all tensors, constants that no file holds included; a product may round otherwise where a tensor
    # lies elsewhere in memory
    for ours, theirs in ((made, loaded), (model, from_hugging_face(loaded))):
        expected = dict([*ours.named_parameters(), *ours.named_buffers()])
        found = dict([*theirs.named_parameters(), *theirs.named_buffers()])
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
    torch.testing.assert_close(loaded(tokens).logits, logits, rtol=1e-5, atol=1e-5)


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
def test_a_padded_prompt_may_come_token_by_token(name: str) -> None:
    model, cache = to_hugging_face(model_of(name).double()), StateCache()
    tokens, mask = prompt(), torch.tensor([[1] * 7, [0] * 3 + [1] * 4])
    steps = [
        model(tokens[:, t : t + 1], attention_mask=mask[:, : t + 1], cache=cache).logits for t in range(7)
    ]
    found = torch.cat(steps, 1)
    torch.testing.assert_close(found[:1], model(tokens[:1]).logits)
    torch.testing.assert_close(found[1:, 3:], model(tokens[1:, 3:]).logits)


def test_the_configuration_has_the_fields_that_vllm_reads() -> None:
    pattern = {"mixer": ("gla", "attention", "gla"), "n_layers": 4, "d_model": 16, "vocab_size": 5}
    config = LinrecConfig(pattern | {"mixer_args": {"attention": {"n_heads": 4, "kv_heads": 2, "d_head": 6}}})
    assert config.layers_block_type == ["mamba", "attention", "mamba", "mamba"]
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 6)
    # they are not stored beside the fields that they follow from
    assert not {"layers_block_type", "head_dim"} & {*config.to_dict()}
    alone = LinrecConfig({"vocab_size": 5, "mixer": "gla"})
    assert (alone.num_attention_heads, alone.num_key_value_heads, alone.head_dim) == (0, 0, 0)


def test_options_of_a_call() -> None:
    plain = model_of("gla")
    model, tokens = to_hugging_face(plain), prompt()
    whole = model(tokens).logits
    torch.testing.assert_close(model(tokens, logits_to_keep=1).logits, whole[:, -1:])
    torch.testing.assert_close(model(tokens, logits_to_keep=torch.tensor([0, 3])).logits, whole[:, [0, 3]])
    torch.testing.assert_close(model(inputs_embeds=plain.embedding(tokens)).logits, whole)
    with pytest.raises(ValueError, match="hidden states of every layer need"):
        memory = {"kind": "recurrent_memory", "segment_length": 4}
        to_hugging_face(model_of("gla", memory=memory))(tokens, output_hidden_states=True)
    assert model(tokens, use_cache=False).get(CACHE) is None
    with pytest.raises(ValueError, match="exactly one of"):
        model()


def test_hidden_states_are_the_inputs_of_blocks_and_head() -> None:
    plain = model_of(("gla", "attention"), embedding_norm=True)
    model, tokens, inputs = to_hugging_face(plain), prompt(), []
    for block in plain.blocks:
        block.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    logits, _ = plain(tokens)
    *found, last = model(tokens, output_hidden_states=True).hidden_states
    assert len(found) == 2 and all(map(torch.equal, found, inputs))
    torch.testing.assert_close(model.lm_head(last), logits)
    assert model(tokens).hidden_states is None
    options = {
        "attention_mask": torch.ones_like(tokens),
        "max_new_tokens": 3,
        "return_dict_in_generate": True,
    }
    steps = model.generate(tokens, output_hidden_states=True, **options, **GREEDY).hidden_states
    assert [layers[-1].shape[1] for layers in steps] == [7, 1, 1]


@pytest.mark.parametrize("fields", [{"tie_embeddings": True}, {"n_outputs": VOCAB, "logit_cap": 0.5}])
def test_a_resized_vocabulary_is_saved(fields: dict[str, Any], tmp_path: Path) -> None:
    model = to_hugging_face(model_of("gla", **fields))
    before = model(prompt()).logits
    model.resize_token_embeddings(VOCAB + 3)
    torch.testing.assert_close(model(prompt()).logits[..., :VOCAB], before)
    tokens = torch.cat([prompt(), torch.full((2, 1), VOCAB + 2)], 1)
    model.save_pretrained(tmp_path)
    loaded = LinrecForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits)
    torch.testing.assert_close(from_hugging_face(model)(tokens)[0], model(tokens).logits)


def test_a_head_that_is_untied_is_saved(tmp_path: Path) -> None:
    model = to_hugging_face(model_of("gla", tie_embeddings=True))
    model.lm_head.weight = torch.nn.Parameter(2 * model.lm_head.weight)
    model.config.tie_word_embeddings = False
    model.save_pretrained(tmp_path)
    loaded = LinrecForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(loaded(prompt()).logits, model(prompt()).logits)
    torch.testing.assert_close(from_hugging_face(loaded)(prompt())[0], model(prompt()).logits)


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
    again.gradient_checkpointing_disable()
    assert not again.is_gradient_checkpointing
    with pytest.raises(ValueError, match="Leave both out"):
        again.gradient_checkpointing_enable(every_n_layers=2)
    loaded = LinrecForCausalLM.from_pretrained(tmp_path)
    assert (loaded.lm_head.weight is loaded.get_input_embeddings().weight) == tied


def test_classification_reads_the_last_token_that_is_no_pad() -> None:
    config = LinrecConfig({"vocab_size": VOCAB, "d_model": 16, "n_layers": 1}, num_labels=3, pad_token_id=0)
    torch.manual_seed(0)
    model = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    assert isinstance(model, LinrecForSequenceClassification)
    tokens = prompt()
    padded = torch.cat([tokens, torch.zeros(2, 3, dtype=torch.int64)], 1)
    found = model(padded, labels=torch.tensor([0, 2]))
    expected = model.score(model.model(tokens).last_hidden_state[:, -1])
    torch.testing.assert_close(found.logits, expected)
    torch.testing.assert_close(found.loss, torch.nn.functional.cross_entropy(expected, torch.tensor([0, 2])))


def test_tensors_that_a_checkpoint_lacks_are_initialised(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = LinrecConfig({"vocab_size": VOCAB, "d_model": 64, "n_layers": 2, "mixer": "lmu"}, num_labels=8)
    LinrecForSequenceClassification(config).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    lost = [name for name in tensors if "blocks.1" in name or name == "score.weight"]
    kept = {name: tensor for name, tensor in tensors.items() if name not in lost}
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    loaded = LinrecForSequenceClassification.from_pretrained(tmp_path)
    found = loaded.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in kept.items())
    for name in lost:
        # the scale of the initialisation, with other random numbers
        torch.testing.assert_close(
            found[name].std(), tensors[name].std(), rtol=0.3, atol=1e-6, equal_nan=True
        )
    assert loaded.model.fresh is None and not torch.equal(found["score.weight"], tensors["score.weight"])


def test_a_model_built_on_meta_stays_tied() -> None:
    model = to_hugging_face(model_of("gru", tie_embeddings=True))
    with torch.device("meta"):
        other = LinrecForCausalLM(model.config)
    other.to_empty(device="cpu").load_state_dict(model.state_dict())
    assert other.lm_head.weight is other.model.body.embedding.weight
    assert torch.equal(other.eval()(prompt()).logits, model(prompt()).logits)


def test_the_tuned_start_of_gate_loop_is_loaded(tmp_path: Path) -> None:
    arguments = {"magnitude_init": [0.9, 0.999], "phase_init": 3.0, "scale_query_init": True}
    model = model_of("gate_loop", mixer_args=arguments)
    to_hugging_face(model, tmp_path)
    loaded = LinrecForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded(prompt()).logits, model(prompt())[0])


def test_a_tuned_state_is_kept_and_starts_every_text(tmp_path: Path) -> None:
    model = to_hugging_face(model_of(("delta_net", "attention"))).double()
    tokens, targets = prompt(), torch.full((2, 7), 3)
    before = model(tokens).logits
    model.tune_state()
    torch.testing.assert_close(model(tokens).logits, before)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert sum(p.numel() for p in trained) == sum(p.numel() for p in model.model.initial_state.parameters())
    optimizer = torch.optim.Adam(trained, lr=0.1)
    losses = []
    for _ in range(20):
        losses.append(model(tokens, labels=targets).loss)
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.9 * losses[0]
    model.save_pretrained(tmp_path)
    loaded = LinrecForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits)
    assert not torch.allclose(loaded(tokens).logits, before)
    # padding changes nothing, and a second document would start from zeros
    mask = torch.tensor([[1] * 7, [0, 1, 1, 0, 1, 1, 0]])
    found = loaded(tokens, attention_mask=mask).logits[1, mask[1] > 0]
    torch.testing.assert_close(found[None], loaded(tokens[1:, mask[1] > 0]).logits)
    with pytest.raises(ValueError, match="one document in each row"):
        loaded(tokens, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2, 3]]))
    with pytest.raises(ValueError, match="must have no tuned state"):
        from_hugging_face(loaded)


@pytest.mark.thorough
def test_a_static_cache_compiles_the_step() -> None:
    model = to_hugging_face(model_of(("gla", "attention"))).requires_grad_(False)
    options = GREEDY | {"attention_mask": torch.ones_like(prompt()), "max_new_tokens": 6}
    everywhere = transformers.CompileConfig(fullgraph=True, mode="default")
    everywhere._compile_all_devices = True
    torch._dynamo.utils.counters.clear()
    found = model.generate(prompt(), cache_implementation="static", compile_config=everywhere, **options)
    assert torch.equal(found, model.generate(prompt(), **options))
    # the first number of steps is a constant of the first graph
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


def test_code_that_a_configuration_names_is_not_imported(tmp_path: Path) -> None:
    config = LinrecConfig({"vocab_size": VOCAB, "mixer": "antigravity:Mixer"})
    with pytest.raises(ValueError, match=r"Import antigravity first if you trust it"):
        LinrecForCausalLM(config)
    # modules that are imported already have run
    config = LinrecConfig({"vocab_size": VOCAB, "d_model": 8, "mixer": "linrec.mixers.gla:GLA"})
    assert LinrecForCausalLM(config)(prompt()).logits.shape == (2, 7, VOCAB)


def test_models_without_logits_of_their_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match=r"11; got `n_outputs` = 3"):
        to_hugging_face(model_of("gla", n_outputs=3))


def test_a_device_map_and_a_pipeline(tmp_path: Path) -> None:
    to_hugging_face(model_of("mamba"), tmp_path)
    fast_tokenizer(CharacterTokenizer("abcdefghijk")).save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, device_map="cpu")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    generate = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    texts = [generate(text, max_new_tokens=4, do_sample=False)[0]["generated_text"] for text in ("abc", "fa")]
    for text, prefix in zip(texts, ("abc", "fa"), strict=True):
        tokens = torch.tensor([tokenizer(prefix).input_ids])
        assert text == tokenizer.decode(model.generate(tokens, max_new_tokens=4, **GREEDY)[0])


def test_sampling_several_sequences_repeats_the_state() -> None:
    model = to_hugging_face(model_of("mamba"))
    torch.manual_seed(0)
    options = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 5, "pad_token_id": 0}
    found = model.generate(prompt(), attention_mask=torch.ones_like(prompt()), **options)
    torch.manual_seed(0)
    options["use_cache"] = False
    assert found.shape == (6, 12) and len({tuple(row.tolist()) for row in found}) > 2
    assert torch.equal(model.generate(prompt(), attention_mask=torch.ones_like(prompt()), **options), found)


def test_assisted_generation_is_refused() -> None:
    model = to_hugging_face(model_of("gla"))
    with pytest.raises(ValueError, match="stateful"):
        model.generate(prompt(1), assistant_model=to_hugging_face(model_of("gla")), max_new_tokens=3)


def test_a_configuration_repeats_the_names_that_transformers_reads() -> None:
    config = LinrecConfig({"vocab_size": 10, "d_model": 16, "mixer": ["gla", "hgru"], "n_layers": 2})
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (10, 16, 2)
    again = LinrecConfig.from_dict(config.to_dict())
    assert again.model_config() == config.model_config() and again.model_config().mixer == ("gla", "hgru")


def _no_card(*args: object, **options: object) -> None:
    raise EntryNotFoundError("no README.md")


def test_a_model_is_pushed_to_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = {}

    class Hub:
        def create_repo(self, name: str, **options: Any) -> Any:
            return types.SimpleNamespace(repo_id=f"me/{name}")

        def create_commit(self, repo_id: str, operations: list[Any], **options: Any) -> None:
            sent[repo_id] = {operation.path_in_repo for operation in operations}

        def create_branch(self, **options: Any) -> None:
            raise AssertionError("the main branch takes the commit")

    # a new repository has no card
    monkeypatch.setattr("huggingface_hub.ModelCard.load", _no_card)
    for module in ("transformers.utils.hub", "transformers.modeling_utils"):
        if hasattr(sys.modules[module], "hf_api"):
            monkeypatch.setattr(f"{module}.hf_api", Hub)
        for name in ("create_repo", "create_commit"):
            monkeypatch.setattr(f"{module}.{name}", getattr(Hub(), name), raising=False)
    to_hugging_face(model_of("gla")).push_to_hub("tiny")
    assert {"config.json", "model.safetensors"} <= sent["me/tiny"]
