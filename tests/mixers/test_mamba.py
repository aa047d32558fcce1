import math

import pytest
import torch
from torch.nn import functional

from linrec.mixers import build
from linrec.mixers.mamba import Mamba
from linrec.nn import groups_of
from linrec.ops.core.call import recording
from linrec.testing import assert_agree, generator, reset_mask

D, N, TIME = 8, 3, 6


def make(d_model: int = D, **arguments) -> Mamba:
    torch.manual_seed(0)
    mixer = build("mamba", d_model, **{"d_state": N, "dt_rank": 2} | arguments)
    assert isinstance(mixer, Mamba)
    return mixer


def spread(mixer: Mamba) -> Mamba:
    """In double precision, and no longer with the weights of the start: steps of all sizes."""
    mixer.double()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.5 * torch.randn(parameter.shape, generator=generator(parameter.numel())))
        if mixer.W_dt is not None:
            mixer.W_dt.bias.copy_(torch.linspace(-3, 1, mixer.d_inner))
    return mixer


def inputs(time: int = TIME) -> torch.Tensor:
    return torch.randn(2, time, D, generator=generator(), dtype=torch.float64)


def scanned(mixer: Mamba, x: torch.Tensor, reset: torch.Tensor | None = None) -> list[torch.Tensor]:
    """dt, B and C that the operator gets."""
    with recording() as calls:
        mixer(x, reset=reset)
    given = calls[-1].inputs
    return [given.dt, given.B[:, :, 0], given.C[:, :, 0]]


def silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + torch.exp(-x))


def linear(layer: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return x @ layer.weight.T + (0 if layer.bias is None else layer.bias)


def by_hand(mixer, row):
    """y (t, d_model) and h (c, N) of one row (t, d_model), step by step."""
    x, z = linear(mixer.xz, row).chunk(2, -1)
    if mixer.conv.present:
        taps = mixer.conv.weight.T
        bias = 0 if mixer.conv.bias is None else mixer.conv.bias
        x = torch.stack(
            [bias + sum(taps[j] * x[t - j] for j in range(min(t + 1, len(taps)))) for t in range(len(x))]
        )
    x = silu(x)
    parts = {}
    if mixer.dtBC is not None:
        parts = dict(
            zip(mixer.widths, linear(mixer.dtBC, x).split(tuple(mixer.widths.values()), -1), strict=True)
        )
    if mixer.norms is not None:
        parts = {
            name: s / (s.square().mean(-1, keepdim=True) + 0.1).sqrt() * (1 if w is None else w)
            for (name, s), w in zip(
                parts.items(), [norm.weight for norm in mixer.norms.values()], strict=True
            )
        }
    B, C = (parts.get(name, getattr(mixer, name, None)) for name in ("B", "C"))
    steps = mixer.b_dt.expand(len(x), -1) if mixer.W_dt is None else linear(mixer.W_dt, parts["dt"])
    dt = torch.log(1 + torch.exp(steps))
    h, outputs = torch.zeros(x.shape[1], N, dtype=row.dtype), []
    for t in range(len(x)):
        B_t, C_t = (weight if weight.ndim == 1 else weight[t] for weight in (B, C))
        A = -mixer.A_log.exp()
        held = torch.expm1(dt[t, :, None] * A) / A if mixer.discretization == "zoh" else dt[t, :, None]
        h = torch.exp(dt[t, :, None] * A) * h + held * x[t, :, None] * B_t
        outputs.append(h @ C_t + (0 if mixer.D is None else mixer.D * x[t]))
    return linear(mixer.out, torch.stack(outputs) * silu(z)), h


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"conv_size": None, "bias": True, "D": False},
        {"conv_size": 2, "conv_bias": False, "expand": 1, "inner_norm": "rms", "norm_eps": 0.1},
        {"inner_norm": "rms_weight", "norm_eps": 0.1},
        {"discretization": "zoh"},
        {"discretization": "zoh", "conv_size": None, "D": False, "selective": ("dt",)},
        *({"selective": parts} for parts in ((), ("dt",), ("B",), ("C",), ("B", "C"))),
    ],
)
def test_the_layer_is_the_papers_equations(arguments):
    mixer, x = spread(make(**arguments)), inputs()
    y, state = mixer(x)
    h = state if not mixer.conv.present else state[1]
    for b, row in enumerate(x):
        outputs, states = by_hand(mixer, row)
        assert_agree(y[b], outputs, "outputs")
        assert_agree(h[b], states, "states")


def test_what_is_not_selective_does_not_look_at_the_input():
    x = inputs(), torch.flip(inputs(), (1,))
    for parts in ((), ("dt",), ("B",), ("C",)):
        mixer = spread(make(selective=parts))
        found, other = scanned(mixer, x[0]), scanned(mixer, x[1])
        same = {name for name, a, b in zip(("dt", "B", "C"), found, other, strict=True) if torch.equal(a, b)}
        assert same == {"dt", "B", "C"} - set(parts)


def test_parameters_start_as_in_the_released_code():
    mixer = make(1024, dt_rank=64, d_state=16)
    A, dt = mixer.A_log.exp(), functional.softplus(mixer.W_dt.bias)
    assert_agree(A, torch.arange(1.0, 17).expand(2048, 16))
    # log-uniform in (0.001, 0.1): the mean within four standard errors
    assert dt.min() > 0.00099 and dt.max() < 0.101
    assert abs(dt.log10().mean() + 2) < 4 * 2 / math.sqrt(12 * 2048)
    # uniform in +- 1 / sqrt(64)
    weight = mixer.W_dt.weight
    assert 0.124 < weight.abs().max() <= 0.125
    assert abs(weight.std() - 0.125 / math.sqrt(3)) < 0.001 and abs(weight.mean()) < 0.001
    assert (mixer.D == 1).all()


def test_the_output_projection_starts_as_in_the_released_language_model():
    # a model of 6 layers of width 32: uniform in +- 1 / sqrt(64 * 6)
    weight = make(32, out_scale=6**-0.5).out.weight
    assert 0.0508 < weight.abs().max() <= 0.05103104
    assert weight.std().item() == pytest.approx(0.0294, rel=0.05)


def test_rates_start_as_the_ablations_say():
    assert_agree(make(A_init="constant").A_log.exp(), torch.full((16, N), 0.5))
    drawn = make(512, A_init="random", d_state=8).A_log
    assert abs(drawn.mean()) < 4 / math.sqrt(drawn.numel()) and abs(drawn.std() - 1) < 0.03


def test_steps_are_at_least_the_floor_when_training_starts():
    for parts in (("dt",), ("B",)):
        mixer = make(selective=parts, dt_init=(0.001, 0.1), dt_floor=0.01).double()
        dt = functional.softplus(mixer.b_dt if mixer.W_dt is None else mixer.W_dt.bias)
        assert (dt > 0.0099999).all() and torch.isclose(dt.min(), torch.tensor(0.01, dtype=dt.dtype))
        assert dt.max() > 0.02


def test_no_weight_decay_for_what_makes_decay_step_and_skip():
    for parts, bias in ((("dt", "B", "C"), "W_dt.bias"), ((), "b_dt")):
        kept = {name for name, group in groups_of(make(selective=parts)).items() if not group.weight_decay}
        assert kept == {"A_log", "D", bias}
    named = {name for name, group in groups_of(make()).items() if group.name != "default"}
    assert named == {"A_log", "D", "conv.weight"}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        # x and z; taps and their biases; s, B and C; W_dt and b_dt; A_log and D; out
        ({}, 32 * D + 16 * 5 + 16 * (2 + 2 * N) + 16 * 3 + 16 * (N + 1) + 16 * D),
        # B and C are N numbers each
        (
            {"selective": ("dt",), "conv_size": None, "D": False, "bias": True},
            32 * (D + 1) + 16 * 2 + 16 * 3 + 2 * N + 16 * N + 16 * D + D,
        ),
        ({"selective": ()}, 32 * D + 16 * 5 + 2 * N + 16 + 16 * (N + 1) + 16 * D),
    ],
)
def test_parameter_counts(arguments, expected):
    assert sum(parameter.numel() for parameter in make(**arguments).parameters()) == expected


def test_the_default_sizes_are_the_papers():
    mixer = build("mamba", 768)
    # the layer of the paper's 130M model
    assert (mixer.d_inner, mixer.d_state, mixer.widths["dt"]) == (1536, 16, 48)


def test_decays_stay_in_float32():
    mixer, x = spread(make()), inputs()
    expected = mixer.transitions(x).magnitude
    mixer = mixer.float()
    # what they are made of is rounded to bfloat16, and they are not
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = mixer.transitions(x.float()).magnitude
    assert found.dtype == torch.float32
    assert_agree(found, expected, dtype=torch.bfloat16)
    assert not torch.equal(found, found.bfloat16().float())


def test_transitions_are_what_the_state_is_multiplied_by():
    mixer, x = spread(make()), inputs(1)
    tail, start = mixer.init_state(2)
    one, other = (torch.randn(start.shape, generator=generator(s), dtype=torch.float64) for s in (1, 2))
    (_, left), (_, right) = (mixer(x, (tail.double(), h))[1] for h in (one, other))
    magnitude, phase = mixer.transitions(x)
    assert phase is None
    assert_agree(left - right, magnitude.reshape(2, 16, N) * (one - other))


def test_token_mixing_is_what_values_are_multiplied_by():
    mixer, x, reset = spread(make()), inputs(), reset_mask(2, TIME)
    dt, B, C = scanned(mixer, x, reset)
    A = -mixer.A_log.exp()
    expected = torch.zeros(2, TIME, TIME, dtype=x.dtype)
    for n in range(TIME):
        for m in range(n + 1):
            passed = torch.exp(dt[:, m + 1 : n + 1].sum(1)[..., None] * A)
            weight = (C[:, n, None] * passed * B[:, m, None]).sum(-1) * dt[:, m]
            expected[:, n, m] = weight.abs().mean(-1) * ~reset[:, m + 1 : n + 1].any(1)
    assert reset[:, 1:].any()
    assert_agree(mixer.token_mixing(x, reset=reset), expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"expand": 0}, "`expand` must be at least 1; got 0"),
        ({"d_state": 0}, "`d_state` must be at least 1; got 0"),
        ({"dt_rank": 0}, "`dt_rank` must be at least 1; got 0"),
        ({"selective": ("b",)}, "there is no `selective` 'b'; did you mean 'B'"),
        ({"A_init": "complex"}, "there is no `A_init` 'complex'"),
        ({"inner_norm": "rmsnorm"}, "there is no `inner_norm` 'rmsnorm'; did you mean 'rms'"),
        ({"dt_init": (0.0, 0.1)}, "`dt_init` must be (low, high) with 0 < low <= high; got (0.0, 0.1)"),
        (
            {"dt_init": (0.1, float("inf"))},
            "with 0 < low <= high; got (0.1, inf). A step of zero never moves",
        ),
        ({"dt_floor": -1.0}, "`dt_floor` must be at least 0; got -1.0"),
        ({"dt_scale": -1.0}, "`dt_scale` must be at least 0; got -1.0"),
        ({"norm_eps": float("nan")}, "`norm_eps` must be a finite number; got nan"),
        ({"selective": "dt"}, "`selective` must be a tuple of names; got 'dt'. Pass ('dt',)"),
        ({"conv_size": 0}, "must be at least 1 tap; got 0"),
    ],
)
def test_argument_errors(arguments, message):
    with pytest.raises(ValueError) as error:
        make(**arguments)
    assert message in str(error.value)
