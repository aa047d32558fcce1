import math

import pytest
import torch

from linrec.mixers import build
from linrec.mixers.gss import GSS
from linrec.nn import groups_of
from linrec.testing import assert_agree, generator, reset_mask

D, N = 4, 5
CASES = {"paper": {"d_ssm": 3}, "bare": {"d_inner": 5, "d_ssm": 2, "norm": "none", "bias": False}}
every_case = pytest.mark.parametrize("case", CASES)


def make(d_model: int = D, d_state: int = N, **arguments) -> GSS:
    torch.manual_seed(0)
    mixer = build("gss", d_model, d_state=d_state, **arguments)
    assert isinstance(mixer, GSS)
    return mixer


def moved(mixer: GSS) -> GSS:
    """In float64, every parameter away from where it starts."""
    mixer = mixer.double()
    with torch.no_grad():
        for seed, parameter in enumerate(mixer.parameters()):
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator(seed), dtype=parameter.dtype)
    return mixer


def inputs(time: int = 30) -> torch.Tensor:
    return torch.randn(2, time, D, generator=generator(), dtype=torch.float64)


def gelu(x: torch.Tensor) -> torch.Tensor:
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def linear(layer: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    y = x @ layer.weight.T
    return y if layer.bias is None else y + layer.bias


def kernel_by_hand(mixer: GSS, length: int) -> torch.Tensor:
    """The pseudocode of the kernel, with every term, (d_ssm, length)."""
    Lambda = -mixer.Lambda_re.exp() + 1j * mixer.Lambda_im.exp()
    C = (mixer.C[..., 0] + 1j * mixer.C[..., 1]) * (torch.exp(Lambda) - 1) / Lambda
    return (C @ torch.exp(Lambda[:, None] * torch.arange(length))).real


def by_hand(mixer: GSS, x: torch.Tensor) -> torch.Tensor:
    u, v = gelu(linear(mixer.u, x)), gelu(linear(mixer.v, x))
    if isinstance(mixer.norm, torch.nn.LayerNorm):
        centred = u - u.mean(-1, keepdim=True)
        u = centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + 1e-5)
        u = u * mixer.norm.weight + mixer.norm.bias
    kernel = kernel_by_hand(mixer, x.shape[1])
    y = torch.stack([(kernel.flip(1)[:, -t - 1 :].T * u[:, : t + 1]).sum(1) for t in range(x.shape[1])], 1)
    return linear(mixer.out, linear(mixer.c, y + mixer.D * u) * v)


@every_case
@pytest.mark.parametrize("mode", ["convolution", "recurrent"])
def test_the_layer_and_its_gradients_are_the_papers_pseudocode(case, mode):
    mixer, x = moved(make(**CASES[case], mode=mode)), inputs().requires_grad_()
    ours, theirs = mixer(x)[0], by_hand(mixer, x)
    assert_agree(ours, theirs)
    dy = torch.randn(ours.shape, generator=generator(2), dtype=ours.dtype)
    wanted = [x, *mixer.parameters()]
    assert_agree(torch.autograd.grad(ours, wanted, dy), torch.autograd.grad(theirs, wanted, dy))


def test_convolution_and_recurrence_agree_over_16384_steps_in_float32():
    x = torch.randn(1, 16_384, 4, generator=generator())
    (y, last), (z, end) = (make(4, 64, d_ssm=2, mode=mode)(x) for mode in ("convolution", "recurrent"))
    for mine, other in ((y.detach(), z.detach()), (last.detach(), end.detach())):
        assert float((mine - other).abs().max()) < 1e-3 * max(1.0, float(other.abs().max()))


def test_parameters_and_where_they_start():
    d, n = 64, 512
    mixer = make(d, n).requires_grad_(False)
    matrices = d * 16 + d * 256 + 16 * 256 + 256 * d
    biases = 16 + 256 + 256 + d
    assert sum(p.numel() for p in mixer.parameters()) == matrices + biases + 2 * 16 + 2 * n + 2 * 16 * n + 16
    assert mixer.state_size == 16 * n
    for parameter in (mixer.Lambda_re, mixer.Lambda_im, mixer.C):
        assert float(parameter.var()) == pytest.approx(1, abs=0.15)
        assert float(parameter.mean()) == pytest.approx(0, abs=0.1)
    assert float(make(4000, 1, d_inner=1).D.detach().var()) == pytest.approx(1, abs=0.15)
    of = groups_of(mixer)
    marked = [name for name, group in of.items() if (group.name, group.weight_decay) == ("transition", False)]
    assert marked == ["Lambda_re", "Lambda_im"]
    assert of["C"].name == "channel" and of["D"].name == "default"
    assert make(2).D.shape == (1,)


@every_case
def test_inspection(case):
    mixer, x = moved(make(**CASES[case])), inputs(7)
    channels = len(mixer.D)
    one = torch.randn(2, channels, N, generator=generator(1), dtype=torch.complex128)
    left = mixer(x[:, :1], one)[1] - mixer(x[:, :1])[1]
    assert_agree(left, torch.polar(*mixer.transitions(x)).reshape(channels, N) * one)
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
        "`d_inner` must be at least 1; got 0": {"d_inner": 0},
        "`d_ssm` must be at least 1; got -1": {"d_ssm": -1},
        "`d_state` must be at least 1; got 0": {"d_state": 0},
        "'layers'; did you mean 'layer'": {"norm": "layers"},
    }.items():
        with pytest.raises(ValueError) as error:
            make(**arguments)
        assert message in str(error.value)
