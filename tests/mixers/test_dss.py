import copy
import importlib
import itertools
import math

import pytest
import torch
from torch.nn import functional

from linrec.mixers import build
from linrec.mixers.dss import DSS
from linrec.nn import groups_of
from linrec.nn.state_space import spectrum
from linrec.ops import diagonal_ssm, discretize_diagonal
from linrec.ops.core.call import recording
from linrec.testing import assert_agree, generator, reset_mask

D, N, L = 4, 3, 40
CASES = {
    "softmax": {"kernel": "softmax", "length": L},
    "exp": {"kernel": "exp"},
    "no scale": {"kernel": "exp_no_scale"},
    "softmax, separate": {"kernel": "softmax", "length": L, "separate_steps": True},
    "exp, separate": {"kernel": "exp", "separate_steps": True},
}
every_case = pytest.mark.parametrize("case", CASES)


def make(d_model: int = D, d_state: int = N, **arguments) -> DSS:
    torch.manual_seed(0)
    mixer = build("dss", d_model, d_state=d_state, **arguments)
    assert isinstance(mixer, DSS)
    return mixer


def moved(mixer: DSS) -> DSS:
    """In float64, every parameter away from where it starts, and one number that grows if it may."""
    mixer = mixer.double()
    with torch.no_grad():
        for seed, parameter in enumerate(mixer.parameters()):
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator(seed), dtype=parameter.dtype)
        if mixer.kernel == "softmax":
            mixer.Lambda_re[0] = 0.4
    return mixer


def inputs(time: int = L) -> torch.Tensor:
    return torch.randn(2, time, D, generator=generator(), dtype=torch.float64)


def kernel_by_hand(mixer: DSS, length: int) -> torch.Tensor:
    """Proposition 1, with every term, (d, length)."""
    Lambda = torch.complex(mixer.Lambda_re, mixer.Lambda_im)
    if mixer.kernel != "softmax":
        Lambda = torch.complex(-mixer.Lambda_re.exp(), mixer.Lambda_im)
    dt = mixer.dt_log.exp().expand(2, -1)[..., None]
    z = dt[0] * Lambda.real + 1j * dt[1] * Lambda.imag
    powers = torch.exp(z[..., None] * torch.arange(length))
    w = torch.complex(mixer.w[..., 0], mixer.w[..., 1])
    if mixer.kernel == "exp":
        weight = (torch.exp(z) - 1) / Lambda
    elif mixer.kernel == "exp_no_scale":
        weight = torch.ones_like(z)
    else:
        weight = 1 / Lambda / torch.exp(z[..., None] * torch.arange(mixer.length)).sum(-1)
    return ((w * weight)[..., None] * powers).sum(1).real


def by_hand(mixer: DSS, x: torch.Tensor) -> torch.Tensor:
    kernel = kernel_by_hand(mixer, x.shape[1])
    y = torch.stack([(kernel.flip(1)[:, -t - 1 :].T * x[:, : t + 1]).sum(1) for t in range(x.shape[1])], 1)
    y = y + mixer.D * x
    y = y * (1 + torch.erf(y / math.sqrt(2))) / 2
    return y @ mixer.out.weight.T + mixer.out.bias


@every_case
@pytest.mark.parametrize("mode", ["convolution", "recurrent"])
def test_the_layer_and_its_gradients_are_the_papers_kernels(case, mode):
    mixer, x = moved(make(**CASES[case], mode=mode)), inputs().requires_grad_()
    ours, theirs = mixer(x)[0], by_hand(mixer, x)
    # the paper's reciprocal is regularised by 1e-7
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if "softmax" in case else {"rtol": 1e-9, "atol": 1e-10}
    torch.testing.assert_close(ours, theirs, **tolerance)
    dy = torch.randn(ours.shape, generator=generator(2), dtype=ours.dtype)
    for mine, other in zip(
        *(torch.autograd.grad(y, [x, *mixer.parameters()], dy) for y in (ours, theirs)), strict=True
    ):
        scale = max(1.0, float(other.abs().max()))
        torch.testing.assert_close(mine / scale, other / scale, **tolerance)


@every_case
def test_convolution_and_recurrence_agree_over_16384_steps_in_float32(case):
    x = torch.randn(1, 16_384, 2, generator=generator())
    arguments = CASES[case] | ({"length": 16_384} if "softmax" in case else {})
    mixers = (make(2, 64, **arguments, mode=mode) for mode in ("convolution", "recurrent"))
    (y, last), (z, end) = (mixer(x) for mixer in mixers)
    for mine, other in ((y.detach(), z.detach()), (last.detach(), end.detach())):
        assert float((mine - other).abs().max()) < 1e-3 * max(1.0, float(other.abs().max()))


def softmax_layer(growth: float, mode: str, length: int = 200, separate_steps: bool = False) -> DSS:
    """Entries of e^growth over all steps of the softmax and less, beside one that decays."""
    mixer = make(3, 5, length=length, mode=mode, dt_min=0.05, dt_max=0.1, separate_steps=separate_steps)
    with torch.no_grad():
        mixer.Lambda_re.copy_(torch.tensor([-0.5, 0.1, 0.3, 0.7, 1.0]) * growth / (0.1 * length))
        mixer.Lambda_im.copy_(torch.tensor([0.5, 0.0, 3.0, 10.0, 25.0]))
        mixer.D.zero_()
    return mixer


def softmax_by_hand(mixer: DSS, x: torch.Tensor) -> torch.Tensor:
    """The layer by softmaxes whose largest exponent is subtracted, in the precision of the mixer."""
    Lambda = torch.complex(mixer.Lambda_re, mixer.Lambda_im)
    dt = mixer.dt_log.exp().expand(2, -1)[..., None]
    z = dt[0] * Lambda.real + 1j * dt[1] * Lambda.imag
    largest = z.real.clamp(min=0)[..., None] * (mixer.length - 1)
    powers = torch.exp(z[..., None] * torch.arange(mixer.length) - largest)
    w = torch.complex(mixer.w[..., 0], mixer.w[..., 1])
    kernel = ((w / Lambda)[..., None] * powers / powers.sum(-1, keepdim=True)).sum(1).real
    time = x.shape[1]
    apart = torch.arange(time)[:, None] - torch.arange(time)
    matrix = kernel[:, apart.clamp(min=0)] * (apart >= 0)
    y = torch.einsum("dnm,bmd->bnd", matrix, x)
    return functional.linear(functional.gelu(y), mixer.out.weight, mixer.out.bias)


@pytest.mark.parametrize("mode", ["auto", "convolution", "recurrent", "scan"])
@pytest.mark.parametrize("growth", [20.0, 100.0, 500.0, 5000.0])
@pytest.mark.parametrize("separate_steps", [False, True])
@pytest.mark.parametrize("time", [1, 90, 200])
def test_growing_entries_are_exact_in_float32(mode, growth, separate_steps, time):
    mixer = softmax_layer(growth, mode, separate_steps=separate_steps)
    exact = copy.deepcopy(mixer).double()
    x = torch.randn(2, time, 3, generator=generator())
    found, expected = mixer(x)[0], softmax_by_hand(exact, x.double())
    # the paper's reciprocal is regularised by 1e-7
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
    dy = torch.randn(found.shape, generator=generator(1))
    wanted = ["Lambda_re", "Lambda_im", "w", "dt_log"]
    gradients = torch.autograd.grad(found, [getattr(mixer, name) for name in wanted], dy)
    correct = torch.autograd.grad(expected, [getattr(exact, name) for name in wanted], dy.double())
    for mine, other in zip(gradients, correct, strict=True):
        scale = max(1.0, float(other.abs().max()))
        torch.testing.assert_close(mine.double() / scale, other / scale, rtol=0, atol=1e-3)


@pytest.mark.parametrize("mode", ["convolution", "recurrent", "scan"])
@pytest.mark.parametrize("growth", [20.0, 150.0])
def test_pieces_and_resets_of_growing_entries(mode, growth):
    mixer = softmax_layer(growth, mode)
    x, reset = torch.randn(2, 200, 3, generator=generator()), reset_mask(2, 200, rate=0.02)
    with torch.no_grad():
        whole, last = mixer(x)
        state, pieces = None, []
        for piece in x.split([1, 60, 3, 100, 36], 1):
            y, state = mixer(piece, state)
            pieces.append(y)
        torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-4, atol=1e-4)
        assert bool(last.isfinite().all() and state.isfinite().all())
        start = mixer(x[:, :7])[1]
        y, _ = mixer(x[:, 7:], start, reset=reset[:, 7:])
        for row in range(2):
            document = [0, *(reset[row, 7:].nonzero().flatten() + 7).tolist(), 200]
            for first, end in itertools.pairwise(document):
                expected = mixer(x[row : row + 1, first:end])[0][0, max(0, 7 - first) :]
                torch.testing.assert_close(
                    y[row, max(first, 7) - 7 : end - 7], expected, rtol=1e-4, atol=1e-4
                )


@pytest.mark.parametrize("mode", ["convolution", "recurrent", "scan"])
def test_sequences_longer_than_the_softmax_grow(mode):
    x = torch.randn(1, 120, 3, generator=generator())
    mixer = softmax_layer(20.0, mode, length=50)
    found, expected = mixer(x)[0], copy.deepcopy(mixer).double()(x.double())[0]
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
    assert expected[:, 100:].abs().max() > 1e3 * expected[:, :50].abs().max()


@pytest.mark.parametrize("asked", ["exporting", "time_is_split"])
def test_scales_do_not_depend_on_a_length_that_is_unknown(asked, monkeypatch):
    mixer, x = softmax_layer(20.0, "scan"), torch.randn(1, 90, 3, generator=generator())
    expected = mixer(x)[0]
    # the name of the module is that of its function too
    monkeypatch.setattr(importlib.import_module("linrec.ops.diagonal_ssm"), asked, lambda: True)
    with recording() as calls:
        torch.testing.assert_close(mixer(x)[0], expected, rtol=1e-4, atol=1e-4)
    assert calls[0].operator is diagonal_ssm.operator


@pytest.mark.parametrize("mode", ["recurrent", "scan"])
def test_outputs_are_right_until_they_leave_the_range(mode):
    mixer, x = softmax_layer(500.0, mode, length=50), torch.randn(1, 120, 3, generator=generator())
    torch.testing.assert_close(mixer(x)[0][:, :50], mixer(x[:, :50])[0], rtol=1e-4, atol=1e-4)


def test_softmax_weights_are_finite_where_squares_of_powers_overflow():
    A = torch.complex(torch.tensor([-400.0, -3.0, 0.2, 0.4, 0.6]), torch.tensor([0.0, 3.0, 1.0, 2.0, 3.0]))
    # the last has exp(120) after all steps, beyond float32
    A.requires_grad_()
    a, b = discretize_diagonal(A, torch.ones_like(A), 0.2, "softmax", length=1000)
    z = 0.2 * A.detach().to(torch.complex128)
    powers = torch.exp(z[:, None] * torch.arange(1000))
    expected = 1 / A.detach() / powers.sum(-1)
    torch.testing.assert_close(b[:4].to(torch.complex128), expected[:4], rtol=2e-5, atol=0)
    assert b[4] == 0
    (gradient,) = torch.autograd.grad(b.abs().sum() + a.abs().sum(), A)
    assert bool(gradient.isfinite().all())


def test_parameters_and_where_they_start():
    assert build("dss", 3).init_state(1).shape == (1, 3, 64)
    d, n = 400, 8
    exp, softmax = (make(d, n, kernel=kernel).requires_grad_(False) for kernel in ("exp", "softmax"))
    for mixer in (exp, softmax):
        assert sum(p.numel() for p in mixer.parameters()) == 2 * n + d + 2 * d * n + d + d * d + d
        expected, _ = spectrum("legs", 2 * n)
        real = -mixer.Lambda_re.exp() if mixer is exp else mixer.Lambda_re
        assert_agree(torch.complex(real, mixer.Lambda_im), expected)
        assert float(mixer.w.var()) == pytest.approx(1, abs=0.06)
        assert float(mixer.w.mean()) == pytest.approx(0, abs=0.05)
        share = (mixer.dt_log - math.log(0.001)) / math.log(100)
        assert 0 <= float(share.min()) < 0.02 and 0.98 < float(share.max()) <= 1
    of = groups_of(exp)
    assert {
        name for name, group in of.items() if (group.name, group.weight_decay) == ("transition", False)
    } == {
        "dt_log",
        "Lambda_re",
        "Lambda_im",
        "w",
    }
    assert of["D"].name == "default"
    start = make(d, n, separate_steps=True).dt_log
    assert start.shape == (2, d) and torch.equal(start[0], start[1])
    assert softmax.length == 1024 and exp.length is None


@every_case
def test_inspection(case):
    mixer, x = moved(make(**CASES[case])), inputs(7)
    one = torch.randn(2, D, N, generator=generator(1), dtype=torch.complex128)
    left = mixer(x[:, :1], one)[1] - mixer(x[:, :1])[1]
    assert_agree(left, torch.polar(*mixer.transitions(x)).reshape(D, N) * one)
    reset = reset_mask(2, 7, rate=0.3)
    kernel, expected = kernel_by_hand(mixer, 7).abs().mean(0), torch.zeros(2, 7, 7, dtype=torch.float64)
    for b in range(2):
        for n in range(7):
            for m in range(n + 1):
                if not reset[b, m + 1 : n + 1].any():
                    expected[b, n, m] = kernel[n - m]
    torch.testing.assert_close(mixer.token_mixing(x, reset=reset), expected, rtol=1e-4, atol=1e-5)


def test_errors():
    for message, arguments in {
        "there is no `kernel` 'soft'; did you mean 'softmax'": {"kernel": "soft"},
        "there is no `init` 'real'": {"init": "real"},
        "`length` must be the steps of the softmax, at least 1, or None; got 9 with `kernel='exp'`": {
            "kernel": "exp",
            "length": 9,
        },
        "`length` must be the steps of the softmax, at least 1, or None; got 0": {"length": 0},
        "`d_state` must be at least 1; got 0": {"d_state": 0},
        "0 < dt_min <= dt_max; got 0 and 0.1": {"dt_min": 0},
    }.items():
        with pytest.raises(ValueError) as error:
            make(**arguments)
        assert message in str(error.value)
