from pathlib import Path
from typing import Any

import pytest
import torch

from linrec import mixers
from linrec.convert import layout
from linrec.convert.minimax import lightning
from linrec.testing import generator
from tests.tiers import tiered

from .models import check_conversion, check_refused, randomize, with_options

transformers = pytest.importorskip("transformers", reason='the extra "text" is not installed')
modeling = pytest.importorskip("transformers.models.minimax.modeling_minimax")

SMALL: dict[str, Any] = {
    "vocab_size": 11,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_local_experts": 1,
    "num_experts_per_tok": 1,
    # its sequences are of several blocks
    "block_size": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "pad_token_id": None,
}


def config(**options: Any) -> Any:
    return transformers.MiniMaxConfig(**SMALL | options)


@pytest.mark.parametrize(
    "options",
    tiered(
        [{}],
        [
            {"sliding_window": 3},
            {"head_dim": 6, "num_key_value_heads": 2, "tie_word_embeddings": True},
            {
                "linear_attn_alpha_factor": 3.5,
                "linear_attn_beta_factor": 2.0,
                "full_attn_alpha_factor": 1.5,
                "mlp_alpha_factor": 3.0,
                "mlp_beta_factor": 0.5,
            },
        ],
    ),
)
def test_logits_are_those_of_transformers(options: dict[str, Any], tmp_path: Path) -> None:
    model = transformers.MiniMaxForCausalLM(config(**options))
    check_conversion(model, tmp_path, changed=("mlp.gate.weight",))


@pytest.mark.parametrize("layer", [0, 2])
def test_a_layer_is_that_of_transformers_and_goes_back(layer: int) -> None:
    torch.manual_seed(0)
    theirs = modeling.MiniMaxLightningAttention(config(layer_types=["linear_attention"] * 4), layer)
    randomize(theirs)
    ours = mixers.build("lightning_attention", 16, n_heads=2)
    ours.place(layer, 4)
    given = dict(theirs.named_parameters())
    pieces = list(lightning(16, 2, 8))
    ours.load_state_dict(
        {
            name: tensor
            for piece in pieces
            for name, tensor in zip(
                piece.ours, piece.read([given[their] for their in piece.theirs]), strict=True
            )
        }
    )
    x = torch.randn(2, 30, 16, generator=generator())
    with torch.no_grad():
        expected, last = theirs(x, None, None)
        y, state = ours(x)
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(state, last, rtol=1e-4, atol=1e-4)
        steps, state = [], None
        for step in x.split(1, dim=1):
            y, state = ours(step, state)
            steps.append(y)
    torch.testing.assert_close(torch.cat(steps, 1), expected, rtol=1e-4, atol=1e-4)
    back = layout.write(pieces, ours.state_dict())
    assert back.keys() == given.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in given.items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_local_experts": 8}, "`num_local_experts` is 8; linrec has no mixtures of experts"),
        ({"sliding_window": 0}, "`sliding_window` must be at least 1; got 0"),
        ({"partial_rotary_factor": 0.5}, "`partial_rotary_factor` is 0.5; linrec supports only 1.0"),
        ({"rope_parameters": {"full_attention": {}}}, "`rope_parameters` has a table 'full_attention'"),
        # the message of the model itself
        ({"rms_norm_eps": 0.0}, "config.json describes a model that linrec cannot build: `norm_eps` must be"),
        ({"mlp_beta_factor": 0.0}, "`mlp_beta_factor` must be above 0; got 0.0"),
        ({"layer_types": ["sliding_attention"] * 4}, "`layer_types` must be 4 of 'linear_attention'"),
    ],
)
def test_what_does_not_fit_is_named(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    transformers.MiniMaxForCausalLM(config()).save_pretrained(tmp_path)
    with_options(tmp_path, **options)
    check_refused(tmp_path, message)
