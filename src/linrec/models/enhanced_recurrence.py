"""Enhanced recurrence of ERNIE-Doc (Ding and others, 2021): Transformer-XL with memories of outputs.

    h~_s^{l-1} = [SG(m_s^l) | h_s^{l-1}]
    h_s^l = Layer_l(h_s^{l-1}, h~_s^{l-1})
    m_{s+1}^l = the last M steps of [m_s^l | h_s^l]

h_s^l are the outputs of layer l in segment s and h_s^0 its embeddings, m_s^l is the memory of layer l, M its
length, SG stops gradients, and | joins steps. Transformer-XL has h_s^{l-1} in the last line.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from linrec.mixers import Mixer, State
from linrec.mixers.transformer_xl import TransformerXL
from linrec.models.config import MemoryConfig
from linrec.models.stack_memory import Stack, StackMemory, States
from linrec.nn.segment_mixer import PastSteps
from linrec.nn.segments import Detach, SegmentState
from linrec.rules import require

__all__ = ["EnhancedRecurrence"]


class EnhancedRecurrence(StackMemory):
    """m_{s+1}^l = the last M steps of [m_s^l | h_s^l]: a layer attends to its own earlier outputs.

    In Transformer-XL a layer reads inputs of earlier segments, so L layers reach L M steps back. Here it
    reads its own earlier outputs, so the reach grows with every segment. There are no parameters.

    The blocks have `transformer_xl` mixers, whose `segment_length` is the memory's. At a boundary each block
    takes the steps that the next block has just written, and the last block takes the outputs of the stack.
    `memory_length` and `detach` are the mixers'. `detach` also cuts the state of a channel mixing.

    A `transformer_xl` mixer stores its inputs. So with `norm_position="post"` and `final_norm=False`, a
    memory holds the outputs of its block, as in the paper. With other positions of the norms, the outputs are
    normalised by the norm before the mixer of the next block, or by the last norm of the stack; mixers with a
    `norm` of their own store the outputs of "pre" blocks as they are.

    The paper's retrospective feed reads a document twice, so that its first segments see memories of the last
    ones. That is a second call with the state of the first, for documents of whole segments:
    `_, skimmed = model(tokens)`, then `outputs, _ = model(tokens, skimmed)`. Outputs then depend on later
    steps, as of an encoder: use it for classification, not for the next token.

    The state is a `SegmentState` whose `memory` is the states of the blocks, and whose `segment` is the
    outputs of the stack in the unfinished segment (b, r, d_model).

    Args:
        config: the memory's configuration.
        mixers: the mixers of the blocks, first block first.

    Raises:
        ValueError: a mixer is not `transformer_xl`, has no memory, or has segments of another length.

    Source:
        Ding and others, ERNIE-Doc: A Retrospective Long-Document Modeling Transformer (2021), sections 3.2
        and 3.3.

    Example:
        >>> from linrec.models import LanguageModel, ModelConfig
        >>> memory = MemoryConfig(kind="enhanced_recurrence", segment_length=8)
        >>> xl = {"mixer": "transformer_xl", "mixer_args": {"segment_length": 8}}
        >>> model = LanguageModel(ModelConfig(vocab_size=6, d_model=16, n_layers=2, memory=memory, **xl))
        >>> logits, state = model(torch.zeros(3, 20, dtype=torch.int64))
        >>> logits.shape, len(state.memory), state.segment.shape
        (torch.Size([3, 20, 6]), 2, torch.Size([3, 4, 16]))
    """

    def __init__(self, config: MemoryConfig, mixers: Sequence[Mixer]) -> None:
        super().__init__(config)
        for mixer in mixers:
            require(
                isinstance(mixer, TransformerXL)
                and mixer.memory_length > 0
                and mixer.segment_length == config.segment_length,
                "`mixer` must be 'transformer_xl' in every block, with a `memory_length` of at least 1 and a "
                f"`segment_length` of `memory.segment_length` = {config.segment_length}, for `memory.kind` = "
                f"'enhanced_recurrence'; got {_described(mixer)}.",
            )
        first = cast(TransformerXL, mixers[0])
        self.d_model, self.memory_length, self.of_mixers = first.d_model, first.memory_length, first.detach

    @property
    def detach(self) -> Detach:
        """Return the boundaries at which gradients through the memories stop, as the mixers have them."""
        return self.of_mixers

    def read(
        self, x: Tensor, state: SegmentState, alive: Tensor, reset: Tensor | None, stack: Stack
    ) -> tuple[Tensor, States, Tensor]:
        """Return h_s^L of new steps, the states of the blocks, and h_s^L up to the new steps."""
        h, states = stack.run(x, state.memory, reset)
        dtype = _time_state(states[0]).memory.h.dtype
        outputs = torch.cat([state.segment.to(dtype), h.to(dtype)], 1)
        return h, states, outputs.masked_fill(~alive[..., None], 0)

    def finish(self, state: SegmentState, stack: Stack) -> tuple[States, Tensor]:
        """Return the states of the blocks with m_{s+1}^l, and no outputs."""
        # a mixer has written the steps h_s^{l-1} at the end of its memory, behind the last steps of m_s^l
        written = [_time_state(block).memory for block in state.memory]
        steps = min(self.memory_length, self.config.segment_length)
        above = [*(memory.h for memory in written[1:]), state.segment]
        states = []
        for block, memory, h in zip(state.memory, written, above, strict=True):
            h = torch.cat([memory.h[:, : self.memory_length - steps], h[:, -steps:]], 1)
            states.append(_with_memory(block, PastSteps.of(h, memory.alive)))
        return tuple(states), torch.zeros_like(state.segment[:, :0])

    def start(self, batch: int, position: int, stack: Stack) -> tuple[States, Tensor]:
        """Return the initial states of the blocks, and zeros for the outputs of steps before `position`."""
        states = stack.start(batch, position)
        h = _time_state(states[0]).memory.h
        return states, h.new_zeros(batch, position % self.config.segment_length, self.d_model)

    @property
    def state_size(self) -> int:
        """Elements of the outputs of an unfinished segment of `segment_length` - 1 steps, its longest."""
        return self.d_model * (self.config.segment_length - 1)


def _time_state(block: State) -> SegmentState:
    """Return the state of the time mixing in the state of a block."""
    return block if isinstance(block, SegmentState) else cast(SegmentState, block[0])


def _with_memory(block: State, memory: PastSteps) -> State:
    """Return the state of a block with another memory of its time mixing."""
    state = _time_state(block)._replace(memory=memory)
    # a channel mixing that reads earlier steps has a state too
    return state if isinstance(block, SegmentState) else (state, *block[1:])


def _described(mixer: Mixer) -> str:
    """Return a mixer as the error shows it."""
    if not isinstance(mixer, TransformerXL):
        return type(mixer).__name__
    return f"`memory_length` = {mixer.memory_length} and `segment_length` = {mixer.segment_length}"
