"""Buffers of states: rows come and go, and a state that anyone holds stays as it is."""

import random

import pytest
import torch

from linrec.generation import buffers
from linrec.generation.buffers import StateBuffers
from linrec.ops import gate_loop
from linrec.testing import gate_loop_inputs
from linrec.trees import leaves


@pytest.mark.parametrize("seed", range(3))
@torch.no_grad()
def test_rows_come_and_go_as_in_new_memory_and_held_states_stay(seed, monkeypatch):
    monkeypatch.setattr(buffers, "LEAST", 1)
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def rows(n):
        # a part that kernels write, and one that torch's operations make
        return torch.randn(n, 2, 3, 4, generator=generator), torch.randn(n, 5, generator=generator)

    def step(state):
        inputs = gate_loop_inputs(len(state[0]), 1, 2, 3, 4, seed=7, phase=None)
        _, last = gate_loop(**inputs | {"state": state[0]})
        return last, state[1] + 1

    memory = StateBuffers()
    plain = state = rows(4)
    held, places = [], set()
    for _ in range(60):
        plain = step(plain)
        with memory.following(state):
            made = step(state)
        if chance.random() < 0.1:
            # such as a hook does
            held.append((made, plain))
        state = memory.owned(made)
        del made
        if chance.random() < 0.1:
            held.append((state, plain))
            state = memory.owned(state)
        if chance.random() < 0.4 and len(plain[0]) > 2:
            order = chance.sample(range(len(plain[0])), len(plain[0]) - chance.randint(0, 2))
            state, plain = memory.with_order(state, order), tuple(part[order] for part in plain)
        if chance.random() < 0.4 and len(plain[0]) < 8:
            more = rows(chance.randint(1, 2))
            state = memory.with_rows(state, more)
            plain = tuple(map(torch.cat, zip(plain, more, strict=True)))
        assert all(map(torch.equal, state, plain))
        places.add(state[0].data_ptr())
    assert held
    for found, right in held:
        assert all(map(torch.equal, leaves(found), right))
    # two buffers, and others where the first ones were held
    assert len(places) <= 2 + 2 * len(held)
