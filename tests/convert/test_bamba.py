import pytest

from linrec.convert import from_hugging_face
from tests.tiers import tiered

from .models import check_conversion, check_refused, with_options

transformers = pytest.importorskip("transformers", reason='the extra "text" is not installed')

SMALL = {
    "vocab_size": 11,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "attn_layer_indices": [1],
    "mamba_n_heads": 4,
    "mamba_d_state": 5,
    # its sequences are of several chunks
    "mamba_chunk_size": 5,
    "pad_token_id": None,
}


def make(**options):
    return transformers.BambaForCausalLM(transformers.BambaConfig(**SMALL | options))


@pytest.mark.parametrize(
    "options",
    tiered(
        [{}],
        [
            {"mamba_n_groups": 2, "tie_word_embeddings": True, "attn_layer_indices": [0, 2]},
            {"mamba_proj_bias": True, "mamba_conv_bias": False, "attention_bias": True, "mlp_bias": True},
            {"time_step_limit": (0.2, 0.7), "rms_norm_eps": 0.1, "mamba_expand": 3, "mamba_n_heads": 6},
            # their cache counts steps by a layer of attention
            {"attn_layer_indices": None, "num_hidden_layers": 2, "mamba_d_conv": 2, "use_cache": False},
            {
                "attn_layer_indices": [0],
                "num_hidden_layers": 1,
                "num_attention_heads": 4,
                "rope_parameters": {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 1.0},
            },
        ],
    ),
)
def test_logits_are_those_of_transformers(options, tmp_path):
    # dt has two biases there
    changed = ("in_proj.bias", "dt_bias") if "mamba_proj_bias" in options else ()
    converted = check_conversion(make(**options), tmp_path, changed=changed)
    attended = (SMALL | options)["attn_layer_indices"] or []
    names = ["Attention" if layer in attended else "Mamba2" for layer in range(converted.config.n_layers)]
    assert [type(mixer).__name__ for mixer in converted.mixers] == names


@pytest.fixture
def folder(tmp_path):
    make().save_pretrained(tmp_path)
    return tmp_path


def test_checkpoints_of_2024_have_no_table_of_positions(folder):
    expected = from_hugging_face(folder).config
    missing = "rope_parameters", "time_step_limit", "mlp_bias"
    # transformers does not read this factor
    with_options(folder, *missing, rope_theta=10_000.0, partial_rotary_factor=0.25)
    assert from_hugging_face(folder).config == expected
    with_options(folder, rope_theta=20.0, mamba_d_head="auto")
    changed = from_hugging_face(folder).config.mixer_args["attention"]
    assert (changed["rotary_base"], changed["rotary_fraction"]) == (20.0, 0.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_act": "gelu"}, "`hidden_act` is 'gelu'; linrec supports only 'silu', 'swish'"),
        ({"num_attention_heads": 0}, "`num_attention_heads` must be at least 1; got 0"),
        ({"mamba_n_heads": 5}, "`mamba_n_heads` must be a positive divisor of the width 32; got 5"),
        ({"mamba_d_head": 4}, "`mamba_d_head` is 4; linrec supports only 8, 'auto'"),
        ({"time_step_limit": [0.1]}, "`time_step_limit` must be two numbers; got [0.1]"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "`type` is 'linear'; linrec supports only"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "`rope_type` is 'yarn'; linrec supports only 'default'"),
        ({"attn_layer_indices": []}, "has no tensor `model.layers.1.mamba.in_proj.weight`"),
        ({"num_hidden_layers": 2}, "not use: `model.layers.2."),
        ({"mlp_bias": True}, "has no tensor `model.layers.0.feed_forward.gate_proj.bias`"),
        ({"mamba_d_state": None}, "has no `mamba_d_state`"),
    ],
)
def test_what_does_not_fit_is_named(options, message, folder):
    with_options(folder, **options)
    check_refused(folder, message)
