import math

import pytest
import torch
from torch.nn import functional

from linrec.mixers import build
from linrec.mixers.hyena import Hyena
from linrec.nn import groups_of
from linrec.testing import assert_agree, generator, reset_mask

D, L = 3, 12
CASES = {
    "paper": {},
    "order 3": {"order": 3, "n_bands": 1, "filter_depth": 2},
    "order 1": {"order": 1, "conv_size": None, "bias": False},
    "authors": {"first_filter": False, "shift": 0.0, "fast": 0.2, "slow": 0.9},
    "authors' order 3": {
        "order": 3,
        "first_filter": False,
        "shared_omega": True,
        "joint_windows": True,
        "learn_positions": True,
    },
    "heads": {"n_heads": 3, "joint_windows": True},
    "head": {"n_heads": 1, "joint_windows": True, "shared_omega": True},
}
every_case = pytest.mark.parametrize("case", CASES)


def make(d_model: int = D, **arguments) -> Hyena:
    torch.manual_seed(0)
    mixer = build("hyena", d_model, **{"length": L, "d_filter": 4} | arguments)
    assert isinstance(mixer, Hyena)
    return mixer


def moved(mixer: Hyena) -> Hyena:
    """In float64, every parameter away from where it starts."""
    mixer = mixer.double()
    with torch.no_grad():
        for seed, parameter in enumerate(mixer.parameters()):
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator(seed), dtype=parameter.dtype)
    return mixer


def inputs(time: int = 2 * L) -> torch.Tensor:
    return torch.randn(2, time, D, generator=generator(), dtype=torch.float64)


def filter_by_hand(
    mixer: Hyena, which: int, fast: float, slow: float, shift: float, n_heads: int, joint_windows: bool
) -> torch.Tensor:
    """h and D, one tap and one channel after the other, (L, d)."""
    h = mixer.filters[which]
    network = h.network
    count, wide = len(mixer.filters) if joint_windows else 1, D // n_heads
    last = wide * count - 1
    taps = torch.zeros(L, D, dtype=torch.float64)
    for t in range(L):
        frequencies = [
            1e-4 + k * (network.n_bands - 1 - 1e-4) / max(1, network.n_bands - 1)
            for k in range(network.n_bands)
        ]
        waves = [complex(math.cos(x), -math.sin(x)) for x in (2 * math.pi * f * t / L for f in frequencies)]
        z = [t / (L - 1), *[w.real for w in waves], *[w.imag for w in waves]]
        z = torch.tensor(z, dtype=torch.float64) if network.p is None else network.p[t]
        for j, layer in enumerate(network.layers):
            omega = network.omega[j % len(network.omega), 0]
            z = torch.sin(omega * (layer.weight @ z + layer.bias))
        for d in range(D):
            # windows reach a hundredth at their share of L
            place = d % wide * count + (which if joint_windows else 0)
            share = 1 / (1 / slow + place / max(1, last) * (1 / fast - 1 / slow))
            taps[t, d] = (h.out.weight[d % wide] @ z) * (0.01 ** (t / (L - 1) / share) + shift)
            if t == 0:
                taps[t, d] += h.D[d % wide]
    return taps


def by_hand(
    mixer: Hyena, x, *, fast=0.3, slow=1.5, shift=0.05, n_heads=1, joint_windows=False, **_
) -> torch.Tensor:
    parts = mixer.inputs(x)
    if mixer.conv.present:
        weight, bias = mixer.conv.weight.flip(1)[:, None], mixer.conv.bias
        padded = functional.pad(parts.mT, (weight.shape[2] - 1, 0))
        parts = functional.conv1d(padded, weight, bias, groups=len(weight)).mT
    z, *gates = parts.split(D, -1)
    if not mixer.first_filter:
        z = gates.pop(0) * z
    for n, gate in enumerate(gates):
        taps = filter_by_hand(mixer, n, fast, slow, shift, n_heads, joint_windows)
        rows = []
        for t in range(x.shape[1]):
            rows.append(sum(taps[j] * z[:, t - j] for j in range(min(L, t + 1))))
        z = gate * torch.stack(rows, 1)
    return mixer.out(z)


@every_case
def test_the_layer_and_its_gradients_are_the_papers_equations(case):
    mixer, x = moved(make(**CASES[case])), inputs().requires_grad_()
    ours, theirs = mixer(x)[0], by_hand(mixer, x, **CASES[case])
    assert_agree(ours, theirs, "outputs")
    dy = torch.randn(ours.shape, generator=generator(2), dtype=ours.dtype)
    for mine, other in zip(
        *(torch.autograd.grad(y, [x, *mixer.parameters()], dy) for y in (ours, theirs)), strict=True
    ):
        assert_agree(mine, other, "gradients")


def test_no_step_sees_or_keeps_more_than_the_taps():
    mixer = moved(make(order=1, conv_size=None))
    x = inputs(40).requires_grad_()
    y, state = mixer(x)
    (gradient,) = torch.autograd.grad(y[:, 30].sum(), x)
    # FFTs leave rounding everywhere
    seen = gradient.abs().sum((0, 2)) > 1e-10
    assert seen[30 - L + 1 : 31].all() and seen.sum() == L
    assert [tuple(part.shape) for part in state.filters] == [(2, L - 1, D)] and state.tail is None


def test_parameters_and_where_they_start():
    d, order, width, depth, bands = 40, 3, 64, 3, 2
    mixer = make(d, order=order, d_filter=width).requires_grad_(False)
    network = (1 + 2 * bands + 1) * width + (depth - 1) * (width + 1) * width + depth * width
    filters = order * (d * width + d)
    wide = (order + 1) * d
    assert sum(p.numel() for p in mixer.parameters()) == (
        (d + 1) * wide + 4 * wide + network + filters + (d + 1) * d
    )
    # one network for all filters of a layer
    assert len({id(h.network) for h in mixer.filters}) == 1
    assert float(mixer.filters[0].network.omega.unique()) == 10
    D = torch.cat([h.D for h in mixer.filters])
    assert float(D.std()) == pytest.approx(1, abs=0.2) and float(D.mean()) == pytest.approx(0, abs=0.3)
    of = groups_of(mixer)
    assert {name.split(".")[0] for name, group in of.items() if group.name == "transition"} == {"filters"}
    assert not of["filters.0.out.weight"].weight_decay and of["inputs.weight"].name == "default"


def test_matrices_start_as_in_the_authors_language_models():
    mixer = make(64, d_filter=64, std=0.02, out_std=0.005).requires_grad_(False)
    layers = mixer.filters[0].network.layers
    for linear in (mixer.inputs, mixer.filters[0].out, mixer.filters[1].out, *layers):
        assert float(linear.weight.std()) == pytest.approx(0.02, rel=0.1)
        assert linear.bias is None or not linear.bias.any()
    assert float(mixer.out.weight.std()) == pytest.approx(0.005, rel=0.1) and not mixer.out.bias.any()
    # the short convolution as torch's
    assert float(mixer.conv.bias.abs().max()) == pytest.approx(3**-0.5, rel=0.05)


def test_learned_positions_start_as_the_encoding_and_heads_share_filters():
    learned, fixed = make(learn_positions=True), make()
    x = inputs().float()
    assert torch.equal(learned(x)[0], fixed(x)[0])
    assert learned.filters[0].network.p.shape == (L, 5)
    assert groups_of(learned)["filters.0.network.p"].name == "transition"
    h = make(6, n_heads=2).filters[0]
    assert h.out.weight.shape == (3, 4) and h.D.shape == (3,)
    assert torch.equal(h.kernel(L)[:3], h.kernel(L)[3:])


@every_case
def test_token_mixing_is_what_v_is_multiplied_by(case):
    mixer, x, reset = moved(make(**CASES[case])), inputs(9), reset_mask(2, 9, rate=0.2)

    def response(v):
        """y before the last projection, as a function of v alone."""

        def with_v(_, __, parts):
            if isinstance(parts, tuple):
                return torch.cat([v, parts[0][..., D:]], -1), parts[1]
            return torch.cat([v, parts[..., D:]], -1)

        found = []
        hooks = [
            (mixer.inputs if not mixer.conv.present else mixer.conv).register_forward_hook(with_v),
            mixer.out.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0])),
        ]
        mixer(x, reset=reset)
        for hook in hooks:
            hook.remove()
        return found[0]

    J = torch.autograd.functional.jacobian(response, torch.zeros_like(x))
    H = torch.stack([J[b, :, :, b].diagonal(dim1=1, dim2=3).permute(2, 0, 1) for b in range(2)])
    assert_agree(mixer.token_mixing(x, reset=reset), H.abs().mean(1))


def test_errors():
    for message, arguments in {
        "`order` must be at least 1; got 0. There must be a filter": {"order": 0},
        "`order` must be at least 2; got 1. There must be a filter": {
            "order": 1,
            "first_filter": False,
        },
        "`length` must be at least 1; got 0": {"length": 0},
        "`n_heads` must be a positive divisor of `d_model` = 3; got 2": {"n_heads": 2},
        "`std` must be positive and finite; got 0": {"std": 0},
        "`n_bands` must be at least 1; got 0": {"n_bands": 0},
        "`filter_depth` must be at least 1; got 0": {"filter_depth": 0},
        "with 0 < fast <= slow; got 2.0 and 1.5": {"fast": 2.0},
        "`width` of a short convolution": {"conv_size": 0},
    }.items():
        with pytest.raises(ValueError) as error:
            make(**arguments)
        assert message in str(error.value)
    with pytest.raises(ValueError, match="`state` must be that of Hyena for these rows"):
        make()(torch.zeros(2, 3, D), make().init_state(3))
