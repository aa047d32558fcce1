"""Linear layers for few rows: the kernel on a GPU where there is one, else interpreted."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn import functional

from linrec.nn import row_linear as module
from linrec.nn.row_linear import Inputs, RowLinear, row_linear, row_products
from linrec.testing import assert_agree
from tests.ops.opcheck import UTILITIES
from tests.ops.triton_process import DEVICE, on_a_gpu, on_either, quiet
from tests.tiers import tiered

pytestmark = quiet


def inputs(rows, k, n, dtype=torch.float32, *, bias=True):
    generator = torch.Generator().manual_seed(rows * k + n)
    sizes = (rows, k), (n, k), (n,)
    x, weight, b = (torch.randn(*size, generator=generator).to(DEVICE, dtype) for size in sizes)
    return Inputs(x, weight, b if bias else None)


def check(given):
    wide = [None if tensor is None else tensor.double() for tensor in given]
    y = row_products(given).y
    assert y.dtype == given.x.dtype
    assert_agree(y, functional.linear(*wide))


@on_either
@pytest.mark.parametrize(("rows", "k", "n"), [(1, 5, 3), (2, 33, 40), *tiered([(11, 16, 70)], [(8, 1, 1)])])
def test_values(rows, k, n, monkeypatch):
    monkeypatch.setattr(module, "PROGRAMS", 8)
    check(inputs(rows, k, n))
    check(inputs(rows, k, n, bias=False))
    check(inputs(rows, k, n, torch.bfloat16))


@on_either
def test_rows_longer_than_a_tile():
    check(inputs(3, 5000, 2))


@on_either
def test_kernel_is_an_operator():
    operator = torch.ops.linrec.row_products_triton.default
    for bias in (True, False):
        torch.library.opcheck(operator, (*inputs(2, 8, 4, bias=bias), False), test_utils=UTILITIES)


def test_sizes_may_vary_under_compile(monkeypatch):
    monkeypatch.setattr(module, "usable", lambda *_: True)
    mode = FakeTensorMode(shape_env=ShapeEnv())
    n, k = mode.from_tensor(torch.empty(40, 33, device="meta")).shape
    with mode, torch.no_grad():
        y = row_linear(torch.empty(64, k, device="cuda"), torch.empty(n, k, device="cuda"))
    assert y.shape == (64, n)
    assert y.device.type == "cuda"


@on_a_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 64])
def test_layers_on_a_gpu(rows, dtype):
    torch.manual_seed(0)
    layer = nn.Linear(500, 300, device="cuda", dtype=dtype)
    x = torch.randn(rows, 1, 500, device="cuda", dtype=dtype)
    expected = functional.linear(x.double(), layer.weight.double(), layer.bias.double())
    with torch.no_grad():
        for call in (RowLinear(layer), torch.compile(RowLinear(layer), fullgraph=True)):
            y = call(x)
            assert y.dtype == dtype
            assert_agree(y, expected)
        with torch.autocast("cuda", torch.bfloat16):
            y = RowLinear(layer)(x)
        assert y.dtype == torch.bfloat16
        assert_agree(y, expected)


@on_a_gpu
def test_calls_with_gradients_on_a_gpu():
    x = torch.randn(2, 3, device="cuda", requires_grad=True)
    weight = torch.randn(4, 3, device="cuda")
    y = row_linear(x, weight)
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert_agree(dx, weight.sum(0).expand(2, 3))


def test_a_layer_shares_its_weights():
    layer = nn.Linear(3, 4)
    x = torch.randn(2, 3)
    other = RowLinear(layer)
    assert torch.equal(other(x), layer(x))
    assert other.weight is layer.weight and other.bias is layer.bias
    assert {name for name, _ in other.named_parameters()} == {"weight", "bias"}
