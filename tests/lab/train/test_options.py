import dataclasses
import inspect
import json
import typing
from pathlib import Path

import pytest

from linrec import mixers
from linrec.cli.parsing import option_names, parse
from linrec.cli.train import config_of, options_type
from linrec.lab.train import get_recipe, recipe_names
from linrec.lab.train.config import config_from_dict, config_to_dict
from linrec.models.config import complete_mixer_args
from tests.tiers import thorough


@pytest.mark.parametrize("name", recipe_names())
def test_defaults_are_the_recipe(name: str) -> None:
    config = get_recipe(name)
    options = options_type(config)()
    assert config_of(options, name, config.task.section) == config
    assert options.out is None and options.resume is None


@thorough
@pytest.mark.parametrize("mixer", mixers.names())
def test_every_argument_of_every_mixer_is_an_option_of_its_type(mixer: str) -> None:
    config = get_recipe("memory-horizon")
    model = dataclasses.replace(config.model, mixer=mixer, mixer_args={})
    options = options_type(dataclasses.replace(config, model=model))
    signature = inspect.signature(mixers.get(mixer), eval_str=True)
    expected = {p.name: p for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY}
    mixer_options = typing.get_type_hints(typing.get_type_hints(options)["model"])["mixer_args"]
    assert typing.get_type_hints(mixer_options) == {name: p.annotation for name, p in expected.items()}
    assert complete_mixer_args(mixer, {}) == {name: p.default for name, p in expected.items()}
    names = option_names(options)
    assert all(f"--model.mixer-args.{name.replace('_', '-')}" in names for name in expected)


def test_options_of_a_hybrid_are_those_of_its_mixers_under_their_names() -> None:
    config = get_recipe("memory-horizon")
    arguments = {"attention": {"window": 8}}
    model = dataclasses.replace(config.model, mixer=("gla", "attention"), mixer_args=arguments)
    config = dataclasses.replace(config, model=model)
    assert config.model.mixer_args == {
        "gla": complete_mixer_args("gla", {}),
        "attention": complete_mixer_args("attention", {"window": 8}),
    }
    options = options_type(config)
    assert config_of(options(), config.name, config.task.section) == config
    assert options_type(config, ["gla", "attention"])().model.mixer_args.attention.window == 8
    # other mixers, and in another order they are other ones, have their defaults
    turned = options_type(config, ["attention", "gla"])
    assert turned().model.mixer_args.attention.window is None
    named = {f"--model.mixer-args.{name}" for name in ("gla.tau", "attention.window")}
    assert named < {*option_names(turned)}
    alone = config_of(options_type(config, ["lru"])(), config.name, config.task.section)
    assert alone.model.mixer == "lru" and alone.model.mixer_args == complete_mixer_args("lru", {})


@pytest.mark.parametrize("typed", [["HGRN"], ["hgrn", "Mamba-2"]])
def test_other_names_of_mixers_become_the_names_of_files(typed: list[str]) -> None:
    config = get_recipe("memory-horizon")
    parsed = parse(options_type(config, typed), ["--model.mixer", *typed], "train")
    model = config_of(parsed, config.name, config.task.section).model
    assert model.mixer_pattern == ("hgru", "mamba2")[: len(typed)]
    assert model.mixer_args == complete_mixer_args(model.mixer, {})


def test_a_hybrids_configuration_survives_json() -> None:
    config = get_recipe("memory-horizon")
    arguments = {"gate-loop": {"magnitude_init": (0.5, 0.9)}}
    model = dataclasses.replace(config.model, mixer=("lru", "gate-loop"), mixer_args=arguments)
    config = dataclasses.replace(config, model=model)
    assert config.model.mixer_args["gate_loop"]["magnitude_init"] == (0.5, 0.9)
    assert config_from_dict(json.loads(json.dumps(config_to_dict(config)))) == config
    wrong = dataclasses.replace(model, mixer_args={"lru": {"n_heads": 2}})
    with pytest.raises(ValueError, match="no argument of mixer 'lru' called 'n_heads'"):
        dataclasses.replace(config, model=wrong)


def test_sizes_that_the_task_gives_are_no_options() -> None:
    names = option_names(options_type(get_recipe("memory-horizon")))
    assert "--model.vocab-size" not in names and "--model.n-outputs" not in names
    assert {"--out", "--resume", "--task.length", "--optim.transition-lr", "--loop.no-x"} - set(names) == {
        "--loop.no-x"
    }
    assert "--model.no-tie-embeddings" in names


def test_paths_are_paths() -> None:
    hints = typing.get_type_hints(options_type(get_recipe("memory-horizon")))
    assert hints["out"] == Path | None


@pytest.mark.parametrize("name", ["memory-horizon", "lra-listops"])
def test_every_option_of_a_model_is_described(name: str) -> None:
    model = options_type(get_recipe(name))().model
    described = inspect.getdoc(type(model)) or ""
    assert all(f"    {field.name}: " in described for field in dataclasses.fields(model))
