"""Block-State Transformer (Fathi and others, 2023): blocks of attention that read a state-space model.

    C^f = SSM^f(E), f = 1 .. F
    Y = [SA(Q; K, V) | CA(Q'; K_c, V_c)] W_o     Q, Q', K, V from E
    K_c, V_c from norm(C^1_m), m <= n in the block of step n                   "single_head", F = 1
    K_c, V_c of head i from norm(C^i_m), m <= n in the block of step n         "multi_head", F = heads
    K_c, V_c from norm(C^f_m) + P_f, m the last step before the block of n     "multi_filter", F = S

E are the inputs, cut into blocks of W steps, SSM^f state-space models over the whole sequence, SA causal
attention in a block and CA cross-attention by heads. Q are queries, K keys, V values, P position embeddings,
Y the output, and | joins heads.
"""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from linrec.mixers import build, canonical, get
from linrec.nn.contexts import ContextKeysAndValues, ContextMemory, ParallelMixers
from linrec.nn.head_sizes import split_width
from linrec.nn.mixer import State
from linrec.nn.norms import Norm, make_norm
from linrec.nn.parameters import mark
from linrec.nn.positions import BucketPositions, make_bucket_bias
from linrec.nn.projections import output_kwargs, projected
from linrec.nn.segment_mixer import SegmentMixer, joined
from linrec.nn.segments import SegmentState, Sight
from linrec.rules import COUNT, at_least

__all__ = ["BlockState", "BlockStateState"]

Integration = Literal["single_head", "multi_head", "multi_filter"]

# of Block-Recurrent Transformer
CHANNELS_PER_HEAD = 128
# of the paper's listing
FILTERS = 32


class BlockStateState(NamedTuple):
    """State of a Block-State layer between two pieces of a sequence.

    Attributes:
        systems: the states of the state-space models.
        blocks: a `ContextMemory`, and the keys and values of the unfinished block.
    """

    systems: tuple[State, ...]
    blocks: SegmentState


class BlockState(SegmentMixer):
    """Y = [SA(Q; K, V) | CA(Q'; K_c, V_c)] W_o, with K_c and V_c from state-space models of all steps before.

    The state-space models run over the whole sequence at once. No block of attention depends on the outputs
    of another block, but the driver of segments runs them one after another.

    | the paper's layer | arguments |
    |---|---|
    | single head (SH) | `integration="single_head"` |
    | multi-head (MH) | `integration="multi_head"` |
    | multi-filter (MF) | the defaults |

    A multi-filter step sees the last output of each of S models before its block. A single-head or multi-head
    step sees the outputs of its own block up to itself, of which each depends on all steps before. With
    `n_states`, it sees the last S outputs before its block instead. Where a sequence has no step before the
    block, S learned vectors C_0 stand for outputs.

    The listings compute the models as convolutions with long filters. Here they are recurrences, S5 unless
    `ssm` names another mixer. C_0 and P are normal when training starts. Scores are divided by sqrt(d_head).

    Args:
        d_model: width of the sequence.
        n_heads: heads. None is the largest number that divides `d_model` and leaves at least 128 channels to
            each head, or 1.
        d_head: channels of a head. None is `d_model` / `n_heads`.
        segment_length: W, the steps of a block.
        integration: "single_head", "multi_head" or "multi_filter".
        n_states: S, the vectors from before the block that a step sees. None is 32 with "multi_filter", and
            the outputs of the step's own block otherwise.
        ssm: name of the mixer that is the state-space model, of constant state and without segments.
        ssm_args: keyword arguments of that mixer. With "s5", omitted arguments are those of a linear system
            (`activation=False, output="none"`), and the models of a layer share a `d_state` of `d_model`.
        sliding: whether a step sees W steps, which reach into the block before. Without it, as in the paper's
            listing, a step sees the steps of its block.
        positions: of SA, "t5", a learned bias for each head and bucket of distances, or "none".
        context_norm: norm of the models' outputs and of C_0, "rms", "layer" or "none".
        norm_eps: epsilon of that norm.
        dropout: probability that a weight of SA is dropped, in training alone.

    Raises:
        ValueError: `n_heads` that does not divide `d_model`, an `ssm` with a growing state or with segments,
            an unknown name, or a number out of range.

    Source:
        Fathi, Pilault, Firat, Pal, Bacon and Goroshin, Block-State Transformers (2023), its listings. The
        bias and the norm are Block-Recurrent Transformer's, whose cell the listings call.

    Example:
        >>> mixer = BlockState(64, n_heads=4, segment_length=8, n_states=6)
        >>> y, state = mixer(torch.zeros(2, 20, 64))
        >>> y.shape, len(state.systems), state.blocks.memory.context.shape, state.blocks.segment.shape
        (torch.Size([2, 20, 64]), 6, torch.Size([2, 6, 2, 4, 16]), torch.Size([2, 4, 2, 4, 16]))
    """

    of_one_input = "q", "k", "v"

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int | None = None,
        d_head: int | None = None,
        segment_length: int = 512,
        integration: Integration = "multi_filter",
        n_states: int | None = None,
        ssm: str = "s5",
        ssm_args: dict[str, Any] | None = None,
        sliding: bool = False,
        positions: BucketPositions = "t5",
        context_norm: Norm = "rms",
        norm_eps: float = 1e-6,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(d_model, segment_length=segment_length, dropout=dropout)
        at_least(0, norm_eps=norm_eps)
        at_least(1, most=COUNT, n_states=n_states, or_none=True)
        self.n_heads, self.d_head = split_width("d_model", d_model, n_heads, d_head, least=CHANNELS_PER_HEAD)
        self.sliding, self.by_filters = sliding, integration == "multi_filter"
        # the places of blocks decide which outputs of the filters are read
        self.takes_turns = self.by_filters
        self.n_states = FILTERS if n_states is None and self.by_filters else n_states
        filters = {"single_head": 1, "multi_head": self.n_heads}.get(integration, self.n_states or FILTERS)
        linear = {"d_state": 2 * max(1, d_model // (2 * filters)), "activation": False, "output": "none"}
        given = (linear if canonical(ssm, what="`ssm`") == "s5" else {}) | (ssm_args or {})
        self.filters = ParallelMixers((build(get(ssm), d_model, **given) for _ in range(filters)), name="ssm")
        self.recurrence = self.filters.recurrence

        width = self.n_heads * self.d_head
        # queries of self-attention, then of cross-attention
        self.q = nn.Linear(d_model, 2 * width, bias=False)
        self.k = nn.Linear(d_model, width, bias=False)
        self.v = nn.Linear(d_model, width, bias=False)
        self.norm = make_norm(context_norm, d_model, eps=norm_eps)
        self.kv_c = ContextKeysAndValues(d_model, self.n_heads, self.d_head, integration == "multi_head")
        self.C_0 = None if self.n_states is None else nn.Parameter(torch.randn(self.n_states, d_model))
        self.P = nn.Parameter(torch.randn(filters, d_model)) if self.by_filters else None
        mark(self, "C_0", "P", group="channel", weight_decay=False)
        self.bias = make_bucket_bias(positions, self.n_heads)
        self.out = nn.Linear(2 * width, d_model, bias=False)

    def mix(self, E: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return Y, and a `BlockStateState`."""
        past = self.init_state(E.shape[0], device=E.device) if state is None else state
        C, systems = self.filters(E, past.systems, reset)
        # (b, t, queries or keys or values, heads, d_head)
        x = [y.unflatten(-1, (-1, self.n_heads, self.d_head)) for y in projected(E, self.q, self.k, self.v)]
        if self.by_filters:
            # of the outputs at the last steps of blocks, (b, blocks, S, d_model)
            contexts = self.kv_c([torch.stack([self.ends(c, past.blocks) for c in C], 2)], self.norm, self.P)
        else:
            x, contexts = [*x, self.kv_c(C, self.norm)], None
        heads, blocks = self.by_segments(torch.cat(x, 2), past.blocks, reset, contexts)
        return self.out(heads), BlockStateState(systems, blocks)

    def read(self, x: Tensor, memory: ContextMemory, segment: Tensor, sight: Sight) -> tuple[Tensor, Tensor]:
        """Return the heads of Y, and the keys and values of the block up to the new steps."""
        block = joined(segment, x[:, :, 2:])
        start = None if self.C_0 is None else self.kv_c([self.C_0], self.norm, self.P)
        own = memory.attend_steps(x[:, :, 0], block[:, :, :2], sight, self.bias, self.active_dropout)
        crossed = memory.attend_context(x[:, :, 1], block[:, :, 2:], sight, start)
        return torch.cat([own, crossed], 2).flatten(-2), block

    def write(self, memory: ContextMemory, segment: Tensor, alive: Tensor, *given: Tensor) -> ContextMemory:
        """Return the memory of the next block."""
        return memory.then(segment, alive, *given)

    def start(self, batch: int, device: torch.device | str | None) -> tuple[ContextMemory, Tensor]:
        """Return the memory of the first block, and no keys and values."""
        sizes = self.segment_length if self.sliding else 0, self.n_states or 0, self.n_heads, self.d_head
        memory = ContextMemory.empty(batch, *sizes, **output_kwargs(self.k, device))
        return memory, memory.kv.new_zeros(batch, 0, 2 if self.by_filters else 4, self.n_heads, self.d_head)

    def init_state(self, batch: int, *, device: torch.device | str | None = None, position: int = 0) -> State:
        """Return the state of sequences that start at step `position` of a stream."""
        blocks = super().init_state(batch, device=device, position=position)
        return BlockStateState(self.filters.init_state(batch, device=device), blocks)
