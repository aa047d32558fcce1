"""Sums and maxima over whole documents, for mixers whose steps see the past and the future."""

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from linrec.nn.running_maximum import running_maximum
from linrec.ops.core.isolation import documents
from linrec.ops.core.precision import wide, without_autocast
from linrec.ops.gate_loop import gate_loop
from linrec.ops.scan import scan

__all__ = [
    "against_time",
    "largest_of_documents",
    "product_totals",
    "softmax_means",
    "totals",
    "turned_round",
]


def against_time(reset: Bool[Tensor, "b t"] | None) -> Bool[Tensor, "b t"] | None:
    """Return the resets of reversed steps, which cut the same links."""
    # step t is step n-1-t of the reversed steps, so the link from t-1 to t ends at step n-t there
    return None if reset is None else reset.flip(1).roll(1, dims=1)


def turned_round(x: Shaped[Tensor, "b t *c"], reset: Bool[Tensor, "b t"] | None) -> Shaped[Tensor, "b t *c"]:
    """Return the steps of each document from last to first, in the place of the document."""
    if reset is None:
        return x.flip(1)
    time = x.shape[1]
    order = (documents(reset) * time - torch.arange(time, device=x.device)).argsort(1)
    return x.take_along_dim(order.reshape(*order.shape, *[1] * (x.ndim - 2)), 1)


def largest_of_documents(
    x: Float[Tensor, "b t *c"], reset: Bool[Tensor, "b t"] | None
) -> Float[Tensor, "b n *c"]:
    """Return the largest x of each step's document, without gradients; n is 1 without resets, or t."""
    x = x.detach()
    if reset is None:
        return x.amax(1, keepdim=True) if x.shape[1] else x
    start = torch.full_like(x[:, :1], -torch.inf).flatten(0, 1)
    before = running_maximum(x, start, reset=reset)[:, 1:]
    after = running_maximum(x.flip(1), start, reset=against_time(reset))[:, 1:].flip(1)
    return torch.maximum(before, after)


def totals(x: Float[Tensor, "b t c"], reset: Bool[Tensor, "b t"] | None) -> Float[Tensor, "b n c"]:
    """Return the sum of x over each step's document; n is 1 without resets, or t."""
    if reset is None:
        return x.sum(1, keepdim=True)
    before, _ = scan(x.new_ones(()), x, reset=reset)
    after, _ = scan(x.new_ones(()), x.flip(1), reset=against_time(reset))
    return before + after.flip(1) - x


def product_totals(
    q: Float[Tensor, "b t h dk"],
    k: Float[Tensor, "b t h dk"],
    v: Float[Tensor, "b t h dv"],
    reset: Bool[Tensor, "b t"] | None,
) -> Float[Tensor, "b t h dv"]:
    """Return sum_m (q_n . k_m) v_m over the steps m of the document of n, in float32 or better."""
    q, k, v = wide(q), wide(k), wide(v)
    with without_autocast(q.device.type):
        if reset is None:
            return torch.einsum("bthk,bhkv->bthv", q, torch.einsum("bthk,bthv->bhkv", k, v))
        before, _ = gate_loop(q, k, v, reset=reset)
        after, _ = gate_loop(q.flip(1), k.flip(1), v.flip(1), reset=against_time(reset))
        return before + after.flip(1) - (q * k).sum(-1, keepdim=True) * v


def softmax_means(
    scores: Float[Tensor, "b t t h"], v: Float[Tensor, "b t h d"], reset: Bool[Tensor, "b t"] | None
) -> Float[Tensor, "b t h d"]:
    """Return sum_m softmax_m(scores_nm) v_m over the steps m of the document of n."""
    if reset is None:
        return torch.einsum("bnmh,bmhd->bnhd", scores.softmax(2), v)
    document = documents(reset)
    hidden = (document[:, :, None] != document[:, None])[..., None]
    share = scores.masked_fill(hidden, -torch.inf).softmax(2)
    # a share of zero would let NaN pass
    return (share[..., None] * v[:, None].masked_fill(hidden[..., None], 0)).sum(2)
