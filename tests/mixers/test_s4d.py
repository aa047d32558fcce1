import math

import pytest
import torch

from linrec.hippo import matrices
from linrec.mixers import build
from linrec.mixers.s4d import S4D
from linrec.nn import groups_of
from linrec.nn.state_space import spectrum
from linrec.ops import vandermonde_kernel
from linrec.testing import assert_agree, generator, reset_mask
from tests import released

D, N = 4, 6
CASES = {
    "paper": {},
    "inverse, bilinear, fixed B": {"init": "inv", "discretization": "bilinear", "learn_b": False},
    "LegS": {"init": "legs", "output": "linear"},
    "real, Euler": {"init": "real", "discretization": "euler", "output": "none", "activation": False},
}
every_case = pytest.mark.parametrize("case", CASES)


def make(d_model: int = D, d_state: int = N, **arguments) -> S4D:
    torch.manual_seed(0)
    mixer = build("s4d", d_model, d_state=d_state, **arguments)
    assert isinstance(mixer, S4D)
    return mixer


def moved(mixer: S4D) -> S4D:
    """In float64, every parameter away from where it starts."""
    mixer = mixer.double()
    with torch.no_grad():
        for seed, parameter in enumerate(mixer.parameters()):
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator(seed), dtype=parameter.dtype)
    return mixer


def kernel_of(mixer: S4D, length: int) -> torch.Tensor:
    """K of the layer, (d_model, length), without D."""
    Abar, Bbar, C = mixer.ssm.discrete()
    return vandermonde_kernel(Abar, C * Bbar, length)


def inputs(time: int = 30) -> torch.Tensor:
    return torch.randn(2, time, D, generator=generator(), dtype=torch.float64)


def by_hand(mixer: S4D, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The equations step by step, conjugate pairs as pairs, with matrices for what is diagonal."""
    ssm, outputs, states = mixer.ssm, [], []
    for d in range(D):
        A, B, C = -ssm.A_log[d].exp() + 0j, ssm.B[d] + 0j, ssm.C[d] + 0j
        h = state[:, d] + 0j
        if ssm.A_imag is not None:
            A = A + 1j * ssm.A_imag[d]
            B, C = (z[:, 0] + 1j * z[:, 1] for z in (ssm.B[d], ssm.C[d]))
            A, B, C, h = (torch.cat([z, z.conj()], -1) for z in (A, B, C, h))
        A, dt, one = torch.diag(A), ssm.dt_log[d].exp(), torch.eye(len(A), dtype=torch.complex128)
        if ssm.discretization == "zoh":
            Abar = torch.matrix_exp(dt * A)
            Bbar = torch.linalg.solve(A, (Abar - one) @ B)
        elif ssm.discretization == "bilinear":
            Abar = torch.linalg.solve(one - dt / 2 * A, one + dt / 2 * A)
            Bbar = torch.linalg.solve(one - dt / 2 * A, dt * B)
        else:
            Abar, Bbar = one + dt * A, dt * B
        y = []
        for t in range(x.shape[1]):
            h = h @ Abar.T + x[:, t, d, None] * Bbar
            y.append((h @ C).real + ssm.D[d] * x[:, t, d])
        outputs.append(torch.stack(y, 1))
        states.append(h[:, : state.shape[-1]])
    y, last = torch.stack(outputs, -1), torch.stack(states, 1)
    if mixer.out.activation:
        y = y * (1 + torch.erf(y / math.sqrt(2))) / 2
    if mixer.out.output != "none":
        y = y @ mixer.out.weight.T + mixer.out.bias
    if mixer.out.output == "glu":
        y = y[..., :D] * torch.sigmoid(y[..., D:])
    return y, last if state.is_complex() else last.real


@every_case
@pytest.mark.parametrize("mode", ["convolution", "recurrent"])
def test_the_layer_and_its_gradients_are_the_papers_equations(case, mode):
    mixer = moved(make(**CASES[case], mode=mode))
    dtype = mixer.init_state(1).dtype
    state = torch.randn(mixer.init_state(2).shape, generator=generator(1), dtype=dtype).requires_grad_()
    x = inputs().requires_grad_()
    ours, theirs = mixer(x, state), by_hand(mixer, x, state)
    assert_agree(ours, theirs)
    wanted = [x, state, *mixer.parameters()]
    cotangents = [torch.randn(tensor.shape, generator=generator(2), dtype=tensor.dtype) for tensor in theirs]
    assert_agree(
        torch.autograd.grad(ours, wanted, cotangents), torch.autograd.grad(theirs, wanted, cotangents)
    )


@pytest.mark.parametrize("init", ["lin", "inv", "legs", "real"])
def test_convolution_and_recurrence_agree_over_16384_steps_in_float32(init):
    x = torch.randn(1, 16_384, 2, generator=generator())
    (y, last), (z, end) = (make(2, 64, init=init, mode=mode)(x) for mode in ("convolution", "recurrent"))
    for mine, other in ((y, z), (last, end)):
        mine, other = mine.detach(), other.detach()
        assert float((mine - other).abs().max()) < 1e-3 * max(1.0, float(other.abs().max()))


@every_case
def test_the_kernel_is_the_answer_to_an_impulse(case):
    mixer = moved(make(**CASES[case]))
    mixer.out = torch.nn.Identity()
    x = torch.zeros(1, 40, D, dtype=torch.float64)
    x[:, 0] = 1
    y, _ = mixer(x)
    y[:, 0] -= mixer.ssm.D
    assert_agree(kernel_of(mixer, 40), y[0].T)


def test_spectra_are_the_papers():
    A, B = spectrum("lin", 8)
    assert_agree(A, torch.tensor([-0.5 + 1j * math.pi * n for n in range(4)], dtype=torch.complex128))
    assert B.tolist() == [1] * 4
    A, _ = spectrum("inv", 8)
    imaginary = [8 / math.pi * (8 / (2 * n + 1) - 1) for n in range(4)]
    assert_agree(A, torch.tensor([-0.5 + 1j * y for y in imaginary], dtype=torch.complex128))
    assert spectrum("real", 3)[0].tolist() == [-1, -2, -3]
    # the normal part of HiPPO-LegS has the paper's symmetric part -1/2, and its eigenvalues
    A, B = matrices("legs", 8)
    P = torch.sqrt(torch.arange(8).double() + 0.5)
    eigenvalues = torch.linalg.eigvals(A + torch.outer(P, P))
    above = eigenvalues[eigenvalues.imag > 0]
    mine, b = spectrum("legs", 8)
    assert_agree(mine, above[above.imag.argsort()])
    # unitary: B keeps its length, half of it in either of each pair
    assert_agree(2 * b.square().sum(), B.square().sum())


@pytest.mark.parametrize("init", ["lin", "inv", "legs", "real"])
def test_the_released_start(init):
    numbers, bound = released.read("s4d_start"), released.cases()["s4d_start"]["error"]
    theirs = numbers[f"diag.{init}.A"]
    A, B = spectrum(init, 8 if init == "real" else 64, start="released")
    if init == "real":
        assert released.error(A, theirs) < bound
        return
    # the other entry of each pair
    theirs = torch.view_as_complex(theirs).conj()
    mine, other = A.imag.argsort(), theirs.imag.argsort()
    assert released.error(A[mine], theirs[other]) < bound
    assert released.error(B[mine], torch.view_as_complex(numbers[f"diag.{init}.B"]).abs()[other]) < bound
    # the paper's B is not clipped
    assert (float(spectrum(init, 64)[1].max()) > 40) == (init == "legs")
    mixer = make(2, 64, init=init, start="released")
    assert_agree(mixer.ssm.B[..., 0], B.float().expand(2, -1))


@pytest.mark.parametrize("init", ["lin", "real"])
def test_shared_systems_are_separate_ones_with_equal_weights(init):
    shared = moved(make(n_ssm=2, init=init))
    assert shared.ssm.B.shape[0] == 2 and shared.ssm.dt_log.shape == (D,)
    apart, weights = make(init=init).double(), shared.state_dict()
    for name in {"ssm.A_log", "ssm.A_imag", "ssm.B"} & weights.keys():
        # channel c has system c mod 2
        weights[name] = weights[name][[0, 1, 0, 1]]
    apart.load_state_dict(weights)
    assert_agree(shared(inputs()), apart(inputs()))


def test_several_outputs_are_several_models():
    both = moved(make(n_outputs=2, output="linear"))
    weights, x = both.state_dict(), inputs()
    outputs, states = [], []
    for i in range(2):
        part = make(output="none").double()
        system = {name: w for name, w in weights.items() if "out" not in name}
        own = {name: system[name][i * D : (i + 1) * D] for name in ("ssm.C", "ssm.D")}
        part.load_state_dict({**system, **own})
        y, state = part(x)
        outputs.append(y)
        states.append(state)
    expected = torch.cat(outputs, -1) @ both.out.weight.T + both.out.bias
    assert_agree(both(x), (expected, torch.cat(states, 1)))


def test_parameters_and_where_they_start():
    n = 2000
    mixer = make(n, 4)
    ssm = mixer.ssm.requires_grad_(False)
    assert sum(p.numel() for p in mixer.parameters()) == n * (1 + 2 + 2 + 4 + 4 + 1) + 2 * n * n + 2 * n
    A, _ = spectrum("lin", 4)
    assert_agree(torch.complex(-ssm.A_log.exp(), ssm.A_imag), A.to(torch.complex64).expand(n, 2))
    assert ssm.B.unique(dim=0).tolist() == [[[1, 0], [1, 0]]]
    C = torch.view_as_complex(ssm.C)
    assert float(C.abs().square().mean()) == pytest.approx(1, abs=0.06)
    assert float(ssm.C.mean()) == pytest.approx(0, abs=0.04)
    assert float(ssm.D.var()) == pytest.approx(1, abs=0.1)
    low, high = math.log(0.001), math.log(0.1)
    share = (ssm.dt_log - low) / (high - low)
    assert 0 <= float(share.min()) < 0.01 and 0.99 < float(share.max()) <= 1
    assert float(share.mean()) == pytest.approx(0.5, abs=0.02)
    # every step of every case is stable
    for arguments in CASES.values():
        assert float(make(**arguments).transitions(inputs().float()).magnitude.detach().max()) <= 1


def test_what_the_optimiser_is_told():
    of = {name: (group.name, group.weight_decay) for name, group in groups_of(make()).items()}
    assert of.pop("ssm.C") == ("channel", True)
    transition = {f"ssm.{name}" for name in ("dt_log", "A_log", "A_imag", "B")}
    assert {name for name, group in of.items() if group == ("transition", False)} == transition
    assert {group for name, group in of.items() if name not in transition} == {("default", True)}
    assert "ssm.B" not in groups_of(make(learn_b=False))
    assert "ssm.B" in make(learn_b=False).state_dict()


def test_steps_of_streaming_are_those_of_the_convolution():
    mixer, x = make().eval(), inputs(100).float()
    whole, _ = mixer(x)
    y, state = mixer(x[:, :60])
    pieces = [y]
    for t in range(60, 100):
        y, state = mixer(x[:, t : t + 1], state)
        pieces.append(y)
    assert_agree(torch.cat(pieces, 1), whole)


@pytest.mark.parametrize("init", ["lin", "real"])
def test_inspection(init):
    mixer, x = moved(make(init=init)), inputs(7)
    magnitude, phase = mixer.transitions(x)
    a = torch.polar(magnitude, phase)
    one = torch.randn(mixer.init_state(2).shape, generator=generator(1), dtype=mixer.init_state(1).dtype)
    left = mixer(x[:, :1], one)[1] - mixer(x[:, :1])[1]
    assert_agree(left + 0j, a.reshape(one.shape[1:]) * one)
    reset = reset_mask(2, 7, rate=0.3)
    kernel, expected = kernel_of(mixer, 7), torch.zeros(2, 7, 7, dtype=torch.float64)
    for b in range(2):
        for n in range(7):
            for m in range(n + 1):
                if not reset[b, m + 1 : n + 1].any():
                    expected[b, n, m] = kernel[:, n - m].abs().mean()
    assert_agree(mixer.token_mixing(x, reset=reset), expected)


def test_errors():
    for message, arguments in {
        "there is no `init` 'legz'; did you mean 'legs'": {"init": "legz"},
        "`d_state` must be a positive even number, of conjugate pairs; got 5. Pass 6": {"d_state": 5},
        "`d_state` must be a positive even number, of conjugate pairs; got 0. Pass 2": {"d_state": 0},
        "0 < dt_min <= dt_max; got 0.0 and 0.1. A step of zero never moves": {"dt_min": 0.0},
        "0 < dt_min <= dt_max; got 0.2 and 0.1": {"dt_min": 0.2},
        "there is no `discretization` 'softmax'; did you mean": {"discretization": "softmax"},
        "must have transitions of at most 1 to be stable": {"discretization": "euler", "d_state": 64},
        "there is no `output` 'gelu'; did you mean 'glu'": {"output": "gelu"},
        "there is no `start` 'code'": {"start": "code"},
        "`n_ssm` must be a positive divisor of `channels` = 4; got 3": {"n_ssm": 3},
        "`n_outputs` must be at least 1; got 0": {"n_outputs": 0},
        '`n_outputs` must be 1 with `output="none"`; got 2': {"n_outputs": 2, "output": "none"},
    }.items():
        with pytest.raises(ValueError) as error:
            make(**arguments)
        assert message in str(error.value)
    with pytest.raises(ValueError, match="did you mean 'convolution'"):
        make(mode="convolve")(inputs().float())
