"""Rows of a batch read different steps: a masked step is as if it were not there, for every mixer."""

import pytest
import torch
from torch import Tensor

from linrec import mixers
from linrec.generation import generate, pad_prompts
from linrec.models import LanguageModel
from linrec.models.ragged import RaggedState
from linrec.nn.segment_mixer import SegmentMixer
from linrec.testing import generator
from tests.generation.models import FIRST, MIXERS, build
from tests.models.test_stack_memory import KINDS, STACKS, make
from tests.tiers import tiered

# nothing, padding on the left, on the right, a gap, and nothing at all
MASK = torch.tensor([[1] * 6, [0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 0, 0], [0, 1, 0, 0, 1, 0], [0] * 6]).bool()
# without rows of padding alone, rows start together
STARTS = [MASK, MASK[:4]]
# every mixer, and every memory across a stack
NAMES = [*MIXERS, *(f"memory {name}" for name in STACKS)]
SEGMENTED = [
    name
    for name in NAMES
    if name not in MIXERS or (name in mixers.names() and issubclass(mixers.get(name), SegmentMixer))
]


def model_of(name: str) -> LanguageModel:
    return make(name.removeprefix("memory ")).eval() if name.startswith("memory ") else build(name)


def draw(*shape: int) -> Tensor:
    return torch.randint(7, shape, generator=generator(sum(shape)))


@pytest.mark.parametrize("name", tiered([*FIRST, *(f"memory {kind}" for kind in KINDS)], [], NAMES))
@torch.no_grad()
def test_a_row_is_as_without_its_masked_steps(name: str) -> None:
    model = model_of(name)
    for mask in STARTS:
        masks = mask, mask.flip(0), torch.ones_like(mask[:, :2])
        calls = [draw(*each.shape) for each in masks]
        state, outputs = None, []
        for tokens, each in zip(calls, masks, strict=True):
            y, state = model(tokens, state, mask=each)
            outputs.append(y)
            assert y.isfinite().all()
        for row in range(len(mask)):
            alone = None
            for y, tokens, each in zip(outputs, calls, masks, strict=True):
                expected, alone = model(tokens[row : row + 1, each[row]], alone)
                torch.testing.assert_close(y[row : row + 1, each[row]], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", tiered(["transformer_xl", "memory gate_loop"], SEGMENTED))
def test_prompts_of_several_lengths_are_continued_as_alone_with_segments(name: str) -> None:
    model, options = model_of(name), {"n_tokens": 6, "temperature": 0.0}
    texts = [draw(length) for length in (1, 7, 2)]
    tokens, reset = pad_prompts(texts)
    found, state = generate(model, tokens, reset=reset, **options)
    assert isinstance(state.layers, RaggedState)
    # then the last row begins anew
    more, begin = draw(3, 4), torch.tensor([[False] * 4, [False] * 4, [False, False, True, False]])
    after, _ = generate(model, more, state=state, reset=begin, **options)
    for row, text in enumerate(texts):
        expected, state = generate(model, text[None], **options)
        assert torch.equal(found[row], expected[0])
        alone = {"tokens": more[row : row + 1], "state": state} if row < 2 else {"tokens": more[2:, 2:]}
        assert torch.equal(after[row], generate(model, **alone, **options).tokens[0])


def test_resets_and_masks_together() -> None:
    model, tokens = model_of("attention"), draw(2, 6)
    # a document that begins at a masked step, and one behind a gap
    mask = torch.tensor([[1, 1, 0, 1, 1, 1], [0, 1, 1, 0, 1, 0]]).bool()
    reset = torch.tensor([[0, 0, 1, 0, 1, 0], [0, 0, 0, 0, 1, 0]]).bool()
    found, _ = model(tokens, mask=mask, reset=reset)
    for row, steps in ((0, [0, 1]), (0, [3]), (0, [4, 5]), (1, [1, 2]), (1, [4])):
        torch.testing.assert_close(found[row : row + 1, steps], model(tokens[row : row + 1, steps])[0])


def test_nothing_of_a_masked_step_passes() -> None:
    """Not even NaN, forward or backward."""
    model, x = model_of("gate_loop"), torch.randn(2, 6, 8, dtype=torch.float64, generator=generator())
    mask = torch.tensor([[1, 1, 0, 1, 1, 0], [0, 1, 1, 1, 1, 1]]).bool()
    x[~mask] = torch.nan
    x.requires_grad_()
    y, _ = model.transformed(x, mask=mask)
    y.sum().backward()
    assert y.isfinite().all() and x.grad is not None and not x.grad[~mask].any()
    assert all(p.grad.isfinite().all() for p in (x, *model.blocks.parameters()) if p.grad is not None)


def test_masks_of_other_shapes_and_dtypes_are_refused() -> None:
    model, tokens = model_of("gate_loop"), draw(2, 6)
    with pytest.raises(ValueError, match=r"`mask`.* \(2, 6\); got \(2, 5\)"):
        model(tokens, mask=torch.ones(2, 5).bool())
    with pytest.raises(TypeError, match=r"`mask`.*got torch.int64. Pass `mask != 0`"):
        model(tokens, mask=torch.ones(2, 6).long())


@pytest.mark.thorough
def test_a_mask_in_a_compiled_program() -> None:
    model, tokens = model_of("gate_loop"), draw(4, 6)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(tokens, mask=MASK[:4]), model(tokens, mask=MASK[:4]))
