"""Token Turing Machine (Ryoo and others, 2023): a memory of tokens that summaries read and write.

    summary_k(T) = softmax(MLP_k(LN(T)))^T T                                   k tokens of the tokens T
    encoder:  Z_s = summary_T([M_s | x_s] + P),  Y_s = stack(Z_s)
    decoder:  [_, Y_s] = stack([summary_r(M_s + P) | x_s])
    M_{s+1} = summary_n([M_s | x_s | Y_s] + P')

x_s are the embeddings of segment s of T steps, M_s the n memory tokens, Y_s the outputs of the stack, and |
joins tokens. P and P' are learned positions, which also tell memory, inputs and outputs apart. The softmax is
over the tokens. M_0 is a parameter that starts at zeros.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from linrec.models.config import MemoryConfig
from linrec.models.recurrent_memory import RecurrentMemory
from linrec.models.stack_memory import Stack, States
from linrec.nn.norms import make_norm
from linrec.nn.parameters import mark
from linrec.nn.segments import SegmentState, chosen

__all__ = ["TokenSummary", "TokenTuringMachine"]

# of the released code
HIDDEN, POSITION_STD, NORM_EPS = 64, 0.02, 1e-6


class TokenSummary(nn.Module):
    """summary_k(T) = softmax(MLP_k(LN(T)))^T T: k weighted means of tokens.

    Args:
        d_model: width of the tokens.
        n_tokens: k.

    Source:
        Ryoo, Piergiovanni, Arnab, Dehghani and Angelova, TokenLearner (2021), in version 1.1 of its code.
    """

    def __init__(self, d_model: int, n_tokens: int) -> None:
        super().__init__()
        self.norm = make_norm("layer", d_model, eps=NORM_EPS)
        self.up = nn.Linear(d_model, HIDDEN)
        self.down = nn.Linear(HIDDEN, n_tokens)

    def forward(
        self, tokens: Float[Tensor, "b s d"], alive: Bool[Tensor, "b s"] | None = None
    ) -> Float[Tensor, "b k d"]:
        """Return the means, of tokens that are alive alone."""
        scores = self.down(functional.gelu(self.up(self.norm(tokens)), approximate="tanh"))
        if alive is not None:
            scores = scores.masked_fill(~alive[..., None], -torch.inf)
        return scores.softmax(1).mT.to(tokens.dtype) @ tokens


class TokenTuringMachine(RecurrentMemory):
    """M_{s+1} = summary_n([M_s | x_s | Y_s] + P'): summaries write a memory of tokens, and read it.

    The encoder form is the paper's step with as many summaries as inputs: the stack, which processes them,
    sees the segment and the memory at once, and output t is that of summary t. In the decoder form each step
    has an output of its own, so the stack is causal. It reads `n_read` summaries of the memory before the
    inputs, which are not summarised. Every segment starts from the blocks' own initial state, so only the
    memory passes from segment to segment.

    The state is a `SegmentState` of the memory (b, n, d_model), and a triple of the states of the blocks, x_s
    and Y_s in the unfinished segment (b, r, d_model). Of the paper's ways to write, erasing and adding, and
    summaries by attention, are left out.

    Args:
        config: the memory's configuration.
        d_model: width of the stack.

    Source:
        Ryoo and others, Token Turing Machines (2023), section 3. The paper's M_0 is constant.

    Example:
        >>> from linrec.models import LanguageModel, ModelConfig
        >>> memory = MemoryConfig(kind="token_turing_machine", segment_length=8, n_tokens=2, n_read=1)
        >>> model = LanguageModel(ModelConfig(vocab_size=6, d_model=16, memory=memory))
        >>> logits, state = model(torch.zeros(3, 20, dtype=torch.int64))
        >>> logits.shape, state.memory.shape, state.segment[1].shape
        (torch.Size([3, 20, 6]), torch.Size([3, 2, 16]), torch.Size([3, 4, 16]))
    """

    def __init__(self, config: MemoryConfig, d_model: int) -> None:
        super().__init__(config, d_model, std=0.0)
        n, length, encoder = config.n_tokens, config.segment_length, config.form == "encoder"
        self.reading = TokenSummary(d_model, length if encoder else config.n_read)
        self.writing = TokenSummary(d_model, n)
        self.read_positions = nn.Parameter(POSITION_STD * torch.randn(n + length * encoder, d_model))
        self.write_positions = nn.Parameter(POSITION_STD * torch.randn(n + 2 * length, d_model))
        mark(self, "read_positions", "write_positions", group="vocabulary", weight_decay=False)

    def read(
        self, x: Tensor, state: SegmentState, alive: Tensor, reset: Tensor | None, stack: Stack
    ) -> tuple[Tensor, Tensor, tuple[States, Tensor, Tensor]]:
        """Return Y_s of new steps, M_s, and the states of the blocks with x_s and Y_s up to the new steps."""
        states, *steps = state.segment
        y, memory, states = super().read(x, state._replace(segment=states), alive, reset, stack)
        X, Y = (
            torch.cat([old.to(self.M.dtype), new.to(self.M.dtype)], 1).masked_fill(~alive[..., None], 0)
            for old, new in zip(steps, (x, y), strict=True)
        )
        return y, memory, (states, X, Y)

    def finish(self, state: SegmentState, stack: Stack) -> tuple[Tensor, tuple[States, Tensor, Tensor]]:
        """Return M_{s+1}, the states of the blocks in an empty segment, and no inputs and outputs."""
        _, X, Y = state.segment
        tokens = torch.cat([state.memory, X, Y], 1) + self.write_positions
        steps = torch.cat([state.alive, state.alive], 1)
        M = self.writing(tokens, functional.pad(steps, (self.config.n_tokens, 0), value=True))
        return M, (stack.start(len(M), 0), torch.zeros_like(X[:, :0]), torch.zeros_like(Y[:, :0]))

    def start(self, batch: int, position: int, stack: Stack) -> tuple[Tensor, tuple[States, Tensor, Tensor]]:
        """Return M_0, the states of the blocks, and zeros for the steps before `position`."""
        memory, states = super().start(batch, position, stack)
        dead = memory.new_zeros(batch, position % self.config.segment_length, memory.shape[2])
        return memory, (states, dead, dead)

    def _tokens(self, memory: Tensor) -> Tensor:
        return self.reading(memory + self.read_positions)

    def _read_whole(
        self, x: Tensor, memory: Tensor, segment: States, reset: Tensor | None, stack: Stack
    ) -> tuple[Tensor, Tensor, States]:
        """Return Y_s, M_s and the states of the blocks in the encoder form."""
        if reset is not None:
            memory = chosen(reset[:, 0], self._fresh(len(x)), memory)
        Z = self._tokens(torch.cat([memory, x.to(memory.dtype)], 1))
        y, _ = stack.run(Z.to(x.dtype), segment, None)
        return y, memory, segment

    @property
    def state_size(self) -> int:
        """Elements of the memory, and of x_s and Y_s in a segment of `segment_length` - 1 steps."""
        n, d_model = self.M.shape
        return d_model * (n + 2 * (self.config.segment_length - 1))
