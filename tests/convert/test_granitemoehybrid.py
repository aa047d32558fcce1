import pytest

from linrec.convert import from_hugging_face
from tests.tiers import tiered

from .models import check_conversion, check_refused, with_options

transformers = pytest.importorskip("transformers", reason='the extra "text" is not installed')

SMALL = {
    "vocab_size": 11,
    "hidden_size": 16,
    "shared_intermediate_size": 20,
    "num_local_experts": 0,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "mamba_n_heads": 4,
    "mamba_d_state": 5,
    # its sequences are of several chunks
    "mamba_chunk_size": 5,
}
# each unlike the others and unlike 1
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.5,
    "residual_multiplier": 0.7,
    "logits_scaling": 1.5,
}


def make(**options):
    config = transformers.GraniteMoeHybridConfig(**SMALL | options)
    return transformers.GraniteMoeHybridForCausalLM(config)


@pytest.mark.parametrize(
    "options",
    tiered(
        [{}],
        [
            {**MULTIPLIERS, "position_embedding_type": "rope", "mamba_n_groups": 2},
            {**MULTIPLIERS, "tie_word_embeddings": True, "rms_norm_eps": 0.1, "time_step_limit": (0.2, 0.7)},
            {**MULTIPLIERS, "attention_bias": True, "mamba_proj_bias": True, "mamba_conv_bias": False},
            {
                **MULTIPLIERS,
                "layer_types": ["full_attention"] * 3,
                "position_embedding_type": "rope",
                "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
            },
            # their cache counts steps by a layer of attention
            {"layer_types": None, "mamba_d_conv": 2, "mamba_expand": 1, "use_cache": False},
        ],
    ),
)
def test_logits_are_those_of_transformers(options, tmp_path):
    # dt has two biases there
    changed = ("in_proj.bias", "dt_bias") if "mamba_proj_bias" in options else ()
    converted = check_conversion(make(**options), tmp_path, changed=changed)
    types = (SMALL | options)["layer_types"] or ["linear_attention"] * 3
    names = {"linear_attention": "Mamba2", "full_attention": "Attention"}
    assert [type(mixer).__name__ for mixer in converted.mixers] == [names[kind] for kind in types]


@pytest.fixture
def folder(tmp_path):
    make(position_embedding_type="rope").save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["layer_types", "layers_block_type"])
def test_checkpoints_of_2025_have_other_names(name, folder):
    expected = from_hugging_face(folder).config
    with_options(folder, "rope_parameters", "time_step_limit", rope_theta=10_000.0)
    with_options(folder, "layer_types", **{name: ["mamba", "attention", "mamba"]})
    assert from_hugging_face(folder).config == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_act": "gelu"}, "`hidden_act` is 'gelu'; linrec supports only 'silu', 'swish'"),
        ({"num_local_experts": 4}, "`num_local_experts` is 4; linrec has no mixtures of experts."),
        ({"num_local_experts": None}, "`num_local_experts` is 8; linrec has no mixtures of experts."),
        ({"residual_multiplier": 0.0}, "`residual_multiplier` must be above 0; got 0.0"),
        ({"layer_types": ["mamba", "conv", "mamba"]}, "`layer_types` must be a list of 'mamba' and"),
        ({"layer_types": ["mamba"]}, "'attention' for 3 layers; got ['mamba']"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "`rope_type` is 'yarn'; linrec supports only 'default'"),
        ({"layer_types": ["mamba"] * 3}, "has no tensor `model.layers.1.mamba.in_proj.weight`"),
        ({"shared_intermediate_size": 10}, "must have shape (20, 16) by config.json; got (40, 16)"),
        ({"mamba_n_groups": None}, "has no `mamba_n_groups`"),
    ],
)
def test_what_does_not_fit_is_named(options, message, folder):
    with_options(folder, **options)
    check_refused(folder, message)
