import contextlib
import copy
import itertools
import re
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn import functional
from torch.nn.utils import prune

from linrec.generation import buffers, fingerprint, generate, pad_prompts, prefill, stream
from linrec.generation.buffers import StateBuffers
from linrec.generation.noise import uniforms
from linrec.generation.precision import autocast, with_weights_cast
from linrec.generation.state import named
from linrec.generation.steps import Buffers, Steps
from linrec.models.compilation import EAGER_STEPS, compiling, with_parts_compiled
from linrec.nn.row_linear import RowLinear
from linrec.testing import assert_agree
from linrec.trees import leaves
from tests.tiers import thorough, tiered

from .models import FIRST, MIXERS, VOCAB, build, prompt

# states of one tensor, of several, that grow, and of several kinds of layers; the laws are about all mixers
SOME = ["gate_loop", "rwkv4", "attention", "hybrid"]
every_mixer = pytest.mark.parametrize("name", tiered(SOME, MIXERS))
some_mixers = pytest.mark.parametrize("name", tiered(SOME, FIRST, MIXERS))


@torch.no_grad()
def without_states(model, tokens, n_tokens, choose):
    """Generate by a full forward pass for each token; `choose` maps (b, v) logits and the place to tokens."""
    start = tokens.shape[1]
    for place in range(n_tokens):
        logits, _ = model(tokens)
        tokens = torch.cat([tokens, choose(logits[:, -1], place)[:, None]], dim=1)
    return tokens[:, start:]


@every_mixer
@pytest.mark.parametrize("length", tiered([2], rare=[1, 6]))
def test_greedy_is_the_argmax_of_full_passes(name, length):
    model, tokens = build(name), prompt(length=length)
    expected = without_states(model, tokens, 12, lambda logits, _: logits.argmax(-1))
    found, _ = generate(model, tokens, n_tokens=12, temperature=0)
    assert torch.equal(found, expected)


@some_mixers
def test_sampling_is_that_of_full_passes(name):
    model, tokens = build(name), prompt(batch=6)

    def choose(logits, place):
        chosen = []
        for row, values in enumerate(logits.numpy()):
            # the three likeliest of four fifths of the temperature, by the inverse of their distribution
            likely = np.argsort(-values)[:3]
            p = np.exp(values[likely] / 0.8)
            chosen.append(
                likely[np.searchsorted(p.cumsum() / p.sum(), uniforms(9, row, place, 1)[0], "right")]
            )
        return torch.tensor(chosen)

    expected = without_states(model, tokens, 12, choose)
    found, _ = generate(model, tokens, n_tokens=12, temperature=0.8, top_k=3, seed=9)
    assert torch.equal(found, expected)
    # more than the three likeliest of one distribution
    assert len(expected.unique()) > 3


@some_mixers
def test_a_prompt_in_pieces_is_the_prompt(name, monkeypatch):
    model, tokens = build(name), prompt(length=11)
    _, whole = generate(model, tokens, n_tokens=0)
    longest = []
    hidden = model.hidden
    monkeypatch.setattr(prefill, "PIECE", 6)
    monkeypatch.setattr(
        model, "hidden", lambda x, *rest, **named: longest.append(x) or hidden(x, *rest, **named)
    )
    _, pieces = generate(model, tokens, n_tokens=0)
    assert [piece.shape[1] for piece in longest] == [3, 3, 3, 1]
    assert_agree(pieces.layers, whole.layers)


@thorough
@pytest.mark.parametrize(("name", "expected"), [("hgru", [3, 3, 3]), ("attention", [])])
def test_whole_pieces_of_a_prompt_are_compiled_unless_the_state_grows(name, expected, monkeypatch):
    model, tokens = build(name), prompt(length=11)
    whole = prefill.prefill(model, tokens, None, None, "32-true")
    counted = CompileCounter()
    parts = with_parts_compiled(model, backend=counted)
    assert parts.state_dict().keys() == model.state_dict().keys()
    lengths = []
    hidden = parts.hidden
    monkeypatch.setattr(prefill, "COMPILED_STEPS", 3)
    monkeypatch.setattr(
        parts, "hidden", lambda x, *rest, **named: lengths.append(x.shape[1]) or hidden(x, *rest, **named)
    )
    found = prefill.prefill(model, tokens, None, None, "32-true", compiled=parts)
    assert lengths == expected and (counted.frame_count > 0) == bool(expected)
    assert_agree(found, whole)


@pytest.mark.parametrize(("name", "expected"), [("hgru", 7), ("attention", 0)])
def test_the_compiled_step_waits_until_the_state_has_a_constant_shape(name, expected):
    numbers, calls = stream(build(name), prompt(), seed=3), []
    model = numbers._steps._model

    def hidden(*given, **named):
        calls.append(given)
        return model.hidden(*given, **named)

    numbers._steps._settled_model = SimpleNamespace(hidden=hidden, head=model.head)
    for _ in range(8):
        next(numbers)
    assert len(calls) == expected


@some_mixers
def test_steps_between_two_sets_of_buffers_are_the_steps(name, monkeypatch):
    model, tokens = build(name), prompt()
    eager, numbers = (stream(model, tokens, seed=3) for _ in range(2))
    expected = [next(eager) for _ in range(20)]
    steps = numbers._steps
    found = [next(numbers) for _ in range(8)]
    if steps._settled < EAGER_STEPS:
        pytest.skip("a state that grows has no buffers")

    class Replayed:
        def __init__(self, before, after):
            self.before, self.after = before, after

        def replay(self):
            steps._token, steps._layers = self.before
            with torch.no_grad():
                steps._step_into(self.after)

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(
        Steps, "_recorded", lambda self, after, pool: Replayed(Buffers(self._token, self._layers), after)
    )
    steps._record()
    places = set()
    for _ in range(12):
        steps._noise.advance()
        steps._replay()
        found.append(steps._token.clone())
        places.add(tuple(x.data_ptr() for x in leaves(steps._layers)))
    assert torch.equal(torch.stack(found), torch.stack(expected))
    assert_agree(steps._layers, eager.state.layers)
    assert len(places) == 2


def test_a_seed_gives_the_same_tokens_and_another_one_others():
    model, tokens = build("hgru"), prompt()
    one, again, other = (generate(model, tokens, n_tokens=20, seed=seed).tokens for seed in (4, 4, 5))
    assert torch.equal(one, again) and not torch.equal(one, other)


@some_mixers
def test_rows_are_independent(name):
    model, tokens = build(name), prompt(batch=3)
    together, _ = generate(model, tokens, n_tokens=9, seed=2)
    alone, _ = generate(model, tokens[:1], n_tokens=9, seed=2)
    assert torch.equal(together[:1], alone)


def test_equal_prompts_are_continued_differently():
    tokens, _ = generate(build("hgru"), prompt(batch=1).expand(4, -1), n_tokens=20)
    assert len({tuple(row) for row in tokens.tolist()}) == 4


@some_mixers
@pytest.mark.parametrize("before", tiered([1], [0, 4]))
def test_continuing_is_not_having_stopped(name, before):
    model, tokens = build(name), prompt()
    whole, end = generate(model, tokens, n_tokens=9, seed=3)
    first, state = generate(model, tokens, n_tokens=before, seed=3)
    second, last = generate(model, state=state, n_tokens=9 - before, seed=3)
    assert torch.equal(torch.cat([first, second], dim=1), whole)
    assert last.drawn == end.drawn == 9
    assert_agree(last.layers, end.layers)


@some_mixers
def test_a_state_takes_more_prompt(name):
    model, tokens = build(name), prompt(length=8)
    whole, _ = generate(model, tokens, n_tokens=6, seed=1)
    for split in (1, 3, 7):
        _, state = generate(model, tokens[:, :split], n_tokens=0)
        after, _ = generate(model, tokens[:, split:], state=state, n_tokens=6, seed=1)
        assert torch.equal(after, whole)


@some_mixers
def test_prompts_of_several_lengths_are_continued_as_alone(name):
    model = build(name)
    prompts = [prompt(1, length, seed=length)[0] for length in (1, 7, 2)]
    tokens, reset = pad_prompts(prompts)
    together, _ = generate(model, tokens, reset=reset, n_tokens=8, temperature=0)
    for row, alone in zip(together, prompts, strict=True):
        assert torch.equal(row, generate(model, alone[None], n_tokens=8, temperature=0).tokens[0])
    # also when they were kept in between, the newest token being the first of its document
    _, state = generate(model, tokens, reset=reset, n_tokens=0)
    assert model.has_segments or state.reset.tolist() == [True, False, False]
    assert torch.equal(generate(model, state=state, n_tokens=8, temperature=0).tokens, together)
    more = prompt(3, 2)
    after, _ = generate(model, more, state=state, n_tokens=8, temperature=0)
    for row, start, end in zip(after, prompts, more, strict=True):
        alone = torch.cat([start, end])[None]
        assert torch.equal(row, generate(model, alone, n_tokens=8, temperature=0).tokens[0])


def test_a_state_stays_what_it_was_while_the_stream_goes_on():
    numbers = stream(build("gate_loop"), prompt())
    list(itertools.islice(numbers, 3))
    state = numbers.state
    kept = {name: tensor.clone() for name, tensor in named(state.layers, "layers").items()}
    list(itertools.islice(numbers, 3))
    assert all(torch.equal(tensor, kept[name]) for name, tensor in named(state.layers, "layers").items())
    assert (state.drawn, numbers.state.drawn) == (3, 6)


@pytest.mark.parametrize("name", tiered(["gla", "hybrid"], FIRST, MIXERS))
def test_steps_reuse_memory_only_of_states_that_nobody_holds(name, monkeypatch):
    model, tokens = build(name), prompt()
    monkeypatch.setattr(StateBuffers, "following", lambda *_: contextlib.nullcontext())
    plain = stream(model, tokens, seed=3)
    expected = [(next(plain), plain.state.layers) for _ in range(12)]
    monkeypatch.undo()
    monkeypatch.setattr(buffers, "LEAST", 1)
    hooked, held, places = [], {}, set()
    numbers = stream(model, tokens, seed=3)
    for step, (token, _) in enumerate(expected):
        if step == 4:
            hook = model.mixers[0].register_forward_hook(lambda module, given, out: hooked.append(out[1]))
        assert torch.equal(next(numbers), token)
        if step == 4:
            hook.remove()
        if step in (2, 7):
            held[step] = numbers.state.layers
        places.add(leaves(numbers.state.layers)[-1].data_ptr())
    held[11] = numbers.state.layers
    for step, layers in held.items():
        for part, right in zip(leaves(layers), leaves(expected[step][1]), strict=True):
            assert torch.equal(part, right)
    layer = expected[4][1][0]
    right = leaves(layer if len(leaves(layer)) == len(leaves(hooked)) else layer[0])
    assert all(map(torch.equal, leaves(hooked), right))
    # two buffers, and another one for each state that is held
    assert name != "gla" or len(places) == 4


def test_the_state_of_a_recurrence_does_not_grow():
    model = build("hgru")
    bytes_after = [generate(model, prompt(length=n), n_tokens=n).state.nbytes for n in (1, 40)]
    # a row of 8 complex numbers of 16 bytes in each of two layers
    assert bytes_after == [2 * 2 * 8 * 16] * 2


def test_padding_of_the_vocabulary_is_never_generated():
    model = build("hgru")
    torch.nn.init.constant_(model.head.bias[10:], 100.0)
    assert generate(model, prompt(), n_tokens=5).tokens.min() >= 10
    assert generate(model, prompt() % 10, n_tokens=50, vocab_size=10).tokens.max() < 10


CAST = ["gate_loop", "hgru", "lru", "attention", "hyena", "tnn"]


@pytest.mark.parametrize(
    ("name", "tied"),
    tiered([("gate_loop", True), *((name, False) for name in CAST)], [(name, True) for name in CAST]),
)
def test_weights_that_are_cast_once_are_those_of_autocast(name, tied):
    model = build(name, dtype=torch.float32, tie_embeddings=tied)
    before, tokens = fingerprint(model), prompt(length=20)
    cast = with_weights_cast(model, "bf16-mixed")
    with torch.no_grad(), autocast("bf16-mixed", torch.device("cpu")):
        for mine, expected in zip(cast(tokens), model(tokens), strict=True):
            torch.testing.assert_close(mine, expected, rtol=0, atol=0)
    assert cast.head.weight.dtype == torch.bfloat16 and cast.embedding.weight is model.embedding.weight
    weights = {id(module.weight) for module in model.modules() if type(module) is nn.Linear}
    layers = [module for module in cast.modules() if isinstance(module, RowLinear)]
    assert len(layers) == len(weights) > 0 and not any(type(m) is nn.Linear for m in cast.modules())
    assert all(layer.weight.dtype == torch.bfloat16 for layer in layers) or name in ("hyena", "tnn")
    assert fingerprint(model) == before
    assert len(generate(model, tokens, n_tokens=3, precision="bf16-mixed").tokens[0]) == 3


class Adapted(nn.Module):
    """A layer with another beside it, as of PEFT's LoRA."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.base, self.a = layer, nn.Linear(layer.in_features, 2)
        self.b = nn.Linear(2, layer.out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


def replaced(layer: nn.Linear) -> nn.Linear:
    """The layer with a `forward` of its own, as of accelerate's hooks."""
    layer.forward = lambda x: 3 * functional.linear(x, layer.weight)
    return layer


def hooked(layer: nn.Linear) -> nn.Linear:
    layer.register_forward_hook(lambda module, given, y: y + 1)
    return layer


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: prune.random_unstructured(layer, "weight", 0.5),
        nn.utils.spectral_norm,
        nn.utils.weight_norm,
        nn.utils.parametrizations.spectral_norm,
        nn.utils.parametrizations.weight_norm,
        Adapted,
        replaced,
        hooked,
    ],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_layers_that_compute_more_than_their_class_are_those_of_autocast(change):
    model, tokens = build("gla", dtype=torch.float32), prompt(length=20)
    # all layers of one input, and one of others
    for mixer in (block.mixer for block in model.blocks):
        for name in ("q", "k", "v", "out"):
            setattr(mixer, name, change(getattr(mixer, name)))
    model.head = change(model.head)
    before = fingerprint(model)
    cast = with_weights_cast(model, "bf16-mixed")
    with torch.no_grad(), autocast("bf16-mixed", torch.device("cpu")):
        expected, found = model(tokens)[0], cast(tokens)[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert any(isinstance(module, RowLinear) for module in cast.modules())
    assert fingerprint(model) == before
    assert len(generate(model, tokens, n_tokens=3, precision="bf16-mixed").tokens[0]) == 3


def test_hooks_are_called_in_every_precision():
    model, tokens = build("gla", dtype=torch.float32), prompt()
    called: list[str] = []
    for name, module in model.named_modules():
        module.register_forward_hook(lambda *_, name=name: called.append(name))
    counts = []
    for precision in ("32-true", "bf16-mixed"):
        called.clear()
        generate(model, tokens, n_tokens=3, precision=precision)
        counts.append(Counter(called))
    assert counts[0] == counts[1]
    assert counts[0]["blocks.1.mixer.q"] >= 3


def test_nothing_is_captured_on_the_cpu():
    numbers = stream(build("hgru"), prompt(), capture=True)
    list(itertools.islice(numbers, EAGER_STEPS + 3))
    assert not numbers.captured


def test_no_memory_is_kept_for_gradients():
    _, state = generate(build("gate_loop"), prompt(), n_tokens=2)
    assert not any(tensor.requires_grad for tensor in named(state.layers, "layers").values())


def test_logits_that_are_no_numbers():
    model = build("hgru")
    torch.nn.init.constant_(model.head.bias, torch.nan)
    with pytest.raises(ValueError, match="the model's logits must be finite"):
        generate(model, prompt(), n_tokens=1)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tokens": None}, ValueError, "`tokens` must hold at least one token per sequence"),
        ({"tokens": prompt()[:, :0]}, ValueError, "without a `state`; got shape (2, 0)."),
        ({"tokens": prompt()[0]}, ValueError, "`tokens` must have shape (batch, time); got (5,)."),
        (
            {"tokens": prompt() + VOCAB},
            ValueError,
            "`tokens` must be in 0 .. 12, the model's vocabulary; got ",
        ),
        ({"tokens": -1 - prompt()}, ValueError, "`tokens` must be in 0 .. 12, the model's vocabulary; got -"),
        ({"tokens": prompt().double()}, TypeError, "`tokens` must be int64 token ids; got torch.float64."),
        ({"reset": torch.zeros(2, 4).bool()}, ValueError, "`reset` must have the shape of `tokens`, (2, 5)"),
        ({"n_tokens": -1}, ValueError, "`n_tokens` must be at least 0; got -1."),
        ({"vocab_size": 14}, ValueError, "`vocab_size` must be in 1 .. 13, the model's vocabulary size"),
        ({"seed": -1}, ValueError, "`seed` must be in 0 .. 2^64 - 1; got -1."),
        ({"precision": "bf16"}, ValueError, "there is no `precision` 'bf16'; did you mean 'bf16-mixed'?"),
        ({"top_k": 0}, ValueError, "`top_k` must be at least 1"),
    ],
)
def test_mistakes(options, error, message):
    with pytest.raises(error, match=re.escape(message)):
        generate(build("hgru"), **{"tokens": prompt(), "n_tokens": 1} | options)


def test_a_state_of_other_sequences():
    model = build("hgru")
    _, state = generate(model, prompt(batch=3), n_tokens=1)
    with pytest.raises(ValueError, match="`tokens`, 2; got 3"):
        generate(model, prompt(), state=state, n_tokens=1)


def test_models_that_cannot_generate():
    with pytest.raises(ValueError, match=r"got training.*`model.eval\(\)`."):
        generate(build("hgru").train(), prompt(), n_tokens=1)
    with pytest.raises(ValueError, match="13 tokens; got 50 outputs"):
        generate(build("hgru", n_outputs=50), prompt(), n_tokens=1)


def test_prompts_that_are_none():
    for prompts in ([], [prompt()[0], prompt()[0, :0]]):
        with pytest.raises(ValueError, match="`prompts`"):
            pad_prompts(prompts)


@thorough
@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex operators")
@pytest.mark.parametrize("name", tiered(["gla"], ["attention window", "hybrid", "retnet", "mamba"]))
def test_a_compiled_step_gives_the_tokens_of_the_step(name):
    model = build(name)
    before = copy.copy(vars(model)), [*model.parameters()]
    compiled = generate(model, prompt(), n_tokens=20, compile=True)
    # the model stays as it was
    assert vars(model) == before[0] and all(map(torch.equal, model.parameters(), before[1]))
    plain = generate(model, prompt(), n_tokens=20)
    assert torch.equal(compiled.tokens, plain.tokens)
    assert_agree(compiled.state.layers, plain.state.layers)


@thorough
@pytest.mark.parametrize("name", ["hgru", "trans_normer"])
def test_layers_that_differ_in_their_number_share_the_compilation_of_a_step(name):
    torch.compiler.reset()
    counted = CompileCounter()
    model = with_parts_compiled(build(name, n_layers=6), backend=counted, dynamic=False)
    with compiling(), torch.no_grad():
        x, _ = model.hidden(prompt()[:, :1], model.init_state(len(prompt())))
        model.head(x)
    # the norm, the head, and the block; TransNormer has two kinds of blocks
    assert counted.frame_count == (4 if name == "trans_normer" else 3)
