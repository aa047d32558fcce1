import pytest
import torch
from torch.nn import functional

from linrec.nn.norms import GroupRMSNorm, HeadNorm, RMSNorm, make_norm
from linrec.testing import assert_agree, generator


def test_each_group_has_a_mean_square_of_its_own():
    norm = GroupRMSNorm(6, n_groups=2, eps=1e-3)
    torch.nn.init.uniform_(norm.weight)
    x = torch.randn(2, 3, 6, generator=generator())
    halves = [half / (half.square().mean(-1, keepdim=True) + 1e-3).sqrt() for half in x.split(3, -1)]
    assert_agree(norm(x), torch.cat(halves, -1) * norm.weight)


def test_it_computes_in_its_weights_dtype():
    x = torch.randn(2, 6, generator=generator()).bfloat16()
    norm = GroupRMSNorm(6, n_groups=3)
    found = norm(x)
    assert found.dtype == torch.float32
    assert_agree(found, norm(x.float()))


def test_groups_divide_the_width():
    with pytest.raises(ValueError, match=r"`n_groups`.*6; got 4"):
        GroupRMSNorm(6, n_groups=4)


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
