import pytest

from linrec.convert import from_hugging_face

from .models import check_conversion, check_refused, with_options

transformers = pytest.importorskip("transformers", reason='the extra "text" is not installed')

NAMES = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
SMALL = {
    "vocab_size": 11,
    "hidden_size": 10,
    "intermediate_size": 20,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 6,
    "mamba_num_heads": 4,
    "mamba_head_dim": 6,
    "ssm_state_size": 5,
    "n_groups": 2,
    # its sequences are of several chunks
    "chunk_size": 5,
    "pad_token_id": None,
}


def make(pattern="M-M*-", **options):
    layers = [NAMES[letter] for letter in pattern]
    return transformers.NemotronHForCausalLM(
        transformers.NemotronHConfig(**SMALL | {"layers_block_type": layers} | options)
    )


@pytest.mark.parametrize(
    ("pattern", "options", "mixers", "mixed"),
    [
        ("M-M*-", {}, ["Mamba2", "Mamba2", "Attention"], [True, False, True]),
        (
            "*M-",
            {"use_bias": True, "mlp_bias": True, "use_conv_bias": False},
            ["Attention", "Mamba2"],
            [0, 1],
        ),
        ("*-M-", {"time_step_min": 0.5, "layer_norm_epsilon": 0.1}, ["Attention", "Mamba2"], [1, 1]),
        # options that transformers does not read
        ("M*", {"attention_bias": True, "time_step_limit": (1.0, 2.0)}, ["Mamba2", "Attention"], [0, 0]),
        # their cache counts steps by a layer of attention
        ("M-", {"use_cache": False, "n_groups": 1, "conv_kernel": 2}, ["Mamba2"], [1]),
    ],
)
def test_logits_are_those_of_transformers(pattern, options, mixers, mixed, tmp_path):
    # dt has two biases there
    changed = ("in_proj.bias", "dt_bias") if "use_bias" in options else ()
    converted = check_conversion(make(pattern, **options), tmp_path, changed=changed)
    assert [type(mixer).__name__ for mixer in converted.mixers] == mixers
    assert [block.channel_mixing is not None for block in converted.blocks] == mixed


@pytest.fixture
def folder(tmp_path):
    make().save_pretrained(tmp_path)
    return tmp_path


def test_checkpoints_of_2025_have_other_names(folder):
    expected = from_hugging_face(folder).config
    with_options(folder, layers_block_type=["mamba", "mlp", "mamba", "attention", "mlp"])
    assert from_hugging_face(folder).config == expected
    with_options(folder, "layers_block_type", hybrid_override_pattern="M-M*-", num_hidden_layers=5)
    with_options(folder, "head_dim", attention_head_dim=6)
    assert from_hugging_face(folder).config == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mlp_hidden_act": "silu"}, "`mlp_hidden_act` is 'silu'; linrec supports only 'relu2'"),
        ({"mamba_hidden_act": "gelu"}, "`mamba_hidden_act` is 'gelu'; linrec supports only 'silu', 'swish'"),
        ({"layers_block_type": None}, "has no `hybrid_override_pattern`"),
        ({"layers_block_type": ["mamba", "conv"]}, "`layers_block_type` has 'conv'; linrec knows only ['M',"),
        (
            {"layers_block_type": ["mamba", "moe"]},
            "`layers_block_type` has experts at layer 1; linrec has no mixtures of experts.",
        ),
        (
            {"layers_block_type": ["mlp", "mamba"]},
            "`layers_block_type` has an MLP at layer 0 without Mamba-2 or attention right before it",
        ),
        (
            {"layers_block_type": ["mamba", "mlp", "mlp"]},
            "has an MLP at layer 2 without Mamba-2 or attention",
        ),
        ({"layers_block_type": ["mamba", "mlp"]}, "not use: `backbone.layers.2."),
        ({"use_bias": True}, "has no tensor `backbone.layers.0.mixer.in_proj.bias`"),
        ({"mamba_head_dim": 5}, "must have shape (64, 10) by config.json; got (72, 10)"),
        ({"time_step_min": None}, "has no `time_step_min`"),
    ],
)
def test_what_does_not_fit_is_named(options, message, folder):
    with_options(folder, **options)
    check_refused(folder, message)
