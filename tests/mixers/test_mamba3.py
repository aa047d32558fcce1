import math

import pytest
import torch
from torch.nn import functional

from linrec.mixers import build
from linrec.mixers.mamba3 import Mamba3, TrapezoidState, trapezoidal_gate_loop
from linrec.nn import groups_of
from linrec.ops.gate_loop import gate_loop
from linrec.testing import assert_agree, check_split, check_steps, generator, reset_mask

D, N, TIME = 8, 6, 7
# of every kind: groups, angles of all channels, a floor that is reached, the norms
CASES = {
    "paper": {},
    "odd state": {"d_state": 5, "n_heads": 2},
    "groups": {"n_heads": 4, "n_groups": 2, "rope_fraction": 1.0, "output_norm": "head"},
    "heavy tail": {"n_heads": 2, "rate": "heavy_tail", "A_floor": 0.7, "biases": "C"},
    "classical": {"discretization": "classical", "rotation": "standard", "biases": "B", "output_norm": "rms"},
    "euler": {"discretization": "euler", "rotation": "none", "biases": "none"},
    "norm after gate": {"n_heads": 2, "output_norm": "rms", "norm_before_gate": False},
}


def make(d_model: int = D, **arguments) -> Mamba3:
    torch.manual_seed(0)
    mixer = build("mamba3", d_model, **{"d_state": N} | arguments)
    assert isinstance(mixer, Mamba3)
    return mixer


def trained(**arguments) -> Mamba3:
    """A mixer in float64 with steps, rates and weights of all sizes, none of them as they start."""
    mixer = make(**arguments).double()
    with torch.no_grad():
        for key, parameter in mixer.named_parameters():
            if key.endswith(("bias", "norm.weight", "D")):
                parameter.add_(torch.randn(parameter.shape, generator=generator(1)))
        for linear in (mixer.zXBC, mixer.dt, mixer.A, mixer.lambda_, mixer.theta):
            if linear is not None:
                linear.weight.mul_(3)
        mixer.dt.bias.copy_(torch.linspace(-2, 2, mixer.n_heads))
    return mixer


def inputs(time: int = TIME, seed: int = 0) -> torch.Tensor:
    return torch.randn(2, time, D, generator=generator(seed), dtype=torch.float64)


def rotation(angles: list[torch.Tensor], width: int) -> torch.Tensor:
    """The matrix that turns the first pairs of `width` channels."""
    blocks = [
        torch.stack([torch.stack([a.cos(), -a.sin()]), torch.stack([a.sin(), a.cos()])]) for a in angles
    ]
    return torch.block_diag(*blocks, torch.eye(width - 2 * len(angles), dtype=torch.float64))


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def by_hand(mixer, row, reset=None, *, arguments):
    """Return y (t, d_model) and h (heads, N, P) of one row (t, d_model), head by head and step by step.

    The complex state of eq. 25, which turns itself: R_t is a matrix, and B and C do not turn.
    """
    has = {"discretization": "trapezoidal", "rotation": "data", "rope_fraction": 0.5} | arguments
    n, heads, groups = has.get("d_state", N), mixer.n_heads, has.get("n_groups", 1)
    width, pairs = 2 * D // heads, int(n * has["rope_fraction"]) // 2
    states, outputs = [], []
    for i in range(heads):
        h, past, total, steps = torch.zeros(n, width, dtype=row.dtype), 0.0, torch.eye(n).double(), []
        for t, u in enumerate(row):
            _, X, B, C = (mixer.zXBC.weight @ u).split([2 * D, 2 * D, groups * n, groups * n])
            X, group = X[i * width : (i + 1) * width], i // (heads // groups)
            B, C = (part[group * n : (group + 1) * n] for part in (B, C))
            B, C = rms(B, mixer.B_norm.weight), rms(C, mixer.C_norm.weight)
            B = B if mixer.B_bias is None else B + mixer.B_bias[i]
            C = C if mixer.C_bias is None else C + mixer.C_bias[i]
            dt = functional.softplus(mixer.dt.weight[i] @ u + mixer.dt.bias[i])
            raw = mixer.A.weight[i] @ u
            if has.get("rate") == "heavy_tail":
                A = 1 + raw if raw >= 0 else 1 / (1 - raw)
            else:
                A = functional.softplus(raw)
            alpha = torch.exp(-dt * torch.maximum(A, torch.tensor(has.get("A_floor", 1e-4), dtype=A.dtype)))
            lam = {"classical": 0.5, "euler": 1.0}.get(has["discretization"])
            lam = torch.sigmoid(mixer.lambda_.weight[i] @ u) if lam is None else lam
            angles = []
            if has["rotation"] == "data":
                angles = list(dt * math.pi * torch.tanh(mixer.theta.weight @ u))
            elif has["rotation"] == "standard":
                angles = list(torch.tensor([10000.0 ** (-j / pairs) for j in range(pairs)], dtype=A.dtype))
            # the released code turns the other way than the paper, as if theta had the other sign
            R = rotation(angles, n).T
            if reset is not None and reset[t]:
                h, past, total = torch.zeros_like(h), 0.0, torch.eye(n).double()
            h = alpha * R @ (h + (1 - lam) * dt * past) + lam * dt * torch.outer(B, X)
            past, total = torch.outer(B, X), R @ total
            steps.append(C @ h + mixer.D[i, 0] * X)
        # the mixer's state does not turn
        states.append(total.T @ h)
        outputs.append(torch.stack(steps))
    Y, gate = torch.stack(outputs, 1), functional.silu(row @ mixer.zXBC.weight[: 2 * D].T)
    flat, norm = Y.flatten(1), has.get("output_norm", "none")
    if not has.get("norm_before_gate", True):
        flat, gate = flat * gate, 1
    if norm == "head":
        flat = torch.cat([rms(part, 1) for part in flat.chunk(heads, -1)], -1) * mixer.norm.weight
    elif norm == "rms":
        flat = rms(flat, mixer.norm.weight)
    return (flat * gate) @ mixer.out.weight.T, torch.stack(states)


@pytest.mark.parametrize("case", CASES)
def test_the_layer_is_the_papers_equations(case):
    mixer, x, reset = trained(**CASES[case]), inputs(), reset_mask(2, TIME, rate=0.3)
    assert reset[:, 1:].any()
    x.requires_grad_()
    for cuts in (None, reset):
        y, state = mixer(x, reset=cuts)
        rows = [
            by_hand(mixer, row, None if cuts is None else cuts[b], arguments=CASES[case])
            for b, row in enumerate(x)
        ]
        expected = [torch.stack(part) for part in zip(*rows, strict=True)]
        assert_agree([y, state.memory.S], expected, "outputs and states")
        wanted = [x, *mixer.parameters()]
        weights = [torch.randn(part.shape, generator=generator(2), dtype=torch.float64) for part in expected]
        found = torch.autograd.grad([y, state.memory.S], wanted, weights)
        assert_agree(found, torch.autograd.grad(expected, wanted, weights), "gradients")


@pytest.mark.parametrize("at", [1, 4, 6])
def test_the_trapezoid_reaches_over_a_split(at):
    mixer, x, reset = trained(n_heads=2), inputs(), torch.zeros(2, TIME, dtype=torch.bool)
    # the first row starts anew just where the second call begins
    reset[0, at] = True
    expected, last = mixer(x, reset=reset)
    y, state = mixer(x[:, :at], reset=reset[:, :at])
    z, end = mixer(x[:, at:], state, reset=reset[:, at:])
    assert_agree(torch.cat([y, z], 1), expected)
    assert_agree(end, last)
    # the last key and value matter where there is no reset
    memory = state.memory
    changed = state._replace(memory=memory._replace(v=memory.v + 1))
    other, _ = mixer(x[:, at:], changed, reset=reset[:, at:])
    assert_agree(other[0], z[0])
    assert (other[1] - z[1]).abs().max() > 1e-3


def test_angles_of_a_long_sequence_keep_their_digits():
    torch.manual_seed(0)
    mixer = make(n_heads=1)
    with torch.no_grad():
        # every angle is about a radian at each step, and the state remembers thousands of steps
        mixer.dt.bias.fill_(1.0)
        mixer.A.weight.mul_(0).sub_(20)
    x = torch.randn(1, 20_000, D, generator=generator()).abs()
    with torch.no_grad():
        found = mixer(x)[0][:, -100:]
        expected = mixer.double()(x.double())[0][:, -100:]
    assert_agree(found, expected)


def test_transitions_are_what_the_turning_state_is_multiplied_by():
    mixer, x = trained(n_heads=2), inputs(1)
    start = mixer.init_state(2)
    memory = start.memory
    one, other = (torch.randn(memory.S.shape, generator=generator(s), dtype=torch.float64) for s in (1, 2))
    left, right = (mixer(x, start._replace(memory=memory._replace(S=h)))[1] for h in (one, other))
    magnitude, phase = (part.reshape(2, 2, N) for part in mixer.transitions(x))
    assert_agree(left.memory.S - right.memory.S, magnitude[..., None] * (one - other))
    # three channels of six turn, so one pair; Phi holds its angle
    assert (phase[..., 2:] == 0).all()
    assert_agree(phase[..., 0], phase[..., 1])
    assert_agree(phase[..., 0].remainder(2 * math.pi), left.Phi)


def test_transitions_without_rotation_are_real():
    assert make(rotation="none").transitions(inputs().float()).phase is None


def test_token_mixing_is_what_values_are_multiplied_by():
    mixer, x, reset = trained(n_heads=2), inputs(), reset_mask(2, TIME)
    weights = torch.zeros(2, TIME, TIME, 2, dtype=x.dtype)
    # rows of zXBC that make X of one head, a step at a time, by linearity in X
    with torch.no_grad():
        mixer.D.zero_()
        last, mixer.out = mixer.out, torch.nn.Identity()
        mixer.out.in_features = 2 * D
        z = functional.silu(x @ mixer.zXBC.weight[: 2 * D].T)
        for m in range(TIME):

            def at_one_step(module, args, out, m=m):
                out = out.clone()
                out[..., 2 * D : 4 * D] = 0
                out[:, m, 2 * D : 4 * D] = 1
                return out

            hook = mixer.zXBC.register_forward_hook(at_one_step)
            Y = mixer.mix(x, None, reset)[0] / z
            hook.remove()
            weights[:, :, m] = Y.unflatten(-1, (2, -1))[..., 0]
        mixer.out = last
        expected = weights.abs().mean(-1)
        assert reset[:, 1:].any() and expected.count_nonzero() > 10
        assert_agree(mixer.token_mixing(x, reset=reset), expected)


def test_parameters_start_as_in_the_released_code():
    mixer = make(1024, n_heads=512, d_state=2, rope_fraction=1.0)
    dt = functional.softplus(mixer.dt.bias)
    assert dt.min() > 0.00099 and dt.max() < 0.101
    # log-uniform in (0.001, 0.1): the mean within four standard errors
    assert abs(dt.log10().mean() + 2) < 4 * 2 / math.sqrt(12 * 512)
    for ones in (mixer.D, mixer.B_bias, mixer.C_bias, mixer.B_norm.weight, mixer.C_norm.weight):
        assert (ones == 1).all()
    for linear in (mixer.zXBC, mixer.A, mixer.lambda_, mixer.theta, mixer.out):
        # torch's Linear: uniform in +- 1 / sqrt(d_in)
        assert linear.weight.abs().max() <= linear.in_features**-0.5 and linear.bias is None


def test_biases_start_in_their_range():
    mixer = make(n_heads=4, d_state=64, bias_init=(-1.0, 1.0))
    for bias in (mixer.B_bias, mixer.C_bias):
        assert bias.min() < -0.9 and bias.max() > 0.9 and abs(bias.mean()) < 4 / math.sqrt(3 * bias.numel())


def test_no_weight_decay_for_what_makes_step_and_skip():
    kept = {name for name, group in groups_of(make()).items() if not group.weight_decay}
    assert kept == {"D", "dt.bias"}
    named = {name for name, group in groups_of(make()).items() if group.name != "default"}
    assert named == {"D", "B_bias", "C_bias"}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        # z, X, B and C; dt, A and lambda with a bias; theta; norms and biases of B and C; D; out
        ({}, (32 + 2 * N) * D + 3 * D + 1 + D + 4 * N + 1 + 16 * D),
        (
            {"n_heads": 4, "n_groups": 2, "rope_fraction": 1.0, "output_norm": "rms"},
            (32 + 4 * N) * D + 12 * D + 4 + 3 * D + 2 * N + 8 * N + 4 + 16 + 16 * D,
        ),
        (
            {"discretization": "euler", "rotation": "standard", "biases": "C"},
            (32 + 2 * N) * D + 2 * D + 1 + 3 * N + 1 + 16 * D,
        ),
    ],
)
def test_parameter_counts(arguments, expected):
    assert sum(parameter.numel() for parameter in make(**arguments).parameters()) == expected


def test_the_default_sizes_are_the_papers():
    mixer = build("mamba3", 768)
    # heads of 64 channels, a state of 128, of which half turns
    assert (mixer.n_heads, mixer.d_head, mixer.d_state, mixer.pairs) == (24, 64, 128, 32)
    # the released layer has a single projection of this width
    layers = mixer.zXBC, mixer.dt, mixer.A, mixer.lambda_, mixer.theta
    assert sum(layer.out_features for layer in layers) == 4 * 768 + 2 * 128 + 3 * 24 + 32


def test_decays_and_angles_stay_in_float32():
    mixer, x = make(), inputs()
    expected = mixer.double().transitions(x)
    mixer = mixer.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = mixer.transitions(x.float())
    assert {part.dtype for part in found} == {torch.float32}
    assert_agree(found, expected)
    assert mixer.bfloat16().B_bias.dtype == torch.float32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_heads": 3}, "`expand * d_model` must be a positive multiple of `n_heads` = 3; got 16"),
        ({"n_heads": 4, "n_groups": 3}, "`n_groups` must be a positive divisor of `n_heads` = 4; got 3"),
        ({"d_state": 0}, "`d_state` must be at least 1; got 0"),
        ({"d_state": 3}, "leave a pair of the `d_state` channels to turn; got 0.5 of 3"),
        ({"rope_fraction": 1.5}, "`rope_fraction` must be at most 1"),
        ({"rate": "tail"}, "there is no `rate` 'tail'; did you mean 'heavy_tail'"),
        (
            {"discretization": "trapezoid"},
            "there is no `discretization` 'trapezoid'; did you mean 'trapezoidal'",
        ),
        ({"rotation": "rope"}, "there is no `rotation` 'rope'"),
        ({"biases": "A"}, "there is no `biases` 'A'"),
        (
            {"bias_init": (1.0, 0.0)},
            "`bias_init` must be (low, high) with -inf < low <= high; got (1.0, 0.0)",
        ),
        ({"output_norm": "layer"}, "there is no `output_norm` 'layer'"),
        ({"A_floor": -1.0}, "`A_floor` must be at least 0; got -1.0"),
        ({"dt_init": (0.2, 0.1)}, "`dt_init` must be (low, high) with 0 < low <= high; got (0.2, 0.1)"),
    ],
)
def test_argument_errors(arguments, message):
    with pytest.raises(ValueError) as error:
        make(**arguments)
    assert message in str(error.value)


def operator_inputs(time: int = 9) -> list[torch.Tensor]:
    """q, k, v, log a, dt and the weight of the current step."""
    q, k = (torch.randn(2, time, 3, 4, generator=generator(s), dtype=torch.float64) for s in (0, 1))
    v = torch.randn(2, time, 3, 2, generator=generator(2), dtype=torch.float64)
    log_a, dt, weight = torch.rand(3, 2, time, 3, generator=generator(3), dtype=torch.float64)
    return [q, k, v, -log_a, 2 * dt, weight]


def some_memory() -> TrapezoidState:
    state = TrapezoidState.zeros(2, 3, 4, 2, dtype=torch.float64)
    return TrapezoidState(*(torch.randn(part.shape, generator=generator(4)).double() for part in state))


def test_a_loop_over_time_gives_the_same():
    q, k, v, log_a, dt, weight = operator_inputs()
    state, reset = some_memory(), reset_mask(2, 9, rate=0.2)
    S, past = state.S, state.k.unflatten(-1, (3, 4, 1)) * state.v.unflatten(-1, (3, 1, 2))
    outputs = []
    for t in range(9):
        a, step, share = (part[:, t, :, None, None] for part in (log_a.exp(), dt, weight))
        S, past = (part.masked_fill(reset[:, t, None, None, None], 0) for part in (S, past))
        new = k[:, t, :, :, None] * v[:, t, :, None]
        S, past = a * S + (1 - share) * step * a * past + share * step * new, new
        outputs.append((q[:, t, :, None] @ S).squeeze(-2))
    assert reset[:, 1:].any()
    y, last = trapezoidal_gate_loop(q, k, v, log_a, dt, weight, state=state, reset=reset)
    assert_agree([y, last.S], [torch.stack(outputs, 1), S])


def test_eulers_rule_is_the_operator_with_keys_times_steps():
    q, k, v, log_a, dt, _ = operator_inputs()
    y, state = trapezoidal_gate_loop(q, k, v, log_a, dt, 1.0)
    assert_agree([y, state.S], [*gate_loop(q, dt[..., None] * k, v, log_a)])


def test_calls_with_a_state_equal_a_single_call():
    def function(x, state=None, *, reset=None):
        return trapezoidal_gate_loop(*x, state=state, reset=reset)

    check_split(function, operator_inputs(), state=some_memory())
    check_steps(function, operator_inputs(), some_memory())
