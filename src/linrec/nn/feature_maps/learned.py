"""Feature maps that are learned: T2R's by gradients, and EcoFormer's hash functions, which have a `fit`."""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from linrec.nn.feature_maps.fixed import FeatureMap
from linrec.nn.parameters import Float32Module, mark
from linrec.ops.core.precision import without_autocast
from linrec.rules import at_least, require

__all__ = ["HashedFeatures", "LearnedFeatures"]

# of EcoFormer's released code: learning rate, momentum and steps for each hash function
RATE, MOMENTUM, STEPS = 5e-4, 0.9, 100


class LearnedFeatures(FeatureMap):
    """phi(x) = ReLU(W x + b), with W and b of each head, for queries and keys alike.

    W and b start as torch's `nn.Linear` of d channels does.

    Args:
        d_head: channels d of a query or key.
        n_features: rows m of W. None is d_head.
        n_heads: matrices W, one for each head, or 1 for all heads.

    Source:
        Finetuning Pretrained Transformers into RNNs (Kasai and others, 2021), T2R's feature map.
    """

    def __init__(self, d_head: int, *, n_features: int | None = None, n_heads: int = 1) -> None:
        super().__init__(d_head, d_head if n_features is None else n_features)
        at_least(1, n_features=self.d_features, n_heads=n_heads)
        bound = 1 / math.sqrt(d_head)
        self.weight = nn.Parameter(torch.empty(n_heads, self.d_features, d_head).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(n_heads, self.d_features).uniform_(-bound, bound))
        mark(self, "bias", group="channel", weight_decay=False)

    def forward(self, x: Float[Tensor, "*batch h d"]) -> Float[Tensor, "*batch h m"]:
        """ReLU(W x + b) of (..., h, d_head)."""
        weight = self.weight.expand(x.shape[-2], -1, -1)
        return functional.relu(torch.einsum("...hd,hmd->...hm", x, weight) + self.bias)


class HashedFeatures(FeatureMap, Float32Module):
    """phi(x) = [sqrt(c + 1) | H(x)], H(x) = sign(A g(x)) in {-1, 1}^c: c bits of each query or key.

        g_j(x) = exp(-|u - a_j|^2 / (2 s)) - mean_j,    u = x / |x|

    phi(q) . phi(k) is 1 plus twice the number of bits that agree, and so positive. a_j are m anchors, and
    mean_j is the mean of the first term over the queries of `fit`, which also sets s, the mean of
    |u - a_j|^2. A, a_j, mean_j and s are buffers of each head, without gradients. The gradient of sign is 1
    between -1 and 1, and 0 elsewhere.

    A starts normal, the anchors are random unit vectors, mean_j is exp(-1/2) and s is 2. `fit` learns A from
    queries. A state that was made with the old codes is useless with the new codes: fit between sequences.

    Args:
        d_head: channels d of a query or key.
        n_features: bits c.
        n_anchors: anchors m.
        n_heads: sets of hash functions, one for each head, or 1 for all heads.

    Source:
        EcoFormer: Energy-Saving Attention with Linear Complexity (Liu and others, 2022), sections 4.1 and
        4.2; Liu and others, Supervised Hashing with Kernels (2012). The released code has s of each sequence,
        over all its steps, which a stream cannot know.
    """

    anchors: Tensor
    A: Tensor
    mean: Tensor
    width: Tensor

    def __init__(
        self, d_head: int, *, n_features: int | None = None, n_anchors: int | None = None, n_heads: int = 1
    ) -> None:
        bits, n_anchors = (16 if n_features is None else n_features), (25 if n_anchors is None else n_anchors)
        super().__init__(d_head, 1 + bits)
        at_least(1, n_features=bits, n_anchors=n_anchors, n_heads=n_heads)
        anchors = functional.normalize(torch.randn(n_heads, n_anchors, d_head), dim=-1)
        self.register_buffer("anchors", anchors)
        self.register_buffer("A", torch.randn(n_heads, bits, n_anchors))
        # of unit vectors at right angles, |u - a|^2 = 2 = s
        self.register_buffer("mean", torch.full((n_heads, n_anchors), math.exp(-0.5)))
        self.register_buffer("width", torch.full((n_heads,), 2.0))
        # rounding would turn bits whose values are near 0
        self.keep_float32("anchors", "A", "mean", "width")

    def forward(self, x: Float[Tensor, "*batch h d"]) -> Float[Tensor, "*batch h m"]:
        """[sqrt(c + 1) | H(x)] (..., h, c + 1) of (..., h, d_head), in the dtype of `x`."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        with without_autocast(x.device.type):
            kernel = (-self._squares(wide) / (2 * self.width.to(wide)[:, None])).exp() - self.mean.to(wide)
            y = torch.einsum("...hm,...hcm->...hc", kernel, self.A.to(wide))
        near = y.clamp(-1, 1)
        # the difference is exactly 0
        bits = torch.where(y > 0, 1.0, -1.0).to(y) + (near - near.detach())
        constant = torch.full_like(bits[..., :1], math.sqrt(self.d_features))
        return torch.cat([constant, bits], -1).to(x.dtype)

    def _squares(self, x: Tensor) -> Tensor:
        """Return |u - a_j|^2 (..., h, m)."""
        u, a = functional.normalize(x, dim=-1), self.anchors.to(x)
        products = torch.einsum("...hd,...hmd->...hm", u, a)
        return u.square().sum(-1, keepdim=True) + a.square().sum(-1) - 2 * products

    @torch.no_grad()
    def fit(
        self,
        q: Float[Tensor, "b t h d"],
        anchors: Float[Tensor, "h m d"] | None = None,
        *,
        top: int = 10,
        generator: torch.Generator | None = None,
    ) -> None:
        """Learn the hash functions from queries, one after the other, in place.

        A pair of queries of a sequence has a target: c for the `top` most similar pairs of a row, -c for the
        least similar ones, and 0 for others. The products of the bits found so far are subtracted. A row of A
        is trained by 100 steps of gradient descent on -mean(H S H^T) / (t c), with 2 sigmoid(y) - 1 in place
        of sign(y). The row keeps its old values if the bits do not improve.

        Args:
            q: queries, of at least `n_anchors` steps, in any precision. Memory is quadratic in the length.
            anchors: a_j; None draws steps of the first sequence.
            top: similar and dissimilar steps of each step.
            generator: draws the steps, on the CPU; None is torch's own.
        """
        (heads, bits, m), time = self.A.shape, q.shape[1]
        require(
            time >= max(m, top) and q.shape[2:] == (heads, self.d_head),
            f"`q` must have shape (batch, time, {heads}, {self.d_head}) with at least {max(m, top)} steps; "
            f"got {tuple(q.shape)}. Pass queries of all heads, such as of a whole image.",
        )
        u = functional.normalize(q.to(torch.promote_types(q.dtype, torch.float32)), dim=-1)
        if anchors is None:
            anchors = u[0, torch.randperm(time, generator=generator)[:m].to(u.device)].transpose(0, 1)
        self.anchors.copy_(anchors)
        squares = self._squares(u)
        self.width.copy_(squares.mean((0, 1, 3)))
        kernel = (-squares / (2 * self.width.to(u)[:, None])).exp()
        self.mean.copy_(kernel.mean((0, 1)))
        kernel = (kernel - self.mean.to(u)).transpose(1, 2)
        similarity = torch.einsum("bnhd,blhd->bhnl", u, u)
        target = torch.zeros_like(similarity)
        target.scatter_(-1, similarity.topk(top).indices, float(bits))
        target.scatter_(-1, similarity.topk(top, largest=False).indices, -float(bits))

        for bit in range(bits):
            old = self.A[:, bit].to(u)
            rows = old, _descended(old, kernel, target / (time * bits))
            codes = [torch.where(_values(kernel, row) > 0, 1.0, -1.0).to(u) for row in rows]
            better = bool(_loss(codes[1], target) < _loss(codes[0], target))
            self.A[:, bit] = rows[better]
            target = target - torch.einsum("bhn,bhl->bhnl", codes[better], codes[better])


def _values(kernel: Tensor, row: Tensor) -> Tensor:
    return torch.einsum("bhnm,hm->bhn", kernel, row)


def _loss(y: Tensor, target: Tensor) -> Tensor:
    return -torch.einsum("bhn,bhnl,bhl->bh", y, target, y).mean()


def _descended(row: Tensor, kernel: Tensor, target: Tensor) -> Tensor:
    """Return a row of A of each head after the steps of gradient descent."""
    row = row.clone().requires_grad_()
    optimizer = torch.optim.SGD([row], lr=RATE, momentum=MOMENTUM, nesterov=True)
    with torch.enable_grad():
        for _ in range(STEPS):
            optimizer.zero_grad()
            _loss(2 * torch.sigmoid(_values(kernel, row)) - 1, target).backward()
            optimizer.step()
    return row.detach()
