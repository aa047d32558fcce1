"""Masks and packed documents of transformers: padding anywhere, gaps, and documents under every name."""

from typing import Any

import pytest
import torch
from torch import Tensor

from linrec.hf import LinrecForCausalLM, StateCache, to_hugging_face
from linrec.hf.cache import CACHE
from tests.models import test_ragged
from tests.tiers import tiered

transformers = pytest.importorskip("transformers")

SOME = ["gate_loop", "attention", "transformer_xl"]
some = pytest.mark.parametrize("name", SOME)
GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 5}
# padding on the left, padding on the right, a gap, and none
MASK = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [1, 0, 0, 1, 0, 1], [1] * 6])
LENGTHS = 3, 4, 1
DOCUMENTS = torch.arange(3).repeat_interleave(torch.tensor(LENGTHS))[None]
ENDS = torch.tensor([0, 3, 7, 8], dtype=torch.int32)
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS])[None]


def model_of(name: str) -> LinrecForCausalLM:
    return to_hugging_face(test_ragged.model_of(name))


def draw(*shape: int) -> Tensor:
    return torch.randint(1, 7, shape, generator=torch.Generator().manual_seed(3))


def assert_rows_are_alone(
    model: LinrecForCausalLM, logits: Tensor, tokens: Tensor, mask: Tensor, begin: int = 0
) -> None:
    """Assert that logits from step `begin` on are those of each row without its masked steps."""
    assert logits.isfinite().all()
    for row, kept in enumerate(mask > 0):
        expected = model(tokens[row : row + 1, kept], use_cache=False).logits
        found = logits[row, kept[begin:]]
        torch.testing.assert_close(found, expected[0, kept[:begin].sum() :], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", tiered([*SOME, "memory memformer"], [], test_ragged.NAMES))
@torch.no_grad()
def test_masks_cut_steps_out_of_rows_in_every_call(name: str) -> None:
    model, cache = model_of(name), StateCache()
    mask = torch.cat([MASK, MASK.flip(0), torch.ones_like(MASK[:, :1])], 1)
    tokens, begin = draw(*mask.shape), 0
    for end in (6, 12, 13):
        # a mask covers the cached steps too
        now = tokens[:, begin:end]
        found = model(now, attention_mask=mask[:, :end], cache=cache).logits
        assert_rows_are_alone(model, found, tokens[:, :end], mask[:, :end], begin)
        begin = end
    # without a state, steps behind the end of a row may be read
    for each in (mask, torch.tensor([[1] * 13, [1] * 9 + [0] * 4])):
        found = model(tokens[: len(each)], attention_mask=each, use_cache=False).logits
        assert_rows_are_alone(model, found, tokens, each)


@some
@pytest.mark.parametrize(
    "options", [{}, {"use_cache": False}, {"num_beams": 3}, {"num_beams": 2, "use_cache": False}]
)
def test_padded_prompts_are_continued_as_alone(name: str, options: dict[str, Any]) -> None:
    model, tokens, options = model_of(name), draw(4, 6), GREEDY | options
    found = model.generate(tokens, attention_mask=MASK, **options)
    for row, kept in enumerate(MASK > 0):
        alone = tokens[row : row + 1, kept]
        expected = model.generate(alone, attention_mask=torch.ones_like(alone), **options)
        assert torch.equal(found[row, 6:], expected[0, alone.shape[1] :])


@some
@pytest.mark.parametrize("options", [{"prefill_chunk_size": 2}, {"cache_implementation": "static"}])
def test_left_padding_in_pieces_and_with_a_static_cache(name: str, options: dict[str, Any]) -> None:
    model, tokens = model_of(name), draw(4, 6)
    mask = torch.tensor([[0] * 5 + [1], [0] * 3 + [1] * 3, [1] * 6, [0] + [1] * 5])
    found = model.generate(tokens, attention_mask=mask, **GREEDY, **options)
    assert torch.equal(found, model.generate(tokens, attention_mask=mask, **GREEDY, use_cache=False))


@some
def test_the_second_turn_of_a_chat_goes_on(name: str) -> None:
    model, tokens, more = model_of(name), draw(4, 6), draw(4, 3)
    first = model.generate(tokens, attention_mask=MASK, return_dict_in_generate=True, **GREEDY)
    # messages of several lengths
    new = torch.tensor([[1, 1, 1], [0, 1, 1], [1, 0, 0], [0, 0, 1]])
    history = torch.cat([first.sequences, more], 1)
    mask = torch.cat([MASK, torch.ones(4, 5, dtype=torch.int64), new], 1)
    found = model.generate(history, attention_mask=mask, cache=first[CACHE], **GREEDY)
    assert torch.equal(found, model.generate(history, attention_mask=mask, **GREEDY))
    for row, kept in enumerate(mask > 0):
        alone = history[row : row + 1, kept]
        expected = model.generate(alone, attention_mask=torch.ones_like(alone), **GREEDY)
        assert torch.equal(found[row, -5:], expected[0, -5:])


PACKED: dict[str, dict[str, Tensor]] = {
    "positions": {"position_ids": POSITIONS},
    "positions from 2": {"position_ids": POSITIONS + 2},
    "flash attention": {"cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS, "max_length_q": 4, "max_length_k": 4},
    "cu_seqlens": {"cu_seqlens": ENDS.long()},
    "seq_idx": {"seq_idx": DOCUMENTS.int()},
    "mask": {"attention_mask": DOCUMENTS + 1},
}


@pytest.mark.parametrize("name", PACKED)
def test_packed_documents_are_apart_under_every_name(name: str) -> None:
    model, tokens = model_of("attention"), draw(1, 8)
    labels = tokens.clone()
    found = model(tokens, labels=labels, **PACKED[name])
    for number in range(3):
        own = DOCUMENTS[0] == number
        torch.testing.assert_close(found.logits[:, own], model(tokens[:, own]).logits)


def test_documents_of_several_rows_beside_masked_steps() -> None:
    model, tokens = model_of("gate_loop"), draw(2, 4)
    # rows one after the other; the third document begins at a masked step
    ends, mask = torch.tensor([0, 1, 4, 6, 8]), torch.tensor([[1, 1, 0, 1], [1, 1, 0, 1]])
    for packed in (
        {"attention_mask": mask, "cu_seqlens": ends},
        {"attention_mask": torch.tensor([[1, 2, 0, 2], [1, 1, 0, 2]])},
    ):
        found = model(tokens, **packed).logits
        for row, steps in ((0, [0]), (0, [1, 3]), (1, [0, 1]), (1, [3])):
            torch.testing.assert_close(found[row, steps], model(tokens[row : row + 1, steps]).logits[0])
    # numbers of documents over cached steps
    cache = StateCache()
    model(tokens[:, :2], attention_mask=torch.tensor([[1, 1], [1, 2]]), cache=cache)
    found = model(
        tokens[:, 2:], attention_mask=torch.tensor([[1, 1, 1, 2], [1, 2, 2, 2]]), cache=cache
    ).logits
    torch.testing.assert_close(found[0, 1:], model(tokens[:1, 3:]).logits[0])
    torch.testing.assert_close(found[1:], model(tokens[1:, 1:]).logits[:, 1:])


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "pairs": ({"attention_mask": torch.ones(2, 1, 4, 4)}, r"\(2, 4\); got \(2, 1, 4, 4\). Masks of pairs"),
    "a mask for each kind of layer": ({"attention_mask": {}}, r"\(2, 4\); got dict"),
    "width": ({"attention_mask": torch.ones(2, 5)}, r"\(2, 4\); got \(2, 5\)"),
    "added to scores": ({"attention_mask": torch.tensor([[-torch.inf, 0, 0, 0]] * 2)}, "got other values"),
    "positions": ({"position_ids": torch.zeros(3, 2, 4)}, r"\(2, 4\) or \(1, 4\); got \(3, 2, 4\)"),
    "end": ({"cu_seqlens": torch.tensor([0, 4])}, r"rise from 0 to the 8 steps .*; got \[0, 4\]"),
    "begin": ({"cu_seq_lens_k": torch.tensor([1, 8])}, r"rise from 0"),
    "order": ({"cu_seq_lens_q": torch.tensor([0, 5, 3, 8])}, r"rise from 0"),
    "numbers": ({"seq_idx": torch.zeros(1, 8)}, r"`seq_idx` must have shape \(2, 4\)"),
    "another name": ({"document_ids": torch.zeros(2, 4)}, "`document_ids` must not be a tensor"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_a_mask_is_refused(name: str) -> None:
    given, message = REFUSED[name]
    model = model_of("gate_loop")
    for part in (model, model.model):
        with pytest.raises((TypeError, ValueError), match=message):
            part(draw(2, 4), **given)


def test_masks_that_do_not_fit_a_cache_are_refused() -> None:
    model, tokens, cache = model_of("gate_loop"), draw(2, 4), StateCache()
    model(tokens, attention_mask=torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]), cache=cache)
    before = cache.snapshot()
    # as after generated tokens behind the end of a row
    with pytest.raises(
        ValueError, match=r"those of the 4 steps in the cache .* pass the same mask, or no cache"
    ):
        model(tokens, attention_mask=torch.ones(2, 8), cache=cache)
    with pytest.raises(ValueError, match=r"8.*got numbers for 4 steps"):
        model(tokens, attention_mask=torch.tensor([[1, 1, 2, 2]] * 2), cache=cache)
    with pytest.raises(ValueError, match=r"got 4 steps"):
        model(tokens, seq_idx=torch.zeros(2, 4), cache=cache)
    # a mask of the new steps alone
    found = model(tokens, attention_mask=torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]]), cache=cache).logits
    cache.restore(before)
    whole = torch.tensor([[1] * 8, [1, 1, 0, 0, 0, 1, 1, 1]])
    torch.testing.assert_close(model(tokens, attention_mask=whole, cache=cache).logits, found)
    with pytest.raises(ValueError, match="Pad on the left"):
        model.generate(
            tokens, attention_mask=torch.tensor([[1] * 4, [1, 1, 0, 0]]), prefill_chunk_size=2, **GREEDY
        )


@some
def test_the_state_after_right_padding_is_that_of_the_last_token(name: str) -> None:
    model, tokens = model_of(name), draw(2, 6)
    cache = model(tokens, attention_mask=torch.tensor([[1] * 6, [1] * 4 + [0] * 2]))[CACHE]
    for row, length in ((1, 4), (0, 6)):
        one = StateCache()
        one.restore(cache.snapshot())
        one.batch_select_indices(torch.tensor([row, row]))
        found = model(tokens[:, :2], cache=one).logits
        alone = torch.cat([tokens[[row, row], :length], tokens[:, :2]], 1)
        torch.testing.assert_close(found, model(alone).logits[:, -2:])
