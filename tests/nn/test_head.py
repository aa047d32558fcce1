import pytest
import torch

from linrec.nn import Embedding
from linrec.testing import assert_agree, generator


@pytest.mark.parametrize("rows", [6, 300])
def test_embedding_is_torchs_with_its_gradient(rows):
    ours, theirs = Embedding(rows, 4).double(), torch.nn.Embedding(rows, 4).double()
    theirs.load_state_dict(ours.state_dict())
    tokens = torch.randint(0, rows, (3, 50), generator=generator())
    weight = torch.randn(3, 50, 4, generator=generator(), dtype=torch.float64)
    for embedding in (ours, theirs):
        (embedding(tokens) * weight).sum().backward()
    assert torch.equal(ours(tokens), theirs(tokens))
    assert_agree(ours.weight.grad, theirs.weight.grad)


def test_embedding_has_a_gradient_for_no_tokens():
    embedding = Embedding(6, 4)
    embedding(torch.zeros(2, 0, dtype=torch.int64)).sum().backward()
    assert torch.equal(embedding.weight.grad, torch.zeros(6, 4))
