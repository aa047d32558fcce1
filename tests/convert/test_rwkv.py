import pytest

from linrec.convert import from_hugging_face

from .models import check_conversion, check_refused, with_options

transformers = pytest.importorskip("transformers", reason='the extra "text" is not installed')

SMALL = {"vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 2}


def make(**options):
    return transformers.RwkvForCausalLM(transformers.RwkvConfig(**SMALL | options))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tie_word_embeddings": True, "intermediate_size": 12},
        # with a state, transformers has one width for both
        {"attention_hidden_size": 6, "use_cache": False},
        # there, layers 2 and 3 see half of what they would
        {"num_hidden_layers": 4, "rescale_every": 2},
    ],
)
def test_logits_are_those_of_transformers(options, tmp_path):
    converted = check_conversion(make(**options), tmp_path)
    assert converted.config.tie_embeddings == options.get("tie_word_embeddings", False)
    assert (converted.head.weight is converted.embedding.weight) == converted.config.tie_embeddings


def test_embeddings_are_tied_only_where_config_says_so(tmp_path):
    make().save_pretrained(tmp_path)
    with_options(tmp_path, tie_word_embeddings=None)
    converted = from_hugging_face(tmp_path)
    assert (converted.head.weight != converted.embedding.weight).any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer_norm_epsilon": 1e-3}, "`layer_norm_epsilon` is 0.001; linrec supports only 1e-05"),
        ({"attention_hidden_size": 6}, "`rwkv.blocks.0.attention.time_decay` must have shape (6,) by"),
        ({"intermediate_size": 30}, "`rwkv.blocks.0.feed_forward.key.weight` must have shape (30, 8)"),
        ({"num_hidden_layers": 1}, "does not use: `rwkv.blocks.1."),
        ({"hidden_size": None}, "has no `hidden_size`"),
    ],
)
def test_what_does_not_fit_is_named(options, message, tmp_path):
    make().save_pretrained(tmp_path)
    with_options(tmp_path, **options)
    check_refused(tmp_path, message)
