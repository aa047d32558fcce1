import shutil

import pytest
import torch

from linrec.convert import from_hugging_face

from . import released
from .models import check_conversion, check_refused, with_options

transformers = pytest.importorskip("transformers", reason='the extra "text" is not installed')

SMALL = {
    "vocab_size": 11,
    "hidden_size": 8,
    "num_heads": 2,
    "num_hidden_layers": 2,
    "num_blocks": 2,
    "ffn_round_up_to_multiple_of": 4,
    # its sequences are of several chunks
    "chunk_size": 5,
    # its cache is of multiples of 64 channels
    "use_cache": False,
}


def make(**options):
    torch.manual_seed(0)
    model = transformers.xLSTMForCausalLM(transformers.xLSTMConfig(**SMALL | options))
    with torch.no_grad():
        for block in model.backbone.blocks:
            # opens the input gates, which start all but closed
            block.mlstm_layer.igate_preact.bias.zero_()
    return model


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"qk_dim_factor": 0.3, "v_dim_factor": 1.5, "num_heads": 2, "ffn_proj_factor": 1.3},
        {"gate_soft_cap": 0.5, "output_logit_soft_cap": 1.0, "norm_eps": 0.1},
        {"num_hidden_layers": 3, "num_blocks": 1, "add_out_norm": False, "tie_word_embeddings": True},
    ],
)
def test_logits_are_those_of_transformers(options, tmp_path):
    converted = check_conversion(make(**options), tmp_path)
    assert len(converted.blocks) == options.get("num_blocks", 2)


def test_weights_are_single_where_the_configuration_does_not_say(tmp_path):
    shutil.copytree(released.FOLDER / "xlstm_7b_nxai", tmp_path, dirs_exist_ok=True)
    expected = from_hugging_face(tmp_path).config
    # as in the configuration of the 7B that the authors published first
    kernels = "chunkwise_kernel", "sequence_kernel", "step_kernel"
    with_options(tmp_path, "weight_mode", "mode", "chunk_size", *kernels, "eps")
    assert from_hugging_face(tmp_path).config == expected


@pytest.fixture
def folder(tmp_path):
    make().save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_bias": True}, "`use_bias` is True; linrec supports only False"),
        ({"eps": 0.3}, "`eps` must be in [0, 0.0001]; got 0.3"),
        ({"weight_mode": "fused"}, "`weight_mode` is 'fused'; linrec supports only 'single'"),
        ({"num_heads": 3}, "`qk_dim_factor` must be a positive multiple of `num_heads` = 3; got 4"),
        ({"v_dim_factor": 0.1}, "`v_dim_factor` must be a positive multiple of `num_heads` = 2; got 0"),
        ({"gate_soft_cap": None}, "has no `gate_soft_cap`"),
        ({"hidden_size": None, "embedding_dim": None}, "has no `embedding_dim`"),
        ({"num_hidden_layers": None, "num_blocks": None}, "has no `num_hidden_layers`"),
        ({"num_blocks": 3}, "has no tensor `backbone.blocks.2.norm_mlstm.weight`"),
        ({"ffn_proj_factor": 1.0}, "must have shape (8, 8) by config.json; got (24, 8)"),
    ],
)
def test_what_does_not_fit_is_named(options, message, folder):
    with_options(folder, **options)
    check_refused(folder, message)
