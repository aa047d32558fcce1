import numpy as np
import pytest
import torch

from linrec.mixers import build
from linrec.mixers.attention import Attention, AttentionState
from linrec.nn.rotary import Rotary
from linrec.ops import AttentionCache
from linrec.testing import (
    assert_agree,
    check_batch_independence,
    check_compile,
    check_empty,
    check_layout,
    generator,
)
from tests.tiers import thorough

D = 12


def make(d_model: int = D, **arguments) -> Attention:
    torch.manual_seed(0)
    mixer = build("attention", d_model, **arguments)
    assert isinstance(mixer, Attention)
    return mixer.double()


def inputs(time: int = 7, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(2, time, D, generator=generator(), dtype=torch.float64).to(dtype)


def written_out(mixer, x, *, base=10_000.0, visible=None, first=0, turned=None):
    """The file's equations head by head, with positions as complex numbers; `visible` is (t, t)."""
    time, d = x.shape[1], mixer.d_head
    turned = d if turned is None else turned
    visible = np.tri(time, dtype=bool) if visible is None else visible
    theta = base ** (-np.arange(0, turned, 2) / turned)
    turns = np.exp(1j * np.arange(first, first + time)[:, None] * theta)
    weights = [linear.weight.detach().numpy().T for linear in (mixer.q, mixer.k, mixer.v, mixer.out)]
    outputs = []
    for row in x.detach().numpy():
        heads = []
        for h in range(mixer.n_heads):
            g = h * mixer.kv_heads // mixer.n_heads
            places = [slice(i * d, (i + 1) * d) for i in (h, g, g)]
            q, k, v = (row @ weight[:, place] for weight, place in zip(weights, places, strict=False))
            scores = q[:, turned:] @ k[:, turned:].T
            q, k = ((z[:, 0:turned:2] + 1j * z[:, 1:turned:2]) * turns for z in (q, k))
            scores = np.where(visible, (scores + (q @ k.conj().T).real) / np.sqrt(d), -np.inf)
            shares = np.exp(scores - scores.max(1, keepdims=True))
            heads.append(shares / shares.sum(1, keepdims=True) @ v)
        outputs.append(np.concatenate(heads, 1) @ weights[3])
    return torch.from_numpy(np.stack(outputs))


@pytest.mark.parametrize(
    ("arguments", "base"), [({}, 1e4), ({"n_heads": 3}, 1e4), ({"d_head": 2, "rotary_base": 50.0}, 50.0)]
)
def test_the_layer_is_its_equations(arguments, base):
    mixer, x = make(**arguments), inputs()
    assert_agree(mixer(x)[0], written_out(mixer, x, base=base))


@pytest.mark.parametrize("qk_norm", ["head", "all"])
def test_norms_of_queries_and_keys_and_an_output_gate(qk_norm):
    mixer, x = (
        make(n_heads=4, d_head=6, kv_heads=2, qk_norm=qk_norm, qk_norm_eps=0.1, output_gate=True),
        inputs(),
    )
    for norm in (mixer.q_norm, mixer.k_norm):
        torch.nn.init.uniform_(norm.weight, 0.5, 2)
    q, k, v = (linear(x).unflatten(-1, (-1, mixer.d_head)) for linear in (mixer.q, mixer.k, mixer.v))
    channels = (-1,) if qk_norm == "head" else (-2, -1)
    q, k = (z * torch.rsqrt(z.square().mean(channels, keepdim=True) + 0.1) for z in (q, k))
    q, k = q * mixer.q_norm.weight.view(-1, mixer.d_head), k * mixer.k_norm.weight.view(-1, mixer.d_head)
    q, k = Rotary(mixer.d_head)(torch.arange(x.shape[1])[None], q, k)
    k, v = (z.repeat_interleave(2, dim=2) for z in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / mixer.d_head**0.5
    shares = scores.masked_fill(~torch.ones(7, 7).tril().bool(), -torch.inf).softmax(-1)
    heads = torch.einsum("bhij,bjhd->bihd", shares, v).flatten(-2)
    assert_agree(mixer(x)[0], mixer.out(torch.sigmoid(mixer.gate(x)) * heads))


def test_the_output_projection_may_have_a_bias_of_its_own():
    mixer = make(output_bias=True)
    assert mixer.q.bias is None and mixer.out.bias is not None


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_queries_share_keys_and_values(kv_heads):
    mixer, x = make(n_heads=4, d_head=6, kv_heads=kv_heads, rotary_fraction=0.4), inputs()
    assert_agree(mixer(x)[0], written_out(mixer, x, turned=2))
    assert mixer.k.weight.shape == mixer.v.weight.shape == (6 * kv_heads, D)


def test_a_window_hides_what_is_older():
    mixer, x = make(window=3), inputs()
    visible = np.tri(7, dtype=bool) & ~np.tri(7, k=-3, dtype=bool)
    assert_agree(mixer(x)[0], written_out(mixer, x, visible=visible))


def test_without_positions_the_order_of_past_steps_does_not_matter():
    mixer, x = make(positions="none"), inputs()
    shuffled = torch.cat([x[:, :6].flip(1), x[:, 6:]], 1)
    assert_agree(mixer(shuffled)[0][:, -1], mixer(x)[0][:, -1])
    rotary = make()
    assert (rotary(shuffled)[0] - rotary(x)[0])[:, -1].abs().max() > 1e-3


def test_alibi_lowers_scores_by_the_distance():
    mixer, x = make(n_heads=2, positions="alibi"), inputs()
    q, k, v = (layer(x).unflatten(-1, (2, 6)) for layer in (mixer.q, mixer.k, mixer.v))
    distance = torch.arange(7)[:, None] - torch.arange(7)
    # 2^(-8 h / H) of two heads
    slopes = torch.tensor([1 / 16, 1 / 256]).double()[:, None, None]
    scores = torch.einsum("bnhd,bmhd->bhnm", q, k) / 6**0.5 - slopes * distance
    shares = scores.masked_fill(distance < 0, -torch.inf).softmax(-1)
    assert_agree(mixer(x)[0], mixer.out(torch.einsum("bhnm,bmhd->bnhd", shares, v).flatten(-2)))


def test_xpos_lowers_the_scores_of_each_pair_by_its_own_power_of_the_distance():
    mixer, x = make(n_heads=2, kv_heads=1, positions="xpos"), inputs()
    q, k, v = (layer(x).unflatten(-1, (-1, 6)) for layer in (mixer.q, mixer.k, mixer.v))
    q, k = (torch.view_as_complex(z.unflatten(-1, (3, 2)).contiguous()) for z in (q, k))
    pair = torch.arange(0, 6, 2).double() / 6
    distance = (torch.arange(7)[:, None] - torch.arange(7))[..., None]
    # numbers of the paper
    factors = ((pair + 0.4) / 1.4) ** (distance / 512) * torch.exp(1j * distance * 1e4**-pair)
    scores = torch.einsum("bnhj,bmj,nmj->bhnm", q, k[:, :, 0].conj(), factors).real / 6**0.5
    shares = scores.masked_fill(distance[..., 0] < 0, -torch.inf).softmax(-1)
    heads = torch.einsum("bhnm,bmd->bnhd", shares, v[:, :, 0])
    y, state = mixer(x)
    assert_agree(y, mixer.out(heads.flatten(-2)))
    sizes = [tensor[0, 0].numel() for tensor in state.cache if tensor is not None]
    assert mixer.state_size == sum(sizes)


@pytest.mark.parametrize("positions", ["rotary", "xpos"])
def test_outputs_do_not_depend_on_where_a_sequence_starts(positions):
    mixer, x = make(n_heads=2, positions=positions), inputs()
    expected, _ = mixer(x)
    start = mixer.init_state(2)
    for seen in (5, 1_000_000):
        y, state = mixer(x, start._replace(position=torch.tensor([seen, 3 * seen])))
        assert_agree(y, expected, dtype=torch.float32)
        assert state.position.tolist() == [seen + 7, 3 * seen + 7]


def test_positions_count_on_over_resets_and_pieces():
    mixer, x = make(), inputs()
    reset = torch.zeros(2, 7, dtype=torch.bool)
    reset[:, 3] = True
    y, state = mixer(x[:, :5], reset=reset[:, :5])
    z, state = mixer(x[:, 5:], state)
    documents = np.array([0, 0, 0, 1, 1, 1, 1])
    visible = np.tri(7, dtype=bool) & (documents[:, None] == documents)
    assert_agree(torch.cat([y, z], 1), written_out(mixer, x, visible=visible, first=100))
    assert state.position.tolist() == [7, 7]


def test_encoders_see_both_sides_of_their_document():
    mixer, x = make(n_heads=2, causal=False), inputs()
    everything = np.ones((7, 7), dtype=bool)
    y, state = mixer(x)
    assert_agree(y, written_out(mixer, x, visible=everything))
    assert (state, mixer.init_state(2), mixer.state_size) == (None, None, 0)
    reset = torch.zeros(2, 7, dtype=torch.bool)
    reset[:, 3] = True
    y, _ = mixer(x, reset=reset)
    assert_agree(y, torch.cat([mixer(x[:, :3])[0], mixer(x[:, 3:])[0]], 1))


@thorough
def test_the_laws_that_hold_for_encoders():
    mixer, x = make(n_heads=2, causal=False), inputs()
    check_batch_independence(mixer, x)
    check_empty(mixer, x)
    check_layout(mixer, x)
    check_compile(mixer, x, compiler="aot_eager")


def test_a_bounded_cache_takes_the_weights_of_a_model_without_a_bound():
    full, x = make(n_heads=2), inputs()
    for policy in ({"sinks": 1}, {"eviction": "tova"}, {"eviction": "h2o"}):
        bounded = make(n_heads=2, cache_size=4, **policy)
        bounded.load_state_dict(full.state_dict())
        y, state = bounded(x)
        assert_agree(y[:, :5], full(x)[0][:, :5])
        assert (y - full(x)[0])[:, 5:].abs().amax((0, 2)).min() > 1e-5
        assert state.cache.k.shape == (2, 4, 2, D // 2) and not bounded.state_grows
        assert bounded.state_size == 2 * D + 1 + 2 * (policy == {"eviction": "h2o"})
        assert bounded.token_mixing(x) is None


def test_dropout_is_of_shares_and_in_training_alone():
    mixer, x = make(dropout=0.5), inputs(time=1)
    shown, _ = mixer.eval()(x)
    assert_agree(shown, mixer.out(mixer.v(x)))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        trained, _ = mixer.train()(x.repeat(100, 1, 1))
    # a single step has one share, which is dropped or doubled
    dropped = (trained == 0).all(-1)
    assert_agree(trained[~dropped], 2 * shown.repeat(100, 1, 1)[~dropped])
    assert 60 < int(dropped.sum()) < 140


@pytest.mark.parametrize(
    "arguments",
    [{}, {"n_heads": 3, "window": 3}, {"n_heads": 2, "causal": False}, {"n_heads": 3, "kv_heads": 1}],
)
def test_token_mixing_is_the_mean_of_what_the_values_are_multiplied_by(arguments, monkeypatch):
    mixer, x = make(**arguments), inputs()
    reset = torch.zeros(2, 7, dtype=torch.bool)
    reset[1, 3] = True
    mixing = mixer.token_mixing(x, reset=reset)
    with torch.no_grad():
        mixer.out.weight.copy_(torch.eye(D))
        for m in range(7):
            # values that are 1 at step m and 0 elsewhere
            values = (torch.arange(7) == m).double()[None, :, None].expand(2, 7, mixer.v.out_features)
            monkeypatch.setattr(mixer.v, "forward", lambda x, values=values: values)
            assert_agree(mixing[..., m], mixer(x, reset=reset)[0].mean(-1))


def test_default_heads_have_at_least_64_channels():
    widths = {4: 1, 64: 1, 100: 1, 128: 2, 192: 3, 384: 6, 624: 8, 768: 12, 1000: 10}
    assert {d: build("attention", d).n_heads for d in widths} == widths
    assert (make(n_heads=3).d_head, make(n_heads=5, d_head=2).d_head) == (4, 2)


def test_parameter_count():
    assert sum(p.numel() for p in make(384).parameters()) == 4 * 384**2
    assert sum(p.numel() for p in make(n_heads=5, d_head=2, bias=True).parameters()) == 3 * 130 + 132


def test_the_cache_grows_by_what_state_size_says_up_to_the_window():
    for window in (None, 4):
        mixer, sizes = make(n_heads=4, d_head=2, kv_heads=2, window=window), []
        assert mixer.state_size == 8
        for time in (0, 1, 2, 7):
            _, state = mixer(inputs(time), mixer.init_state(2))
            sizes.append(sum(tensor.numel() for tensor in state.cache if tensor is not None))
        kept = [min(time, 3) if window else time for time in (0, 1, 2, 7)]
        assert sizes == [2 * steps * mixer.state_size for steps in kept]


def test_under_autocast_the_cache_is_as_narrow_as_the_keys():
    mixer, x = make().float(), inputs(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, state = mixer(x, mixer.init_state(2))
    assert (state.cache.k.dtype, state.cache.v.dtype) == (torch.bfloat16,) * 2
    assert mixer(x)[1].cache.k.dtype == torch.float32


X, POSITION = torch.zeros(2, 3, 12), torch.zeros(2, dtype=torch.int64)
CACHE = AttentionCache(*[torch.zeros(2, 1, 1, 12)] * 2, None, None, None)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (X, r"AttentionState\(AttentionCache\(a tensor .*; got a tensor \(2, 3, 12\)"),
        (CACHE, r"AttentionState\(AttentionCache\(a tensor .*; got AttentionCache\("),
        (AttentionState(CACHE, POSITION[:1]), r", a tensor \(2,\)\), .* got .*, a tensor \(1,\)\)"),
        (
            AttentionState(CACHE._replace(k=CACHE.k[..., :4]), POSITION),
            r"a tensor \(2, 0, 1, 12\), .* got .*a tensor \(2, 1, 1, 4\)",
        ),
    ],
)
def test_states_of_others_are_refused(state, words):
    with pytest.raises(ValueError, match="`state` must be that of Attention for these rows, .*" + words):
        make().float()(X, state)


def test_encoders_refuse_states():
    with pytest.raises(ValueError, match=r"`state` must be None for Attention.*got AttentionState"):
        make(causal=False).float()(X, AttentionState(CACHE, POSITION))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"n_heads": 5}, "`d_model` must be a positive multiple of `n_heads` = 5; got 12"),
        ({"n_heads": 0}, "`n_heads` = 0; got 12"),
        ({"d_head": 0}, "`d_head` must be at least 1; got 0"),
        ({"n_heads": 4}, "`d_head` must be a positive even number for rotary positions; got 3"),
        ({"n_heads": 3, "kv_heads": 2}, "`kv_heads` must be a positive divisor of `n_heads` = 3; got 2"),
        ({"kv_heads": 0}, "`kv_heads` must be a positive divisor of `n_heads` = 1; got 0"),
        ({"rotary_fraction": 0.3}, "even number of the 12 channels to turn; got 0.3"),
        ({"positions": "rotry"}, "there is no `positions` 'rotry'; did you mean 'rotary'"),
        ({"rotary_base": 0.0}, "`rotary_base` of mixers\\) must be positive; got 0"),
        ({"window": 0}, "`window` must be at least 1"),
        ({"cache_size": 4, "window": 4}, "`cache_size` needs `causal`, no `window`"),
        ({"cache_size": 4, "causal": False}, "`cache_size` needs `causal`, no `window`"),
        ({"eviction": "tova"}, "`eviction` and `sinks` are of a bounded cache"),
        ({"cache_size": 4, "eviction": "tva"}, "there is no `eviction` 'tva'; did you mean 'tova'"),
        ({"positions": "xpos", "causal": False}, '"xpos"` needs `causal`, no `window`'),
        ({"positions": "xpos", "window": 4}, '"xpos"` needs `causal`, no `window`'),
        ({"positions": "xpos", "dropout": 0.1}, '"xpos"` needs `causal`, no `window`, no `dropout`'),
        ({"positions": "xpos", "cache_size": 4}, "`cache_size` needs"),
        ({"dropout": 1.0}, r"`dropout` must be in \[0, 1\)"),
    ],
)
def test_argument_errors(arguments, words):
    with pytest.raises(ValueError, match=words):
        make(**arguments)
