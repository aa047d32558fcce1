"""Compressive Transformer (Rae and others, 2019): steps that leave the memory are compressed.

    h~_s = [c_s | m_s | h_s]
    a_s = Masked-Softmax(A / sqrt(d_head)) h~_s W_v     A of Transformer-XL, from h_s W_q and h~_s W_k
    o_s = a_s W_o
    old, m_{s+1} = the first T steps, and the last M steps, of [m_s | h_s]
    c_{s+1} = the last C steps of [c_s | f(old)]
    loss = mean |attn(h_s, old) - attn(h_s, f(old))|^2

h_s are the inputs of the layer in segment s of T steps, m_s is its memory, c_s its compressed memory, and |
joins steps. f makes one vector of each r steps. attn is attention with the layer's own W_q, W_k and W_v by
contents alone, and the loss trains f alone.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from linrec.nn.added_loss import with_loss
from linrec.nn.compressions import Compression, compressed, make_compression, reconstruction_loss
from linrec.nn.head_sizes import split_width
from linrec.nn.mixer import State
from linrec.nn.projections import draw, input_kwargs
from linrec.nn.segment_mixer import PastSteps, SegmentMixer, Steps, all_keys_and_values, extended
from linrec.nn.segments import Detach, Sight
from linrec.nn.visible_attention import DistanceScores, QueryBiases, attention_received, distance_attention
from linrec.ops.core.precision import without_autocast
from linrec.rules import at_least, positive

__all__ = ["CompressiveTransformer", "Memories"]

# of the paper's models
CHANNELS_PER_HEAD = 64


class Memories(NamedTuple):
    """The memory before a segment.

    Attributes:
        recent: the last M steps.
        compressed: C vectors, each of r earlier steps.
    """

    recent: PastSteps
    compressed: PastSteps


class CompressiveTransformer(SegmentMixer):
    """a = Masked-Softmax(A / sqrt(d_head)) [c | m | h] W_v: Transformer-XL with a compressed memory.

    Of T + M + C vectors, the C compressed ones reach r C steps back. In training, a backward pass through the
    output adds the gradient of `loss_weight` times the loss above to the gradient of f, once for each whole
    segment. `linrec train` divides that gradient by the number of micro-batches; in another loop,
    `linrec.nn.added_loss.weighing_losses` does. A loss scale does not multiply it. With the paper's
    `detach="segment"`, no other gradient reaches f.

    A vector of r steps of which some come before a reset is made of the other steps, with zeros in the place
    of these.

    "most_used" keeps T / r of the T steps that leave the memory, in their order: the steps to which the steps
    of the segment attend the most, on average over steps and heads. Section 3.2 does not say over which steps
    the average is. A segment's attention is computed a second time when the segment ends, so the state holds
    no sums. No gradient passes through the choice.

    "dilated" is a convolution of r taps, `dilation` steps apart, and stride r. The last tap is at the last of
    each r steps, and there are zeros before the first of the T steps. Section 3.2 gives no width and no
    dilation.

    Args:
        d_model: width of the sequence.
        n_heads: heads. None is the largest number that divides `d_model` and leaves at least 64 channels to
            each head, or 1.
        segment_length: T, the steps of a segment.
        memory_length: M, the steps of the memory; None is `segment_length`.
        compressed_length: C, the compressed vectors; None is M / r, rounded down, or 1.
        compression_rate: r, the steps of a compressed vector; it divides T.
        compression: f, "conv" for a convolution of width and stride r, "dilated", "mean", "max" or
            "most_used".
        dilation: steps between two taps of "dilated"; 1 is "conv".
        loss_weight: factor on the loss of f; 0 omits the loss.
        detach: where gradients through the memory stop: "segment", the paper's, at every boundary; "never";
            or a number n, at every n-th boundary.
        dropout: probability that an attention weight is dropped, in training alone.
        init_std: standard deviation of weights, u and v of Transformer-XL when training starts.

    Raises:
        ValueError: `n_heads` that does not divide `d_model`, `compression_rate` that does not divide
            `segment_length`, an unknown name, or a number out of range.

    Source:
        Rae, Potapenko, Jayakumar, Hillier and Lillicrap, Compressive Transformers for Long-Range Sequence
        Modelling (2019), section 3 and algorithm 2. The mean of squares in the loss is the compared port's.

    Example:
        >>> mixer = CompressiveTransformer(64, n_heads=4, segment_length=8)
        >>> y, state = mixer(torch.zeros(2, 20, 64))
        >>> state.memory.recent.h.shape, state.memory.compressed.h.shape
        (torch.Size([2, 8, 64]), torch.Size([2, 2, 64]))
    """

    of_one_input = "k", "v"

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int | None = None,
        segment_length: int = 512,
        memory_length: int | None = None,
        compressed_length: int | None = None,
        compression_rate: int = 4,
        compression: Compression = "conv",
        dilation: int = 2,
        loss_weight: float = 1.0,
        detach: Detach = "segment",
        dropout: float = 0.0,
        init_std: float = 0.02,
    ) -> None:
        super().__init__(d_model, segment_length=segment_length, detach=detach, dropout=dropout)
        at_least(0, memory_length=memory_length, compressed_length=compressed_length, or_none=True)
        at_least(0, loss_weight=loss_weight)
        positive(init_std=init_std)
        self.n_heads, d_head = split_width("d_model", d_model, n_heads, least=CHANNELS_PER_HEAD)
        self.memory_length = segment_length if memory_length is None else memory_length

        self.q, self.k, self.v = (nn.Linear(d_model, d_model, bias=False) for _ in range(3))
        self.distance = DistanceScores(d_model, self.n_heads, d_head)
        self.biases = QueryBiases(self.n_heads, d_head, std=init_std)
        self.f = make_compression(compression, d_model, segment_length, compression_rate, dilation)
        self.taps, self.loss_weight = self.f.taps, loss_weight
        compressed = max(1, self.memory_length // compression_rate)
        self.compressed_length = compressed if compressed_length is None else compressed_length
        self.out = nn.Linear(d_model, d_model, bias=False)
        draw(self, nn.init.normal_, std=init_std)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return o, and a `SegmentState` of `Memories`, and h_s and its `keys_and_values`."""
        a, state = self.by_segments(x, state, reset)
        return self.out(a), state

    def prepare(self, memory: Memories) -> Memories:
        """Return m_s and c_s with their keys and values, if no gradients are recorded."""
        return Memories(*(steps.keyed(self.k, self.v) for steps in memory))

    def read(self, x: Tensor, memory: Memories, segment: Steps, sight: Sight) -> tuple[Tensor, Steps]:
        """Return a, with the gradient of the loss at the end of a segment, and h_s up to the new steps."""
        (recent, older), T = memory, self.segment_length
        h, kv = extended(segment, x, self.k, self.v)
        joined = all_keys_and_values([older, recent], (h, kv), self.k, self.v)
        q, k, v = (y.unflatten(-1, (self.n_heads, -1)) for y in (self.q(x), *joined))
        visible = sight.of(torch.cat([older.alive, recent.alive], 1), x.shape[1])
        a = distance_attention(q, k, v, visible, self.distance, self.biases, dropout=self.active_dropout)
        trains = self.taps is not None and self.training and torch.is_grad_enabled()
        if trains and self.loss_weight and h.shape[1] == T:
            # the last step sees the steps of the row's sequence, and the memory unless it was emptied
            alive = visible[:, -1, self.compressed_length :]
            old = PastSteps.of(torch.cat([recent.h, h], 1)[:, :T], alive[:, :T])
            f, projections = partial(compressed, self.f, self.taps), (self.q, self.k, self.v)
            loss = reconstruction_loss(f, h, old, alive[:, -T:], projections, self.n_heads)
            a = with_loss(a, self.loss_weight * loss)
        return a.flatten(-2), (h, kv)

    def write(self, memory: Memories, segment: Steps, alive: Tensor) -> Memories:
        """Return m_{s+1} and c_{s+1}."""
        old, recent = memory.recent.evicting(PastSteps(segment[0], alive, segment[1]))
        c = compressed(self.f, self.taps, old, lambda: self.usage(memory, segment[0], alive))
        return Memories(recent, memory.compressed.then(c.keyed(self.k, self.v)))

    def usage(self, memory: Memories, h: Tensor, alive: Tensor) -> Tensor:
        """Return the attention that a segment pays to each step that leaves the memory, summed over steps.

        Args:
            memory: the memory before the segment.
            h: inputs of the segment (b, t, d).
            alive: which of them are of the row's current sequence (b, t).
        """
        (recent, compressed), time, first = memory, h.shape[1], self.compressed_length
        # a step from before a reset sees itself, which is not counted: a softmax needs a key
        own = torch.eye(time, dtype=torch.bool, device=h.device)
        before = torch.cat([compressed.alive, recent.alive], 1)
        visible = Sight(None, (alive[:, None] | own).tril()).of(before, time)
        with torch.no_grad(), without_autocast(h.device.type):
            y = self.q(h), self.k(torch.cat([compressed.h, recent.h, h], 1))
            q, k = (part.unflatten(-1, (self.n_heads, -1)).to(self.state_dtype) for part in y)
            return attention_received(slice(first, first + time), q, k, visible, self.distance, self.biases)

    def start(self, batch: int, device: torch.device | str | None) -> tuple[Memories, Steps]:
        """Return empty memories, in the dtype of the weights, and no inputs."""
        lengths, like = (self.memory_length, self.compressed_length), input_kwargs(self.q, device)
        memory = Memories(*(PastSteps.empty(batch, length, self.d_model, **like) for length in lengths))
        return memory, memory.recent.no_steps
