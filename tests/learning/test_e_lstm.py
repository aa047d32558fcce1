"""eLSTM's real-time recurrent learning: the traces of its paper, and of its released code."""

import torch

from linrec import mixers
from linrec.learning import build_learner
from tests import released


def test_the_traces_and_gradients_are_the_papers():
    torch.manual_seed(0)
    mixer = mixers.build("e_lstm", 4).double()
    with torch.no_grad():
        for p in mixer.parameters():
            p.add_(0.5 * torch.randn_like(p))
    x, y = torch.randn(2, 20, 4, dtype=torch.float64)
    learner = build_learner("rtrl", mixer)
    w = {name: p.detach() for name, p in mixer.named_parameters()}
    F, b_f, Z, b_z, w_f, w_z = (
        w[name] for name in ("F.weight", "F.bias", "Z.weight", "Z.bias", "w_f", "w_z")
    )
    (of_u, of_c), b = w["o.weight"].split(4, 1), w["o.bias"]
    c = torch.zeros(4, dtype=torch.float64)
    E_F = E_Z = torch.zeros(4, 4, dtype=torch.float64)
    E_wf = E_wz = E_bf = E_bz = c
    names = ("F.weight", "Z.weight", "w_f", "w_z", "F.bias", "Z.bias")
    expected = dict.fromkeys(names, 0)
    for u, target in zip(x, y, strict=True):
        f, z = torch.sigmoid(F @ u + w_f * c + b_f), torch.tanh(Z @ u + w_z * c + b_z)
        zf, fz = (1 - f) * (1 - z**2), (c - z) * f * (1 - f)
        D = f + zf * w_z + fz * w_f
        E_F, E_Z = D[:, None] * E_F + torch.outer(fz, u), D[:, None] * E_Z + torch.outer(zf, u)
        E_wf, E_wz = D * E_wf + fz * c, D * E_wz + zf * c
        E_bf, E_bz = D * E_bf + fz, D * E_bz + zf
        c = f * c + (1 - f) * z
        o = torch.sigmoid(of_u @ u + of_c @ c + b)
        # through h = o(c) * c
        by_h = (o * c - target) / 2
        by_c = by_h * o + of_c.T @ (by_h * c * o * (1 - o))
        traces = dict(zip(names, (E_F, E_Z, E_wf, E_wz, E_bf, E_bz), strict=True))
        for name, trace in traces.items():
            expected[name] = expected[name] + by_c.reshape(-1, *[1] * (trace.dim() - 1)) * trace
        learner.step(u[None], target[None])
        held = learner.memory["traces"][""]
        assert held.keys() == traces.keys()
        assert all(torch.allclose(held[name][0], trace, rtol=1e-10) for name, trace in traces.items())
    found = learner.gradients()
    assert all(torch.allclose(found[name], gradient, rtol=1e-10) for name, gradient in expected.items())


def test_the_traces_are_those_of_the_released_code():
    numbers = released.read("e_lstm")
    mixer = mixers.build("e_lstm", 8).double()
    given = {name.removeprefix("weights."): x for name, x in numbers.items() if name.startswith("weights.")}
    mixer.load_state_dict(given)
    learner = build_learner("rtrl", mixer)
    learner.chunk(numbers["x"], numbers["y"])
    for name, trace in learner.memory["traces"][""].items():
        assert released.error(trace, numbers[f"traces.{name}"]) < 1e-12
