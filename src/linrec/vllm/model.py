"""The class that vLLM makes of a folder of `linrec publish`."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from linrec.hf.exchange import hf_name
from linrec.hf.model import check_weights, default_dtype
from linrec.mixers import State
from linrec.mixers.attention import Attention
from linrec.models import Block, LanguageModel
from linrec.rules import require
from linrec.vllm.layers import ChannelLayer, PagedAttention, RecurrentLayer
from linrec.vllm.private import HasInnerState, IsHybrid, SupportsMambaPrefixCaching, get_temporal_copy_spec
from linrec.vllm.rows import blocks_of, longest_row, pooled, without_values

__all__ = ["Model"]


class Model(nn.Module, HasInnerState, IsHybrid, SupportsMambaPrefixCaching):
    """A language model of linrec on the tokens of all requests of a step, side by side.

    It is a hybrid for vLLM, also without attention: vLLM counts the accepted drafts of hybrids alone.

    Args:
        vllm_config: vLLM's settings.
        prefix: the name of this module, which is the whole model.
    """

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        config, dtype = vllm_config.model_config.hf_config, vllm_config.model_config.dtype
        self.folder = Path(vllm_config.model_config.model)
        # constants are computed in float32
        with default_dtype(torch.float32):
            model = LanguageModel(config.model_config())
        self.body = model.to(dtype).eval()
        # by the names of checkpoints, which have no layers of vLLM
        self.named = {hf_name(name): tensor for name, tensor in model.state_dict(keep_vars=True).items()}
        self.recurrent: list[RecurrentLayer] = []
        self.attention: list[PagedAttention] = []
        row = longest_row(model)
        for block, state in zip(blocks_of(model), model.init_state(1), strict=True):
            self._replace_parts(block, state, row, vllm_config)

    def _replace_parts(self, block: Block, state: State, row: int, vllm_config: Any) -> None:
        """Give the parts of a block that have a state their places in vLLM's pool and pages."""
        kinds = {"mixer": RecurrentLayer, "channel_mixing": ChannelLayer}
        for name, (part, start) in pooled(block, state).items():
            made = kinds[name](part, start, len(self.recurrent) + len(self.attention), row, vllm_config)
            self.recurrent.append(made)
            setattr(block, name, made)
        if isinstance(block.mixer, Attention):
            paged = PagedAttention(block.mixer, len(self.recurrent) + len(self.attention), vllm_config)
            self.attention.append(paged)
            block.mixer = paged  # type: ignore[assignment]

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Return the embeddings (n, d_model) of tokens (n)."""
        return self.body.embedding(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return the input of the head (n, d_model) for tokens (n), or for their embeddings (n, d_model)."""
        if inputs_embeds is None:
            assert input_ids is not None
            inputs_embeds = self.embed_input_ids(input_ids)
        for layer in self.attention:
            layer.positions = positions
        y, _ = self.body.transformed(inputs_embeds[None], keep_state=False)
        return y[0]

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Return the logits (n, vocab_size) of the outputs of `forward`."""
        return self.body.head(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load the weights of a checkpoint, and return the names of all parameters.

        Raises:
            ValueError: a file is damaged, or the checkpoint lacks a tensor or has another.
        """
        check_weights(self.folder)
        loaded = set()
        for name, tensor in weights:
            require(name in self.named, f"the checkpoint has the tensor {name!r}, which the model lacks.")
            with torch.no_grad():
                self.named[name].copy_(tensor)
            loaded.add(id(self.named[name]))
        missing = sorted(name for name, tensor in self.named.items() if id(tensor) not in loaded)
        require(not missing, f"the checkpoint lacks {', '.join(missing)}. Publish the run again.")
        return {name for name, _ in self.named_parameters()}

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: Any) -> tuple[tuple[int, ...], ...]:
        """Return the shape of a row of a layer's state."""
        model = vllm_config.model_config
        return ((longest_row(without_values(model.hf_config.model_config(), model.dtype)),),)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: Any) -> tuple[torch.dtype, ...]:
        """Return the dtype of a row."""
        return (torch.uint8,)

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple[Any, ...]:
        """Return the functions that say which bytes vLLM's prefix cache copies: a whole row."""
        return (get_temporal_copy_spec,)
