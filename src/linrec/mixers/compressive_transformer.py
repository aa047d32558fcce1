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

from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from linrec.nn.added_loss import with_loss
from linrec.nn.distance_scores import DistanceScores, QueryBiases, distance_attention
from linrec.nn.head_sizes import heads_of, most_heads
from linrec.nn.mixer import State
from linrec.nn.past_steps import PastSteps, all_keys_and_values, keys_and_values
from linrec.nn.projections import draw
from linrec.nn.segment_mixer import SegmentMixer
from linrec.nn.segments import Detach, Sight, check_detach
from linrec.nn.visible_attention import visible_attention
from linrec.ops.attention import check_options
from linrec.ops.core.precision import without_autocast
from linrec.rules import at_least, choice, divisor, positive

__all__ = ["CompressiveTransformer", "Memories"]

Compression = Literal["conv", "dilated", "mean", "max", "most_used"]

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
        super().__init__(d_model)
        choice(Compression, compression=compression)
        check_options(None, dropout)
        check_detach(detach)
        at_least(1, segment_length=segment_length, dilation=dilation)
        at_least(0, memory_length=memory_length, compressed_length=compressed_length, or_none=True)
        divisor("segment_length", segment_length, compression_rate=compression_rate)
        at_least(0, loss_weight=loss_weight)
        positive(init_std=init_std)
        self.n_heads = most_heads(d_model, CHANNELS_PER_HEAD) if n_heads is None else n_heads
        d_head = heads_of("d_model", d_model, self.n_heads)
        self.segment_length, self.rate, self.compression = segment_length, compression_rate, compression
        self.dilation = dilation if compression == "dilated" else 1
        self.memory_length = segment_length if memory_length is None else memory_length
        compressed = max(1, self.memory_length // self.rate)
        self.compressed_length = compressed if compressed_length is None else compressed_length
        self.loss_weight, self.detach, self.dropout = loss_weight, detach, dropout

        self.q = nn.Linear(d_model, d_model, bias=False)
        self.k = nn.Linear(d_model, d_model, bias=False)
        self.v = nn.Linear(d_model, d_model, bias=False)
        self.distance = DistanceScores(d_model, self.n_heads, d_head)
        self.biases = QueryBiases(self.n_heads, d_head, std=init_std)
        self.f: nn.Linear | None = None
        if compression in ("conv", "dilated"):
            # a convolution whose width is its stride: r steps side by side, times a matrix
            self.f = nn.Linear(self.rate * d_model, d_model)
        self.out = nn.Linear(d_model, d_model, bias=False)
        draw(self, nn.init.normal_, std=init_std)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return o, and a `SegmentState` of `Memories`, and h_s and its `keys_and_values`."""
        a, state = self.by_segments(x, state, reset)
        return self.out(a), state

    def prepare(self, memory: Memories) -> Memories:
        """Return m_s and c_s with their keys and values, if no gradients are recorded."""
        return Memories(*(steps.keyed(self.k, self.v) for steps in memory))

    def read(
        self, x: Tensor, memory: Memories, segment: tuple[Tensor, Tensor], sight: Sight
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return a, with the gradient of the loss at the end of a segment, and h_s up to the new steps."""
        h = torch.cat([segment[0], x.to(segment[0].dtype)], 1)
        steps, (recent, compressed) = (h, keys_and_values(h, segment[1], self.k, self.v)), memory
        parts = [(compressed.h, compressed.kv), (recent.h, recent.kv), steps]
        q, k, v = (
            y.unflatten(-1, (self.n_heads, -1))
            for y in (self.q(x), *all_keys_and_values(parts, self.k, self.v))
        )
        visible = sight.of(torch.cat([compressed.alive, recent.alive], 1), x.shape[1])
        dropout = self.dropout if self.training else 0.0
        a = distance_attention(q, k, v, visible, self.distance, self.biases, dropout=dropout).flatten(-2)
        trains = self.f is not None and self.training and torch.is_grad_enabled()
        if trains and self.loss_weight and h.shape[1] == self.segment_length:
            # the last step sees the steps of the row's sequence, and the memory unless it was emptied
            alive = visible[:, -1, -self.segment_length :]
            if sight.memory is not None:
                recent = recent._replace(alive=recent.alive & sight.memory[:, -1:])
            old, _ = recent.evicting(PastSteps.of(h, alive))
            a = with_loss(a, self.loss_weight * self.reconstruction_loss(h, old, alive))
        return a, steps

    def write(self, memory: Memories, segment: tuple[Tensor, Tensor], alive: Tensor) -> Memories:
        """Return m_{s+1} and c_{s+1}."""
        h, kv = segment
        old, recent = memory.recent.evicting(PastSteps(h, alive, kv))
        if self.compression == "most_used":
            c = self.most_used(old, self.usage(memory, h, alive))
        else:
            kept = old.alive.unflatten(1, (-1, self.rate)).any(-1)
            c = PastSteps.of(self.compressed(old.h), kept).keyed(self.k, self.v)
        return Memories(recent, memory.compressed.then(c))

    def compressed(self, old: Float[Tensor, "b t d"]) -> Float[Tensor, "b n d"]:
        """Return f(old): a vector for each r steps, unless f is "most_used"."""
        span = (self.rate - 1) * (self.dilation - 1)
        steps = functional.pad(old, (0, 0, span, 0)).unfold(1, self.rate + span, self.rate)
        steps = steps[..., :: self.dilation].mT
        if self.f is not None:
            return self.f(steps.flatten(2)).to(old.dtype)
        return steps.mean(2) if self.compression == "mean" else steps.amax(2)

    def most_used(self, old: PastSteps, usage: Float[Tensor, "b t"]) -> PastSteps:
        """Return one of each r old steps, the steps of the largest usage, in their order."""
        # steps from before a reset come last
        usage = usage.masked_fill(~old.alive, -1)
        place = usage.topk(usage.shape[1] // self.rate, 1).indices.sort(1).values
        rows = torch.arange(len(place), device=place.device)[:, None]
        return PastSteps(*(part[rows, place] for part in old))

    def usage(
        self, memory: Memories, h: Float[Tensor, "b t d"], alive: Bool[Tensor, "b t"]
    ) -> Float[Tensor, "b t"]:
        """Return the attention that a segment pays to each step that leaves the memory, summed over steps.

        Args:
            memory: the memory before the segment.
            h: inputs of the segment.
            alive: which of them are of the row's current sequence.
        """
        recent, compressed = memory
        time, dtype = h.shape[1], self.state_dtype
        joined = torch.cat([compressed.h, recent.h, h], 1)
        with torch.no_grad(), without_autocast(h.device.type):
            q, k = (y.unflatten(-1, (self.n_heads, -1)).to(dtype) for y in (self.q(h), self.k(joined)))
            # values that make the output the weights of the oldest steps
            oldest = slice(self.compressed_length, self.compressed_length + time)
            one_hot = torch.eye(k.shape[1], dtype=dtype, device=h.device)[:, oldest]
            values = one_hot[None, :, None].expand(len(h), -1, self.n_heads, -1)
            # a step from before a reset sees itself, which is not counted: a softmax needs a key
            own = torch.eye(time, dtype=torch.bool, device=h.device)
            seen = (alive[:, None] | own).tril()
            before = torch.cat([compressed.alive, recent.alive], 1)[:, None].expand(-1, time, -1)
            visible = torch.cat([before, seen], -1)
            weights = distance_attention(q, k, values, visible, self.distance, self.biases)
        return weights.mean(2).sum(1)

    def reconstruction_loss(
        self, h: Float[Tensor, "b t d"], old: PastSteps, rows: Bool[Tensor, "b t"]
    ) -> Float[Tensor, ""]:
        """Return the mean of |attn(h, old) - attn(h, f(old))|^2 over the `rows` of h that have an old step.

        Its gradient is of f alone.
        """
        steps_before = old.h.detach().masked_fill(~old.alive[..., None], 0)
        c = self.compressed(steps_before)
        q, k, v = (linear.weight.detach() for linear in (self.q, self.k, self.v))

        def attn(steps: Tensor, alive: Tensor) -> Tensor:
            # a row without old steps does not count, but a softmax needs a key
            visible = (alive | ~alive.any(1, keepdim=True))[:, None].expand(-1, h.shape[1], -1)
            parts = ((h.detach(), q), (steps, k), (steps, v))
            Q, K, V = (functional.linear(x, w).unflatten(-1, (self.n_heads, -1)) for x, w in parts)
            return visible_attention(Q, K, V, visible).flatten(-2)

        kept = old.alive.unflatten(1, (-1, self.rate)).any(-1)
        error = (attn(steps_before, old.alive) - attn(c, kept)).square().mean(-1)
        counted = rows & old.alive.any(1, keepdim=True)
        return torch.where(counted, error, 0).sum() / counted.sum().clamp(min=1)

    @property
    def state_size(self) -> int:
        """Elements of the memories and of an unfinished segment of `segment_length` - 1 steps.

        Keys and values, which the state holds in inference, are not counted.
        """
        vectors = self.memory_length + self.compressed_length + self.segment_length - 1
        return (self.d_model + 1) * vectors + 1

    def start(self, batch: int, device: torch.device | str | None) -> tuple[Memories, tuple[Tensor, Tensor]]:
        """Return empty memories, in the dtype of the weights, and no inputs."""
        like = {"dtype": self.q.weight.dtype, "device": self.q.weight.device if device is None else device}
        lengths = self.memory_length, self.compressed_length
        memory = Memories(*(PastSteps.empty(batch, length, self.d_model, **like) for length in lengths))
        return memory, (memory.recent.h[:, :0], memory.recent.kv[:, :0])
