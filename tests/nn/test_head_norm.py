import pytest
import torch
from torch.nn import functional

from linrec.nn.head_norm import HeadNorm
from linrec.testing import assert_agree, generator


@pytest.mark.parametrize("bias", [False, True])
def test_it_is_group_norm_of_each_step(bias):
    x = torch.randn(5, 3, 4, generator=generator(), dtype=torch.float64)
    norm = HeadNorm(3, 4, eps=0.01, bias=bias).double()
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.normal_(generator=generator(1))
    expected = functional.group_norm(x.flatten(1), 3, norm.weight, norm.bias, eps=0.01)
    assert_agree(norm(x).flatten(1), expected)
    assert norm.bias is None or norm.bias.any()


def test_it_computes_in_the_precision_of_its_weight():
    x = torch.randn(5, 3, 4, generator=generator(), dtype=torch.bfloat16)
    assert_agree(HeadNorm(3, 4)(x), HeadNorm(3, 4)(x.float()))
