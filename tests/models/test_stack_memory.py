"""What memories across the stack of a language model share."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from linrec.cli import main
from linrec.generation import generate
from linrec.hf import from_hugging_face, to_hugging_face
from linrec.lab.tasks.copying import SegmentCopy
from linrec.lab.train import ConfigError, TrainConfig, load_run
from linrec.lab.train.config import config_from_dict, config_to_dict
from linrec.models import LanguageModel, MemoryConfig, ModelConfig, StackMemory
from linrec.testing import (
    assert_agree,
    check_batch_independence,
    check_causality,
    check_isolation,
    check_split,
    check_steps,
    generator,
)
from tests.models.test_segments import sizes_in_training
from tests.tiers import thorough, tiered

LENGTH, TIME = 4, 11
TOKENS = {"kind": "recurrent_memory", "n_tokens": 2}
SLOTS = {"kind": "memformer", "n_tokens": 3}
BOTTLENECK = {"kind": "temporal_latent_bottleneck", "n_tokens": 3, "read_every": 2}
TURING = {"kind": "token_turing_machine", "n_tokens": 3, "n_read": 2}
ENHANCED = {"kind": "enhanced_recurrence"}
XL = {"mixer": "transformer_xl", "mixer_args": {"segment_length": LENGTH, "memory_length": 6}}
STACKS: dict[str, dict[str, Any]] = {
    "attention": {"mixer": "attention", "mixer_args": {"n_heads": 2}, "memory": TOKENS},
    "window": {"mixer": "attention", "mixer_args": {"window": 3}, "memory": TOKENS},
    "gate_loop": {"mixer": "gate_loop", "memory": TOKENS},
    "hybrid": {"mixer": ("mamba2", "attention"), "channel_mixing": "rwkv", "memory": TOKENS},
    "transformer_xl": {"mixer": "transformer_xl", "mixer_args": {"segment_length": 3}, "memory": TOKENS},
    "enhanced": {**XL, "norm_position": "post", "final_norm": False, "memory": ENHANCED},
    "enhanced_rwkv": {
        "mixer": "transformer_xl",
        "mixer_args": {"segment_length": LENGTH, "memory_length": 3, "same_length": True},
        "channel_mixing": "rwkv",
        "memory": ENHANCED,
    },
    "memformer": {"mixer": "attention", "mixer_args": {"n_heads": 2}, "memory": SLOTS | {"n_heads": 2}},
    "memformer_hybrid": {
        "mixer": ("mamba2", "attention"),
        "channel_mixing": "rwkv",
        "norm_position": ("post", "output"),
        "memory": SLOTS | {"update": "normalised", "temperature": 0.5},
    },
    "bottleneck": {"mixer": "attention", "mixer_args": {"n_heads": 2}, "memory": BOTTLENECK | {"n_heads": 2}},
    "bottleneck_hybrid": {
        "mixer": ("mamba2", "attention"),
        "channel_mixing": ("none", "rwkv"),
        "norm_position": ("post", "output"),
        "memory": BOTTLENECK | {"read_every": 1},
    },
    "turing": {"mixer": "attention", "mixer_args": {"n_heads": 2}, "memory": TURING},
    "turing_hybrid": {"mixer": ("mamba2", "attention"), "channel_mixing": "rwkv", "memory": TURING},
    # without a memory, the mixers' own boundaries matter
    "memformer_xl": {
        "mixer": "transformer_xl",
        "mixer_args": {"segment_length": 3, "memory_length": 0},
        "memory": SLOTS,
    },
}
each = pytest.mark.parametrize("name", STACKS)
# one stack for each kind
KINDS = ("attention", "enhanced", "memformer", "bottleneck", "turing")
kinds = pytest.mark.parametrize("name", KINDS)
# a mixer with segments of its own counts the memory tokens before a reset
fixed = pytest.mark.parametrize("name", [name for name in STACKS if name != "transformer_xl"])
ENCODERS = {"tokens": TOKENS, "slots": SLOTS, "bottleneck": BOTTLENECK, "turing": TURING}


def make(name: str, **changes: Any) -> LanguageModel:
    torch.manual_seed(0)
    stack = STACKS[name] | changes
    memory = MemoryConfig(segment_length=LENGTH, **stack.pop("memory"))
    sizes = {"vocab_size": 7, "d_model": 8, "n_layers": 2, "d_channel_mixing": 12}
    return LanguageModel(ModelConfig(**sizes, memory=memory, **stack)).double()


def encoder(name: str) -> LanguageModel:
    memory = ENCODERS[name] | {"form": "encoder"}
    return make("attention", mixer_args={"causal": False}, memory=memory)


def tokens(time: int = TIME, batch: int = 3) -> Tensor:
    return torch.randint(7, (batch, time), generator=generator())


def resets(rate: float = 0.3) -> Tensor:
    return torch.rand(3, TIME, generator=generator(5)) < rate


def of_embeddings(model: LanguageModel) -> Any:
    # the laws change inputs continuously, so they enter behind the embedding
    return lambda x, state=None, *, reset=None: model.transformed(x, state, reset=reset)


@pytest.mark.parametrize("name", tiered(KINDS, STACKS))
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


@thorough
@kinds
def test_nan_does_not_pass_a_reset(name: str) -> None:
    # whole segments: the law starts anew where the first call ended
    x = torch.randn(3, 3 * LENGTH, 8, dtype=torch.float64, generator=generator())
    check_isolation(of_embeddings(make(name)), x)


@pytest.mark.parametrize("position", tiered([3, LENGTH], [6]))
@fixed
def test_a_document_runs_as_from_its_position_in_the_stream(name: str, position: int) -> None:
    model, stream = make(name), tokens(15)
    reset = torch.zeros(3, 15, dtype=torch.bool)
    reset[1, position] = True
    packed, state = model(stream, reset=reset)
    alone, end = model(stream[1:2, position:], model.init_state(1, position=position))
    assert_agree(packed[1:2, position:], alone)
    assert_agree(model(stream, state)[0][1:2], model(stream[1:2], end)[0])


@kinds
@pytest.mark.parametrize(
    ("detach", "reached"), [("never", 0), ("segment", 3), (1, 3), (2, 2), (3, 3), (4, 0)]
)
def test_gradients_stop_where_told(name: str, detach: Any, reached: int) -> None:
    stack = STACKS[name]
    told = {"memory": stack["memory"] | {"detach": detach}}
    if name == "enhanced":
        told = {"mixer_args": stack["mixer_args"] | {"detach": detach}}
    model = make(name, **told)
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


@thorough
@kinds
def test_segments_may_run_again_in_the_backward_pass(name: str) -> None:
    """Gradients are the same, and the graph holds no activations within segments."""
    model = make(name)
    again = make(name, memory=STACKS[name]["memory"] | {"recompute": True})

    def gradients(of: LanguageModel) -> tuple[dict[str, Tensor], int]:
        sizes: list[int] = []

        def kept(x: Tensor) -> Tensor:
            sizes.append(x.numel())
            return x

        # the hooks do not see the tensors that run again
        with torch.autograd.graph.saved_tensors_hooks(kept, lambda x: x):
            x, state = of.hidden(tokens(), reset=resets())
        (x.square().sum() + of.hidden(tokens(), state)[0].square().sum()).backward()
        return {name: p.grad for name, p in of.named_parameters() if p.grad is not None}, sum(sizes)

    (expected, every), (found, boundaries) = gradients(model), gradients(again)
    assert_agree(found, expected)
    assert boundaries < every / 10
    # without gradients nothing runs again
    with torch.no_grad():
        assert_agree(again(tokens())[0], model(tokens())[0])


@kinds
def test_a_state_that_a_call_does_not_need_is_none(name: str) -> None:
    model = make(name)
    model.recompute = True
    x, state = model.hidden(tokens(), keep_state=False)
    assert_agree(x, model.hidden(tokens())[0])
    assert state == (None, None)


@kinds
def test_an_empty_call_returns_the_state(name: str) -> None:
    model = make(name)
    for done in (LENGTH, 6):
        _, state = model(tokens(done))
        logits, same = model(tokens(0), state)
        assert logits.shape == (3, 0, 7)
        assert_agree(model(tokens(), same)[0], model(tokens(), state)[0])


@pytest.mark.parametrize("name", ENCODERS)
class TestEncoder:
    def test_it_obeys_the_laws_at_boundaries(self, name: str) -> None:
        model, rows = encoder(name), tokens(3 * LENGTH)
        logits, state = model(rows)
        first, middle = model(rows[:, :LENGTH])
        last, end = model(rows[:, LENGTH:], middle)
        assert_agree(torch.cat([first, last], 1), logits)
        assert_agree(end.memory, state.memory)
        reset = torch.zeros(3, 3 * LENGTH, dtype=torch.bool)
        reset[1, LENGTH] = True
        packed, _ = model(rows, reset=reset)
        assert_agree(packed[0], logits[0])
        assert_agree(packed[1, LENGTH:], model(rows[1:2, LENGTH:])[0][0])

    def test_it_refuses_other_splits(self, name: str) -> None:
        model, reset = encoder(name), torch.zeros(3, LENGTH, dtype=torch.bool)
        with pytest.raises(ValueError, match="`segment_length` = 4 steps; got 2"):
            model(tokens(LENGTH + 2))
        with pytest.raises(ValueError, match="`segment_length` = 4; got 3"):
            model.init_state(1, position=3)
        reset[0, 1] = True
        with pytest.raises(ValueError, match="got a reset within a segment"):
            model(tokens(LENGTH), reset=reset)


# every segment is traced
SHORT = LENGTH + 2


# those that take resets are compiled with them
@pytest.mark.parametrize("name", tiered([], ["attention"], STACKS))
def test_the_model_compiles_whole(name: str) -> None:
    torch.compiler.reset()
    model = make(name)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    logits, state = compiled(tokens(SHORT))
    expected, kept = model(tokens(SHORT))
    assert_agree(logits, expected)
    assert_agree(compiled(tokens(1), state)[0], model(tokens(1), kept)[0])


@pytest.mark.parametrize(
    "name",
    tiered([], ["enhanced", "memformer"], [n for n in STACKS if n.startswith(("enhanced", "memformer"))]),
)
def test_the_model_compiles_with_resets(name: str) -> None:
    torch.compiler.reset()
    model = make(name)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    (logits, state), (expected, kept) = (
        run(tokens(SHORT), reset=resets()[:, :SHORT]) for run in (compiled, model)
    )
    assert_agree(logits, expected)
    assert_agree(compiled(tokens(1), state)[0], model(tokens(1), kept)[0])


@kinds
def test_states_must_be_of_the_model(name: str) -> None:
    model = make(name)
    with pytest.raises(ValueError, match=r"`state`.*`SegmentState`"):
        model(tokens(), (None, None))


@kinds
def test_configurations_are_stored(name: str) -> None:
    config = TrainConfig("copy", SegmentCopy(), make(name).config)
    stored = json.loads(json.dumps(config_to_dict(config)))
    assert config_from_dict(stored) == config
    assert isinstance(LanguageModel(config.model).memory, StackMemory)
    # of a version without memories
    del stored["model"]["memory"]
    assert config_from_dict(stored).model.memory == MemoryConfig()
    stored["model"]["memory"] = {"n_tokens": "many"}
    with pytest.raises(ConfigError, match=r"`model.memory.n_tokens`.*got 'many'"):
        config_from_dict(stored)


@kinds
def test_generation_goes_on_over_boundaries(name: str) -> None:
    model, prompt = make(name).eval(), tokens(6)
    found, _ = generate(model, prompt, n_tokens=7, temperature=0)
    text = torch.cat([prompt, found], 1)
    logits, _ = model(text)
    assert torch.equal(logits[:, 5:-1].argmax(-1), found)


@kinds
def test_transformers_have_the_model(name: str, tmp_path: Path) -> None:
    model = make(name)
    published = to_hugging_face(model)
    assert_agree(published(tokens()).logits, model(tokens())[0])
    published.save_pretrained(tmp_path)
    assert_agree(from_hugging_face(tmp_path)(tokens())[0], model(tokens())[0])


TRAINED = {
    "recurrent_memory": ["--model.memory.n-tokens", "2"],
    "memformer": ["--model.mixer", "lru", "--model.memory.recompute", "--model.memory.detach", "2"],
    "enhanced_recurrence": ["--model.mixer", "transformer_xl", "--model.mixer-args.segment-length", "6"],
}


@thorough
@pytest.mark.parametrize("kind", TRAINED)
def test_training_resumes_on_the_command_line(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("a rose is a rose is a rose\n" * 50)
    sizes = ["--model.d-model", "8", "--model.n-layers", "1", "--loop.batch-size", "2", "--data.length", "20"]
    memory = ["--model.memory.kind", kind, "--model.memory.segment-length", "6", *TRAINED[kind]]
    words = ["train", "lm", "--data.path", "text.txt", "--data.cache", "cache", *sizes, *memory]
    words += ["--loop.device", "cpu", "--loop.checkpoint-every", "2", "--optim.warmup-steps", "1"]
    assert main([*words, "--loop.steps", "4", "--out", "whole"]) == 0
    stored = load_run("whole").config.model.memory
    assert (stored.kind, stored.segment_length) == (kind, 6)
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
    assert main(["eval", "whole", "--device", "cpu"]) == 0


@pytest.mark.parametrize("name", ["attention", "memformer", "enhanced"])
def test_training_by_segments_keeps_no_graph_and_a_constant_state(name: str) -> None:
    torch.manual_seed(0)
    fields = dict(STACKS[name])
    # enhanced recurrence has the mixers' own, which is by segments
    detach = {} if name == "enhanced" else {"detach": "segment"}
    fields["memory"] = MemoryConfig(segment_length=LENGTH, **detach, **fields["memory"])
    model = LanguageModel(ModelConfig(vocab_size=7, d_model=8, n_layers=2, **fields)).double()
    tokens = torch.randint(7, (2, 10 * LENGTH), generator=generator())
    # the memory of Transformer-XL is full after two segments
    assert len(set(sizes_in_training(model, tokens.split(2 * LENGTH, 1)))) == 1
