import copy
import math

import pytest
import torch

from linrec.mixers import build
from linrec.mixers.linear_attention import LinearAttention
from linrec.testing import (
    assert_agree,
    check_batch_independence,
    check_compile,
    check_empty,
    check_layout,
    generator,
)
from tests.tiers import thorough

D, TIME = 6, 7


def make(d_model: int = D, **arguments) -> LinearAttention:
    torch.manual_seed(0)
    mixer = build("linear_attention", d_model, **arguments)
    assert isinstance(mixer, LinearAttention)
    return mixer


def inputs(time: int = TIME) -> torch.Tensor:
    return torch.randn(2, time, D, generator=generator(), dtype=torch.float64)


def heads(x, linear, n_heads):
    y = x @ linear.weight.T
    return (y if linear.bias is None else y + linear.bias).unflatten(-1, (n_heads, -1))


def by_hand(mixer, x, phi, *, turn=0.0, normalize=True):
    """Equations 18 to 20 as sums over all earlier steps, each by the cosine that cosFormer has."""
    q, k, v = (heads(x, linear, mixer.n_heads) for linear in (mixer.q, mixer.k, mixer.v))
    outputs = torch.zeros_like(v)
    for n in range(x.shape[1]):
        total = 0
        for m in range(n + 1):
            weight = (phi(q[:, n]) * phi(k[:, m])).sum(-1, keepdim=True) * math.cos(turn * (n - m))
            outputs[:, n] += weight * v[:, m]
            total = total + weight
        if normalize:
            outputs[:, n] /= total
    return outputs.flatten(-2)


def elu(x):
    return torch.where(x > 0, x + 1, x.exp())


def relu(x):
    return torch.where(x > 0, x, 0)


FORMULAS = {
    "paper": ({}, elu, {}),
    "heads": ({"n_heads": 3, "bias": False}, elu, {}),
    "relu": ({"feature_map": "relu"}, relu, {}),
    "softmax": (
        {"feature_map": "softmax", "n_heads": 2},
        lambda x: x.exp() / x.exp().sum(-1, keepdim=True),
        {},
    ),
    "raised relu": ({"feature_map": "relu", "epsilon": 0.01}, lambda x: relu(x) + 0.01, {}),
    "cosformer": ({"feature_map": "cosformer", "max_length": 9}, relu, {"turn": math.pi / 18}),
    "no normaliser": (
        {"feature_map": "identity", "normalization": "none"},
        lambda x: x,
        {"normalize": False},
    ),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_outputs_are_the_equations(name):
    arguments, phi, options = FORMULAS[name]
    mixer, x = make(**arguments).double(), inputs()
    y = by_hand(mixer, x, phi, **options) @ mixer.out.weight.T
    assert_agree(mixer(x)[0], y if mixer.out.bias is None else y + mixer.out.bias)


ENCODERS = {
    "paper": {},
    "cosFormer": {"feature_map": "cosformer", "max_length": 30, "floor": 0.1},
    "Performer": {"feature_map": "performer", "n_features": 4},
    "turned Performer": {"feature_map": "performer", "n_features": 4, "positions": "rotary"},
    "NormAttention": {"feature_map": "identity", "normalization": "rms", "positions": "rotary"},
    "BASED": {"n_heads": 2, "feature_map": "taylor", "d_qk": 4, "bias": False},
    "EcoFormer": {"n_heads": 2, "feature_map": "hashed", "n_features": 5, "shared_qk": True},
}


@pytest.mark.parametrize("name", ENCODERS)
def test_a_step_of_an_encoder_sees_what_the_last_step_sees(name):
    encoder, x = make(**ENCODERS[name], causal=False).double(), inputs()
    decoder = make(**ENCODERS[name]).double()
    decoder.load_state_dict(encoder.state_dict())
    y, state = encoder(x)
    assert (state, encoder.init_state(2), encoder.state_size) == (None, None, 0)
    assert not encoder.is_causal and encoder.token_mixing(x) is None
    assert_agree(y[:, -1], decoder(x)[0][:, -1])
    if encoder.rotary is None:
        # sums over all steps do not depend on the direction of time
        assert_agree(encoder(x.flip(1))[0].flip(1), y)
    reset = torch.zeros(2, TIME, dtype=torch.bool)
    reset[:, 3] = True
    spoiled = x.clone()
    spoiled[0, :3] = torch.nan
    apart = torch.cat([encoder(spoiled[:, :3])[0], encoder(spoiled[:, 3:])[0]], 1)
    found, _ = encoder(spoiled, reset=reset)
    assert_agree(found[1], apart[1])
    assert_agree(found[:, 3:], apart[:, 3:])


def test_weights_of_an_encoder_are_equation_5():
    mixer, x = make(n_heads=2, causal=False).double(), inputs()
    q, k, v = (heads(x, linear, 2) for linear in (mixer.q, mixer.k, mixer.v))
    weights = torch.einsum("bnhd,bmhd->bhnm", elu(q), elu(k))
    y = torch.einsum("bhnm,bmhd->bnhd", weights / weights.sum(-1, keepdim=True), v)
    assert_agree(mixer(x)[0], mixer.out(y.flatten(2)))


@thorough
@pytest.mark.parametrize("name", ENCODERS)
def test_the_laws_that_hold_for_encoders(name):
    mixer, x = make(**ENCODERS[name], causal=False).double(), inputs()
    check_batch_independence(mixer, x)
    check_empty(mixer, x)
    check_layout(mixer, x)
    check_compile(mixer, x, compiler="aot_eager")


def test_queries_may_be_narrow_and_be_the_keys():
    mixer, x = make(n_heads=2, d_qk=4, shared_qk=True, bias=False).double(), inputs()
    assert sum(p.numel() for p in mixer.parameters()) == 4 * D + 2 * D * D
    mixer.k = mixer.q
    assert_agree(mixer(x)[0], by_hand(mixer, x, elu) @ mixer.out.weight.T)


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_norm_attention_has_a_norm_in_place_of_the_normaliser(norm):
    mixer, x = make(feature_map="identity", normalization=norm, n_heads=2).double(), inputs()
    y = by_hand(mixer, x, lambda x: x, normalize=False)
    if norm == "layer":
        y = y - y.mean(-1, keepdim=True)
    y = y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert_agree(mixer(x)[0], y @ mixer.out.weight.T + mixer.out.bias)


@pytest.mark.parametrize("running", [True, False])
def test_rotary_positions_turn_the_sums_of_values_and_not_those_of_keys(running):
    kind = {} if running else {"feature_map": "identity", "normalization": "none"}
    mixer, x = make(n_heads=1, positions="rotary", rotary_base=100.0, **kind).double(), inputs()
    phi = elu if running else lambda x: x
    q, k = (phi(heads(x, linear, 1)[:, :, 0]) for linear in (mixer.q, mixer.k))
    v = heads(x, mixer.v, 1)[:, :, 0]
    # R_n of RoFormer: blocks of turns by n theta_j along the diagonal
    turned = []
    for features in (q, k):
        rows = []
        for n in range(TIME):
            turn = torch.zeros(D, D, dtype=torch.float64)
            for j in range(0, D, 2):
                angle = n * 100.0 ** (-j / D)
                turn[j, j] = turn[j + 1, j + 1] = math.cos(angle)
                turn[j + 1, j] = math.sin(angle)
                turn[j, j + 1] = -math.sin(angle)
            rows.append(features[:, n] @ turn.T)
        turned.append(torch.stack(rows, 1))
    weights = (turned[0] @ turned[1].mT).tril()
    if running:
        weights = weights / (q @ k.mT).tril().sum(-1, keepdim=True)
    assert_agree(mixer(x)[0], weights @ v @ mixer.out.weight.T + mixer.out.bias)
    assert_agree(mixer.token_mixing(x), weights.abs())
    phases = mixer.transitions(x).phase
    assert_agree(phases, 100.0 ** (-torch.tensor([0, 2, 4], dtype=torch.float64) / D))
    assert mixer.state_size == D // 2 * D + D * running


@pytest.mark.parametrize("positions", ["none", "rotary"])
def test_sums_below_the_floor_are_divided_by_it(positions):
    x = inputs()
    tiny, floored = (
        make(feature_map="relu", positions=positions, floor=floor).double() for floor in (1e-12, 0.1)
    )
    q, k = (relu(heads(x, linear, 1)[:, :, 0]) for linear in (tiny.q, tiny.k))
    total = (q @ k.mT).tril().sum(-1, keepdim=True)
    assert (total < 0.1).any() and (total > 0.1).any()
    assert_agree(floored.token_mixing(x) * total.clamp(min=0.1), tiny.token_mixing(x) * total)
    assert make().floor == 1e-6


def test_rotary_positions_turn_all_features():
    mixer = make(n_heads=2, feature_map="dpfp", positions="rotary").double()
    # 6 features of 3 channels
    expected = 10_000.0 ** (-torch.tensor([0, 2, 4], dtype=torch.float64) / 6)
    assert_agree(mixer.transitions(inputs()).phase, expected.repeat(2))


def test_performer_gives_softmax_attention_when_features_are_many():
    mixer, x = make(feature_map="performer", n_features=16_384).double(), inputs() / 2
    q, k, v = (heads(x, linear, 1)[:, :, 0] for linear in (mixer.q, mixer.k, mixer.v))
    scores = (q @ k.mT / math.sqrt(D)).masked_fill(torch.ones(TIME, TIME).triu(1).bool(), -torch.inf)
    y = scores.softmax(-1) @ v @ mixer.out.weight.T + mixer.out.bias
    first, _ = mixer(x)
    mixer.phi.redraw(generator(1))
    assert not torch.equal(mixer(x)[0], first)
    for estimate in (first, mixer(x)[0]):
        assert (estimate - y).abs().max() < 0.02 * y.abs().max()


def test_hyperbolic_features_are_both_signs_of_each_direction():
    mixer, x = make(feature_map="performer", n_features=3, hyperbolic=True).double(), inputs()
    q, k, v = (heads(x, linear, 1)[:, :, 0] for linear in (mixer.q, mixer.k, mixer.v))
    w = mixer.phi.projection[0]

    def phi(x):
        x = x / D**0.25
        return (
            torch.cat([(x @ w.T).exp(), (-x @ w.T).exp()], -1) * (-x.square().sum(-1, keepdim=True) / 2).exp()
        )

    weights = (phi(q) @ phi(k).mT).tril()
    y = weights / weights.sum(-1, keepdim=True) @ v
    assert_agree(mixer(x)[0], y @ mixer.out.weight.T + mixer.out.bias)
    # 6 features
    assert mixer.state_size == 6 * (D + 2)


def test_generalized_attention_has_rectified_features_in_random_directions():
    arguments = {"feature_map": "arc_cosine", "orthogonal": True, "epsilon": 0.001, "n_features": 5}
    mixer, x = make(**arguments).double(), inputs()
    w = mixer.phi.projection[0]
    y = by_hand(mixer, x, lambda x: relu(x @ w.T) + 0.001)
    assert_agree(mixer(x)[0], y @ mixer.out.weight.T + mixer.out.bias)


def softmax_of_features(mixer, x, reset):
    """Equation 20 with sums of exponentials over their own largest term, in double precision."""
    q, k, v = (heads(x, linear, 1) for linear in (mixer.q, mixer.k, mixer.v))
    (of_q, log_q), (of_k, log_k) = mixer.phi.logarithms(q), mixer.phi.logarithms(k)
    document = reset.cumsum(1)
    seen = (document[:, :, None] == document[:, None]).tril()
    exponent = (log_q + log_k.transpose(1, 2)).masked_fill(~seen[..., None], -torch.inf)
    exponent = exponent - exponent.detach().amax((2, 3), keepdim=True)
    weights = (of_q * of_k.transpose(1, 2) * exponent.exp()).sum(-1)
    return weights / weights.sum(-1, keepdim=True) @ v[:, :, 0] @ mixer.out.weight.T + mixer.out.bias


@pytest.mark.parametrize("arguments", [{}, {"n_features": 16}])
def test_features_of_large_keys_neither_vanish_nor_overflow(arguments):
    mixer = make(64, n_heads=1, feature_map="performer", **arguments)
    with torch.no_grad():
        mixer.q.weight *= 8
        mixer.k.weight *= 8
    x = torch.randn(2, 70, 64, generator=generator())
    reset = torch.zeros(2, 70, dtype=torch.bool)
    reset[1, [20, 65]] = True
    ways = {
        "one pass": lambda mixer, x: mixer(x, reset=reset)[0],
        "two pieces": lambda mixer, x: in_pieces(mixer, x, reset, (33, 37)),
        "steps": lambda mixer, x: in_pieces(mixer, x, reset, [1] * 70),
    }
    wide, given = copy.deepcopy(mixer).double(), x.double().requires_grad_()
    expected = softmax_of_features(wide, given, reset)
    cotangent = torch.randn(expected.shape, generator=generator(1), dtype=torch.float64)
    wanted = [wide.q.weight, wide.k.weight, wide.v.weight, given]
    gradients = torch.autograd.grad(expected, wanted, cotangent)
    for name, run in ways.items():
        leaf = x.clone().requires_grad_()
        y = run(mixer, leaf)
        assert_agree(y, expected.float(), name)
        found = torch.autograd.grad(
            y, [mixer.q.weight, mixer.k.weight, mixer.v.weight, leaf], cotangent.float()
        )
        for mine, other in zip(found, gradients, strict=True):
            assert (mine - other).abs().max() < 1e-4 * other.abs().max(), name


def in_pieces(mixer, x, reset, sizes):
    outputs, state = [], None
    for piece, cut in zip(x.split(sizes, 1), reset.split(sizes, 1), strict=True):
        y, state = mixer(piece, state, reset=cut)
        outputs.append(y)
    return torch.cat(outputs, 1)


def test_a_turned_performer_is_its_formula():
    mixer, x = make(feature_map="performer", positions="rotary", rotary_base=100.0).double(), inputs()
    q, k = (mixer.phi(heads(x, linear, 1))[:, :, 0] for linear in (mixer.q, mixer.k))
    theta = 100.0 ** (-torch.tensor([0, 2, 4], dtype=torch.float64) / D)
    turns = torch.polar(torch.ones(TIME, 3, dtype=torch.float64), torch.arange(TIME)[:, None] * theta)
    turned_q, turned_k = (torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turns for x in (q, k))
    weights = (turned_q @ turned_k.mH).real.tril() / (q @ k.mT).tril().sum(-1, keepdim=True)
    y = weights @ heads(x, mixer.v, 1)[:, :, 0] @ mixer.out.weight.T + mixer.out.bias
    assert_agree(mixer(x)[0], y)
    assert mixer.state_size == D // 2 * D + D + D // 2


def test_the_sums_of_a_performer_are_kept_over_their_largest_terms():
    mixer, x = make(feature_map="performer").double(), inputs()
    k, v = mixer.phi(heads(x, mixer.k, 1)), heads(x, mixer.v, 1)
    sums, largest = mixer(x)[1]
    assert_agree(largest, mixer.phi.logarithms(heads(x, mixer.k, 1))[1].amax(1))
    s = torch.einsum("bthk,bthv->bhkv", k, v)
    assert_agree(sums * largest.exp()[..., None], torch.cat([s, k.sum(1)[..., None]], -1))
    assert mixer.state_size == D * (D + 2)
    # checkpoints of any version have these names
    linear = ("k", "out", "q", "v")
    names = sorted([*(f"{x}.{y}" for x in linear for y in ("bias", "weight")), "phi.projection"])
    assert sorted(mixer.state_dict()) == names


def test_the_state_is_the_sum_of_outer_products_and_of_keys():
    mixer, x = make(n_heads=2).double(), inputs()
    k, v = elu(heads(x, mixer.k, 2)), heads(x, mixer.v, 2)
    s = torch.einsum("bthk,bthv->bhkv", k, v)
    assert_agree(mixer(x)[1], torch.cat([s, k.sum(1)[..., None]], -1))
    assert make(n_heads=2).state_size == 2 * 3 * 4
    assert make(n_heads=2, feature_map="dpfp", nu=2).state_size == 2 * 12 * 4
    assert make(feature_map="identity", normalization="rms").state_size == D * D


def test_cosformer_weights_turn_negative_beyond_its_length():
    mixer, x = make(n_heads=1, feature_map="cosformer", max_length=3).double(), inputs()
    q, k = (relu(heads(x, linear, 1)[:, :, 0]) for linear in (mixer.q, mixer.k))
    age = torch.arange(TIME).double()[:, None] - torch.arange(TIME)
    weights = (q @ k.mT * torch.cos(math.pi * age / 6)).tril()
    assert (weights[:, age > 3] <= 0).all() and (weights[:, (age >= 0) & (age <= 3)] >= -1e-9).all()
    total = weights.sum(-1, keepdim=True)
    y = weights / total @ heads(x, mixer.v, 1)[:, :, 0]
    assert_agree(mixer(x)[0], y @ mixer.out.weight.T + mixer.out.bias)
    assert make(feature_map="cosformer").phi.phase == pytest.approx(math.pi / 2 / 4096)


def test_cosformer_turns_its_state():
    mixer, x = make(n_heads=2, feature_map="cosformer", max_length=9).double(), inputs()
    magnitude, phase = mixer.transitions(x)
    assert_agree(magnitude, torch.ones(D))
    assert_agree(phase, torch.full((D,), math.pi / 18, dtype=torch.float64))
    one, other = (
        torch.randn(2, 2, 3, 4, generator=generator(seed), dtype=torch.complex128) for seed in (1, 2)
    )
    left, right = (mixer(x[:, :1], state)[1] for state in (one, other))
    assert_agree(left - right, (one - other) * complex(math.cos(math.pi / 18), math.sin(math.pi / 18)))
    assert make().double().transitions(x) is None


@pytest.mark.parametrize(
    "arguments", [{}, {"n_heads": 2}, {"feature_map": "identity", "normalization": "none"}]
)
def test_token_mixing_is_what_values_are_multiplied_by(arguments):
    mixer, x = make(**arguments).double(), inputs()
    phi = elu if mixer.is_running else lambda x: x
    q, k = phi(heads(x, mixer.q, mixer.n_heads)), phi(heads(x, mixer.k, mixer.n_heads))
    reset = torch.zeros(2, TIME, dtype=torch.bool)
    reset[1, 3] = True
    weights = torch.einsum("bnhk,bmhk->bhnm", q, k).tril()
    weights[1, :, 3:, :3] = 0
    if mixer.is_running:
        weights = weights / weights.sum(-1, keepdim=True)
    assert_agree(mixer.token_mixing(x, reset=reset), weights.abs().mean(1))


def test_parameters_are_torchs_linear_layers():
    assert sum(p.numel() for p in make().parameters()) == 4 * (D * D + D)
    assert sum(p.numel() for p in make(bias=False).parameters()) == 4 * D * D
    assert sum(p.numel() for p in make(normalization="layer").parameters()) == 4 * (D * D + D) + 2 * D
    for parameter in make(512).parameters():
        assert parameter.abs().max() <= 1 / math.sqrt(512)
        assert parameter.std().item() == pytest.approx(1 / math.sqrt(3 * 512), rel=0.1)


def test_heads_have_at_least_32_channels():
    assert [make(width).n_heads for width in (6, 64, 96, 128, 200)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_heads": 4}, "`d_model` must be a positive multiple of `n_heads` = 4; got 6"),
        ({"feature_map": "elu1"}, "there is no `feature_map` 'elu1'; did you mean 'elu'"),
        ({"normalization": "rum"}, "there is no `normalization` 'rum'; did you mean 'rms'"),
        ({"nu": 2}, "there is no argument of feature map 'elu' called 'nu'"),
        ({"hyperbolic": True}, "there is no argument of feature map 'elu' called 'hyperbolic'"),
        ({"feature_map": "identity"}, 'those of `feature_map="identity"` may be. Pass `normalization="rms"`'),
        ({"positions": "rotar"}, "there is no `positions` 'rotar'; did you mean 'rotary'"),
        ({"positions": "rotary", "n_heads": 2}, '`feature_map="elu"` has 3. Choose an even number'),
        ({"positions": "rotary", "feature_map": "cosformer"}, "has 6, which it turns itself"),
        ({"rotary_base": 0.5}, "`rotary_base` must be at least 1; got 0.5"),
        ({"n_heads": 2, "d_qk": 5}, "`d_qk` must be a positive multiple of `n_heads` = 2; got 5"),
        ({"n_anchors": 5}, "there is no argument of feature map 'elu' called 'n_anchors'"),
        ({"floor": 0.0}, "`floor` must be positive and finite; got 0.0"),
    ],
)
def test_argument_errors(arguments, message):
    with pytest.raises(ValueError) as error:
        make(**arguments)
    assert message in str(error.value)
