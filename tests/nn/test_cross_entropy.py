import pytest
import torch
from torch.nn import functional

from linrec.nn import cross_entropy
from linrec.nn.cross_entropy import linear_cross_entropy
from linrec.testing import generator
from tests.tiers import thorough


def inputs(dtype=torch.float64, n=23, d=5, v=11):
    numbers = generator(0)
    x = torch.randn(n, d, generator=numbers, dtype=torch.float64)
    weight = torch.randn(v, d, generator=numbers, dtype=torch.float64)
    bias = torch.randn(v, generator=numbers, dtype=torch.float64)
    targets = torch.randint(v, (n,), generator=numbers)
    targets[::4] = -100
    return [t.to(dtype).requires_grad_() for t in (x, weight, bias)], targets


def expected(x, weight, bias, targets):
    logits = x @ weight.T + (0 if bias is None else bias)
    return functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum"), logits.argmax(-1)


@pytest.mark.parametrize("rows", [1, 7, 23, None])
@pytest.mark.parametrize("with_bias", [True, False])
def test_pieces_agree_with_all_logits_at_once(rows, with_bias):
    (x, weight, bias), targets = inputs()
    given = [x, weight, bias] if with_bias else [x, weight]
    loss, predictions = linear_cross_entropy(x, weight, bias if with_bias else None, targets, rows=rows)
    reference, best = expected(x, weight, bias if with_bias else None, targets)
    torch.testing.assert_close(loss, reference)
    assert torch.equal(predictions, best)
    got = torch.autograd.grad(0.3 * loss, given)
    torch.testing.assert_close(got, torch.autograd.grad(0.3 * reference, given))


@pytest.mark.parametrize("rows", [4, None])
def test_capped_logits(rows):
    (x, weight, bias), targets = inputs()
    loss, predictions = linear_cross_entropy(x, weight, bias, targets, cap=0.7, rows=rows)
    logits = 0.7 * torch.tanh((x @ weight.T + bias) / 0.7)
    reference = functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
    torch.testing.assert_close(loss, reference)
    assert torch.equal(predictions, logits.argmax(-1))
    got = torch.autograd.grad(loss, [x, weight, bias])
    torch.testing.assert_close(got, torch.autograd.grad(reference, [x, weight, bias]))


@pytest.mark.parametrize("cap", [None, 0.7])
@pytest.mark.parametrize("rows", [4, None])
def test_smoothed_labels_are_shared_by_all_classes(rows, cap):
    (x, weight, bias), targets = inputs()
    loss, _ = linear_cross_entropy(x, weight, bias, targets, cap=cap, rows=rows, label_smoothing=0.1)
    logits = x @ weight.T + bias
    log_p = (logits if cap is None else cap * torch.tanh(logits / cap)).log_softmax(-1)
    shares = torch.full_like(log_p, 0.1 / 11).scatter_add(
        1, targets.clamp(min=0)[:, None], torch.full((23, 1), 0.9, dtype=torch.float64)
    )
    reference = -(shares * log_p)[targets != -100].sum()
    torch.testing.assert_close(loss, reference)
    got = torch.autograd.grad(loss, [x, weight, bias])
    torch.testing.assert_close(got, torch.autograd.grad(reference, [x, weight, bias]))


def test_a_frozen_head_gets_no_gradient():
    (x, weight, bias), targets = inputs()
    weight.requires_grad_(False)
    loss, _ = linear_cross_entropy(x, weight, bias, targets, rows=4)
    loss.backward()
    reference, _ = expected(x.detach().requires_grad_(), weight, bias.detach().requires_grad_(), targets)
    assert weight.grad is None and x.grad is not None and bias.grad is not None
    torch.testing.assert_close(loss, reference)


def test_shapes_of_several_axes():
    (x, weight, bias), targets = inputs(n=24)
    loss, predictions = linear_cross_entropy(
        x.reshape(2, 12, 5), weight, bias, targets.reshape(2, 12), rows=5
    )
    reference, best = expected(x, weight, bias, targets)
    torch.testing.assert_close(loss, reference)
    assert torch.equal(predictions, best.reshape(2, 12))


def test_autocast_keeps_the_loss_and_its_sums_in_float32():
    (x, weight, bias), targets = inputs(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _ = linear_cross_entropy(x, weight, bias, targets, rows=4)
    assert loss.dtype == torch.float32
    grads = torch.autograd.grad(loss, (x, weight, bias))
    assert all(g.dtype == torch.float32 for g in grads)
    (x64, weight64, bias64), _ = inputs()
    reference, _ = expected(x64, weight64, bias64, targets)
    torch.testing.assert_close(loss.double(), reference, rtol=1e-2, atol=0)
    for got, wanted in zip(grads, torch.autograd.grad(reference, (x64, weight64, bias64)), strict=True):
        # bfloat16 has 8 bits: an error of a percent of the largest entry
        assert (got - wanted).abs().max() < 0.02 * wanted.abs().max()


def test_large_logits_do_not_overflow():
    x = torch.full((6, 2), 1e4, requires_grad=True)
    weight = torch.tensor([[1.0, 1.0], [-1.0, -1.0], [0.0, 0.0]])
    loss, predictions = linear_cross_entropy(x, weight, None, torch.tensor([0, 1, 2, 0, 1, 2]), rows=2)
    loss.backward()
    assert loss.item() == pytest.approx(2 * (4e4 + 2e4)) and predictions.tolist() == [0] * 6
    assert bool(torch.isfinite(x.grad).all())


@thorough
def test_it_compiles_for_several_shapes(monkeypatch):
    torch.compiler.reset()
    # three pieces each, the last of them smaller
    monkeypatch.setattr(cross_entropy, "LOGITS", 90)
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
    for n, v in ((23, 11), (13, 17)):
        (x, weight, bias), targets = inputs(torch.float32, n=n, v=v)
        loss, predictions = compiled(x, weight, bias, targets)
        reference, best = expected(x, weight, bias, targets)
        torch.testing.assert_close(loss, reference)
        assert torch.equal(predictions, best)
        got = torch.autograd.grad(loss, (x, weight, bias))
        torch.testing.assert_close(
            got, torch.autograd.grad(reference, (x, weight, bias)), rtol=1e-4, atol=1e-5
        )
