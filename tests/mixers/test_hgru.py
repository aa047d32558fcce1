import copy

import pytest
import torch
from torch.nn import functional

from linrec.mixers import build
from linrec.mixers.hgru import HGRU
from linrec.models import LanguageModel, ModelConfig
from linrec.nn import groups_of
from linrec.testing import assert_agree, check_reset, check_split, check_steps, generator

D = 6


def make(d_model: int = D, **arguments) -> HGRU:
    torch.manual_seed(0)
    mixer = build("hgru", d_model, **arguments)
    assert isinstance(mixer, HGRU)
    return mixer


def inputs(time: int = 7) -> torch.Tensor:
    return torch.randn(2, time, D, generator=generator(), dtype=torch.float64)


def linear(x, module):
    y = x @ module.weight.T
    return y if module.bias is None else y + module.bias


def filtered(x, conv, first):
    """The channels of a short convolution from `first` on, as many as `x` has."""
    if not conv.present:
        return x
    channels = slice(first, first + x.shape[-1])
    y = torch.zeros_like(x) if conv.bias is None else conv.bias[channels].expand(x.shape)
    for lag in range(conv.width):
        before = torch.cat([torch.zeros_like(x[:, :lag]), x[:, : x.shape[1] - lag]], 1)
        y = y + conv.weight[channels, lag] * before
    return y


def sigmoid(z):
    return 1 / (1 + (-z).exp())


def silu(z):
    return z * sigmoid(z)


def by_hand(mixer, x, gamma, *, change=lambda step: step, gate=sigmoid, before=True, h=None, norm=None):
    """The paper's equations, step by step in float64; `change` is what an ablation does to one step."""
    n, norm = mixer.d_state, norm or layer_norm
    h = torch.zeros(len(x), n, dtype=torch.complex128) if h is None else h
    outputs, candidates = [], silu(filtered(linear(x, mixer.c), mixer.conv, 0))
    if mixer.mu is not None:
        mu = sigmoid(filtered(linear(x, mixer.mu), mixer.conv, mixer.c.out_features))
    for t in range(x.shape[1]):
        c = candidates[:, t].unflatten(-1, (n, -1))
        step = {
            "x": x[:, t],
            "h": h,
            "c": torch.complex(c[..., 0], c[..., 1] if mixer.complex_input else torch.zeros_like(c[..., 0])),
            "gamma": gamma,
            "theta": mixer.theta if isinstance(mixer.theta, torch.nn.Parameter) else torch.zeros(n),
        }
        if mixer.mu is not None:
            step["lambda"] = gamma + (1 - gamma) * mu[:, t]
            step |= {"forget": step["lambda"], "input": 1 - step["lambda"]}
        step = change(step)
        h = step["forget"] * torch.exp(1j * step["theta"]) * h + step["input"] * step["c"]
        o = torch.stack([h.real, h.imag], -1).flatten(-2) if mixer.is_complex else h.real
        if mixer.gate is None:
            o = norm(o, mixer.norm)
        else:
            g = gate(linear(x[:, t], mixer.gate))
            o = norm(g * o, mixer.norm) if before else g * norm(o, mixer.norm)
        outputs.append(linear(o, mixer.out))
    return torch.stack(outputs, 1), h


def layer_norm(x, norm):
    x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight + norm.bias


def rms_norm(x, norm):
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight


# arguments of each ablation of tables 8 to 11, and what it does to a step of the paper's equations
ABLATIONS = {
    "paper": ({}, {}),
    "only lower bound": (
        {"forget_gate": "bound"},
        {"change": lambda s: s | {"forget": s["gamma"], "input": 1 - s["gamma"]}},
    ),
    "no forget gate": ({"forget_gate": "none"}, {"change": lambda s: s | {"forget": 1}}),
    "no input gate": ({"input_gate": False}, {"change": lambda s: s | {"input": 1}}),
    "no output gate": ({"output_gate": "none"}, {}),
    "no phase": ({"phase": "none"}, {}),
    "no complex numbers": ({"phase": "none", "complex_input": False}, {}),
    "real input": ({"complex_input": False}, {}),
    "SiLU gate": ({"output_gate": "silu"}, {"gate": silu}),
    "norm before gate": ({"gate_before_norm": False}, {"before": False}),
    "released code": (
        {"output_gate": "silu", "gate_before_norm": False, "phase_base": 1e8},
        {"gate": silu, "before": False},
    ),
    "flash-linear-attention": (
        {
            "d_state": 9,
            "conv_size": 3,
            "conv_bias": True,
            "output_gate": "silu",
            "gate_before_norm": False,
            "output_norm": "rms",
            "phase": "none",
            "complex_input": False,
            "bias": False,
        },
        {"gate": silu, "before": False, "norm": rms_norm},
    ),
    "only lower bound, convolved": (
        {"forget_gate": "bound", "conv_size": 2, "d_state": 4},
        {"change": lambda s: s | {"forget": s["gamma"], "input": 1 - s["gamma"]}},
    ),
}


@pytest.mark.parametrize("name", ABLATIONS)
@pytest.mark.parametrize("bound", [0.0, 0.7])
def test_the_layer_and_its_ablations_are_the_papers_equations(name, bound):
    arguments, changes = ABLATIONS[name]
    mixer = make(lower_bound=bound, **arguments).double()
    x, gamma = inputs(), torch.full((mixer.d_state,), bound, dtype=torch.float64)
    start = mixer.init_state(2)
    dtype = (start if not mixer.conv.present else start[1]).dtype
    h = torch.randn(2, mixer.d_state, generator=generator(1), dtype=dtype)
    x.requires_grad_(), h.requires_grad_()
    y, state = mixer(x, h if not mixer.conv.present else (start[0], h))
    state = state if not mixer.conv.present else state[1]
    expected, expected_state = by_hand(mixer, x, gamma, h=h.to(torch.complex128), **changes)
    assert_agree(y, expected)
    assert_agree(state, expected_state if mixer.is_complex else expected_state.real)
    wanted = [x, h, *mixer.parameters()]
    for_outputs = {"grad_outputs": torch.randn(y.shape, generator=generator(2), dtype=y.dtype)}
    for_outputs |= {"allow_unused": True, "materialize_grads": True}
    for ours, theirs in zip(
        torch.autograd.grad(y, wanted, **for_outputs),
        torch.autograd.grad(expected, wanted, **for_outputs),
        strict=True,
    ):
        assert_agree(ours, theirs)


def test_the_forget_gate_refined_before_its_bound():
    mixer, x = make(refine=True, lower_bound=0.3).double(), inputs()

    def refined(s):
        f, r = sigmoid(linear(s["x"], mixer.mu)), sigmoid(linear(s["x"], mixer.r))
        g = r * (1 - (1 - f) ** 2) + (1 - r) * f**2
        magnitude = s["gamma"] + (1 - s["gamma"]) * g
        return s | {"forget": magnitude, "input": 1 - magnitude}

    expected, state = by_hand(mixer, x, torch.full((D,), 0.3, dtype=torch.float64), change=refined)
    y, h = mixer(x)
    assert_agree(y, expected)
    assert_agree(h, state)
    assert {"r.weight", "r.bias"} <= {n for n, g in groups_of(mixer).items() if g.name == "transition"}
    assert sum(p.numel() for p in mixer.r.parameters()) == D * D + D


def test_uniform_gates_start_spread_and_their_refinement_opposite():
    mixer = make(1000, refine=True, uniform_init=True, lower_bound=0.0)
    u = torch.sigmoid(mixer.mu.bias.detach()).sort().values
    # the order statistics of uniform numbers: within 5 standard deviations, 0.5 / sqrt(n) at most each
    expected = (torch.arange(1000) + 0.5) / 1000
    assert float((u - expected).abs().max()) < 5 * 0.5 / 1000**0.5
    assert u[0] >= 0.001 and u[-1] <= 0.999 + 1e-6
    assert torch.equal(mixer.r.bias, -mixer.mu.bias)
    assert make(uniform_init=True).r is None


def test_data_dependent_phases_are_a_projection_of_the_input():
    mixer, x = make(phase="data", lower_bound=0.5).double(), inputs()
    expected, state = by_hand(
        mixer,
        x,
        torch.full((D,), 0.5, dtype=torch.float64),
        change=lambda s: s | {"theta": linear(s["x"], mixer.theta)},
    )
    y, h = mixer(x)
    assert_agree(y, expected)
    assert_agree(h, state)
    # constant inputs of zero rotate as the learned phases do
    assert_agree(mixer.theta.bias, make().theta.double())


@pytest.mark.parametrize("kind", ["increasing", "decreasing", "random"])
def test_a_layer_takes_its_own_row_of_the_shared_bounds(kind):
    layers = [make(lower_bound=kind).double() for _ in range(3)]
    HGRU.share(layers)
    torch.nn.init.normal_(layers[0].bounds.gamma)
    p = functional.softmax(layers[0].bounds.gamma, 0)
    rows = {
        "increasing": p.cumsum(0) - p[0],
        "decreasing": (p.cumsum(0) - p[0]).flip(0),
        "random": sigmoid(layers[0].bounds.gamma),
    }[kind]
    for mixer, gamma in zip(layers, rows, strict=True):
        assert_agree(mixer(inputs())[0], by_hand(mixer, inputs(), gamma)[0])


def test_alone_the_bound_is_that_of_a_stack_of_one():
    increasing, none = make(), make(lower_bound=0.0)
    none.load_state_dict({k: v for k, v in increasing.state_dict().items() if not k.startswith("bounds.")})
    x = inputs().float()
    assert_agree(increasing(x)[0], none(x)[0])
    assert make(lower_bound="random").bounds(0).min() > 0


def test_only_the_lower_bound_forgets_at_one_rate_whatever_the_input():
    # with gamma = 0.5 and no phase, an input of one step halves with each step after it
    mixer = make(forget_gate="bound", lower_bound=0.5, phase="none").double()
    x = inputs(1)
    _, state = mixer(x)
    with torch.no_grad():
        mixer.c.weight.zero_(), mixer.c.bias.zero_()
    assert_agree(mixer(inputs(3), state)[1], state / 8)
    assert mixer.mu is None


def test_phases_start_as_rope_over_the_real_numbers_of_the_state():
    # RoPE turns pair k of 2 D numbers by 10000^(-2k / 2D)
    expected = torch.tensor([10_000 ** (-2 * k / (2 * D)) for k in range(D)])
    assert_agree(make().theta, expected)
    released = torch.tensor([10_000 ** (-2 * k / D) for k in range(D)])
    assert_agree(make(phase_base=1e8).theta, released)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        # c is D x 2D, mu D x D, the gate D x 2D, out 2D x D; theta D, gamma 1 x D, the norm 2 x 2D
        ({}, 3 * (D * D + D) + (2 * D * D + 2 * D) + (2 * D * D + D) + D + D + 4 * D),
        ({"lower_bound": 0.0}, 3 * (D * D + D) + (2 * D * D + 2 * D) + (2 * D * D + D) + D + 4 * D),
        ({"output_gate": "none"}, 3 * (D * D + D) + (2 * D * D + D) + D + D + 4 * D),
        ({"forget_gate": "bound"}, 2 * (D * D + D) + (2 * D * D + 2 * D) + (2 * D * D + D) + D + D + 4 * D),
        ({"phase": "none", "complex_input": False}, 4 * (D * D + D) + D + 2 * D),
        ({"d_state": 3, "bias": False, "lower_bound": 0.0}, 3 * D * (2 + 1 + 2 + 2) + 3 + 4 * 3),
        (
            {"conv_size": 4, "conv_bias": True, "output_gate": "none", "lower_bound": 0.0, "phase": "none"},
            3 * (D * D + D) + (2 * D * D + D) + 4 * D + 5 * 3 * D,
        ),
        ({"phase": "data"}, 4 * (D * D + D) + (2 * D * D + 2 * D) + (2 * D * D + D) + D + 4 * D),
    ],
)
def test_parameter_counts(arguments, expected):
    assert sum(p.numel() for p in make(**arguments).parameters()) == expected


def test_what_makes_the_transition_is_marked():
    marked = {name for name, group in groups_of(make()).items() if group.name == "transition"}
    assert marked == {"mu.weight", "mu.bias", "theta", "bounds.gamma"}


class TestStack:
    CONFIG = ModelConfig(vocab_size=6, n_outputs=5, d_model=D, n_layers=3, mixer="hgru", d_channel_mixing=8)

    @classmethod
    def make(cls) -> LanguageModel:
        torch.manual_seed(0)
        model = LanguageModel(cls.CONFIG).double()
        torch.nn.init.normal_(model.mixers[0].bounds.gamma)
        return model

    def test_one_parameter_bounds_all_layers_from_below_and_rises_over_them(self):
        model = self.make()
        first, second, third = model.mixers
        assert first.bounds is second.bounds is third.bounds
        named = [name for name, _ in model.named_parameters() if "gamma" in name]
        assert named == ["blocks.0.mixer.bounds.gamma"]
        assert first.bounds.gamma.shape == (3, D)
        rows = torch.stack([mixer.bounds(mixer.layer) for mixer in model.mixers])
        assert (rows[0] == 0).all() and (rows.diff(dim=0) > 0).all() and (rows < 1).all()

    def test_the_shared_parameter_has_the_gradients_of_all_layers(self):
        model, tokens = self.make(), torch.randint(0, 6, (2, 9), generator=generator())
        bounds = model.mixers[0].bounds
        weight = torch.randn(2, 9, 5, generator=generator(), dtype=torch.float64)

        def loss():
            return (model(tokens)[0] * weight).sum()

        (whole,) = torch.autograd.grad(loss(), bounds.gamma)
        assert whole.abs().min() > 0
        # by finite differences of the one parameter, which every layer reads
        direction = torch.randn(whole.shape, generator=generator(3), dtype=torch.float64)
        with torch.no_grad():
            bounds.gamma += 1e-5 * direction
            above = loss()
            bounds.gamma -= 2e-5 * direction
            below = loss()
        torch.testing.assert_close((above - below) / 2e-5, (whole * direction).sum(), rtol=1e-6, atol=1e-8)

    def test_streaming_and_resets(self):
        model, tokens = self.make(), torch.randint(0, 6, (2, 9), generator=generator())
        for law in (check_split, check_steps, check_reset):
            law(model, tokens)

    def test_weights_load_into_another_model_and_copies_stay_tied(self):
        model, other = self.make(), LanguageModel(self.CONFIG).double()
        other.load_state_dict(model.state_dict())
        copied = copy.deepcopy(model)
        tokens = torch.randint(0, 6, (2, 9), generator=generator())
        for twin in (other, copied):
            assert torch.equal(twin(tokens)[0], model(tokens)[0])
            assert twin.mixers[0].bounds.gamma is twin.mixers[2].bounds.gamma

    def test_a_number_is_the_bound_of_every_layer_and_is_not_shared(self):
        layers = [make(lower_bound=0.5) for _ in range(2)]
        HGRU.share(layers)
        assert [mixer.bounds for mixer in layers] == [None, None]

    def test_shared_bounds_are_as_wide_as_the_state(self):
        layers = [make(d_state=4) for _ in range(3)]
        HGRU.share(layers)
        assert layers[0].bounds.gamma.shape == (3, 4)
        assert layers[2](torch.zeros(1, 2, D))[1].shape == (1, 4)

    def test_layers_that_cannot_share_are_refused(self):
        with pytest.raises(ValueError, match="`layers` must have one number of channels and one"):
            HGRU.share([make(), make(8)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lower_bound": "rising"}, "there is no `lower_bound` 'rising'; did you mean"),
        ({"lower_bound": 1.0}, "`lower_bound` must be a number in [0, 1); got 1.0"),
        ({"lower_bound": -0.1}, "`lower_bound` must be a number in [0, 1); got -0.1"),
        ({"forget_gate": "bounds"}, "did you mean 'bound'"),
        ({"output_gate": "swish"}, "there is no `output_gate` 'swish'"),
        ({"phase": "learnt"}, "did you mean 'learned'"),
        ({"output_norm": "batch"}, "there is no `output_norm` 'batch'"),
        ({"phase_base": 0.5}, "`phase_base` must be at least 1; got 0.5"),
        ({"d_state": 0}, "`d_state` must be at least 1; got 0"),
        ({"conv_size": 0}, "must be at least 1 tap; got 0"),
        ({"bias": False, "uniform_init": True}, "`uniform_init` is of the bias of mu, and needs `bias=True`"),
        ({"forget_gate": "bound", "refine": True}, "`refine` and `uniform_init` are of mu, which"),
        ({"forget_gate": "bound", "uniform_init": True}, "`refine` and `uniform_init` are of mu, which"),
        ({"forget_gate": "none", "input_gate": False}, "needs `input_gate=True`; got False"),
    ],
)
def test_argument_errors(arguments, message):
    with pytest.raises(ValueError) as error:
        make(**arguments)
    assert message in str(error.value)


def test_input_errors():
    with pytest.raises(ValueError, match=r"`x` must have shape .* \(batch, time, 6\)"):
        make()(torch.zeros(2, 3, 5))
    with pytest.raises(TypeError, match="Embed tokens first"):
        make()(torch.zeros(2, 3, 6, dtype=torch.int64))
