"""Mixers where Numba does not work: torch's modes of their operators, against the references, in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from linrec import mixers
from linrec.ops.core import backends
from linrec.ops.core.call import Call, handling, recording
from linrec.testing import assert_agree, generator, reset_mask
from tests.mixers import variants
from tests.tiers import tiered

D_MODEL = 4
# more than a chunk of torch's chunkwise modes, whose states are carried
TIME = 70


@pytest.fixture
def without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_numba_problem", lambda: "no Numba here")
    monkeypatch.setattr(backends, "_warn_about_numba", lambda problem: None)


def by_reference(call: Call, proceed: Callable[[], Any]) -> Any:
    """Run a call by the operator's reference; the growing exponentials of DSS have none."""
    entries = [entry for entry in call.operator.backends if entry.name == "reference"]
    return call.operator.run(call.inputs, entries[0]) if entries else proceed()


def outcome(mixer: mixers.Mixer, x: Tensor) -> dict[str, Any]:
    """Outputs, the state by the outputs that follow from it, and gradients."""
    x = x.clone().requires_grad_()
    y, state = mixer(x, reset=reset_mask(*x.shape[:2], rate=0.03))
    following, _ = mixer(x, state)
    cotangents = [torch.randn(y.shape, generator=generator(n), dtype=y.dtype) for n in (1, 2)]
    gradients = torch.autograd.grad(
        (y, following), (x, *mixer.parameters()), cotangents, materialize_grads=True
    )
    return {"y": y, "following": following, "gradients": gradients}


@pytest.mark.parametrize(
    ("name", "variant"), tiered(variants.firsts_of_families(), rare=variants.of_operators())
)
def test_torch_agrees_with_the_references(name, variant, without_numba):
    torch.manual_seed(0)
    mixer = mixers.build(name, D_MODEL, **variants.arguments(name, variant)).double()
    x = torch.randn(2, TIME, D_MODEL, generator=generator(), dtype=torch.float64)
    with recording() as calls:
        found = outcome(mixer, x)
    assert {call.backend.name for call in calls} <= {"torch"}
    with handling(by_reference):
        expected = outcome(mixer, x)
    for what, tree in expected.items():
        assert_agree(found[what], tree, what)
