import math

import pytest
import torch
from numpy.polynomial import legendre

from linrec import testing
from linrec.mixers import build
from linrec.mixers.lmu import LMU, Memory
from linrec.testing import assert_agree, generator, reset_mask
from tests.tiers import thorough

D, N, THETA, SIGNALS = 4, 5, 12.0, 3
FUNCTIONS = {
    "tanh": lambda x: 2 / (1 + torch.exp(-2 * x)) - 1,
    "relu": lambda x: x * (x > 0),
    "gelu": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
    "none": lambda x: x,
}
CASES = {
    "2021": {},
    "bilinear": {"discretization": "bilinear", "activation": "gelu", "memory_activation": "relu"},
    "2019": {"feedback": True, "bias": False},
    "feedback, bilinear": {"feedback": True, "discretization": "bilinear", "memory_activation": "tanh"},
}
every_case = pytest.mark.parametrize("case", CASES)


def make(d_model: int = D, **arguments) -> LMU:
    torch.manual_seed(0)
    arguments = {"order": N, "theta": THETA, "d_memory": SIGNALS} | arguments
    mixer = build("lmu", d_model, **arguments)
    assert isinstance(mixer, LMU)
    return mixer


def moved(mixer: LMU) -> LMU:
    """In float64, every parameter away from where it starts."""
    mixer = mixer.double()
    with torch.no_grad():
        for seed, parameter in enumerate(mixer.parameters()):
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator(seed), dtype=parameter.dtype)
    return mixer


def draw(*shape, seed=0):
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64)


def papers_system(order, theta, discretization):
    """A and B of the paper, discretised in steps of one."""
    A, B = torch.zeros(order, order).double(), torch.zeros(order).double()
    for i in range(order):
        B[i] = (2 * i + 1) * (-1) ** i / theta
        for j in range(order):
            A[i, j] = (2 * i + 1) / theta * (-1 if i < j else (-1.0) ** (i - j + 1))
    one = torch.eye(order).double()
    if discretization == "bilinear":
        inverse = torch.linalg.inv(one - A / 2)
        return inverse @ (one + A / 2), inverse @ B
    # the exponential's series, where it has hardly begun to move, and squares of that
    small = A / 2**10
    Abar = one + small @ (one + small / 2 @ (one + small / 3 @ (one + small / 4)))
    for _ in range(10):
        Abar = Abar @ Abar
    return Abar, torch.linalg.solve(A, (Abar - one) @ B)


def by_hand(mixer, x, m, h):
    """The units' equations step by step."""
    A, B = papers_system(mixer.order, mixer.theta, mixer.discretization)
    f, f_u = FUNCTIONS[mixer.activation], FUNCTIONS[mixer.memory_activation]
    outputs = []
    for t in range(x.shape[1]):
        u = mixer.E_x(x[:, t])
        if mixer.feedback:
            u = u + mixer.E_h(h) + mixer.E_m(m.flatten(1))
        m = torch.einsum("ij,bsj->bsi", A, m) + f_u(u)[..., None] * B
        y = mixer.W_x(x[:, t]) + mixer.W_m(m.flatten(1))
        h = f(y + mixer.W_h(h)) if mixer.feedback else f(y)
        outputs.append(h)
    return torch.stack(outputs, 1), Memory(m, h) if mixer.feedback else m


@every_case
@pytest.mark.parametrize("time", [7, 40])
def test_the_layer_and_its_gradients_are_the_papers_equations(case, time):
    mixer = moved(make(**CASES[case]))
    x, m, h = (part.requires_grad_() for part in (draw(2, time, D), draw(2, SIGNALS, N), draw(2, D)))
    start = Memory(m, h) if mixer.feedback else m
    ours, theirs = mixer(x, start), by_hand(mixer, x, m, h)
    assert_agree(ours, theirs)
    wanted = [x, m, *([h] if mixer.feedback else []), *mixer.parameters()]
    assert_agree(
        torch.autograd.grad(ours[0].square().sum(), wanted),
        torch.autograd.grad(theirs[0].square().sum(), wanted),
    )


def test_a_memory_can_be_read_at_any_delay():
    """u(t - r theta) is near sum_i P_i(2r - 1) m_i(t): the paper's equation of the delay."""
    theta = 100.0
    mixer = make(1, order=12, theta=theta, d_memory=1, activation="none").double()
    with torch.no_grad():
        mixer.E_x.weight.fill_(1)
    steps = torch.arange(600).double()
    u = torch.sin(steps / 20) + torch.cos(steps / 33)
    _, m = mixer(u[None, :, None])
    for r in (0.0, 0.25, 0.5, 1.0):
        read = m[0, 0].detach().numpy() @ legendre.legvander([2 * r - 1], 11)[0]
        # a sample is held for the step that ends now
        now = 599.5 - r * theta
        assert abs(read - (math.sin(now / 20) + math.cos(now / 33))) < 0.01


@thorough
@pytest.mark.parametrize("order", [32, 128])
def test_both_modes_agree_over_16384_steps(order):
    x = torch.randn(1, 16_384, 1, generator=generator())
    recurrent, convolution = (
        make(1, order=order, theta=2000.0, d_memory=1, mode=mode) for mode in ("recurrent", "convolution")
    )
    (y, m), (z, n) = recurrent(x), convolution(x)
    assert (y - z).abs().max() < 1e-3 * y.abs().max() and (m - n).abs().max() < 1e-3 * m.abs().max()


def test_feedback_of_nothing_is_none():
    fed, plain = moved(make(feedback=True)), moved(make())
    with torch.no_grad():
        for part in (fed.E_h, fed.E_m, fed.W_h):
            part.weight.zero_()
    plain.load_state_dict({name: w for name, w in fed.state_dict().items() if name in plain.state_dict()})
    (y, last), (z, m) = fed(draw(2, 20, D)), plain(draw(2, 20, D))
    assert_agree((y, last.m), (z, m))


def test_systems_are_exact_in_every_precision():
    A, B = papers_system(40, 300.0, "zoh")
    mixer = make(order=40, theta=300.0)
    assert_agree((mixer.A, mixer.B), (A, B))
    # back and forth too: nothing is rounded that is not formed again
    for dtype in (torch.bfloat16, torch.float64):
        mixer = mixer.to(dtype)
        assert mixer.W_m.weight.dtype == dtype and mixer.A.dtype == torch.promote_types(dtype, torch.float32)
        assert_agree((mixer.A, mixer.B), (A, B))


def test_parameters_and_where_they_start():
    mixer = make(64, order=32, d_memory=16, feedback=True)
    sizes = {name: tuple(w.shape) for name, w in mixer.named_parameters()}
    assert sizes == {
        "E_x.weight": (16, 64),
        "E_x.bias": (16,),
        "W_x.weight": (64, 64),
        "W_x.bias": (64,),
        "W_m.weight": (64, 512),
        "E_h.weight": (16, 64),
        "E_m.weight": (16, 512),
        "W_h.weight": (64, 64),
    }
    mixer.requires_grad_(False)
    for E in (mixer.E_x, mixer.E_h):
        assert E.weight.abs().max() <= math.sqrt(3 / 64)
        assert E.weight.std() == pytest.approx(1 / 8, rel=0.1)
    for W in (mixer.W_x, mixer.W_h, mixer.W_m):
        assert W.weight.std() == pytest.approx(math.sqrt(2 / sum(W.weight.shape)), rel=0.05)
        # normal, not uniform
        assert W.weight.abs().max() > 3 * W.weight.std()
    assert not mixer.E_m.weight.any() and not mixer.E_x.bias.any() and not mixer.W_x.bias.any()
    assert mixer.state_size == 16 * 32 + 64 and make(64, order=32).state_size == 3 * 32
    assert build("lmu", 6).d_memory == 1 and build("lmu", 64).d_memory == 8


@pytest.mark.parametrize("feedback", [False, True])
def test_weights_start_as_in_keras_lmu_where_asked(feedback):
    mixer = make(64, order=32, d_memory=16, feedback=feedback, init="keras_lmu").requires_grad_(False)
    for parts, sizes in (
        ([mixer.E_x, mixer.E_h], 64 + 64 * feedback + 16),
        ([mixer.W_x, mixer.W_m], 64 + 16 * 32 + 64),
    ):
        for part in parts:
            if part is not None:
                largest = math.sqrt(6 / sizes)
                assert 0.98 * largest < part.weight.abs().max() <= largest
                assert part.weight.std() == pytest.approx(largest / math.sqrt(3), rel=0.05)
    for part in [mixer.E_m, mixer.W_h] if feedback else []:
        testing.assert_agree(part.weight @ part.weight.T, torch.eye(len(part.weight)))
    assert not mixer.E_x.bias.any() and not mixer.W_x.bias.any()


@thorough
def test_feedback_compiles():
    mixer = make(feedback=True)
    x = torch.randn(2, 3, D, generator=generator())
    testing.check_compile(mixer, x, compiler="aot_eager_default_partitioner")


def test_the_token_mixing_matrix_is_what_a_step_adds_to_later_memories():
    mixer, x = moved(make(activation="none")), draw(2, 6, D)
    reset = reset_mask(2, 6, rate=0.3)
    found = mixer.token_mixing(x, reset=reset)
    A, B = papers_system(N, THETA, "zoh")
    for b in range(2):
        for n in range(6):
            for m in range(6):
                seen = m <= n and not reset[b, m + 1 : n + 1].any()
                expected = (torch.linalg.matrix_power(A, n - m) @ B).abs().mean() if seen else 0.0
                assert float(found[b, n, m]) == pytest.approx(float(expected), abs=1e-12)
    assert make(feedback=True).double().token_mixing(x) is None


def test_errors_say_what_is_wrong():
    for arguments, message in (
        ({"order": 0}, "`order` must be at least 1; got 0"),
        ({"d_memory": 0}, "`d_memory` must be at least 1; got 0"),
        ({"theta": 0.0}, "`theta` must be positive and finite; got 0.0"),
        ({"theta": math.inf}, "`theta` must be a finite number; got inf"),
        ({"activation": "tahn"}, "no `activation` 'tahn'; did you mean 'tanh'"),
        ({"memory_activation": "relu6"}, "no `memory_activation` 'relu6'; did you mean 'relu'"),
        ({"discretization": "zho"}, "no `discretization` 'zho'; did you mean 'zoh'"),
        (
            {"feedback": True, "mode": "convolution"},
            '`mode` must be "auto" or "recurrent" with `feedback=True`; got \'convolution\'',
        ),
    ):
        with pytest.raises(ValueError, match=message):
            make(**arguments)
    with pytest.raises(ValueError, match="scan"):
        make(mode="scan")(torch.zeros(1, 2, D))
