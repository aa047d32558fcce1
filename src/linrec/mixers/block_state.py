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

from collections.abc import Iterator
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from linrec.mixers import build
from linrec.nn.head_sizes import heads_of, most_heads
from linrec.nn.mixer import Mixer, State
from linrec.nn.norms import Norm, make_norm
from linrec.nn.parameters import mark
from linrec.nn.position_bias import BucketBias
from linrec.nn.projections import output_kwargs, projected
from linrec.nn.segments import SegmentState, Sight, by_segments, first_state
from linrec.nn.visible_attention import visible_attention
from linrec.ops.attention import check_options
from linrec.rules import at_least, choice, require
from linrec.trees import leaves

__all__ = ["BlockState", "BlockStateState", "ContextMemory"]

Integration = Literal["single_head", "multi_head", "multi_filter"]
Positions = Literal["t5", "none"]

# of Block-Recurrent Transformer
CHANNELS_PER_HEAD = 128
# of the paper's listing
FILTERS = 32


class ContextMemory(NamedTuple):
    """Keys and values from before a block, which the steps of the block see.

    Attributes:
        kv: keys and values of the block before (b, W, 2, h, d_head); without `sliding`, of no steps.
        alive: which steps of that block are of the row's current sequence (b, W).
        context: keys and values of the context (b, S, 2, h, d_head); of no vectors without `n_states`.
        shown: which of these vectors are of the row's current sequence (b, S).
    """

    kv: Float[Tensor, "b W 2 h d"]
    alive: Bool[Tensor, "b W"]
    context: Float[Tensor, "b S 2 h d"]
    shown: Bool[Tensor, "b S"]


class BlockStateState(NamedTuple):
    """State of a Block-State layer between two pieces of a sequence.

    Attributes:
        systems: the states of the state-space models.
        blocks: a `ContextMemory`, and the keys and values of the unfinished block.
    """

    systems: tuple[State, ...]
    blocks: SegmentState


class BlockState(Mixer):
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
            the outputs of the step's own block otherwise. Without "multi_filter", it is at most W.
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
    segment_length: int

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
        positions: Positions = "t5",
        context_norm: Norm = "rms",
        norm_eps: float = 1e-6,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(d_model)
        choice(Integration, integration=integration)
        choice(Positions, positions=positions)
        check_options(None, dropout)
        at_least(1, segment_length=segment_length, cure="The paper's is 512.")
        at_least(1, n_states=n_states, or_none=True)
        self.n_heads = most_heads(d_model, CHANNELS_PER_HEAD) if n_heads is None else n_heads
        self.d_head = heads_of("d_model", d_model, self.n_heads) if d_head is None else d_head
        at_least(1, n_heads=self.n_heads, d_head=self.d_head)
        self.segment_length, self.sliding, self.dropout = segment_length, sliding, dropout
        self.by_filters = integration == "multi_filter"
        self.n_states = FILTERS if n_states is None and self.by_filters else n_states
        require(
            self.by_filters or (n_states or 0) <= segment_length,
            f"`n_states` must be at most `segment_length` = {segment_length} with `integration="
            f'"{integration}"`, which takes the last outputs of a block; got {n_states}.',
        )
        sizes = {"single_head": 1, "multi_head": self.n_heads, "multi_filter": self.n_states or FILTERS}
        filters = sizes[integration]
        arguments = dict(ssm_args or {})
        if ssm == "s5":
            shared = 2 * max(1, d_model // (2 * filters))
            arguments = {"d_state": shared, "activation": False, "output": "none"} | arguments
        self.filters = nn.ModuleList(build(ssm, d_model, **arguments) for _ in range(filters))
        first: Any = self.filters[0]
        require(
            first.segment_length is None
            and all(x.numel() for x in leaves(first.init_state(1, device="meta"))),
            f"`ssm` must be a mixer with a state of constant size and without segments; got {ssm!r}. "
            'Choose a recurrence, such as "s5" or "s4d".',
        )
        self.recurrence = first.recurrence

        width = self.n_heads * self.d_head
        # queries of self-attention, then of cross-attention
        self.q = nn.Linear(d_model, 2 * width, bias=False)
        self.k = nn.Linear(d_model, width, bias=False)
        self.v = nn.Linear(d_model, width, bias=False)
        self.norm = make_norm(context_norm, d_model, eps=norm_eps)
        # of all heads, or of each
        layers = self.n_heads if integration == "multi_head" else 1
        self.kv_c = nn.ModuleList(nn.Linear(d_model, 2 * width // layers, bias=False) for _ in range(layers))
        self.C_0: nn.Parameter | None = None
        self.P: nn.Parameter | None = None
        if self.n_states is not None:
            self.C_0 = nn.Parameter(torch.randn(self.n_states, d_model))
            mark(self, "C_0", group="channel", weight_decay=False)
        if self.by_filters:
            self.P = nn.Parameter(torch.randn(filters, d_model))
            mark(self, "P", group="channel", weight_decay=False)
        self.bias = BucketBias(self.n_heads) if positions == "t5" else None
        self.out = nn.Linear(2 * width, d_model, bias=False)

    def mix(self, E: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return Y, and a `BlockStateState`."""
        past = self.init_state(len(E), device=E.device) if state is None else state
        C, systems = zip(
            *(ssm(E, h, reset=reset) for ssm, h in zip(self.filters, past.systems, strict=True)), strict=True
        )
        # (b, t, queries or keys or values, heads, d_head)
        parts = [
            y.unflatten(-1, (-1, self.n_heads, self.d_head)) for y in projected(E, self.q, self.k, self.v)
        ]
        contexts: Iterator[Tensor] = iter(())
        if self.by_filters:
            W, done = self.segment_length, past.blocks.alive.shape[1]
            # the outputs at the last steps of blocks, (b, blocks, S, d_model)
            last = torch.stack([c[:, W - 1 - done :: W] for c in C], 2)
            contexts = iter(self._keys_and_values(last).unbind(1))
        else:
            parts.append(self._keys_and_values(*C))
        heads, blocks = by_segments(
            "block_state",
            self._read,
            partial(self._write, contexts),
            torch.cat(parts, 2),
            past.blocks,
            length=self.segment_length,
            fresh=None if reset is None else self._empty(len(E), E.device)[0],
            reset=reset,
            detach="never",
        )
        return self.out(heads), BlockStateState(systems, blocks)

    def _keys_and_values(self, *C: Float[Tensor, "*n d_model"]) -> Float[Tensor, "*n 2 h d"]:
        """Return K_c and V_c from the outputs for all heads, or for each of them."""
        each = []
        for c, layer in zip(C, self.kv_c, strict=True):
            c = self.norm(c) if self.P is None else self.norm(c) + self.P.to(c.dtype)
            each.append(layer(c.to(self.k.weight.dtype)).unflatten(-1, (2, -1, self.d_head)))
        return torch.cat(each, -2)

    def _read(self, x: Tensor, memory: ContextMemory, segment: Tensor, sight: Sight) -> tuple[Tensor, Tensor]:
        """Return the heads of Y, and the keys and values of the block up to the new steps."""
        time, dropout = x.shape[1], self.dropout if self.training else 0.0
        Q, Q_cross = x[:, :, :2].unbind(2)
        # a state from outside of autocast has another dtype
        block = torch.cat([segment.to(x.dtype), x[:, :, 2:]], 1)
        kv, visible, bias = block[:, :, :2], sight.steps, None
        if self.sliding:
            kv = torch.cat([memory.kv.to(x.dtype), kv], 1)
            visible = sight.of(memory.alive, time).triu(kv.shape[1] - time - self.segment_length + 1)
        if self.bias is not None:
            bias = self.bias(time, kv.shape[1]).to(x.dtype)
        attended = visible_attention(Q, kv[:, :, 0], kv[:, :, 1], visible, bias, dropout=dropout)
        kv, visible = block[:, :, 2:], sight.steps
        if self.C_0 is not None:
            start = self._keys_and_values(*[self.C_0] * len(self.kv_c)).to(x.dtype)
            kv = torch.cat([memory.context.to(x.dtype), start.expand_as(memory.context)], 1)
            shown = memory.shown[:, None].expand(-1, time, -1)
            if sight.memory is not None:
                shown = shown & sight.memory[..., None]
            # the last vector is of the sequence, unless none is
            visible = torch.cat([shown, ~shown[..., -1:].expand_as(shown)], -1)
        crossed = visible_attention(Q_cross, kv[:, :, 0], kv[:, :, 1], visible)
        return torch.cat([attended, crossed], 2).flatten(-2), block

    def _write(
        self, contexts: Iterator[Tensor], memory: ContextMemory, segment: Tensor, alive: Tensor
    ) -> ContextMemory:
        """Return the `ContextMemory` of the next block."""
        W = self.segment_length
        before, last = slice(0 if self.sliding else W, W), slice(W - (self.n_states or 0), W)
        context, shown = segment[:, last, 2:], alive[:, last]
        if self.by_filters:
            context, shown = next(contexts), torch.ones_like(memory.shown)
        # views would keep the memory of the block
        parts = segment[:, before, :2], alive[:, before], context, shown
        return ContextMemory(*(part.clone() for part in parts))

    def _empty(self, batch: int, device: torch.device | str | None) -> tuple[ContextMemory, Tensor]:
        """Return the `ContextMemory` of the first block, and no keys and values."""
        parts, sizes = (2 if self.by_filters else 4), (self.n_heads, self.d_head)
        segment = torch.zeros(batch, 0, parts, *sizes, **output_kwargs(self.k, device))
        before = self.segment_length if self.sliding else 0
        kv, context = (segment.new_zeros(batch, n, 2, *sizes) for n in (before, self.n_states or 0))
        alive, shown = (torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device) for x in (kv, context))
        return ContextMemory(kv, alive, context, shown), segment

    def init_state(self, batch: int, *, device: torch.device | str | None = None, position: int = 0) -> State:
        """Return the state of sequences that start at step `position` of a stream."""
        systems = tuple(ssm.init_state(batch, device=device) for ssm in cast(list[Mixer], self.filters))
        blocks = first_state(*self._empty(batch, device), length=self.segment_length, position=position)
        return BlockStateState(systems, blocks)

    @property
    def state_size(self) -> int:
        """Elements of the state with an unfinished block of `segment_length` - 1 steps, its longest."""
        per_step = (2 if self.by_filters else 4) * self.n_heads * self.d_head + 1
        return super().state_size + per_step * (self.segment_length - 1)
