import math

import pytest
import torch

from linrec.mixers import build
from linrec.mixers.retnet import RetNet
from linrec.nn import groups_of
from linrec.ops.core.call import recording
from linrec.testing import assert_agree, generator

D, TIME = 8, 7
RESET = torch.tensor([[False] * TIME, [False, False, True, False, False, True, False]])


def make(d_model: int = D, **arguments) -> RetNet:
    torch.manual_seed(0)
    mixer = build("retnet", d_model, **{"n_heads": 2} | arguments)
    assert isinstance(mixer, RetNet)
    return mixer


def inputs(d_model: int = D) -> torch.Tensor:
    return torch.randn(2, TIME, d_model, generator=generator(), dtype=torch.float64)


def turned(z, n, base):
    """z (b, dk) at position n: pairs of channels, turned by n theta_j, as rotary positions are."""
    theta = base ** (-torch.arange(z.shape[-1] // 2).double() / (z.shape[-1] // 2 - 1))
    one, other = z[:, 0::2], z[:, 1::2]
    cos, sin = torch.cos(n * theta), torch.sin(n * theta)
    return torch.stack([one * cos - other * sin, one * sin + other * cos], -1).flatten(-2)


def retention(mixer, x, gammas, *, rotate=True, base=10_000.0):
    """Heads of eq. 5 as double loops over steps: their weights (b, h, n, m), and outputs (b, n, h, dv)."""
    heads = len(gammas)
    q, k, v = (
        (x @ part.weight.T).unflatten(-1, (heads, -1)).unbind(2) for part in (mixer.q, mixer.k, mixer.v)
    )
    weights = torch.zeros(len(x), heads, TIME, TIME, dtype=x.dtype)
    for head, gamma in enumerate(gammas):
        for n in range(TIME):
            for m in range(n + 1):
                q_n, k_m = q[head][:, n], k[head][:, m] / math.sqrt(D / heads)
                if rotate:
                    q_n, k_m = turned(q_n, n, base), turned(k_m, m, base)
                weights[:, head, n, m] = gamma ** (n - m) * (q_n * k_m).sum(-1)
    return weights, torch.stack([weights[:, head] @ v[head] for head in range(heads)], 2)


def layer_norm(y):
    y = y - y.mean(-1, keepdim=True)
    return y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def by_hand(mixer, x, gammas, *, norm=layer_norm, gate=True, **options):
    y = norm(retention(mixer, x, gammas, **options)[1]).flatten(-2)
    if gate:
        g = x @ mixer.gate.weight.T
        y = g * torch.sigmoid(g) * y
    return y @ mixer.out.weight.T


PAPER = (1 - 2**-5, 1 - 2**-6)
# arguments of each ablation, the decays of the heads, and what else it does to the paper's equations
ABLATIONS = {
    "paper": ({}, PAPER, {}),
    "other widths": ({"d_v": 6, "rotary_base": 100.0}, PAPER, {"base": 100.0}),
    "no gate": ({"output_gate": False}, PAPER, {"gate": False}),
    "no norm": ({"output_norm": "none"}, PAPER, {"norm": lambda y: y}),
    "released norm": (
        {"output_norm": "rms"},
        PAPER,
        {"norm": lambda y: y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt()},
    ),
    "another eps": (
        {"output_norm": "rms", "norm_eps": 0.01},
        PAPER,
        {"norm": lambda y: y / (y.square().mean(-1, keepdim=True) + 0.01).sqrt()},
    ),
    "no decay": ({"decay": "none"}, (1, 1), {}),
    "decays of the language models": ({"decay": "log_spaced"}, (1 - 1 / 32, 1 - 1 / 512), {}),
    "one decay": ({"decay": "single"}, (127 / 128, 127 / 128), {}),
    "no rotation": ({"rotation": False}, PAPER, {"rotate": False}),
    "linear attention": ({"rotation": False, "decay": "none"}, (1, 1), {"rotate": False}),
}


@pytest.mark.parametrize("name", ABLATIONS)
def test_the_layer_and_its_ablations_are_the_papers_equations(name):
    arguments, gammas, changes = ABLATIONS[name]
    mixer, x = make(**arguments).double(), inputs().requires_grad_()
    y, expected = mixer(x)[0], by_hand(mixer, x, gammas, **changes)
    assert_agree(y, expected)
    upstream = torch.randn(y.shape, generator=generator(1), dtype=y.dtype)
    wanted = [x, *mixer.parameters()]
    for ours, theirs in zip(
        torch.autograd.grad(y, wanted, upstream), torch.autograd.grad(expected, wanted, upstream), strict=True
    ):
        assert_agree(ours, theirs)


@pytest.mark.parametrize("rotate", [True, False])
def test_token_mixing_is_the_mean_over_heads_of_what_values_are_multiplied_by(rotate):
    mixer, x = make(rotation=rotate).double(), inputs()
    weights, _ = retention(mixer, x, PAPER, rotate=rotate)
    assert_agree(mixer.token_mixing(x), weights.abs().mean(1))
    document = RESET.cumsum(1)
    seen = document[:, :, None] == document[:, None, :]
    assert_agree(mixer.token_mixing(x, reset=RESET), weights.abs().mean(1) * seen)


def test_the_state_decays_and_turns_as_the_paper_says():
    magnitude, phase = make(32, n_heads=4).double().transitions(inputs(32))
    assert_agree(magnitude.unflatten(-1, (4, 4))[:, 0], 1 - 2.0 ** -torch.arange(5, 9).double())
    assert_agree(phase[:4], 10_000.0 ** -(torch.arange(4).double() / 3))
    assert_agree(phase.unflatten(-1, (4, 4)), phase[:4].expand(4, 4))


def test_decays_of_the_language_models_are_the_same_range_for_any_number_of_heads():
    for heads in (1, 4, 16):
        mixer = make(32, n_heads=heads, decay="log_spaced").double()
        magnitude = mixer.transitions(inputs(32)).magnitude.unflatten(-1, (heads, -1))
        # 16 = 512 / 32
        expected = [1 - 1 / (32 * 16 ** (head / max(1, heads - 1))) for head in range(heads)]
        assert_agree(magnitude[:, 0], torch.tensor(expected, dtype=torch.float64))


def test_constants_keep_their_digits_in_half_precision():
    gates = []
    for dtype in (torch.bfloat16, torch.float32):
        with recording() as calls:
            make(512, n_heads=8).to(dtype)(torch.zeros(1, 2, 512, dtype=dtype))
        gates.append((calls[-1].inputs.log_decay, calls[-1].inputs.phase))
    for ours, theirs in zip(*gates, strict=True):
        assert ours.dtype == torch.float32 and torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        # q and k are D x D, v, gate and out D x 2 D
        ({}, 8 * D * D),
        ({"output_gate": False}, 6 * D * D),
        ({"d_v": 4}, 2 * D * D + 3 * 4 * D),
    ],
)
def test_parameter_counts(arguments, expected):
    assert sum(p.numel() for p in make(**arguments).parameters()) == expected


# of the code released with the paper, and of the current one
@pytest.mark.parametrize("out_gain", [1, 0.5])
def test_initial_distribution_is_that_of_the_released_code(out_gain):
    mixer = make(256) if out_gain == 1 else make(256, out_gain=out_gain)
    for name, weight in mixer.named_parameters():
        # uniform in +- gain sqrt(6 / (fan in + fan out))
        bound = (out_gain if name == "out.weight" else 2**-2.5) * math.sqrt(6 / sum(weight.shape))
        assert weight.abs().max().item() == pytest.approx(bound, rel=0.01), name
        assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02), name


def test_no_parameter_makes_a_transition():
    assert {group.name for group in groups_of(make()).values()} == {"default"}


def test_heads_are_as_wide_as_the_papers_where_the_model_is():
    assert [build("retnet", width).n_heads for width in (6, 256, 768, 1024)] == [1, 1, 3, 4]


def test_state_size_counts_complex_numbers_once():
    assert make().state_size == 2 * 2 * 8
    assert make(rotation=False).state_size == 2 * 4 * 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_heads": 3}, "`d_model` must be a positive multiple of `n_heads` = 3; got 8"),
        ({"d_v": 7}, "`d_v` must be a positive multiple of `n_heads` = 2; got 7"),
        ({"n_heads": 8}, "`d_model` / `n_heads` must be even where pairs of channels turn; got 8 / 8 = 1"),
        ({"rotary_base": 0.5}, "`rotary_base` must be at least 1; got 0.5"),
        ({"norm_eps": 0.0}, "`norm_eps` must be positive and finite; got 0.0"),
        ({"out_gain": -0.5}, "`out_gain` must be positive and finite; got -0.5"),
        ({"decay": "singel"}, "there is no `decay` 'singel'; did you mean 'single'"),
        ({"output_norm": "group"}, "there is no `output_norm` 'group'"),
    ],
)
def test_argument_errors(arguments, message):
    with pytest.raises(ValueError) as error:
        make(**arguments)
    assert message in str(error.value)
