"""Linformer: Self-Attention with Linear Complexity (Wang and others, 2020).

    head_i = softmax(Q_i (E_i K_i)^T / sqrt(d_head)) F_i V_i           eq. 7
    y = [head_1, .., head_h] W_o

Q, K, V = x W_q, x W_k, x W_v, x input, E_i and F_i (k, n) learned, which sum the keys and values of n steps
to k rows. Every row is a sum over the whole sequence: there is no causal form.
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from linrec.nn.head_sizes import split_width
from linrec.nn.mixer import Mixer, State
from linrec.nn.parameters import mark
from linrec.nn.projections import projected
from linrec.nn.seen_steps import SeenSteps
from linrec.rules import at_least

__all__ = ["Linformer"]

Sharing = Literal["none", "head", "key_value", "layer"]

CHANNELS_PER_HEAD = 64


class Linformer(Mixer):
    """head_i = softmax(Q_i (E_i K_i)^T / sqrt(d_head)) F_i V_i: attention to k sums of all steps.

    The mixer sees its whole document, from one reset to the next, and has no state. It is for encoders, such
    as `SequenceClassifier`. Time is linear in the length, and quadratic with resets. E and F have a column
    for each of `max_length` positions; a shorter sequence reads the first ones, and later positions are in no
    sum.

    E and F start uniform in +- 1 / sqrt(k), as in a public implementation; the paper gives no distribution.

    | the paper's sharing | argument |
    |---|---|
    | none: E and F for each head | `sharing="none"` |
    | headwise: E and F | `sharing="head"` |
    | key-value: E = F for all heads | `sharing="key_value"` |
    | layerwise: one E for all layers of a model | `sharing="layer"` |

    Args:
        d_model: width of the sequence.
        n_heads: heads h. None is the largest number that divides `d_model` and leaves at least 64 channels to
            each head, or 1.
        rank: k.
        max_length: columns of E and F.
        sharing: which parts share E and F: "none", "head", "key_value" or "layer".
        bias: whether W_q, W_k and W_v have biases; W_o always has.

    Raises:
        ValueError: an unknown name, a number below 1, or `n_heads` that does not divide `d_model`.

    Source:
        Linformer (Wang, Li, Khabsa, Fang and Ma, 2020), section 4.

    Example:
        >>> y, state = Linformer(64, rank=4, max_length=32)(torch.zeros(2, 10, 64))
        >>> y.shape, state
        (torch.Size([2, 10, 64]), None)
    """

    of_one_input = "q", "k", "v"

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int | None = None,
        rank: int = 128,
        max_length: int = 512,
        sharing: Sharing = "head",
        bias: bool = False,
    ) -> None:
        super().__init__(d_model)
        at_least(1, rank=rank, max_length=max_length)
        self.heads = split_width("d_model", d_model, n_heads, least=CHANNELS_PER_HEAD)
        self.rank, self.max_length, self.sharing = rank, max_length, sharing
        self.q, self.k, self.v = (nn.Linear(d_model, d_model, bias=bias) for _ in range(3))
        sums = self.heads[0] if sharing == "none" else 1
        self.E = nn.Parameter(torch.empty(sums, max_length, rank).uniform_(-1, 1) / math.sqrt(rank))
        self.F = None
        if sharing in ("none", "head"):
            self.F = nn.Parameter(torch.empty_like(self.E).uniform_(-1, 1) / math.sqrt(rank))
        mark(self, *(("E",) if self.F is None else ("E", "F")), group="channel", weight_decay=True)
        self.out = nn.Linear(d_model, d_model)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return y and None."""
        q, k, v = (z.unflatten(-1, self.heads) for z in projected(x, self.q, self.k, self.v))
        E, F = (part.to(q.dtype) for part in (self.E, self.E if self.F is None else self.F))
        q = q / math.sqrt(self.heads[1])
        if reset is None:
            E, F = self._at(torch.arange(x.shape[1], device=x.device), E, F)
            K, V = torch.einsum("hnr,bnhd->brhd", E, k), torch.einsum("hnr,bnhd->brhd", F, v)
            share = torch.einsum("bthd,brhd->bhtr", q, K).softmax(-1)
            heads = torch.einsum("bhtr,brhd->bthd", share, V)
        else:
            heads = self._of_documents(q, k, v, E, F, reset)
        return self.out(heads.flatten(-2)), None

    def _of_documents(self, q: Tensor, k: Tensor, v: Tensor, E: Tensor, F: Tensor, reset: Tensor) -> Tensor:
        """Return the heads of packed documents by pairs of steps."""
        none = reset.new_zeros(q.shape[0], 0, dtype=torch.int64)
        seen = SeenSteps(none, q.shape[1], reset=reset, causal=False)
        q, k, v = seen.entered(q, carried=False), seen.entered(k), seen.entered(v)
        E, F = self._at(seen.new, E, F)
        hidden = ~seen.visible[:, None]
        pairs = torch.einsum("bthd,bnhd->bhtn", q, k).masked_fill(hidden, 0)
        share = torch.einsum("bhtn,hbnr->bhtr", pairs, E).softmax(-1)
        weights = torch.einsum("bhtr,hbnr->bhtn", share, F)
        return seen.left(torch.einsum("bhtn,bnhd->bthd", weights.masked_fill(hidden, 0), v))

    def _at(self, position: Tensor, *sums: Tensor) -> list[Tensor]:
        """Return the columns of E and F at positions (..), for each head, (h, .., k)."""
        inside, place = (position < self.max_length)[..., None], position.clamp(max=self.max_length - 1)
        return [(z[:, place] * inside).expand(self.heads[0], *place.shape, -1) for z in sums]

    @classmethod
    def share(cls, layers: "Sequence[Linformer]") -> None:
        """Give the layers of a stack one E, if they have `sharing="layer"`."""
        for layer in layers:
            if layer.sharing == "layer":
                layer.E = layers[0].E

    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> State:
        """Return None: there is no state."""

    @property
    def is_causal(self) -> bool:
        """False: every output depends on the whole sequence."""
        return False
