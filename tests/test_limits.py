"""Configurations of others: sizes that no machine has are refused in one line, before memory is allocated."""

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from linrec import mixers
from linrec.cli import main
from linrec.convert import ConversionError, Options, from_hugging_face
from linrec.lab.tasks import LanguageModeling
from linrec.lab.train import LoopConfig, TrainConfig, fit, load_run
from linrec.models import ModelConfig, SequenceClassifierConfig
from linrec.models.config import mixer_parameters
from tests.tiers import thorough

SIZES: list[tuple[dict[str, Any], str]] = [
    ({"n_layers": 10**9}, "`n_layers` must be at least 1 and at most 10,000; got 1000000000"),
    ({"d_model": 10**12}, "`d_model` must be at least 1 and at most 1,048,576; got 1000000000000"),
    ({"d_channel_mixing": 10**12}, "`d_channel_mixing` must be at least 1 and at most 16,777,216"),
    ({"vocab_size": 10**15}, "`vocab_size` must be at least 1 and at most 2,147,483,648"),
    ({"n_outputs": 10**15}, "`n_outputs` must be at least 1 and at most 2,147,483,648"),
    ({"n_layers": 10**9, "mixer": ["gla"] * 10**5}, "`n_layers` must be at least 1 and at most 10,000"),
    ({"n_layers": 9, "mixer": ["gla"] * 10**5}, "`mixer` must be a pattern of 1 to 9 names"),
    ({"n_layers": 9, "norm_position": ["pre"] * 10**5}, "`norm_position` must be a pattern of 1 to 9 names"),
    ({"norm_eps": float("inf")}, "`norm_eps` must be above 0; got inf"),
    ({"norm_eps": float("nan")}, "got nan"),
    ({"mixer_args": {"gate_bias_init": float("nan")}}, "gate_bias_init` must be a number; got nan"),
    ({"mixer_args": {"n_heads": 10**30}}, "n_heads` must be an integer of 64 bits"),
    ({"mixer_args": json.loads('{"a":' * 40 + "1" + "}" * 40)}, "must be nested at most 32 levels deep"),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of a tiny language model."""
    place = tmp_path_factory.mktemp("trained")
    (place / "text").write_text("a rose is a rose is a rose. " * 40)
    task = LanguageModeling(place / "text", tokenizer="bytes", length=8, cache=place / "cache")
    model = ModelConfig(vocab_size=1, d_model=8, n_layers=1, mixer="gate_loop")
    fit(TrainConfig("text", task, model, loop=LoopConfig(steps=1, batch_size=2, device="cpu")), place / "run")
    return place / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained, "run")
    return Path("run")


@pytest.fixture(autouse=True)
def clock() -> Iterator[None]:
    """Fail a test that does not end in a minute."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise AssertionError("the configuration takes longer than a minute")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def edit(path: Path, change: dict[str, Any]) -> None:
    stored = json.loads(path.read_text())
    model = stored["config"]["model"] if "config" in stored else stored["model"]
    arguments = {} if "mixer" in change else model["mixer_args"]
    model |= {"mixer_args": {}, **change} if "mixer" in change else change
    model["mixer_args"] = arguments | change.get("mixer_args", {})
    path.write_text(json.dumps(stored))


@pytest.mark.parametrize(("change", "message"), SIZES, ids=lambda value: str(value)[:30])
def test_a_run_of_any_size_is_read_or_refused_at_once(
    change: dict[str, Any], message: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(run / "config.json", change)
    for words in (["generate", "run"], ["train", "--resume", "run"], ["report", "run"]):
        assert main(words) == 2
        said = capsys.readouterr().err
        assert said.startswith("linrec: run/config.json cannot be used: ") and said.count("\n") == 1
        assert message in said and len(said) < 1000


@pytest.mark.parametrize(("change", "message"), SIZES, ids=lambda value: str(value)[:30])
def test_a_published_model_of_any_size_is_refused_at_once(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    from linrec.hf import LinrecConfig

    LinrecConfig({"vocab_size": 11, "d_model": 8, "n_layers": 1}).save_pretrained(tmp_path)
    edit(tmp_path / "config.json", change)
    with pytest.raises(ValueError, match=r"must be|no argument") as caught:
        transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    assert message in str(caught.value) and len(str(caught.value)) < 1000


def test_weights_refuse_a_larger_model_before_it_is_made(run: Path) -> None:
    # larger than any memory, and within the limits
    edit(run / "config.json", {"d_model": 2**20, "d_channel_mixing": 2**24, "n_layers": 10})
    with pytest.raises(Exception, match=r"config\.json: for `embedding\.weight`"):
        load_run(run).model()


@pytest.mark.parametrize("name", ["n_layer", "d_model", "vocab_size"])
def test_a_checkpoint_of_others_of_any_size_is_refused_at_once(name: str, tmp_path: Path) -> None:
    about = {"ssm_cfg": {}, "d_model": 8, "n_layer": 2, "vocab_size": 11, "rms_norm": True}
    (tmp_path / "config.json").write_text(json.dumps({**about, name: 10**10}))
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ConversionError, match=rf"`{name}`.*; got 10,000,000,000"):
        from_hugging_face(tmp_path)


def test_a_list_of_a_checkpoint_has_a_limit() -> None:
    with pytest.raises(ConversionError, match=r"`layer_types`.*10,000; got 100,000"):
        Options({"layer_types": ["conv"] * 10**5}, "config.json").read("layer_types", list)


def test_a_classifier_has_limits_too() -> None:
    with pytest.raises(ValueError, match=r"`n_features`.*1.*1,048,576"):
        SequenceClassifierConfig(n_outputs=2, n_features=10**12)


@thorough
@pytest.mark.parametrize("name", mixers.names())
def test_no_argument_makes_parts_without_end(name: str) -> None:
    for argument, parameter in mixer_parameters(name).items():
        if "int" not in str(parameter.annotation):
            continue
        try:
            with torch.device("meta"):
                mixer = mixers.build(name, 8, **{argument: 10**9})
                with torch.no_grad():
                    mixer(torch.zeros(1, 6, 8))
        except (TypeError, ValueError, RuntimeError, MemoryError):
            # refused, or too large for any memory
            continue
