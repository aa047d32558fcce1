import math

import pytest
import torch

from linrec.nn import feature_maps
from linrec.nn.feature_maps import FeatureMap, RandomFeatures
from linrec.testing import assert_agree, generator
from tests import released
from tests.tiers import thorough

D = 4
RANDOM = ["arc_cosine", "performer", "performer_trigonometric", "rfa"]
LEARNED = ["hashed", "learned"]
FIXED = sorted(set(feature_maps.names()) - set(RANDOM) - set(LEARNED))


def make(name: str, d_head: int = D, **arguments) -> FeatureMap:
    torch.manual_seed(0)
    return feature_maps.build(name, d_head, **arguments)


def inputs(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, D, generator=generator(seed), dtype=torch.float64)


def softmax_kernel(q, k):
    return (q @ k / math.sqrt(D)).exp()


def gaussian_of_directions(q, k):
    # norms are divided by after adding 0.001
    q, k = (x / (x.norm() + 1e-3) for x in (q, k))
    return (-(q - k).square().sum() / 2).exp()


def arc_cosine(q, k):
    angle = torch.acos(q @ k / (q.norm() * k.norm()))
    return q.norm() * k.norm() * (angle.sin() + (math.pi - angle) * angle.cos()) / (2 * math.pi)


KERNELS = {
    "arc_cosine": arc_cosine,
    "performer": softmax_kernel,
    "performer_trigonometric": softmax_kernel,
    "rfa": gaussian_of_directions,
}


def estimates(phi: RandomFeatures, q: torch.Tensor, k: torch.Tensor, draws: int = 1000) -> torch.Tensor:
    source, found = generator(7), []
    for _ in range(draws):
        phi.redraw(source)
        found.append((phi(q[None]) * phi(k[None])).sum())
    return torch.stack(found).detach()


@thorough
@pytest.mark.parametrize("orthogonal", [False, True])
@pytest.mark.parametrize(
    ("name", "arguments"), [*((name, {}) for name in RANDOM), ("performer", {"hyperbolic": True})]
)
def test_random_features_estimate_their_kernel_without_bias(name, arguments, orthogonal):
    # 6 rows, so that a second orthogonal block is cut short
    phi = make(name, n_features=6, orthogonal=orthogonal, **arguments).double()
    q, k = 0.8 * inputs(seed=1), 0.8 * inputs(seed=2)
    found = estimates(phi, q, k)
    standard_error = (found.std() / math.sqrt(len(found))).item()
    assert standard_error < 0.15 * found.mean()
    assert found.mean().item() == pytest.approx(KERNELS[name](q, k).item(), abs=4 * standard_error)


@thorough
def test_orthogonal_rows_and_hyperbolic_pairs_estimate_better():
    q, k = 1.5 * inputs(seed=1), 1.5 * inputs(seed=2)
    kinds = [{"orthogonal": False}, {"orthogonal": True}, {"orthogonal": False, "hyperbolic": True}]
    plain, orthogonal, pairs = (
        estimates(make("performer", n_features=4, **kind).double(), q, k).std() for kind in kinds
    )
    assert orthogonal < 0.9 * plain
    # lemma 2 of Performer: at most half the variance
    assert pairs**2 < 0.55 * plain**2


def test_rows_of_a_block_are_orthogonal_and_distributed_as_normal_ones():
    phi = make("performer", n_features=4000, orthogonal=True)
    blocks = phi.projection[0].double().unflatten(0, (-1, D))
    products = blocks @ blocks.mT
    off_diagonal = products - torch.diag_embed(products.diagonal(dim1=-2, dim2=-1))
    assert off_diagonal.abs().max() < 1e-5
    # squared lengths are chi-squared of D degrees: mean D, variance 2 D
    lengths = products.diagonal(dim1=-2, dim2=-1).flatten()
    assert lengths.mean().item() == pytest.approx(D, abs=4 * math.sqrt(2 * D / 4000))
    assert lengths.var().item() == pytest.approx(2 * D, rel=0.2)
    # each entry has both signs
    assert blocks.mean((0, 1)).abs().max() < 4 / math.sqrt(4000)
    assert blocks.mean(0).abs().max() < 4 / math.sqrt(1000)


def loop_over_dpfp(x, nu):
    r = [max(value, 0.0) for value in [*x.tolist(), *(-x).tolist()]]
    return torch.tensor(
        [r[i] * r[(i + j) % (2 * D)] for j in range(1, nu + 1) for i in range(2 * D)], dtype=torch.float64
    )


def loop_over_taylor(x):
    y = (x / D**0.25).tolist()
    pairs = [y[i] * y[j] for i in range(D) for j in range(i + 1, D)]
    return torch.tensor([1.0, *y, *(v * v / math.sqrt(2) for v in y), *pairs], dtype=torch.float64)


def test_taylor_features_are_the_series_of_softmaxs_kernel():
    q, k = 2 * inputs(50, seed=1), 2 * inputs(50, seed=2)
    phi, s = make("taylor"), (q * k).sum(-1) / math.sqrt(D)
    assert_agree((phi(q) * phi(k)).sum(-1), 1 + s + s**2 / 2)
    assert phi.d_features == 1 + D + D * (D + 1) // 2 == phi(q).shape[-1]


def test_learned_features_are_rectified_products_of_each_head():
    phi, x = make("learned", n_features=3, n_heads=2).double(), inputs(5, 2)
    expected = [[phi.weight[h] @ x[n, h] + phi.bias[h] for h in range(2)] for n in range(5)]
    assert_agree(phi(x), torch.stack([torch.stack(row) for row in expected]).clamp(min=0))
    assert phi.weight.shape == (2, 3, D) and phi.weight.abs().max() <= 1 / math.sqrt(D)


def test_hashed_features_have_the_kernel_of_agreeing_bits():
    phi = make("hashed", n_features=6, n_anchors=5, n_heads=2).double()
    q, k = inputs(20, 2, seed=1), inputs(20, 2, seed=2)
    bits = [phi(x)[..., 1:] for x in (q, k)]
    assert set(bits[0].unique().tolist()) == {-1.0, 1.0}
    assert_agree((phi(q) * phi(k)).sum(-1), 1 + 2 * (bits[0] == bits[1]).sum(-1).double())
    # lengths do not matter
    assert_agree(phi(3 * q), phi(q))
    n, h = 4, 1
    u = q[n, h] / q[n, h].norm()
    kernel = [math.exp(-float((u - a).square().sum()) / 4) - math.exp(-0.5) for a in phi.anchors[h]]
    y = phi.A[h] @ torch.tensor(kernel, dtype=torch.float64)
    assert_agree(bits[0][n, h], y.sign())


def test_hash_functions_stay_in_float32():
    phi, x = make("hashed", n_heads=2), inputs(200, 2).bfloat16()
    expected = phi(x.float())[..., 1:]
    assert torch.equal(phi.bfloat16()(x)[..., 1:], expected.bfloat16())


def test_gradients_pass_bits_between_minus_one_and_one():
    phi = make("hashed", n_features=2, n_anchors=2).double()
    phi.anchors.copy_(torch.eye(2, D))
    # 0.25 and 32 times the first anchor's kernel less its mean
    phi.A.copy_(torch.tensor([[[0.25, 0.0], [32.0, 0.0]]]))
    x = torch.tensor([[1.0, 0.5, 0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    y = phi(x)[..., 1:]
    assert y.tolist() == [[1.0, 1.0]]
    first, second = (torch.autograd.grad(y[0, bit], x, retain_graph=True)[0] for bit in (0, 1))
    u = x / x.norm()
    value = 0.25 * (-(u - phi.anchors[0, :1]).square().sum() / 4).exp()
    assert_agree(first, torch.autograd.grad(value, x)[0])
    assert not second.any() and first.any()


@pytest.mark.filterwarnings("ignore")
def test_hash_functions_are_fitted_as_in_the_released_code():
    numbers, bound = released.read("linear_attention_ecoformer"), 1e-12
    heads, m, d = numbers["anchors"].shape
    bits = numbers["A"].shape[1]
    phi = make("hashed", d, n_features=bits, n_anchors=m, n_heads=heads).double()
    phi.A.copy_(numbers["before"])
    phi.fit(numbers["q"], numbers["anchors"], top=5)
    # of both heads together, since some rows get no better and stay
    moved = (numbers["A"] != numbers["before"]).any(-1)
    assert moved.any() and not moved.all()
    for found, expected in [(phi.A, "A"), (phi.mean, "mean"), (phi(numbers["q"])[..., 1:], "codes")]:
        assert released.error(found, numbers[expected]) < bound


def test_a_fit_draws_anchors_from_the_first_sequence():
    q = inputs(2, 9, 1, seed=3)
    phi = make("hashed", n_features=3, n_anchors=4).double()
    phi.fit(q, top=2, generator=generator(5))
    steps = torch.randperm(9, generator=generator(5))[:4]
    assert_agree(phi.anchors[0], (q / q.norm(dim=-1, keepdim=True))[0, steps, 0])
    with pytest.raises(ValueError, match=r"`q` must have shape .* at least 4 steps; got \(2, 3, 1, 4\)"):
        phi.fit(q[:, :3], top=2)


@pytest.mark.parametrize("nu", [1, 3, 2 * D - 1])
def test_dpfp_is_products_of_rectified_entries(nu):
    phi, x = make("dpfp", nu=nu), inputs()
    expected = loop_over_dpfp(x, nu)
    # torch.roll by -j brings entry i + j to place i
    assert_agree(phi(x), expected)
    assert phi.d_features == len(expected) == 2 * D * nu


def test_fixed_maps_are_their_formulas():
    x = inputs(50)
    positive = torch.where(x > 0, x, 0)
    formulas = {
        "identity": x,
        "relu": positive,
        "cosformer": positive,
        "elu": torch.nn.functional.elu(x) + 1,
        "silu": x / (1 + torch.exp(-x)),
        "softmax": x.exp() / x.exp().sum(-1, keepdim=True),
        "dpfp": torch.stack([loop_over_dpfp(row, 1) for row in x]),
        "taylor": torch.stack([loop_over_taylor(row) for row in x]),
    }
    assert sorted(formulas) == FIXED
    for name, expected in formulas.items():
        assert_agree(make(name)(x), expected, name)


@pytest.mark.parametrize("name", ["arc_cosine", "relu"])
def test_epsilon_is_added_to_every_rectified_feature(name):
    plain, raised, x = make(name).double(), make(name, epsilon=0.25).double(), inputs(5, 1)
    # random features are over the square root of their number, 4
    assert_agree(raised(x), plain(x) + (0.125 if name == "arc_cosine" else 0.25))
    assert (plain(x) == 0).any()


def test_the_temperature_divides_directions():
    x = inputs(5, 1)
    warm, scaled = make("rfa", tau=0.5).double(), make("rfa").double()
    scaled.projection.mul_(2)
    assert_agree(warm(x), scaled(x))


def test_random_maps_are_their_formulas():
    x = inputs(5, 2)
    for name, heads in [("arc_cosine", 1), ("performer", 2), ("rfa", 2), ("rfa", 1)]:
        phi = make(name, n_features=3, n_heads=heads).double()
        w = phi.projection.expand(2, 3, D)
        unit = x / (x.norm(dim=-1, keepdim=True) + 1e-3)
        if name == "rfa":
            with torch.no_grad():
                phi.sigma.uniform_(0.5, 2)
            unit = unit * phi.sigma
        rows = []
        for n in range(5):
            for h in range(2):
                wx, wu = w[h] @ x[n, h], w[h] @ unit[n, h]
                wy, y = w[h] @ x[n, h] / D**0.25, x[n, h] / D**0.25
                rows.append(
                    {
                        "arc_cosine": wx.clamp(min=0),
                        "performer": (wy - y @ y / 2).exp(),
                        "rfa": torch.cat([wu.sin(), wu.cos()]),
                    }[name]
                    / math.sqrt(3)
                )
        assert_agree(phi(x), torch.stack(rows).unflatten(0, (5, 2)), name)


def test_cosformer_turns_a_quarter_over_its_length():
    assert make("cosformer", max_length=10).phase * 10 == pytest.approx(math.pi / 2)
    assert all(make(name).phase is None for name in feature_maps.names() if name != "cosformer")


def test_queries_differ_from_phi_by_a_positive_factor_each():
    q = 3 * inputs(20, 2)
    for name in feature_maps.names():
        phi = make(name).double()
        exact, scaled = phi(q), phi.queries(q)
        sizes = [features.norm(dim=-1, keepdim=True) for features in (exact, scaled)]
        assert_agree(scaled * sizes[0], exact * sizes[1], name)


def test_queries_of_any_size_do_not_overflow():
    q = 1e3 * inputs(20, 2).float()
    for name in ("performer", "performer_trigonometric"):
        assert torch.isfinite(make(name).queries(q)).all()
        assert make(name).queries(q).abs().amax(-1).min() > 0.1


# those of bits are no differences
@pytest.mark.parametrize("name", sorted({*feature_maps.names()} - {"hashed"}))
def test_gradients_are_finite_differences(name):
    phi = make(name).double()
    x = inputs(3, 2).requires_grad_()
    assert torch.autograd.gradcheck(phi, (x,), fast_mode=True)


def test_positive_maps_are_never_negative_and_elus_never_zero_in_bfloat16():
    x = 30 * inputs(100, 1)
    for name in FIXED:
        phi = make(name)(x)
        # the products of Taylor's features are positive, though features are not
        signs = phi @ phi[:, 0].T if name == "taylor" else phi
        assert make(name).positive == bool((signs >= 0).all()), name
    assert (make("elu")(x.clamp(min=-80).bfloat16()) > 0).all()


@pytest.mark.parametrize("name", RANDOM)
def test_a_redraw_is_saved_and_follows_its_generator(name):
    phi, x = make(name, n_features=3), inputs(2, 1).float()
    before = phi(x)
    phi.redraw(generator(1))
    after = phi(x)
    assert not torch.equal(before, after)
    phi.redraw(generator(1))
    assert torch.equal(phi(x), after)
    other = feature_maps.build(name, D, n_features=3)
    other.load_state_dict(phi.state_dict())
    assert torch.equal(other(x), after)


@pytest.mark.parametrize("name", RANDOM)
def test_features_are_formed_in_float32_under_autocast(name):
    phi, x = make(name), inputs(2, 1).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(phi(x), phi.float()(x)) and phi(x).dtype == torch.float32
        assert torch.equal(phi(x.bfloat16()), phi(x.bfloat16().float()).bfloat16())


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("performr", {}, "there is no `feature_map` 'performr'; did you mean 'performer'"),
        ("dpfp", {"mu": 2}, "there is no argument of feature map 'dpfp' called 'mu'; did you mean 'nu'"),
        ("dpfp", {"nu": 8}, "`nu` of DPFP must be in 1 .. 2 d_head - 1 = 7; got 8"),
        ("cosformer", {"max_length": 0}, "`max_length` of cosFormer must be at least 1 step; got 0"),
        ("relu", {"epsilon": -1.0}, "`epsilon` must be at least 0; got -1.0"),
        ("arc_cosine", {"epsilon": -1.0}, "`epsilon` must be at least 0; got -1.0"),
        ("rfa", {"tau": 0.0}, "`tau` must be positive and finite; got 0.0"),
        ("learned", {"n_features": 0}, "`n_features` must be at least 1; got 0"),
        ("hashed", {"n_anchors": 0}, "`n_anchors` must be at least 1; got 0"),
        ("rfa", {"n_features": 0}, "`n_features` and `n_heads` must be at least 1; got 0 and 1"),
    ],
)
def test_errors(name, arguments, message):
    with pytest.raises(ValueError) as error:
        make(name, **arguments)
    assert message in str(error.value)


def test_a_head_without_channels_is_refused():
    with pytest.raises(ValueError, match=r"`d_head`.*1; got 0"):
        make("elu", 0)
