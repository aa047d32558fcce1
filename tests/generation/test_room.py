import itertools

import pytest
import torch

from linrec.generation import generate, pad_prompts, room, steps, stream
from linrec.generation.state import named
from linrec.testing import assert_agree
from linrec.trees import leaves

from .models import MIXERS, build, prompt

GROWING = {
    "attention": {},
    "gate_loop and attention": {},
    # whose channel mixing has a state too
    "attention and rwkv channels": {"channel_mixing": "rwkv"},
}


def model_of(name, **config):
    mixer = ("gate_loop", "attention") if "and attention" in name else "attention"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MIXERS, name, (mixer, {}))
        return build(name, **GROWING[name], **config)


@pytest.fixture(autouse=True)
def little_room(monkeypatch):
    monkeypatch.setattr(room, "ROOM", 5)
    # steps have room where they are compiled; the compiler itself is not what is tested here
    monkeypatch.setattr(steps, "with_parts_compiled", lambda model, **options: model)


@pytest.mark.parametrize("name", GROWING)
@pytest.mark.parametrize("padded", [False, True])
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
    # the first step has no room, then rooms follow each other
    changes = [n + 1 for n, (one, other) in enumerate(itertools.pairwise(shapes)) if one != other]
    expected = [1]
    while (made := expected[-1]) < 40:
        expected.append(made + max(5, (tokens.shape[1] + made - 1) // 2))
    assert changes == expected[:-1]


def test_a_state_with_room_is_continued():
    model = model_of("attention")
    whole, last = generate(model, prompt(), n_tokens=30, seed=3)
    first, state = generate(model, prompt(), n_tokens=9, seed=3, compile=True)
    second, end = generate(model, state=state, n_tokens=21, seed=3, compile=True)
    assert torch.equal(torch.cat([first, second], dim=1), whole)
    assert_agree(end.layers, last.layers)
    assert end.nbytes == last.nbytes


def test_models_that_need_no_room():
    for name in ("hgru", "attention window", "gate_loop_attention"):
        assert room.Room.of(build(name)) is None


def test_room_does_not_modify_the_model():
    model = model_of("gate_loop and attention")
    generate(model, prompt(), n_tokens=9, compile=True)
    assert model.mixers[1].window is None
