import math

import pytest
import torch

from linrec.mixers import build
from linrec.mixers.trans_normer import TransNormer
from linrec.models import LanguageModel, ModelConfig
from linrec.nn import groups_of
from linrec.testing import assert_agree, check_reset, check_split, generator, reset_mask

D, TIME = 8, 7
RESET = torch.tensor([[False] * TIME, [False, False, True, False, False, True, False]])


def make(d_model: int = D, **arguments) -> TransNormer:
    torch.manual_seed(0)
    mixer = build("trans_normer", d_model, **{"n_heads": 2} | arguments)
    assert isinstance(mixer, TransNormer)
    return mixer


def grown(mixer: TransNormer) -> TransNormer:
    """The mixer in float64, with weights large enough for outputs that no eps decides."""
    mixer = mixer.double()
    with torch.no_grad():
        for part in (mixer.q, mixer.k, mixer.v):
            part.weight *= 20
    return mixer


def inputs() -> torch.Tensor:
    return torch.randn(2, TIME, D, generator=generator(), dtype=torch.float64)


def silu(z):
    return z / (1 + (-z).exp())


def srms_norm(o, norm):
    return o / (o.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def layer_norm(o, norm):
    o = o - o.mean(-1, keepdim=True)
    return o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight + norm.bias


def attention(mixer, x, decays, *, act=silu, theta=True):
    """a_st of the paper as loops over heads and pairs of steps: (b, h, s, t)."""
    q, k = (act(x @ part.weight.T).unflatten(-1, (len(decays), -1)) for part in (mixer.q, mixer.k))
    a = torch.zeros(len(x), len(decays), TIME, TIME, dtype=x.dtype)
    for h, decay in enumerate(decays):
        for s in range(TIME):
            for t in range(s + 1):
                turn = torch.cos(mixer.theta[h] * (s - t)) if theta else 1.0
                a[:, h, s, t] = decay ** (s - t) * (q[:, s, h] * k[:, t, h] * turn).sum(-1)
    return a


def by_hand(mixer, x, decays, *, norm=srms_norm, gate=True, **options):
    v = (x @ mixer.v.weight.T).unflatten(-1, (len(decays), -1))
    o = torch.einsum("bhst,bthd->bshd", attention(mixer, x, decays, **options), v).flatten(-2)
    o = norm(o, mixer.norm)
    if gate:
        o = o * (x @ mixer.gate.weight.T)
    return o @ mixer.out.weight.T


# 2^(-8 h / H) of two heads
PAPER = (math.exp(-(2**-4)), math.exp(-(2**-8)))
# arguments of each ablation, the decays of the heads of one layer, and what else it does to the equations
ABLATIONS = {
    "paper": ({}, PAPER, {}),
    "LRPE with decay": ({"positions": "lrpe_d"}, PAPER, {}),
    "LRPE": ({"positions": "lrpe"}, (1, 1), {}),
    "decay": ({"positions": "decay"}, PAPER, {"theta": False}),
    "no positions": ({"positions": "none"}, (1, 1), {"theta": False}),
    "geometric slopes": ({"slopes": "geometric"}, PAPER, {}),
    "the formula as it is printed": ({"slopes": "linear"}, (math.exp(-4), math.exp(-8)), {}),
    "no gate": ({"output_gate": False}, PAPER, {"gate": False}),
    "elu + 1": ({"feature_map": "elu"}, PAPER, {"act": lambda z: torch.where(z > 0, z + 1, z.exp())}),
    "no activation": ({"feature_map": "identity"}, PAPER, {"act": lambda z: z}),
    "LayerNorm": ({"output_norm": "layer"}, PAPER, {"norm": layer_norm}),
    "no norm": ({"output_norm": "none"}, PAPER, {"norm": lambda o, norm: o}),
}


@pytest.mark.parametrize("name", ABLATIONS)
def test_the_layer_and_its_ablations_are_the_papers_equations(name):
    arguments, decays, changes = ABLATIONS[name]
    mixer, x = grown(make(**arguments)), inputs().requires_grad_()
    y, expected = mixer(x)[0], by_hand(mixer, x, decays, **changes)
    assert_agree(y, expected)
    upstream = torch.randn(y.shape, generator=generator(1), dtype=y.dtype)
    wanted = [x, *mixer.parameters()]
    for ours, theirs in zip(
        torch.autograd.grad(y, wanted, upstream), torch.autograd.grad(expected, wanted, upstream), strict=True
    ):
        assert_agree(ours, theirs)


@pytest.mark.parametrize("positions", ["mix", "decay"])
def test_token_mixing_is_the_mean_over_heads_of_the_papers_a(positions):
    mixer, x = grown(make(positions=positions)), inputs()
    expected = attention(mixer, x, PAPER, theta=positions == "mix").abs().mean(1)
    assert_agree(mixer.token_mixing(x), expected)
    document = RESET.cumsum(1)
    seen = document[:, :, None] == document[:, None, :]
    assert_agree(mixer.token_mixing(x, reset=RESET), expected * seen)


# numbers of the released code
@pytest.mark.parametrize(
    ("heads", "expected"),
    [
        (1, [-8]),
        (3, [-4, -8, -2]),
        (4, [-2, -4, -6, -8]),
        (6, [-2, -4, -6, -8, -1, -3]),
        (7, [-2, -4, -6, -8, -1, -3, -5]),
    ],
)
def test_slopes_of_other_numbers_of_heads_lie_between_those_of_a_power_of_two(heads, expected):
    mixer, x = make(2 * heads, n_heads=heads).double(), torch.zeros(1, 1, 2 * heads, dtype=torch.float64)
    slopes = -mixer.transitions(x).magnitude.flatten()[::2].log()
    assert_agree(slopes, 2.0 ** torch.tensor(expected).double())
    geometric = make(2 * heads, n_heads=heads, slopes="geometric").double()
    slopes = -geometric.transitions(x).magnitude.flatten()[::2].log()
    assert_agree(slopes, 2.0 ** (-8 * torch.arange(1, heads + 1).double() / heads))


BLOCKS = {"block_size": 3, "output_gate": False}


def within_blocks(mixer, x, reset, *, theta=True):
    """Weights of DiagAttention as loops over heads and pairs of steps, (b, h, s, t)."""
    q, k = ((x @ part.weight.T).unflatten(-1, (2, -1)) for part in (mixer.q, mixer.k))
    weights = torch.zeros(len(x), 2, TIME, TIME, dtype=x.dtype)
    for b in range(len(x)):
        start = 0
        for s in range(TIME):
            if reset[b, s] or s - start == 3:
                start = s
            for h in range(2):
                scores = []
                for t in range(start, s + 1):
                    turn = torch.cos(mixer.theta[h] * (s - t)) if theta else 1.0
                    scores.append((q[b, s, h] * k[b, t, h] * turn).sum() / math.sqrt(D / 2))
                shares = torch.stack(scores).exp()
                weights[b, h, s, start : s + 1] = shares / shares.sum()
    return weights


@pytest.mark.parametrize("positions", ["mix", "lrpe", "decay", "none"])
def test_the_first_layers_attend_by_softmax_within_blocks(positions):
    mixer, x = grown(make(**BLOCKS, positions=positions)), inputs().requires_grad_()
    weights = within_blocks(mixer, x, RESET, theta=positions in ("mix", "lrpe"))
    v = (x @ mixer.v.weight.T).unflatten(-1, (2, -1))
    expected = torch.einsum("bhst,bthd->bshd", weights, v).flatten(-2) @ mixer.out.weight.T
    y, state = mixer(x, reset=RESET)
    assert_agree(y, expected)
    upstream = torch.randn(y.shape, generator=generator(1), dtype=y.dtype)
    wanted = [x, *mixer.parameters()]
    for ours, theirs in zip(
        torch.autograd.grad(y, wanted, upstream), torch.autograd.grad(expected, wanted, upstream), strict=True
    ):
        assert_agree(ours, theirs)
    assert_agree(mixer.token_mixing(x, reset=RESET), weights.abs().mean(1))
    assert mixer.transitions(x) is None
    assert state.position.tolist() == [TIME, 2] and state.cache.k.shape[1] == 2


def test_half_of_the_layers_have_blocks_and_the_others_norm_attention():
    layers = [make(**BLOCKS, positions="none", output_norm="rms") for _ in range(5)]
    TransNormer.share(layers)
    assert [mixer.blocks for mixer in layers] == [3, 3, None, None, None]
    assert [mixer.recurrence for mixer in layers] == ["softmax_attention"] * 2 + ["gate_loop"] * 3
    assert [mixer.state_size for mixer in layers] == [2 * D + 1] * 2 + [2 * 4 * 4] * 3
    assert [len(list(mixer.norm.parameters())) for mixer in layers] == [0, 0, 1, 1, 1]
    alone = make(**BLOCKS)
    assert alone.blocks == 3 and alone.state_size == 3 * D + 1


@pytest.mark.parametrize("time", [1, 2, 5])
def test_rows_whose_blocks_begin_at_different_steps_go_on_together(time):
    mixer = make(**BLOCKS).double()
    _, state = mixer(inputs(), reset=RESET)
    x = torch.randn(2, time, D, generator=generator(5), dtype=torch.float64)
    check_split(mixer, x, at=range(1, time), state=state)
    check_reset(mixer, x, reset=reset_mask(2, time, rate=0.3))


def decays_of(layers: list[TransNormer]) -> list[list[float]]:
    return [mixer.double().transitions(inputs()).magnitude[:: D // 2].tolist() for mixer in layers]


def test_decays_weaken_over_the_layers_and_end_at_none():
    layers = [make() for _ in range(3)]
    TransNormer.share(layers)
    expected = [[math.exp(-(2.0 ** (-4 * h)) * factor) for h in (1, 2)] for factor in (1, 0.5, 0)]
    for found, wanted in zip(decays_of(layers), expected, strict=True):
        assert found == pytest.approx(wanted)
    # the second layer computes with them, and has no frequencies
    second, x = grown(layers[1]), inputs()
    assert_agree(second(x)[0], by_hand(second, x, expected[1], theta=False))


def test_without_decay_temperature_all_layers_decay_alike():
    layers = [make(layer_decay=False) for _ in range(3)]
    TransNormer.share(layers)
    for found in decays_of(layers):
        assert found == pytest.approx(PAPER)


@pytest.mark.parametrize(("positions", "owners"), [("mix", [0]), ("lrpe_d", [0, 1, 2]), ("decay", [])])
def test_layers_of_a_model_have_the_frequencies_that_the_paper_gives_them(positions, owners):
    model = LanguageModel(
        ModelConfig(
            vocab_size=6,
            n_outputs=5,
            d_model=D,
            n_layers=3,
            mixer="trans_normer",
            mixer_args={"positions": positions},
            d_channel_mixing=8,
        )
    )
    found = [name for name, _ in model.named_parameters() if name.endswith("theta")]
    assert found == [f"blocks.{layer}.mixer.theta" for layer in owners]


def test_frequencies_start_over_the_channels_of_all_heads():
    theta = make().theta
    assert_agree(theta.flatten(), torch.tensor([10_000 ** (-2 * j / D) for j in range(D)]))
    assert groups_of(make())["theta"].name == "transition"
    assert not groups_of(make())["theta"].weight_decay


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        # q, k, v, u and out are D x D, theta D
        ({}, 5 * D * D + D),
        ({"positions": "decay"}, 5 * D * D),
        ({"output_gate": False, "output_norm": "layer"}, 4 * D * D + D + 2 * D),
    ],
)
def test_parameter_counts(arguments, expected):
    assert sum(p.numel() for p in make(**arguments).parameters()) == expected


def test_initial_distribution_is_that_of_the_released_code():
    for name, weight in make(256, positions="decay").named_parameters():
        assert weight.std().item() == pytest.approx(0.02, rel=0.02), name
        assert abs(weight.mean().item()) < 2e-4, name
        # a normal distribution has about 5 in 100 numbers beyond two standard deviations
        assert (weight.abs() > 0.04).float().mean().item() == pytest.approx(0.0455, rel=0.1), name


def test_heads_are_as_wide_as_the_papers_where_the_model_is():
    assert [build("trans_normer", width).n_heads for width in (6, 128, 768, 1024)] == [1, 1, 6, 8]
    assert make().state_size == 2 * 4 * 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_heads": 3}, "`d_model` must be a positive multiple of `n_heads` = 3; got 8"),
        ({"lrpe_base": 0.5}, "`lrpe_base` must be at least 1; got 0.5"),
        ({"positions": "lrpe-d"}, "there is no `positions` 'lrpe-d'; did you mean 'lrpe_d'"),
        ({"slopes": "alibis"}, "there is no `slopes` 'alibis'; did you mean 'alibi'"),
        ({"block_size": 0}, "`block_size` must be at least 1; got 0. TransNormer's is 64"),
        ({"feature_map": "sulu"}, "there is no `feature_map` 'sulu'; did you mean 'silu'"),
        ({"output_norm": "batch"}, "there is no `output_norm` 'batch'"),
    ],
)
def test_argument_errors(arguments, message):
    with pytest.raises(ValueError) as error:
        make(**arguments)
    assert message in str(error.value)
