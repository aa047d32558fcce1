import math

import pytest
import torch

from linrec.nn.evicting_cache import EvictingCache
from linrec.nn.head_sizes import repeat_heads
from linrec.nn.rotary import Rotary
from linrec.ops import softmax_attention
from linrec.testing import assert_agree, generator

BATCH, TIME, HEADS, GROUPS, D, N = 2, 14, 4, 2, 6, 5
CACHES = {
    "window": EvictingCache(N),
    "sinks": EvictingCache(N, sinks=2),
    "tova": EvictingCache(N, "tova"),
    "h2o": EvictingCache(N, "h2o"),
}
ROTARY = Rotary(D, base=100.0)


def inputs(time: int = TIME, seed: int = 0):
    shapes = [(BATCH, time, heads, D) for heads in (HEADS, GROUPS, GROUPS)]
    return [torch.randn(*s, generator=generator(seed + i), dtype=torch.float64) for i, s in enumerate(shapes)]


def empty(cache: EvictingCache):
    return cache.empty(BATCH, GROUPS, D, D, dtype=torch.float64, device=None)


def attend(cache, q, k, v, state=None, *, reset=None, rotary=ROTARY):
    start = empty(cache) if state is None else state
    return cache.attend(q, k, v, start, reset=reset, rotary=rotary, dropout=0.0)


def turned(x, position):
    """x (h, d) at a position."""
    return ROTARY(torch.tensor([[position]]), x[None, None])[0][0, 0]


def by_hand(cache, q, k, v, row):
    """The definition: rows, from which one is dropped after each step, and the rows that are left.

    A row has a step and a sum of weights for each head of keys, as H2O chooses for each head.
    """
    rows, outputs = [], []
    for n in range(q.shape[1]):
        rows.append({"steps": [n] * GROUPS, "sums": [0.0] * GROUPS})
        weights, values = [], []
        for h in range(HEADS):
            g = h // (HEADS // GROUPS)
            steps = [r["steps"][g] for r in rows]
            # to sinks, the position of a query is its place in the cache
            queries = [turned(q[row, n], min(n, cache.size) if m < cache.sinks else n)[h] for m in steps]
            keys = [turned(k[row, m], m)[g] for m in steps]
            scores = [query @ key / math.sqrt(D) for query, key in zip(queries, keys, strict=True)]
            weights.append(torch.stack(scores).softmax(0))
            values.append(sum(w * v[row, m, g] for w, m in zip(weights[-1], steps, strict=True)))
        outputs.append(torch.stack(values))
        for place, r in enumerate(rows):
            for h, weight in enumerate(weights):
                r["sums"][h // (HEADS // GROUPS)] += float(weight[place].detach())
        if len(rows) > cache.size:
            rows = evicted(cache, rows, torch.stack(weights).detach())
    return torch.stack(outputs), rows


def evicted(cache, rows, weights):
    if cache.policy == "window":
        return rows[: cache.sinks] + rows[cache.sinks + 1 :]
    if cache.policy == "tova":
        dropped = int(weights.mean(0).argmin())
        return rows[:dropped] + rows[dropped + 1 :]
    left = [{"steps": [], "sums": []} for _ in rows[1:]]
    for g in range(GROUPS):
        older = rows[: len(rows) - cache.size // 2]
        smallest = min(older, key=lambda r: r["sums"][g])
        for target, source in zip(left, [r for r in rows if r is not smallest], strict=True):
            target["steps"].append(source["steps"][g])
            target["sums"].append(source["sums"][g])
    return left


@pytest.mark.parametrize("name", CACHES)
def test_outputs_and_kept_rows_are_the_definition(name):
    cache, (q, k, v) = CACHES[name], inputs()
    o, state = attend(cache, q, k, v)
    assert state.cache.k.shape[1] == N and state.position.tolist() == [TIME, TIME]
    kept = set()
    for row in range(BATCH):
        expected, rows = by_hand(cache, q, k, v, row)
        assert_agree(o[row], expected)
        for place, r in enumerate(rows):
            for g, step in enumerate(r["steps"]):
                assert_agree(state.cache.v[row, place, g], v[row, step, g])
                assert_agree(state.cache.k[row, place, g], turned(k[row, step], step)[g])
                kept.add(step)
            if name == "h2o":
                assert_agree(state.received[row, place], torch.tensor(r["sums"], dtype=torch.float64))
    # other policies keep other rows than a window does
    assert (kept == set(range(TIME - N, TIME))) == (name == "window")


@pytest.mark.parametrize("name", CACHES)
def test_a_cache_that_is_not_full_is_attention(name):
    cache, (q, k, v) = CACHES[name], inputs(N + 1)
    found, _ = attend(cache, q, k, v)
    q, k = ROTARY(torch.arange(N + 1)[None], q, k)
    assert_agree(found, softmax_attention(q, k, v)[0])
    further = inputs()
    assert (attend(cache, *further)[0] - full(*further)).abs().max() > 1e-2


def full(q, k, v):
    q, k = ROTARY(torch.arange(q.shape[1])[None], q, k)
    return softmax_attention(q, k, v)[0]


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("sizes", [[1] * TIME, [3, 0, 4, 1, 6], [6, 8]])
def test_pieces_give_what_one_call_gives_with_resets_too(name, sizes):
    cache, given = CACHES[name], inputs()
    reset = torch.zeros(BATCH, TIME, dtype=torch.bool)
    reset[0, [4, 5]] = reset[1, 8] = True
    whole, last = attend(cache, *given, reset=reset)
    state, pieces, begin = None, [], 0
    for size in sizes:
        end = begin + size
        part, state = attend(cache, *(x[:, begin:end] for x in given), state, reset=reset[:, begin:end])
        pieces.append(part)
        begin = end
    assert_agree(torch.cat(pieces, 1), whole)
    alive = last.cache.alive[..., None, None]
    assert torch.equal(state.cache.alive, last.cache.alive)
    assert_agree(state.cache.v * alive, last.cache.v * alive)
    assert state.position.tolist() == last.position.tolist() == [TIME - 5, TIME - 8]
    # documents apart, and NaN before a reset
    for x in given:
        x[1, :8] = torch.nan
    apart, _ = attend(cache, *(x[:, 8:] for x in given))
    assert_agree(attend(cache, *given, reset=reset)[0][1, 8:], apart[1])


@pytest.mark.parametrize("name", CACHES)
def test_gradients_are_those_of_the_kept_steps(name):
    cache, given = CACHES[name], [x.requires_grad_() for x in inputs(8)]
    found = torch.autograd.grad(attend(cache, *given)[0].sin().sum(), given)
    expected = sum(by_hand(cache, *given, row)[0].sin().sum() for row in range(BATCH))
    assert_agree(found, torch.autograd.grad(expected, given))


def test_without_positions_sinks_are_further_steps_of_a_window():
    q, k, v = inputs()
    found, _ = attend(CACHES["sinks"], q, k, v, rotary=None)
    age = torch.arange(TIME)[:, None] - torch.arange(TIME)
    seen = (age >= 0) & ((age <= N - 2) | (torch.arange(TIME) < 2))
    heads = [x.transpose(1, 2) for x in (q, repeat_heads(k, HEADS), repeat_heads(v, HEADS))]
    expected = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=seen)
    assert_agree(found, expected.transpose(1, 2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3, "tva"), "there is no `eviction` 'tva'; did you mean 'tova'"),
        ((0,), "`cache_size` must be at least 1; got 0"),
        ((1, "h2o"), "`cache_size` must be at least 2; got 1"),
        ((3, "window", 3), "`sinks` must be at least 0 and at most 2; got 3"),
        ((3, "tova", 1), '`sinks` must be 0 with `eviction="tova"`'),
    ],
)
def test_argument_errors(arguments, message):
    with pytest.raises(ValueError) as error:
        EvictingCache(*arguments)
    assert message in str(error.value)
