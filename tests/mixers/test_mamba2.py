import math

import pytest
import torch
from torch.nn import functional

from linrec.mixers import build
from linrec.mixers.mamba2 import Mamba2
from linrec.nn import groups_of
from linrec.ops.core.call import recording
from linrec.testing import assert_agree, generator, reset_mask

D, N, TIME = 8, 3, 6


def make(d_model: int = D, **arguments) -> Mamba2:
    torch.manual_seed(0)
    mixer = build("mamba2", d_model, **{"d_state": N} | arguments)
    assert isinstance(mixer, Mamba2)
    return mixer


def inputs(time: int = TIME) -> torch.Tensor:
    return torch.randn(2, time, D, generator=generator(), dtype=torch.float64)


def silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + torch.exp(-x))


def linear(layer: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return x @ layer.weight.T + (0 if layer.bias is None else layer.bias)


def convolved(conv: torch.nn.Module | None, x: torch.Tensor) -> torch.Tensor:
    """(t, channels) filtered, tap by tap."""
    if not conv.present:
        return x
    taps = conv.weight.T
    return torch.stack(
        [conv.bias + sum(taps[j] * x[t - j] for j in range(min(t + 1, len(taps)))) for t in range(len(x))]
    )


def by_hand(mixer, row, *, own="X", groups=1, phi=silu, sequential=False, before=False, limit=(0, math.inf)):
    """y (t, d_model) and S (h, P, N) of one row (t, d_model), head by head and step by step."""
    heads, width = mixer.n_heads, mixer.out.in_features // mixer.n_heads
    z, mixed = linear(mixer.zXBC, row).tensor_split([mixer.out.in_features], -1)
    mixed = convolved(mixer.conv, mixed)
    copies = {part: heads if part in own else groups for part in "XBC"}
    if sequential:
        X = silu(mixed)
        mixed = torch.cat([X, linear(mixer.BC, X)], -1)
    X, B, C = mixed.split([copies["X"] * width, copies["B"] * N, copies["C"] * N], -1)
    X = X if sequential else silu(X)
    dt = torch.log(1 + torch.exp(linear(mixer.dt, X if sequential else row))).clamp(*limit)
    states, outputs = [], []
    for h in range(heads):
        # the tensors' own head, or that of its group
        mine = {part: h if n == heads else h // (heads // groups) for part, n in copies.items()}
        X_h, B_h, C_h = (
            tensor.unflatten(-1, (copies[part], -1))[:, mine[part]]
            for part, tensor in (("X", X), ("B", B), ("C", C))
        )
        S, steps = torch.zeros(width, phi(B_h).shape[-1], dtype=row.dtype), []
        for t in range(len(row)):
            S = torch.exp(-dt[t, h] * mixer.A_log[h].exp()) * S
            S = S + dt[t, h] * torch.outer(X_h[t], phi(B_h)[t])
            steps.append(S @ phi(C_h)[t] + (0 if mixer.D is None else mixer.D[h]) * X_h[t])
        states.append(S)
        outputs.append(torch.stack(steps))
    Y, gate = torch.cat(outputs, -1), silu(z)
    if not before:
        Y = Y * gate
    if isinstance(mixer.norm, torch.nn.Identity):
        return linear(mixer.out, Y), torch.stack(states)
    pieces = [piece / (piece.square().mean(-1, keepdim=True) + 1e-5).sqrt() for piece in Y.chunk(groups, -1)]
    Y = torch.cat(pieces, -1) * mixer.norm.weight * (gate if before else 1)
    return linear(mixer.out, Y), torch.stack(states)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, {}),
        (
            {"n_heads": 4, "n_groups": 2, "D": "channel", "norm_before_gate": True},
            {"groups": 2, "before": True},
        ),
        (
            {"n_heads": 4, "n_groups": 2, "bias": True, "dt_limit": (0.3, 0.9)},
            {"groups": 2, "limit": (0.3, 0.9)},
        ),
        ({"n_heads": 2, "heads": "multi_contract"}, {"own": "C"}),
        ({"n_heads": 4, "heads": "multi_expand", "n_groups": 2}, {"own": "B", "groups": 2}),
        ({"n_heads": 2, "heads": "multi_head", "feature_map": "relu"}, {"own": "XBC", "phi": torch.relu}),
        (
            {"n_heads": 2, "projections": "sequential", "feature_map": "identity", "bias": True},
            {"sequential": True, "phi": lambda x: x},
        ),
        (
            {"n_heads": 2, "projections": "sequential", "heads": "multi_contract"},
            {"sequential": True, "own": "C"},
        ),
        ({"conv_size": None, "D": "none", "output_norm": "none"}, {}),
        ({"d_inner": 12, "n_heads": 3, "output_bias": True}, {}),
    ],
)
def test_the_layer_is_the_papers_equations(arguments, expected):
    mixer, x = make(**arguments).double(), inputs()
    with torch.no_grad():
        # not the ones that they start at; steps of all sizes
        for parameter in (mixer.D, getattr(mixer.norm, "weight", None)):
            if parameter is not None:
                parameter.copy_(torch.randn(parameter.shape, generator=generator(1)))
        mixer.dt.bias.copy_(torch.linspace(-3, 1, mixer.n_heads))
        mixer.dt.weight.mul_(3)
    y, state = mixer(x)
    S = state if not mixer.conv.present else state[1]
    for b, row in enumerate(x):
        outputs, states = by_hand(mixer, row, **expected)
        assert_agree(y[b], outputs, "outputs")
        assert_agree(S[b], states.mT, "states")


def test_the_tail_is_what_the_convolution_has_not_seen_the_end_of():
    mixer, x = make().double(), inputs()
    _, (tail, _) = mixer(x)
    assert_agree(tail, linear(mixer.zXBC, x)[:, -3:, 2 * D :])


def test_parameters_start_as_in_the_released_code():
    mixer = make(1024, n_heads=512, d_state=1)
    A, dt = mixer.A_log.exp(), functional.softplus(mixer.dt.bias)
    assert A.min() >= 1 and A.max() <= 16
    # uniform in (1, 16); log-uniform in (0.001, 0.1): means within four standard errors
    assert abs(A.mean() - 8.5) < 4 * 15 / math.sqrt(12 * 512)
    assert dt.min() > 0.00099 and dt.max() < 0.101
    assert abs(dt.log10().mean() + 2) < 4 * 2 / math.sqrt(12 * 512)
    assert (mixer.D == 1).all() and (mixer.norm.weight == 1).all()
    for taps in (mixer.conv.weight, mixer.conv.bias):
        # torch's Conv1d of four taps: uniform in +- 1/2
        assert 0.45 < taps.abs().max() <= 0.5 and abs(taps.mean()) < 4 / math.sqrt(12 * taps.numel())


def test_the_output_projection_starts_as_in_the_released_language_model():
    # a model of 6 layers of width 32: uniform in +- 1 / sqrt(64 * 6)
    weight = make(32, out_scale=6**-0.5).out.weight
    assert 0.0508 < weight.abs().max() <= 0.05103104
    assert weight.std().item() == pytest.approx(0.0294, rel=0.05)


def test_steps_are_at_least_the_floor_when_training_starts():
    mixer = make(n_heads=16, dt_init=(0.001, 0.1), dt_floor=0.01).double()
    dt = functional.softplus(mixer.dt.bias)
    assert (dt > 0.0099999).all() and torch.isclose(dt.min(), torch.tensor(0.01, dtype=dt.dtype))
    assert dt.max() > 0.02


def test_no_weight_decay_for_what_makes_decay_step_and_skip():
    kept = {name for name, group in groups_of(make()).items() if not group.weight_decay}
    assert kept == {"A_log", "D", "dt.bias"}
    named = {name for name, group in groups_of(make()).items() if group.name != "default"}
    assert named == {"D", "conv.weight"}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        # P = 16: z, X, B and C; dt; taps and their biases; A_log, dt's bias and D; norm; out
        ({}, (32 + 2 * N) * D + D + (16 + 2 * N) * 5 + 3 + 16 + 16 * D),
        ({"n_heads": 4, "n_groups": 2}, (32 + 4 * N) * D + 4 * D + (16 + 4 * N) * 5 + 12 + 16 + 16 * D),
        (
            {"d_inner": 12, "bias": True, "output_bias": False},
            (24 + 2 * N) * (D + 1) + D + (12 + 2 * N) * 5 + 15 + 12 * D,
        ),
        # X of 8 channels alone is convolved; B and C come from it, C for each of 2 heads
        (
            {"n_heads": 2, "heads": "multi_contract", "projections": "sequential", "D": "channel"},
            (16 + 8) * D + 8 * (3 * N + 2) + 8 * 5 + 4 + 16 + 16 + 16 * D,
        ),
    ],
)
def test_parameter_counts(arguments, expected):
    assert sum(parameter.numel() for parameter in make(**arguments).parameters()) == expected


def test_the_default_sizes_are_the_papers():
    mixer = build("mamba2", 768)
    # the layer of the paper's 130M model: 24 heads of 64 channels, a state of 128
    assert (mixer.n_heads, mixer.d_head, mixer.phi.d_features) == (24, 64, 128)
    assert mixer.zXBC.out_features + mixer.dt.out_features == 2 * 1536 + 2 * 128 + 24


def test_decays_stay_in_float32():
    mixer, x = make(), inputs()
    expected = mixer.double().transitions(x).magnitude
    mixer = mixer.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = mixer.transitions(x.float()).magnitude
    assert found.dtype == torch.float32
    assert_agree(found, expected)


def test_transitions_are_what_the_state_is_multiplied_by():
    mixer, x = make(n_heads=2).double(), inputs(1)
    tail, start = mixer.init_state(2)
    one, other = (torch.randn(start.shape, generator=generator(s), dtype=start.dtype) for s in (1, 2))
    (_, left), (_, right) = (mixer(x, (tail, S))[1] for S in (one, other))
    magnitude, phase = mixer.transitions(x)
    assert phase is None
    assert_agree(left - right, magnitude.reshape(2, 2, N, 1) * (one - other))


def test_token_mixing_is_what_values_are_multiplied_by():
    mixer, x, reset = make(n_heads=2).double(), inputs(), reset_mask(2, TIME)
    with recording() as calls:
        mixer(x, reset=reset)
    C, B, log_a = calls[-1].inputs.q, calls[-1].inputs.k, calls[-1].inputs.log_decay[..., 0]
    a, dt = log_a.exp(), -log_a / mixer.A_log.exp()
    expected = torch.zeros(2, TIME, TIME, dtype=x.dtype)
    for n in range(TIME):
        for m in range(n + 1):
            weight = (C[:, n] * B[:, m]).sum(-1).abs() * dt[:, m] * a[:, m + 1 : n + 1].prod(1)
            expected[:, n, m] = weight.mean(-1) * ~reset[:, m + 1 : n + 1].any(1)
    assert reset[:, 1:].any()
    assert_agree(mixer.token_mixing(x, reset=reset), expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_heads": 3}, "`expand * d_model` must be a positive multiple of `n_heads` = 3; got 16"),
        ({"d_inner": 5, "n_heads": 2}, "`d_inner` must be a positive multiple of `n_heads` = 2; got 5"),
        ({"expand": 0}, "`expand` must be at least 1; got 0"),
        ({"n_heads": 4, "n_groups": 3}, "`n_groups` must be a positive divisor of `n_heads` = 4; got 3"),
        ({"d_state": 0}, "`d_state` must be at least 1; got 0"),
        ({"heads": "multi_value"}, "there is no `heads` 'multi_value'; did you mean 'multi_head'"),
        ({"projections": "serial"}, "there is no `projections` 'serial'"),
        ({"D": "layer"}, "there is no `D` 'layer'"),
        ({"output_norm": "layer"}, "there is no `output_norm` 'layer'"),
        ({"feature_map": "cosformer"}, "`feature_map` of Mamba-2 must have no phase"),
        ({"A_init": (0.0, 1.0)}, "`A_init` must be (low, high) with 0 < low <= high; got (0.0, 1.0)"),
        ({"dt_init": (0.2, 0.1)}, "`dt_init` must be (low, high) with 0 < low <= high; got (0.2, 0.1)"),
        ({"dt_limit": (-1, 1)}, "`dt_limit` must be (low, high) with 0 <= low <= high; got (-1, 1)"),
    ],
)
def test_argument_errors(arguments, message):
    with pytest.raises(ValueError) as error:
        make(**arguments)
    assert message in str(error.value)
