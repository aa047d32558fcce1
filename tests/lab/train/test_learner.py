"""Runs whose training steps a learner takes."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from linrec.cli.dispatch import run as linrec
from linrec.lab.tasks import NO_TARGET, Batch
from linrec.lab.train import (
    ConfigError,
    DivergedError,
    InterruptedRunError,
    LearnerConfig,
    TrainConfig,
    fit,
    get_recipe,
    load_run,
)
from linrec.lab.train.fabric import make_fabric
from linrec.lab.train.learner import LearnerStep, make_step
from linrec.lab.train.step import Objective, train_step
from linrec.learning import build_learner
from linrec.models import (
    LanguageModel,
    ModelConfig,
    SequenceClassifier,
    SequenceClassifierConfig,
)
from linrec.trees import leaves
from tests.tiers import thorough, tiered

from .conftest import LOOP
from .test_carried import batches_of, carrying
from .test_resume import assert_same_run, crash_at, stop_at

Tiny = Callable[..., TrainConfig]
Model = LanguageModel | SequenceClassifier
STACK: dict[str, Any] = {"d_model": 8, "d_channel_mixing": 8, "mixer": "lru"}


def model_of(kind: str, layers: int = 1) -> Model:
    torch.manual_seed(0)
    if kind == "tokens":
        return LanguageModel(ModelConfig(vocab_size=5, n_layers=layers, **STACK))
    config = SequenceClassifierConfig(
        n_outputs=3,
        n_features=2,
        n_layers=layers,
        bidirectional=False,
        pooling="none" if kind.startswith("step") else "last",
        **STACK,
    )
    return SequenceClassifier(config)


def batch_of(kind: str) -> Batch:
    """Return a batch of 3 sequences of 12 steps, with steps or numbers that have no target."""
    draw = torch.Generator().manual_seed(1)
    features, mask = torch.randn(3, 12, 2, generator=draw), torch.rand(3, 12, generator=draw) < 0.4
    classes = torch.randint(3, (3, 12), generator=draw)
    lengths = torch.tensor([12, 5, 1])
    if kind == "tokens":
        reset = torch.zeros(3, 12, dtype=torch.bool)
        reset[1, 7] = True
        return Batch(classes, classes.roll(1, 1).masked_fill(mask, NO_TARGET), reset)
    if kind == "step classes":
        return Batch(features, classes.masked_fill(mask, NO_TARGET), None)
    if kind == "step numbers":
        numbers = torch.randn(3, 12, 3, generator=draw)
        # steps without a number, and steps without some of the numbers
        numbers[mask], numbers[:, ::3, 1] = math.nan, math.nan
        return Batch(features, numbers, None)
    # padding may hold anything
    features[1, 5:], features[2, 1:] = math.nan, math.nan
    if kind == "classes":
        return Batch(features, classes[:, 0], None, lengths)
    return Batch(features, torch.randn(3, 3, generator=draw), None, lengths)


def step_of(
    model: Model, window: Tensor, clip_norm: float | None = None, carry_state: bool = False, **options: Any
) -> LearnerStep:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = LearnerConfig(**options)
    return make_step(
        config,
        model,
        [optimizer],
        window,
        clip_norm=clip_norm,
        carry_state=carry_state,
        batch=batch_of("tokens"),
        processes=1,
    )


def plain_step(model: Model, batch: Batch, clip_norm: float | None = None) -> Tensor:
    """Train a model for one step without a learner, and return its sums."""
    fabric, window = make_fabric(LOOP), torch.zeros(4)
    objective = fabric.setup_module(Objective(model))
    optimizer: Any = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    train_step(
        *batch,
        fabric=fabric,
        objective=objective,
        optimizers=[optimizer],
        window=window,
        clip_norm=clip_norm,
    )
    return window


def assert_same_parameters(one: nn.Module, other: nn.Module) -> None:
    for (name, p), q in zip(one.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize(
    "options",
    [
        {"learner": "bptt"},
        # of the last recurrent layer and above, in any chunks
        {"learner": "rtrl", "chunk": 5, "update": "sequence"},
        {"learner": "rtrl", "chunk": 1, "update": "sequence"},
    ],
)
@pytest.mark.parametrize("kind", ["tokens", "step classes", "step numbers", "classes", "numbers"])
def test_a_step_of_an_exact_learner_is_the_step_without_a_learner(kind: str, options: Any) -> None:
    batch, window = batch_of(kind), torch.zeros(4)
    learnt, plain = model_of(kind), model_of(kind)
    for model in (learnt, plain):
        # not exact below the recurrent layer
        below = [model.embedding if isinstance(model, LanguageModel) else model.input]
        for part in (*below, *(block.mixer_norm for block in model.blocks)):
            part.requires_grad_(requires_grad=False)
    step = step_of(learnt, window, clip_norm=0.05, **options)
    for _ in range(2):
        before = window.clone()
        step(*batch)
        sums = plain_step(plain, batch, clip_norm=0.05)
        torch.testing.assert_close(window - before, sums, rtol=1e-4, atol=1e-6)
        assert sums[2] > 0.05
    assert_same_parameters(learnt, plain)


def test_traces_carry_credit_from_chunk_to_chunk() -> None:
    batch = batch_of("tokens")
    plain = model_of("tokens")
    plain_step(plain, batch)
    truncated = model_of("tokens")
    step_of(truncated, torch.zeros(4), learner="tbptt", chunk=5, update="sequence")(*batch)
    with pytest.raises(AssertionError):
        assert_same_parameters(truncated, plain)


def test_parameters_change_after_each_chunk_with_targets() -> None:
    batch, window = batch_of("classes"), torch.zeros(4)
    model, by_hand = model_of("classes"), model_of("classes")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    learner = build_learner("tbptt", model, optimizer)
    tokens = Batch(batch.inputs[:1], batch.targets[:1], None)
    LearnerStep(learner, LearnerConfig(learner="tbptt", chunk=4), window, carry_state=False)(*tokens)
    # the target is in the last of three chunks
    assert {int(state["step"]) for state in optimizer.state.values()} == {1}
    optimizer = torch.optim.AdamW(by_hand.parameters(), lr=0.1)
    state: Any = None
    for start in (0, 4, 8):
        outputs, state = by_hand.stream(tokens.inputs[:, start : start + 4], state)  # type: ignore[union-attr]
        state = tuple(part.detach() for part in state)
    nn.functional.cross_entropy(outputs[:, -1], tokens.targets).backward()
    optimizer.step()
    assert_same_parameters(model, by_hand)


def test_batches_are_independent_without_a_carried_state() -> None:
    model, batch = model_of("tokens"), batch_of("tokens")
    window = torch.zeros(4)
    step = step_of(model, window, learner="tbptt", learner_args={"window": 5})
    for group in step._learner.optimizers[0].param_groups:
        group["lr"] = 0.0
    sums = []
    for _ in range(2):
        step(*batch)
        sums.append(window.clone())
        window.zero_()
    assert torch.equal(*sums)
    assert step.state_dict()["memory"] is None


def learner_run(tiny: Tiny, folder: Path, learner: LearnerConfig, mixer: str, **changes: Any) -> TrainConfig:
    """Return the configuration of a run on a text that carries the learner's memory."""
    config = carrying(tiny, folder, **changes)
    model = dataclasses.replace(config.model, mixer=mixer, mixer_args={}, dropout=0.1)
    return dataclasses.replace(config, model=model, learner=learner)


def test_a_carried_memory_is_that_of_one_pass_over_each_stream(tiny: Tiny, tmp_path: Path) -> None:
    learner = LearnerConfig(learner="rtrl", chunk=3)
    config = learner_run(tiny, tmp_path, learner, "lru", length=8, documents=True, optim={"lr": 1e-30})
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, dropout=0.0))
    fit(config, tmp_path / "run")
    run = load_run(tmp_path / "run")
    norms = [record["grad_norm"] for record in run.metrics if record["split"] == "train"]
    batches = batches_of(run)
    expected = []
    for epoch in range(2):
        by_hand = build_learner("rtrl", run.model().train())
        for batch in batches.epoch(epoch):
            found = []
            for start in range(0, 8, 3):
                # the learner's own loss is that of the run where every step has a target
                part = [None if x is None else x[:, start : start + 3] for x in batch[:3]]
                by_hand.chunk(*part)  # type: ignore[arg-type]
                n = part[1].numel()  # type: ignore[union-attr]
                gradients = [g / n for g in by_hand.gradients().values()]
                by_hand._gradients, by_hand._weight = [None] * len(gradients), 0.0
                found.append(nn.utils.get_total_norm(gradients))
            expected.append(torch.stack(found).mean().item())
    assert norms == pytest.approx(expected, rel=1e-4)


RESUMED: list[tuple[str, str, dict[str, Any]]] = [
    ("rtrl", "lru", {"chunk": 3}),
    ("dense_rtrl", "min_gru", {"update": "sequence"}),
    ("tbptt", "lstm", {"learner_args": {"window": 5}}),
    ("online_lru", "lru", {"learner_args": {"mode": "full_rec"}, "chunk": 4}),
]


@pytest.mark.parametrize(("name", "mixer", "options"), tiered(RESUMED[:1], RESUMED[1:]))
def test_a_run_resumes_with_the_memory_to_the_bit(
    name: str, mixer: str, options: dict[str, Any], tiny: Tiny, tmp_path: Path
) -> None:
    config = learner_run(
        tiny, tmp_path, LearnerConfig(learner=name, **options), mixer, length=7, epochs=1, checkpoint_every=2
    )
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, d_model=4))
    straight = tmp_path / "straight"
    steps = fit(config, straight).steps
    with pytest.raises(InterruptedRunError):
        fit(config, tmp_path / "stopped", progress=stop_at(steps // 2 + 1))
    # killed, and so resumed from a checkpoint that is older
    with pytest.raises(RuntimeError):
        fit(config, tmp_path / "killed", progress=crash_at(steps // 2 + 2))
    for folder in (tmp_path / "stopped", tmp_path / "killed"):
        fit(config, folder, resume=True)
        assert_same_run(straight, folder)


@thorough
def test_the_memory_matters_to_a_resumed_run(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = learner_run(tiny, tmp_path, LearnerConfig(learner="rtrl", chunk=3), "lru", length=7)
    steps = fit(config, tmp_path / "straight").steps
    with pytest.raises(InterruptedRunError):
        fit(config, tmp_path / "pieces", progress=stop_at(steps // 2 + 1))
    restore = LearnerStep.load_state_dict

    def without_traces(self: LearnerStep, state: Any, device: torch.device) -> None:
        restore(self, state, device)
        assert any(trace.any() for trace in leaves(self._learner.memory["traces"]))  # type: ignore[index]
        for trace in leaves(self._learner.memory["traces"]):  # type: ignore[index]
            trace.zero_()

    monkeypatch.setattr(LearnerStep, "load_state_dict", without_traces)
    fit(config, tmp_path / "pieces", resume=True)
    with pytest.raises(AssertionError):
        assert_same_run(tmp_path / "straight", tmp_path / "pieces")


@thorough
def test_independent_sequences_resume_to_the_bit(tiny: Tiny, tmp_path: Path) -> None:
    config = tiny(checkpoint_every=3)
    model = dataclasses.replace(config.model, mixer="lru", mixer_args={})
    config = dataclasses.replace(config, model=model, learner=LearnerConfig(learner="rtrl", chunk=3))
    fit(config, tmp_path / "straight")
    with pytest.raises(RuntimeError):
        fit(config, tmp_path / "killed", progress=crash_at(8))
    fit(config, tmp_path / "killed", resume=True)
    assert_same_run(tmp_path / "straight", tmp_path / "killed")
    run = load_run(tmp_path / "straight")
    assert run.config == config and run.config.learner is not None


def test_a_run_that_diverges_says_so_in_one_line(tiny: Tiny, tmp_path: Path) -> None:
    config = tiny(optim={"lr": 1e30})
    model = dataclasses.replace(config.model, mixer="lru", mixer_args={})
    config = dataclasses.replace(config, model=model, learner=LearnerConfig(learner="rtrl", chunk=3))
    with pytest.raises(DivergedError) as error:
        fit(config, tmp_path / "run")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"learner": "rtlr"}, "'rtrl'"),
        ({"learner": "bptt", "chunk": 4}, "--learner tbptt"),
        ({"learner": "rtrl", "chunk": 0}, "`chunk`"),
        ({"learner": "rtrl", "update": "batch"}, "`update`"),
        ({"learner": "rtrl", "learner_args": {"clip_norm": 1.0}}, "--optim.clip-norm"),
        ({"learner": "rtrl", "learner_args": {"update_every": 3}}, "--update"),
    ],
)
def test_options_of_learners_are_checked(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LearnerConfig(**options)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"accumulate": 2}, "`loop.accumulate` must be 1 with a learner; got 2"),
        ({"recompute": True}, "`loop.recompute` must be False with a learner"),
        ({"precision": "bf16-mixed"}, "`loop.precision` must be '32-true' with a learner"),
        ({"compile": "on"}, "`loop.compile`.*not compiled"),
    ],
)
def test_what_learners_do_not_do_is_refused(tiny: Tiny, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        dataclasses.replace(tiny(**changes), learner=LearnerConfig(learner="rtrl"))


def test_whole_sequences_and_a_carried_state_exclude_each_other(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--learner tbptt"):
        dataclasses.replace(carrying(tiny, tmp_path), learner=LearnerConfig(learner="bptt"))


def test_several_processes_and_irregular_steps_are_refused() -> None:
    model, config = model_of("tokens"), LearnerConfig(learner="rtrl")
    options: Any = {"clip_norm": None, "carry_state": False, "processes": 1, "batch": batch_of("tokens")}
    with pytest.raises(ConfigError, match="a single process; got 2"):
        make_step(config, model, [], torch.zeros(4), **options | {"processes": 2})
    irregular = batch_of("tokens")._replace(dt=torch.ones(3, 12))
    with pytest.raises(ConfigError, match=r"--task\.with-dt"):
        make_step(config, model, [], torch.zeros(4), **options | {"batch": irregular})


def words(text: str) -> list[str]:
    return text.split()


SHORT = words("--task.length 2 --task.n-copied 2 --task.n-train 40 --task.n-validation 10 --task.n-test 10")
SMALL = words(
    "--model.d-model 8 --model.n-layers 1 --loop.steps 4 --loop.batch-size 5 --optim.warmup-steps 1"
)


def test_the_command_line_trains_and_resumes_with_a_learner(tmp_path: Path, capsys: Any) -> None:
    folder = str(tmp_path / "run")
    learner = ["--model.mixer", "lru", "--learner", "rtrl", "--chunk", "2", "--update", "sequence"]
    options = [*SHORT, *SMALL, *learner, "--learner-args", "credit=spatial", "--loop.device", "cpu"]
    assert linrec(["train", "copying", *options, "--out", folder]) == 0
    expected = LearnerConfig(learner="rtrl", learner_args={"credit": "spatial"}, chunk=2, update="sequence")
    assert load_run(folder).config.learner == expected
    # the options of the run are the defaults of the resumed run
    assert linrec(["train", "--resume", folder]) == 0
    assert linrec(["train", "--resume", folder, "--chunk", "3"]) == 2
    assert "learner.chunk" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("recipe", "options", "words"),
    [
        ("copying", ["--model.mixer", "attention", "--learner", "tbptt"], "`blocks.0.mixer` (Attention)"),
        ("copying", ["--model.mixer", "gru", "--learner", "rtrl"], "`blocks.0.mixer` (GRU)"),
        ("copying", ["--model.mixer", "lru", "--chunk", "4"], "--learner"),
        ("copying", ["--model.mixer", "lru", "--learner", "rtrl", "--learner-args", "mode=full"], "'mode'"),
        ("event-xor", ["--model.bidirectional", "--learner", "tbptt"], "`bidirectional` = True"),
        ("event-xor", ["--model.pooling", "mean", "--learner", "tbptt"], "`pooling` = 'mean'"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_one_line(
    recipe: str, options: list[str], words: str, tmp_path: Path, capsys: Any
) -> None:
    folder = tmp_path / "run"
    small = [*(SHORT if recipe == "copying" else ["--task.n-train", "20"]), *SMALL]
    assert linrec(["train", recipe, *small, *options, "--loop.device", "cpu", "--out", str(folder)]) == 2
    *_, message = capsys.readouterr().err.strip().splitlines()
    assert message.startswith("linrec: ") and words in message
    assert not folder.exists()


def test_a_configuration_without_a_learner_is_written_as_before() -> None:
    from linrec.lab.train.config import config_to_dict

    assert "learner" not in config_to_dict(get_recipe("copying"))
