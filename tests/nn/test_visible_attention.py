"""Scores of distances, and what of them reaches torch's attention."""

import math

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from linrec.nn import visible_attention as module
from linrec.nn.visible_attention import (
    DistanceScores,
    QueryBiases,
    distance_attention,
    sinusoids,
    visible_attention,
)
from linrec.testing import assert_agree, generator

B, HEADS, D_HEAD, D = 2, 3, 5, 6


def layers(dtype=torch.float64, **arguments):
    torch.manual_seed(0)
    return DistanceScores(D, HEADS, D_HEAD, **arguments).to(dtype), QueryBiases(HEADS, D_HEAD, std=1.0).to(
        dtype
    )


def inputs(time, keys, dtype=torch.float64):
    return [
        torch.randn(B, n, HEADS, D_HEAD, generator=generator(n), dtype=dtype).requires_grad_()
        for n in (time, keys, keys)
    ]


def causal(time, keys):
    return torch.ones(1, time, keys, dtype=torch.bool).tril(keys - time)


def calls(monkeypatch, multiple):
    """Run attention as for kernels that need multiples, and return the tensors that reach it."""
    found, run = [], functional.scaled_dot_product_attention

    def recorded(*given, **options):
        found.append((*given, options["attn_mask"]))
        return run(*given, **options)

    monkeypatch.setattr(module, "alignment", lambda x: multiple)
    monkeypatch.setattr(functional, "scaled_dot_product_attention", recorded)
    return found


SIZES = [(1, 1), (1, 4), (1, 8), (2, 7), (4, 8), (5, 9), (7, 7), (8, 15), (8, 16), (9, 24)]


@pytest.mark.parametrize(("time", "keys"), SIZES)
@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize("clamp", [None, 3])
def test_a_score_is_of_the_distance_of_its_pair(monkeypatch, time, keys, multiple, clamp):
    calls(monkeypatch, multiple)
    scores, _ = layers(clamp=clamp)
    q = inputs(time, keys)[0]
    found = scores(q, keys)
    assert found.shape[-1] >= keys and found.shape[-1] % multiple == 0
    for n in range(time):
        for m in range(keys - time + n + 1):
            distance = keys - time + n - m
            R = sinusoids(torch.tensor([distance if clamp is None else min(distance, clamp)]), D, q.dtype)
            r = scores.r(R)[0].unflatten(-1, (HEADS, D_HEAD))
            assert_agree(found[:, :, n, m], (q[:, n] * r).sum(-1) / math.sqrt(D_HEAD))


@pytest.mark.parametrize(("time", "keys"), SIZES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_fused_kernels_get_one_aligned_mask_in_the_dtype_of_the_inputs(monkeypatch, time, keys, dtype):
    scores, biases = layers(dtype)
    given, visible = inputs(time, keys, dtype), causal(time, keys)

    def run():
        o = distance_attention(*given, visible, scores, biases)
        parameters = [*given, *scores.parameters(), *biases.parameters()]
        return o, torch.autograd.grad(o.square().sum(), parameters)

    expected = run()
    found = calls(monkeypatch, 8)
    assert_agree(run(), expected)
    ((q, k, v, mask),) = found
    for x in (q, k, v, mask):
        assert x.dtype == dtype and x.shape[-1] % 8 == 0 and x.stride(-1) == 1
    assert all(step % 8 == 0 for step in mask.stride()[:-1])
    assert mask.shape == (B, HEADS, time, k.shape[2])


@pytest.mark.parametrize(
    ("keys", "visible", "is_causal"),
    [(7, None, True), (7, None, False), (8, None, False), (7, causal(7, 7), True)],
)
@torch.no_grad()
def test_a_bias_of_all_rows_is_aligned_and_not_repeated(monkeypatch, keys, visible, is_causal):
    q, k, v = inputs(7, keys)
    bias = torch.randn(1, HEADS, 7, keys, generator=generator(), dtype=q.dtype)
    expected = visible_attention(q, k, v, visible, bias, causal=is_causal)
    found = calls(monkeypatch, 8)
    assert_agree(visible_attention(q, k, v, visible, bias, causal=is_causal), expected)
    assert found[0][3].shape == (1, HEADS, 7, 8)


@torch.no_grad()
def test_attention_without_a_bias_pads_channels_alone(monkeypatch):
    q, k, v = inputs(7, 7)
    expected = visible_attention(q, k, v, causal(7, 7))
    found = calls(monkeypatch, 8)
    assert_agree(visible_attention(q, k, v, causal(7, 7)), expected)
    assert [x.shape[-1] for x in found[0]] == [8, 8, 8, 7]


class Written(TorchDispatchMode):
    """Counts tensors of the size of all scores that operations write."""

    def __init__(self, elements):
        super().__init__()
        self.elements, self.names = elements, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        y = function(*args, **(kwargs or {}))
        storages = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        for x in y if isinstance(y, (tuple, list)) else [y]:
            is_new = isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in storages
            if is_new and x.numel() >= self.elements:
                self.names.append(function.overloadpacket.__name__)
        return y


@pytest.mark.parametrize("multiple", [1, 8])
def test_scores_are_written_by_the_product_and_with_the_mask(monkeypatch, multiple):
    time, keys = 24, 48
    scores, biases = layers(torch.float32)
    q, k, v = inputs(time, keys, torch.float32)
    calls(monkeypatch, multiple)
    monkeypatch.setattr(functional, "scaled_dot_product_attention", lambda q, k, v, attn_mask, **_: attn_mask)
    with Written(B * HEADS * time * keys) as written:
        distance_attention(q, k, v, causal(time, keys), scores, biases)
    assert written.names == ["bmm", *(["constant_pad_nd"] if multiple > 1 else []), "where"]
