"""Memformer (Wu, Lan, Qian, Gu, Geramifard and Yu, 2020): blocks read slots that each segment rewrites.

    h = h + Attn(LN(h); M_s)                  in every block, after the time mixing
    m~_i = Attn(m_i; [m_i | Y_s])             slot i of M_s
    m_i <- GRU(m~_i, m_i);  m_i <- m_i + FFN(LN(m_i))             update="gru"
    m_i <- (m~_i + b_i) / |m~_i + b_i|                            update="normalised"

h is the sequence between the sublayers of a block, Y_s are the outputs of the stack in segment s, M_s the n
slots before the segment, and Attn(q; k) is the attention of q to k. A slot does not see other slots. M_0 is a
parameter, or b_i / |b_i|. The last lines are one update; a segment makes `n_updates`, which see the same Y_s.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from linrec.models.config import MemoryConfig
from linrec.models.slot_memory import SlotMemory
from linrec.nn.channel_mixing import FeedForward
from linrec.nn.norms import make_norm
from linrec.nn.visible_attention import CrossAttention

__all__ = ["Memformer"]


class Memformer(SlotMemory):
    """m~_i = Attn(m_i; [m_i | Y_s]): blocks read slots, and each slot changes by itself and a segment.

    All steps of a segment read the slots that the segments before left. The blocks start each segment from
    their own initial state, so only the slots pass from segment to segment. In the decoder form the stack is
    causal, and any mixer with a state works. In the encoder form, the paper's, steps see their whole segment.
    The paper's model, with a decoder of another sequence, is an `EncoderDecoder` with this memory.

    | update | arguments |
    |---|---|
    | the code named below | `update="gru"` |
    | the paper's, with forgetting | `update="normalised"`, `temperature` below 1 |
    | several updates of the code | `n_updates` above 1 |

    The state is a `SegmentState` of the slots (b, n, d_model), and a pair of the states of the blocks and Y_s
    in the unfinished segment (b, r, d_model).

    Args:
        config: the memory's configuration.
        d_model: width of the stack.

    Source:
        Wu, Lan, Qian, Gu, Geramifard and Yu, Memformer: A Memory-Augmented Transformer for Sequence Modeling
        (2020), section 3. The GRU, the FFN, and initial values are those of lucidrains/memformer.

    Example:
        >>> from linrec.models import LanguageModel, ModelConfig
        >>> memory = MemoryConfig(kind="memformer", segment_length=8, n_tokens=2)
        >>> model = LanguageModel(ModelConfig(vocab_size=6, d_model=16, memory=memory))
        >>> logits, state = model(torch.zeros(3, 20, dtype=torch.int64))
        >>> logits.shape, state.memory.shape, state.segment[1].shape
        (torch.Size([3, 20, 6]), torch.Size([3, 2, 16]), torch.Size([3, 4, 16]))
    """

    def __init__(self, config: MemoryConfig, d_model: int) -> None:
        # M: the slots at the start, or the biases b
        super().__init__(config, d_model)
        self.attention = CrossAttention(d_model, config.n_heads, temperature=config.temperature)
        self.cell: nn.GRUCell | None = None
        if config.update == "gru":
            self.cell = nn.GRUCell(d_model, d_model)
            self.norm = make_norm("layer", d_model)
            self.ffn = FeedForward(d_model, 4 * d_model)

    def written(
        self, M: Float[Tensor, "b n d_model"], Y: Float[Tensor, "b t d_model"], alive: Bool[Tensor, "b t"]
    ) -> Float[Tensor, "b n d_model"]:
        """Return M_{s+1} from M_s and the outputs Y_s at steps that are alive."""
        own = torch.eye(M.shape[1], dtype=torch.bool, device=M.device).expand(len(M), -1, -1)
        steps = alive[:, None].expand(-1, M.shape[1], -1)
        visible = torch.cat([own, steps], -1)
        for _ in range(self.config.n_updates):
            M = self._updated(M, Y, visible)
        return M

    def _updated(self, M: Tensor, Y: Tensor, visible: Tensor) -> Tensor:
        """Return the slots after one update."""
        m = self.attention(M, torch.cat([M, Y], 1), visible)
        if self.cell is None:
            return functional.normalize(m + self.M, dim=-1).to(M.dtype)
        M = self.cell(m.flatten(0, 1), M.flatten(0, 1)).unflatten(0, M.shape[:2]).to(M.dtype)
        return M + self.ffn(self.norm(M)).to(M.dtype)

    def _fresh(self, batch: int) -> Float[Tensor, "b n d_model"]:
        """Return M_0 for every row."""
        M = self.M if self.cell is not None else functional.normalize(self.M, dim=-1)
        return M.expand(batch, -1, -1)
