"""The checks of vLLM's settings, before vLLM starts its processes."""

from typing import Any

from linrec.rules import require
from linrec.vllm.private import HybridAttentionMambaModelConfig
from linrec.vllm.rows import check_servable, without_values

__all__ = ["Checks"]


class Checks(HybridAttentionMambaModelConfig):
    """vLLM calls this class with its settings for a model of linrec, before it starts other processes."""

    @classmethod
    def verify_and_update_config(cls, vllm_config: Any) -> None:
        """Raise ValueError for settings that linrec's models do not support, then do as for any hybrid."""
        check_settings(vllm_config)
        require(
            not vllm_config.model_config.hf_config.tuned_state,
            "the folder must have no tuned state, which vLLM does not start from; got `tuned_state` = True. "
            "Use `linrec.hf`.",
        )
        config = vllm_config.model_config
        check_servable(without_values(config.hf_config.model_config(), config.dtype))
        super().verify_and_update_config(vllm_config)


def check_settings(vllm_config: Any) -> None:
    """Raise ValueError, which names the setting, unless linrec's models support vLLM's settings."""
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    for name in (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "prefill_context_parallel_size",
        "decode_context_parallel_size",
    ):
        size = getattr(parallel, name, 1)
        require(
            size == 1,
            f"`{name}` must be 1, because linrec's layers are not split over devices; got {size}. Start a "
            "server for each device.",
        )
    quantization = vllm_config.model_config.quantization
    require(
        quantization is None,
        f"`quantization` must be None, because linear layers are linrec's own; got {quantization!r}. Leave "
        "it out.",
    )
    for name in ("mamba_cache_dtype", "mamba_ssm_cache_dtype"):
        dtype = getattr(cache, name, "auto")
        require(
            dtype == "auto",
            f"`{name}` must be 'auto', because each layer knows the dtype of its state; got {dtype!r}. Leave "
            "it out.",
        )
    speculative = vllm_config.speculative_config
    if speculative is None:
        return
    require(
        speculative.method == "ngram",
        f"`speculative_config` must have the method 'ngram'; got {speculative.method!r}, which has not been "
        "tried with linrec's models. Leave it out.",
    )
    require(
        not cache.enable_prefix_caching,
        "`enable_prefix_caching` must be False with `speculative_config`: the two together have not been "
        "tried with linrec's models; got True. Pass --no-enable-prefix-caching.",
    )
    require(
        not vllm_config.use_v2_model_runner,
        "`speculative_config` needs vLLM's model runner V1, because V2 tells linrec's layers of no accepted "
        "drafts; got V2. Set VLLM_USE_V2_MODEL_RUNNER=0.",
    )
