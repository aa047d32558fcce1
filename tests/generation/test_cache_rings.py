import itertools

import pytest
import torch

from linrec.generation import caches, generate, pad_prompts, steps, stream
from linrec.generation.state import named
from linrec.testing import assert_agree
from linrec.trees import leaves
from tests.tiers import thorough, tiered

from .models import FIRST, MIXERS, build, prompt

CACHES = {
    "attention": {},
    "gate_loop and attention": {},
    # whose channel mixing has a state too
    "attention and rwkv channels": {"channel_mixing": "rwkv"},
    "attention, ALiBi": {"positions": "alibi"},
    "attention, window": {"window": 7},
    "attention, window of 1": {"window": 1},
}


def model_of(name, **config):
    mixer = ("gate_loop", "attention") if "and attention" in name else "attention"
    options = dict(CACHES[name])
    arguments = {key: options.pop(key) for key in ("window", "positions") if key in options}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MIXERS, name, (mixer, arguments))
        return build(name, **options, **config)


@pytest.fixture(autouse=True)
def little_room(monkeypatch):
    monkeypatch.setattr(caches, "ROOM", 5)
    # steps have room where they are compiled; the compiler itself is not what is tested here
    monkeypatch.setattr(steps, "with_parts_compiled", lambda model, **options: model)


@thorough
@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("padded", tiered([True], rare=[False]))
def test_steps_with_room_are_the_steps(name, padded):
    model = model_of(name)
    # the newest token of the first sequence begins a document
    tokens, reset = pad_prompts([prompt(1, 1)[0], prompt(1, 4)[0]]) if padded else (prompt(), None)
    plain, roomy = (stream(model, tokens, reset=reset, seed=3, compile=c) for c in (False, True))
    shapes = []
    for _ in range(40):
        assert torch.equal(next(roomy), next(plain))
        shapes.append([x.shape for x in leaves(roomy._steps._layers)])
        assert named(roomy.state.layers, "layers").keys() == named(plain.state.layers, "layers").keys()
        assert_agree(roomy.state.layers, plain.state.layers)
    # the first step has no room, then rooms follow each other, unless there is a window
    changes = [n + 1 for n, (one, other) in enumerate(itertools.pairwise(shapes)) if one != other]
    expected = [1]
    while (made := expected[-1]) < 40 and "window" not in name:
        expected.append(made + max(5, (tokens.shape[1] + made - 1) // 2))
    assert {*changes} <= {*expected}
    if "window" not in name:
        # slots are rounded up to a multiple of 8, so that a room may have the shape of the room before
        assert len(changes) >= 3


@thorough
def test_a_state_with_room_is_continued():
    model = model_of("attention")
    whole, last = generate(model, prompt(), n_tokens=30, seed=3)
    first, state = generate(model, prompt(), n_tokens=9, seed=3, compile=True)
    second, end = generate(model, state=state, n_tokens=21, seed=3, compile=True)
    assert torch.equal(torch.cat([first, second], dim=1), whole)
    assert_agree(end.layers, last.layers)
    assert end.nbytes == last.nbytes


def test_models_that_need_no_room():
    for name in ("hgru", "gate_loop_attention"):
        assert caches.CacheRings.of(build(name)) is None
    # keys beside sums of decays
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CACHES, "attention, xPos", {"positions": "xpos"})
        assert caches.CacheRings.of(model_of("attention, xPos")) is None


class Again:
    """In place of a CUDA graph: takes the step again, from and into the same buffers."""

    def __init__(self, steps, after):
        self._steps, self._before, self._after = steps, (steps._token, steps._layers), after

    def replay(self):
        steps = self._steps
        steps._token, steps._layers = self._before
        steps._step_into(self._after)


@thorough
@pytest.mark.parametrize("name", CACHES)
def test_two_graphs_share_the_slots(name, monkeypatch):
    model = model_of(name)
    plain, roomy = (stream(model, prompt(), seed=3, compile=c) for c in (False, True))
    taken = roomy._steps
    monkeypatch.setattr(steps.torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(taken, "_recorded", lambda after, pool: Again(taken, after))
    taken._capture = True
    places = set()
    for n in range(40):
        assert torch.equal(next(roomy), next(plain))
        assert_agree(roomy.state.layers, plain.state.layers)
        if n % 5 == 4:
            places |= {x.data_ptr() for _, after in taken._graphs for x in leaves(after.layers)}
    assert taken.captured
    if "window" in name:
        # two layers: slots and masks once for both graphs, places and positions once for each
        assert len(places) == 2 * (3 + 2 * 2)


@pytest.mark.parametrize("name", tiered(["gla", "attention", "hybrid"], FIRST, MIXERS))
@torch.no_grad()
def test_bytes_of_a_state_are_bounded_before_it_is_there(name):
    model = build(name)
    if model.has_segments:
        pytest.skip("states of segments are bounded by themselves")
    for length in (1, 5, 40):
        _, state = model.hidden(torch.zeros(1, length, dtype=torch.int64), model.init_state(1))
        assert sum(part.nbytes for part in leaves(state)) <= caches.bytes_of_state(model, length)
