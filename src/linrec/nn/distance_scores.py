"""Transformer-XL's scores of the distance between a query and a key."""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from linrec.nn.float32 import tensor_options
from linrec.nn.parameters import mark
from linrec.nn.projections import matrix
from linrec.nn.visible_attention import fitting, padded, visible_attention

__all__ = ["DistanceScores", "QueryBiases", "attention_received", "distance_attention", "sinusoids"]


class QueryBiases(nn.Module):
    """u and v, added to queries before products with keys and with distances.

    Args:
        n_heads: heads h.
        d_head: channels of a head.
        std: standard deviation when training starts.

    Example:
        >>> QueryBiases(2, 4, std=0.02).u.shape
        torch.Size([2, 4])
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

    Example:
        >>> scores = DistanceScores(6, 2, 4)
        >>> scores(torch.zeros(1, 3, 2, 4), 5).shape
        torch.Size([1, 2, 3, 5])
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

    Example:
        >>> q, visible = torch.zeros(1, 2, 1, 4), torch.ones(1, 2, 2, dtype=torch.bool).tril()
        >>> biases = QueryBiases(1, 4, std=0.0)
        >>> distance_attention(q, q, q + 3, visible, DistanceScores(6, 1, 4), biases).detach()[0, 1, 0]
        tensor([3., 3., 3., 3.])
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
        keys: the n keys, a part of all s.
        q: queries (b, t, h, d).
        k: keys (b, s, h, d).
        visible: whether a query sees a key (b, t, s); a query must see its own.
        distance: W_R and R.
        biases: u and v of the scores.

    Example:
        >>> q, visible = torch.zeros(1, 2, 1, 4), torch.ones(1, 2, 2, dtype=torch.bool).tril()
        >>> biases = QueryBiases(1, 4, std=0.0)
        >>> attention_received(slice(0, 1), q, q, visible, DistanceScores(6, 1, 4), biases).detach()
        tensor([[1.5000]])
    """
    # values that make the output the weights
    one_hot = torch.eye(k.shape[1], dtype=k.dtype, device=k.device)[:, keys]
    values = one_hot[None, :, None].expand(k.shape[0], -1, k.shape[2], -1)
    return distance_attention(q, k, values, visible, distance, biases).mean(2).sum(1)


def sinusoids(positions: Tensor, width: int, dtype: torch.dtype) -> Float[Tensor, "t width"]:
    """Return the sines, then the cosines, of positions (t,) times 10000^(-2i / width).

    Example:
        >>> sinusoids(torch.arange(2), 2, torch.float32)
        tensor([[0.0000, 1.0000],
                [0.8415, 0.5403]])
    """
    wide = torch.promote_types(dtype, torch.float32)
    frequency = 10_000 ** -(torch.arange(0, width, 2, dtype=wide, device=positions.device) / width)
    angle = positions.to(wide)[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], -1)[:, :width].to(dtype)
