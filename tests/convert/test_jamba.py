from pathlib import Path
from typing import Any

import pytest

from tests.tiers import tiered

from .models import check_conversion, check_refused, with_options

transformers = pytest.importorskip("transformers", reason='the extra "text" is not installed')

SMALL: dict[str, Any] = {
    "vocab_size": 11,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "attn_layer_period": 3,
    "attn_layer_offset": 1,
    "num_experts": 1,
    "mamba_d_state": 3,
    "pad_token_id": None,
}


def make(**options: Any) -> Any:
    return transformers.JambaForCausalLM(transformers.JambaConfig(**SMALL | options))


@pytest.mark.parametrize(
    "options",
    tiered(
        [{}],
        [
            {"mamba_dt_rank": 3, "mamba_proj_bias": True, "mamba_conv_bias": False, "num_key_value_heads": 2},
            {"tie_word_embeddings": True, "mamba_expand": 3, "mamba_d_conv": 2, "rms_norm_eps": 0.1},
        ],
    ),
)
def test_logits_are_those_of_transformers(options: dict[str, Any], tmp_path: Path) -> None:
    converted = check_conversion(make(**options), tmp_path)
    assert converted.config.mixer == ("mamba", "attention", "mamba", "mamba")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_experts": 4}, "`num_experts` is 4; linrec has no mixtures of experts"),
        ({"hidden_act": "gelu"}, "`hidden_act` is 'gelu'; linrec supports only 'silu'"),
        ({"mamba_d_state": None}, "has no `mamba_d_state`"),
    ],
)
def test_what_does_not_fit_is_named(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    make().save_pretrained(tmp_path)
    with_options(tmp_path, **options)
    check_refused(tmp_path, message)
