from pathlib import Path
from typing import Any

import pytest

from linrec.convert import from_hugging_face
from tests.tiers import tiered

from .models import check_conversion, check_refused, with_options

transformers = pytest.importorskip("transformers", reason='the extra "text" is not installed')
pytest.importorskip("transformers.models.lfm2")

SMALL: dict[str, Any] = {
    "vocab_size": 11,
    "hidden_size": 16,
    "intermediate_size": 12,
    "block_multiple_of": 4,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "layer_types": ["conv", "full_attention", "conv"],
    "pad_token_id": None,
}


def make(**options: Any) -> Any:
    return transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**SMALL | options))


@pytest.mark.parametrize(
    ("options", "width"),
    tiered(
        [({}, 8)],
        [
            ({"conv_bias": True, "conv_L_cache": 4, "tie_word_embeddings": False}, 8),
            ({"block_auto_adjust_ff_dim": False, "num_key_value_heads": 2, "norm_eps": 0.1}, 12),
            ({"block_ffn_dim_multiplier": 1.3, "layer_types": ["full_attention", "conv", "conv"]}, 12),
            ({"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}, 8),
        ],
    ),
)
def test_logits_are_those_of_transformers(options: dict[str, Any], width: int, tmp_path: Path) -> None:
    converted = check_conversion(make(**options), tmp_path)
    assert converted.config.d_channel_mixing == width


def test_checkpoints_of_2025_have_other_options(tmp_path: Path) -> None:
    model = make()
    model.save_pretrained(tmp_path)
    expected = from_hugging_face(tmp_path).config
    older = {
        "full_attn_idxs": [1],
        "block_ff_dim": 12,
        "tie_embedding": True,
        "rope_theta": model.config.rope_parameters["rope_theta"],
    }
    newer = "layer_types", "intermediate_size", "tie_word_embeddings", "rope_parameters"
    with_options(tmp_path, *newer, **older)
    assert from_hugging_face(tmp_path).config == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer_types": ["conv", "mamba", "conv"]}, "`layer_types` must be 3 of 'conv', 'full_attention'"),
        ({"model_type": "lfm2_moe"}, "linrec has no mixtures of experts"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "`partial_rotary_factor` is 0.5"),
        ({"conv_L_cache": None}, "has no `conv_L_cache`"),
    ],
)
def test_what_does_not_fit_is_named(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    make().save_pretrained(tmp_path)
    with_options(tmp_path, **options)
    check_refused(tmp_path, message)
