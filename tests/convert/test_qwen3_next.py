"""Qwen3-Next, Qwen3.5 and OLMo Hybrid: Gated DeltaNet and attention."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from linrec.convert import ConversionError, from_hugging_face
from tests.tiers import tiered

from .models import check_conversion, check_refused, with_options

transformers = pytest.importorskip("transformers", reason='the extra "text" is not installed')
pytest.importorskip("transformers.models.olmo_hybrid")

SMALL: dict[str, Any] = {
    "vocab_size": 11,
    "hidden_size": 12,
    "intermediate_size": 10,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    # keys of few channels may be nearly zero, and dividing by their length enlarges rounding errors
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "pad_token_id": None,
    "eos_token_id": None,
}
# a quarter of 16 channels are two pairs, so that the base of rotary positions matters
QWEN = SMALL | {"head_dim": 16, "linear_num_value_heads": 4}
DENSE = {"mlp_only_layers": [0, 1, 2, 3]}
# more than a chunk of the released code
LONG = 70


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    # rounding errors of both sides reach 5e-4 for some random weights
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def qwen3_next(**options: Any) -> Any:
    return transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**QWEN | DENSE | options))


def qwen3_5(**options: Any) -> Any:
    config = transformers.Qwen3_5TextConfig(**QWEN | options)
    return transformers.Qwen3_5ForCausalLM(config)


def olmo_hybrid(**options: Any) -> Any:
    return transformers.OlmoHybridForCausalLM(transformers.OlmoHybridConfig(**SMALL | options))


@pytest.mark.parametrize("make", [qwen3_next, qwen3_5], ids=["qwen3_next", "qwen3_5"])
@pytest.mark.parametrize(
    "options",
    tiered(
        [{}],
        [
            {"tie_word_embeddings": True, "linear_num_key_heads": 4, "attention_bias": True},
            {"linear_num_key_heads": 1, "rms_norm_eps": 1e-2, "linear_conv_kernel_dim": 3},
            {"layer_types": ["full_attention", "linear_attention"] * 2, "num_key_value_heads": 2},
            {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.5}},
        ],
    ),
)
def test_logits_of_qwen_are_those_of_transformers(make: Any, options: dict[str, Any], tmp_path: Path) -> None:
    time = LONG if not options else 13
    converted = check_conversion(make(**options), tmp_path, time=time)
    assert len(set(converted.config.mixer_pattern)) == 2


@pytest.mark.parametrize(
    "options",
    tiered(
        [{}],
        [
            {"linear_allow_neg_eigval": False, "num_key_value_heads": 2, "attention_bias": True},
            {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}, "tie_word_embeddings": True},
            {"rope_parameters": {"rope_type": "default", "rope_theta": None}},
            # released code ignores the factor
            {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}},
            {"layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"]},
        ],
    ),
)
def test_logits_of_olmo_hybrid_are_those_of_transformers(options: dict[str, Any], tmp_path: Path) -> None:
    converted = check_conversion(olmo_hybrid(**options), tmp_path, time=13 if options else LONG)
    assert set(converted.config.norm_position) == {"pre", "output"}


@pytest.mark.parametrize(
    ("make", "options", "base", "fraction"),
    [
        (qwen3_5, {"rope_theta": 50.0}, 50.0, 0.25),
        (qwen3_5, {"rope_theta": 50.0, "partial_rotary_factor": 0.5}, 50.0, 0.5),
        (qwen3_5, {"rope_parameters": {"rope_theta": 50.0}, "rope_scaling": {}}, 50.0, 0.25),
        (qwen3_5, {"rope_scaling": {"type": "default"}, "rope_theta": 50.0}, 50.0, 0.25),
        (qwen3_5, {}, 10_000.0, 0.25),
        (olmo_hybrid, {"rope_theta": 50.0}, 50.0, 1.0),
        (olmo_hybrid, {"rope_parameters": None}, 10_000.0, 1.0),
        (olmo_hybrid, {"rope_parameters": {"rope_theta": None}, "rope_theta": 50.0}, None, 1.0),
        (olmo_hybrid, {"rope_theta": None}, None, 1.0),
    ],
)
def test_rotary_positions_are_read_as_transformers_reads_them(
    make: Any, options: dict[str, Any], base: float | None, fraction: float, tmp_path: Path
) -> None:
    model = make()
    model.save_pretrained(tmp_path)
    with_options(tmp_path, "rope_parameters", **options)
    theirs = type(model.config).from_pretrained(tmp_path).rope_parameters
    assert (theirs["rope_theta"], theirs.get("partial_rotary_factor", 1.0)) == (base, fraction)
    ours = from_hugging_face(tmp_path).config.mixer_args["attention"]
    if base is None:
        assert ours["positions"] == "none"
    else:
        assert (ours["rotary_base"], ours.get("rotary_fraction", 1.0)) == (base, fraction)


@pytest.mark.parametrize("tied", [False, True])
def test_text_models_of_images_and_text_are_read_after_transformers_saves_them(
    tied: bool, tmp_path: Path
) -> None:
    vision = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "out_hidden_size": 12}
    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    config = transformers.Qwen3_5Config(
        text_config=QWEN | layers | {"tie_word_embeddings": tied},
        vision_config=vision,
        tie_word_embeddings=tied,
    )
    transformers.Qwen3_5ForConditionalGeneration(config).save_pretrained(tmp_path / "whole")
    with pytest.raises(ConversionError, match="is a model of images and text"):
        from_hugging_face(tmp_path / "whole")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    check_conversion(model, tmp_path / "text")
    assert "model.language_model.norm.weight" in load_file(tmp_path / "text" / "model.safetensors")


def test_olmo_hybrid_is_written_with_the_published_names(tmp_path: Path) -> None:
    model = olmo_hybrid()
    converted = check_conversion(model, tmp_path / "saved")
    published = tmp_path / "saved-back"
    expected = dict(model.named_parameters())
    for layer in range(3):
        prefix = f"model.layers.{layer}.linear_attn."
        taps = expected.pop(f"{prefix}conv1d.weight")
        parts = zip("qkv", taps.split([16, 16, 12]), strict=True)
        expected |= {f"{prefix}{name}_conv1d.weight": part for name, part in parts}
    written = load_file(published / "model.safetensors")
    assert written.keys() == expected.keys()
    for name, tensor in written.items():
        assert torch.equal(tensor, expected[name])
    for name, parameter in from_hugging_face(published).named_parameters():
        assert torch.equal(parameter, converted.get_parameter(name))


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (qwen3_next, {"num_experts": 8, "mlp_only_layers": []}, "`num_experts` is 8; linrec has no mixtures"),
        (qwen3_5, {"hidden_act": "gelu"}, "`hidden_act` is 'gelu'; linrec supports only 'silu'"),
        (
            qwen3_5,
            {"layer_types": ["sliding_attention"] * 4},
            "`layer_types` must be 4 of 'linear_attention'",
        ),
        (qwen3_5, {"linear_num_value_heads": 3}, "must be a multiple of `linear_num_key_heads` = 2; got 3"),
        (olmo_hybrid, {"rope_parameters": {"rope_type": "yarn"}}, "`rope_type` is 'yarn'"),
        (qwen3_5, {"full_attention_interval": 0}, "`full_attention_interval` must be at least 1; got 0"),
        (qwen3_next, {"decoder_sparse_step": 0}, "`decoder_sparse_step` must be at least 1; got 0"),
        (qwen3_next, {"rope_parameters": {"partial_rotary_factor": 0.2}}, "`head_dim` = 16"),
        (qwen3_5, {"linear_num_key_heads": 0}, "`linear_num_key_heads` must be at least 1; got 0"),
        (qwen3_5, {"model_type": "kimi_linear"}, "linrec has no latent attention"),
    ],
)
def test_what_does_not_fit_is_named(make: Any, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    make().save_pretrained(tmp_path)
    with_options(tmp_path, **options)
    check_refused(tmp_path, message)
