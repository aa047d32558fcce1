"""The cache of states: snapshots, and going back by some steps."""

from typing import Any

import pytest
import torch
from torch import Tensor

from linrec.hf import LinrecConfig, LinrecForCausalLM, StateCache, to_hugging_face
from linrec.hf.cache import CACHE
from linrec.models import LanguageModel, ModelConfig
from linrec.testing import generator

transformers = pytest.importorskip("transformers")

VOCAB = 11
either_name = pytest.mark.parametrize("name", ["cache", "past_key_values"])
# transformers 5.24 warns of the old name, in methods that linrec inherits
old_name = pytest.mark.filterwarnings(
    "ignore:`past_key_values` is deprecated and will be removed in version [0-9.]+ for "
    "`(LinrecForCausalLM.generate|LinrecForSequenceClassification.forward)`:FutureWarning"
)


@pytest.fixture(params=["gla", "attention", "mlstm"])
def model(request: pytest.FixtureRequest) -> LinrecForCausalLM:
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=VOCAB, d_model=16, n_layers=2, mixer=request.param)
    return to_hugging_face(LanguageModel(config).eval().double())


def tokens(time: int = 9) -> Tensor:
    return torch.randint(VOCAB, (2, time), generator=generator())


def test_a_cache_goes_on_and_goes_back_to_a_snapshot(model: LinrecForCausalLM) -> None:
    whole = model(tokens()).logits
    cache = model(tokens()[:, :4], use_cache=True)[CACHE]
    assert isinstance(cache, StateCache) and cache.get_seq_length() == 4
    before = cache.snapshot()
    for _ in range(2):
        rest = model(tokens()[:, 4:], cache=cache).logits
        torch.testing.assert_close(rest, whole[:, 4:])
        assert cache.get_seq_length() == 9
        cache.restore(before)
    assert cache.get_seq_length() == 4
    start = StateCache().snapshot()
    cache.restore(start)
    torch.testing.assert_close(model(tokens(), cache=cache).logits, whole)


@either_name
@pytest.mark.parametrize("training", [False, True])
def test_a_call_takes_and_updates_a_cache_under_either_name(
    name: str, training: bool, model: LinrecForCausalLM
) -> None:
    model.train(training)
    whole, cache = model(tokens()).logits, StateCache()
    for piece, expected in zip(tokens().split(3, dim=1), whole.split(3, dim=1), strict=True):
        for part in (model, model.model):
            found = part(piece, **{name: cache})
            assert found[CACHE] is cache
            if part is model:
                torch.testing.assert_close(found.logits, expected)
                before = cache.snapshot()
        cache.restore(before)
    assert cache.get_seq_length() == 9


@old_name
@either_name
def test_generation_continues_a_cache_under_either_name(name: str, model: LinrecForCausalLM) -> None:
    torch.nn.init.normal_(model.lm_head.weight, std=0.7)
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": VOCAB}
    whole = model.generate(tokens(), **options)
    cache = model(tokens()[:, :4], use_cache=True)[CACHE]
    before = cache.snapshot()
    options |= {name: cache, "attention_mask": torch.ones_like(tokens())}
    # all tokens, or the new tokens alone
    for given in (tokens(), tokens()[:, 4:]):
        found = model.generate(given, return_dict_in_generate=True, **options)
        assert torch.equal(found.sequences[:, -5:], whole[:, -5:])
        # the last token is not read
        assert found[CACHE] is cache and cache.get_seq_length() == 9 + 5 - 1
        cache.restore(before)
    with pytest.raises(ValueError, match="cache_implementation"):
        model.generate(tokens(), cache_implementation="static", **options)
    with pytest.raises(ValueError, match=r"needs `use_cache=True`"):
        model.generate(tokens(), use_cache=False, **options)
    with pytest.raises(ValueError, match=r"`cache` has 4 steps, .*got 4"):
        model.generate(tokens()[:, 5:], **options | {"attention_mask": None})


@old_name
@either_name
def test_classification_continues_a_cache_under_either_name(name: str) -> None:
    torch.manual_seed(0)
    config = LinrecConfig({"vocab_size": VOCAB, "d_model": 16, "n_layers": 1}, pad_token_id=VOCAB)
    model = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    cache = StateCache()
    model(tokens()[:, :4], **{name: cache})
    found = model(tokens()[:, 4:], **{name: cache})
    assert found[CACHE] is cache
    torch.testing.assert_close(found.logits, model(tokens()).logits)


def test_a_cache_that_would_be_lost_is_refused() -> None:
    model = to_hugging_face(LanguageModel(ModelConfig(vocab_size=VOCAB, d_model=8, n_layers=1)))
    for part in (model, model.model):
        with pytest.raises(ValueError, match="the same argument; got both"):
            part(tokens(), cache=StateCache(), past_key_values=StateCache())
        with pytest.raises(TypeError, match=r"`cache`.*`StateCache`.*; got a DynamicCache"):
            part(tokens(), past_key_values=transformers.DynamicCache())
        with pytest.raises(TypeError, match=r"`cache_params`.*`cache`"):
            part(tokens(), cache_params=StateCache())


def test_a_cache_goes_back_by_steps_to_states_that_it_kept(model: LinrecForCausalLM) -> None:
    whole, cache = model(tokens()).logits, StateCache(keep=3)
    for piece in tokens().split([3, 2, 1, 2, 1], dim=1):
        model(piece, cache=cache)
    # kept: after 5, 6 and 8 of the 9 steps
    with pytest.raises(ValueError, match=r"1, 3, 4; got 2"):
        cache.rollback(2)
    cache.rollback(3)
    assert cache.get_seq_length() == 6
    torch.testing.assert_close(model(tokens()[:, 6:], cache=cache).logits, whole[:, 6:])
    cache.rollback(3)
    cache.rollback(1)
    assert cache.get_seq_length() == 5
    cache.rollback(0)
    with pytest.raises(ValueError, match=r"kept: no number of steps; got 1"):
        cache.rollback(1)


def test_speculative_decoding_by_hand(model: LinrecForCausalLM) -> None:
    """Three guessed tokens are verified at once; the wrong ones are taken back."""
    prompt, cache = tokens(4)[:1], StateCache(keep=1)
    expected = model.generate(prompt, max_new_tokens=2, do_sample=False, pad_token_id=0)[0, 4:]
    first = model(prompt, cache=cache).logits[:, -1:].argmax(-1)
    guesses = torch.cat([first, expected[None, 1:], expected[None, 1:]], 1)
    checked = model(guesses, cache=cache).logits.argmax(-1)
    assert first[0, 0] == expected[0] and checked[0, 0] == expected[1]
    cache.rollback(3)
    again = model(guesses[:, :1], cache=cache).logits.argmax(-1)
    assert again[0, 0] == expected[1] and cache.get_seq_length() == 5


@pytest.mark.parametrize("steps", [4, 6])
def test_generation_from_embeddings_continues_a_cache(steps: int, model: LinrecForCausalLM) -> None:
    torch.nn.init.normal_(model.lm_head.weight, std=0.7)
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": VOCAB}
    whole = model.generate(tokens(), **options)
    options["attention_mask"] = torch.ones_like(tokens())
    # of all tokens, or of the new tokens alone, which are fewer than the cache has steps or more
    for given in (tokens(), tokens()[:, steps:]):
        cache = model(tokens()[:, :steps], use_cache=True)[CACHE]
        found = model.generate(inputs_embeds=model.get_input_embeddings()(given), cache=cache, **options)
        assert torch.equal(found, whole[:, -5:]) and cache.get_seq_length() == 9 + 5 - 1


def test_rows_of_a_cache(model: LinrecForCausalLM) -> None:
    whole = model(tokens()).logits
    cache = model(tokens()[:, :4], use_cache=True)[CACHE]
    cache.reorder_cache(torch.tensor([1, 1]))
    found = model(tokens()[[1, 1], 4:], cache=cache).logits
    torch.testing.assert_close(found, whole[[1, 1], 4:])
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.states is None


def test_keys_values_and_cuts_are_refused() -> None:
    cache = StateCache()
    with pytest.raises(TypeError, match="not keys and values"):
        cache.update(torch.zeros(1), torch.zeros(1), 0)
    with pytest.raises(ValueError, match="use `rollback` or `restore`"):
        cache.crop(2)
    with pytest.raises(ValueError, match="`keep` must be at least 0"):
        StateCache(keep=-1)
