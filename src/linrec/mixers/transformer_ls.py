"""Transformer-LS: Long-Short Transformer (Zhu and others, 2021), causal: a window and compressed chunks.

    P = softmax over the l steps of a chunk of x W_p + b_p                         r weights of a head
    K~, V~ = LN_D(P^T (x W_k)), LN_D(P^T (x W_v))                                  r rows of a chunk
    window:  s_ij = (q_i + u) . LN_W(k_j) + (q_i + v) . W_r R_{i-j}                the last w steps
    long:    s_ic = q_i . k~_c + q_i . (W_c R_{n_i - c} + b_c)                     rows before the own chunk
    y_i = [softmax over both of s_i] [LN_W(V) | V~] W_o

x input, q = x W_q / sqrt(d_head), k = x W_k, u and v biases, R_n a sinusoid of the distance n, n_i the last
row before the chunk of step i. LN_D and LN_W (DualLN) normalise keys and values over all heads.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from linrec.nn.head_sizes import split_width
from linrec.nn.mixer import State
from linrec.nn.norms import LayerNorm
from linrec.nn.parameters import tensor_options
from linrec.nn.projections import draw, output_kwargs
from linrec.nn.segment_mixer import SegmentMixer, Steps, joined, last_steps
from linrec.nn.segments import Detach, Sight
from linrec.nn.visible_attention import DistanceScores, QueryBiases, sinusoids, visible_attention
from linrec.rules import at_least

__all__ = ["TransformerLS", "TransformerLSMemory"]

CHANNELS_PER_HEAD = 64


class TransformerLSMemory(NamedTuple):
    """The steps and rows of earlier chunks that a chunk of a `TransformerLS` sees, oldest first.

    Attributes:
        window: LN_W of keys, then values, of the last w - 1 steps (b, w - 1, 2 d_model).
        window_alive: whether a step is of the row's current sequence (b, w - 1).
        rows: K~, then V~, of the last chunks (b, chunks r, 2 d_model).
        rows_alive: whether a row is of the row's current sequence (b, chunks r).
    """

    window: Float[Tensor, "b w d"]
    window_alive: Bool[Tensor, "b w"]
    rows: Float[Tensor, "b c d"]
    rows_alive: Bool[Tensor, "b c"]


class TransformerLS(SegmentMixer):
    """Attend by one softmax to the steps of a window and to rows that compress the chunks before them.

    The state does not grow: keys and values of a window, r rows for each of the last `n_chunks` chunks, and
    the steps of an unfinished chunk. A step in the window may be in a compressed chunk too. Chunks begin at
    the multiples of `segment_length` of the stream; after a reset, the rest of a chunk is compressed alone. A
    call runs the chunks one after another.

    The released code compresses a cache of inputs before W_k and W_v, each head its part of the channels, and
    the present after W_k and W_v. Here all chunks are compressed as the present is, so that the length of a
    call does not change the outputs. With a single head the two are the same.

    | model | arguments |
    |---|---|
    | the paper's, enwik8 | `segment_length=16, rank=1, window=512, n_chunks=256` of width 512, 8 heads |
    | HGRN's baseline | `segment_length=32, rank=1, window=64, bias=True` |

    Args:
        d_model: width of the sequence.
        n_heads: heads. None is the largest number that divides `d_model` and leaves at least 64 channels to
            each head, or 1.
        segment_length: l, steps of a chunk.
        rank: r, rows of a chunk.
        window: w, steps that a step sees by themselves, its own included.
        n_chunks: compressed chunks that a step sees.
        bias: whether W_q, W_k, W_v and W_o have biases.
        detach: where gradients through the memory stop, as in `TransformerXL`; "never" is the paper's within
            a sequence of training.
        dropout: probability that an attention weight is dropped, in training alone.

    Raises:
        ValueError: `n_heads` that does not divide `d_model`, or a number out of range.

    Source:
        Long-Short Transformer (Zhu, Ping, Xiao, Shoeybi, Goldstein, Anandkumar and Catanzaro, 2021), sections
        3.2 to 3.4; distances, u, v and initial values are the released code's.

    Example:
        >>> mixer = TransformerLS(64, segment_length=4, window=6, n_chunks=5)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.memory.rows.shape, state.segment[0].shape
        (torch.Size([2, 10, 64]), torch.Size([2, 5, 128]), torch.Size([2, 2, 128]))
    """

    of_one_input = "q", "k", "v"

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int | None = None,
        segment_length: int = 16,
        rank: int = 1,
        window: int = 64,
        n_chunks: int = 64,
        bias: bool = False,
        detach: Detach = "never",
        dropout: float = 0.0,
    ) -> None:
        super().__init__(d_model, segment_length=segment_length, detach=detach, dropout=dropout)
        at_least(1, rank=rank, window=window, n_chunks=n_chunks)
        self.heads = h, d = split_width("d_model", d_model, n_heads, least=CHANNELS_PER_HEAD)
        self.rank, self.window, self.n_chunks = rank, window, n_chunks
        self.q, self.k, self.v, self.out = (nn.Linear(d_model, d_model, bias=bias) for _ in range(4))
        draw([self.q, self.k, self.v, self.out], nn.init.xavier_normal_)
        self.p = nn.Linear(d_model, h * rank)
        self.window_norm, self.rows_norm = LayerNorm(d_model), LayerNorm(d_model)
        self.distance = DistanceScores(d_model, h, d)
        self.row_distance = nn.Linear(d_model, d_model)
        self.biases = QueryBiases(h, d, std=0.0)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return y, and a `SegmentState` of a `TransformerLSMemory`, and of a chunk [k | v] and x W_p."""
        heads, state = self.by_segments(x, state, reset)
        return self.out(heads), state

    def read(
        self, x: Tensor, memory: TransformerLSMemory, segment: Steps, sight: Sight
    ) -> tuple[Tensor, Steps]:
        """Return the heads, and [k | v] and x W_p of the chunk with the new steps."""
        q = self.q(x).unflatten(-1, self.heads) * self.heads[1] ** -0.5
        kv = torch.cat([segment[0], torch.cat([self.k(x), self.v(x)], -1).to(segment[0].dtype)], 1)
        p = torch.cat([segment[1], self.p(x).to(segment[1].dtype)], 1)
        near = joined(memory.window, self._normed(self.window_norm, kv))
        k, v = (
            y.unflatten(-1, self.heads).to(q.dtype) for y in torch.cat([memory.rows, near], 1).chunk(2, -1)
        )
        rows, keys = memory.rows.shape[1], near.shape[1]
        u, w = (bias.to(q.dtype) for bias in self.biases())
        distance = torch.arange(rows - 1, -1, -1, device=x.device)
        r = self.row_distance(sinusoids(distance, self.d_model, tensor_options(self.row_distance)["dtype"]))
        of_rows = torch.einsum("bthd,chd->bhtc", q, r.unflatten(-1, self.heads).to(q.dtype))
        # `distance` divides by sqrt(d_head), as q is already divided
        of_steps = self.distance((q + w) * self.heads[1] ** 0.5, keys)[..., :keys]
        of_steps = of_steps + torch.einsum("hd,bshd->bhs", u, k[:, rows:])[:, :, None]
        visible = torch.cat(
            [
                sight.of_memory(memory.rows_alive, x.shape[1]),
                sight.of(memory.window_alive, x.shape[1], window=self.window),
            ],
            -1,
        )
        bias = torch.cat([of_rows, of_steps], -1)
        heads = visible_attention(q, k, v, visible, bias, scale=1.0, dropout=self.active_dropout)
        return heads.flatten(-2), (kv, p)

    def write(self, memory: TransformerLSMemory, segment: Steps, alive: Tensor) -> TransformerLSMemory:
        """Return the memory with the chunk: its steps in the window, and its rows."""
        kv, p = segment
        h = self.heads[0]
        p = p.masked_fill(~alive[..., None], -torch.inf).softmax(1).unflatten(-1, (h, self.rank))
        rows = torch.einsum("blhr,blzhd->brzhd", p, kv.unflatten(-1, (2, *self.heads))).flatten(2)
        return TransformerLSMemory(
            last_steps(memory.window, self._normed(self.window_norm, kv)),
            last_steps(memory.window_alive, alive),
            last_steps(memory.rows, self._normed(self.rows_norm, rows)),
            last_steps(memory.rows_alive, alive.any(1, keepdim=True).expand(-1, self.rank)),
        )

    def _normed(self, norm: nn.Module, kv: Tensor) -> Tensor:
        """Return the norm of keys and of values, side by side."""
        return norm(kv.unflatten(-1, (2, -1))).flatten(-2).to(kv.dtype)

    def start(self, batch: int, device: torch.device | str | None) -> tuple[TransformerLSMemory, Steps]:
        """Return an empty memory, and no steps, in the dtype of keys."""
        factory = output_kwargs(self.k, device)

        def zeros(steps: int, width: int) -> Tensor:
            return torch.zeros(batch, steps, width, **factory)

        window = zeros(self.window - 1, 2 * self.d_model)
        rows = zeros(self.n_chunks * self.rank, 2 * self.d_model)
        alive = (torch.zeros(y.shape[:2], dtype=torch.bool, device=y.device) for y in (window, rows))
        memory = TransformerLSMemory(window, next(alive), rows, next(alive))
        return memory, (zeros(0, 2 * self.d_model), zeros(0, self.heads[0] * self.rank))
