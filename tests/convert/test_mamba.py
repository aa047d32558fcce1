import pytest

from .models import check_conversion, check_refused, with_options

transformers = pytest.importorskip("transformers", reason='the extra "text" is not installed')

SMALL = {"vocab_size": 11, "hidden_size": 8, "state_size": 3, "num_hidden_layers": 2}


def make(**options):
    return transformers.MambaForCausalLM(transformers.MambaConfig(**SMALL | options))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tie_word_embeddings": False, "time_step_rank": 3},
        {"use_bias": True, "use_conv_bias": False, "hidden_act": "swish"},
        {"expand": 3, "conv_kernel": 2, "layer_norm_epsilon": 0.1, "num_hidden_layers": 1},
    ],
)
def test_logits_are_those_of_transformers(options, tmp_path):
    converted = check_conversion(make(**options), tmp_path)
    assert converted.config.tie_embeddings == options.get("tie_word_embeddings", True)


@pytest.mark.parametrize("options", [{}, {"mixer_rms_eps": 0.1, "time_step_rank": 3, "use_bias": True}])
def test_logits_of_falcon_mamba(options, tmp_path):
    config = transformers.FalconMambaConfig(**SMALL | options)
    check_conversion(transformers.FalconMambaForCausalLM(config), tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_act": "gelu"}, "`hidden_act` is 'gelu'; linrec supports only 'silu', 'swish'"),
        ({"time_step_rank": "auto"}, "`time_step_rank` must be of type int; got 'auto'"),
        ({"state_size": 4}, "`backbone.layers.0.mixer.x_proj.weight` must have shape (9, 16) by config.json"),
        ({"use_bias": True}, "has no tensor `backbone.layers.0.mixer.in_proj.bias`"),
    ],
)
def test_what_does_not_fit_is_named(options, message, tmp_path):
    make().save_pretrained(tmp_path)
    with_options(tmp_path, **options)
    check_refused(tmp_path, message)
