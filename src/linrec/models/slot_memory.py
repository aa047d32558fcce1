"""Slots that the blocks of a stack read, and that change by the outputs of each segment."""

from abc import abstractmethod
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional

from linrec.models.config import MemoryConfig
from linrec.models.stack_memory import Stack, StackMemory, States
from linrec.nn.norms import Norm, make_norm
from linrec.nn.parameters import mark
from linrec.nn.segments import SegmentState, chosen
from linrec.nn.visible_attention import CrossAttention
from linrec.ops.core.isolation import Isolation, documents, entering

__all__ = ["SlotMemory", "SlotReading", "Slots"]


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
        norm: norm of the slots, "none", "layer" or "rms".
    """

    def __init__(self, d_model: int, n_heads: int | None = None, *, norm: Norm = "none") -> None:
        super().__init__()
        self.norm = make_norm(norm, d_model)
        self.attention = CrossAttention(d_model, n_heads)

    def forward(self, h: Float[Tensor, "b t d_model"], slots: Slots) -> Float[Tensor, "b t d_model"]:
        """Return the outputs of the attention at each step."""
        memory, fresh, document = slots
        if document is None:
            return self.attention(h, self.norm(memory).to(h.dtype))
        # the memory is a step before the segment
        isolation = Isolation(functional.pad(document, (1, 0)))
        memory = isolation.enter(memory[:, None], begin=0)[:, 0]
        h = isolation.enter(h, begin=1, carried=False)
        after = (document > 0)[..., None].expand(-1, -1, memory.shape[1])
        visible = torch.cat([~after, after], -1)
        o = self.attention(h, self.norm(torch.cat([memory, fresh], 1)).to(h.dtype), visible)
        return isolation.leave(o, begin=1)


class SlotMemory(StackMemory):
    """M_{s+1} = written(M_s, Y_s): slots M_s that the blocks read in segment s, and its outputs Y_s.

    All steps of a segment read the slots that the segments before left. The blocks start each segment from
    their own initial state, so only the slots pass from segment to segment. A subclass defines `written`.

    The state is a `SegmentState` of the slots (b, n, d_model), and a pair of the states of the blocks and Y_s
    in the unfinished segment (b, r, d_model).

    Args:
        config: the memory's configuration.
        d_model: width of the stack.
    """

    def __init__(self, config: MemoryConfig, d_model: int) -> None:
        super().__init__(config)
        self.M = nn.Parameter(torch.randn(config.n_tokens, d_model))
        # like the rows of an embedding, the slots are no matrix that maps vectors
        mark(self, "M", group="vocabulary", weight_decay=True)

    @abstractmethod
    def written(
        self, M: Float[Tensor, "b n d_model"], Y: Float[Tensor, "b t d_model"], alive: Bool[Tensor, "b t"]
    ) -> Float[Tensor, "b n d_model"]:
        """Return M_{s+1} from M_s and the outputs Y_s at steps that are alive."""

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

    def start(self, batch: int, position: int, stack: Stack) -> tuple[Tensor, tuple[States, Tensor]]:
        """Return M_0, the states of the blocks, and zeros for Y_s of steps before `position`."""
        dead = position % self.config.segment_length
        M = self._fresh(batch)
        states = stack.start(batch, dead)
        return M, (states, M.new_zeros(batch, dead, M.shape[2]))

    def _fresh(self, batch: int) -> Float[Tensor, "b n d_model"]:
        """Return M_0 for every row."""
        return self.M.expand(batch, -1, -1)

    @property
    def state_size(self) -> int:
        """Elements of the slots, and of Y_s in an unfinished segment of `segment_length` - 1 steps."""
        n, d_model = self.M.shape
        return d_model * (n + self.config.segment_length - 1)
