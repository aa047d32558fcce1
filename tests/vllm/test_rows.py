"""States as rows of bytes, and the models that vLLM cannot hold; vLLM itself is not needed here."""

import re
from importlib.metadata import entry_points
from typing import Any

import pytest
import torch

from linrec.generation.state import named
from linrec.models import LanguageModel, MemoryConfig, ModelConfig
from linrec.vllm import register
from linrec.vllm.rows import StateRows, check_servable, longest_row, without_values

TOKENS = torch.arange(21).reshape(3, 7) % 5


def config(mixer: Any, **changes: Any) -> ModelConfig:
    return ModelConfig(**{"vocab_size": 5, "d_model": 16, "n_layers": 2, "mixer": mixer} | changes)


@pytest.mark.parametrize("mixer", ["hgru", "gated_delta_net", "mamba2", "slstm", "rwkv6"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_comes_back_from_bytes_as_it_was(mixer: str, dtype: torch.dtype) -> None:
    # complex numbers, several dtypes in a state, and a running maximum that starts at minus infinity
    model = LanguageModel(config(mixer)).to(dtype).eval()
    with torch.no_grad():
        _, states = model(TOKENS)
    for start, state in zip(model.init_state(1), states, strict=True):
        rows = StateRows(start)
        pool = torch.randint(255, (6, rows.size + 32), dtype=torch.uint8)
        before, views = pool.clone(), rows.views(pool)
        places = torch.tensor([4, 0, 2])
        rows.write(views, places, state)
        found = named(rows.read(views, places), "state")
        expected = named(state, "state")
        assert list(found) == list(expected)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert torch.equal(pool[[1, 3, 5]], before[[1, 3, 5]]) and torch.equal(
            pool[:, rows.size :], before[:, rows.size :]
        )


def test_a_state_of_another_shape_is_refused() -> None:
    rows = StateRows(torch.zeros(1, 4))
    views = rows.views(torch.zeros(2, 16, dtype=torch.uint8))
    with pytest.raises(ValueError, match="must keep its shapes"):
        rows.write(views, torch.tensor([0]), torch.zeros(1, 5))


def test_the_longest_row_is_that_of_the_largest_state() -> None:
    large, small = (longest_row(LanguageModel(config(mixer))) for mixer in ("mamba2", "hgru"))
    assert large > small == 16 * 8
    mixed = config(("hgru", "mamba2", "attention"), n_layers=3)
    assert longest_row(without_values(mixed, torch.float32)) == large


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mixer": "transformer_xl"}, "layer 0, TransformerXL, has a state whose size changes"),
        ({"mixer": "hyena"}, "layer 0, Hyena, has a state whose size changes"),
        ({"mixer": ("gla", "gmlp")}, "layer 1, GMLP, has a state whose size changes"),
        ({"mixer": "aft", "mixer_args": {"causal": False}}, "layer 0, AFT, sees later steps"),
        ({"mixer": "attention"}, "must have a recurrent layer; got the mixer 'attention' alone"),
        (
            {"mixer": ("gla", "attention"), "mixer_args": {"attention": {"cache_size": 8}}},
            "layer 1, Attention, has a cache of its own",
        ),
        ({"mixer": "gla", "pool": (2,)}, r"got `memory.kind` = 'none' and `pool` = \(2,\)"),
        ({"mixer": "gla", "memory": MemoryConfig(kind="memformer")}, "got `memory.kind` = 'memformer'"),
    ],
)
def test_models_that_vllm_cannot_hold_are_refused_by_name(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        check_servable(without_values(config(**changes), torch.float32))
    assert "\n" not in str(caught.value) and re.search(r"(Use|Train) ", str(caught.value))


def test_vllm_finds_the_plugin() -> None:
    found = {point.name: point for point in entry_points(group="vllm.general_plugins")}
    assert "linrec" not in found or found["linrec"].load() is register
