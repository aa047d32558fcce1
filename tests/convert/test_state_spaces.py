import shutil

import pytest
import torch
from safetensors.torch import load_file

from linrec.convert import from_hugging_face, to_hugging_face

from . import released
from .models import check_refused, with_options

CASES = [case for case in released.cases() if case.endswith("state_spaces")]


def copy(case, folder):
    shutil.copytree(released.FOLDER / case, folder, dirs_exist_ok=True)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_models_are_written_back(case, tmp_path):
    model, back = from_hugging_face(released.FOLDER / case), tmp_path / "back"
    to_hugging_face(model, back, like=released.FOLDER / case)
    assert (back / "config.json").read_bytes() == (released.FOLDER / case / "config.json").read_bytes()
    expected = load_file(released.FOLDER / case / "model.safetensors")
    if model.config.tie_embeddings:
        expected.pop("lm_head.weight", None)
    if model.config.mixer_args["bias"] and model.config.mixer == "mamba2":
        # dt has two biases there
        for layer in range(model.config.n_layers):
            prefix = f"backbone.layers.{layer}.mixer."
            dt = expected[f"{prefix}in_proj.bias"][-model.config.mixer_args["n_heads"] :]
            expected[f"{prefix}dt_bias"] += dt
            dt.zero_()
    torch.testing.assert_close(load_file(back / "model.safetensors"), expected, rtol=0, atol=0)


def test_what_is_left_out_is_as_the_code_has_it(tmp_path):
    with_options(
        copy("mamba_state_spaces", tmp_path), "rms_norm", "pad_vocab_size_multiple", "fused_add_norm"
    )
    config = from_hugging_face(tmp_path).config
    # the vocabulary of 11 in a multiple of 8
    assert config.vocab_size == 16 and config.norm == "rms" and config.tie_embeddings
    assert config.mixer == "mamba" and config.channel_mixing == "none"
    assert config.mixer_args["d_state"] == 16 and config.mixer_args["dt_rank"] == 1


def test_arguments_of_first_weights_and_speed_change_nothing(tmp_path):
    expected = from_hugging_face(copy("mamba_state_spaces", tmp_path)).config
    idle = {"dt_rank": "auto", "dt_min": 0.1, "dt_init": "constant", "use_fast_path": False}
    with_options(tmp_path, ssm_cfg=idle)
    assert from_hugging_face(tmp_path).config == expected


@pytest.mark.parametrize(
    ("case", "options", "message"),
    [
        ("mamba_state_spaces", {"ssm_cfg": None}, "config.json has no `model_type`"),
        ("mamba_state_spaces", {"n_layer": None}, "config.json has no `n_layer`"),
        ("mamba_state_spaces", {"n_layer": 1}, "does not use: `backbone.layers.1."),
        ("mamba_state_spaces", {"attn_layer_idx": [1]}, "`attn_layer_idx` is [1]; linrec supports only []"),
        ("mamba_state_spaces", {"d_intermediate": 8}, "has no tensor `backbone.layers.0.norm2.weight`"),
        ("mamba_state_spaces", {"rms_norm": False}, "has no tensor `backbone.norm_f.bias`"),
        ("mamba_state_spaces", {"ssm_cfg": {"d_state": 2}}, "must have shape (5, 16) by config.json; got"),
        ("mamba_state_spaces", {"ssm_cfg": {"dt_rank": "all"}}, "`dt_rank` must be of type int; got 'all'"),
        (
            "mamba_state_spaces",
            {"ssm_cfg": {"headdim": 4}},
            "argument of Mamba1 called 'headdim'",
        ),
        (
            "mamba2_state_spaces",
            {"ssm_cfg": {"layer": "Mamba2", "headdim": 4, "d_state": 16, "use_phase": True}},
            "`ssm_cfg`: there is no argument of Mamba2 called 'use_phase'",
        ),
        ("mamba_state_spaces", {"ssm_cfg": {"layer": "Mamba3"}}, "`layer` is 'Mamba3'; linrec supports"),
        ("mamba2_state_spaces", {"ssm_cfg": {"layer": "Mamba2", "d_ssm": 8}}, "`d_ssm` is 8; linrec"),
        ("mamba2_state_spaces", {"ssm_cfg": {"layer": "Mamba2"}}, "`headdim` must be a divisor of 16; got"),
        (
            "mamba2_state_spaces",
            {"ssm_cfg": {"layer": "Mamba2", "headdim": 4, "dt_limit": [0.1]}},
            "`dt_limit` must be two numbers; got [0.1]",
        ),
        ("mamba2_options_state_spaces", {"tie_embeddings": True}, "`lm_head.weight` must equal"),
    ],
)
def test_what_does_not_fit_is_named(case, options, message, tmp_path):
    with_options(copy(case, tmp_path), **options)
    check_refused(tmp_path, message)
