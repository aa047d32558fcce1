"""The sequence model over tokens: embedding, blocks, head."""

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from linrec.mixers import Mixer, State
from linrec.models.block import Block, run_blocks
from linrec.models.config import ModelConfig
from linrec.models.memories import make_memory, make_reading
from linrec.models.pooling import PooledState, Pooling
from linrec.models.ragged import RaggedState, run_masked
from linrec.models.reversible import ReversibleBlock, run_reversible
from linrec.models.stack import make_blocks
from linrec.models.stack_memory import Stack, StackMemory
from linrec.nn.head import Embedding, Head
from linrec.nn.norms import make_norm
from linrec.nn.parameters import mark
from linrec.nn.segments import SegmentState
from linrec.ops.core.ambient import checkpointed
from linrec.restored import RestoredModule
from linrec.rules import require
from linrec.trees import Tree

__all__ = ["LanguageModel"]


class LanguageModel(RestoredModule):
    """logits = head(norm(block_L(... block_1(embedding(tokens))))).

    Every layer has torch's own initialisation (embedding N(0, 1)), except a tied embedding: it is drawn from
    N(0, 1 / d_model) so that the logits start at unit scale. An untied head has a bias and a tied head does
    not, unless `config.head_bias` overrides it.

    With `config.memory`, the blocks and the norm run segment by segment, with a memory between the segments;
    see `MemoryConfig`. The state is then a `SegmentState`. With `config.pool`, the blocks run at several
    rates, and the state is a `PooledState`.

    Args:
        config: the model's configuration; see `ModelConfig`. `config.mixer` names the time mixer of every
            block, or a pattern of mixers.

    Attributes:
        recompute: whether to recompute each block in the backward pass (activation checkpointing). Memory is
            then one block plus one activation per block, for a third more time. False by default.

    Raises:
        ValueError: `config` has an unknown mixer or channel mixing, or an argument that the mixer lacks; or a
            mixer does not fit the form of the memory.

    Source:
        GateLoop (Katsch, 2023), appendix C and figure 9.

    Example:
        >>> import torch
        >>> model = LanguageModel(ModelConfig(vocab_size=6, n_outputs=50, n_layers=2))
        >>> logits, state = model(torch.zeros(2, 10, dtype=torch.int64))
        >>> logits.shape, len(state)
        (torch.Size([2, 10, 50]), 2)
        >>> logits, state = model(torch.zeros(2, 1, dtype=torch.int64), state)
        >>> logits.shape
        torch.Size([2, 1, 50])
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.recompute = False
        n_outputs = config.vocab_size if config.n_outputs is None else config.n_outputs
        self.embedding = Embedding(config.vocab_size, config.d_model)
        self.embedding_norm = make_norm(
            config.norm if config.embedding_norm else "none", config.d_model, eps=config.norm_eps
        )
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = make_blocks(config, make_reading=self._make_reading)
        self.norm = make_norm(
            config.norm if config.final_norm else "none", config.d_model, eps=config.norm_eps
        )
        bias = not config.tie_embeddings if config.head_bias is None else config.head_bias
        self.head = Head(config.d_model, n_outputs, bias=bias, cap=config.logit_cap)
        for tokenwise in (self.embedding, self.head):
            mark(tokenwise, group="vocabulary", weight_decay=True)
        if config.tie_embeddings:
            nn.init.normal_(self.embedding.weight, std=1 / math.sqrt(config.d_model))
            self.head.weight = self.embedding.weight
        self.memory = self._make_memory()
        self.pooling = Pooling(config) if config.pool else None

    def forward(
        self,
        tokens: Int[Tensor, "b t"],
        state: tuple[State, ...] | None = None,
        *,
        reset: Bool[Tensor, "b t"] | None = None,
        dt: Float[Tensor, "b t"] | None = None,
        mask: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b t n_outputs"], tuple[State, ...]]:
        """Return the logits of every step.

        Args:
            tokens: (b, t) int64 in [0, vocab_size).
            state: the state that an earlier call returned, one entry per layer; None at the start.
            reset: (b, t) bool, true where a new document starts.
            dt: (b, t), the time since the step before; see `Mixer.forward`. All mixers must have `takes_dt`.
            mask: (b, t) bool, false at padding and other steps to leave out. Logits at other steps, and the
                state, are those of rows without these steps. None leaves out no steps.

        Returns:
            logits (b, t, n_outputs), and the state after the last step, a tuple with one entry per layer, or
            a `RaggedState` where a mask gives the rows states of different shapes.

        Raises:
            ValueError: `tokens` is not two-dimensional, `mask` has another shape, `state` has the wrong
                number of layers, or `dt` is given with a memory across the stack.
            TypeError: `tokens` is not of an integer dtype, `mask` is not bool, or a mixer does not take `dt`.
            IndexError: on the CPU, from torch, for an id outside [0, vocab_size). On CUDA such an id is
                undefined behaviour, because checking values would wait for the device.
        """
        x, states = self.hidden(tokens, state, reset=reset, dt=dt, mask=mask)
        return self.head(x), states

    if TYPE_CHECKING:
        __call__ = forward

    def hidden(
        self,
        tokens: Int[Tensor, "b t"],
        state: tuple[State, ...] | None = None,
        *,
        reset: Bool[Tensor, "b t"] | None = None,
        dt: Float[Tensor, "b t"] | None = None,
        mask: Bool[Tensor, "b t"] | None = None,
        keep_state: bool = True,
    ) -> tuple[Float[Tensor, "b t d_model"], tuple[State, ...]]:
        """Return the head's input (b, t, d_model), and the state; arguments and errors as in `forward`.

        Without `keep_state`, the state of each layer is None: training does not need it, and compiled layers
        do not compute it.
        """
        if tokens.dim() != 2:
            raise ValueError(
                f"`tokens` must have shape (batch, time); got {tuple(tokens.shape)}. "
                "Add a batch axis to a single sequence: `tokens[None]`."
            )
        if tokens.dtype not in (torch.int64, torch.int32):
            raise TypeError(
                f"`tokens` must be int64 token ids; got {tokens.dtype}. Convert: `tokens.long()`."
            )
        x = self.embedding(tokens)
        return self.transformed(x, state, reset=reset, dt=dt, mask=mask, keep_state=keep_state)

    def transformed(
        self,
        x: Float[Tensor, "b t d_model"],
        state: tuple[State, ...] | None = None,
        *,
        reset: Bool[Tensor, "b t"] | None = None,
        dt: Float[Tensor, "b t"] | None = None,
        mask: Bool[Tensor, "b t"] | None = None,
        keep_state: bool = True,
        every_layer: bool = False,
    ) -> tuple[Float[Tensor, "b t d_hidden"], tuple[State, ...]]:
        """Return the head's input and the state from embeddings `x`; otherwise as `hidden`.

        With `every_layer`, the inputs of all blocks stand before the head's input, side by side:
        (b, t, (n_layers + 1) d_model). A memory across the stack does not have it.
        """
        if mask is not None:
            self._check_mask(mask, x)
            # a compiler cannot branch on values
            if not torch.compiler.is_compiling() and mask.all():
                mask = None
        run = partial(self._run, keep_state=keep_state, every_layer=every_layer)
        if mask is None and not isinstance(state, RaggedState):
            return run(x, state, reset, dt)
        ended = not keep_state and all(mixer.is_causal for mixer in self.mixers)
        return run_masked(run, x, state, mask, reset, dt, padded=not self.has_segments, ended=ended)

    def _run(
        self,
        x: Tensor,
        state: tuple[State, ...] | None,
        reset: Tensor | None,
        dt: Tensor | None,
        *,
        keep_state: bool,
        every_layer: bool,
    ) -> tuple[Tensor, tuple[State, ...]]:
        """Run rows of which all steps count, as `transformed`."""
        if self.pooling is not None:
            require(
                dt is None and not every_layer,
                "`dt` and hidden states of every layer need `pool` = (), where blocks see every step; got "
                f"{self.config.pool}. Use a model without pools.",
            )
            x, pooled = self._pooled(self.pooling, x, cast(PooledState | None, state), reset, keep_state)
            return x, pooled if keep_state else (None,) * len(self.blocks)
        if self.memory is None:
            return self._stack(x, state, reset, dt=dt, keep_state=keep_state, every_layer=every_layer)
        require(
            not every_layer,
            "hidden states of every layer need `memory.kind` = 'none'; got "
            f"{self.config.memory.kind!r}, whose blocks read further steps. Use a model without memory.",
        )
        require(
            dt is None,
            f"`dt` must be None with `memory.kind` = {self.config.memory.kind!r}, which counts steps; got a "
            "tensor. Use a model without memory across the stack.",
        )
        # the memory checks that the state is its own
        state = cast(SegmentState | None, state)
        x, state = self.memory(x, state, reset, stack=self._as_stack(x.device))
        return x, state if keep_state else (None,) * len(self.blocks)

    def _stack(
        self,
        x: Tensor,
        state: tuple[State, ...] | None,
        reset: Tensor | None,
        *,
        dt: Tensor | None = None,
        keep_state: bool = True,
        memory: Tree = None,
        every_layer: bool = False,
    ) -> tuple[Tensor, tuple[State, ...]]:
        """Run the blocks and the norm; the blocks read `memory`, a part of the memory across them."""
        if state is None:
            state = (None,) * len(self.blocks)
        if len(state) != len(self.blocks):
            raise ValueError(
                f"`state` must have one entry per layer, {len(self.blocks)}; got {len(state)}. "
                "Pass the state that this model returned."
            )
        x = self._prepared(x)
        if self.config.reversible:
            require(
                not every_layer,
                "hidden states of every layer need `reversible` = False; got True. Use another model.",
            )
            blocks = cast(list[ReversibleBlock], self._blocks)
            x, after = run_reversible(blocks, x, state, reset=reset, dt=dt, keep_state=keep_state)
            return self.norm(x), after
        inputs: list[Tensor] = []
        over: dict[str, Any] = {"reset": reset, "dt": dt, "keep_state": keep_state, "memory": memory}
        seen = inputs if every_layer else None
        x, states = run_blocks(self.blocks, x, state, run_of=self._run_of, inputs=seen, **over)
        y = self.norm(x)
        return torch.cat([*inputs, y], -1) if every_layer else y, states

    def _pooled(
        self, pooling: Pooling, x: Tensor, state: PooledState | None, reset: Tensor | None, keep_state: bool
    ) -> tuple[Tensor, PooledState]:
        """Run the blocks at their rates, and the norm."""
        if state is not None and not isinstance(state, PooledState):
            raise ValueError(
                f"`state` must be a PooledState or None; got {type(state).__name__}. Pass the state that "
                "this model returned."
            )

        def run(
            layers: range, x: Tensor, states: tuple[State, ...], reset: Tensor | None
        ) -> tuple[Tensor, tuple[State, ...]]:
            blocks = [self.blocks[layer] for layer in layers]
            over: dict[str, Any] = {"reset": reset, "keep_state": keep_state}
            return run_blocks(blocks, x, states, run_of=self._run_of, **over)

        y, after = pooling(self._prepared(x), state, reset, run)
        return self.norm(y), after

    def _prepared(self, x: Tensor) -> Tensor:
        """Return the input of the first block from embeddings."""
        if self.config.embedding_scale is not None:
            x = x * self.config.embedding_scale
        y: Tensor = self.dropout(self.embedding_norm(x))
        return y

    def _run_of(self, block: nn.Module) -> Callable[..., tuple[Tensor, State]]:
        """Return the block, or the block that runs again in the backward pass."""
        return checkpointed(block) if self.recompute and torch.is_grad_enabled() else block

    def init_state(
        self, batch: int, *, device: torch.device | str | None = None, position: int = 0
    ) -> tuple[State, ...]:
        """Return the initial state of `batch` sequences, one entry per layer.

        Args:
            batch: sequences b.
            device: where the state lives; None is where the parameters live.
            position: step of the stream at which the sequences start. It matters for mixers and memories with
                segments.
        """
        if self.pooling is not None:
            return self.pooling.first_state(batch, position, device=device, blocks=self._blocks)
        if self.memory is None:
            return self._first_states(batch, position, device=device)
        return self.memory.first_state(batch, position, stack=self._as_stack(device))

    def _as_stack(self, device: torch.device | str | None) -> Stack:
        """Return the blocks as a memory across them calls the blocks, with initial states on a device."""
        return Stack(self._stack, partial(self._first_states, device=device))

    def _first_states(
        self, batch: int, position: int, *, device: torch.device | str | None
    ) -> tuple[State, ...]:
        """Return the initial states of the blocks."""
        return tuple(block.init_state(batch, device=device, position=position) for block in self._blocks)

    def _make_reading(self, layer: int) -> tuple[nn.Module | None, nn.Module | None]:
        """Return the sublayers of block `layer` that read the memory and that mix its channels, if any."""
        return make_reading(self.config, self.config.memory, layer)

    def _make_memory(self) -> StackMemory | None:
        """Return the memory across the stack, if any."""
        return make_memory(self.config, self.config.memory, self.mixers, self.embedding.weight)

    @staticmethod
    def _check_mask(mask: Tensor, x: Tensor) -> None:
        """Raise unless there is a flag for each row and step."""
        require(
            mask.shape == x.shape[:2],
            f"`mask` must have shape (batch, time) = {tuple(x.shape[:2])}; got {tuple(mask.shape)}. Pass one "
            "flag per row and step.",
        )
        if mask.dtype != torch.bool:
            raise TypeError(f"`mask` must be bool; got {mask.dtype}. Pass `mask != 0`.")

    @property
    def has_segments(self) -> bool:
        """Whether segments begin at multiples of a number of steps, so that they depend on the first step."""
        across = self.memory is not None or self.pooling is not None
        return across or any(mixer.segment_length is not None for mixer in self.mixers)

    @property
    def state_size(self) -> int:
        """Number of elements of the state per sequence, over layers and a memory or pools across them."""
        across = sum(part.state_size for part in (self.memory, self.pooling) if part is not None)
        return across + sum(block.state_size for block in self._blocks)

    @property
    def mixers(self) -> list[Mixer]:
        """The time mixers, first layer first."""
        return [block.mixer for block in self._blocks]

    @property
    def _blocks(self) -> list[Block]:
        return cast(list[Block], [*self.blocks])
