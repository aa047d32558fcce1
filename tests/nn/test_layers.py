import pytest
import torch
from torch.nn import functional

from linrec.nn import FeedForward, RMSNorm, make_norm
from linrec.testing import assert_agree, generator


def test_feed_forward_is_linear_gelu_linear_with_biases():
    ffn = FeedForward(4, 7)
    x = torch.randn(2, 3, 4, generator=generator())
    hidden = functional.gelu(x @ ffn.up.weight.T + ffn.up.bias)
    assert_agree(ffn(x), hidden @ ffn.down.weight.T + ffn.down.bias)
    assert sum(p.numel() for p in ffn.parameters()) == 4 * 7 + 7 + 7 * 4 + 4


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
