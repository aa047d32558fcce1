"""Recurrent Memory Transformer (Bulatov, Kuratov and Burtsev, 2022): memory tokens around each segment.

    decoder:  [_, Y_s, M_{s+1}] = stack([M_s | x_s | M_s])
    encoder:  [M_{s+1}, Y_s]    = stack([M_s | x_s])

x_s are the embeddings of segment s, M_s its n memory tokens, and Y_s its outputs. | joins steps. M_0 is a
parameter.
"""

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional

from linrec.mixers import State
from linrec.models.config import MemoryConfig
from linrec.nn.parameters import mark
from linrec.nn.segments import SegmentState, chosen, run_segments
from linrec.ops.core.isolation import documents
from linrec.rules import require
from linrec.trees import leaves, map_tree

__all__ = ["RecurrentMemory"]

States: TypeAlias = tuple[State, ...]
# (x, states, reset) -> (y, states), and batch -> states of sequences that start
Run: TypeAlias = Callable[[Tensor, States, Tensor | None], tuple[Tensor, States]]
Start: TypeAlias = Callable[[int], States]


class RecurrentMemory(nn.Module):
    """[_, Y_s, M_{s+1}] = stack([M_s | x_s | M_s]): a stack reads and writes memory tokens in each segment.

    In the decoder form the stack is causal. It reads the memory tokens first, so all steps of the segment see
    them. At the boundary it reads the memory tokens again; their outputs have seen the whole segment, and are
    the next memory. Every segment starts from the blocks' own initial state, so only the memory tokens pass
    from segment to segment. Any mixer with a state works in the stack.

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
        super().__init__()
        self.config = config
        self.M = nn.Parameter(std * torch.randn(config.n_tokens, d_model))
        # like the rows of an embedding, the tokens are no matrix that maps vectors
        mark(self, group="vocabulary", weight_decay=True)

    def forward(
        self,
        x: Float[Tensor, "b t d_model"],
        state: SegmentState,
        reset: Bool[Tensor, "b t"] | None,
        *,
        run: Run,
        start: Start,
    ) -> tuple[Float[Tensor, "b t d_model"], SegmentState]:
        """Return the outputs of the stack at the steps of `x`, and the state after the last step.

        Args:
            x: embeddings of the tokens.
            state: the state that an earlier call returned, or `first_state`.
            reset: true where a new sequence starts: M_0 takes the place of the memory.
            run: the stack, (x, states of the blocks, reset) -> (y, states).
            start: returns the initial states of the blocks for a number of sequences.

        Raises:
            ValueError: `state` is not of this memory; or, in the encoder form, a call does not consist of
                whole segments or has a reset within a segment.
        """
        require(
            isinstance(state, SegmentState),
            "`state` must be the `SegmentState` that this model returned, or None; got a "
            f"{type(state).__name__}.",
        )

        read = self._read if self.config.form == "decoder" else self._read_whole
        return run_segments(
            "recurrent_memory",
            partial(read, run=run, start=start),
            partial(self._finish, run=run, start=start),
            x,
            state,
            length=self.config.segment_length,
            reset=reset,
            detach=self.config.detach,
        )

    def first_state(self, batch: int, position: int, *, run: Run, start: Start) -> SegmentState:
        """Return the state of `batch` sequences that start at step `position` of a stream."""
        dead = position % self.config.segment_length
        require(
            position >= 0 and not (dead and self.config.form == "encoder"),
            "`position` must be at least 0 and, with `form='encoder'`, a multiple of `segment_length` = "
            f"{self.config.segment_length}; got {position}.",
        )
        states = start(batch)
        if dead:
            begin = torch.full((batch,), dead, device=self.M.device)
            _, states = self._restarted(self.M.new_zeros(batch, dead, self.M.shape[1]), begin, run, start)
        device = next((tensor.device for tensor in leaves(states)), self.M.device)
        alive = torch.zeros(batch, dead, dtype=torch.bool, device=device)
        place = torch.full((batch,), position, device=device)
        return SegmentState(self._fresh(batch).to(device), states, alive, place)

    def _read(
        self, x: Tensor, state: SegmentState, reset: Tensor | None, run: Run, start: Start
    ) -> tuple[Tensor, SegmentState]:
        """Return Y_s of steps of one segment in the decoder form."""
        memory, segment, alive, position = state
        batch, time, _ = x.shape
        if not time:
            return x, state
        done, position = alive.shape[1], position + time
        if reset is None:
            y, segment = self._continued(x, memory, segment, done, None, run)
            alive = functional.pad(alive, (0, time), value=True)
            return y, SegmentState(memory, segment, alive, position)
        if not done:
            # a sequence that starts with the segment takes no row of its own
            memory, segment = chosen(reset[:, 0], (self._fresh(batch), start(batch)), (memory, segment))
            reset = functional.pad(reset[:, 1:], (1, 0))
        document = documents(reset)
        rows, steps = reset.nonzero(as_tuple=True)
        if not len(rows):
            y, segment = self._continued(x, memory, segment, done, None, run)
        else:
            y, segment = self._separated(x, memory, segment, done, document, rows, steps, run, start)
            memory = chosen(reset.any(1), self._fresh(batch), memory)
        alive = torch.cat([alive & ~reset.any(1, keepdim=True), document == document[:, -1:]], 1)
        return y, SegmentState(memory, segment, alive, position)

    def _finish(self, state: SegmentState, run: Run, start: Start) -> tuple[Tensor, States]:
        """Return M_{s+1}, and the states of an empty segment."""
        if self.config.form == "encoder":
            # `_read_whole` has written the memory
            return state.memory, state.segment
        memory, _ = run(state.memory, state.segment, None)
        return memory, start(len(memory))

    def _continued(
        self, x: Tensor, memory: Tensor, segment: States, done: int, reset: Tensor | None, run: Run
    ) -> tuple[Tensor, States]:
        """Return outputs and states of steps after `done` steps of a segment; the first step follows M_s."""
        if done:
            return run(x, segment, reset)
        n = memory.shape[1]
        reset = None if reset is None else functional.pad(reset, (n, 0))
        y, segment = run(torch.cat([memory.to(x.dtype), x], 1), segment, reset)
        return y[:, n:], segment

    def _separated(
        self,
        x: Tensor,
        memory: Tensor,
        segment: States,
        done: int,
        document: Int[Tensor, "b t"],
        rows: Int[Tensor, "k"],
        steps: Int[Tensor, "k"],
        run: Run,
        start: Start,
    ) -> tuple[Tensor, States]:
        """Return outputs and states of steps with k resets within the segment, at `steps` of `rows`.

        Each reset starts a row of its own, in which M_0 stands before the step. The other steps of the row
        are zeros, so that NaN does not pass a reset.
        """
        # as many steps as the rows that continue, because caches must have one length
        never = torch.zeros_like(document, dtype=torch.bool)
        before = x.masked_fill((document > 0)[..., None], 0)
        y, segment = self._continued(before, memory, segment, done, never, run)
        mine = document[rows] == document[rows, steps][:, None]
        after = functional.pad(x[rows].masked_fill(~mine[..., None], 0), (0, 0, done, 0))
        z, ends = self._restarted(after, done + steps, run, start)
        row, step = mine.nonzero(as_tuple=True)
        y = y.index_put((rows[row], step), z[:, done:][row, step])
        # of the documents that the segment does not end
        last = mine[:, -1]
        ended = iter(leaves(ends))
        segment = map_tree(
            lambda part: part.index_put((rows[last],), next(ended)[last].to(part.dtype)), segment
        )
        return y, segment

    def _restarted(self, x: Tensor, begin: Int[Tensor, "k"], run: Run, start: Start) -> tuple[Tensor, States]:
        """Return outputs (k, t, d) and states of rows that start at step `begin`, with M_0 before it."""
        rows, time, _ = x.shape
        n = len(self.M)
        # step `begin` + i is token i of M_0, steps after it are of x, and steps before it are zeros of x
        step, first = torch.arange(n + time, device=x.device), begin[:, None]
        source = torch.where(step < first, n + step, torch.where(step < first + n, step - first, step))
        tokens = torch.cat([self._fresh(rows).to(x.dtype), x], 1)
        tokens = tokens.gather(1, source[..., None].expand(-1, -1, x.shape[2]))
        y, states = run(tokens, start(rows), step == first)
        return y[:, n:], states

    def _read_whole(
        self, x: Tensor, state: SegmentState, reset: Tensor | None, run: Run, start: Start
    ) -> tuple[Tensor, SegmentState]:
        """Return Y_s of a whole segment in the encoder form."""
        length, time = self.config.segment_length, x.shape[1]
        if not time:
            return x, state
        require(
            time == length,
            f"a call with `form='encoder'` must have whole segments of `segment_length` = {length} steps; "
            f"got {time} steps of a segment. Pad the sequences, or use `form='decoder'`, which streams.",
        )
        memory = state.memory
        if reset is not None:
            require(
                not reset[:, 1:].any(),
                f"`reset` must be true only at multiples of `segment_length` = {length} steps with "
                "`form='encoder'`; got a reset within a segment. Pad the sequences to whole segments.",
            )
            memory = chosen(reset[:, 0], self._fresh(len(x)), memory)
        n = memory.shape[1]
        y, _ = run(torch.cat([memory.to(x.dtype), x], 1), start(len(x)), None)
        alive = torch.ones(len(x), time, dtype=torch.bool, device=x.device)
        return y[:, n:], SegmentState(y[:, :n], state.segment, alive, state.position + time)

    def _fresh(self, batch: int) -> Float[Tensor, "b n d_model"]:
        """Return M_0 for every row."""
        return self.M.expand(batch, -1, -1)

    @property
    def state_size(self) -> int:
        """Elements of the memory."""
        return self.M.numel()
