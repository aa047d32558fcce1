import math

import pytest
import torch

from linrec.mixers import build
from linrec.mixers.hgrn2 import HGRN2
from linrec.models import LanguageModel, ModelConfig
from linrec.nn import groups_of
from linrec.ops.core.call import recording
from linrec.testing import assert_agree, generator

D, TIME = 8, 7
RESET = torch.tensor([[False] * TIME, [False, False, True, False, False, True, False]])


def make(d_model: int = D, **arguments) -> HGRN2:
    torch.manual_seed(0)
    mixer = build("hgrn2", d_model, **{"n_heads": 2} | arguments)
    assert isinstance(mixer, HGRN2)
    return mixer


def inputs() -> torch.Tensor:
    return torch.randn(2, TIME, D, generator=generator(), dtype=torch.float64)


def gates(mixer, x):
    """log g and 1 - g, (b, t, h, d)."""
    with recording() as calls:
        mixer(x)
    return calls[-1].inputs.log_decay, calls[-1].inputs.k


def linear(x, module):
    y = x @ module.weight.T
    return y if module.bias is None else y + module.bias


def sigmoid(z):
    return 1 / (1 + (-z).exp())


def silu(z):
    return z * sigmoid(z)


def layer_norm(y, norm):
    y = y - y.mean(-1, keepdim=True)
    return y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight + norm.bias


def rms_norm(y, norm):
    return y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight


def forget(mixer, x, beta):
    return (beta + (1 - beta) * sigmoid(linear(x, mixer.g))).unflatten(-1, (mixer.n_heads, -1))


def by_hand(mixer, x, h, beta=0.0, *, act=silu, gate=sigmoid, norm=layer_norm):
    """The paper's equations, step by step in float64."""
    outputs, g = [], forget(mixer, x, beta)
    for t in range(x.shape[1]):
        i = act(linear(x[:, t], mixer.i)).unflatten(-1, (mixer.n_heads, -1))
        o = gate(linear(x[:, t], mixer.o)).unflatten(-1, (mixer.n_heads, -1))
        h = g[:, t, :, :, None] * h + (1 - g[:, t])[..., None] * i[:, :, None, :]
        outputs.append((h * o[..., None]).sum(2).flatten(1))
    return linear(norm(torch.stack(outputs, 1), mixer.norm), mixer.out), h


# arguments of each variant, and what it does to the paper's equations
VARIANTS = {
    "paper": ({}, {}),
    "a bound": ({"lower_bound": 0.7}, {"beta": 0.7}),
    "other heads": ({"n_heads": 4, "lower_bound": 0.1}, {"beta": 0.1}),
    "without expansion": ({"n_heads": D}, {}),
    "released code": (
        {"input_activation": "none", "output_gate": "silu", "bias": False, "output_norm": "rms"},
        {"act": lambda z: z, "gate": silu, "norm": rms_norm},
    ),
    "no norm": ({"output_norm": "none"}, {"norm": lambda y, norm: y}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_the_layer_and_its_variants_are_the_papers_equations(name):
    arguments, changes = VARIANTS[name]
    mixer, x = make(**arguments).double(), inputs().requires_grad_()
    before = torch.randn(mixer.init_state(2).shape, generator=generator(1), dtype=x.dtype).requires_grad_()
    y, state = mixer(x, before)
    expected, expected_state = by_hand(mixer, x, before, **changes)
    assert_agree(y, expected)
    assert_agree(state, expected_state)
    upstream = torch.randn(y.shape, generator=generator(2), dtype=y.dtype)
    wanted = [x, before, *(p for name, p in mixer.named_parameters() if not name.startswith("bounds."))]
    for ours, theirs in zip(
        torch.autograd.grad(y, wanted, upstream), torch.autograd.grad(expected, wanted, upstream), strict=True
    ):
        assert_agree(ours, theirs)


def test_token_mixing_is_the_mean_over_heads_of_what_inputs_are_multiplied_by():
    mixer, x = make(lower_bound=0.3).double(), inputs()
    g, o = forget(mixer, x, 0.3), sigmoid(linear(x, mixer.o)).unflatten(-1, (2, -1))
    expected = torch.zeros(2, TIME, TIME, dtype=x.dtype)
    for n in range(TIME):
        for m in range(n + 1):
            kept = g[:, m + 1 : n + 1].prod(1)
            expected[:, n, m] = (o[:, n] * kept * (1 - g[:, m])).sum(-1).abs().mean(-1)
    assert_agree(mixer.token_mixing(x), expected)
    document = RESET.cumsum(1)
    seen = document[:, :, None] == document[:, None, :]
    assert_agree(mixer.token_mixing(x, reset=RESET), expected * seen)


@pytest.mark.parametrize("kind", ["increasing", "decreasing", "random"])
def test_a_layer_takes_its_own_row_of_the_shared_bounds(kind):
    layers = [make(lower_bound=kind).double() for _ in range(3)]
    HGRN2.share(layers)
    gamma = torch.nn.init.normal_(layers[0].bounds.gamma)
    p = gamma.exp() / gamma.exp().sum(0)
    rows = {
        "increasing": p.cumsum(0) - p[0],
        "decreasing": (p.cumsum(0) - p[0]).flip(0),
        "random": sigmoid(gamma),
    }[kind]
    x, upstream = inputs(), torch.randn(2, TIME, D, generator=generator(2), dtype=torch.float64)
    for mixer, beta in zip(layers, rows, strict=True):
        y, expected = mixer(x)[0], by_hand(mixer, x, mixer.init_state(2), beta)[0]
        assert_agree(y, expected)
        (ours,), (theirs,) = (
            torch.autograd.grad(of, gamma, upstream, retain_graph=True) for of in (y, expected)
        )
        assert_agree(ours, theirs)


def test_a_model_shares_one_parameter_of_bounds_over_its_layers():
    model = LanguageModel(
        ModelConfig(vocab_size=6, n_outputs=5, d_model=D, n_layers=3, mixer="hgrn2", d_channel_mixing=8)
    )
    assert [name for name, _ in model.named_parameters() if "bounds" in name] == [
        "blocks.0.mixer.bounds.gamma"
    ]
    starts = [mixer.bounds(mixer.layer)[0].item() for mixer in model.mixers]
    assert starts == pytest.approx([0, 1 / 3, 2 / 3])
    with pytest.raises(ValueError, match="`layers` must have one number of channels and one"):
        HGRN2.share([make(), make(lower_bound=0.5)])


def test_saturated_gates_keep_their_digits_and_gradients():
    mixer = make(lower_bound=0.0)
    with torch.no_grad():
        mixer.g.weight.zero_()
        # 1 - g is e^-30 where g rounds to one, and g is e^-200, zero in float32
        mixer.g.bias.copy_(torch.tensor([30.0, -200.0] * (D // 2)))
    log_g, key = gates(mixer, torch.zeros(1, 1, D))
    # beside one, no tolerance would see it
    assert_agree(key.flatten()[::2] * math.exp(30), torch.ones(D // 2))
    assert_agree(log_g.exp().flatten(), torch.tensor([1.0, 0.0] * (D // 2)))
    mixer(torch.randn(1, 5, D, generator=generator()))[0].sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in mixer.parameters())


def test_a_gate_that_is_one_to_rounding_does_not_exceed_it():
    # with this bound, the sum of both parts rounds to more than one
    mixer = make(512, lower_bound=0.26571574807167053)
    with torch.no_grad():
        mixer.g.weight.zero_()
        mixer.g.bias.copy_(torch.linspace(8, 40, 512))
    log_g, _ = gates(mixer, torch.zeros(1, 1, 512))
    assert log_g.max() <= 0 and log_g.min() > -1e-3


def test_a_learned_bound_that_is_zero_to_rounding_has_gradients():
    layers = [make() for _ in range(2)]
    HGRN2.share(layers)
    with torch.no_grad():
        layers[0].bounds.gamma[1] = -200
    assert (layers[1].bounds(1) == 0).all()
    layers[1](torch.randn(1, 5, D, generator=generator()))[0].sum().backward()
    assert layers[0].bounds.gamma.grad.isfinite().all()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        # g, i, o and out are D x D with a bias; the bounds of a stack of one; a norm
        ({}, 4 * (D * D + D) + D + 2 * D),
        ({"n_heads": 1}, 4 * (D * D + D) + D + 2 * D),
        ({"lower_bound": 0.0, "bias": False, "output_norm": "rms"}, 4 * D * D + D),
    ],
)
def test_parameter_counts(arguments, expected):
    assert sum(p.numel() for p in make(**arguments).parameters()) == expected


def test_initial_distribution_is_that_of_torchs_linear():
    for name, parameter in make(256, output_norm="none", lower_bound=0.0).named_parameters():
        assert parameter.abs().max().item() == pytest.approx(1 / 16, rel=0.05), name
        assert parameter.std().item() == pytest.approx(1 / 16 / math.sqrt(3), rel=0.1), name


def test_only_the_forget_gate_and_its_bounds_are_marked():
    marked = {name for name, group in groups_of(make()).items() if group.name == "transition"}
    assert marked == {"g.weight", "g.bias", "bounds.gamma"}


def test_heads_are_as_wide_as_the_papers_where_the_model_is():
    assert [build("hgrn2", width).n_heads for width in (6, 128, 768, 1024)] == [1, 1, 6, 8]
    assert make().state_size == 2 * 4 * 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_heads": 3}, "`d_model` must be a positive multiple of `n_heads` = 3; got 8"),
        ({"lower_bound": 1.0}, "`lower_bound` must be a number in [0, 1); got 1.0"),
        ({"lower_bound": "rising"}, "there is no `lower_bound` 'rising'"),
        ({"input_activation": "relu"}, "there is no `input_activation` 'relu'"),
        ({"output_gate": "sigmiod"}, "there is no `output_gate` 'sigmiod'; did you mean 'sigmoid'"),
        ({"output_norm": "batch"}, "there is no `output_norm` 'batch'"),
    ],
)
def test_argument_errors(arguments, message):
    with pytest.raises(ValueError) as error:
        make(**arguments)
    assert message in str(error.value)


def test_grouped_heads_share_gates_and_inputs():
    grouped, whole = (make(n_heads=4, kv_heads=heads, lower_bound=0.2).double() for heads in (2, 4))
    weights = grouped.state_dict()
    for name in ("g.weight", "g.bias", "i.weight", "i.bias"):
        # of each head, D / 4 rows
        weights[name] = weights[name].unflatten(0, (2, -1)).repeat_interleave(2, 0).flatten(0, 1)
    whole.load_state_dict(weights)
    x = inputs()
    for ours, theirs in zip(grouped(x, reset=RESET), whole(x, reset=RESET), strict=True):
        assert_agree(ours, theirs)


def test_grouped_heads_of_a_stack_share_bounds_as_wide_as_their_gates():
    layers = [make(n_heads=4, kv_heads=2) for _ in range(3)]
    HGRN2.share(layers)
    assert layers[0].bounds.gamma.shape == (3, D // 2)
    assert layers[2](inputs().float())[0].shape == (2, TIME, D)


@pytest.mark.parametrize("gate", ["relu", "elu", "none"])
def test_the_output_gate_may_be_a_feature_map(gate):
    phi = {"relu": torch.relu, "elu": lambda z: torch.where(z > 0, z + 1, z.exp()), "none": lambda z: z}
    mixer, x = make(output_gate=gate).double(), inputs()
    y, h = mixer(x)
    assert_agree((y, h), by_hand(mixer, x, torch.zeros_like(h), gate=phi[gate]))
