"""Recurrent Memory Transformer (Bulatov, Kuratov and Burtsev, 2022): memory tokens around each segment.

    decoder:  [_, Y_s, M_{s+1}] = stack([M_s | x_s | M_s])
    encoder:  [M_{s+1}, Y_s]    = stack([M_s | x_s])

x_s are the embeddings of segment s, M_s its n memory tokens, and Y_s its outputs. | joins steps. M_0 is a
parameter.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from linrec.models.config import MemoryConfig
from linrec.models.stack_memory import Stack, StackMemory, States
from linrec.nn.parameters import mark
from linrec.nn.segments import SegmentState, chosen
from linrec.ops.core.isolation import documents
from linrec.trees import leaves, map_tree

__all__ = ["RecurrentMemory"]


class RecurrentMemory(StackMemory):
    """[_, Y_s, M_{s+1}] = stack([M_s | x_s | M_s]): a stack reads and writes memory tokens in each segment.

    In the decoder form the stack is causal. It reads the memory tokens first, so all steps of the segment see
    them. At the boundary it reads the memory tokens again; their outputs have seen the whole segment, and are
    the next memory. Every segment starts from the blocks' own initial state, so only the memory tokens pass
    from segment to segment. Any mixer with a state works in the stack. The paper also combines
    memory tokens with Transformer-XL's cache, which is left out: no cache of the segment before passes.

    In the encoder form the stack sees the whole segment at once, and the next memory is the output of the
    memory tokens at the front.

    The state is a `SegmentState` of the memory (b, n, d_model) and the states of the blocks in the unfinished
    segment.

    Args:
        config: the memory's configuration.
        d_model: width of the stack.
        std: standard deviation of M_0 when training starts; the paper's is that of the token embeddings.

    Source:
        Bulatov, Kuratov and Burtsev, Recurrent Memory Transformer (2022), section 3. Initial values and the
        output norm of the memory tokens are the released code's.

    Example:
        >>> from linrec.models import LanguageModel, ModelConfig
        >>> memory = MemoryConfig(kind="recurrent_memory", segment_length=8, n_tokens=2)
        >>> model = LanguageModel(ModelConfig(vocab_size=6, d_model=16, memory=memory))
        >>> logits, state = model(torch.zeros(3, 20, dtype=torch.int64))
        >>> logits.shape, state.memory.shape, state.alive.shape
        (torch.Size([3, 20, 6]), torch.Size([3, 2, 16]), torch.Size([3, 4]))
    """

    def __init__(self, config: MemoryConfig, d_model: int, *, std: float | Tensor = 1.0) -> None:
        super().__init__(config)
        self.M = nn.Parameter(std * torch.randn(config.n_tokens, d_model))
        # like the rows of an embedding, the tokens are no matrix that maps vectors
        mark(self, group="vocabulary", weight_decay=True)

    def read(
        self, x: Tensor, state: SegmentState, alive: Tensor, reset: Tensor | None, stack: Stack
    ) -> tuple[Tensor, Tensor, States]:
        """Return Y_s of steps of one segment, the memory, and the states of the blocks."""
        memory, segment, before, _ = state
        memory = memory.to(self.M.dtype)
        if self.config.form == "encoder":
            return self._read_whole(x, memory, segment, reset, stack)
        batch, done = len(x), before.shape[1]
        if reset is not None and not done:
            # a sequence that starts with the segment takes no row of its own
            first = self._fresh(batch), stack.start(batch, 0)
            memory, segment = chosen(reset[:, 0], first, (memory, segment))
            reset = functional.pad(reset[:, 1:], (1, 0))
        if reset is None or not reset.any():
            y, segment = self._continued(x, memory, segment, done, None, stack)
            return y, memory, segment
        y, segment = self._separated(x, memory, segment, done, reset, stack)
        return y, chosen(reset.any(1), self._fresh(batch), memory), segment

    def finish(self, state: SegmentState, stack: Stack) -> tuple[Tensor, States]:
        """Return M_{s+1}, and the states of an empty segment."""
        if self.config.form == "encoder":
            # `read` has written the memory
            return state.memory, state.segment
        memory, _ = stack.run(state.memory, state.segment, None)
        return memory, stack.start(len(memory), 0)

    def start(self, batch: int, position: int, stack: Stack) -> tuple[Tensor, States]:
        """Return M_0, and the states after it."""
        states, dead = stack.start(batch, 0), position % self.config.segment_length
        if dead:
            begin = torch.full((batch,), dead, device=self.M.device)
            _, states = self._restarted(self.M.new_zeros(batch, dead, self.M.shape[1]), begin, stack)
        return self._fresh(batch), states

    def _continued(
        self, x: Tensor, memory: Tensor, segment: States, done: int, reset: Tensor | None, stack: Stack
    ) -> tuple[Tensor, States]:
        """Return outputs and states of steps after `done` steps of a segment; the first step follows M_s."""
        if done:
            return stack.run(x, segment, reset)
        tokens = self._tokens(memory)
        n = tokens.shape[1]
        reset = None if reset is None else functional.pad(reset, (n, 0))
        y, segment = stack.run(torch.cat([tokens.to(x.dtype), x], 1), segment, reset)
        return y[:, n:], segment

    def _separated(
        self, x: Tensor, memory: Tensor, segment: States, done: int, reset: Tensor, stack: Stack
    ) -> tuple[Tensor, States]:
        """Return outputs and states of steps with k resets within the segment.

        Each reset starts a row of its own, in which M_0 stands before the step. The other steps of the row
        are zeros, so that NaN does not pass a reset.
        """
        document = documents(reset)
        rows, steps = reset.nonzero(as_tuple=True)
        # as many steps as the rows that continue, because caches must have one length
        never = torch.zeros_like(document, dtype=torch.bool)
        before = x.masked_fill((document > 0)[..., None], 0)
        y, segment = self._continued(before, memory, segment, done, never, stack)
        mine = document[rows] == document[rows, steps][:, None]
        after = functional.pad(x[rows].masked_fill(~mine[..., None], 0), (0, 0, done, 0))
        z, ends = self._restarted(after, done + steps, stack)
        row, step = mine.nonzero(as_tuple=True)
        y = y.index_put((rows[row], step), z[:, done:][row, step])
        # of the documents that the segment does not end
        last = mine[:, -1]
        ended = iter(leaves(ends))
        segment = map_tree(
            lambda part: part.index_put((rows[last],), next(ended)[last].to(part.dtype)), segment
        )
        return y, segment

    def _restarted(self, x: Tensor, begin: Int[Tensor, "k"], stack: Stack) -> tuple[Tensor, States]:
        """Return outputs (k, t, d) and states of rows that start at step `begin`, with M_0 before it."""
        rows, time, _ = x.shape
        tokens = self._tokens(self._fresh(rows))
        n = tokens.shape[1]
        # step `begin` + i is token i of M_0, steps after it are of x, and steps before it are zeros of x
        step, first = torch.arange(n + time, device=x.device), begin[:, None]
        source = torch.where(step < first, n + step, torch.where(step < first + n, step - first, step))
        tokens = torch.cat([tokens.to(x.dtype), x], 1)
        tokens = tokens.gather(1, source[..., None].expand(-1, -1, x.shape[2]))
        y, states = stack.run(tokens, stack.start(rows, 0), step == first)
        return y[:, n:], states

    def _read_whole(
        self, x: Tensor, memory: Tensor, segment: States, reset: Tensor | None, stack: Stack
    ) -> tuple[Tensor, Tensor, States]:
        """Return Y_s, M_{s+1} and the states of the blocks in the encoder form."""
        if reset is not None:
            memory = chosen(reset[:, 0], self._fresh(len(x)), memory)
        n = memory.shape[1]
        y, _ = stack.run(torch.cat([memory.to(x.dtype), x], 1), segment, None)
        return y[:, n:], y[:, :n], segment

    def _tokens(self, memory: Float[Tensor, "b n d_model"]) -> Float[Tensor, "b r d_model"]:
        """Return the tokens that stand before a segment: the memory itself."""
        return memory

    def _fresh(self, batch: int) -> Float[Tensor, "b n d_model"]:
        """Return M_0 for every row."""
        return self.M.expand(batch, -1, -1)

    @property
    def state_size(self) -> int:
        """Elements of the memory."""
        return self.M.numel()
