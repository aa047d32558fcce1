import math

import pytest
import torch

from linrec.mixers import build
from linrec.mixers.aft import AFT
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
FULL = {"variant": "full", "max_length": 20, "rank": 100}
LOCAL = {"variant": "local", "max_length": 20, "rank": 100, "window": 3}
CONV = {"variant": "conv", "n_heads": 2, "window": 3}
VARIANTS = {
    "simple": {},
    "full": FULL,
    "full beyond its positions": FULL | {"max_length": 4},
    "local": LOCAL,
    "local beyond its positions": LOCAL | {"max_length": 4},
    "local of one step": LOCAL | {"window": 1},
    "local of more steps than there are": LOCAL | {"window": 9},
    "conv": CONV,
    "conv, a head": CONV | {"n_heads": 1, "window": 2},
    "conv, a head for each channel": CONV | {"n_heads": D},
}


def make(d_model: int = D, **arguments) -> AFT:
    torch.manual_seed(0)
    mixer = build("aft", d_model, **arguments)
    assert isinstance(mixer, AFT)
    with torch.no_grad():
        # the start has no biases that matter
        if mixer.variant in ("full", "local"):
            mixer.position_q.mul_(30)
            mixer.position_k.mul_(30)
        if mixer.variant == "conv":
            mixer.w.gamma.normal_()
            mixer.w.beta.normal_()
    return mixer


def inputs(scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(2, TIME, D, generator=generator(), dtype=torch.float64)


def linear(x, module):
    return x @ module.weight.T + module.bias


def bias(mixer, t, s):
    """w of steps t and s of a sequence, a number, or one for each channel."""
    age, last = t - s, mixer.max_length - 1
    if mixer.variant == "simple" or (mixer.variant != "full" and age >= mixer.window):
        return torch.zeros(D, dtype=torch.float64)
    if mixer.variant == "conv":
        u = mixer.w.u
        deviation = (u - u.mean(1, keepdim=True)).square().mean(1).sqrt()
        w = mixer.w.gamma * (u[:, mixer.window - 1 - age] - u.mean(1)) / deviation + mixer.w.beta
        return w.repeat_interleave(D // len(u))
    return (mixer.position_q[min(t, last)] * mixer.position_k[min(s, last)]).sum().expand(D)


def weights(mixer, x, reset=None):
    """exp(K_t' + w) over its sum so far, (b, t, t', d), within the sequences that resets make."""
    k = linear(x, mixer.k)
    k = k.repeat_interleave(D // k.shape[-1], -1)
    found = torch.zeros(2, TIME, TIME, D, dtype=torch.float64)
    for b in range(2):
        start = 0
        for t in range(TIME):
            if reset is not None and reset[b, t]:
                start = t
            w = torch.stack([bias(mixer, t - start, s - start) for s in range(start, t + 1)])
            found[b, t, start : t + 1] = (k[b, start : t + 1] + w).softmax(0)
    return found


def encoder_weights(mixer, x, begin, end):
    """exp(K_t' + w) over its sum, over the steps of one document, (b, t, t', d)."""
    k = linear(x[:, begin:end], mixer.k)
    k, t = k.repeat_interleave(D // k.shape[-1], -1), end - begin
    w = torch.stack([torch.stack([encoder_bias(mixer, n, m) for m in range(t)]) for n in range(t)])
    return (k[:, None] + w).softmax(2)


def encoder_bias(mixer, n, m):
    if mixer.variant == "conv" and abs(n - m) < mixer.window:
        u = mixer.w.u
        scaled = (u - u.mean(1, keepdim=True)) / (u - u.mean(1, keepdim=True)).square().mean(1, True).sqrt()
        w = mixer.w.gamma * scaled[:, mixer.window - 1 - (n - m)] + mixer.w.beta
        return w.repeat_interleave(D // len(u))
    if mixer.variant in ("simple", "conv") or (mixer.variant == "local" and abs(n - m) >= mixer.window):
        return torch.zeros(D, dtype=torch.float64)
    last = mixer.max_length - 1
    return (mixer.position_q[min(n, last)] * mixer.position_k[min(m, last)]).sum().expand(D)


@pytest.mark.parametrize("scale", [1.0, 2000.0])
@pytest.mark.parametrize("arguments", VARIANTS.values(), ids=VARIANTS)
def test_steps_of_encoders_see_their_document(arguments, scale):
    mixer, x = make(**arguments, causal=False).double(), inputs(scale)
    assert (mixer.init_state(2), mixer.state_size, mixer.is_causal) == (None, 0, False)
    assert not mixer.state_grows and mixer.token_mixing(x) is None
    found, state = mixer(x)
    gate, v = torch.sigmoid(linear(x, mixer.q)), linear(x, mixer.v)
    mean = torch.einsum("bnmd,bmd->bnd", encoder_weights(mixer, x, 0, TIME), v)
    assert state is None
    assert_agree(found, linear(gate * mean, mixer.out))
    reset = torch.zeros(2, TIME, dtype=torch.bool)
    reset[:, 3] = True
    v[1, :3] = x[1, :3] = torch.nan
    means = []
    for begin, end in [(0, 3), (3, TIME)]:
        share = encoder_weights(mixer, x, begin, end)
        means.append(torch.einsum("bnmd,bmd->bnd", share, v[:, begin:end]))
    expected = linear(gate * torch.cat(means, 1), mixer.out)
    found, _ = mixer(x, reset=reset)
    assert_agree(found[0], expected[0])
    assert_agree(found[1, 3:], expected[1, 3:])


@thorough
@pytest.mark.parametrize("arguments", [{}, FULL, CONV])
def test_the_laws_that_hold_for_encoders(arguments):
    mixer, x = make(**arguments, causal=False).double(), inputs()
    check_batch_independence(mixer, x)
    check_empty(mixer, x)
    check_layout(mixer, x)
    check_compile(mixer, x, compiler="aot_eager")


def resets() -> torch.Tensor:
    reset = torch.zeros(2, TIME, dtype=torch.bool)
    reset[0, 3] = reset[1, 1] = reset[1, 2] = True
    return reset


@pytest.mark.parametrize("reset", [None, resets()], ids=["one sequence", "several"])
@pytest.mark.parametrize("scale", [1.0, 2000.0])
@pytest.mark.parametrize("arguments", VARIANTS.values(), ids=VARIANTS)
def test_outputs_are_weighted_means_of_values_also_for_keys_whose_exponential_overflows(
    arguments, scale, reset
):
    mixer, x = make(**arguments).double(), inputs(scale)
    assert (linear(x, mixer.k).max() > 710) == (scale > 1)
    means = torch.einsum("btsd,bsd->btd", weights(mixer, x, reset), linear(x, mixer.v))
    expected = linear(torch.sigmoid(linear(x, mixer.q)) * means, mixer.out)
    assert_agree(mixer(x, reset=reset)[0], expected)


@pytest.mark.parametrize("reset", [None, resets()], ids=["one sequence", "several"])
@pytest.mark.parametrize("arguments", [{}, LOCAL, CONV], ids=["simple", "local", "conv"])
def test_gradients_are_those_of_the_weighted_means(arguments, reset):
    mixer, x = make(**arguments).double(), inputs().requires_grad_()
    means = torch.einsum("btsd,bsd->btd", weights(mixer, x, reset), linear(x, mixer.v))
    expected = linear(torch.sigmoid(linear(x, mixer.q)) * means, mixer.out)
    leaves = [x, *mixer.parameters()]
    found = torch.autograd.grad(mixer(x, reset=reset)[0].square().sum(), leaves)
    assert_agree(found, torch.autograd.grad(expected.square().sum(), leaves))


def test_the_state_is_both_sums_over_the_largest_exponential():
    mixer, x = make().double(), inputs()
    k, v = linear(x, mixer.k), linear(x, mixer.v)
    sums, largest = mixer(x)[1]
    assert_agree(largest, k.amax(1))
    weight = (k - k.amax(1, keepdim=True)).exp()
    assert_agree(sums, torch.cat([(weight * v).sum(1), weight.sum(1)], -1))
    assert make().state_size == 3 * D


def test_a_new_sequence_far_below_the_one_before_keeps_its_precision():
    mixer, x = make().float(), inputs().float()
    k = mixer.k.weight.detach().clone()
    x[:, :3] = 200 * torch.linalg.solve(k, torch.ones(D))
    reset = torch.zeros(2, TIME, dtype=torch.bool)
    reset[:, 3] = True
    assert mixer.k(x)[:, 0].min() > 190
    assert_agree(mixer(x, reset=reset)[0][:, 3:], mixer(x[:, 3:])[0])


@pytest.mark.parametrize("reset", [None, resets()], ids=["one sequence", "several"])
@pytest.mark.parametrize("arguments", VARIANTS.values(), ids=VARIANTS)
def test_token_mixing_is_what_values_are_multiplied_by(arguments, reset):
    mixer, x = make(**arguments).double(), inputs()
    expected = torch.sigmoid(linear(x, mixer.q))[:, :, None] * weights(mixer, x, reset)
    assert_agree(mixer.token_mixing(x, reset=reset), expected.mean(-1))
    assert mixer.transitions(x) is None


def test_parameters_are_torchs_linear_layers():
    assert sum(p.numel() for p in make().parameters()) == 4 * (D * D + D)
    assert sum(p.numel() for p in make(bias=False, output_projection=False).parameters()) == 3 * D * D
    full = sum(p.numel() for p in make(variant="full").parameters())
    assert full == 4 * (D * D + D) + 2 * 1024 * 128
    for factor in (make(variant="full").position_q, make(variant="full").position_k):
        # `make` has enlarged it
        assert factor.std().item() / 30 == pytest.approx(0.01, rel=0.02)
    for parameter in make(512).parameters():
        assert parameter.std().item() == pytest.approx(1 / math.sqrt(3 * 512), rel=0.1)


def test_full_caches_keys_values_and_positions_which_resets_start_again():
    mixer, x = make(**FULL).double(), inputs()
    _, cache = mixer(x[:, :5], reset=resets()[:, :5])
    assert cache.position.tolist() == [[-1, -1, -1, 0, 1], [-1, -1, 0, 1, 2]]
    seen = (cache.position >= 0)[..., None]
    assert_agree(cache.k, linear(x[:, :5], mixer.k) * seen)
    assert_agree(cache.v, linear(x[:, :5], mixer.v) * seen)
    _, cache = mixer(x[:, 5:], cache, reset=torch.tensor([[False, False], [False, True]]))
    assert cache.position.tolist() == [[-1, -1, -1, 0, 1, 2, 3], [-1, -1, -1, -1, -1, -1, 0]]
    assert mixer.state_size == 2 * D + 1


@pytest.mark.parametrize("arguments", [LOCAL, CONV], ids=["local", "conv"])
def test_windows_keep_the_sums_behind_them_and_the_last_steps(arguments):
    mixer, x = make(**arguments).double(), inputs()
    state = mixer(x)[1]
    k, v = linear(x, mixer.k), linear(x, mixer.v).unflatten(-1, (mixer.n_keys, -1))
    assert_agree(state.k, k[:, -3:])
    assert_agree(state.v, v[:, -3:])
    assert state.seen.tolist() == [TIME, TIME]
    behind = k[:, :-3]
    assert_agree(state.largest, behind.amax(1))
    weight = (behind - behind.amax(1, keepdim=True)).exp()[..., None]
    assert_agree(state.sums, torch.cat([(weight * v[:, :-3]).sum(1), weight.sum(1)], -1))
    h = mixer.n_keys
    assert mixer.state_size == D + h + h + 3 * (D + h) + 1


def test_windows_forget_a_nan_behind_a_reset_of_an_earlier_piece():
    mixer, x = make(**LOCAL), inputs().float()
    x[:, 1] = torch.nan
    reset = torch.zeros(2, TIME, dtype=torch.bool)
    reset[:, 2] = True
    _, state = mixer(x[:, :3], reset=reset[:, :3])
    assert_agree(mixer(x[:, 3:], state)[0], mixer(x[:, 2:])[0][:, 1:])


def test_conv_starts_as_simple_with_a_key_for_each_head():
    torch.manual_seed(0)
    conv = build("aft", D, **CONV)
    simple = build("aft", D)
    simple.load_state_dict(
        {n: p for n, p in conv.state_dict().items() if not n.startswith(("k.", "w."))}
        | {f"k.{n}": p.repeat_interleave(3, 0) for n, p in conv.k.state_dict().items()}
    )
    assert_agree(conv(inputs().float())[0], simple(inputs().float())[0])
    assert [build("aft", width, variant="conv").n_keys for width in (4, 12, 192)] == [1, 2, 32]
    assert sorted(n for n, _ in conv.w.named_parameters()) == ["beta", "gamma", "u"]
    assert conv.w.u.shape == (2, 3)


@thorough
def test_full_compiles():
    check_compile(make(**FULL), inputs().float(), compiler="aot_eager")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"variant": "locl"}, "there is no `variant` 'locl'; did you mean 'local'"),
        ({"variant": "local", "window": 0}, "`window` must be at least 1; got 0"),
        ({"variant": "conv", "window": 1}, "`window` must be at least 2; got 1"),
        ({"variant": "conv", "n_heads": 4}, "`d_model` must be a positive multiple of `n_heads` = 4; got 6"),
        ({"max_length": 0}, "`max_length` must be at least 1; got 0"),
    ],
)
def test_argument_errors(arguments, message):
    with pytest.raises(ValueError) as error:
        make(**arguments)
    assert message in str(error.value)
