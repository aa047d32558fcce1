import math

import pytest
import torch

from linrec.mixers import build
from linrec.mixers.dlr import DLR
from linrec.nn import groups_of
from linrec.testing import assert_agree, generator, reset_mask

D, N = 4, 5
CASES = {"real": {}, "prod": {"kernel": "prod", "angles": "normal"}}
every_case = pytest.mark.parametrize("case", CASES)


def make(d_model: int = D, d_state: int | None = N, **arguments) -> DLR:
    torch.manual_seed(0)
    mixer = build("dlr", d_model, d_state=d_state, **arguments)
    assert isinstance(mixer, DLR)
    return mixer


def moved(mixer: DLR) -> DLR:
    """In float64, every parameter away from where it starts."""
    mixer = mixer.double()
    with torch.no_grad():
        for seed, parameter in enumerate(mixer.parameters()):
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator(seed), dtype=parameter.dtype)
    return mixer


def inputs(time: int = 30) -> torch.Tensor:
    return torch.randn(2, time, D, generator=generator(), dtype=torch.float64)


def kernel_by_hand(mixer: DLR, length: int) -> torch.Tensor:
    """Every term of the sum, (d_model, length)."""
    log = -mixer.r.square() + 1j * mixer.theta
    z = (mixer.w[..., 0] + 1j * mixer.w[..., 1]) @ torch.exp(log[:, None] * torch.arange(length))
    return z.real if mixer.kernel == "real" else z.real * z.imag


def by_hand(mixer: DLR, x: torch.Tensor) -> torch.Tensor:
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
    assert_agree(ours, theirs)
    dy = torch.randn(ours.shape, generator=generator(2), dtype=ours.dtype)
    wanted = [x, *mixer.parameters()]
    assert_agree(torch.autograd.grad(ours, wanted, dy), torch.autograd.grad(theirs, wanted, dy))


@every_case
def test_convolution_and_recurrence_agree_over_16384_steps_in_float32(case):
    x = torch.randn(1, 16_384, 2, generator=generator())
    states = 64 if case == "real" else None
    (y, last), (z, end) = (
        make(2, states, **CASES[case], mode=mode)(x) for mode in ("convolution", "recurrent")
    )
    for mine, other in ((y.detach(), z.detach()), (last.detach(), end.detach())):
        assert float((mine - other).abs().max()) < 1e-3 * max(1.0, float(other.abs().max()))


def test_with_enough_states_a_kernel_shifts_by_any_number_of_steps():
    """Entries on the circle are Fourier's basis: w chosen by it makes a kernel of one tap."""
    steps, shift = 16, 11
    mixer = make(1, steps).double().requires_grad_(False)
    mixer.r.zero_()
    mixer.theta.copy_(2 * math.pi * torch.arange(steps).double() / steps)
    w = torch.exp(-1j * mixer.theta * shift) / steps
    mixer.w.copy_(torch.view_as_real(w)[None])
    x = torch.randn(1, steps, 1, generator=generator(), dtype=torch.float64)
    expected = torch.eye(steps, dtype=torch.float64)[shift]
    assert_agree(kernel_by_hand(mixer, steps)[0], expected)
    assert_agree(mixer.token_mixing(x)[0, :, 0], expected)
    mixer.D.zero_()
    late = torch.cat([torch.zeros(1, shift, 1, dtype=torch.float64), x[:, : steps - shift]], 1)
    assert_agree(mixer(x)[0], mixer.out(torch.nn.functional.gelu(late)))


def test_parameters_and_where_they_start():
    d, n = 100, 1024
    mixer = make(d, n).requires_grad_(False)
    assert sum(p.numel() for p in mixer.parameters()) == 2 * n + 2 * d * n + d + d * d + d
    assert_agree(mixer.theta, 2 * math.pi * torch.arange(n) / n)
    share = (torch.log(2 * mixer.r.square()) - math.log(0.0001)) / math.log(1000)
    assert -1e-6 <= float(share.min()) < 0.02 and 0.98 < float(share.max()) <= 1 + 1e-6
    assert float(share.mean()) == pytest.approx(0.5, abs=0.03)
    # next to the unit circle
    magnitude, _ = mixer.transitions(torch.zeros(1, 2, d))
    assert 0.951 < float(magnitude.min()) < 0.955
    assert float(magnitude.max()) < 1
    assert float(mixer.w.std() * n) == pytest.approx(1, abs=0.02)
    assert float(make(d, n, angles="normal").theta.detach().std()) == pytest.approx(1, abs=0.1)
    of = groups_of(mixer)
    marked = [name for name, group in of.items() if (group.name, group.weight_decay) == ("transition", False)]
    assert marked == ["r", "theta"]
    assert (of["w"].name, of["w"].weight_decay) == ("channel", False) and of["D"].name == "default"
    assert make(d_state=None).state_size == D * 256
    assert make(d_state=None, kernel="prod").state_size == D * 253


@every_case
def test_inspection(case):
    mixer, x = moved(make(**CASES[case])), inputs(7)
    one = torch.randn(mixer.init_state(2).shape, generator=generator(1), dtype=torch.complex128)
    left = mixer(x[:, :1], one)[1] - mixer(x[:, :1])[1]
    assert_agree(left, torch.polar(*mixer.transitions(x)).reshape(D, -1) * one)
    reset = reset_mask(2, 7, rate=0.3)
    kernel, expected = kernel_by_hand(mixer, 7).abs().mean(0), torch.zeros(2, 7, 7, dtype=torch.float64)
    for b in range(2):
        for n in range(7):
            for m in range(n + 1):
                if not reset[b, m + 1 : n + 1].any():
                    expected[b, n, m] = kernel[n - m]
    assert_agree(mixer.token_mixing(x, reset=reset), expected)


def test_errors():
    for message, arguments in {
        "there is no `kernel` 'product'; did you mean 'prod'": {"kernel": "product"},
        "there is no `angles` 'evenly'; did you mean 'even'": {"angles": "evenly"},
        "`d_state` must be at least 1; got 0": {"d_state": 0},
        "0 < dt_min <= dt_max; got 0.2 and 0.1": {"dt_min": 0.2},
    }.items():
        with pytest.raises(ValueError) as error:
            make(**arguments)
        assert message in str(error.value)
