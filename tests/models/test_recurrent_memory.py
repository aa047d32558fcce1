"""Recurrent Memory Transformer: a memory across the stack of a language model."""

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from linrec.cli import main
from linrec.generation import generate
from linrec.hf import from_hugging_face, to_hugging_face
from linrec.models import InitialState, LanguageModel, MemoryConfig, ModelConfig, RecurrentMemory
from linrec.nn.parameters import groups_of
from linrec.tasks.segment_copy import SegmentCopy
from linrec.testing import (
    assert_agree,
    check_batch_independence,
    check_causality,
    check_isolation,
    check_split,
    check_steps,
    generator,
)
from linrec.train import ConfigError, TrainConfig, load_run
from linrec.train.config import config_from_dict, config_to_dict
from tests.tiers import thorough

LENGTH, N, TIME = 4, 2, 11
STACKS: dict[str, dict[str, Any]] = {
    "attention": {"mixer": "attention", "mixer_args": {"n_heads": 2}},
    "window": {"mixer": "attention", "mixer_args": {"window": 3}},
    "gate_loop": {"mixer": "gate_loop"},
    "hybrid": {"mixer": ("mamba2", "attention"), "channel_mixing": "rwkv"},
    "transformer_xl": {"mixer": "transformer_xl", "mixer_args": {"segment_length": 3}},
}
each = pytest.mark.parametrize("name", STACKS)
# mixers with segments of their own count the steps before a reset
fixed = pytest.mark.parametrize("name", [name for name in STACKS if name != "transformer_xl"])
ENCODER: dict[str, Any] = {"mixer": "attention", "mixer_args": {"causal": False}}


def make(name: str = "attention", **memory: Any) -> LanguageModel:
    stack = ENCODER if memory.get("form") == "encoder" else STACKS[name]
    torch.manual_seed(0)
    given = {"kind": "recurrent_memory", "segment_length": LENGTH, "n_tokens": N} | memory
    config = ModelConfig(
        vocab_size=7, d_model=8, n_layers=2, d_channel_mixing=12, memory=MemoryConfig(**given), **stack
    )
    return LanguageModel(config).double()


def tokens(time: int = TIME, batch: int = 3) -> Tensor:
    return torch.randint(7, (batch, time), generator=generator())


def resets(rate: float = 0.3) -> Tensor:
    return torch.rand(3, TIME, generator=generator(5)) < rate


def of_embeddings(model: LanguageModel) -> Any:
    # the laws change inputs continuously, so they enter behind the embedding
    return lambda x, state=None, *, reset=None: model.transformed(x, state, reset=reset)


def by_segments(model: LanguageModel, sequence: Tensor, *, begin: int = 0) -> Tensor:
    """Return logits of one row that starts at step `begin` of a stream: the stack on [M | x | M] at once."""
    stack = LanguageModel(dataclasses.replace(model.config, memory=MemoryConfig())).double()
    stack.load_state_dict({name: x for name, x in model.state_dict().items() if name != "memory.M"})
    memory, outputs, is_decoder = model.memory.M[None], [], model.config.memory.form == "decoder"
    x = model.embedding(sequence)[None]
    cuts = [0, *(step for step in range(1, len(sequence)) if (begin + step) % LENGTH == 0), len(sequence)]
    for start, end in itertools.pairwise(cuts):
        parts = [memory, x[:, start:end], memory] if is_decoder else [memory, x[:, start:end]]
        y, _ = stack.transformed(torch.cat(parts, 1))
        outputs.append(y[:, N : N + end - start])
        memory = y[:, -N:] if is_decoder else y[:, :N]
    return model.head(torch.cat(outputs, 1))[0]


@each
def test_each_segment_is_the_stack_between_memory_tokens(name: str) -> None:
    model, rows = make(name), tokens()
    logits, state = model(rows)
    for row in range(3):
        assert_agree(logits[row], by_segments(model, rows[row]))
    expected = torch.stack([by_segments(model, row) for row in rows])
    got, wanted = (
        torch.autograd.grad(y.square().sum(), [model.memory.M, model.embedding.weight])
        for y in (logits, expected)
    )
    assert_agree(got, wanted, "gradients")
    assert state.alive.shape == (3, TIME % LENGTH)


@fixed
def test_documents_are_the_segments_from_their_position_on(name: str) -> None:
    model, rows, reset = make(name), tokens(), resets()
    reset[0, 0] = reset[1, LENGTH] = reset[2, TIME - 1] = True
    logits, state = model(rows, reset=reset)
    following, _ = model(rows, state)
    for row in range(3):
        cuts = sorted({0, *reset[row].nonzero().flatten().tolist()})
        for begin, end in zip(cuts, [*cuts[1:], TIME], strict=True):
            assert_agree(logits[row, begin:end], by_segments(model, rows[row, begin:end], begin=begin))
        document = torch.cat([rows[row, cuts[-1] :], rows[row]])
        expected = by_segments(model, document, begin=cuts[-1])
        assert_agree(following[row], expected[TIME - cuts[-1] :])


@each
def test_laws_of_streams(name: str) -> None:
    model = make(name)
    for law in (check_split, check_steps, check_batch_independence):
        law(model, tokens())
    x = torch.randn(3, TIME, 8, dtype=torch.float64, generator=generator())
    check_causality(of_embeddings(model), x)
    reset, logits, state = resets(), [], None
    for step in range(TIME):
        y, state = model(tokens()[:, step : step + 1], state, reset=reset[:, step : step + 1])
        logits.append(y)
    assert_agree(torch.cat(logits, 1), model(tokens(), reset=reset)[0])


def test_nan_does_not_pass_a_reset() -> None:
    # whole segments: the law starts anew where the first call ended
    x = torch.randn(3, 3 * LENGTH, 8, dtype=torch.float64, generator=generator())
    check_isolation(of_embeddings(make()), x)


@pytest.mark.parametrize("position", [0, 3, LENGTH, 6])
@fixed
def test_a_stream_may_start_anywhere(name: str, position: int) -> None:
    model, rows = make(name), tokens()
    logits, _ = model(rows, model.init_state(3, position=position))
    assert_agree(logits[0], by_segments(model, rows[0], begin=position))


@pytest.mark.parametrize(
    ("detach", "reached"), [("never", 0), ("segment", 3), (1, 3), (2, 2), (3, 3), (4, 0)]
)
def test_gradients_stop_where_told(detach: Any, reached: int) -> None:
    model = make(detach=detach)
    x = torch.randn(1, 4 * LENGTH, 8, dtype=torch.float64, generator=generator(), requires_grad=True)
    whole, _ = model.transformed(x)
    (d,) = torch.autograd.grad(whole[0, -1, 0], x)
    moved = d.unflatten(1, (4, LENGTH)).abs().amax((0, 2, 3)) > 0
    # the first segment that the last step reaches
    assert moved.tolist() == [segment >= reached for segment in range(4)]
    # boundaries are those of the stream, however it is split
    first, state = model.transformed(x[:, :6])
    last, _ = model.transformed(x[:, 6:], state)
    assert_agree(torch.autograd.grad(last[0, -1, 0], x)[0], d)
    assert_agree(torch.cat([first, last], 1), whole)


def test_it_is_the_released_code() -> None:
    """booydar/recurrent-memory-transformer; the file's metadata has the commit."""
    numbers = safetensors.torch.load_file(Path(__file__).parent / "recurrent_memory.safetensors")
    model = make(segment_length=5, n_tokens=3)
    prefix = "weights."
    model.load_state_dict({n.removeprefix(prefix): x for n, x in numbers.items() if n.startswith(prefix)})
    logits, _ = model(numbers["tokens"])
    assert (logits - numbers["logits"]).abs().max() < 1e-14
    logits.logsumexp(-1).square().mean().backward()
    assert (model.memory.M.grad - numbers["gradient.memory.M"]).abs().max() < 1e-14
    assert (model.embedding.weight.grad - numbers["gradient.embedding.weight"]).abs().max() < 1e-14


def test_memory_tokens_start_like_token_embeddings() -> None:
    memory = MemoryConfig(kind="recurrent_memory", n_tokens=64)
    model = LanguageModel(ModelConfig(vocab_size=50, d_model=64, tie_embeddings=True, memory=memory))
    assert model.memory.M.std().item() == pytest.approx(1 / 8, rel=0.05)
    assert groups_of(model)["memory.M"].name == "vocabulary"
    assert model.state_size == 64 * 64 + sum(mixer.state_size for mixer in model.mixers)


def test_a_state_that_a_call_does_not_need_is_none() -> None:
    model = make()
    model.recompute = True
    x, state = model.hidden(tokens(), keep_state=False)
    assert_agree(x, model.hidden(tokens())[0])
    assert state == (None, None)


def test_an_empty_call_returns_the_state() -> None:
    model = make()
    _, state = model(tokens(6))
    logits, same = model(tokens(0), state)
    assert logits.shape == (3, 0, 7)
    assert_agree(model(tokens(), same)[0], model(tokens(), state)[0])


def test_a_trained_initial_state_starts_at_the_memory_tokens() -> None:
    model = make("gate_loop")
    start = InitialState(model).double()
    assert_agree(model(tokens(), start(model.init_state(3)))[0], model(tokens())[0])


class TestEncoder:
    def test_the_next_memory_is_the_output_of_the_memory_tokens(self) -> None:
        model, rows = make(form="encoder"), tokens(3 * LENGTH)
        logits, _ = model(rows)
        assert_agree(logits[1], by_segments(model, rows[1]))

    def test_it_obeys_the_laws_at_boundaries(self) -> None:
        model, rows = make(form="encoder"), tokens(3 * LENGTH)
        logits, state = model(rows)
        first, middle = model(rows[:, :LENGTH])
        last, end = model(rows[:, LENGTH:], middle)
        assert_agree(torch.cat([first, last], 1), logits)
        assert_agree(end.memory, state.memory)
        reset = torch.zeros(3, 3 * LENGTH, dtype=torch.bool)
        reset[1, LENGTH] = True
        packed, _ = model(rows, reset=reset)
        assert_agree(packed[0], logits[0])
        assert_agree(packed[1, LENGTH:], by_segments(model, rows[1, LENGTH:]))

    def test_it_refuses_other_splits(self) -> None:
        model, reset = make(form="encoder"), torch.zeros(3, LENGTH, dtype=torch.bool)
        with pytest.raises(ValueError, match="whole segments of `segment_length` = 4 steps; got 2"):
            model(tokens(LENGTH + 2))
        with pytest.raises(ValueError, match="multiple of `segment_length` = 4; got 3"):
            model.init_state(1, position=3)
        reset[0, 1] = True
        with pytest.raises(ValueError, match="got a reset within a segment"):
            model(tokens(LENGTH), reset=reset)


@thorough
@each
def test_the_model_compiles_whole(name: str) -> None:
    torch.compiler.reset()
    model = make(name)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    logits, state = compiled(tokens())
    expected, kept = model(tokens())
    assert_agree(logits, expected)
    assert_agree(compiled(tokens(1), state)[0], model(tokens(1), kept)[0])


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        ({"kind": "recurent_memory"}, "did you mean 'recurrent_memory'"),
        ({"form": "encode"}, "did you mean 'encoder'"),
        ({"n_tokens": 0}, "`n_tokens` must be at least 1; got 0"),
        ({"segment_length": 0}, "`segment_length` must be at least 1; got 0"),
        ({"detach": 0}, '`detach` must be "never", "segment", or a number'),
    ],
)
def test_wrong_configurations(memory: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MemoryConfig(**memory)


def test_mixers_must_fit_the_form() -> None:
    memory = {"kind": "recurrent_memory"}
    with pytest.raises(ValueError, match=r"must have a state .*'decoder'; 'attention' has none"):
        LanguageModel(ModelConfig(vocab_size=7, d_model=8, memory=memory, **ENCODER))
    memory["form"] = "encoder"
    with pytest.raises(ValueError, match=r"must not have a state .*'encoder'; 'lru' has one"):
        LanguageModel(ModelConfig(vocab_size=7, d_model=8, mixer="lru", memory=memory))


def test_states_must_be_of_the_model() -> None:
    model = make()
    with pytest.raises(ValueError, match="`state` must be the `SegmentState` that this model returned"):
        model(tokens(), (None, None))
    with pytest.raises(ValueError, match="less than one segment of 2 steps; got 3 steps"):
        make(segment_length=2)(tokens(), model(tokens())[1])


def test_configurations_are_stored() -> None:
    config = TrainConfig("copy", SegmentCopy(), make(detach=2).config)
    stored = json.loads(json.dumps(config_to_dict(config)))
    assert config_from_dict(stored) == config
    assert isinstance(LanguageModel(config.model).memory, RecurrentMemory)
    # of a version without memories
    del stored["model"]["memory"]
    assert config_from_dict(stored).model.memory == MemoryConfig()
    stored["model"]["memory"] = {"n_tokens": "many"}
    with pytest.raises(ConfigError, match=r"`model.memory.n_tokens` must be an integer; got 'many'"):
        config_from_dict(stored)


def test_generation_goes_on_over_boundaries() -> None:
    model, prompt = make().eval(), tokens(6)
    found, _ = generate(model, prompt, n_tokens=7, temperature=0)
    text = torch.cat([prompt, found], 1)
    logits, _ = model(text)
    assert torch.equal(logits[:, 5:-1].argmax(-1), found)


def test_transformers_have_the_model(tmp_path: Path) -> None:
    model = make()
    published = to_hugging_face(model)
    assert_agree(published(tokens()).logits, model(tokens())[0])
    published.save_pretrained(tmp_path)
    assert_agree(from_hugging_face(tmp_path)(tokens())[0], model(tokens())[0])


def test_training_resumes_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("a rose is a rose is a rose\n" * 50)
    sizes = ["--model.d-model", "8", "--model.n-layers", "1", "--loop.batch-size", "2", "--data.length", "20"]
    memory = ["--model.memory.kind", "recurrent_memory", "--model.memory.segment-length", "6"]
    words = ["train", "lm", "--data.path", "text.txt", "--data.cache", "cache", *sizes, *memory]
    words += ["--model.memory.n-tokens", "2", "--loop.device", "cpu", "--loop.checkpoint-every", "2"]
    words += ["--optim.warmup-steps", "1"]
    assert main([*words, "--loop.steps", "4", "--out", "whole"]) == 0
    assert load_run("whole").config.model.memory == MemoryConfig(
        kind="recurrent_memory", segment_length=6, n_tokens=2
    )
    # as if it had stopped after the checkpoint of step 2
    assert main([*words, "--loop.steps", "4", "--out", "cut"]) == 0
    (Path("cut") / "checkpoint.previous.safetensors").replace(Path("cut") / "checkpoint.safetensors")
    for name in ("result.json", "best.safetensors"):
        (Path("cut") / name).unlink(missing_ok=True)
    assert main(["train", "--resume", "cut"]) == 0
    weights = [load_run(name).model().state_dict() for name in ("whole", "cut")]
    for name, tensor in weights[0].items():
        assert torch.equal(tensor, weights[1][name]), name
    capsys.readouterr()
    assert main(["generate", "whole", "--prompt", "a rose", "--tokens", "9"]) == 0
    assert capsys.readouterr().out
