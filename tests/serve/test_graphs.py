"""Rows in fixed memory, and steps captured as CUDA graphs, give the tokens of `generate`."""

import random

import pytest
import torch

from linrec.ops.core.kernel import successors
from linrec.serve import Engine, graphs
from linrec.serve.graphs import FixedRows, fixed_state
from linrec.serve.rows import Runner
from linrec.serve.sampling import choose, choose_plain
from linrec.trees import leaves, map_tree
from tests.generation.models import FIRST, MIXERS, VOCAB, build
from tests.serve.test_engine import PROMPTS, alone, check_tokens, small
from tests.tiers import tiered


def fixed(runner):
    if (row := fixed_state(runner)) is None:
        pytest.skip("the shape of the state changes")
    return FixedRows(runner, row, budget=2**30)


@pytest.mark.parametrize("name", ["transformer_xl", "reformer", "falcon_h1"])
def test_states_that_grow_have_no_fixed_rows(name):
    assert fixed_state(Runner(build(name))) is None


def test_rows_join_and_leave_fixed_memory():
    engine, draw = small("gate_loop", slots=6), random.Random(0)
    rows, expected = fixed(Runner(engine.model)), {}
    for n in range(60):
        if len(rows) < 6 and draw.random() < 0.6:
            asked = engine.submit([n % VOCAB], n_tokens=1)
            expected[asked] = map_tree(torch.randn_like, rows.model.init_state(1))
            rows.join([asked], expected[asked])
        gone = [request for request in rows.requests if draw.random() < 0.2]
        rows.leave(gone)
        for request in gone:
            del expected[request]
        assert set(rows.requests) == set(expected)
        for row, request in enumerate(rows.requests):
            torch.testing.assert_close(leaves(rows.of(row)), leaves(expected[request]), rtol=0, atol=0)


@pytest.mark.parametrize("name", tiered(["gate_loop", "attention", "hybrid"], FIRST, MIXERS))
def test_engines_with_fixed_rows_give_the_same_tokens(name):
    engine = small(name)
    engine._slots.kinds.insert(0, fixed(engine._slots.runner))
    check_tokens(engine)


@pytest.mark.parametrize("name", ["gate_loop", "attention", "attention window", "hybrid"])
@pytest.mark.parametrize("n_rows", [0, 2, 8])
def test_memory_grows_and_shrinks_within_its_budget(name, n_rows, monkeypatch):
    monkeypatch.setattr(graphs, "SHORT", 4)
    engine = small(name, slots=8)
    rows = fixed(engine._slots.runner)
    engine._slots.kinds.insert(0, rows)
    rows.budget = rows._bytes((n_rows, 64))
    found, sizes, elsewhere = [], set(), 0
    for turn in range(30):
        # long and short answers, and rows that leave
        asked = engine.submit(PROMPTS[turn % 4], n_tokens=3 + 11 * (turn % 3), seed=turn)
        found.append((asked, PROMPTS[turn % 4], asked.options.n_tokens, turn))
        engine.step()
        sizes.add(rows._size)
        elsewhere += len(engine._slots.kinds[-1])
        assert sum(part.nbytes for part in leaves(rows._memory)) <= rows.budget
    for request, prompt, n_tokens, seed in found:
        assert request.result() == alone(engine.model, prompt, n_tokens, seed=seed)
    assert (len(sizes) > 1) == (n_rows > 0) and (elsewhere > 0) == (n_rows < 8)
    assert n_rows < 8 or (max(sizes)[0] == 8 and rows._size[0] <= 2)


def test_a_long_request_does_not_lengthen_the_rings_of_short_ones(monkeypatch):
    monkeypatch.setattr(graphs, "SHORT", 4)
    engine = small("attention", slots=20, chunk=512, prompt_tokens=1024)
    rows = fixed(engine._slots.runner)
    engine._slots.kinds.insert(0, rows)
    asked = [engine.submit([token, 1], n_tokens=400, temperature=0) for token in range(8)]
    asked.append(engine.submit([1] * 500, n_tokens=4, temperature=0))
    while not all(len(request.generated) > 1 for request in asked):
        engine.step()
    assert rows._size[1] <= 256
    assert engine._slots.kinds[-1].requests == [asked[-1]]
    assert asked[-1].result() == alone(engine.model, [1] * 500, 4, temperature=0)


@pytest.mark.parametrize("name", tiered(["gate_loop", "delta_net"], FIRST, MIXERS))
@torch.no_grad()
def test_steps_that_write_into_the_state_before_them(name):
    model = build(name)
    if fixed_state(Runner(model)) is None or any(mixer.state_grows for mixer in model.mixers):
        pytest.skip("the shape of the state changes")
    tokens = torch.tensor([[1], [2], [3]])
    _, state = model.hidden(tokens, model.init_state(3))
    expected = model.hidden(tokens, map_tree(torch.clone, state))
    state = map_tree(lambda part: part.clone(memory_format=torch.contiguous_format), state)
    with successors((part, part) for part in leaves(state)):
        found = model.hidden(tokens, state)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_choices_without_filters_are_those_of_the_sampler():
    engine = small("gate_loop")
    temperatures = [0, 0.3, 1.0, 2.5, 0]
    requests = [engine.submit([1], n_tokens=1, temperature=t, seed=n) for n, t in enumerate(temperatures)]
    for _ in range(50):
        logits = 3 * torch.randn(5, 1, 97)
        given = [(request.options.sampling.temperature, request.uniform()) for request in requests]
        temperature, uniform = torch.tensor(given, dtype=torch.float64).unbind(1)
        found = choose_plain(logits[:, 0], temperature[:, None], uniform[:, None])
        assert found.tolist() == choose(logits, requests)[:, 0].tolist()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", MIXERS)
def test_captured_steps_give_the_tokens_of_generate(name):
    model = build(name).cuda()
    engine = Engine(model, slots=6, chunk=4, prompt_tokens=8)
    if len(engine._slots.kinds) == 1:
        pytest.skip("the shape of the state changes")
    check_tokens(engine)
    assert engine._slots.kinds[0]._graphs


@pytest.mark.parametrize("name", ["gate_loop", "attention"])
def test_the_next_step_begins_before_tokens_are_looked_at(name):
    """Requests join, leave, fork and go back while a step is on its way."""
    engine, draw = small(name, slots=6, snapshots=2**20, interval=4), random.Random(0)
    engine._slots.kinds.insert(0, rows := fixed(engine._slots.runner))
    found, ahead, forks = [], 0, 0
    for turn in range(60):
        if draw.random() < 0.4:
            prompt = PROMPTS[turn % 4]
            # with a filter, a step waits for the tokens of the one before
            top_k = 3 if turn > 40 else None
            found.append((engine.submit(prompt, n_tokens=9, seed=turn, top_k=top_k), prompt, turn, top_k))
        engine.step()
        ahead += rows._ahead is not None
        for request, *given in draw.sample(found, min(len(found), 2)):
            if request.ended is None and len(request.generated) > 3 and draw.random() < 0.5:
                found.append((engine.fork(request), *given))
                engine.rollback(request, 2)
                forks += 1
    assert ahead > 20 and forks > 5
    for request, prompt, seed, top_k in found:
        assert request.result() == alone(engine.model, prompt, 9, seed=seed, top_k=top_k)
