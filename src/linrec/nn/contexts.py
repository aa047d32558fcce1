"""Parts of Block-State Transformer: mixers side by side, and attention to the context vectors they make."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from linrec.nn.mixer import Mixer, State
from linrec.nn.parameters import tensor_options
from linrec.nn.positions import BucketBias
from linrec.nn.segment_mixer import joined, last_steps
from linrec.nn.segments import Sight
from linrec.nn.visible_attention import visible_attention
from linrec.rules import require
from linrec.trees import leaves

__all__ = ["ContextKeysAndValues", "ContextMemory", "ParallelMixers"]


class ContextMemory(NamedTuple):
    """Keys and values from before a block, which the steps of the block see.

    Attributes:
        kv: keys and values of the last W steps (b, W, 2, h, d); W may be 0.
        alive: which of these steps are of the row's current sequence (b, W).
        context: keys and values of the context (b, S, 2, h, d); S may be 0.
        shown: which of these vectors are of the row's current sequence (b, S).
    """

    kv: Float[Tensor, "b W 2 h d"]
    alive: Bool[Tensor, "b W"]
    context: Float[Tensor, "b S 2 h d"]
    shown: Bool[Tensor, "b S"]

    @classmethod
    def empty(
        cls, batch: int, steps: int, vectors: int, n_heads: int, d_head: int, **factory: Any
    ) -> "ContextMemory":
        """Return the memory of W = `steps` steps and S = `vectors` vectors that do not exist."""
        kv, context = (torch.zeros(batch, n, 2, n_heads, d_head, **factory) for n in (steps, vectors))
        alive, shown = (torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device) for x in (kv, context))
        return cls(kv, alive, context, shown)

    def then(
        self,
        block: Float[Tensor, "b t p h d"],
        alive: Bool[Tensor, "b t"],
        context: Float[Tensor, "b S 2 h d"] | None = None,
    ) -> "ContextMemory":
        """Return the last W steps after t more steps, and the next context.

        Args:
            block: keys and values of the steps; without `context`, then keys and values of a vector for each
                step, of which the last S are the context.
            alive: which of the steps are of the row's current sequence.
            context: the context, all of the row's current sequence.
        """
        shown = alive if context is None else torch.ones_like(self.shown)
        context = block[:, :, 2:] if context is None else context
        return ContextMemory(*map(last_steps, self, (block[:, :, :2], alive, context, shown)))

    def attend_steps(
        self,
        q: Float[Tensor, "b t h d"],
        kv: Float[Tensor, "b s 2 h d"],
        sight: Sight,
        bias: BucketBias | None = None,
        dropout: float = 0.0,
    ) -> Float[Tensor, "b t h d"]:
        """Attend to the steps of a block so far or, with a memory of W > 0 steps, to the last W steps.

        Args:
            q: queries at t new steps.
            kv: keys and values of the block up to the new steps.
            sight: the steps that a new step sees.
            bias: of scores by distance.
            dropout: probability of dropping an attention weight.
        """
        visible, W = sight.steps, self.kv.shape[1]
        if W:
            kv, visible = joined(self.kv, kv), sight.of(self.alive, q.shape[1], window=W)
        scores = None if bias is None else bias(q.shape[1], kv.shape[1])
        return visible_attention(q, kv[:, :, 0], kv[:, :, 1], visible, scores, dropout=dropout)

    def attend_context(
        self,
        q: Float[Tensor, "b t h d"],
        kv: Float[Tensor, "b s p h d"],
        sight: Sight,
        start: Float[Tensor, "S 2 h d"] | None,
    ) -> Float[Tensor, "b t h d"]:
        """Attend to the context from before a block, or to a vector for each step of the block so far.

        Args:
            q: queries at t new steps.
            kv: without `start`, keys and values of the vectors of the block up to the new steps; ignored with
                it.
            sight: the steps that a new step sees.
            start: keys and values that stand for the context where no vector is of the row's sequence.
        """
        if start is None:
            return visible_attention(q, kv[:, :, 0], kv[:, :, 1], sight.steps)
        kv = joined(self.context, start.to(q.dtype).expand_as(self.context))
        shown = sight.of_memory(self.shown, q.shape[1])
        # the last vector is of the sequence, unless none is
        visible = torch.cat([shown, ~shown[..., -1:].expand_as(shown)], -1)
        return visible_attention(q, kv[:, :, 0], kv[:, :, 1], visible)


class ContextKeysAndValues(nn.ModuleList):
    """K_c, V_c = (norm(C) + P) W_c for all heads, or K_c^i, V_c^i = (norm(C^i) + P) W_c^i for each head i.

    Args:
        d: width of a context vector.
        n_heads: heads.
        d_head: channels of a head.
        by_heads: whether each head has its own vectors.
    """

    def __init__(self, d: int, n_heads: int, d_head: int, by_heads: bool = False) -> None:
        layers, heads = (n_heads, 1) if by_heads else (1, n_heads)
        super().__init__(nn.Linear(d, 2 * heads * d_head, bias=False) for _ in range(layers))
        self.d_head = d_head

    def forward(
        self, C: Sequence[Float[Tensor, "*n d"]], norm: nn.Module, P: Float[Tensor, "S d"] | None = None
    ) -> Float[Tensor, "*n 2 h d_head"]:
        """Return keys and values.

        Args:
            C: the vectors for all heads, or for each head; with heads, a single element is for each of them.
            norm: a norm.
            P: position embeddings of S vectors; None adds nothing.
        """
        dtype, each = tensor_options(self)["dtype"], []
        for c, layer in zip(C if len(C) == len(self) else [*C] * len(self), self, strict=True):
            c = norm(c) if P is None else norm(c) + P.to(c.dtype)
            each.append(layer(c.to(dtype)).unflatten(-1, (2, -1, self.d_head)))
        return torch.cat(each, -2)


class ParallelMixers(nn.ModuleList):
    """C^f = mixer^f(x), f = 1 .. F, with states of constant size.

    Args:
        mixers: mixers of one kind.
        name: the argument that names the kind, for the error.
    """

    def __init__(self, mixers: Iterable[Mixer], *, name: str) -> None:
        super().__init__(mixers)
        first = next(self.each())
        require(
            first.segment_length is None
            and all(x.numel() for x in leaves(first.init_state(1, device="meta"))),
            f"`{name}` must be a mixer with a state of constant size and without segments; got "
            f'{type(first).__name__}. Choose a recurrence, such as "s5" or "s4d".',
        )

    def forward(
        self,
        x: Float[Tensor, "b t d"],
        states: tuple[State, ...],
        reset: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[list[Float[Tensor, "b t d"]], tuple[State, ...]]:
        """Return the outputs and the states of all mixers; the arguments are those of a mixer."""
        each = zip(self.each(), states, strict=True)
        C, states = zip(*(mixer(x, state, reset=reset) for mixer, state in each), strict=True)
        return list(C), states

    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> tuple[State, ...]:
        """Return the states of all mixers at the start of `batch` sequences."""
        return tuple(mixer.init_state(batch, device=device) for mixer in self.each())

    def each(self) -> Iterator[Mixer]:
        """Return the mixers."""
        return cast(Iterator[Mixer], iter(self))

    @property
    def recurrence(self) -> str | None:
        """Return the operator that is the memory of a mixer, as in `Mixer`."""
        return next(self.each()).recurrence
