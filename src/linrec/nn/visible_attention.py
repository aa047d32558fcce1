"""Softmax attention to keys that a mask selects, with Transformer-XL's scores, or to another sequence."""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from linrec.nn.head_sizes import split_width
from linrec.nn.parameters import mark, tensor_options
from linrec.nn.projections import matrix, projected
from linrec.ops.attention.torch import Softmax, aligned, softmax
from linrec.ops.core.call import zeros_of

__all__ = [
    "CrossAttention",
    "DistanceScores",
    "QueryBiases",
    "attention_received",
    "distance_attention",
    "fitting",
    "padded",
    "sinusoids",
    "visible_attention",
]

# of `CrossAttention`
CHANNELS_PER_HEAD = 64


def alignment(x: Tensor) -> int:
    """Return the number that must divide channels and keys for torch's fused kernels with a mask.

    With another number of channels torch stores all scores in float32, and with another number of keys it
    copies the mask.
    """
    return 8 if x.device.type == "cuda" else 1


def fitting(size: int, x: Tensor) -> int:
    """Return a number of channels or keys, rounded up for torch's fused kernels on the device of x."""
    multiple = alignment(x)
    return -(-size // multiple) * multiple


def padded(x: Tensor, size: int, axis: int = -1) -> Tensor:
    """Return the tensor with zeros behind it, up to a size of an axis; the tensor itself if it fits."""
    missing = size - x.shape[axis]
    return functional.pad(x, (0, 0) * (-1 - axis) + (0, missing)) if missing else x


def visible_attention(
    q: Float[Tensor, "b t h dk"],
    k: Float[Tensor, "b s h dk"],
    v: Float[Tensor, "b s h dv"],
    visible: Bool[Tensor, "#b t s"] | None = None,
    bias: Float[Tensor, "#b h t n"] | None = None,
    *,
    causal: bool = True,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "b t h dv"]:
    """Attend to visible keys by torch's fused kernels.

        o_n = sum_m softmax_m(scale q_n . k_m + b_nm) v_m

    The kernels get one mask in the dtype of `q`, which is b where a key is visible and -inf elsewhere. On
    CUDA, channels and keys are padded to multiples of 8 for it.

    Args:
        q: queries (b, t, h, dk).
        k: keys (b, s, h, dk).
        v: values (b, s, h, dv).
        visible: whether a query sees a key (b or 1, t, s). A query must see at least one key. None is the
            mask of `causal`.
        bias: b (b or 1, h, t, n), n >= s, or None; columns after s are ignored. With a bias, the mask is a
            tensor (b, h, t, n), which is kept for the backward pass.
        causal: without `visible`, whether a query sees the keys up to its own step, with t = s, or all keys.
        scale: factor on products; None is 1 / sqrt(dk).
        dropout: probability of dropping an attention weight.

    Returns:
        o (b, t, h, dv).
    """
    shape, keys, width = (*q.shape[:3], v.shape[-1]), k.shape[1], v.shape[-1]
    if 0 in shape:
        # on CUDA the kernels return no tensor for empty inputs
        return zeros_of(shape, v.dtype, (q, k, v))
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    mask = None if visible is None else visible[:, None]
    if bias is not None:
        n = fitting(max(keys, bias.shape[-1]), q)
        if mask is None:
            mask = torch.ones(1, 1, q.shape[1], keys, dtype=torch.bool, device=q.device)
            mask = mask.tril() if causal else mask
        mask = torch.where(padded(mask, n), padded(bias.to(q.dtype), n), -torch.inf)
        k, v = padded(k, n, -3), padded(v, n, -3)
    if mask is not None:
        channels = fitting(q.shape[-1], q)
        q, k, v = padded(q, channels), padded(k, channels), padded(v, fitting(width, v))
    if q.device.type == "cuda":
        q, k, v = aligned(q), aligned(k), aligned(v)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    o = softmax(Softmax(q, k, v, mask, causal and mask is None, scale), dropout)
    return o.transpose(1, 2)[..., :width]


class QueryBiases(nn.Module):
    """u and v, added to queries before products with keys and with distances.

    Args:
        n_heads: heads h.
        d_head: channels of a head.
        std: standard deviation when training starts.
    """

    def __init__(self, n_heads: int, d_head: int, *, std: float) -> None:
        super().__init__()
        self.u = nn.Parameter(std * torch.randn(n_heads, d_head))
        self.v = nn.Parameter(std * torch.randn(n_heads, d_head))
        mark(self, group="channel", weight_decay=False)

    def forward(self) -> tuple[Float[Tensor, "h d"], Float[Tensor, "h d"]]:
        """Return u and v."""
        return self.u, self.v


class DistanceScores(nn.Module):
    """b_nm = (q_n + v) . W_R R_{n-m} / sqrt(d_head), of sinusoids R of the distance n - m.

    Args:
        d_model: width of R.
        n_heads: heads h.
        d_head: channels of a head.
        clamp: largest distance; R of larger distances is R of `clamp`. None has no limit.

    Source:
        Dai and others, Transformer-XL (2019), section 3.3 and appendix B.
    """

    def __init__(self, d_model: int, n_heads: int, d_head: int, *, clamp: int | None = None) -> None:
        super().__init__()
        self.d_model, self.d_head, self.clamp = d_model, d_head, clamp
        self.r = nn.Linear(d_model, n_heads * d_head, bias=False)

    def forward(self, q: Float[Tensor, "b t h c"], keys: int) -> Float[Tensor, "b h t n"]:
        """Return the scores of queries q + v with a number of keys, whose last t are of the queries' steps.

        Scores with keys after the query are not defined. On CUDA, the scores have further columns up to a
        multiple of 8, which are not defined either.

        Args:
            q: queries (b, t, h, c), which may have c > d channels; the channels from d on must be zeros.
            keys: the number of keys.
        """
        # one distance more than keys, for the shift
        time, distances = q.shape[1], fitting(keys + 1, q)
        distance = torch.arange(keys, keys - distances, -1, device=q.device).clamp(min=0, max=self.clamp)
        R = sinusoids(distance, self.d_model, tensor_options(self.r)["dtype"]) / math.sqrt(self.d_head)
        if time == 1:
            # for a single query, W_R R of all distances is the larger product
            W = matrix(self.r, self.d_model, q.device).unflatten(0, (-1, self.d_head)).to(q.dtype)
            scores = torch.einsum("bthd,hdc,sc->bhts", q[..., : self.d_head], W, R.to(q.dtype))
        else:
            r = padded(self.r(R).unflatten(-1, (-1, self.d_head)).to(q.dtype), q.shape[-1])
            scores = torch.einsum("bthd,shd->bhts", q, r)
        # row i moves t - i places to the left: rows of one score less begin behind the first t scores
        _, shifted = scores.flatten(-2).split([time, time * (distances - 1)], -1)
        return padded(shifted.unflatten(-1, (time, distances - 1)), fitting(distances - 1, q))


def distance_attention(
    q: Float[Tensor, "b t h d"],
    k: Float[Tensor, "b s h d"],
    v: Float[Tensor, "b s h d"],
    visible: Bool[Tensor, "b t s"],
    distance: DistanceScores,
    biases: QueryBiases,
    *,
    dropout: float = 0.0,
) -> Float[Tensor, "b t h d"]:
    """Attend to visible keys by their contents and distances; the last t keys are of the queries' steps.

        A_ij = (q_i + u) . k_j + (q_i + v) . W_R R_{i-j}

    The second product is a tensor (b, h, t, s), which torch's fused attention adds to the first.

    Args:
        q: queries (b, t, h, d).
        k: keys (b, s, h, d).
        v: values (b, s, h, d).
        visible: whether a query sees a key (b, t, s); a query must see its own.
        distance: W_R and R.
        biases: u and v of the equation.
        dropout: probability of dropping an attention weight.
    """
    scale, channels = 1 / math.sqrt(q.shape[-1]), fitting(q.shape[-1], q)
    # once for both products
    q, u, bias = (padded(x.to(q.dtype), channels) for x in (q, *biases()))
    scores = distance(q + bias, k.shape[1])
    return visible_attention(q + u, k, v, visible, scores, scale=scale, dropout=dropout)


def attention_received(
    keys: slice,
    q: Float[Tensor, "b t h d"],
    k: Float[Tensor, "b s h d"],
    visible: Bool[Tensor, "b t s"],
    distance: DistanceScores,
    biases: QueryBiases,
) -> Float[Tensor, "b n"]:
    """Return the weights of `distance_attention` to n keys, summed over queries, on average over heads.

    Args:
        keys: the n keys, a part of all s. The other arguments are those of `distance_attention`.
    """
    # values that make the output the weights
    one_hot = torch.eye(k.shape[1], dtype=k.dtype, device=k.device)[:, keys]
    values = one_hot[None, :, None].expand(k.shape[0], -1, k.shape[2], -1)
    return distance_attention(q, k, values, visible, distance, biases).mean(2).sum(1)


def sinusoids(positions: Tensor, width: int, dtype: torch.dtype) -> Float[Tensor, "t width"]:
    """Return the sines, then the cosines, of positions (t,) times 10000^(-2i / width)."""
    wide = torch.promote_types(dtype, torch.float32)
    frequency = 10_000 ** -(torch.arange(0, width, 2, dtype=wide, device=positions.device) / width)
    angle = positions.to(wide)[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], -1)[:, :width].to(dtype)


class CrossAttention(nn.Module):
    """o = softmax(q k^T / (tau sqrt(d_head))) v W^O, with q of one sequence, and k and v of another.

    The projections have biases. There are no positions.

    Args:
        d_model: width of the sequence of the queries, and of the output.
        n_heads: heads. None is the largest number that divides `d_model` and leaves at least 64 channels to
            each head, or 1.
        temperature: tau.
        d_other: width of the sequence of the keys and values; None is `d_model`.

    Source:
        Vaswani and others, Attention Is All You Need (2017), section 3.2.
    """

    of_one_input = "k", "v"

    def __init__(
        self,
        d_model: int,
        n_heads: int | None = None,
        *,
        temperature: float = 1.0,
        d_other: int | None = None,
    ) -> None:
        super().__init__()
        d_other = d_model if d_other is None else d_other
        self.heads = split_width("d_model", d_model, n_heads, least=CHANNELS_PER_HEAD)
        self.temperature = temperature
        self.q = nn.Linear(d_model, d_model)
        self.k = nn.Linear(d_other, d_model)
        self.v = nn.Linear(d_other, d_model)
        self.out = nn.Linear(d_model, d_model)

    def forward(
        self,
        x: Float[Tensor, "b t d_model"],
        other: Float[Tensor, "b s d_other"],
        visible: Bool[Tensor, "#b t s"] | None = None,
    ) -> Float[Tensor, "b t d_model"]:
        """Return o.

        Args:
            x: the sequence of the queries.
            other: the sequence of the keys and values.
            visible: whether a query sees a key; each query must see at least one key. None is all.
        """
        return self.attend(x, *self.keys(other), visible)

    def keys(
        self, other: Float[Tensor, "b s d_other"]
    ) -> tuple[Float[Tensor, "b s h d"], Float[Tensor, "b s h d"]]:
        """Return the keys and values of a sequence, for several calls of `attend`."""
        k, v = (y.unflatten(-1, self.heads) for y in projected(other, self.k, self.v))
        return k, v

    def attend(
        self,
        x: Float[Tensor, "b t d_model"],
        k: Float[Tensor, "b s h d"],
        v: Float[Tensor, "b s h d"],
        visible: Bool[Tensor, "#b #t s"] | None = None,
    ) -> Float[Tensor, "b t d_model"]:
        """Return o from the keys and values of `keys`; `visible` as in `forward`."""
        q = (self.q(x) / self.temperature).unflatten(-1, self.heads)
        o = visible_attention(q, k.to(q.dtype), v.to(q.dtype), visible, causal=False)
        return self.out(o.flatten(-2))
