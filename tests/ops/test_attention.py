"""softmax_attention against a softmax written out in float64; test_laws.py has the laws."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from linrec.ops import AttentionCache, gate_loop, gate_loop_attention, laplace_attention, softmax_attention
from linrec.ops.attention.torch import aligned, laplace, repeated
from linrec.testing import (
    assert_agree,
    check_isolation,
    check_operator,
    check_stability,
    generator,
    map_tree,
    reset_mask,
)
from tests.tiers import thorough, tiered

every_pair = pytest.mark.parametrize(("mode", "backend"), softmax_attention.operator.pairs)
REFERENCE = {"mode": "recurrent", "backend": "reference"}


def make(batch, time, heads=2, d_key=3, d_value=4, *, groups=None, dtype=torch.float64, seed=0):
    random = generator(seed)
    widths = {"q": d_key, "k": d_key, "v": d_value}
    groups = heads if groups is None else groups
    shapes = {name: (batch, time, heads if name == "q" else groups, d) for name, d in widths.items()}
    return {
        name: torch.randn(shape, generator=random, dtype=torch.float64).to(dtype)
        for name, shape in shapes.items()
    }


def cut(inputs, begin, end):
    return map_tree(lambda tensor: tensor[:, begin:end], inputs)


def written_out(q, k, v, *, reset=None, scale=None, window=None, causal=True, slopes=None):
    """One softmax per row and step, over the steps that it sees, found one by one."""
    q, k, v = (x.double().numpy() for x in (q, k, v))
    batch, time, _, d_key = q.shape
    scale = d_key**-0.5 if scale is None else scale
    y = np.zeros(v.shape)
    for b, n in itertools.product(range(batch), range(time)):

        def seen(m, b=b, n=n):
            between = slice(min(m, n) + 1, max(m, n) + 1)
            near = window is None or abs(n - m) < window
            apart = reset is not None and bool(reset[b, between].any())
            return (m <= n or not causal) and near and not apart

        steps = [m for m in range(time) if seen(m)]
        scores = scale * np.einsum("hc,mhc->mh", q[b, n], k[b, steps])
        if slopes is not None:
            scores -= np.abs(n - np.array(steps))[:, None] * slopes.numpy()
        weights = np.exp(scores - scores.max(0))
        y[b, n] = np.einsum("mh,mhd->hd", weights / weights.sum(0), v[b, steps])
    return torch.from_numpy(y)


@every_pair
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 4, 11])
def test_it_is_the_softmax_written_out(mode, backend, causal, window):
    inputs = make(2, 11)
    for reset, scale in itertools.product((None, reset_mask(2, 11, rate=0.2)), (None, 1.5)):
        options = {"reset": reset, "scale": scale, "window": window, "causal": causal}
        y, cache = softmax_attention(**inputs, **options, mode=mode, backend=backend)
        assert_agree(y, written_out(**inputs, **options))
        assert (cache is None) == (not causal)


@every_pair
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 4])
def test_scores_fall_with_the_distance_by_the_slope_of_their_head(mode, backend, causal, window):
    inputs, slopes = make(2, 11), torch.tensor([1.3, 0.2], dtype=torch.float64)
    for reset in (None, reset_mask(2, 11, rate=0.2)):
        options = {"reset": reset, "window": window, "causal": causal, "slopes": slopes}
        y, _ = softmax_attention(**inputs, **options, mode=mode, backend=backend)
        assert_agree(y, written_out(**inputs, **options))


def test_slopes_in_a_window_that_goes_by_blocks():
    inputs, slopes = make(1, 140), torch.tensor([0.9, 0.1], dtype=torch.float64)
    expected = written_out(**inputs, window=5, slopes=slopes)
    _, cache = softmax_attention(**cut(inputs, 0, 7), window=5, slopes=slopes)
    y, _ = softmax_attention(**cut(inputs, 7, None), window=5, slopes=slopes, state=cache)
    assert_agree(y, expected[:, 7:])


@pytest.mark.parametrize("window", [None, 5])
def test_a_ring_knows_the_distance_of_its_slots(window):
    inputs, slopes = make(2, 9), torch.tensor([0.9, 0.1], dtype=torch.float64)
    slots = 12 if window is None else window
    k, v = (inputs[name].new_zeros(2, slots, 2, inputs[name].shape[-1]) for name in "kv")
    alive = torch.zeros(2, slots, dtype=torch.bool)
    ring, outputs = AttentionCache(k, v, None, None, alive, torch.tensor([0])), []
    for n in range(9):
        y, ring = softmax_attention(**cut(inputs, n, n + 1), state=ring, slopes=slopes, window=window)
        outputs.append(y)
    assert_agree(torch.cat(outputs, 1), written_out(**inputs, window=window, slopes=slopes))


@pytest.mark.parametrize(
    ("slopes", "error", "words"),
    [
        (torch.ones(3), ValueError, r"`slopes` must have shape \(h,\) = \(2,\); got \(3,\)"),
        (torch.ones(2).double(), TypeError, "`slopes` must be float32; got float64"),
    ],
)
def test_slopes_that_do_not_fit_are_refused(slopes, error, words):
    with pytest.raises(error, match=words):
        softmax_attention(**make(1, 2, dtype=torch.float32), slopes=slopes)


@thorough
# blocks are at least 128 steps long, and no longer than the window beyond that
@pytest.mark.parametrize(("time", "window"), tiered([(129, 1), (150, 70)], [(257, 128), (300, 130)]))
def test_long_windows_go_by_blocks(time, window):
    before = min(window + 3, 40)
    inputs, reset = make(2, before + time), reset_mask(2, before + time, rate=0.02, seed=2)
    for mask in (None, reset):
        options = {"window": window}
        _, cache = softmax_attention(
            **cut(inputs, 0, before), **options, reset=None if mask is None else mask[:, :before]
        )
        y, last = softmax_attention(
            **cut(inputs, before, None),
            **options,
            state=cache,
            reset=None if mask is None else mask[:, before:],
        )
        expected = written_out(**inputs, **options, reset=mask)
        assert_agree(y, expected[:, before:])
        assert_agree(softmax_attention(**inputs, **options, reset=mask)[0], expected)
        assert_agree(last.k, of_the_last_document(inputs["k"], mask)[:, before + time - (window - 1) :])


def test_blocks_have_the_gradients_of_the_loop():
    _, cache = softmax_attention(**make(2, 9), window=6)
    options = {"window": 6, "reset": reset_mask(2, 135, rate=0.05)}
    inputs = make(2, 135, seed=1) | {"state": cache}
    check_operator(
        softmax_attention, inputs, mode="attention", backend="torch", dtype=torch.float64, options=options
    )


@every_pair
@pytest.mark.parametrize("window", [None, 3])
def test_gradients_are_finite_differences_also_of_the_cache(mode, backend, window):
    first, second = make(2, 3, 1, 2, 2), make(2, 3, 1, 2, 2, seed=1)
    reset = torch.tensor([[False, False, True], [False, False, False]])

    def pieces(*tensors):
        names = ("q", "k", "v")
        options = {"window": window, "mode": mode, "backend": backend}
        y, cache = softmax_attention(**dict(zip(names, tensors[:3], strict=True)), **options)
        z, cache = softmax_attention(
            **dict(zip(names, tensors[3:], strict=True)), **options, state=cache, reset=reset
        )
        return y, z, cache.k, cache.v

    tensors = [tensor.requires_grad_() for tensor in (*first.values(), *second.values())]
    assert torch.autograd.gradcheck(pieces, tensors, fast_mode=True)


@every_pair
def test_gradients_of_both_directions_are_finite_differences(mode, backend):
    reset = torch.tensor([[False, True, False, False], [False, False, False, True]])
    for window in (None, 2):

        def function(q, k, v, window=window):
            options = {"reset": reset, "window": window, "causal": False, "mode": mode, "backend": backend}
            return softmax_attention(q, k, v, **options)[0]

        tensors = [tensor.requires_grad_() for tensor in make(2, 4, 1, 2, 2).values()]
        assert torch.autograd.gradcheck(function, tensors, fast_mode=True)


@pytest.fixture
def calls(monkeypatch):
    """What reaches torch's attention: (is_causal, whether there is a mask), call by call."""
    seen = []
    attend = functional.scaled_dot_product_attention

    def recorded(*tensors, **options):
        seen.append((options["is_causal"], options["attn_mask"] is not None))
        return attend(*tensors, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", recorded)
    return seen


def test_masks_are_made_only_where_they_say_something(calls):
    inputs, no_reset = make(2, 8), torch.zeros(2, 8, dtype=torch.bool)
    one = cut(inputs, 0, 1)
    _, cache = softmax_attention(**inputs)
    softmax_attention(**inputs, window=8)
    softmax_attention(
        **inputs, state=AttentionCache(*(inputs[name][:, :0] for name in "kv"), None, None, None)
    )
    assert calls == [(True, False)] * 3
    calls.clear()
    softmax_attention(**one)
    softmax_attention(**one, state=cache)
    softmax_attention(**one, state=cache, window=3)
    softmax_attention(**inputs, causal=False)
    assert calls == [(False, False)] * 4
    calls.clear()
    softmax_attention(**inputs, reset=no_reset)
    softmax_attention(**inputs, state=cache)
    softmax_attention(**inputs, window=7)
    softmax_attention(**inputs, causal=False, reset=no_reset)
    softmax_attention(**inputs, causal=False, window=3)
    assert calls == [(False, True)] * 5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_without_a_mask_the_kernel_is_flash_attention():
    inputs = {name: x.cuda() for name, x in make(2, 256, 4, 64, 64, dtype=torch.bfloat16).items()}
    # the context refuses every other kernel
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        y, cache = softmax_attention(**inputs)
        step, _ = softmax_attention(**cut(inputs, 0, 1), state=cache)
        both, _ = softmax_attention(**inputs, causal=False)
    expected, cache = softmax_attention(**inputs, **REFERENCE)
    assert_agree(y, expected)
    assert_agree(step, softmax_attention(**cut(inputs, 0, 1), state=cache, **REFERENCE)[0])
    wide = {name: x.double().cpu() for name, x in inputs.items()}
    assert_agree(both.cpu(), written_out(**wide, causal=False))
    for options in ({}, {"causal": False}, {"window": 3}):
        nothing, _ = softmax_attention(**{name: x[:0] for name, x in inputs.items()}, **options)
        assert nothing.shape == (0, 256, 4, 64)


GROUPS = {"multi-query": {"heads": 3, "groups": 1}, "grouped": {"heads": 4, "groups": 2}}


def ungrouped(inputs):
    """The same with a copy of its key and value for each query, one after the other."""
    group = inputs["q"].shape[2] // inputs["k"].shape[2]
    copies = {name: inputs[name][:, :, [h // group for h in range(inputs["q"].shape[2])]] for name in "kv"}
    return inputs | copies


@every_pair
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("heads", GROUPS)
def test_neighbouring_queries_share_keys_and_values(mode, backend, heads, window):
    inputs, reset = make(2, 9, **GROUPS[heads]), reset_mask(2, 9, rate=0.2)
    options = {"window": window, "mode": mode, "backend": backend}
    for causal in (True, False):
        y, _ = softmax_attention(**inputs, **options, reset=reset, causal=causal)
        expected = written_out(**ungrouped(inputs), reset=reset, window=window, causal=causal)
        assert_agree(y, expected)
    y, cache = softmax_attention(**cut(inputs, 0, 6), **options, reset=reset[:, :6])
    # the cache is of the heads that keys have
    assert cache.k.shape == (2, 6 if window is None else 3, GROUPS[heads]["groups"], 3)
    assert_agree(cache.v, of_the_last_document(inputs["v"][:, :6], reset[:, :6])[:, 6 - cache.v.shape[1] :])
    z, _ = softmax_attention(**cut(inputs, 6, None), **options, state=cache, reset=reset[:, 6:])
    expected = written_out(**ungrouped(inputs), reset=reset, window=window)
    assert_agree(torch.cat([y, z], 1), expected)
    nothing, _ = softmax_attention(**cut(inputs, 0, 0), **options)
    assert nothing.shape == (2, 0, GROUPS[heads]["heads"], 4)


def of_the_last_document(x, reset):
    """Zeros for what a cache keeps a place for alone."""
    document = torch.zeros(x.shape[:2]) if reset is None else reset.cumsum(1)
    return torch.where((document == document[:, -1:])[..., None, None], x, 0)


@every_pair
@pytest.mark.parametrize("window", [None, 3])
def test_nothing_passes_a_reset_both_ways(mode, backend, window):
    def attend(x, state=None, *, reset=None):
        options = {"window": window, "mode": mode, "backend": backend, "causal": False}
        return softmax_attention(**x, reset=reset, **options)

    check_isolation(attend, make(2, 9))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("attend", [gate_loop_attention, softmax_attention, laplace_attention])
def test_nothing_passes_a_reset_in_any_dtype(attend, dtype):
    inputs = {name: x.requires_grad_() for name, x in make(1, 9, dtype=dtype).items()}
    reset = torch.zeros(1, 9, dtype=torch.bool)
    reset[:, 4] = True
    for bad in (torch.inf, torch.finfo(dtype).max):
        with torch.no_grad():
            inputs["v"][:, 1] = bad
        y, _ = attend(**inputs, reset=reset)
        cotangent = torch.zeros_like(y).index_fill_(1, torch.arange(4, 9), 1.0)
        for x in (y, *torch.autograd.grad(y, [*inputs.values()], cotangent)):
            assert x[:, 4:].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_numbers_that_do_not_overflow_are_kept_beside_resets(dtype):
    inputs = make(1, 6, dtype=dtype)
    inputs["v"] = inputs["v"] * 1e20
    reset = torch.zeros(1, 6, dtype=torch.bool)
    reset[:, 3] = True
    for x in (laplace_attention(**inputs, reset=reset)[0], gate_loop(**inputs, reset=reset)[1]):
        assert x.isfinite().all() and x.abs().max() > 1e19


@pytest.mark.parametrize("attend", [softmax_attention, laplace_attention])
def test_a_window_moves_on_from_nan(attend):
    inputs = make(1, 12)
    expected, _ = attend(**inputs, window=3, reset=torch.zeros(1, 12, dtype=torch.bool))
    inputs["v"][:, 4] = torch.nan
    y, _ = attend(**inputs, window=3, reset=torch.zeros(1, 12, dtype=torch.bool))
    assert y[0, 4:7].isnan().all()
    others = [*range(4), *range(7, 12)]
    assert_agree(y[:, others], expected[:, others])


@pytest.mark.parametrize("heads", GROUPS)
def test_gradients_of_shared_keys_are_sums(heads):
    _, cache = softmax_attention(**make(2, 9, **GROUPS[heads], seed=1), window=6)
    # long enough to go by blocks too
    for time, options in ((7, {"window": 6}), (130, {"window": 6}), (7, {"causal": False})):
        inputs = make(2, time, **GROUPS[heads])
        state = {"state": cache} if "window" in options else {}
        check_operator(
            softmax_attention,
            inputs | state,
            mode="attention",
            backend="torch",
            dtype=torch.float64,
            options=options | {"reset": reset_mask(2, time, rate=0.1)},
        )


def test_one_head_of_keys_is_read_in_place_by_flash_attention():
    inputs = make(2, 9, heads=4, groups=1, d_value=3, dtype=torch.float32)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        y, cache = softmax_attention(**inputs)
        step, _ = softmax_attention(**cut(inputs, 0, 1), state=cache)
    assert_agree(y, softmax_attention(**inputs, **REFERENCE)[0])
    assert_agree(step, softmax_attention(**cut(inputs, 0, 1), state=cache, **REFERENCE)[0])
    assert repeated(inputs["k"], inputs["q"]).data_ptr() == inputs["k"].data_ptr()


def laplace_written_out(q, k, v, *, reset, scale, window, function):
    """One weight for each pair of steps; erf is the standard library's."""
    batch, time, heads, _ = q.shape
    q, k, v, reset = (x.numpy() for x in (q, k, v, reset))
    y = np.zeros((batch, time, heads, v.shape[-1]))
    mu, sigma = math.sqrt(1 / 2), math.sqrt(1 / (4 * math.pi))
    for b, n, h in itertools.product(range(batch), range(time), range(heads)):
        for m in range(max(0, n - window + 1), n + 1):
            if not reset[b, m + 1 : n + 1].any():
                score = scale * q[b, n, h] @ k[b, m, h]
                weight = (1 + math.erf((score - mu) / (sigma * math.sqrt(2)))) / 2
                if function == "relu2":
                    weight = score**2 if score > 0 else 0
                y[b, n, h] += weight * v[b, m, h]
    return torch.from_numpy(y)


@every_pair
@pytest.mark.parametrize(("window", "function"), [(3, "laplace"), (99, "laplace"), (4, "relu2")])
def test_laplace_attention_is_its_sum_over_pairs(mode, backend, window, function):
    inputs, reset = make(2, 9, heads=4, groups=2), reset_mask(2, 9, rate=0.2)
    of = {"scale": 0.7, "window": window, "function": function}
    options = of | {"mode": mode, "backend": backend}
    expected = laplace_written_out(**ungrouped(inputs), reset=reset, **of)
    y, cache = laplace_attention(**cut(inputs, 0, 6), reset=reset[:, :6], **options)
    z, _ = laplace_attention(**cut(inputs, 6, None), state=cache, reset=reset[:, 6:], **options)
    assert_agree(torch.cat([y, z], 1), expected)
    assert cache.k.shape == (2, min(window - 1, 6), 2, 3)


def test_tensors_for_the_kernels_of_cuda_are_aligned_in_one_graph():
    x = torch.randn(2, 9, 2, 9)[..., :8]
    found = torch.compile(aligned, fullgraph=True, backend="eager")(x)
    assert torch.equal(found, x) and found.stride() == (144, 16, 8, 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("options", [{}, {"window": 64}])
def test_attention_on_cuda_compiles_into_one_graph(options):
    inputs = {name: x.cuda().requires_grad_() for name, x in make(2, 256, 4, 64, 64).items()}

    def outcome(function):
        y, _ = function(**inputs, **options)
        return y, torch.autograd.grad(y.square().sum(), tuple(inputs.values()))

    assert_agree(outcome(torch.compile(softmax_attention, fullgraph=True)), outcome(softmax_attention))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_that_begin_anywhere_in_memory(dtype):
    flat = torch.randn(3 + 2 * 9 * 2 * 8, device="cuda", dtype=dtype, requires_grad=True)
    for first in (0, 1, 3):
        x = flat[first : first + 288].view(2, 9, 2, 8)
        reset = torch.zeros(2, 9, dtype=torch.bool, device="cuda")
        for options in ({}, {"reset": reset}):
            y, _ = softmax_attention(x, x, x, **options)
            expected, _ = softmax_attention(*(x.double() for _ in range(3)), **options)
            torch.testing.assert_close(y.double(), expected, rtol=2e-2, atol=2e-2)
            torch.autograd.grad(y.sum(), flat)
    # rows of nine numbers, of which heads take eight
    x = torch.randn(2, 9, 2, 9, device="cuda", dtype=dtype, requires_grad=True)
    y, _ = softmax_attention(x[..., :8], x[..., :8], x[..., :4], reset=reset)
    expected, _ = softmax_attention(
        x[..., :8].double(), x[..., :8].double(), x[..., :4].double(), reset=reset
    )
    torch.testing.assert_close(y.double(), expected, rtol=2e-2, atol=2e-2)
    torch.autograd.grad(y.sum(), x)


def test_laplaces_function_keeps_its_digits_where_it_is_small():
    scores = torch.linspace(-2.5, 2, 50)
    torch.testing.assert_close(laplace(scores), laplace(scores.double()).float(), rtol=1e-5, atol=0)


def test_laplaces_function_meets_the_squared_relu_at_mu():
    mu = torch.tensor(0.5**0.5, dtype=torch.float64, requires_grad=True)
    found = laplace(mu)
    assert_agree(found, mu**2)
    assert_agree(torch.autograd.grad(found, mu)[0], 2 * mu)


def test_long_windows_of_laplace_attention_go_by_blocks():
    _, cache = laplace_attention(**make(2, 9), window=6)
    for time in (150, 300):
        inputs = make(2, time) | {"state": cache}
        options = {"window": 6, "reset": reset_mask(2, time, rate=0.05)}
        check_operator(
            laplace_attention, inputs, mode="attention", backend="torch", dtype=torch.float64, options=options
        )


@every_pair
def test_the_cache_has_the_dtype_of_the_inputs(mode, backend):
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        inputs = make(1, 9, dtype=dtype)
        y, cache = softmax_attention(**inputs, mode=mode, backend=backend)
        assert (y.dtype, cache.k.dtype, cache.v.dtype) == (dtype,) * 3
        assert torch.equal(cache.k, inputs["k"]) and torch.equal(cache.v, inputs["v"])
        assert_agree(y, written_out(**inputs))
    # a state of another precision, as where decoding has another than training
    for dtype in (torch.bfloat16, torch.float32):
        y, last = softmax_attention(
            **cut(make(1, 9, dtype=dtype), 8, None), state=cache, mode=mode, backend=backend
        )
        assert (y.dtype, last.k.dtype, last.v.dtype, last.k.shape[1]) == (*(dtype,) * 3, 10)


@every_pair
def test_a_window_keeps_no_more_than_it_sees(mode, backend):
    inputs, cache = make(1, 20), None
    for n in range(20):
        _, cache = softmax_attention(
            **cut(inputs, n, n + 1), state=cache, window=5, mode=mode, backend=backend
        )
        assert_agree(cache.v, inputs["v"][:, max(0, n - 3) : n + 1])
    # nor does it hold on to memory of what it has dropped
    whole = softmax_attention(**inputs, window=5, mode=mode, backend=backend)[1]
    for kept in (cache.k, cache.v, whole.k, whole.v):
        assert kept.shape[1] == 4
        assert kept.untyped_storage().nbytes() == kept.numel() * 8
    _, cache = softmax_attention(**inputs, window=1, state=cache, mode=mode, backend=backend)
    assert cache.k.shape[1] == 0
    # a longer past than the window sees, as from a call without one
    _, cache = softmax_attention(**inputs)
    y, _ = softmax_attention(**inputs, state=cache, window=5, mode=mode, backend=backend)
    twice = map_tree(lambda tensor: torch.cat([tensor, tensor], 1), inputs)
    assert_agree(y, written_out(**twice, window=5)[:, 20:])


@every_pair
def test_what_a_reset_hides_stays_hidden(mode, backend):
    inputs = make(2, 6)
    reset = torch.tensor([[False, False, True, False], [False, False, False, False]])
    _, cache = softmax_attention(**cut(inputs, 0, 4), reset=reset, mode=mode, backend=backend)
    assert cache.alive.tolist() == [[False, False, True, True], [True] * 4]
    y, last = softmax_attention(**cut(inputs, 4, None), state=cache, mode=mode, backend=backend)
    expected = written_out(**inputs, reset=functional.pad(reset, (0, 2)))
    assert_agree(y, expected[:, 4:])
    assert last.alive.tolist() == [[False, False, True, True, True, True], [True] * 6]
    step, _ = softmax_attention(**cut(inputs, 4, 5), state=cache, mode=mode, backend=backend)
    assert_agree(step, expected[:, 4:5])
    assert softmax_attention(**inputs, mode=mode, backend=backend)[1].alive is None


@every_pair
@pytest.mark.parametrize("causal", [True, False])
def test_dropout_drops_shares_and_raises_the_others(mode, backend, causal):
    time = 24
    inputs = make(8, time, 2, 3, time)
    # with these values the outputs are the shares
    inputs["v"] = torch.eye(time, dtype=torch.float64)[None, :, None].expand(8, -1, 2, -1).contiguous()
    options = {"causal": causal, "mode": mode, "backend": backend}
    shares, _ = softmax_attention(**inputs, **options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        y, _ = softmax_attention(**inputs, **options, dropout=0.25)
    kept = y != 0
    assert_agree(y, torch.where(kept, shares / 0.75, 0.0))
    possible = shares > 0
    # 4,800 or 9,216 draws: the spread of their mean is below 0.007
    assert abs(float(kept[possible].double().mean()) - 0.75) < 0.02
    assert not kept[~possible].any()


def test_autocast_leaves_the_inputs_dtype_alone():
    inputs = make(2, 9, dtype=torch.float32)
    expected, _ = softmax_attention(**inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, cache = softmax_attention(**inputs)
    assert torch.equal(y, expected)
    assert cache.k.dtype == torch.float32


@pytest.mark.parametrize("options", [{"causal": False}, {"window": 200}, {"window": 9}])
def test_long_inputs_of_any_size_are_stable(options):
    inputs = {name: 30 * x for name, x in make(1, 600, dtype=torch.bfloat16).items()}
    check_stability(lambda x: softmax_attention(**x, **options), inputs)


X = torch.zeros(2, 5, 3, 4)
CACHE = AttentionCache(X[:, :1], X[:, :1], None, None, None)


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        (
            {"mode": "attn"},
            ValueError,
            "no `mode` of `softmax_attention` called 'attn'; did you mean 'attention'",
        ),
        ({"mode": "recurrent", "backend": "torch"}, ValueError, "has no .* = .'recurrent', 'torch'."),
        ({"k": X[:, :4]}, ValueError, "`k` must have shape .b, t, h, dk., that of `q`"),
        ({"k": X[:, :, :2]}, ValueError, "`k` must have as many heads as `q`, 3, or a number .* got 2"),
        ({"k": X[:, :, :0]}, ValueError, "`k` must have as many heads as `q`, 3, or a number .* got 0"),
        ({"k": X[:, :, :1]}, ValueError, "`v` must have shape .b, t, h, dv. = .2, 5, 1, 4.; got .2, 5, 3, 4"),
        ({"v": X.double()}, TypeError, "`v` must have the real precision of `q`, float32; got float64"),
        ({"q": X.to(torch.complex64)}, TypeError, "`q` must be real; got complex64"),
        ({"k": X.to(torch.complex64)}, TypeError, "`k` must be real; got complex64. `gate_loop_attention`"),
        ({"reset": X[:, :, 0, 0]}, TypeError, "`reset` must be bool"),
        ({"window": 0}, ValueError, "`window` must be at least 1, .* got 0"),
        ({"dropout": 1.0}, ValueError, r"`dropout` must be in \[0, 1\); got 1.0"),
        ({"state": X}, TypeError, "`state` must be an AttentionCache or None; got Tensor"),
        ({"state": CACHE._replace(k=X[:1, :1])}, ValueError, r"`state.k` must have shape \(2, 1, 3, 4\)"),
        ({"state": CACHE, "causal": False}, ValueError, "`state` must be None with `causal=False`; got Att"),
        (
            {"state": gate_loop_attention(X, X, X, torch.zeros(3))[1]},
            ValueError,
            "`state` must have neither decays nor phases",
        ),
    ],
)
def test_errors(changed, error, words):
    with pytest.raises(error, match=words):
        softmax_attention(**{"q": X, "k": X, "v": X} | changed)


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"mode": "scan"}, ValueError, "no `mode` of `laplace_attention` called 'scan'"),
        ({"function": "relu"}, ValueError, "no `function` 'relu'; did you mean 'relu2'"),
        ({"k": X[:, :, :2]}, ValueError, "`k` must have as many heads as `q`, 3, or a number .* got 2"),
        ({"q": X.to(torch.complex64)}, TypeError, "`q` must be real; got complex64"),
        ({"window": 0}, ValueError, "`window` must be at least 1, .* got 0"),
        (
            {"state": gate_loop_attention(X, X, X, torch.zeros(3))[1]},
            ValueError,
            "`state` must have neither decays nor phases; got a cache of `gate_loop_attention`",
        ),
    ],
)
def test_errors_of_laplace_attention(changed, error, words):
    with pytest.raises(error, match=words):
        laplace_attention(**{"q": X, "k": X, "v": X} | changed)


def ring_of(slots, *, groups=2, dtype=torch.float64):
    k, v = (torch.zeros(2, slots, groups, d, dtype=dtype) for d in (3, 4))
    return AttentionCache(k, v, None, None, torch.zeros(2, slots, dtype=torch.bool), torch.tensor([0]))


@pytest.mark.parametrize(("window", "slots"), [(None, 9), (4, 4), (1, 1)])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_ring_is_written_in_place_and_has_the_outputs_of_a_cache(window, slots, groups):
    inputs, ring = make(2, 9, groups=groups), ring_of(slots, groups=groups)
    places = [x.data_ptr() for x in ring[:2]]
    cache = None
    for t in range(9):
        y, ring = softmax_attention(**cut(inputs, t, t + 1), state=ring, window=window)
        expected, cache = softmax_attention(**cut(inputs, t, t + 1), state=cache, window=window)
        assert_agree(y, expected)
        assert [x.data_ptr() for x in ring[:2]] == places
    assert ring.place.item() == 9 % slots
    last = [t % slots for t in range(9 - (slots - 1), 9)] if window else list(range(9))
    assert_agree(ring.v[:, last], cache.v)


def test_a_ring_refuses_what_it_cannot_take():
    inputs = make(2, 2)
    step = cut(inputs, 0, 1)
    with pytest.raises(ValueError, match=r"`state` with a `place`, a ring of 3 slots.* got 2 steps"):
        softmax_attention(**inputs, state=ring_of(3))
    with pytest.raises(ValueError, match="window=4"):
        softmax_attention(**step, state=ring_of(3), window=4)
    with pytest.raises(ValueError, match=r"without gradients"):
        softmax_attention(step["q"].requires_grad_(), step["k"], step["v"], state=ring_of(3))
    step = cut(make(2, 2), 0, 1)
    with pytest.raises(ValueError, match=r"step in torch.float32"):
        softmax_attention(**step, state=ring_of(3, dtype=torch.float32))
    with pytest.raises(ValueError, match=r"given to `softmax_attention`"):
        laplace_attention(**step, state=ring_of(3))
    with pytest.raises(ValueError, match=r"a `state` without `place`"):
        softmax_attention(**step, state=ring_of(3), **REFERENCE)
