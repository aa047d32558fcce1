import pytest
import torch
from torch.nn import functional

from linrec.nn import Embedding, FeedForward, RMSNorm, make_norm
from linrec.testing import assert_agree, generator


def test_feed_forward_is_linear_gelu_linear_with_biases():
    ffn = FeedForward(4, 7)
    x = torch.randn(2, 3, 4, generator=generator())
    hidden = functional.gelu(x @ ffn.up.weight.T + ffn.up.bias)
    assert_agree(ffn(x), hidden @ ffn.down.weight.T + ffn.down.bias)
    assert sum(p.numel() for p in ffn.parameters()) == 4 * 7 + 7 + 7 * 4 + 4


def test_squared_relu_without_biases():
    ffn = FeedForward(4, 7, activation="squared_relu", bias=False)
    x = torch.randn(2, 3, 4, generator=generator())
    assert_agree(ffn(x), (x @ ffn.up.weight.T).clamp(min=0).square() @ ffn.down.weight.T)
    assert sum(p.numel() for p in ffn.parameters()) == 2 * 4 * 7


def test_rms_norm_is_its_equation():
    norm = RMSNorm(5, eps=1e-5)
    torch.nn.init.uniform_(norm.weight)
    x = torch.randn(2, 3, 5, generator=generator())
    assert_agree(norm(x), x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight)


def test_rms_norm_computes_in_its_weights_dtype_under_autocast():
    x = torch.randn(2, 5, generator=generator())
    norm = RMSNorm(5)
    # torch's own warns here, and a warning fails the test
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_agree(norm(x.bfloat16()), norm(x.bfloat16().float()))


def test_norms_by_name():
    assert isinstance(make_norm("layer", 4), torch.nn.LayerNorm)
    assert isinstance(make_norm("rms", 4), RMSNorm)
    x = torch.randn(2, 4, generator=generator())
    assert make_norm("none", 4)(x) is x
    with pytest.raises(ValueError, match="did you mean 'layer'"):
        make_norm("layr", 4)


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
