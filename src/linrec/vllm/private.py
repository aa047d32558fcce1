"""The names of vLLM that are not its public interface; no other file of linrec imports any.

All were seen in vLLM 0.32.
"""

from linrec.errors import MissingExtraError
from linrec.extras import import_extra

version = import_extra("vllm", "`linrec.vllm`").__version__

try:
    # the settings of an architecture: checks before any process starts
    # layers with pages of bytes
    from vllm.forward_context import get_forward_context
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.mamba.abstract import MambaBase
    from vllm.model_executor.layers.mamba.mamba_utils import get_temporal_copy_spec
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP, HybridAttentionMambaModelConfig
    from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid, SupportsMambaPrefixCaching

    # which request each token is of: vLLM tells builders of this class which drafts were accepted
    from vllm.v1.attention.backends.linear_attn import (
        BailingLinearAttentionBackend,
        BailingLinearAttentionMetadata,
        BailingLinearAttentionMetadataBuilder,
    )
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
except ImportError as error:
    raise MissingExtraError(
        f"`linrec.vllm` needs vLLM 0.32 or 0.33, whose private names it uses; got {version}, which lacks one "
        f"({error}). Install linrec's extra \"vllm\": pip install 'linrec[vllm]'."
    ) from error

__all__ = [
    "MODELS_CONFIG_MAP",
    "Attention",
    "BailingLinearAttentionBackend",
    "BailingLinearAttentionMetadata",
    "BailingLinearAttentionMetadataBuilder",
    "HasInnerState",
    "HybridAttentionMambaModelConfig",
    "IsHybrid",
    "MambaAttentionBackendEnum",
    "MambaBase",
    "SupportsMambaPrefixCaching",
    "get_forward_context",
    "get_temporal_copy_spec",
    "version",
]
