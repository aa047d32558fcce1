import pytest

from linrec.convert import from_hugging_face
from tests.tiers import tiered

from .models import check_conversion, check_refused, with_options

transformers = pytest.importorskip("transformers", reason='the extra "text" is not installed')

SMALL = {
    "vocab_size": 11,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "mamba_d_ssm": 24,
    "mamba_n_heads": 4,
    "mamba_d_state": 5,
    # its sequences are of several chunks
    "mamba_chunk_size": 5,
    "pad_token_id": None,
}
# each unlike the others and unlike 1
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.6,
    "mlp_multipliers": [0.8, 1.4],
    "key_multiplier": 0.5,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.9,
    "ssm_multipliers": [0.7, 1.3, 0.4, 1.6, 2.0],
    "ssm_in_multiplier": 1.1,
    "ssm_out_multiplier": 0.65,
}
BIASES = {"mlp_bias": True, "attention_bias": True, "mamba_proj_bias": True, "mamba_conv_bias": False}


def make(**options):
    return transformers.FalconH1ForCausalLM(transformers.FalconH1Config(**SMALL | options))


@pytest.mark.parametrize(
    "options",
    tiered(
        [{}],
        [
            {**MULTIPLIERS, "tie_word_embeddings": True, "head_dim": 6},
            {**MULTIPLIERS, **BIASES, "mamba_rms_norm": True, "mamba_n_groups": 2},
            {"projectors_bias": True, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
            {"mamba_d_ssm": None, "time_step_limit": (0.2, 0.7), "rms_norm_eps": 0.1, "mamba_d_conv": 2},
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e11}, "mamba_expand": 7},
        ],
    ),
)
def test_logits_are_those_of_transformers(options, tmp_path):
    # dt has two biases there
    changed = ("in_proj.bias", "dt_bias") if "mamba_proj_bias" in options else ()
    converted = check_conversion(make(**options), tmp_path, changed=changed)
    assert {type(mixer).__name__ for mixer in converted.mixers} == {"FalconH1"}


@pytest.fixture
def folder(tmp_path):
    make().save_pretrained(tmp_path)
    return tmp_path


def test_checkpoints_of_2025_have_no_table_of_positions(folder):
    expected = from_hugging_face(folder).config
    with_options(folder, "rope_parameters", "time_step_limit", rope_theta=10_000.0)
    assert from_hugging_face(folder).config == expected
    with_options(folder, rope_theta=1e11)
    assert from_hugging_face(folder).config.mixer_args["attention"]["rotary_base"] == 1e11


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_act": "gelu"}, "`hidden_act` is 'gelu'; linrec supports only 'silu', 'swish'"),
        ({"mlp_multipliers": [1.0]}, "`mlp_multipliers` must be 2 numbers; got [1.0]"),
        ({"ssm_multipliers": [1.0, 1.0, 1.0, 1.0, 0.0]}, "`ssm_multipliers` must be above 0; got 0.0"),
        ({"key_multiplier": -1.0}, "`key_multiplier` must be above 0; got -1.0"),
        ({"mamba_n_heads": 5}, "`mamba_n_heads` must be a positive divisor of the width 24; got 5"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "`rope_type` is 'yarn'; linrec supports only 'default'"),
        ({"mamba_rms_norm": True}, "has no tensor `model.layers.0.mamba.norm.weight`"),
        ({"projectors_bias": True}, "has no tensor `model.layers.0.mamba.out_proj.bias`"),
        ({"num_hidden_layers": 1}, "not use: `model.layers.1."),
    ],
)
def test_what_does_not_fit_is_named(options, message, folder):
    with_options(folder, **options)
    check_refused(folder, message)
