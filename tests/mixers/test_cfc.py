"""CfC: time in the gate, mixed memory and initial values. `test_released` has the equations."""

import math

import pytest
import torch

from linrec.mixers import build
from linrec.mixers.cfc import CfC
from linrec.testing import assert_agree, generator

D, TIME = 6, 12


def make(d_model: int = D, **arguments) -> CfC:
    torch.manual_seed(0)
    mixer = build("cfc", d_model, **{"d_backbone": 5} | arguments)
    assert isinstance(mixer, CfC)
    return mixer


def inputs() -> torch.Tensor:
    return torch.randn(2, TIME, D, generator=generator(), dtype=torch.float64)


def by_hand(mixer: CfC, x: torch.Tensor, dt: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """h of every step, and the last state, from matrices of [x, h]."""
    (h, m), outputs = torch.zeros(2, 2, D, dtype=x.dtype), []
    for t in range(x.shape[1]):
        if mixer.mixed_memory:
            i, g_i, g_f, g_o = (mixer.V(x[:, t]) + mixer.U(h)).chunk(4, -1)
            m = m / (1 + torch.exp(-g_f - 1)) + torch.tanh(i) / (1 + torch.exp(-g_i))
            h = torch.tanh(m) / (1 + torch.exp(-g_o))
        u = torch.cat([x[:, t], h], -1)
        for layer in (mixer.first, *mixer.further):
            u = 1.7159 * torch.tanh(0.666 * layer(u))
        heads = mixer.heads(u)
        if mixer.variant == "pure":
            h = mixer.a - mixer.a * heads / torch.exp(dt[:, t, None] * (mixer.w.abs() + heads.abs()))
        else:
            F, G, A, B = heads.chunk(4, -1)
            s = 1 / (1 + torch.exp(-A * dt[:, t, None] - B))
            h = torch.tanh(F) * (1 if mixer.variant == "no_gate" else 1 - s) + torch.tanh(G) * s
        outputs.append(h)
    return torch.stack(outputs, 1), torch.cat([h, m], -1) if mixer.mixed_memory else h


@pytest.mark.parametrize("variant", ["default", "no_gate", "pure"])
@pytest.mark.parametrize("mixed_memory", [False, True])
def test_the_layer_and_its_gradients_are_the_papers_equations(variant, mixed_memory):
    mixer = make(variant=variant, mixed_memory=mixed_memory, n_layers=2).double()
    with torch.no_grad():
        for seed, parameter in enumerate(mixer.parameters()):
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator(seed))
    x, dt = inputs().requires_grad_(), (inputs()[..., 0].exp()).requires_grad_()
    ours, theirs = mixer(x, dt=dt), by_hand(mixer, x, dt)
    assert_agree(ours, theirs)
    wanted = [x, dt, *mixer.parameters()]
    cotangents = [torch.randn(tensor.shape, generator=generator(2), dtype=tensor.dtype) for tensor in theirs]
    assert_agree(
        torch.autograd.grad(ours, wanted, cotangents), torch.autograd.grad(theirs, wanted, cotangents)
    )


def test_initial_values():
    mixer = make(200, d_backbone=300, n_layers=2, mixed_memory=True)
    F, G, A, B = mixer.heads.weight.chunk(4)
    for weight, sizes in (
        (mixer.first.weight, 700),
        (mixer.further[0].weight, 600),
        *((weight, 500) for weight in (F, G, A, B)),
        (mixer.V.weight, 1000),
    ):
        bound = math.sqrt(6 / sizes)
        assert 0.99 * bound < weight.abs().max() <= bound
        assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)
    assert_agree(mixer.U.weight.T @ mixer.U.weight, torch.eye(200))
    assert 0.095 < mixer.V.bias.abs().max() <= 0.1
    pure = make(variant="pure")
    assert pure.a.eq(1).all() and pure.w.eq(0).all()
    assert sum(p.numel() for p in make(d_backbone=7).parameters()) == 7 * (2 * D + 1) + 4 * D * 8


def test_names_and_sizes_that_do_not_exist_are_refused():
    for arguments, message in (
        ({"variant": "puree"}, "no `variant` 'puree'; did you mean 'pure'"),
        ({"activation": "lecun"}, "no `activation` 'lecun'; did you mean 'lecun_tanh'"),
        ({"n_layers": 0}, "`n_layers` must be at least 1; got 0"),
        ({"d_backbone": 0}, "`d_backbone` must be at least 1; got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            make(**arguments)
