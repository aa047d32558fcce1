import itertools

import pytest
import torch

from linrec.generation import caches, generate, pad_prompts, stream
from linrec.generation.caches import CacheRings
from linrec.generation.noise import BLOCK
from linrec.testing import assert_agree
from linrec.trees import leaves

from .models import MIXERS, build, prompt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


# how a token is chosen does not depend on the mixer
OPTIONS = [{"temperature": 0}, {"top_k": 5}, {"top_p": 0.9}]
CASES = [*((name, {}) for name in MIXERS), *itertools.product(["gate_loop", "attention"], OPTIONS)]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_a_replayed_step_gives_the_tokens_of_the_step(name, precision, options):
    model = build(name, dtype=torch.float32).cuda()
    options = options | {"precision": precision, "seed": 3}
    captured = stream(model, prompt(), **options)
    if precision == "bf16-mixed" and CacheRings.of(model) is not None:
        # hidden steps need a mask, and kernels with a mask round in other places, which can change a token
        tokens = torch.stack([next(captured) for _ in range(40)], 1)
        again = stream(model, torch.cat([prompt().cuda(), tokens], 1), **options)
        assert captured.captured
        assert_agree(captured.state.layers, again.state.layers, dtype=torch.bfloat16)
        return
    eager = stream(model, prompt(), capture=False, **options)
    shapes = []
    for _ in range(40):
        assert torch.equal(next(captured), next(eager))
        shapes.append([x.shape for x in leaves(eager.state.layers)])
    assert not eager.captured
    # a window is full after some steps, and has one shape from then on; a cache without a window has room
    assert captured.captured == (shapes[-1] == shapes[-2] or CacheRings.of(model) is not None)
    assert torch.equal(captured.state.token, eager.state.token)
    assert_agree(captured.state.layers, eager.state.layers)


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.parametrize("compile", [False, True])
def test_steps_are_recorded_again_when_the_room_of_a_cache_is_used_up(compile, monkeypatch):
    monkeypatch.setattr(caches, "ROOM", 10)
    model = build("attention", dtype=torch.float64).cuda()
    eager = generate(model, prompt(), n_tokens=60, capture=False)
    numbers = stream(model, prompt(), compile=compile)
    found, captured = [], []
    for _ in range(60):
        found.append(next(numbers))
        captured.append(numbers.captured)
    assert torch.equal(torch.stack(found, 1), eager.tokens)
    assert sum(now and not before for before, now in itertools.pairwise(captured)) == 5
    assert_agree(numbers.state.layers, eager.state.layers)


def test_replaying_goes_on_over_the_ends_of_blocks_of_noise():
    model, n = build("hgru", dtype=torch.float32).cuda(), 2 * BLOCK + 10
    found = [generate(model, prompt(), n_tokens=n, capture=capture).tokens for capture in (False, True)]
    assert torch.equal(*found)


def test_the_gpu_gives_the_tokens_of_the_cpu():
    model = build("gate_loop")
    expected = generate(model, prompt(), n_tokens=30, top_p=0.9).tokens
    assert torch.equal(generate(model.cuda(), prompt(), n_tokens=30, top_p=0.9).tokens.cpu(), expected)


def test_what_was_returned_stays_what_it_was():
    numbers = stream(build("hgru", dtype=torch.float32).cuda(), prompt())
    tokens = list(itertools.islice(numbers, 10))
    assert numbers.captured
    copies, state = [token.clone() for token in tokens], numbers.state
    layers, token = [layer.clone() for layer in state.layers], state.token.clone()
    list(itertools.islice(numbers, 10))
    assert all(map(torch.equal, tokens, copies))
    assert all(map(torch.equal, state.layers, layers)) and torch.equal(state.token, token)


def test_stopping_and_going_on_between_replayed_steps():
    model = build("gate_loop", dtype=torch.float32).cuda()
    whole, _ = generate(model, prompt(), n_tokens=30)
    first, state = generate(model, prompt(), n_tokens=13)
    second, _ = generate(model, state=state, n_tokens=17)
    assert torch.equal(torch.cat([first, second], dim=1), whole)


def test_prompts_of_several_lengths():
    model = build("hgru", dtype=torch.float32).cuda()
    tokens, reset = pad_prompts([prompt()[0], prompt()[1, :1]])
    found = [
        generate(model, tokens, reset=reset, n_tokens=20, capture=capture).tokens for capture in (False, True)
    ]
    assert torch.equal(*found)


def test_a_state_whose_parts_change_places(monkeypatch):
    # each step moves what it was given one place on, which a copy in the wrong order would lose
    model = build("hgru", dtype=torch.float32).cuda()
    hidden = model.hidden

    def rotating(tokens, layers=None, **options):
        layers = layers if layers is None else tuple(layers)
        x, (first, second) = hidden(tokens, layers, **options)
        return x, (second, layers[0] if layers is not None else first)

    monkeypatch.setattr(model, "hidden", rotating)
    found = [generate(model, prompt(), n_tokens=20, capture=capture).tokens for capture in (False, True)]
    assert torch.equal(*found)


@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex operators")
@pytest.mark.filterwarnings("ignore:\\s*Online softmax is disabled")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float64) for name in ("gla", "hgru", "retnet", "mamba", "hybrid")),
        # the kernels of single steps take no float64
        *((name, torch.float32) for name in ("gla", "retnet")),
    ],
)
def test_a_compiled_step_is_replayed_and_gives_the_tokens_of_the_step(name, dtype):
    model = build(name, dtype=dtype).cuda()
    plain = generate(model, prompt(), n_tokens=40, capture=False)
    numbers = stream(model, prompt(), compile=True)
    assert torch.equal(torch.stack(list(itertools.islice(numbers, 40)), 1), plain.tokens)
    assert numbers.captured
    assert_agree(numbers.state.layers, plain.state.layers)
