import pytest
import torch
from torch import nn

from linrec.nn.projections import join, projected
from linrec.testing import assert_agree, generator


def layers(*widths: int, bias: bool = False) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(4, width, bias=bias) for width in widths]


@pytest.mark.parametrize("bias", [False, True, "one"])
def test_joined_layers_are_the_layers(bias):
    q, k, v = layers(3, 5, 2, bias=bias is True)
    if bias == "one":
        (k,) = layers(5, bias=True)
    x = torch.randn(2, 7, 4, generator=generator())
    expected, names = projected(x, q, k, v), {name: p.clone() for name, p in q.named_parameters()}
    join([q, k, v])
    assert_agree(projected(x, q, k, v), expected)
    # the layers alone too, and their parameters are parts of one tensor
    assert_agree((q(x), k(x), v(x)), expected)
    assert len({linear.weight.untyped_storage().data_ptr() for linear in (q, k, v)}) == 1
    assert_agree(dict(q.named_parameters()), names)
    # a layer that a mixer does not have
    join([None, q, k, v])
    assert projected(x, None) == (None,)
    found = projected(x, None, q, k, None, v)
    assert found[0] is found[3] is None
    assert_agree((found[1], found[2], found[4]), expected)
    found = torch.compile(projected, fullgraph=True, backend="eager")(x, q, k, v)
    assert_agree(found, expected)


def test_layers_that_differ_stay_apart():
    class Exact(nn.Linear):
        pass

    for other in (Exact(4, 3, bias=False), nn.Linear(4, 3, bias=False).double()):
        (first,) = layers(3)
        join([first, other])
        assert not hasattr(first, "joined")
