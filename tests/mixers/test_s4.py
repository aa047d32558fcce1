import math

import pytest
import torch

from linrec.hippo import discretize, matrices, normal_plus_low_rank
from linrec.mixers import build
from linrec.mixers.s4 import S4
from linrec.nn import groups_of
from linrec.nn.state_space import released_start
from linrec.ops import cauchy_kernel
from linrec.testing import assert_agree, generator, reset_mask
from tests import released
from tests.tiers import thorough

D, N = 4, 6
CASES = {
    "paper": {},
    "Fourier, zero-order hold": {"init": "fout", "discretization": "zoh", "output": "glu"},
    "Legendre, rank two": {"init": "legt", "output": "none", "activation": False},
}
every_case = pytest.mark.parametrize("case", CASES)


def make(d_model: int = D, d_state: int = N, **arguments) -> S4:
    torch.manual_seed(0)
    mixer = build("s4", d_model, d_state=d_state, **arguments)
    assert isinstance(mixer, S4)
    return mixer


def make_double(*arguments, **options) -> S4:
    """With HiPPO's numbers in double precision."""
    torch.set_default_dtype(torch.float64)
    try:
        return make(*arguments, **options)
    finally:
        torch.set_default_dtype(torch.float32)


def moved(mixer: S4) -> S4:
    """In float64, every parameter away from where it starts."""
    mixer = mixer.double()
    with torch.no_grad():
        for seed, parameter in enumerate(mixer.parameters()):
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator(seed), dtype=parameter.dtype)
    return mixer


def inputs(time: int = 30) -> torch.Tensor:
    return torch.randn(2, time, D, generator=generator(), dtype=torch.float64)


def discrete(mixer: S4) -> tuple[torch.Tensor, ...]:
    """Abar (d, N, N), Bbar (d, N) and C (d, N) of the equations, conjugate pairs as pairs."""
    systems = []
    for d in range(mixer.d_model):
        Lambda = torch.complex(-mixer.A_log[d].exp(), mixer.A_imag[d])
        pairs = (torch.view_as_complex(z[d]) for z in (mixer.P, mixer.B, mixer.C))
        Lambda, P, B, C = (torch.cat([z, z.conj()]) for z in (Lambda, *pairs))
        A, dt = torch.diag(Lambda) - P @ P.mH, mixer.dt_log[d].exp()
        one = torch.eye(len(A), dtype=A.dtype)
        if mixer.discretization == "bilinear":
            Abar = torch.linalg.inv(one - dt / 2 * A) @ (one + dt / 2 * A)
            Bbar = torch.linalg.inv(one - dt / 2 * A) @ (dt * B)
        else:
            Abar = torch.matrix_exp(dt * A)
            Bbar = torch.linalg.inv(A) @ (Abar - one) @ B
        systems.append((Abar, Bbar, C))
    return tuple(torch.stack(parts) for parts in zip(*systems, strict=True))


def kernel_of(mixer: S4, length: int) -> torch.Tensor:
    Abar, Bbar, C = discrete(mixer)
    taps, power = [], Bbar
    for _ in range(length):
        taps.append((C * power).sum(-1).real)
        power = torch.einsum("dmn,dn->dm", Abar, power)
    return torch.stack(taps, -1)


def by_hand(mixer: S4, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The equations step by step, conjugate pairs as pairs."""
    outputs, states, n = [], [], mixer.A_log.shape[1]
    for d, (Abar, Bbar, C) in enumerate(zip(*discrete(mixer), strict=True)):
        first = torch.complex(state[:, d, :n], state[:, d, n:]).mT
        h, y = torch.cat([first, first.conj()]), []
        for t in range(x.shape[1]):
            h = Abar @ h + Bbar[:, None] * x[:, t, d]
            y.append((C @ h).real + mixer.D[d] * x[:, t, d])
        outputs.append(torch.stack(y, 1))
        states.append(torch.cat([h[:n].real, h[:n].imag]).mT)
    y, last = torch.stack(outputs, -1), torch.stack(states, 1)
    if mixer.out.activation:
        y = y * (1 + torch.erf(y / math.sqrt(2))) / 2
    if mixer.out.output != "none":
        y = y @ mixer.out.weight.T + mixer.out.bias
    if mixer.out.output == "glu":
        y = y[..., :D] * torch.sigmoid(y[..., D:])
    return y, last


@every_case
@pytest.mark.parametrize("mode", ["convolution", "recurrent"])
def test_the_layer_and_its_gradients_are_the_papers_equations(case, mode):
    mixer, x = moved(make(**CASES[case], mode=mode)), inputs().requires_grad_()
    state = torch.randn(2, D, N, generator=generator(1), dtype=torch.float64).requires_grad_()
    ours, theirs = mixer(x, state), by_hand(mixer, x, state)
    assert_agree(ours, theirs)
    wanted = [x, state, *mixer.parameters()]
    cotangents = [torch.randn(tensor.shape, generator=generator(2), dtype=tensor.dtype) for tensor in theirs]
    assert_agree(
        torch.autograd.grad(ours, wanted, cotangents), torch.autograd.grad(theirs, wanted, cotangents)
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_exact_kernel_is_that_of_hippos_dense_system_in_float64(dtype):
    # C in HiPPO's basis is real, and C V in that of the normal part's eigenvectors
    mixer, length = make_double(3, 64, activation=False, output="none"), 1000
    V = normal_plus_low_rank("legs", 64).V
    C = torch.randn(3, 64, generator=generator(), dtype=torch.float64)
    with torch.no_grad():
        mixer.C.copy_(torch.view_as_real(C.to(V.dtype) @ V))
        mixer.dt_log.copy_(torch.tensor([1e-3, 1e-2, 1e-1]).log())
    A, B = discretize(matrices("legs", 64), mixer.dt_log.detach().exp(), "bilinear")
    expected, power = [], B
    for _ in range(length):
        expected.append((C * power).sum(-1))
        power = torch.einsum("dmn,dn->dm", A, power)
    expected = torch.stack(expected, -1)

    mixer = mixer.to(dtype)
    x = torch.zeros(1, length, 3, dtype=dtype)
    x[:, 0] = 1
    for mode in ("convolution", "recurrent"):
        mixer.mode = mode
        y, _ = mixer(x)
        assert_agree(y[0].mT - mixer.D[:, None] * x[0].mT, expected)
    Lambda = torch.complex(-mixer.A_log.exp(), mixer.A_imag)
    parts = (torch.view_as_complex(part) for part in (mixer.P, mixer.B, mixer.C))
    assert_agree(cauchy_kernel(Lambda, *parts, mixer.dt_log.exp(), length), expected)


@thorough
@pytest.mark.parametrize("init", ["legs", "fout"])
def test_convolution_and_recurrence_agree_over_16384_steps_in_float32(init):
    x = torch.randn(1, 16_384, 2, generator=generator())
    with torch.no_grad():
        outcomes = [make(2, 64, init=init, mode=mode)(x) for mode in ("convolution", "recurrent")]
    for mine, other in zip(*outcomes, strict=True):
        assert float((mine - other).abs().max()) < 1e-3 * max(1.0, float(other.abs().max()))


@every_case
def test_no_state_grows_whatever_is_learned(case):
    mixer = make(**CASES[case]).double()
    with torch.no_grad():
        for seed, parameter in enumerate(mixer.parameters()):
            parameter += 3 * torch.randn(parameter.shape, generator=generator(seed), dtype=parameter.dtype)
        Abar, _, _ = discrete(mixer)
    assert float(torch.linalg.matrix_norm(Abar, 2).max()) <= 1 + 1e-12


@pytest.mark.parametrize("mode", ["convolution", "recurrent"])
@pytest.mark.parametrize("init", ["legs", "legt", "fout"])
@pytest.mark.parametrize("discretization", ["bilinear", "zoh"])
def test_outputs_in_float32_are_those_of_float64(discretization, init, mode):
    mixer = make(4, d_state=64, init=init, discretization=discretization, mode=mode, output="none")
    x = torch.randn(1, 500, 4, generator=generator())
    with torch.no_grad():
        found, expected = mixer(x)[0], mixer.double()(x.double())[0]
    assert (found - expected).norm() < 2e-5 * expected.norm()


def test_parameters_and_where_they_start():
    d, n = 400, 4
    mixer = make_double(d, 2 * n).requires_grad_(False)
    assert sum(p.numel() for p in mixer.parameters()) == d * (1 + 2 * n + 3 * 2 * n + 1) + d * d + d
    # rank one: the real system is HiPPO's in another basis
    eigenvalues = torch.linalg.eigvals(matrices("legs", 2 * n).A).real.sort().values
    dt = mixer.dt_log.exp()[:, None]
    Abar = torch.linalg.eigvals(discrete(mixer)[0])
    A = (Abar - 1) / (Abar + 1) * 2 / dt
    assert_agree(A.real.sort(-1).values, eigenvalues.expand(d, -1), dtype=torch.float32)
    assert float(mixer.C.square().sum(-1).mean()) == pytest.approx(1, abs=0.06)
    assert float(mixer.D.var()) == pytest.approx(1, abs=0.15)
    share = (mixer.dt_log - math.log(0.001)) / math.log(100)
    assert 0 <= float(share.min()) < 0.02 and 0.98 < float(share.max()) <= 1
    of = {name: (group.name, group.weight_decay) for name, group in groups_of(mixer).items()}
    transition = {"dt_log", "A_log", "A_imag", "P", "B"}
    assert {name for name, group in of.items() if group == ("transition", False)} == transition
    assert of["C"] == ("channel", True) and of["D"] == ("default", True)


@pytest.mark.parametrize("N", [8, 64])
@pytest.mark.parametrize("measure", ["legs", "legt", "fout"])
def test_the_released_start(measure, N):
    numbers = released.read("s4_start")
    Lambda, P, B = (torch.view_as_complex(numbers[f"{measure}.{N}.{part}"]) for part in ("Lambda", "P", "B"))
    # the other entry of each pair, from small frequencies to large ones; even columns of P come first here
    Lambda, P, B = Lambda.conj().flip(-1), P.conj().flip(0, -1).mT, B.conj().flip(-1)
    ours = released_start(measure, N)
    bound = released.cases()["s4_start"]["error"]
    assert released.error(ours.Lambda, Lambda) < bound
    # eigenvectors have no phase of their own
    assert released.error(ours.B.abs(), B.abs()) < bound
    assert released.error(ours.P.conj() * ours.B[:, None], P.conj() * B[:, None]) < bound
    mixer = make_double(2, N, init=measure, start="released")
    assert_agree(torch.view_as_complex(mixer.B), ours.B.expand(2, -1))
    assert_agree(torch.view_as_complex(mixer.P), ours.P.expand(2, -1, -1))
    assert_agree(mixer.A_imag, ours.Lambda.imag.expand(2, -1))


def test_the_papers_windows_are_half_of_the_released_ones():
    """With steps of twice the size, the released start has the paper's transition."""
    paper = normal_plus_low_rank("fout", 8)
    other = released_start("fout", 8)
    assert_agree(2 * other.Lambda, paper.Lambda)
    assert_agree(2 * other.P @ other.P.mH, paper.P @ paper.P.mH)
    assert_agree(2 * other.B, paper.B)


def test_shared_systems_are_separate_ones_with_equal_weights():
    shared = moved(make(n_ssm=2))
    assert shared.B.shape[0] == 2 and shared.dt_log.shape == (D,)
    apart, weights = make().double(), shared.state_dict()
    for name in ("A_log", "A_imag", "P", "B"):
        # channel c has system c mod 2
        weights[name] = weights[name][[0, 1, 0, 1]]
    apart.load_state_dict(weights)
    assert_agree(shared(inputs()), apart(inputs()))


def test_several_outputs_are_several_models():
    both = moved(make(n_outputs=2))
    weights, x = both.state_dict(), inputs()
    outputs, states = [], []
    for i in range(2):
        part = make(output="none").double()
        system = {name: w for name, w in weights.items() if "out" not in name}
        part.load_state_dict({**system, **{name: system[name][i * D : (i + 1) * D] for name in "CD"}})
        y, state = part(x)
        outputs.append(y)
        states.append(state)
    expected = torch.cat(outputs, -1) @ both.out.weight.T + both.out.bias
    assert_agree(both(x), (expected, torch.cat(states, 1)))


def test_what_is_not_learned_is_kept_and_saved():
    learned, fixed = make(), make(learn_transition=False)
    assert {name for name, _ in fixed.named_parameters()} == {"C", "D", "out.weight", "out.bias"}
    # the same start, which a checkpoint has as well
    assert {*fixed.state_dict()} == {*learned.state_dict()}
    for name, tensor in learned.state_dict().items():
        assert torch.equal(fixed.state_dict()[name], tensor)
    x = inputs().float()
    assert_agree(fixed(x), learned(x))
    assert fixed.state_size == learned.state_size


def test_token_mixing_is_the_mean_size_of_taps():
    mixer, x = moved(make()), inputs(7)
    reset = reset_mask(2, 7, rate=0.3)
    kernel, expected = kernel_of(mixer, 7).abs().mean(0), torch.zeros(2, 7, 7, dtype=torch.float64)
    for b in range(2):
        for n in range(7):
            for m in range(n + 1):
                if not reset[b, m + 1 : n + 1].any():
                    expected[b, n, m] = kernel[n - m]
    assert_agree(mixer.token_mixing(x, reset=reset), expected)


def test_errors():
    for message, arguments in {
        "there is no `init` 'leg'; did you mean 'legs'": {"init": "leg"},
        "there is no `discretization` 'euler'": {"discretization": "euler"},
        "there is no `output` 'gelu'; did you mean 'glu'": {"output": "gelu"},
        "there is no `start` 'code'": {"start": "code"},
        "`n_ssm` must be a positive divisor of `d_model` = 4; got 3": {"n_ssm": 3},
        '`n_outputs` must be 1 with `output="none"`; got 2': {"n_outputs": 2, "output": "none"},
        "`d_state` must be a positive even number, of conjugate pairs; got 7. Pass 8": {"d_state": 7},
        "0 < dt_min <= dt_max; got 0.0 and 0.1. A step of zero never moves": {"dt_min": 0.0},
    }.items():
        with pytest.raises(ValueError) as error:
            make(**arguments)
        assert message in str(error.value)
