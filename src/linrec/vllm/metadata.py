"""Metadata of a step: the rows of vLLM's pool that requests read and write.

vLLM passes the numbers of accepted drafts to builders of a few classes alone. The builder of Bailing's linear
attention is the one that does not depend on a kernel.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from linrec.vllm.private import (
    BailingLinearAttentionBackend,
    BailingLinearAttentionMetadata,
    BailingLinearAttentionMetadataBuilder,
)

__all__ = ["Backend", "Metadata", "MetadataBuilder"]


@dataclass(kw_only=True)
class Metadata(BailingLinearAttentionMetadata):
    """The requests of a step: first those that decode, each with a token or drafts, then pieces of prompts.

    With K drafts, a request has K + 1 rows. A step starts from the row of the last accepted token, and leaves
    the state after its token j in row max(j - given, 0).

    Args:
        given: (n) int32, the number of tokens of each decoding request whose states nobody needs: all but the
            last if they are the end of a prompt, else 0.
    """

    given: Tensor


class MetadataBuilder(BailingLinearAttentionMetadataBuilder):
    """Makes the `Metadata` of each step, in tensors that CUDA graphs find in the same place."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        rows = vllm_config.scheduler_config.max_num_seqs
        self.given = torch.zeros(rows, dtype=torch.int32, device=device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: Any,
        fast_build: bool = False,
        *,
        num_accepted_tokens: Tensor | None = None,
        num_decode_draft_tokens_cpu: Tensor | None = None,
    ) -> Metadata:
        """Return the metadata of a step; see vLLM's `AttentionMetadataBuilder`.

        Raises:
            RuntimeError: there may be drafts, and vLLM does not tell how many were accepted.
        """
        if self.use_spec_decode and num_accepted_tokens is None:
            raise RuntimeError(
                "vLLM has not passed the numbers of accepted drafts, so states would be wrong."
            )
        made = super().build(
            common_prefix_len,
            common_attn_metadata,
            fast_build,
            num_accepted_tokens=num_accepted_tokens,
            num_decode_draft_tokens_cpu=num_decode_draft_tokens_cpu,
        )
        n = made.num_decodes
        if num_decode_draft_tokens_cpu is None:
            self.given[:n].zero_()
        else:
            # -1 marks tokens of a prompt, whose end vLLM takes for a decode if it is short
            tokens = common_attn_metadata.query_start_loc_cpu[: n + 1].diff()
            of_prompt = num_decode_draft_tokens_cpu[:n] < 0
            self.given[:n].copy_(torch.where(of_prompt, tokens - 1, 0).clamp(min=0), non_blocking=True)
        return Metadata(**vars(made), given=self.given[:n])


class Backend(BailingLinearAttentionBackend):
    """vLLM's description of linrec's recurrent layers."""

    @staticmethod
    def get_name() -> str:
        """Return the name."""
        return "LINREC"

    @staticmethod
    def get_builder_cls() -> type[MetadataBuilder]:
        """Return the class that makes the metadata of each step."""
        return MetadataBuilder
