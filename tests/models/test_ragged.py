"""Rows of a batch read different steps: a masked step is as if it were not there, for every mixer."""

import pytest
import torch
from torch import Tensor

from linrec.models import LanguageModel
from linrec.testing import generator
from tests.generation.models import MIXERS, build
from tests.models.test_stack_memory import STACKS, make

# nothing, padding on the left, on the right, a gap, and nothing at all
MASK = torch.tensor([[1] * 6, [0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 0, 0], [0, 1, 0, 0, 1, 0], [0] * 6]).bool()
# without rows of padding alone, rows start together
STARTS = [MASK, MASK[:4]]
# every mixer, and every memory across a stack
NAMES = [*MIXERS, *(f"memory {name}" for name in STACKS)]


def model_of(name: str) -> LanguageModel:
    return make(name.removeprefix("memory ")).eval() if name.startswith("memory ") else build(name)


def draw(*shape: int) -> Tensor:
    return torch.randint(7, shape, generator=generator(sum(shape)))


@pytest.mark.parametrize("name", NAMES)
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
