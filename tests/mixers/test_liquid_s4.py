import math

import pytest
import torch

from linrec.mixers import build
from linrec.mixers.liquid_s4 import LiquidS4
from linrec.nn import groups_of
from linrec.nn.state_space import spectrum
from linrec.ops import vandermonde_kernel
from linrec.testing import assert_agree, generator

D, N = 3, 6
CASES = {
    "PB": {"degree": 3},
    "released": {"degree": 4, "powers": "sums"},
    "released, real": {"degree": 3, "powers": "sums", "init": "real"},
    "KB": {"kernel": "kb", "init": "lin", "discretization": "zoh", "output": "linear"},
    "KB, real": {"kernel": "kb", "degree": 4, "init": "real", "output": "none", "activation": False},
}
every_case = pytest.mark.parametrize("case", CASES)


def make(d_model: int = D, d_state: int = N, **arguments) -> LiquidS4:
    torch.manual_seed(0)
    mixer = build("liquid_s4", d_model, d_state=d_state, **arguments)
    assert isinstance(mixer, LiquidS4)
    return mixer


def moved(mixer: LiquidS4) -> LiquidS4:
    """In float64, every parameter away from where it starts, and steps for which powers of B matter."""
    mixer = mixer.double()
    with torch.no_grad():
        for seed, parameter in enumerate(mixer.parameters()):
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator(seed), dtype=parameter.dtype)
        mixer.ssm.dt_log.copy_(torch.tensor([0.3, 0.5, 0.9]).log())
    return mixer


def inputs(time: int = 20) -> torch.Tensor:
    return torch.randn(2, time, D, generator=generator(), dtype=torch.float64)


def by_hand(mixer: LiquidS4, x: torch.Tensor, state: tuple[torch.Tensor, torch.Tensor]):
    """The equations step by step, every product from the last one, in a loop."""
    a, b, c = mixer.ssm.discrete()
    before, S = state
    outputs, powers = [], [b]
    for p in range(2, mixer.degree + 1):
        # both of each pair, in the sum
        both = torch.cat([powers[-1], powers[-1].conj()], -1) if b.is_complex() else powers[-1]
        powers.append(b**p if mixer.powers == "entries" else powers[-1] * both.sum(-1, keepdim=True))
    for t in range(x.shape[1]):
        products = [x[:, t]]
        for p in range(mixer.degree - 1):
            products.append((x[:, t] if mixer.powers == "entries" else products[-1]) * before[:, p])
        before = torch.stack(products[:-1], 1)
        terms = [power * product[..., None] for power, product in zip(powers, products, strict=True)]
        if mixer.kernel == "kb":
            S = a * S + sum(terms)
            read = S
        else:
            S = a * S + terms[0]
            read = S + sum(terms[1:])
        outputs.append((c * read).sum(-1).real + mixer.ssm.D * x[:, t])
    y = torch.stack(outputs, 1)
    if mixer.out.activation:
        y = y * (1 + torch.erf(y / math.sqrt(2))) / 2
    if mixer.out.output != "none":
        y = y @ mixer.out.weight.T + mixer.out.bias
    if mixer.out.output == "glu":
        y = y[..., :D] * torch.sigmoid(y[..., D:])
    return y, (before, S)


@every_case
@pytest.mark.parametrize("mode", ["convolution", "recurrent"])
def test_the_layer_and_its_gradients_are_the_equations(case, mode):
    mixer, x = moved(make(**CASES[case], mode=mode)), inputs().requires_grad_()
    state = tuple(
        torch.randn(part.shape, generator=generator(seed), dtype=part.dtype).requires_grad_()
        for seed, part in enumerate(mixer.init_state(2))
    )
    ours, theirs = mixer(x, state), by_hand(mixer, x, state)
    assert_agree(ours, theirs)
    wanted = [x, *state, *mixer.parameters()]
    (y, ends), (z, others) = ours, theirs
    outputs = [torch.randn(part.shape, generator=generator(2), dtype=part.dtype) for part in (y, *ends)]
    assert_agree(
        torch.autograd.grad([y, *ends], wanted, outputs), torch.autograd.grad([z, *others], wanted, outputs)
    )


@pytest.mark.parametrize("kernel", ["kb", "pb"])
def test_products_are_those_of_the_liquid_transition(kernel):
    """Of x_t = (Abar + Bbar u_t) x_{t-1} + Bbar u_t, unrolled, all terms but those of steps apart."""
    mixer, x = moved(make(degree=3, kernel=kernel)).requires_grad_(False), inputs(3)
    a, b, c = mixer.ssm.discrete()
    seen = []
    mixer.out.register_forward_pre_hook(lambda _, y: seen.append(y[0]))
    mixer.out.activation = False
    mixer(x)
    y = seen[0] - mixer.ssm.D * x
    state, u = torch.zeros(2, D, N // 2, dtype=torch.complex128), x[..., None]
    for t in range(3):
        state = (a + b * u[:, t]) * state + b * u[:, t]
        # the one product of steps apart that three steps have
        apart = a * b**2 * u[:, 0] * u[:, 2] if t == 2 else 0
        # PB lets products go after their own step
        gone = a * b**2 * u[:, 0] * u[:, 1] if t == 2 and kernel == "pb" else 0
        assert_agree(y[:, t], (c * (state - apart - gone)).sum(-1).real)


@pytest.mark.parametrize("kernel", ["kb", "pb"])
def test_convolution_and_recurrence_agree_over_16384_steps_in_float32(kernel):
    x = torch.randn(1, 16_384, 2, generator=generator())
    modes = ("convolution", "recurrent")
    (y, ends), (z, others) = (make(2, 64, kernel=kernel, degree=3, mode=mode)(x) for mode in modes)
    for mine, other in ((y, z), *zip(ends, others, strict=True)):
        mine, other = mine.detach(), other.detach()
        assert float((mine - other).abs().max()) < 1e-3 * max(1.0, float(other.abs().max()))


def test_parameters_and_where_they_start():
    d, n = 50, 8
    mixer = make(d, n).requires_grad_(False)
    assert sum(p.numel() for p in mixer.parameters()) == d * (1 + 4 + 4 + 8 + 8 + 1) + 2 * d * d + 2 * d
    assert mixer.state_size == d * 4 + d and make(d, n, degree=4).state_size == d * 4 + 3 * d
    A, B = spectrum("legs", n)
    ssm = mixer.ssm
    assert_agree(torch.complex(-ssm.A_log.exp(), ssm.A_imag), A.cfloat().expand(d, -1))
    assert_agree(torch.view_as_complex(ssm.B), B.cfloat().expand(d, -1))
    assert (ssm.discretization, mixer.degree, mixer.kernel) == ("bilinear", 2, "pb")
    marked = {name for name, group in groups_of(mixer).items() if group.name == "transition"}
    assert marked == {"ssm.dt_log", "ssm.A_log", "ssm.A_imag", "ssm.B"}


@every_case
def test_inspection(case):
    mixer, x = moved(make(**CASES[case])), inputs(6)
    products, start = mixer.init_state(2)
    one = torch.randn(start.shape, generator=generator(1), dtype=start.dtype)
    left = mixer(x[:, :1], (products, one))[1][1] - mixer(x[:, :1])[1][1]
    a = torch.polar(*mixer.transitions(x)).reshape(D, -1)
    assert_agree(left, (a if start.is_complex() else a.real) * one)
    mixing = mixer.token_mixing(x)
    Abar, Bbar, C = mixer.ssm.discrete()
    kernel = vandermonde_kernel(Abar, C * Bbar, 6).abs().mean(0)
    for n in range(6):
        assert_agree(mixing[0, n], torch.cat([kernel[: n + 1].flip(0), kernel.new_zeros(5 - n)]))


def test_errors():
    for message, arguments in {
        "`degree` must be at least 2; got 1. Without products": {"degree": 1},
        "there is no `powers` 'sum'; did you mean 'sums'": {"powers": "sum"},
        '`powers="sums"` needs `kernel="pb"`; got \'kb\'': {"powers": "sums", "kernel": "kb"},
        "there is no `kernel` 'bp'; did you mean 'pb'": {"kernel": "bp"},
        "there is no `output` 'gluu'; did you mean 'glu'": {"output": "gluu"},
        "`d_state` must be a positive even number, of conjugate pairs; got 5": {"d_state": 5},
    }.items():
        with pytest.raises(ValueError) as error:
            make(**arguments)
        assert message in str(error.value)
    with pytest.raises(ValueError, match=r"`state` must be that of .*; got \(a tensor \(3, "):
        mixer = make()
        mixer(inputs().float(), mixer.init_state(3))
