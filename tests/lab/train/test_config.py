import dataclasses
import json

import pytest

from linrec.lab import tasks
from linrec.lab.tasks import MemoryHorizon
from linrec.lab.train import ConfigError, LoopConfig, OptimConfig, TrainConfig, get_recipe, recipe_names
from linrec.lab.train.config import config_from_dict, config_to_dict, differences
from linrec.lab.train.recipes import recipe_summary
from linrec.models import ModelConfig


@pytest.mark.parametrize("name", recipe_names())
def test_recipes_survive_json(name: str) -> None:
    config = get_recipe(name)
    assert config.name == name
    assert config_from_dict(json.loads(json.dumps(config_to_dict(config)))) == config
    assert recipe_summary(name)


def test_memory_horizon_is_table_3() -> None:
    config = get_recipe("memory_horizon")
    assert (config.loop.epochs, config.loop.batch_size) == (300, 32)
    assert config.optim == OptimConfig(
        lr=0.0025,
        betas=(0.9, 0.98),
        weight_decay=0.05,
        schedule="cosine",
        warmup_steps=10_000,
        clip_norm=None,
    )
    model = config.model
    assert (model.n_layers, model.d_model, model.d_channel_mixing) == (4, 64, 128)
    assert model.mixer == "gate_loop"
    assert model.mixer_args["magnitude_activation"] == "sigmoid"
    assert model.mixer_args["phase_activation"] == "identity"
    assert config.task == MemoryHorizon(max_number=4, length=1024, n_resets=3, modulus=50, n_samples=2000)


def test_the_tuned_recipe_keeps_data_batch_and_epochs() -> None:
    literal, tuned = get_recipe("memory-horizon"), get_recipe("memory-horizon-tuned")
    assert tuned.task == literal.task
    assert (tuned.loop.epochs, tuned.loop.batch_size) == (literal.loop.epochs, literal.loop.batch_size)
    sizes = ("d_model", "n_layers", "d_channel_mixing")
    assert all(getattr(tuned.model, size) == getattr(literal.model, size) for size in sizes)


def test_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'memory-horizon-tuned'"):
        get_recipe("memory-horizon-tunde")


def test_the_task_gives_the_vocabulary_and_the_mixer_its_defaults() -> None:
    model = ModelConfig(vocab_size=99, mixer_args={"transition": "fixed"})
    config = TrainConfig("x", MemoryHorizon(max_number=8, modulus=7), model)
    assert (config.model.vocab_size, config.model.n_outputs) == (10, 7)
    assert config.model.mixer_args["transition"] == "fixed"
    assert config.model.mixer_args["phase_activation"] == "identity"


def test_unknown_mixer_and_mixer_argument_name_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'gate_loop'"):
        TrainConfig("x", MemoryHorizon(), ModelConfig(vocab_size=6, mixer="gate_lop"))
    with pytest.raises(ValueError, match="called 'transitoin'; did you mean 'transition'"):
        TrainConfig("x", MemoryHorizon(), ModelConfig(vocab_size=6, mixer_args={"transitoin": "fixed"}))


def test_arguments_of_layers_survive_json() -> None:
    model = ModelConfig(vocab_size=6, n_layers=2, mixer="unicornn", layer_args={"dt": (0.1, 0.2)})
    again = config_from_dict(json.loads(json.dumps(config_to_dict(TrainConfig("x", MemoryHorizon(), model)))))
    assert again.model.layer_args == {"dt": (0.1, 0.2)} and again.model.mixer_of(1)[1]["dt"] == 0.2


def test_tuples_in_mixer_args_survive_json() -> None:
    model = ModelConfig(vocab_size=6, mixer_args={"magnitude_init": (0.5, 0.9)})
    config = TrainConfig("x", MemoryHorizon(), model)
    assert config_from_dict(json.loads(json.dumps(config_to_dict(config)))) == config


def test_differences_names_the_fields() -> None:
    config = get_recipe("memory-horizon")
    other = dataclasses.replace(config, optim=dataclasses.replace(config.optim, lr=1.0))
    assert differences(config, config) == {}
    assert differences(config, other) == {"optim.lr": (0.0025, 1.0)}


def test_a_configuration_of_another_version_is_refused() -> None:
    stored = config_to_dict(get_recipe("memory-horizon"))
    stored["optim"]["momentum"] = 0.9
    with pytest.raises(ConfigError, match=r"this version of linrec.*momentum"):
        config_from_dict(stored)
    with pytest.raises(ConfigError, match="this version of linrec"):
        config_from_dict({"name": "x"})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("lr", 0.0, "`lr` must be positive and finite"),
        ("transition_lr", -1.0, "`transition_lr` must be positive and finite"),
        ("clip_norm", 0.0, "`clip_norm` must be positive and finite"),
        ("weight_decay", -0.1, "`weight_decay` must be at least 0"),
        ("min_lr", 1.0, "`min_lr` must be at most `lr`"),
        ("schedule", "cosin", "no `schedule` 'cosin'; did you mean 'cosine'"),
        ("label_smoothing", 1.0, r"`label_smoothing` must be in \[0, 1\); got 1.0"),
        ("betas", (0.9, 1.0), r"`betas` must be two numbers in \[0, 1\)"),
    ],
)
def test_optim_values_out_of_range(field: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OptimConfig(**{field: value})  # type: ignore[arg-type]


def test_smoothed_labels_need_classes_and_backpropagation() -> None:
    config, smoothed = get_recipe("adding"), OptimConfig(label_smoothing=0.1)
    with pytest.raises(ConfigError, match=r"`optim.label_smoothing` must be 0 for a regression"):
        dataclasses.replace(config, optim=smoothed)


def test_shards_need_whole_blocks() -> None:
    config = get_recipe("memory-horizon")
    model = dataclasses.replace(config.model, reversible=True)
    with pytest.raises(ConfigError, match=r"`model.reversible` must be False with `loop.strategy` = 'fsdp'"):
        dataclasses.replace(config, model=model, loop=dataclasses.replace(config.loop, strategy="fsdp"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"epochs": 0}, "`epochs` must be at least 1; got 0"),
        ({"log_every": 0}, "`log_every` must be at least 1"),
        ({"seed": -1}, "`seed` must be at least 0"),
        ({"batch_size": 32, "accumulate": 3}, "`accumulate` must divide `batch_size` = 32"),
        ({"precision": "fp16"}, "no `precision` 'fp16'; did you mean"),
        ({"strategy": "fspd"}, "no `strategy` 'fspd'; did you mean 'fsdp'"),
    ],
)
def test_loop_values_out_of_range(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoopConfig(**fields)  # type: ignore[arg-type]


def test_a_task_of_ones_own_is_refused_by_name() -> None:
    class Mine(MemoryHorizon):
        pass

    config = TrainConfig("mine", Mine(), ModelConfig(vocab_size=6))
    with pytest.raises(
        ConfigError,
        match=f"a task of linrec, {', '.join(tasks.names())}; got Mine",
    ):
        config_to_dict(config)
