"""GILR, and the LSTM in which it is a surrogate, against the paper's equations in float64."""

import math

import pytest
import torch

from linrec.mixers import build
from linrec.nn import groups_of
from linrec.testing import assert_agree, generator, reset_mask

D, TIME = 5, 9
IMPULSES = {
    "tanh": torch.tanh,
    "relu": lambda z: z.clamp(min=0),
    "leaky_relu": lambda z: torch.where(z > 0, z, z / 100),
    "elu": lambda z: torch.where(z > 0, z, torch.expm1(z)),
}
CASES = {
    "paper": {},
    "rectified": {"impulse": "relu", "output_projection": True},
    "leaky": {"impulse": "leaky_relu"},
    "exponential": {"impulse": "elu"},
    "refined": {"refine": True, "uniform_init": True},
}
every_case = pytest.mark.parametrize("case", CASES)


def make(name: str, d_model: int = D, **arguments):
    torch.manual_seed(0)
    return build(name, d_model, **arguments)


def inputs(time: int = TIME, seed: int = 0) -> torch.Tensor:
    return torch.randn(2, time, D, generator=generator(seed), dtype=torch.float64)


def sigmoid(z):
    return 1 / (1 + torch.exp(-z))


def gate(module, x):
    f = sigmoid(x @ module.f.weight.T + module.f.bias)
    if module.r is None:
        return f
    r = sigmoid(x @ module.r.weight.T + module.r.bias)
    return r * (1 - (1 - f) ** 2) + (1 - r) * f**2


def linear(module, x):
    return x if module is None else x @ module.weight.T + module.bias


def gilr_by_hand(mixer, x, h, reset, tau):
    outputs = []
    for t in range(x.shape[1]):
        h = torch.where(reset[:, t, None], 0.0, h)
        g = gate(mixer.g, x[:, t])
        h = g * h + (1 - g) * tau(linear(mixer.i, x[:, t]))
        outputs.append(linear(mixer.out, h))
    return torch.stack(outputs, 1), h


def lstm_by_hand(mixer, x, h, c, reset, tau):
    outputs = []
    for t in range(x.shape[1]):
        h, c = (torch.where(reset[:, t, None], 0.0, part) for part in (h, c))
        before, g = h, gate(mixer.surrogate.g, x[:, t])
        h = g * h + (1 - g) * tau(linear(mixer.surrogate.i, x[:, t]))
        seen = torch.cat([before if mixer.sees_before else h, x[:, t]], -1)
        c = gate(mixer.f, seen) * c + sigmoid(linear(mixer.i, seen)) * tau(linear(mixer.z, seen))
        outputs.append(linear(mixer.out, sigmoid(linear(mixer.o, seen)) * c))
    return torch.stack(outputs, 1), h, c


def compare(ours, theirs, wanted):
    assert_agree(ours, theirs)
    cotangents = [torch.randn(tensor.shape, generator=generator(2), dtype=tensor.dtype) for tensor in theirs]
    assert_agree(
        torch.autograd.grad(ours, wanted, cotangents), torch.autograd.grad(theirs, wanted, cotangents)
    )


@every_case
def test_the_recurrence_and_its_gradients_are_the_papers_equations(case):
    mixer, reset = make("gilr", **CASES[case]).double(), reset_mask(2, TIME, rate=0.2)
    x, h = inputs().requires_grad_(), inputs(1, seed=1)[:, 0].requires_grad_()
    tau = IMPULSES[CASES[case].get("impulse", "tanh")]
    theirs = gilr_by_hand(mixer, x, h, reset, tau)
    compare(mixer(x, h, reset=reset), theirs, [x, h, *mixer.parameters()])


@pytest.mark.parametrize("variant", ["paper", "released"])
@every_case
def test_the_surrogate_lstm_and_its_gradients_are_the_papers_equations(case, variant):
    arguments = dict(CASES[case])
    if variant == "released":
        # beside the code's own bias, the uniform start is refused
        arguments |= {"variant": variant, "uniform_init": False}
    mixer, reset = make("ls_lstm", **arguments).double(), reset_mask(2, TIME, rate=0.2)
    assert mixer.sees_before == (variant == "paper")
    x = inputs().requires_grad_()
    h, c = (inputs(1, seed=seed)[:, 0].requires_grad_() for seed in (1, 2))
    y, state = mixer(x, (h, c), reset=reset)
    theirs = lstm_by_hand(mixer, x, h, c, reset, IMPULSES[CASES[case].get("impulse", "tanh")])
    compare((y, *state), theirs, [x, h, c, *mixer.parameters()])


def test_the_gates_of_the_lstm_see_the_step_before_and_no_output_of_their_own():
    mixer, x = make("ls_lstm").double(), inputs()
    surrogate, c = mixer.init_state(2)
    # another cell changes nothing but what it adds to cells
    y, (after, _) = mixer(x, (surrogate, c + 1))
    z, (same, _) = mixer(x, (surrogate, c))
    assert_agree(after, same)
    seen = torch.cat([torch.cat([surrogate[:, None], mixer.surrogate(x)[0][:, :-1]], 1), x], -1)
    left = torch.cumprod(gate(mixer.f, seen), 1)
    assert_agree(y - z, sigmoid(linear(mixer.o, seen)) * left)


@pytest.mark.parametrize("name", ["gilr", "ls_lstm"])
def test_token_mixing_is_what_the_candidate_is_multiplied_by(name):
    mixer, x, reset = make(name).double(), inputs(), reset_mask(2, TIME, rate=0.2)
    mixing = mixer.token_mixing(x, reset=reset)
    if name == "gilr":
        g = gate(mixer.g, x)
        magnitude, weight = g, 1 - g
    else:
        h, _ = mixer.surrogate(x, reset=reset)
        before = torch.where(reset[..., None], 0.0, torch.cat([0 * h[:, :1], h[:, :-1]], 1))
        seen = torch.cat([before, x], -1)
        magnitude, weight = gate(mixer.f, seen), sigmoid(linear(mixer.i, seen))
        assert_agree(mixer.transitions(x[:, :1]).magnitude, gate(mixer.f, torch.cat([0 * x, x], -1)[:, :1]))
    for m in range(TIME):
        carried = weight[:, m]
        for n in range(TIME):
            if n > m:
                carried = torch.where(reset[:, n, None], 0.0, carried * magnitude[:, n])
            assert_agree(mixing[:, n, m], carried.mean(-1) if n >= m else torch.zeros(2, dtype=x.dtype))


def test_parameter_counts():
    def count(name, **arguments):
        return sum(p.numel() for p in make(name, **arguments).parameters())

    square = D * D + D
    assert count("gilr") == 2 * square
    assert count("gilr", refine=True, output_projection=True) == 4 * square
    assert count("ls_lstm") == 2 * square + 4 * (2 * D * D + D)
    assert count("ls_lstm", refine=True, output_projection=True) == 4 * square + 5 * (2 * D * D + D)


def test_gates_start_uniform_where_asked():
    for gates in (make("gilr", 4096, uniform_init=True).g, make("ls_lstm", 512, uniform_init=True).f):
        start = torch.sigmoid(gates.f.bias.double()).sort().values
        steps = (torch.arange(len(start)) + 0.5) / len(start)
        assert (start - steps).abs().max() < 1.63 / math.sqrt(len(start))


def test_the_forget_gate_starts_where_asked():
    gates = make("ls_lstm", forget_bias_init=5.0)
    assert (gates.f.f.bias == 5).all() and not (gates.surrogate.g.f.bias == 5).any()
    with pytest.raises(ValueError, match=r"got 5\.0 beside uniform_init=True\. Leave one out\."):
        make("ls_lstm", forget_bias_init=5.0, uniform_init=True)


def test_the_gates_and_impulses_of_the_released_code_start_small():
    mixer = make("gilr", 64, init="released", output_projection=True)
    for name, parameter in mixer.named_parameters():
        if name.startswith("out."):
            assert parameter.abs().max() > 0.1
        elif name.endswith("weight"):
            assert 0.049 < parameter.abs().max() <= 0.05
            assert parameter.std().item() == pytest.approx(0.05 / math.sqrt(3), rel=0.03)
        else:
            assert not parameter.any()
    with pytest.raises(ValueError, match="both say how the gate starts"):
        make("gilr", init="released", uniform_init=True)
    with pytest.raises(ValueError, match="there is no `init` 'release'"):
        make("gilr", init="release")


def test_the_released_variant_starts_as_its_code():
    mixer = make("ls_lstm", 64, variant="released")
    for name, parameter in mixer.named_parameters():
        if name.endswith("weight"):
            assert 0.049 < parameter.abs().max() <= 0.05
            assert parameter.std().item() == pytest.approx(0.05 / math.sqrt(3), rel=0.03)
        else:
            assert (parameter == (5 if name == "f.f.bias" else 0)).all()
    assert (make("ls_lstm", variant="released", forget_bias_init=1.0).f.f.bias == 1).all()
    with pytest.raises(ValueError, match=r"got 5\.0 beside uniform_init=True"):
        make("ls_lstm", variant="released", uniform_init=True)


def test_what_forgets_is_marked():
    def marked(name, **arguments):
        groups = groups_of(make(name, **arguments))
        return {key for key, group in groups.items() if group.name == "transition" and not group.weight_decay}

    assert marked("gilr") == {"g.f.weight", "g.f.bias"}
    assert marked("ls_lstm") == {
        f"{gates}.f.{key}" for gates in ("f", "surrogate.g") for key in ("weight", "bias")
    }


@pytest.mark.parametrize("name", ["gilr", "ls_lstm"])
def test_argument_errors(name):
    with pytest.raises(ValueError, match="there is no `impulse` 'tan'; did you mean 'tanh'"):
        make(name, impulse="tan")
    with pytest.raises(ValueError, match="did you mean 'refine'"):
        make(name, refined=True)
