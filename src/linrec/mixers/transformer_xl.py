"""Transformer-XL (Dai and others, 2019): attention to a memory of the segments before, relative positions.

    h~_s = [SG(m_s) | h_s]
    q_s = h_s W_q     k_s = h~_s W_k,E     v_s = h~_s W_v
    A_ij = q_i . k_j + q_i . W_k,R R_{i-j} + u . k_j + v . W_k,R R_{i-j}
    a_s = Masked-Softmax(A / sqrt(d_head)) v_s
    o_s = a_s W_o
    m_{s+1} = the last M steps of [m_s | h_s]

h_s are the inputs of the layer in segment s, m_s is its memory, M the memory's length, SG stops gradients,
and | joins steps. q are queries, k keys, v_s values, u and v biases of queries, A scores, R_i a sinusoid of
the distance i, a the heads, and o the output.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from linrec.nn.head_sizes import split_width
from linrec.nn.mixer import State
from linrec.nn.norms import Norm, make_norm
from linrec.nn.positions import BucketBias
from linrec.nn.projections import draw, input_kwargs
from linrec.nn.rotary import Rotary
from linrec.nn.segment_mixer import PastSteps, SegmentMixer, Steps, all_keys_and_values, extended
from linrec.nn.segments import Detach, Sight
from linrec.nn.visible_attention import DistanceScores, QueryBiases, distance_attention, visible_attention
from linrec.rules import at_least, positive, require

__all__ = ["TransformerXL"]

Positions = Literal["relative", "rotary", "t5"]

# of the paper's largest model, d_model = 1024 and 16 heads
CHANNELS_PER_HEAD = 64


class TransformerXL(SegmentMixer):
    """a = Masked-Softmax(A / sqrt(d_head)) [SG(m) | h] W_v: steps see their segment and a memory before it.

    The memory of a layer holds the layer's inputs of the last M steps before the segment, without gradients.
    A call computes the keys and values of the memory again, so that W_k and W_v get gradients from the memory
    too, and a state is right for any weights. After `eval()`, without gradients, the state holds keys and
    values too, 2 `n_heads` `d_head` elements a step, and a call computes those of its own steps alone: such a
    state is of the weights that made it. A step sees up to M + T - 1 earlier steps, and L layers reach L M
    steps back.

    | model of the paper | arguments |
    |---|---|
    | WikiText-103, base | `segment_length=150, memory_length=150`; evaluated with 64 and 640, `clamp=400` |
    | enwik8, 12 layers | `segment_length=512, memory_length=512`; evaluated with 80 and 2100, `clamp=820` |
    | enwik8, 24 layers | `segment_length=768, memory_length=768`; evaluated with 128 and 3800, `clamp=1000` |
    | without recurrence | `memory_length=0` |

    Lengths and `clamp` do not change the parameters: evaluate in a model made with other lengths. The paper's
    model has `norm_position="post"`. Its layers share u and v, as the mixers of a model here do unless
    `untie_biases`. The layers do not share W_k,R.

    In a pre-norm block the memory holds steps after the norm of the block, which gets no gradients from the
    memory. With `norm="layer"` the norm is the mixer's own: the memory holds steps before the norm, and the
    norm gets gradients from the memory too. That is the released pre-norm model (`pre_lnorm`). Outputs of
    both are equal while weights are constant.

    When training starts, weights, u and v are normal with a standard deviation of 0.02, as in the released
    code.

    | positions | A_ij / sqrt(d_head) | argument |
    |---|---|---|
    | the paper's | as above | `positions="relative"` |
    | rotary (Su and others, 2021) | q'_i . k'_j / sqrt(d_head), turned by i and by j | `positions="rotary"` |
    | T5's (Raffel and others, 2020) | q_i . k_j / sqrt(d_head) + w_bucket(i - j) | `positions="t5"` |

    With rotary and T5's positions there are no u, v and W_k,R. T5's w are of each layer.

    In the released code's training, the memory passes from batch to batch: `linrec train lm
    --loop.carry-state`. Without it, each sequence begins with an empty memory.

    Args:
        d_model: width of the sequence.
        n_heads: heads. None is the largest number that divides `d_model` and leaves at least 64 channels to
            each head, or 1.
        d_head: channels of a head. None is `d_model` / `n_heads`.
        segment_length: T, the steps of a segment.
        memory_length: M, the steps of the memory; None is `segment_length`.
        same_length: whether every step sees the same number of steps, M with its own. Without it, later steps
            of a segment see more.
        positions: "relative", "rotary" or "t5".
        clamp: the largest distance in R; None has no limit.
        untie_biases: whether each layer of a model has its own u and v.
        detach: where gradients through the memory stop: "segment", the paper's, at every boundary; "never";
            or a number n, at every n-th boundary.
        norm: "layer" or "rms" normalises steps and memory before W_q and W_k,E. A "pre" block then leaves out
            its own norm before the mixer.
        dropout: probability that an attention weight is dropped, in training alone.
        init_std: the standard deviation above.

    Raises:
        ValueError: `n_heads` that does not divide `d_model`, `same_length` without a memory, `clamp` or
            `untie_biases` without "relative", an unknown name, or a number out of range.

    Source:
        Dai, Yang, Yang, Carbonell, Le and Salakhutdinov, Transformer-XL: Attentive Language Models Beyond a
        Fixed-Length Context (2019), sections 3.2 and 3.3. `same_length`, `clamp`, ties and initial values are
        the released code's. Other positions are neither in the paper nor in its code.

    Example:
        >>> mixer = TransformerXL(64, n_heads=4, segment_length=8)
        >>> y, state = mixer(torch.zeros(2, 20, 64))
        >>> y.shape, state.memory.h.shape, state.segment[0].shape
        (torch.Size([2, 20, 64]), torch.Size([2, 8, 64]), torch.Size([2, 4, 64]))
    """

    of_one_input = "k", "v"

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int | None = None,
        d_head: int | None = None,
        segment_length: int = 512,
        memory_length: int | None = None,
        same_length: bool = False,
        positions: Positions = "relative",
        clamp: int | None = None,
        untie_biases: bool = False,
        detach: Detach = "segment",
        norm: Norm = "none",
        dropout: float = 0.0,
        init_std: float = 0.02,
    ) -> None:
        super().__init__(d_model, segment_length=segment_length, detach=detach, dropout=dropout)
        at_least(0, memory_length=memory_length, or_none=True)
        at_least(0, clamp=clamp, or_none=True)
        positive(init_std=init_std)
        require(
            positions == "relative" or (clamp is None and not untie_biases),
            f'`clamp` and `untie_biases` are of positions="relative"; got positions={positions!r}.',
        )
        self.memory_length = segment_length if memory_length is None else memory_length
        require(
            self.memory_length > 0 or not same_length,
            "`same_length` needs a `memory_length` of at least 1; got 0. Each step sees that many steps.",
        )
        self.n_heads, self.d_head = split_width("d_model", d_model, n_heads, d_head, least=CHANNELS_PER_HEAD)
        self.same_length, self.untie_biases = same_length, untie_biases
        self.norm, self.own_norm = make_norm(norm, d_model), norm != "none"

        width = self.n_heads * self.d_head
        self.q = nn.Linear(d_model, width, bias=False)
        self.k = nn.Linear(d_model, width, bias=False)
        self.v = nn.Linear(d_model, width, bias=False)
        self.distance: DistanceScores | None = None
        self.biases: QueryBiases | None = None
        if positions == "relative":
            self.distance = DistanceScores(d_model, self.n_heads, self.d_head, clamp=clamp)
            self.biases = QueryBiases(self.n_heads, self.d_head, std=init_std)
        self.rotary = Rotary(self.d_head) if positions == "rotary" else None
        self.bias = BucketBias(self.n_heads) if positions == "t5" else None
        self.out = nn.Linear(width, d_model, bias=False)
        draw(self, nn.init.normal_, std=init_std)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return o, and a `SegmentState` of `PastSteps`, and h_s and its `keys_and_values`."""
        a, state = self.by_segments(x, state, reset)
        return self.out(a), state

    def prepare(self, memory: PastSteps) -> PastSteps:
        """Return m_s with its keys and values, if no gradients are recorded."""
        return memory.keyed(self.k, self.v, self.norm)

    def read(self, x: Tensor, memory: PastSteps, segment: Steps, sight: Sight) -> tuple[Tensor, Steps]:
        """Return a, and h_s up to the new steps with its `keys_and_values`."""
        steps = extended(segment, x, self.k, self.v, self.norm)
        joined = all_keys_and_values([memory], steps, self.k, self.v, self.norm)
        q = self.q(self.norm(x).to(x.dtype))
        q, k, v = (y.unflatten(-1, (self.n_heads, self.d_head)) for y in (q, *joined))
        window = self.memory_length if self.same_length else None
        visible = sight.of(memory.alive, x.shape[1], window=window)
        dropout = self.active_dropout
        if self.distance is not None and self.biases is not None:
            a = distance_attention(q, k, v, visible, self.distance, self.biases, dropout=dropout)
            return a.flatten(-2), steps
        if self.rotary is not None:
            # the memory begins at position 0, for products depend on differences alone
            position = torch.arange(k.shape[1], device=x.device)[None]
            (q,), (k,) = self.rotary(position[:, k.shape[1] - x.shape[1] :], q), self.rotary(position, k)
        bias = None if self.bias is None else self.bias(*visible.shape[1:])
        a = visible_attention(q, k, v, visible, bias, dropout=dropout)
        return a.flatten(-2), steps

    def write(self, memory: PastSteps, segment: Steps, alive: Tensor) -> PastSteps:
        """Return m_{s+1}."""
        h, kv = segment
        return memory.then(PastSteps(h, alive, kv))

    @classmethod
    def share(cls, layers: "Sequence[TransformerXL]") -> None:
        """Give all layers the u and v of the first layer, if there are any, unless `untie_biases`."""
        for layer in layers:
            if not layer.untie_biases:
                layer.biases = layers[0].biases

    def start(self, batch: int, device: torch.device | str | None) -> tuple[PastSteps, Steps]:
        """Return an empty memory, in the dtype of the weights, and no inputs."""
        memory = PastSteps.empty(batch, self.memory_length, self.d_model, **input_kwargs(self.q, device))
        return memory, memory.no_steps
