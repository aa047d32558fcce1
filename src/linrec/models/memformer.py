"""Memformer (Wu, Lan, Qian, Gu, Geramifard and Yu, 2020): blocks read slots that each segment rewrites.

    h = h + Attn(LN(h); M_s)                  in every block, after the time mixing
    m~_i = Attn(m_i; [m_i | Y_s])             slot i of M_s
    m_i <- GRU(m~_i, m_i);  m_i <- m_i + FFN(LN(m_i))             update="gru"
    m_i <- (m~_i + b_i) / |m~_i + b_i|                            update="normalised"

h is the sequence between the sublayers of a block, Y_s are the outputs of the stack in segment s, M_s the n
slots before the segment, and Attn(q; k) is the attention of q to k. A slot does not see other slots. M_0 is a
parameter, or b_i / |b_i|. The last lines are one update; a segment makes `n_updates`, which see the same Y_s.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional

from linrec.models.config import MemoryConfig
from linrec.models.stack_memory import Stack, StackMemory, States
from linrec.nn.channel_mixing import FeedForward
from linrec.nn.norms import make_norm
from linrec.nn.parameters import mark
from linrec.nn.segments import SegmentState, chosen
from linrec.nn.visible_attention import CrossAttention
from linrec.ops.core.isolation import Isolation, documents, entering

__all__ = ["Memformer", "SlotReading", "Slots"]


class Slots(NamedTuple):
    """The slots that steps of a segment read.

    Attributes:
        memory: M_s (b, n, d_model).
        fresh: M_0 (b, n, d_model).
        document: resets of the segment's new steps so far (b, t); steps with more than 0 read `fresh`. None
            if there are no resets.
    """

    memory: Float[Tensor, "b n d_model"]
    fresh: Float[Tensor, "b n d_model"]
    document: Int[Tensor, "b t"] | None


class SlotReading(nn.Module):
    """Attn(h; M_s): a sublayer of a block, between time mixing and channel mixing.

    Args:
        d_model: width of the stack.
        n_heads: heads, as in `CrossAttention`.
    """

    def __init__(self, d_model: int, n_heads: int | None = None) -> None:
        super().__init__()
        self.attention = CrossAttention(d_model, n_heads)

    def forward(self, h: Float[Tensor, "b t d_model"], slots: Slots) -> Float[Tensor, "b t d_model"]:
        """Return the outputs of the attention at each step."""
        memory, fresh, document = slots
        if document is None:
            return self.attention(h, memory.to(h.dtype))
        # the memory is a step before the segment
        isolation = Isolation(functional.pad(document, (1, 0)))
        memory = isolation.enter(memory[:, None], begin=0)[:, 0]
        h = isolation.enter(h, begin=1, carried=False)
        after = (document > 0)[..., None].expand(-1, -1, memory.shape[1])
        visible = torch.cat([~after, after], -1)
        o = self.attention(h, torch.cat([memory, fresh], 1).to(h.dtype), visible)
        return isolation.leave(o, begin=1)


class Memformer(StackMemory):
    """m~_i = Attn(m_i; [m_i | Y_s]): blocks read slots, and each slot changes by itself and a segment.

    All steps of a segment read the slots that the segments before left. The blocks start each segment from
    their own initial state, so only the slots pass from segment to segment. In the decoder form the stack is
    causal, and any mixer with a state works. In the encoder form, the paper's, steps see their whole segment.
    The paper's decoder of another sequence is not part of the model.

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
        super().__init__(config)
        # the slots at the start, or the biases b
        self.M = nn.Parameter(torch.randn(config.n_tokens, d_model))
        # like the rows of an embedding, the slots are no matrix that maps vectors
        mark(self, "M", group="vocabulary", weight_decay=True)
        self.attention = CrossAttention(d_model, config.n_heads, temperature=config.temperature)
        self.cell: nn.GRUCell | None = None
        if config.update == "gru":
            self.cell = nn.GRUCell(d_model, d_model)
            self.norm = make_norm("layer", d_model)
            self.ffn = FeedForward(d_model, 4 * d_model)

    def read(
        self, x: Tensor, state: SegmentState, alive: Tensor, reset: Tensor | None, stack: Stack
    ) -> tuple[Tensor, Tensor, tuple[States, Tensor]]:
        """Return Y_s of new steps, M_s, and the states of the blocks with Y_s up to the new steps."""
        memory, (states, outputs), *_ = state
        memory, outputs = memory.to(self.M.dtype), outputs.to(self.M.dtype)
        fresh, document = self._fresh(len(x)), None
        if reset is not None:
            memory, document = entering(memory, reset), documents(reset)
        y, states = stack.run(x, states, reset, memory=Slots(memory, fresh, document))
        if reset is not None:
            memory = chosen(reset.any(1), fresh, memory)
        outputs = torch.cat([outputs, y.to(outputs.dtype)], 1).masked_fill(~alive[..., None], 0)
        return y, memory, (states, outputs)

    def finish(self, state: SegmentState, stack: Stack) -> tuple[Tensor, tuple[States, Tensor]]:
        """Return M_{s+1}, the states of the blocks in an empty segment, and no outputs."""
        _, outputs = state.segment
        memory = self.written(state.memory, outputs, state.alive)
        return memory, (stack.start(len(memory), 0), torch.zeros_like(outputs[:, :0]))

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

    def start(self, batch: int, position: int, stack: Stack) -> tuple[Tensor, tuple[States, Tensor]]:
        """Return M_0, the states of the blocks, and zeros for Y_s of steps before `position`."""
        dead = position % self.config.segment_length
        M = self._fresh(batch)
        states = stack.start(batch, dead)
        return M, (states, M.new_zeros(batch, dead, M.shape[2]))

    def _fresh(self, batch: int) -> Float[Tensor, "b n d_model"]:
        """Return M_0 for every row."""
        M = self.M if self.cell is not None else functional.normalize(self.M, dim=-1)
        return M.expand(batch, -1, -1)

    @property
    def state_size(self) -> int:
        """Elements of the slots, and of Y_s in an unfinished segment of `segment_length` - 1 steps."""
        n, d_model = self.M.shape
        return d_model * (n + self.config.segment_length - 1)
