"""An encoder of sequences: an output per step, which depends on the whole sequence."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from jaxtyping import Float, Int, Num
from torch import Tensor, nn

from linrec.mixers import Mixer, State
from linrec.models.bidirectional import Bidirectional, Combine
from linrec.models.block import Block, run_blocks
from linrec.models.config import MemoryConfig, StackConfig, check_sizes
from linrec.models.memories import make_memory, make_reading
from linrec.models.reversible import ReversibleBlock, run_reversible
from linrec.models.stack import build_mixer, make_blocks
from linrec.models.stack_memory import Stack
from linrec.nn.head import Embedding
from linrec.nn.norms import make_norm
from linrec.nn.parameters import mark
from linrec.nn.segments import SegmentState
from linrec.ops.core.call import refuse_split_time
from linrec.rules import require
from linrec.trees import Tree

__all__ = ["EncoderConfig", "SequenceEncoder", "check_times"]


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(StackConfig):
    """Configuration of a `SequenceEncoder`; all values are plain, so that it can be written to a file.

    Args:
        vocab_size: number of input tokens, with ids 0 to `vocab_size` - 1. Give this or `n_features`.
        n_features: real numbers per step, for inputs that are not tokens.
        bidirectional: whether each causal mixer runs in both directions. If not, the encoder is causal if its
            mixers are. A mixer that sees later steps itself, such as softmax attention with
            `mixer_args={"causal": False}`, runs once.
        unshared: parameters that the two directions do not share. None gives each direction a mixer of its
            own. Names of parameters, such as ("theta",) in HGRN, are kept per direction, and all others are
            shared. () runs a single mixer in both directions.
        combine: how the outputs of the two directions are combined, "sum", "mean" or "concatenate"; see
            `Bidirectional`.

    The other arguments are keyword arguments of `StackConfig`.

    Raises:
        ValueError: a number is out of range, not exactly one of `vocab_size` and `n_features` is given, or
            `unshared` or `combine` is given without `bidirectional`.

    Example:
        >>> EncoderConfig(vocab_size=6, mixer="hgru").bidirectional
        True
    """

    vocab_size: int | None = None
    n_features: int | None = None
    bidirectional: bool = True
    unshared: tuple[str, ...] | None = None
    combine: Combine = "sum"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes(self, "vocab_size", "n_features")
        if (self.vocab_size is None) == (self.n_features is None):
            raise ValueError(
                "Give either `vocab_size`, for tokens, or `n_features`, for real numbers; got "
                f"{self.vocab_size} and {self.n_features}."
            )
        if self.unshared is not None:
            # JSON stores tuples as lists
            object.__setattr__(self, "unshared", tuple(self.unshared))
        if not self.bidirectional and (self.unshared is not None or self.combine != "sum"):
            raise ValueError(
                "`unshared` and `combine` are for two directions; got `bidirectional` = False with "
                f"`unshared` = {self.unshared} and `combine` = {self.combine!r}. Leave them out."
            )


class SequenceEncoder(nn.Module):
    """y = norm(block_L(... block_1(input(x)))): a vector per step, by default of the whole sequence.

    The input layer is an embedding of tokens, or a Linear of real features. Steps after a sequence's length
    are padding: no output and no gradient depends on the padding's values or on its length, in either
    direction.

    Args:
        config: the encoder's configuration; see `EncoderConfig`.
        memory: a memory that passes from segment to segment of the sequences, in its encoder form; see
            `remember`. None disables it.

    Raises:
        ValueError: `config` has an unknown mixer or channel mixing, or an argument that the mixer lacks; or a
            mixer does not fit the memory.

    Example:
        >>> import torch
        >>> encoder = SequenceEncoder(EncoderConfig(vocab_size=6, mixer="hgru", n_layers=2))
        >>> encoder(torch.zeros(2, 10, dtype=torch.int64), lengths=torch.tensor([10, 4])).shape
        torch.Size([2, 10, 64])
    """

    def __init__(self, config: EncoderConfig, *, memory: MemoryConfig | None = None) -> None:
        super().__init__()
        self.config = config
        self.input: nn.Module
        if config.vocab_size is not None:
            self.input = mark(
                Embedding(config.vocab_size, config.d_model), group="vocabulary", weight_decay=True
            )
        else:
            assert config.n_features is not None
            self.input = nn.Linear(config.n_features, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        memory = MemoryConfig() if memory is None else memory
        self.blocks = make_blocks(
            config,
            self._make_mixer if config.bidirectional else None,
            make_reading=partial(make_reading, config, memory),
        )
        self.norm = make_norm(
            config.norm if config.final_norm else "none", config.d_model, eps=config.norm_eps
        )
        mixers = [block.mixer for block in self._blocks]
        self.memory = make_memory(config, memory, mixers, next(self.input.parameters()))

    def forward(
        self,
        x: Num[Tensor, "b t *features"],
        *,
        lengths: Int[Tensor, "b"] | None = None,
        dt: Float[Tensor, "b t"] | None = None,
    ) -> Float[Tensor, "b t d_model"]:
        """Return the outputs of every step; outputs at padding are meaningless.

        Arguments and errors are as in `SequenceClassifier.forward` without pairs.
        """
        y, _ = self.encoded(x, lengths, dt)
        return y

    if TYPE_CHECKING:
        __call__ = forward

    def encoded(
        self, x: Tensor, lengths: Tensor | None, dt: Tensor | None
    ) -> tuple[Float[Tensor, "b t d_model"], Tensor | None]:
        """Return the outputs of every step, and which steps are not padding (b, t); None without padding."""
        if self.memory is not None:
            require(
                lengths is None and dt is None,
                "`lengths` and `dt` must be None with a memory, which counts steps; got a tensor. Pass whole "
                "segments.",
            )
            return self.remember(x)[0], None
        self._check_input(x)
        check_times(dt, x.shape[:2], "(batch, time)")
        refuse_split_time(type(self).__name__)
        valid = reset = None
        if lengths is not None:
            self._check_lengths(lengths, x)
            lengths, step = lengths.to(x.device)[:, None], torch.arange(x.shape[1], device=x.device)
            valid = step < lengths
            # padding is a separate document, so nothing passes back from it
            reset = step == lengths
            dt = None if dt is None else dt.masked_fill(~valid, 1)
        y = self.embedded(x, valid)
        if self.config.reversible:
            blocks = cast(list[ReversibleBlock], self._blocks)
            y, _ = run_reversible(blocks, y, [None] * len(blocks), reset=reset, dt=dt, keep_state=False)
            return self.norm(y), valid
        over: dict[str, Any] = {"reset": reset, "dt": dt, "keep_state": False}
        y, _ = run_blocks(self.blocks, y, [None] * len(self.blocks), **over)
        return self.norm(y), valid

    def remember(
        self, x: Num[Tensor, "b t *features"], state: SegmentState | None = None
    ) -> tuple[Float[Tensor, "b t d_model"], SegmentState]:
        """Return the outputs of the next steps of sequences, and the memory after them.

        Only for encoders with a memory. A call takes whole segments of `memory.segment_length` steps.

        Args:
            x: (b, t) int64 tokens, or (b, t, n_features) real features.
            state: the state that an earlier call returned; None at the start.

        Raises:
            ValueError: the encoder has no memory, or `x` has the wrong shape.
        """
        require(
            self.memory is not None,
            "`remember` needs an encoder with a memory; this encoder has none. Call the encoder instead.",
        )
        assert self.memory is not None
        self._check_input(x)
        return self.memory(self.embedded(x, None), state, None, stack=Stack(self._run, self._start))

    def _run(
        self, x: Tensor, states: tuple[State, ...], reset: Tensor | None, *, memory: Tree = None
    ) -> tuple[Tensor, tuple[State, ...]]:
        """Run the blocks and the norm, as a memory across them calls the blocks."""
        x, after = run_blocks(self._blocks, x, states, reset=reset, memory=memory)
        return self.norm(x), after

    def _start(self, batch: int, position: int) -> tuple[State, ...]:
        """Return the initial states of the blocks."""
        return tuple(block.init_state(batch, position=position) for block in self._blocks)

    @property
    def _blocks(self) -> list[Block]:
        return cast(list[Block], [*self.blocks])

    def embedded(self, x: Tensor, valid: Tensor | None) -> Float[Tensor, "b t d_model"]:
        """Return the input of the blocks; `valid` is false at padding (b, t), None without padding."""
        if valid is not None:
            # padding may hold anything, such as NaN or an id that is not a token
            x = x.masked_fill(~valid if x.ndim == 2 else ~valid[:, :, None], 0)
        return self.dropout(self.input(x))

    def _make_mixer(self, layer: int) -> Mixer:
        """Return the time mixer of block `layer`, in both directions if it is causal."""
        forwards = build_mixer(self.config, layer)
        if not forwards.is_causal:
            return forwards
        backwards = build_mixer(self.config, layer)
        return Bidirectional(forwards, backwards, combine=self.config.combine, unshared=self.config.unshared)

    def _check_input(self, x: Tensor) -> None:
        if self.config.vocab_size is not None:
            if x.ndim != 2 or not x.shape[1]:
                raise ValueError(
                    f"`x` must be tokens (batch, time) of at least one step; got {tuple(x.shape)}. "
                    "Add a batch axis to a single sequence: `x[None]`."
                )
            if x.dtype not in (torch.int64, torch.int32):
                raise TypeError(f"`x` must be int64 token ids; got {x.dtype}. Convert: `x.long()`.")
            return
        if x.ndim != 3 or x.shape[-1] != self.config.n_features or not x.shape[1]:
            raise ValueError(
                f"`x` must be features (batch, time, {self.config.n_features}) of at least one step; got "
                f"{tuple(x.shape)}. Add missing axes, or build the model with another `n_features`."
            )
        if not x.is_floating_point():
            raise TypeError(f"`x` must be real features; got {x.dtype}. Convert: `x.float()`.")

    def _check_lengths(self, lengths: Tensor, x: Tensor) -> None:
        batch, time = x.shape[:2]
        if lengths.dtype not in (torch.int64, torch.int32):
            raise TypeError(
                f"`lengths` must be int64; got {lengths.dtype}. Count steps, not fractions of them."
            )
        if lengths.shape != (batch,):
            raise ValueError(
                f"`lengths` must have shape (batch,) = ({batch},); got {tuple(lengths.shape)}. "
                "If you have a mask (batch, time) of valid steps, pass `mask.sum(1)`."
            )
        if lengths.device.type == "cpu" and not torch.compiler.is_compiling():
            outside = lengths[(lengths < 1) | (lengths > time)]
            if len(outside):
                raise ValueError(
                    f"`lengths` must be in [1, {time}], the steps of `x`; got {outside[0].item()}. "
                    "Leave empty sequences out of the batch."
                )


def check_times(dt: Tensor | None, shape: tuple[int, ...], axes: str) -> None:
    """Raise ValueError if times have another shape than the steps."""
    if dt is not None and dt.shape != shape:
        raise ValueError(f"`dt` must have shape {axes} = {tuple(shape)}; got {tuple(dt.shape)}.")
