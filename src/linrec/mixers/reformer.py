"""Reformer: The Efficient Transformer (Kitaev, Kaiser and Levskaya, 2020): attention within hash buckets.

    q = x W_q     k = q / |q|     v = x W_v                                        shared queries and keys
    hash_r(q) = argmax [q G_r | -q G_r]                                            in 0 .. n_buckets - 1
    P_i = {j <= i: hash_r(q_i) = hash_r(q_j) in a round r}
    o_i = sum_{j in P_i} n_ij exp(q_i . k_j) v_j / sum_{j in P_i} n_ij exp(q_i . k_j)
    y = [o of all heads] W_o

x input, G_r random rotations of round r, n_ij the number of rounds in which i and j share a bucket, as in the
authors' code, or 1, as in the paper. With the former, o is the sum of the rounds' softmax attentions, each
weighed by its normaliser. A step attends to itself only where there is no other step.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from linrec.nn.head_sizes import split_width
from linrec.nn.mixer import Mixer, State
from linrec.nn.projections import output_kwargs, projected
from linrec.nn.seen_steps import SeenSteps
from linrec.ops.core.precision import without_autocast
from linrec.ops.inspection import note, noting
from linrec.rules import at_least, require

__all__ = ["Reformer", "ReformerState"]

CHANNELS_PER_HEAD = 64
# scores of a step with itself and with later steps, in the released code
ITSELF, LATER = -1e5, -1e9


class ReformerState(NamedTuple):
    """The state of a `Reformer` between two pieces of a sequence: all steps so far.

    Attributes:
        k: keys (b, n, h, d_head).
        v: values (b, n, h, d_head).
        codes: buckets of each round (b, n, h, n_hashes) int64.
        position: of each step in its sequence, (b, n) int64; -1 where a reset has cut the step off.
    """

    k: Float[Tensor, "b n h d"]
    v: Float[Tensor, "b n h d"]
    codes: Int[Tensor, "b n h r"]
    position: Int[Tensor, "b n"]


class Reformer(Mixer):
    """o_i = sum_j n_ij exp(q_i . k_j) v_j / sum_j n_ij exp(q_i . k_j) over steps that share a bucket with i.

    By default every step sees all earlier steps of its buckets. This is exact, causal, and has a state, a
    cache that grows with every step; time is quadratic in the length. `chunk_size` is the paper's
    approximation for long sequences, in time linear in the length: steps are sorted by round, bucket and
    time, and cut into chunks, and each chunk attends to itself and the chunk before it, whatever their
    buckets. Which steps share a chunk depends on later steps too. So this form is not causal, though no step
    attends to a later one with `causal=True`, and it has neither states nor resets.

    The rotations are drawn once, and are a part of `state_dict`. The authors draw them at every call.

    Args:
        d_model: width of the sequence.
        n_heads: heads. None is the largest number that divides `d_model` and leaves at least 64 channels to
            each head, or 1.
        n_hashes: rounds of hashing.
        n_buckets: buckets of a round, even.
        chunk_size: steps of a chunk; the length of a sequence must be a multiple. None is the exact form.
        causal: whether steps attend to the past alone. With False, a step attends to its whole document, and
            there is no state.
        duplicates: whether a pair of steps counts once for each round in which it shares a bucket, as in the
            authors' code; or once, as in the paper. Chunks need True.
        bias: whether W_q, W_v and W_o have biases.

    Raises:
        ValueError: an odd `n_buckets`, a number below 1, `n_heads` that does not divide `d_model`, or
            `chunk_size` without `duplicates`; of calls, a `state` or `reset` that the form does not take.

    Source:
        Reformer (Kitaev, Kaiser and Levskaya, 2020), section 2, eq. 2 to 6, and appendix A. k has
        unit length and scores are not divided by sqrt(d_head), as in the authors' code.

    Example:
        >>> mixer = Reformer(64, n_hashes=2)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.codes.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 10, 1, 2]))
    """

    G: Tensor
    of_one_input = "q", "v"

    takes_turns = True

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int | None = None,
        n_hashes: int = 4,
        n_buckets: int = 16,
        chunk_size: int | None = None,
        causal: bool = True,
        duplicates: bool = True,
        bias: bool = False,
    ) -> None:
        super().__init__(d_model)
        at_least(1, n_hashes=n_hashes)
        at_least(1, chunk_size=chunk_size, or_none=True)
        require(
            n_buckets >= 2 and n_buckets % 2 == 0,
            f"`n_buckets` must be even, at least 2: each rotation has two signs; got {n_buckets}.",
        )
        require(
            duplicates or chunk_size is None,
            "`duplicates` must be True with `chunk_size`, because rounds of chunks do not know the pairs of "
            f"other rounds; got False and `chunk_size` = {chunk_size}. Leave out one of them.",
        )
        self.heads = h, d = split_width("d_model", d_model, n_heads, least=CHANNELS_PER_HEAD)
        self.n_hashes, self.chunk_size, self.causal = n_hashes, chunk_size, causal
        self.duplicates = duplicates
        self.q, self.v, self.out = (nn.Linear(d_model, d_model, bias=bias) for _ in range(3))
        self.register_buffer("G", torch.randn(h, d, n_hashes, n_buckets // 2))
        self.keep_float32("G")

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return y, and a `ReformerState`; None without `causal`, or with `chunk_size`."""
        q, v = (y.unflatten(-1, self.heads) for y in projected(x, self.q, self.v))
        # 1 / |q|, as a root mean square in the authors' code
        size = q.square().mean(-1, keepdim=True) + 1e-6
        k = q * (size * self.heads[1]).rsqrt()
        # rounding would move steps near a border to another bucket
        with without_autocast(x.device.type):
            rotated = torch.einsum("bthd,hdrn->bthrn", q.detach().to(self.G.dtype), self.G)
        codes = torch.cat([rotated, -rotated], -1).argmax(-1)
        if self.chunk_size is not None:
            require(reset is None, "`reset` must be None with `chunk_size`: chunks would cross documents.")
            return self.out(self._chunked(q, k, v, codes).flatten(-2)), None
        past = self._empty(x.shape[0], x.device) if state is None else state
        k, v = torch.cat([past.k, k.to(past.k.dtype)], 1), torch.cat([past.v, v.to(past.v.dtype)], 1)
        seen = SeenSteps(past.position, x.shape[1], reset=reset, causal=self.causal)
        all_codes = torch.cat([past.codes, codes], 1)
        queries, keys, values = seen.entered(q, carried=False), seen.entered(k), seen.entered(v)
        shared = (codes[:, :, None] == all_codes[:, None]).sum(-1).permute(0, 3, 1, 2)
        hidden = ~seen.visible[:, None] | (shared == 0)
        scores = torch.einsum("bihd,bjhd->bhij", queries, keys).to(self.state_dtype)
        step = torch.arange(x.shape[1], device=x.device)[:, None] + past.k.shape[1]
        itself = step == torch.arange(k.shape[1], device=x.device)
        scores = scores.masked_fill(itself, ITSELF)
        if self.duplicates:
            scores = scores + shared.clamp(min=1).to(scores.dtype).log()
        share = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        note(share=share)
        o = seen.left(torch.einsum("bhij,bjhd->bihd", share.to(values.dtype), values))
        y = self.out(o.flatten(-2).to(x.dtype))
        if not self.causal:
            return y, None
        return y, ReformerState(seen.kept(k), seen.kept(v), seen.kept(all_codes), seen.kept_position)

    def _chunked(self, q: Tensor, k: Tensor, v: Tensor, codes: Tensor) -> Tensor:
        """Return o (b, t, h, d) by chunks of the sorted steps of all rounds, each with the one before."""
        t, rounds, c = q.shape[1], self.n_hashes, self.chunk_size or 1
        require(t % c == 0, f"`x` must have a multiple of `chunk_size` = {c} steps; got {t}. Pad or cut it.")
        if t == 0:
            return v
        # in the order of rounds, buckets and time
        bucket = codes.permute(0, 2, 3, 1)
        bucket = bucket + 2 * self.G.shape[-1] * torch.arange(rounds, device=q.device)[:, None]
        order = (bucket * t + torch.arange(t, device=q.device)).flatten(2).argsort(-1)
        place = order % t

        def chunks(y: Tensor) -> Tensor:
            y = y.transpose(1, 2).gather(2, place[..., None].expand(-1, -1, -1, y.shape[-1]))
            return y.unflatten(2, (-1, c))

        def with_previous(y: Tensor) -> Tensor:
            return torch.cat([y, y.roll(1, 2)], 3)

        where = place.unflatten(2, (-1, c))
        of_keys = with_previous(where)
        scores = (chunks(q) @ with_previous(chunks(k)).mT).to(self.state_dtype)
        apart = where[..., :, None] - of_keys[..., None, :]
        if self.causal:
            scores = scores.masked_fill(apart < 0, LATER)
        scores = scores.masked_fill(apart == 0, ITSELF)
        size = scores.logsumexp(-1, keepdim=True)
        o = (scores - size).exp().to(v.dtype) @ with_previous(chunks(v))
        back = order.argsort(-1)[..., None]
        o, size = (
            y.flatten(2, 3).gather(2, back.expand(-1, -1, -1, y.shape[-1])).unflatten(2, (rounds, t))
            for y in (o, size)
        )
        return (size.softmax(2).to(o.dtype) * o).sum(2).transpose(1, 2)

    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> State:
        """Return a cache of no steps; None without `causal`, or with `chunk_size`."""
        return self._empty(batch, device) if self.is_causal else None

    def _empty(self, batch: int, device: torch.device | str | None) -> ReformerState:
        """Return a cache of no steps in the dtype of queries."""
        none = torch.zeros(batch, 0, *self.heads, **output_kwargs(self.q, device))
        codes = torch.zeros(batch, 0, self.heads[0], self.n_hashes, dtype=torch.int64, device=none.device)
        return ReformerState(none, none.clone(), codes, codes[:, :, 0, 0].clone())

    @property
    def is_causal(self) -> bool:
        """Whether no step depends on later steps."""
        return self.causal and self.chunk_size is None

    @property
    def state_size(self) -> int:
        """Elements per cached step: key, value, buckets and position."""
        return 2 * self.d_model + self.heads[0] * self.n_hashes + 1 if self.is_causal else 0

    def token_mixing(self, x: Tensor, *, reset: Tensor | None = None) -> Tensor | None:
        """Return the weights of the values, the mean over heads; None with `chunk_size`."""
        with noting() as noted:
            self.forward(x, reset=reset)
        return noted["share"].mean(1) if "share" in noted else None
