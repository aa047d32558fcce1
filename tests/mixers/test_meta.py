"""Mixers on the device "meta", where tensors have shapes and dtypes alone."""

from typing import Any

import pytest
import torch

from linrec import mixers
from tests.tiers import tiered

from . import variants

WIDTH = 4


def outcomes(name: str, variant: str, device: str) -> list[Any]:
    """Outputs and states of a call with resets, and of calls that follow it; then the gradients."""
    with torch.device(device):
        mixer = mixers.build(name, WIDTH, **variants.arguments(name, variant))
        found, state, total = [], None, 0
        for time in (20, 1, 3):
            x = torch.zeros(2, time, WIDTH, requires_grad=True)
            reset = torch.zeros(2, time, dtype=torch.bool) if time > 1 else None
            times = {"dt": torch.ones(2, time)} if mixer.takes_dt and time > 1 else {}
            y, state = mixer(x, state, reset=reset, **times)
            found.append((y, state))
            total = total + y.sum()
        total.backward()
        gradients = [p.grad for p in mixer.parameters()]
    return declared([found, gradients, x.grad], device)


def declared(x: Any, device: str) -> Any:
    """Shapes and dtypes of all tensors, which have to be on the device."""
    if isinstance(x, torch.Tensor):
        assert x.device.type == device
        return tuple(x.shape), x.dtype
    return [declared(part, device) for part in x] if isinstance(x, (tuple, list)) else x


@pytest.mark.parametrize(
    ("name", "variant"), tiered(variants.firsts_of_families(), rare=variants.of_operators())
)
def test_shapes_and_dtypes_on_meta_are_those_on_a_cpu(name, variant):
    assert outcomes(name, variant, "meta") == outcomes(name, variant, "cpu")
