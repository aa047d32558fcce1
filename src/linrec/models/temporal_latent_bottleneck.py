"""Temporal Latent Bottleneck (Didolkar and others, 2022): a fast stream in chunks, a slow one between them.

    u = u + SA(LN(u));  u = u + FFN(LN(u))                      in every block, within chunk s
    u = u + CA(LN(u); LN(X_s));  u = u + FFN(LN(u))             then, in every r-th block from the first
    X_s' = X_s + CA(LN(X_s); Y_s)
    X_{s+1} = X_s' + FFN(LN(X_s'))                              at the end of chunk s

u is the fast stream, Y_s its outputs LN(u) after the last block, X_s the N vectors of the slow stream before
chunk s, SA the time mixing, CA(q; k) the attention of q to k, and FFN channel mixing. X_0 is a parameter.
"""

from jaxtyping import Bool, Float
from torch import Tensor

from linrec.models.config import MemoryConfig
from linrec.models.slot_memory import SlotMemory
from linrec.nn.channel_mixing import FeedForward
from linrec.nn.norms import make_norm
from linrec.nn.visible_attention import CrossAttention

__all__ = ["TemporalLatentBottleneck"]


class TemporalLatentBottleneck(SlotMemory):
    """X_{s+1} = X_s' + FFN(LN(X_s')): a slow stream that changes once per chunk, and that some blocks read.

    Blocks read X_s after their channel mixing, by a sublayer of attention and a feed-forward network of their
    own. `read_every` = r names the blocks 0, r, 2 r and so on. Keys and values of the slow stream's attention
    are the outputs of the stack, after its last norm.

    In the encoder form a step sees its whole chunk, as in the paper's classifiers. In the decoder form the
    stack is causal, and any mixer with a state works.

    Args:
        config: the memory's configuration.
        d_model: width of the stack, and of the slow stream.

    Source:
        Didolkar and others, Temporal Latent Bottleneck: Synthesis of Fast and Slow Processing Mechanisms in
        Sequence Learning (2022), algorithm 1.

    Example:
        >>> import torch
        >>> from linrec.models import LanguageModel, ModelConfig
        >>> memory = MemoryConfig(kind="temporal_latent_bottleneck", segment_length=8, n_tokens=2)
        >>> model = LanguageModel(ModelConfig(vocab_size=6, d_model=16, memory=memory))
        >>> logits, state = model(torch.zeros(3, 20, dtype=torch.int64))
        >>> logits.shape, state.memory.shape, state.segment[1].shape
        (torch.Size([3, 20, 6]), torch.Size([3, 2, 16]), torch.Size([3, 4, 16]))
    """

    def __init__(self, config: MemoryConfig, d_model: int) -> None:
        super().__init__(config, d_model)
        self.attention_norm = make_norm("layer", d_model)
        self.attention = CrossAttention(d_model, config.n_heads)
        self.ffn_norm = make_norm("layer", d_model)
        self.ffn = FeedForward(d_model, 4 * d_model)

    def written(
        self, M: Float[Tensor, "b n d_model"], Y: Float[Tensor, "b t d_model"], alive: Bool[Tensor, "b t"]
    ) -> Float[Tensor, "b n d_model"]:
        """Return X_{s+1} from X_s and the outputs Y_s at steps that are alive."""
        visible = alive[:, None].expand(-1, M.shape[1], -1)
        X = M + self.attention(self.attention_norm(M), Y, visible).to(M.dtype)
        return X + self.ffn(self.ffn_norm(X)).to(M.dtype)
