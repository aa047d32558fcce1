import pytest
import torch

from linrec.convert import from_hugging_face

from .models import check_conversion, check_refused, with_options

transformers = pytest.importorskip("transformers", reason='the extra "text" is not installed')

SMALL = {
    "vocab_size": 11,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "num_hidden_layers": 3,
    # fewer than the steps that are compared
    "attention_window_size": 5,
    "pad_token_id": None,
}


def make(**options):
    torch.manual_seed(0)
    return transformers.RecurrentGemmaForCausalLM(transformers.RecurrentGemmaConfig(**SMALL | options))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_hidden_layers": 5, "lru_width": 36, "conv1d_width": 2, "logits_soft_cap": 2.0},
        {"num_key_value_heads": 3, "attention_bias": True, "hidden_activation": "gelu"},
        {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32, "rms_norm_eps": 0.1},
        {"block_types": ["attention", "recurrent"], "num_hidden_layers": 2, "tie_word_embeddings": False},
        # their cache counts steps by a layer of attention
        {"block_types": ["recurrent"], "num_hidden_layers": 1, "use_cache": False},
    ],
)
def test_logits_are_those_of_transformers(options, tmp_path):
    converted = check_conversion(make(**options), tmp_path)
    types = options.get("block_types", ["recurrent", "recurrent", "attention"])
    names = {"recurrent": "Hawk", "attention": "Attention"}
    found = [type(mixer).__name__ for mixer in converted.mixers]
    assert found == [names[types[layer % len(types)]] for layer in range(len(found))]


@pytest.mark.parametrize(
    "table",
    [
        {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.25},
        {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 1.0},
    ],
)
def test_positions_turn_the_channels_that_the_table_says(table, tmp_path):
    check_conversion(make(rope_parameters=table, block_types=["attention"], num_hidden_layers=1), tmp_path)


@pytest.fixture
def folder(tmp_path):
    make().save_pretrained(tmp_path)
    return tmp_path


def test_checkpoints_of_2024_have_no_table_of_positions(folder):
    expected = from_hugging_face(folder).config
    with_options(folder, "rope_parameters", rope_theta=10_000.0, partial_rotary_factor=0.5)
    assert from_hugging_face(folder).config == expected
    with_options(folder, rope_theta=20.0, partial_rotary_factor=0.25)
    changed = from_hugging_face(folder).config.mixer_args["attention"]
    assert (changed["rotary_base"], changed["rotary_fraction"]) == (20.0, 0.25)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"hidden_activation": "relu"},
            "`hidden_activation` is 'relu'; linrec supports only 'gelu_pytorch_tanh', 'gelu'",
        ),
        (
            {"num_attention_heads": 5},
            "`hidden_size` must be a positive multiple of `num_attention_heads` = 5; got 24",
        ),
        ({"lru_width": 20}, "`lru_width` must be a positive multiple of `num_attention_heads` = 3; got 20"),
        (
            {"block_types": ["recurrent", "mlp"]},
            "`block_types` must be a list of 'recurrent' and 'attention'",
        ),
        ({"block_types": []}, "`block_types` must be a list of 'recurrent' and 'attention'; got []"),
        (
            {"rope_parameters": {"rope_type": "yarn"}},
            "`rope_type` is 'yarn'; linrec supports only 'default'",
        ),
        ({"conv1d_width": None}, "has no `conv1d_width`"),
        ({"num_hidden_layers": 4}, "has no tensor `model.layers.3.temporal_pre_norm.weight`"),
        ({"num_hidden_layers": 2}, "not use: `model.layers.2.channel_pre_norm.weight`"),
        ({"intermediate_size": 20}, "must have shape (10, 24) by config.json; got (20, 24)"),
    ],
)
def test_what_does_not_fit_is_named(options, message, folder):
    with_options(folder, **options)
    check_refused(folder, message)
