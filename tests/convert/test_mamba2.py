import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from linrec.convert import ConversionError, from_hugging_face

from .models import check_conversion, check_refused, with_options

transformers = pytest.importorskip("transformers", reason='the extra "text" is not installed')

SMALL = {
    "vocab_size": 11,
    "hidden_size": 8,
    "num_heads": 4,
    "head_dim": 4,
    "state_size": 3,
    "n_groups": 1,
    "num_hidden_layers": 2,
    # its sequences are of several chunks
    "chunk_size": 5,
}


def make(**options):
    return transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**SMALL | options))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n_groups": 2, "tie_word_embeddings": True},
        {"n_groups": 4, "use_bias": True, "use_conv_bias": False},
        # of these two, transformers has one value
        {"n_groups": 2, "norm_before_gate": True, "rms_norm": False},
        {"time_step_limit": (0.2, 0.7), "layer_norm_epsilon": 0.1},
        {"time_step_limit": (0.5, math.inf), "conv_kernel": 2, "hidden_act": "swish"},
        {"expand": 3, "num_heads": 6, "n_groups": 3, "num_hidden_layers": 1},
    ],
)
def test_logits_are_those_of_transformers(options, tmp_path):
    # dt has two biases there
    changed = ("in_proj.bias", "dt_bias") if "use_bias" in options else ()
    converted = check_conversion(make(**options), tmp_path, changed=changed)
    assert converted.config.tie_embeddings == options.get("tie_word_embeddings", False)
    assert (converted.head.weight is converted.embedding.weight) == converted.config.tie_embeddings


def test_checkpoints_may_be_in_several_files(tmp_path):
    check_conversion(make(n_groups=2), tmp_path, max_shard_size="2KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 and not (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_models_are_in_single_precision_whatever_the_checkpoint_is_in(dtype, tmp_path):
    model = make().to(dtype)
    model.save_pretrained(tmp_path)
    converted = from_hugging_face(tmp_path)
    assert {parameter.dtype for parameter in converted.parameters()} == {torch.float32}
    assert (converted.embedding.weight == model.backbone.embeddings.weight.float()).all()


@pytest.fixture
def folder(tmp_path):
    make(tie_word_embeddings=True).save_pretrained(tmp_path)
    return tmp_path


def with_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_the_embedding_has_an_older_name(folder):
    expected = from_hugging_face(folder).embedding.weight
    with_tensors(
        folder, lambda t: t.update({"backbone.embedding.weight": t.pop("backbone.embeddings.weight")})
    )
    assert (from_hugging_face(folder).embedding.weight == expected).all()


def test_a_tied_head_may_be_there_and_is_then_the_embedding(folder):
    with_tensors(folder, lambda t: t.update({"lm_head.weight": t["backbone.embeddings.weight"].clone()}))
    from_hugging_face(folder)
    with_tensors(folder, lambda t: t["lm_head.weight"].mul_(2))
    with pytest.raises(ConversionError, match=r"must equal the weight that .* ties it to"):
        from_hugging_face(folder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_act": "gelu"}, "`hidden_act` is 'gelu'; linrec supports only 'silu', 'swish'"),
        ({"num_heads": 5}, "`num_heads` * `head_dim` must be `expand` * `hidden_size` = 16; got 5 * 4"),
        ({"time_step_limit": [0.1]}, "`time_step_limit` must be two numbers; got [0.1]"),
        ({"n_groups": None}, "has no `n_groups`"),
        ({"state_size": "3"}, "`state_size` must be of type int; got '3'"),
        ({"use_bias": True}, "has no tensor `backbone.layers.0.mixer.in_proj.bias`; the nearest is"),
        (
            {"num_hidden_layers": 1},
            "not use: `backbone.layers.1.mixer.A_log`, `backbone.layers.1.mixer.D`",
        ),
        ({"tie_word_embeddings": False}, "has no tensor `lm_head.weight`"),
        ({"tie_word_embeddings": None}, "has no tensor `lm_head.weight`"),
        (
            {"vocab_size": 12},
            "`backbone.embeddings.weight` must have shape (12, 8) by config.json; got (11, 8)",
        ),
    ],
)
def test_what_does_not_fit_is_named(options, message, folder):
    with_options(folder, **options)
    check_refused(folder, message)
