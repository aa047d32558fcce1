"""Training and fine-tuning by the libraries of Hugging Face."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from linrec import mixers
from linrec.hf import LinrecForCausalLM, to_hugging_face
from linrec.hf.tokenizer import add_end, fast_tokenizer, make_room
from linrec.models import LanguageModel, ModelConfig
from linrec.nn import groups_of
from linrec.text import ByteTokenizer, CharacterTokenizer, HuggingFaceTokenizer, Tokenizer
from tests.mixers.variants import OF_FAMILIES, SEGMENTED
from tests.tiers import thorough, tiered

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
tokenizers = pytest.importorskip("tokenizers")

VOCAB = 11


def model(**fields: Any) -> LinrecForCausalLM:
    torch.manual_seed(0)
    config = ModelConfig(d_model=16, n_layers=2, **{"vocab_size": VOCAB, "mixer": "mamba", **fields})
    return to_hugging_face(LanguageModel(config))


def words() -> HuggingFaceTokenizer:
    """Return a tokenizer of characters of the package `tokenizers`, with an end and without a pad."""
    vocabulary = {token: place for place, token in enumerate([*"abcde", "<|endoftext|>"])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    return HuggingFaceTokenizer(backend, name="words")


def texts(lengths: list[int]) -> list[dict[str, list[int]]]:
    """Return documents that count upwards."""
    return [{"input_ids": [(start + i) % VOCAB for i in range(n)]} for start, n in enumerate(lengths)]


def trainer(folder: Path, **options: Any) -> Any:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        learning_rate=0.02,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_steps=4,
        save_steps=4,
        seed=0,
        **options,
    )
    lengths = [5, 9, 7, 3, 8, 6, 4, 9] * 4
    return transformers.Trainer(
        model=model(),
        args=arguments,
        train_dataset=texts(lengths),
        eval_dataset=texts([6, 8]),
        data_collator=transformers.DataCollatorWithFlattening(),
    )


@thorough
def test_the_trainer_trains_and_evaluates_packed_documents_and_resumes(tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole", max_steps=8)
    before = whole.evaluate()["eval_loss"]
    whole.train()
    after = whole.evaluate()["eval_loss"]
    assert after < 0.7 * before
    # predictions are logits, without the cache
    assert whole.predict(texts([6, 8])).predictions.shape == (1, 14, VOCAB)
    resumed = trainer(tmp_path / "resumed", max_steps=8)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    for ours, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", tiered(["mamba2", "s5", "hgru", "rwkv6"], [], mixers.names()))
def test_the_trainer_decays_what_linrec_decays(name: str, tmp_path: Path) -> None:
    made = model(mixer=name, channel_mixing="rwkv")
    # copies keep the names
    for trained in (made, copy.deepcopy(made)):
        options = transformers.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, weight_decay=0.1)
        optimizer = transformers.Trainer(trained, options).create_optimizer()
        decays = {id(p) for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
        for key, group in groups_of(trained).items():
            parameter = trained.get_parameter(key)
            # the Trainer leaves out biases and norms of any shape
            assert id(parameter) not in decays or (group.weight_decay and parameter.ndim > 1), key
        assert id(trained.lm_head.weight) in decays
    assert all(type(key) is str for key in made.state_dict())


@pytest.mark.parametrize(
    ("tokenizer", "add"), [(ByteTokenizer(), False), (CharacterTokenizer("abcde"), True), (words(), True)]
)
def test_the_end_of_a_text_has_a_loss(tokenizer: Tokenizer, add: bool) -> None:
    fast, made = fast_tokenizer(tokenizer), model(vocab_size=tokenizer.vocab_size)
    logits = made(torch.tensor([[0, 2, 1]])).logits
    add_end(fast)
    make_room(made, fast)
    assert (made.config.vocab_size > tokenizer.vocab_size) == add
    torch.testing.assert_close(made(torch.tensor([[0, 2, 1]])).logits[..., : tokenizer.vocab_size], logits)
    ends = [{"input_ids": [*fast(text).input_ids, fast.eos_token_id]} for text in ("ab", "abcde")]
    batch = transformers.DataCollatorForLanguageModeling(fast, mlm=False)(ends)
    assert (batch["labels"][:, -1] == fast.eos_token_id).all()
    assert (batch["labels"] == -100).tolist() == (batch["attention_mask"] == 0).tolist()
    assert made(**batch).loss.isfinite()
    if add:
        # tokens that were not trained are not drawn
        assert made(batch["input_ids"]).logits.softmax(-1)[..., tokenizer.vocab_size :].max() < 1e-3


def test_a_packed_batch_of_the_collator_is_its_documents() -> None:
    documents, packed = texts([5, 9, 3]), transformers.DataCollatorWithFlattening()
    made = model().eval()
    batch = {name: value for name, value in packed(documents).items() if isinstance(value, Tensor)}
    assert batch["position_ids"].shape == (1, 17)
    alone = [made(torch.tensor([document["input_ids"]])).logits for document in documents]
    torch.testing.assert_close(made(**batch).logits, torch.cat(alone, 1))


# PEFT stores the adapters of a shared module once, and misses them under its other names
@pytest.mark.filterwarnings("ignore:Found missing adapter keys")
@pytest.mark.parametrize(
    ("name", "targets"),
    tiered(
        [("mamba", ["xz", "out"]), ("cfc", "all-linear")],
        [(name, "all-linear") for name in OF_FAMILIES],
        [(name, "all-linear") for name in mixers.names()],
    ),
)
def test_lora_changes_what_it_targets(name: str, targets: str | list[str], tmp_path: Path) -> None:
    # two segments that end within the texts, and a step behind them that predicts
    fields = {"mixer": name, "mixer_args": {"segment_length": 4} if name in SEGMENTED else {}}
    base = model(**fields).double()
    tokens = torch.tensor([document["input_ids"] for document in texts([10, 10])])
    before = base(tokens).logits.detach()
    config = peft.LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM", init_lora_weights=False)
    tuned = peft.get_peft_model(base, config).double()
    # adapters that start at random numbers change the output: the layers are called as modules
    assert not torch.allclose(tuned(tokens).logits, before)
    tuned(input_ids=tokens, labels=tokens).loss.backward()
    adapters = {name: p.grad for name, p in tuned.named_parameters() if p.requires_grad}
    assert adapters and all("lora" in name and grad.abs().sum() > 0 for name, grad in adapters.items())
    tuned.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(model(**fields).double(), tmp_path).double().eval()
    torch.testing.assert_close(loaded(tokens).logits, tuned.eval()(tokens).logits)
    found = loaded.generate(input_ids=tokens, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert found.shape == (2, 13)
    torch.testing.assert_close(loaded.merge_and_unload()(tokens).logits, tuned(tokens).logits)
