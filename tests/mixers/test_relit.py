import math

import pytest
import torch

from linrec.mixers import build
from linrec.mixers.relit import ReLiT
from linrec.nn import groups_of
from linrec.testing import assert_agree, generator

D, TIME = 6, 9
VARIANTS = {
    "paper": {},
    "heads": {"n_heads": 2, "eta": 3},
    "AReLiT": {"n_heads": 2, "r": 4},
    "odd": {"n_heads": 3, "eta": 1, "r": 5},
    "one term": {"eta": 2, "r": 1},
    "large floor": {"n_heads": 2, "floor": 0.3},
    "released": {"n_heads": 2, "variant": "released"},
    "released AReLiT": {"n_heads": 2, "r": 4, "variant": "released"},
    "released, odd": {"n_heads": 3, "eta": 1, "r": 5, "variant": "released"},
    "released, two": {"eta": 2, "r": 2, "variant": "released"},
}


def make(d_model: int = D, **arguments) -> ReLiT:
    torch.manual_seed(0)
    mixer = build("relit", d_model, **arguments)
    assert isinstance(mixer, ReLiT)
    return mixer


def inputs(time: int = TIME) -> torch.Tensor:
    return torch.randn(2, time, D, generator=generator(), dtype=torch.float64)


def resets() -> torch.Tensor:
    reset = torch.zeros(2, TIME, dtype=torch.bool)
    reset[0, 3] = reset[1, 1] = reset[1, 2] = True
    return reset


def linear(x, module):
    return x @ module.weight.T + module.bias


def parts(mixer, x):
    """phi(q), phi(k), gamma, v and beta of the equations, (b, t, h, channels)."""
    split = lambda module: linear(x, module).unflatten(-1, (mixer.n_heads, -1))  # noqa: E731
    outer = lambda a, b: torch.einsum("bthi,bthj->bthij", a, b).flatten(-2)  # noqa: E731
    relu, sigmoid = (lambda y: y.clamp(min=0)), torch.sigmoid
    k = outer(relu(split(mixer.p1)), relu(split(mixer.k)))
    q = outer(relu(split(mixer.p2)), relu(split(mixer.q)))
    gamma = outer(sigmoid(split(mixer.p3)), sigmoid(split(mixer.gamma)))
    return q, k, gamma, split(mixer.v), sigmoid(split(mixer.beta))


def equations(mixer, x, reset, *, r=None, floor=1e-5, variant="paper", **_):
    """Outputs, and the last C and s of every sequence, or the terms of AReLiT, all r of them."""
    released = variant == "released"
    q, k, gamma, v, beta = parts(mixer, x)
    h, m, d = mixer.n_heads, q.shape[-1], v.shape[-1]
    outputs, states = torch.zeros(*x.shape[:2], h * d, dtype=x.dtype), []
    for b in range(len(x)):
        for i in range(h):
            for t in range(x.shape[1]):
                if t == 0 or reset[b, t]:
                    C, s, n = torch.zeros(d, m, dtype=x.dtype), torch.zeros(m, dtype=x.dtype), 0
                    vv, kk = [torch.zeros(d, dtype=x.dtype)] * (r or 0), [s] * (r or 0)
                n = n + 1
                g, e = gamma[b, t, i], beta[b, t, i]
                kept = 1 - torch.outer(e, g) if released else torch.outer(1 - e, 1 - g)
                C = kept * C + torch.outer(e * v[b, t, i], g * k[b, t, i])
                s = (1 - g) * s + g * k[b, t, i]
                sums = C
                if r is not None:
                    if released:
                        cos = [math.cos((2 * math.pi * j / (r - 1) - math.pi) * (n + 1)) for j in range(r)]
                    else:
                        cos = [math.cos(2 * math.pi * j / r * n) for j in range(r)]
                    vv = [(1 - e) * old + cos[j] * e * v[b, t, i] for j, old in enumerate(vv)]
                    kk = [(1 - g) * old + cos[j] * g * k[b, t, i] for j, old in enumerate(kk)]
                    sums = (1 if released else 2 / r) * sum(
                        torch.outer(left, right) for left, right in zip(vv, kk, strict=True)
                    )
                below = s @ q[b, t, i]
                below = (2 * r if r else 1) * below + floor if released else below.clamp(min=floor)
                a = sums @ q[b, t, i] / below
                outputs[b, t, i * d : (i + 1) * d] = a
            states.append((C.T, s, vv, kk, n))
    return linear(outputs, mixer.out), states


@pytest.mark.parametrize("reset", [torch.zeros(2, TIME, dtype=torch.bool), resets()], ids=["one", "several"])
@pytest.mark.parametrize("name", VARIANTS)
def test_outputs_gradients_and_state_are_those_of_the_equations(name, reset):
    mixer = make(**VARIANTS[name]).double()
    x = inputs().requires_grad_()
    expected, states = equations(mixer, x, reset, **VARIANTS[name])
    y, state = mixer(x, reset=reset)
    assert_agree(y, expected)
    h, r = mixer.n_heads, VARIANTS[name].get("r")
    for number, (C, s, vv, kk, n) in enumerate(states):
        row, i = divmod(number, h)
        if r is None:
            assert_agree(state[row, i], torch.cat([C, s[:, None]], 1))
        else:
            # the others are equal to these; for an even r of the released code, s is beside them
            released = mixer.is_released
            kept, beside = (range(r // 2, r), 1 - r % 2) if released else (range(r // 2 + 1), 0)
            assert_agree(state.k[row, i].T[beside:], torch.stack([kk[j] for j in kept]))
            assert_agree(state.v[row, i][beside:], torch.stack([vv[j] for j in kept]))
            assert_agree(state.k[row, i, :, 0], s)
            assert state.t[row].item() == n % (2 * (r - 1) if released else r)
    wanted = [x, *mixer.parameters()]
    cotangent = torch.randn(y.shape, generator=generator(1), dtype=torch.float64)
    options = {"allow_unused": True, "materialize_grads": True}
    actual, correct = (torch.autograd.grad(z, wanted, cotangent, **options) for z in (y, expected))
    assert_agree(actual, correct)


def test_arelit_nears_relit_as_its_period_grows_beyond_twice_the_sequence():
    exact = make(n_heads=2).double()
    distances = []
    for r in (2, 6, 2 * TIME + 1):
        other = make(n_heads=2, r=r).double()
        distances.append((other(inputs())[0] - exact(inputs())[0]).abs().max().item())
    assert distances[0] > distances[1] > 1e-3
    # no two of the steps 1 .. TIME have a sum or a difference that is a multiple of r
    assert distances[2] < 1e-12


def test_the_time_of_arelit_stays_within_its_period():
    mixer = make(n_heads=2, r=5).double()
    _, state = mixer(inputs(TIME))
    assert state.t.tolist() == [[4.0], [4.0]]
    whole, _ = mixer(torch.cat([inputs(TIME), inputs(6)], 1))
    later, state = mixer(inputs(6), state)
    assert_agree(later, whole[:, TIME:])
    assert state.t.tolist() == [[0.0], [0.0]]


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "large floor"])
def test_token_mixing_is_what_values_are_multiplied_by(name):
    mixer = make(**VARIANTS[name]).double()
    x, mixing = inputs(), torch.zeros(2, TIME, TIME, dtype=torch.float64)
    # what comes before the projection is read through an identity
    with torch.no_grad():
        mixer.out.weight.copy_(torch.eye(D))
    for m in range(TIME):
        values = torch.zeros_like(x)
        values[:, m] = 1
        # values that are 1 at step m alone, in every channel
        hook = mixer.v.register_forward_hook(lambda *_, values=values: values)
        mixing[:, :, m] = mixer(x, reset=resets())[0].abs().mean(-1)
        hook.remove()
    assert_agree(mixer.token_mixing(x, reset=resets()), mixing)


def test_transitions_are_the_decays_of_all_entries():
    x = inputs()
    mixer = make(n_heads=2).double()
    _, _, gamma, _, beta = parts(mixer, x)
    magnitude, phase = mixer.transitions(x)
    assert phase is None
    assert_agree(magnitude, torch.einsum("bthi,bthj->bthij", 1 - gamma, 1 - beta).flatten(2))
    approximate = make(n_heads=2, r=3).double()
    assert_agree(approximate.transitions(x).magnitude, torch.cat([1 - gamma, 1 - beta], -1).flatten(2))


def test_transitions_of_the_released_code_are_joint():
    mixer = make(n_heads=2, variant="released").double()
    _, _, gamma, _, beta = parts(mixer, inputs())
    expected = 1 - torch.einsum("bthi,bthj->bthij", gamma, beta).flatten(2)
    assert_agree(mixer.transitions(inputs()).magnitude, expected)


@pytest.mark.parametrize("r", [4, 5, 8])
def test_the_released_terms_join_keys_and_values_of_other_steps(r):
    mixer = make(r=r, variant="released", floor=1e-20).double()
    with torch.no_grad():
        # nothing is forgotten, and features are 1
        for linear_, bias in [(mixer.p3, 0.0), (mixer.gamma, -20.0), (mixer.beta, -20.0)]:
            linear_.weight.zero_()
            linear_.bias.fill_(bias)
        for linear_ in (mixer.k, mixer.q, mixer.p1, mixer.p2):
            linear_.weight.zero_()
            linear_.bias.fill_(1.0)
    mixing = mixer.token_mixing(inputs())[0] / torch.sigmoid(torch.tensor(-20.0, dtype=torch.float64))
    count = torch.arange(1, TIME + 1, dtype=torch.float64)
    # what the key of one step and the value of another make together; steps are counted from 2
    apart, both = count[:, None] - count, count[:, None] + count + 2
    meets = (apart % (r - 1) == 0).double() + (both % (r - 1) == 0).double()
    pairs = torch.where(apart % 2 == 0, 1, -1) * ((r - 1) / 2 * meets + 1) / (2 * r)
    # of all keys so far, over s, which counts them
    expected = (pairs.cumsum(0) / count[:, None]).abs().tril()
    torch.testing.assert_close(mixing, expected, rtol=1e-6, atol=1e-6)


def test_gates_that_are_fully_open_forget_all_and_have_gradients():
    mixer = make(n_heads=2).float()
    with torch.no_grad():
        for gate in (mixer.p3, mixer.gamma, mixer.beta):
            gate.bias.fill_(200.0)
    x = inputs().float().requires_grad_()
    y, _ = mixer(x)
    y.sum().backward()
    assert torch.isfinite(x.grad).all()
    # what is left is the step's own value, or nothing where features vanish
    q, k, _, v, _ = parts(mixer, x)
    seen = ((q * k).sum(-1, keepdim=True) > 1e-5) * v
    assert_agree(y, linear(seen.flatten(2), mixer.out))


def test_parameters_are_those_of_the_released_code():
    one, few = D * D + D, lambda n: D * n + n
    for arguments, h, eta in [({}, 1, 4), ({"n_heads": 2, "eta": 3}, 2, 3), ({"r": 4}, 1, 4)]:
        mixer = make(**arguments)
        assert sum(p.numel() for p in mixer.parameters()) == 6 * one + 3 * few(h * eta)
    for name, parameter in make(n_heads=2, eta=3).named_parameters():
        if name.endswith("bias"):
            assert not parameter.any()
        else:
            assert_agree(parameter @ parameter.T, 2 * torch.eye(len(parameter)), name)
    marked = {name for name, group in groups_of(make()).items() if group.name == "transition"}
    assert marked == {f"{gate}.{kind}" for gate in ("p3", "gamma", "beta") for kind in ("weight", "bias")}


def test_the_released_start_is_that_of_the_released_code():
    eye = torch.eye(D)
    mixer = make(n_heads=2, eta=3, variant="released")
    for name, parameter in mixer.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any()
        else:
            gain = 4 if name in ("q.weight", "p2.weight") else 2
            for head in parameter.chunk(1 if name == "out.weight" else 2):
                assert_agree(head @ head.T, gain * torch.eye(len(head)), name)
    mixer = make(n_heads=2, eta=3, r=4, variant="released")
    for names in (("k", "q", "v", "beta", "gamma"), ("p1", "p2", "p3")):
        together = torch.cat([getattr(mixer, name).weight for name in names])
        assert_agree(together.T @ together, 2 * eye, str(names))
    assert_agree(mixer.out.weight @ mixer.out.weight.T, 2 * eye)


def test_state_size_counts_the_state_that_is_kept():
    assert make(n_heads=2, eta=3).state_size == 2 * 9 * 4
    assert make(n_heads=2, eta=3, r=5).state_size == 2 * 3 * (9 + 3) + 1
    assert make(n_heads=2, eta=3, r=4).state_size == 2 * 3 * (9 + 3) + 1
    assert [make(width).n_heads for width in (6, 32, 64)] == [1, 2, 4]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_heads": 4}, "`d_model` must be a positive multiple of `n_heads` = 4; got 6"),
        ({"eta": 0}, "`eta` must be at least 1; got 0"),
        ({"r": 0}, "`r` must be at least 1; got 0. None is ReLiT, without approximation."),
        ({"r": 1, "variant": "released"}, '`r` must be at least 2 with `variant="released"`; got 1.'),
        ({"variant": "code"}, "there is no `variant` 'code'"),
        ({"floor": 0.0}, "`floor` must be positive and finite; got 0.0"),
    ],
)
def test_argument_errors(arguments, message):
    with pytest.raises(ValueError) as error:
        make(**arguments)
    assert message in str(error.value)
