"""Every option of every configuration: read, refused, or listed here as without influence on the logits."""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from linrec.convert import ConversionError, Options, from_hugging_face, model_types
from linrec.testing import generator
from tests.tiers import thorough

from . import (
    test_bamba,
    test_falcon_h1,
    test_granitemoehybrid,
    test_jamba,
    test_lfm2,
    test_mamba,
    test_mamba2,
    test_minimax,
    test_nemotron_h,
    test_qwen3_next,
    test_recurrent_gemma,
    test_rwkv,
    test_xlstm,
)
from .models import randomize

transformers = pytest.importorskip("transformers", reason='the extra "text" is not installed')
pytest.importorskip("transformers.models.olmo_hybrid")

# of all models: special tokens, caches, limits of lengths, initial values, losses
IDLE = {
    *("bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "max_position_embeddings"),
    *("initializer_range", "num_logits_to_keep", "output_router_logits", "router_aux_loss_coef"),
}
MAMBA_IDLE = (
    "rescale_prenorm_residual residual_in_fp32 time_step_floor time_step_max time_step_min time_step_scale "
    "time_step_init_scheme use_mambapy use_associative_scan"
)
TOKENS = torch.randint(11, (2, 11), generator=generator())


class Case(NamedTuple):
    """A small model.

    Attributes:
        name: start of the names of its classes.
        options: of the configuration.
        idle: options without influence on the logits of such a model, beside `IDLE`.
        config: name of the configuration's class; empty is that of `name`.
    """

    name: str
    options: dict[str, Any]
    idle: str = ""
    config: str = ""

    def configured(self, **options: Any) -> Any:
        return getattr(transformers, self.config or f"{self.name}Config")(**self.options | options)

    def model(self, config: Any) -> Any:
        torch.manual_seed(0)
        model = getattr(transformers, f"{self.name}ForCausalLM")(config).eval()
        randomize(model)
        return model


LAYERS = ["linear_attention", "mlp", "linear_attention", "full_attention", "mlp"]
ROTARY = {"rope_type": "default", "rope_theta": 50.0}
CASES = {
    "bamba": Case("Bamba", test_bamba.SMALL, "mamba_chunk_size z_loss_coefficient"),
    "falcon_h1": Case("FalconH1", test_falcon_h1.SMALL, "mamba_chunk_size"),
    "falcon_mamba": Case("FalconMamba", test_mamba.SMALL, MAMBA_IDLE),
    "granitemoehybrid": Case(
        "GraniteMoeHybrid",
        test_granitemoehybrid.SMALL | {"position_embedding_type": "rope"},
        "mamba_chunk_size intermediate_size num_experts_per_tok",
    ),
    "jamba": Case(
        "Jamba",
        test_jamba.SMALL,
        "use_mamba_kernels use_mambapy use_associative_scan num_experts_per_tok expert_layer_offset "
        "expert_layer_period",
    ),
    "lfm2": Case("Lfm2", test_lfm2.SMALL),
    "mamba": Case("Mamba", test_mamba.SMALL, MAMBA_IDLE),
    "mamba2": Case(
        "Mamba2",
        test_mamba2.SMALL,
        "chunk_size rescale_prenorm_residual residual_in_fp32 time_step_floor time_step_max time_step_min "
        "time_step_rank",
    ),
    "minimax": Case("MiniMax", test_minimax.SMALL, "router_jitter_noise"),
    "nemotron_h": Case(
        "NemotronH",
        test_nemotron_h.SMALL | {"layers_block_type": LAYERS},
        "attention_bias chunk_size expand hidden_dropout mamba_proj_bias mamba_ssm_cache_dtype "
        "moe_intermediate_size moe_latent_size moe_shared_expert_intermediate_size moe_shared_expert_overlap "
        "mtp_layers_block_type n_group n_routed_experts n_shared_experts norm_topk_prob num_experts_per_tok "
        "num_nextn_predict_layers rescale_prenorm_residual residual_in_fp32 routed_scaling_factor "
        "sliding_window tie_word_embeddings time_step_floor time_step_limit time_step_max topk_group "
        "use_mamba_kernels",
    ),
    "olmo_hybrid": Case(
        "OlmoHybrid",
        test_qwen3_next.SMALL | {"rope_parameters": ROTARY},
        "linear_a_log_max linear_a_log_min linear_dt_init_floor linear_dt_max linear_dt_min",
    ),
    "qwen3_5_text": Case("Qwen3_5", test_qwen3_next.QWEN, config="Qwen3_5TextConfig"),
    "qwen3_next": Case(
        "Qwen3Next",
        test_qwen3_next.QWEN | test_qwen3_next.DENSE,
        "moe_intermediate_size norm_topk_prob num_experts_per_tok shared_expert_intermediate_size",
    ),
    "recurrent_gemma": Case(
        "RecurrentGemma", test_recurrent_gemma.SMALL, "w_init_variance_scale final_w_init_variance_scale"
    ),
    # a power of 2, divided out at run time
    "rwkv": Case("Rwkv", test_rwkv.SMALL, "context_length rescale_every"),
    # blocks are counted by `num_blocks`
    "xlstm": Case(
        "xLSTM",
        test_xlstm.SMALL,
        "add_out_norm autocast_kernel_dtype chunk_size chunkwise_kernel embedding_dim inference_state_dtype "
        "max_inference_chunksize mode norm_reduction_force_float32 num_hidden_layers return_last_states "
        "sequence_kernel step_kernel tie_word_embeddings",
    ),
}
# the configurations of flash-linear-attention, which may be newer than its package: options with influence
SHORT = {"use_short_conv": True, "conv_size": 4}
HEADS = {"num_heads": 2, "elementwise_affine": True}
WIDTHS = {"expand_k": 1.0, "expand_v": 1.0}
FLA: dict[str, dict[str, Any]] = {
    "delta_net": {
        **WIDTHS | SHORT,
        **{"num_heads": 2, "use_gate": False, "allow_neg_eigval": False, "use_beta": True},
        **{"qk_norm": "l2", "qk_activation": "silu"},
    },
    "gated_deltanet": {
        **{"expand_v": 2.0, "use_gate": True, "allow_neg_eigval": False},
        **SHORT | {"head_dim": 4, "num_heads": 2, "num_v_heads": None},
    },
    "gla": {
        **WIDTHS | HEADS | SHORT,
        **{"num_kv_heads": None, "feature_map": None, "use_output_gate": True, "clamp_min": None},
    },
    "hgrn": {**SHORT, "expand_ratio": 1, "use_lower_bound": True, "elementwise_affine": True},
    "hgrn2": {**HEADS | SHORT, "expand_ratio": None, "use_lower_bound": True},
    "retnet": {
        **WIDTHS | HEADS,
        **{"num_kv_heads": None, "feature_map": None, "use_short_conv": False, "use_output_gate": True},
    },
    "rwkv6": {
        **WIDTHS,
        **{"num_heads": 2, "proj_low_rank_dim": 3, "gate_low_rank_dim": 2},
        **{"norm_first": True, "norm_bias": True, "hidden_act": "sqrelu"},
    },
    "rwkv7": {
        **{"head_dim": 4, "decay_low_rank_dim": 3, "gate_low_rank_dim": 2, "a_low_rank_dim": 2},
        **{"v_low_rank_dim": 2, "norm_first": True, "norm_bias": True, "hidden_act": "sqrelu"},
        **{"value_dim": None},
    },
}
FLA_COMMON = {
    **{
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "hidden_ratio": 4,
        "intermediate_size": None,
        "vocab_size": 7,
    },
    **{"hidden_act": "swish", "norm_eps": 1e-6, "attn": None, "tie_word_embeddings": False},
}


class Recorded(dict[str, Any]):
    """Options that note which names are asked for."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.asked: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.asked.add(name)
        return super().get(name, default)


def fields(config: Any) -> dict[str, Any]:
    """Return the options of a configuration as its config.json would have them, without bookkeeping."""
    bookkeeping = transformers.PreTrainedConfig().to_dict()
    values = json.loads(config.to_json_string(use_diff=False))
    return {name: value for name, value in values.items() if name not in bookkeeping}


def asked(name: str, values: dict[str, Any]) -> set[str]:
    """Return the names of the options that a converter reads."""
    recorded = Recorded(values)
    architecture = importlib.import_module(f"linrec.convert.{name}")
    options = Options(recorded, "config.json")
    list(architecture.layout(options, architecture.config(options)))
    return recorded.asked


def test_every_architecture_has_a_case() -> None:
    assert sorted([*CASES, *FLA]) == model_types()


@pytest.mark.parametrize("name", CASES)
def test_every_option_is_read_or_has_no_influence(name: str) -> None:
    options, idle = fields(CASES[name].configured()), IDLE | set(CASES[name].idle.split())
    found = asked(name, options)
    assert set(options) - idle - found == set()
    assert idle & found == set()


@pytest.mark.parametrize("name", FLA)
def test_options_of_flash_linear_attention_are_read(name: str) -> None:
    options = FLA_COMMON | FLA[name]
    assert set(options) - asked(name, options) == set()


def others(name: str, value: Any) -> Iterator[Any]:
    """Yield further values of an option."""
    if name.startswith("rope_"):
        yield ROTARY
        yield ROTARY | {"partial_rotary_factor": 0.5}
        yield ROTARY | {"rope_type": "linear", "factor": 4.0}
        yield ROTARY | {"rope_type": "proportional", "factor": 4.0}
    elif "act" in name.split("_") or name.endswith("activation"):
        yield from ("gelu", "tanh")
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, 2 * value)
    elif isinstance(value, float):
        yield from (1.7 * value + 0.05, 0.0)
    elif isinstance(value, list):
        yield value[::-1]
        if len(value) == 2:
            yield [0.2, 0.7]
    elif value is None:
        yield from (3, 0.5)


def outcome(
    case: Case, folder: Path, idle: set[str], base: Any, before: Tensor, option: str, value: Any
) -> str:
    """Return what becomes of a model with another value of an option; raise if it is a wrong conversion."""
    try:
        config = case.configured(**{option: value})
        model = case.model(config)
        with torch.no_grad():
            expected = model(TOKENS, use_cache=False).logits
    except Exception:
        # a value that transformers does not take
        return "invalid"
    if option in idle:
        # drawn in another way
        model.load_state_dict(base.state_dict())
        with torch.no_grad():
            expected = model(TOKENS, use_cache=False).logits
        torch.testing.assert_close(expected, before, rtol=1e-4, atol=1e-4, msg=f"{option} = {value}")
        return "idle"
    model.save_pretrained(folder)
    try:
        ours = from_hugging_face(folder)
    except ConversionError:
        return "refused"
    with torch.no_grad():
        error = (ours(TOKENS)[0] - expected).abs().max() / expected.abs().max()
    assert error < 1e-3, f"{option} = {value}: logits off by {error:.1e}"
    return "same" if torch.equal(expected, before) else "converted"


@thorough
@pytest.mark.parametrize("name", CASES)
def test_a_model_with_another_option_is_converted_or_refused(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    idle = IDLE | set(case.idle.split())
    options = fields(case.configured())
    base = case.model(case.configured())
    with torch.no_grad():
        before = base(TOKENS, use_cache=False).logits
    found = {
        (option, str(value)): outcome(case, tmp_path / f"{option}{place}", idle, base, before, option, value)
        # options that the configuration does not have by itself
        for option, current in (options | {"partial_rotary_factor": None, "rope_scaling": None}).items()
        if option != "vocab_size"
        for place, value in enumerate(others(option, current))
    }
    # most options have values that the test knows
    assert sum(kind == "converted" for kind in found.values()) >= 6
    assert sum(kind != "invalid" for kind in found.values()) >= len(options) / 2
