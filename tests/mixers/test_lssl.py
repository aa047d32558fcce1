import math

import pytest
import torch

from linrec.hippo import MEASURES, discretize, matrices
from linrec.mixers import build
from linrec.mixers.lssl import LSSL, QuasiSeparable
from linrec.nn import groups_of
from linrec.ops import dense_ssm
from linrec.ops.core.call import recording
from linrec.testing import assert_agree, generator, reset_mask
from tests.tiers import thorough

D, N = 3, 4
CASES = {
    "paper": {},
    "several outputs": {"n_outputs": 2, "output": "glu", "measure": "legt"},
    "quasi-separable": {"transition": "quasi_separable", "measure": "legt"},
    "fixed, alone": {"learn_transition": False, "output": "none", "activation": False, "measure": "lagt"},
}
every_case = pytest.mark.parametrize("case", CASES)


def make(d_model: int = D, d_state: int = N, **arguments) -> LSSL:
    torch.manual_seed(0)
    mixer = build("lssl", d_model, d_state=d_state, **arguments)
    assert isinstance(mixer, LSSL)
    return mixer


def moved(mixer: LSSL, by: float = 0.3) -> LSSL:
    """In float64, every parameter away from where it starts."""
    mixer = mixer.double()
    with torch.no_grad():
        for seed, parameter in enumerate(mixer.parameters()):
            parameter += by * torch.randn(parameter.shape, generator=generator(seed), dtype=parameter.dtype)
    return mixer


def draw(*shape, seed=0):
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64)


def system_of(mixer):
    """Abar, Bbar and C as the operator gets them."""
    with recording() as calls:
        mixer(torch.zeros(1, 1, mixer.d_model, dtype=mixer.C.dtype))
    return calls[-1].inputs


def matrices_of(mixer):
    """A and B of the parameters."""
    one = torch.eye(mixer.d_state).double()
    if (form := mixer.quasi_separable) is not None:
        T = torch.zeros(mixer.d_state, mixer.d_state).double()
        for n in range(mixer.d_state):
            T[n, n] = form.diagonal[n]
            if n:
                T[n, n - 1], T[n - 1, n] = form.lower[n - 1], form.upper[n - 1]
        inverse = torch.linalg.solve(T, one)
        return -torch.diag(form.p) @ (inverse + torch.diag(form.c)) @ torch.diag(form.q), form.p * form.b
    mu = 0.5 if mixer.measure == "legs" else 0
    return (mixer.S - mixer.S.T) / 2 - mixer.P @ mixer.P.T - mu * one, mixer.B


def by_hand(mixer, x, state):
    """The equations step by step, channel by channel."""
    one = torch.eye(mixer.d_state).double()
    A, B = matrices_of(mixer)
    outputs, states = [], []
    for d in range(mixer.d_model):
        dt, h, y = mixer.dt_log[d].exp(), state[:, d], []
        inverse = torch.linalg.inv(one - dt / 2 * A)
        for t in range(x.shape[1]):
            h = h @ (inverse @ (one + dt / 2 * A)).T + x[:, t, d, None] * (inverse @ B * dt)
            y.append(h @ mixer.C[d].T + mixer.D[d] * x[:, t, d, None])
        outputs.append(torch.stack(y, 1))
        states.append(h)
    y = torch.cat(outputs, -1)
    if mixer.out.activation:
        y = y * (1 + torch.erf(y / math.sqrt(2))) / 2
    if mixer.out.output != "none":
        y = y @ mixer.out.weight.T + mixer.out.bias
    if mixer.out.output == "glu":
        left, right = y.chunk(2, -1)
        y = left / (1 + torch.exp(-right))
    return y, torch.stack(states, 1)


@every_case
@pytest.mark.parametrize("time", [6, 30])
def test_the_layer_and_its_gradients_are_the_papers_equations(case, time):
    mixer = moved(make(**CASES[case]))
    x, state = draw(2, time, D).requires_grad_(), draw(2, D, N, seed=1).requires_grad_()
    ours, theirs = mixer(x, state), by_hand(mixer, x, state)
    assert_agree(ours, theirs)
    wanted = [x, state, *mixer.parameters()]
    assert_agree(
        torch.autograd.grad(ours[0].square().sum(), wanted),
        torch.autograd.grad(theirs[0].square().sum(), wanted),
    )


@pytest.mark.parametrize(
    ("measure", "transition"),
    [(measure, "stable") for measure in MEASURES]
    + [(measure, "quasi_separable") for measure in ("legs", "legt", "lagt")],
)
def test_the_system_starts_as_hippos(measure, transition):
    mixer = make(d_state=16, measure=measure, transition=transition)
    given = system_of(mixer)
    expected = discretize(matrices(measure, 16), mixer.dt_log.detach().exp(), "bilinear")
    assert_agree((given.A, given.B), tuple(expected))


@thorough
def test_both_modes_agree_over_16384_steps():
    x = torch.randn(1, 16_384, 2, generator=generator())
    (y, h), (z, g) = (make(2, 32, mode=mode)(x) for mode in ("recurrent", "convolution"))
    assert (y - z).abs().max() < 1e-3 and (h - g).abs().max() < 1e-3


@pytest.mark.parametrize("measure", MEASURES)
def test_states_never_grow_by_themselves_whatever_is_learned(measure):
    # far from HiPPO's, and with large steps
    mixer = moved(make(d_state=8, measure=measure), by=3.0)
    state = draw(2, D, 8)
    for _ in range(50):
        _, after = mixer(torch.zeros(2, 1, D).double(), state)
        assert (after.norm(dim=-1) <= state.norm(dim=-1) * (1 + 1e-12)).all()
        state = after


def test_what_is_fixed_and_what_is_learned():
    sizes = {name: tuple(w.shape) for name, w in make(n_outputs=2).named_parameters()}
    system = {"S": (N, N), "P": (N, 1), "dt_log": (D,)}
    rest = {"B": (N,), "C": (D, 2, N), "D": (D, 2), "out.weight": (D, 2 * D), "out.bias": (D,)}
    assert sizes == system | rest
    fixed = make(n_outputs=2, learn_transition=False)
    assert {name: tuple(w.shape) for name, w in fixed.named_parameters()} == rest
    # kept with the weights, for dt is drawn
    assert set(system) <= set(fixed.state_dict())
    groups = groups_of(make())
    assert {name for name, group in groups.items() if group.name == "transition"} == {*system, "B"}
    assert not any(groups[name].weight_decay for name in (*system, "B"))
    assert groups["C"].name == groups["D"].name == "channel"


def test_the_papers_family_has_its_own_parameters():
    form = {"lower": 3, "diagonal": 4, "upper": 3, "c": 4, "p": 4, "q": 4, "b": 4}
    alone = QuasiSeparable("legs", 4)
    assert {name: len(w) for name, w in alone.named_parameters() if w.requires_grad} == form
    system = {f"quasi_separable.{name}": (size,) for name, size in form.items()} | {"dt_log": (D,)}
    rest = {"C": (D, 1, N), "D": (D, 1), "out.weight": (D, D), "out.bias": (D,)}
    mixer = make(transition="quasi_separable")
    assert {name: tuple(w.shape) for name, w in mixer.named_parameters()} == system | rest
    assert {name for name, group in groups_of(mixer).items() if group.name == "transition"} == set(system)
    fixed = make(transition="quasi_separable", learn_transition=False)
    assert {name for name, _ in fixed.named_parameters()} == set(rest)
    assert set(system) <= set(fixed.state_dict())


def test_where_parameters_start():
    mixer = make(2000, 8, dt_min=0.01, dt_max=1.0).requires_grad_(False)
    share = (mixer.dt_log - math.log(0.01)) / math.log(100)
    assert 0 <= share.min() < 0.01 and 0.99 < share.max() <= 1
    assert share.mean() == pytest.approx(0.5, abs=0.03) and share.var() == pytest.approx(1 / 12, rel=0.1)
    for normal in (mixer.C, mixer.D):
        assert normal.mean() == pytest.approx(0, abs=0.08) and normal.var() == pytest.approx(1, rel=0.1)
        assert normal.abs().max() > 3


def test_the_token_mixing_matrix_is_the_kernel():
    mixer, x = moved(make(n_outputs=2)), draw(2, 5, D)
    reset = reset_mask(2, 5, rate=0.3)
    impulse = torch.zeros(D, 5, D).double()
    impulse[torch.arange(D), 0, torch.arange(D)] = 1
    with torch.no_grad():
        mixer.D.zero_()
        given = system_of(mixer)
        y, _ = dense_ssm(impulse, given.A, given.B, given.C)
        kernel = y[torch.arange(D), :, torch.arange(D)].abs().mean((0, 2))
        found = mixer.token_mixing(x, reset=reset)
    for b in range(2):
        for n in range(5):
            for m in range(5):
                seen = m <= n and not reset[b, m + 1 : n + 1].any()
                assert float(found[b, n, m]) == pytest.approx(float(kernel[n - m]) if seen else 0.0)


def test_errors_say_what_is_wrong():
    for arguments, message in (
        ({"d_state": 0}, "`d_state` must be at least 1; got 0"),
        ({"n_outputs": 0}, "`n_outputs` must be at least 1; got 0"),
        ({"measure": "legz"}, "no `measure` 'legz'; did you mean 'legs'"),
        ({"transition": "quasi"}, "there is no `transition` 'quasi'"),
        ({"transition": "quasi_separable", "measure": "fout"}, "there is no `measure` 'fout'"),
        ({"output": "gluu"}, "no `output` 'gluu'; did you mean 'glu'"),
        ({"output": "none", "n_outputs": 2}, '`n_outputs` must be 1 with `output="none"`; got 2'),
        ({"dt_min": 0.0}, "A step of zero never moves"),
        ({"dt_min": 1e-60}, "`dt_min` must be at least 1.18e-38, .* got 1e-60, which would underflow"),
    ):
        with pytest.raises(ValueError, match=message):
            make(**arguments)
    with pytest.raises(ValueError, match="scan"):
        make(mode="scan")(torch.zeros(1, 2, D))
