"""The residual block of every model: time mixing, then channel mixing."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from linrec.mixers import Mixer, State
from linrec.models.source_reading import SourceReading, StackedReading
from linrec.nn.mixer import Values, checked_output
from linrec.nn.norms import Norm, make_norm
from linrec.rules import choice
from linrec.trees import Tree

__all__ = ["Block", "NormPosition", "run_blocks"]

NormPosition: TypeAlias = Literal["pre", "post", "output"]


class Block(nn.Module):
    """Time mixing, then channel mixing, each with a skip connection and a norm.

    | `norm_position` | each sublayer f        |
    |-----------------|------------------------|
    | "pre"           | x = x + f(norm(x))     |
    | "post"          | x = norm(x + f(x))     |
    | "output"        | x = x + norm(f(x))     |

    Without `skip`, the sum with x is left out.

    GateLoop's paper lists skip connections and layer normalisation, but does not give the position of the
    norm. A "pre" block omits the norm before a mixer that normalises its own input (`Mixer.own_norm`), and
    any block the dropout of the output of a mixer that has its own (`Mixer.own_dropout`).

    A channel mixing that reads earlier steps, such as RWKV's, is a `Mixer` too. The block's state is then the
    pair (state of the time mixing, state of the channel mixing). Otherwise it is the time mixing's state.

    `reading` is a sublayer between time mixing and channel mixing, which reads a memory that `forward` gets.
    With `reading_channels`, the two are sublayers after channel mixing. A `SourceReading` reads the output of
    an encoder, whose keys and values are a last part of the block's state.

    Args:
        mixer: the time mixing.
        channel_mixing: maps (..., d_model) to (..., d_model) at each step separately; or a `Mixer`; or None,
            for blocks without channel mixing.
        norm: "layer", "rms" or "none".
        norm_eps: epsilon that the norms add to the variance or the mean square.
        norm_position: "pre", "post" or "output".
        skip: whether sublayers have skip connections.
        dropout: dropout probability, applied to the output of each sublayer.
        reading: maps a tensor (b, t, d_model) and a memory to (b, t, d_model); None for blocks that do not
            read a memory.
        reading_channels: channel mixing after `reading`, at each step separately.

    Source:
        GateLoop (Katsch, 2023), appendix C and figure 9.

    Example:
        >>> import torch
        >>> from linrec.mixers import build
        >>> from linrec.nn import FeedForward
        >>> block = Block(build("gate_loop", 8), FeedForward(8, 16))
        >>> y, state = block(torch.zeros(2, 5, 8))
        >>> y.shape
        torch.Size([2, 5, 8])
    """

    def __init__(
        self,
        mixer: Mixer,
        channel_mixing: nn.Module | None,
        *,
        norm: Norm = "layer",
        norm_eps: float = 1e-5,
        norm_position: NormPosition = "pre",
        skip: bool = True,
        dropout: float = 0.0,
        reading: nn.Module | None = None,
        reading_channels: nn.Module | None = None,
    ) -> None:
        super().__init__()
        choice(NormPosition, norm_position=norm_position)
        self.norm_position, self.skip = norm_position, skip
        before = "none" if norm_position == "pre" and mixer.own_norm else norm
        self.mixer_norm = make_norm(before, mixer.d_model, eps=norm_eps)
        self.mixer = mixer
        # a block without channel mixing needs no norm for it: its parameters would be unused
        self.channel_mixing_norm = make_norm(
            "none" if channel_mixing is None else norm, mixer.d_model, eps=norm_eps
        )
        self.channel_mixing = channel_mixing
        self.reading_norm = make_norm("none" if reading is None else norm, mixer.d_model, eps=norm_eps)
        self.reading = reading
        self.reading_channels_norm = make_norm(
            "none" if reading_channels is None else norm, mixer.d_model, eps=norm_eps
        )
        self.reading_channels = reading_channels
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Float[Tensor, "b *time d_model"],
        state: State = None,
        *,
        reset: Bool[Tensor, "b t"] | None = None,
        dt: Float[Tensor, "b t"] | None = None,
        keep_state: bool = True,
        memory: Tree = None,
        values: Values | None = None,
    ) -> tuple[Float[Tensor, "b *time d_model"], State]:
        """Apply the block to `x`; arguments and results are as in `Mixer.forward`.

        Without `keep_state`, the state that is returned is None. A compiled block then does not compute it,
        nor its gradient. `memory` is the memory that `reading` reads. `run_blocks` passes `values` on.
        """
        # only where there are times, because mixers may define a `forward` without them
        over: dict[str, Any] = {"reset": reset} if dt is None else {"reset": reset, "dt": dt}
        over_time, over_channels, source = self._parts(state)
        memory = source if self._reads_source else memory
        own = over if values is None else {**over, "values": values}
        # a sum would broadcast another shape
        y, over_time = checked_output(
            self.mixer, self.mixer(self._before(self.mixer_norm, x), over_time, **own), x
        )
        if values is not None:
            over_time, values = over_time
        x = self._after(self.mixer_norm, x, y, dropped=self.mixer.own_dropout)
        if self.reading_channels is None:
            x = self._read(x, memory)
        if isinstance(self.channel_mixing, Mixer):
            z = self._before(self.channel_mixing_norm, x)
            y, over_channels = self.channel_mixing(z, over_channels, **over)
            x = self._after(self.channel_mixing_norm, x, y)
        elif self.channel_mixing is not None:
            y = self.channel_mixing(self._before(self.channel_mixing_norm, x))
            x = self._after(self.channel_mixing_norm, x, y)
        if self.reading_channels is not None:
            x = self._read(x, memory)
            y = self.reading_channels(self._before(self.reading_channels_norm, x))
            x = self._after(self.reading_channels_norm, x, y)
        state = self._joined(over_time, over_channels, source) if keep_state else None
        return x, state if values is None else (state, values)

    if TYPE_CHECKING:
        __call__ = forward

    def init_state(self, batch: int, *, device: torch.device | str | None = None, position: int = 0) -> State:
        """Return the initial state of `batch` sequences that start at step `position` of a stream."""
        start: Callable[..., State] = self.mixer.init_state
        # only the boundaries of segments depend on the position
        at = {} if self.mixer.segment_length is None else {"position": position}
        over_time, over_channels = start(batch, device=device, **at), None
        if isinstance(self.channel_mixing, Mixer):
            over_channels = self.channel_mixing.init_state(batch, device=device)
        source = self.reading.empty(batch, device) if isinstance(self.reading, SourceReading) else None
        return self._joined(over_time, over_channels, source)

    def with_source(self, state: State, source: Tree) -> State:
        """Return a state, or None for the start, with the keys and values that a `SourceReading` reads."""
        over_time, over_channels, _ = self._parts(state)
        return self._joined(over_time, over_channels, source)

    @property
    def state_size(self) -> int:
        """Number of elements of the state per sequence; see `Mixer.state_size`."""
        carried = self.channel_mixing.state_size if isinstance(self.channel_mixing, Mixer) else 0
        return self.mixer.state_size + carried

    @property
    def takes_values(self) -> bool:
        """Whether the time mixing reads values of the first layer; see `Mixer.takes_values`."""
        return self.mixer.takes_values

    @property
    def _reads_source(self) -> bool:
        return isinstance(self.reading, SourceReading)

    def _parts(self, state: State) -> tuple[State, State, State]:
        """Return the states of time mixing and channel mixing, and the source, where the block has them."""
        has = (True, isinstance(self.channel_mixing, Mixer), self._reads_source)
        if state is None or not any(has[1:]):
            return state, None, None
        parts = iter(state)
        over_time, over_channels, source = (next(parts) if part else None for part in has)
        return over_time, over_channels, source

    def _joined(self, over_time: State, over_channels: State, source: State) -> State:
        """Return the state of these parts, where the block has them."""
        parts: list[State] = [over_time]
        if isinstance(self.channel_mixing, Mixer):
            parts.append(over_channels)
        if self._reads_source:
            parts.append(source)
        return tuple(parts) if len(parts) > 1 else over_time

    def _read(self, x: Tensor, memory: Tree) -> Tensor:
        if self.reading is None:
            return x
        x = self._after(self.reading_norm, x, self.reading(self._before(self.reading_norm, x), memory))
        if isinstance(self.reading, StackedReading):
            norm = self.reading.second_norm
            x = self._after(norm, x, self.reading.following(self._before(norm, x), memory))
        return x

    def _before(self, norm: nn.Module, x: Tensor) -> Tensor:
        return norm(x) if self.norm_position == "pre" else x

    def _after(self, norm: nn.Module, x: Tensor, y: Tensor, *, dropped: bool = False) -> Tensor:
        if self.norm_position == "output":
            y = norm(y)
        y = y if dropped else self.dropout(y)
        if self.norm_position == "output":
            return x + y if self.skip else y
        y = x + y if self.skip else y
        return y if self.norm_position == "pre" else norm(y)


def run_blocks(
    blocks: Iterable[Any],
    x: Float[Tensor, "b *time d_model"],
    states: Sequence[State],
    *,
    run_of: Callable[[Any], Callable[..., Any]] = lambda block: block,
    inputs: list[Tensor] | None = None,
    **arguments: Any,
) -> tuple[Float[Tensor, "b *time d_model"], tuple[State, ...]]:
    """Run blocks one after another, and return the output of the last and the states of all.

    The values of the first block whose mixer has `takes_values` are passed on to the others.

    Args:
        blocks: the blocks.
        x: input of the first block.
        states: the state of each block, or None.
        run_of: returns the function that runs a block, by default the block.
        inputs: a list that gets the input of every block, or None.
        arguments: further arguments of every block.
    """
    values: Values = ()
    after = []
    for block, state in zip(blocks, states, strict=True):
        if inputs is not None:
            inputs.append(x)
        if block.takes_values:
            x, (state, values) = run_of(block)(x, state, values=values, **arguments)
        else:
            x, state = run_of(block)(x, state, **arguments)
        after.append(state)
    return x, tuple(after)
