"""The cache of states: snapshots, and going back by some steps."""

import pytest
import torch
from torch import Tensor

from linrec.hf import LinrecForCausalLM, StateCache, to_hugging_face
from linrec.models import LanguageModel, ModelConfig
from linrec.testing import generator

pytest.importorskip("transformers")

VOCAB = 11


@pytest.fixture(params=["gla", "attention", "mlstm"])
def model(request: pytest.FixtureRequest) -> LinrecForCausalLM:
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=VOCAB, d_model=16, n_layers=2, mixer=request.param)
    return to_hugging_face(LanguageModel(config).eval().double())


def tokens(time: int = 9) -> Tensor:
    return torch.randint(VOCAB, (2, time), generator=generator())


def test_a_cache_goes_on_and_goes_back_to_a_snapshot(model: LinrecForCausalLM) -> None:
    whole = model(tokens()).logits
    cache = model(tokens()[:, :4], use_cache=True).past_key_values
    assert isinstance(cache, StateCache) and cache.get_seq_length() == 4
    before = cache.snapshot()
    for _ in range(2):
        rest = model(tokens()[:, 4:], past_key_values=cache).logits
        torch.testing.assert_close(rest, whole[:, 4:])
        assert cache.get_seq_length() == 9
        cache.restore(before)
    assert cache.get_seq_length() == 4
    start = StateCache().snapshot()
    cache.restore(start)
    torch.testing.assert_close(model(tokens(), past_key_values=cache).logits, whole)


def test_a_cache_goes_back_by_steps_to_states_that_it_kept(model: LinrecForCausalLM) -> None:
    whole, cache = model(tokens()).logits, StateCache(keep=3)
    for piece in tokens().split([3, 2, 1, 2, 1], dim=1):
        model(piece, past_key_values=cache)
    # kept: after 5, 6 and 8 of the 9 steps
    with pytest.raises(ValueError, match=r"a state that the cache kept: 1, 3, 4; got 2"):
        cache.rollback(2)
    cache.rollback(3)
    assert cache.get_seq_length() == 6
    torch.testing.assert_close(model(tokens()[:, 6:], past_key_values=cache).logits, whole[:, 6:])
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
    first = model(prompt, past_key_values=cache).logits[:, -1:].argmax(-1)
    guesses = torch.cat([first, expected[None, 1:], expected[None, 1:]], 1)
    checked = model(guesses, past_key_values=cache).logits.argmax(-1)
    assert first[0, 0] == expected[0] and checked[0, 0] == expected[1]
    cache.rollback(3)
    again = model(guesses[:, :1], past_key_values=cache).logits.argmax(-1)
    assert again[0, 0] == expected[1] and cache.get_seq_length() == 5


def test_rows_of_a_cache(model: LinrecForCausalLM) -> None:
    whole = model(tokens()).logits
    cache = model(tokens()[:, :4], use_cache=True).past_key_values
    cache.reorder_cache(torch.tensor([1, 1]))
    found = model(tokens()[[1, 1], 4:], past_key_values=cache).logits
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
