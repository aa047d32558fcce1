import pytest
import torch

from linrec.nn.fast_weights import UnitFeatures, WriteStrength
from linrec.testing import assert_agree, generator


def inputs(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator(), dtype=torch.float64)


def test_features_have_norm_one():
    x = inputs(50, 6)
    silu = x * torch.sigmoid(x)
    assert_agree(UnitFeatures(6)(x), silu / silu.square().sum(-1, keepdim=True).sqrt())
    positive = torch.where(x > 0, x + 1, x.exp())
    expected = positive / positive.sum(-1, keepdim=True)
    assert_agree(UnitFeatures(6, feature_map="elu", norm="l1")(x), expected)
    dpfp = UnitFeatures(6, feature_map="dpfp")
    assert dpfp.d_features == 12 and dpfp(x).shape == (50, 12)


def test_eps_is_added_to_the_sum():
    x = torch.tensor([[1.0, 3.0], [0.0, 0.0]])
    features = UnitFeatures(2, feature_map="relu", norm="l1", eps=1.0)(x)
    torch.testing.assert_close(features, torch.tensor([[0.2, 0.6], [0.0, 0.0]]))


def test_norms_of_half_precision_inputs_are_exact_to_float32_where_steps_write_up_to_twice():
    x = inputs(200, 64).bfloat16()
    units = UnitFeatures(64, strength="double_sigmoid")(x)
    assert units.dtype == torch.float32
    assert (units.double().square().sum(-1) - 1).abs().max() < 1e-6
    # rounded once
    assert torch.equal(UnitFeatures(64)(x), units.bfloat16())


def test_features_of_nothing_are_zero_and_have_finite_gradients():
    x = torch.tensor([[0.0, 0.0], [-200.0, -300.0], [1e-20, 0.0]], requires_grad=True)
    y = UnitFeatures(2)(x)
    y.sum().backward()
    assert y.abs().max() < 1e-10 and x.grad.isfinite().all()


@pytest.mark.parametrize("eps", [0.0, 0.5])
def test_gradients_of_norms(eps):
    features = UnitFeatures(4, feature_map="identity", eps=eps)
    x = torch.randn(3, 4, generator=generator(), dtype=torch.float64)
    # shorter than what is divided by
    x[0] *= 1e-9
    x.requires_grad_()
    norm = torch.sqrt(x.square().sum(-1, keepdim=True) + eps)
    expected = x / (norm if eps else norm.clamp(min=1e-6))
    d = torch.randn(3, 4, generator=generator(1), dtype=torch.float64)
    y = features(x)
    assert_agree(y, expected)
    assert_agree(torch.autograd.grad(y, x, d), torch.autograd.grad(expected, x, d))
    longer = x[1:].detach().requires_grad_()
    assert torch.autograd.gradcheck(features, longer) and torch.autograd.gradgradcheck(features, longer)


def test_units_and_norms_are_all_that_is_saved():
    x = torch.randn(5, 3, 8, dtype=torch.bfloat16, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        y = UnitFeatures(8, feature_map="identity")(x)
    assert {(tuple(tensor.shape), tensor.dtype) for tensor in saved} == {
        ((5, 3, 8), torch.bfloat16),
        ((5, 3, 1), torch.float32),
    }
    assert any(tensor.data_ptr() == y.data_ptr() for tensor in saved)


def test_strengths():
    torch.manual_seed(0)
    x = inputs(2, 3, 4)
    single, double = (WriteStrength(4, 2, strength=kind).double() for kind in ("sigmoid", "double_sigmoid"))
    double.load_state_dict(single.state_dict())
    expected = torch.sigmoid(x @ single.projection.weight.T)
    assert_agree(single(x), expected)
    assert_agree(double(x), 2 * expected)
    one = WriteStrength(4, 2, strength="one")
    assert_agree(one(x), torch.ones(2, 3, 2, dtype=torch.float64))
    assert not list(one.parameters())
    # as far as rounding may take it, and no further
    assert double(1e9 * x).max() == 2 and double(1e9 * x).min() == 0


def test_errors():
    with pytest.raises(ValueError, match="`qk_norm` 'l3'; did you mean"):
        UnitFeatures(4, norm="l3")
    with pytest.raises(ValueError, match="'cosformer'"):
        UnitFeatures(4, feature_map="cosformer")
    with pytest.raises(ValueError, match="`beta` 'double'; did you mean 'double_sigmoid'"):
        WriteStrength(4, 2, strength="double")
