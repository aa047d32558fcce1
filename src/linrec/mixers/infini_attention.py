"""Infini-attention (Munkhdalai, Faruqui and Gopal, 2024): local attention beside a compressive memory.

    A_mem = sigma(Q) M_{s-1} / (sigma(Q) z_{s-1})                                   (3)
    M_s = M_{s-1} + sigma(K)^T V     z_s = z_{s-1} + sum_t sigma(K_t)               (4)
    M_s = M_{s-1} + sigma(K)^T (V - sigma(K) M_{s-1} / (sigma(K) z_{s-1}))          (5), "delta"
    A_dot = softmax(Q' K'^T / sqrt(d_key)) V, causal within segment s
    A = sigmoid(beta) A_mem + (1 - sigmoid(beta)) A_dot                             (6)
    O = [A^1; ..; A^H] W_O

Q queries, K keys and V values of a head in segment s, Q' and K' turned by their positions, sigma = elu + 1,
M memory, z its normaliser, beta the gate of a head, A the attention of a head, O the output.
"""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from linrec.nn.feature_maps.fixed import ELU
from linrec.nn.head_sizes import split_width
from linrec.nn.mixer import State
from linrec.nn.parameters import mark
from linrec.nn.projections import output_kwargs, projected
from linrec.nn.rotary import Rotary
from linrec.nn.segment_mixer import SegmentMixer, joined
from linrec.nn.segments import Detach, Sight
from linrec.nn.visible_attention import visible_attention
from linrec.ops.core.precision import without_autocast
from linrec.rules import positive

__all__ = ["InfiniAttention", "InfiniMemory"]

Update = Literal["linear", "delta"]
Positions = Literal["rotary", "none"]

# of the paper's models
CHANNELS_PER_HEAD = 128


class InfiniMemory(NamedTuple):
    """The compressive memory of the segments before.

    Attributes:
        M: sum of sigma(K)^T V, (b, h, d_head, d_head).
        z: sum of sigma(K), (b, h, d_head).
    """

    M: Float[Tensor, "b h k v"]
    z: Float[Tensor, "b h k"]


class InfiniAttention(SegmentMixer):
    """A = sigmoid(beta) A_mem + (1 - sigmoid(beta)) A_dot: a memory of all segments before, local attention.

    A segment reads the memory as the segments before left it. Queries and keys of the memory do not turn with
    their positions. The paper does not say which positions local attention has, nor the initial value of
    beta. Public implementations often have the gate reversed.

    Args:
        d_model: width of the sequence.
        n_heads: heads. None is the largest number that divides `d_model` and leaves at least 128 channels to
            each head, or 1.
        d_head: channels of a head. None is `d_model` / `n_heads`.
        segment_length: steps of a segment.
        update: of the memory, "linear" (4) or "delta" (5).
        positions: of local attention, "rotary", or "none", with which order enters by the causal mask alone.
        rotary_base: base of the frequencies.
        gate_init: beta of all heads when training starts; 0 weighs both parts equally.
        gate_empty: whether (6) holds before the first write too, where A_mem is 0. Without it, A is A_dot
            there.
        eps: smallest denominator in (3) and (5).
        detach: where gradients through the memory stop: "never", as in the paper; "segment", at every
            boundary; or a number n, at every n-th boundary.
        dropout: probability that a weight of local attention is dropped, in training alone.

    Raises:
        ValueError: `n_heads` that does not divide `d_model`, an odd number of channels to turn, an unknown
            name, or a number out of range.

    Source:
        Munkhdalai, Faruqui and Gopal, Leave No Context Behind: Efficient Infinite Context Transformers with
        Infini-attention (2024), eq. 3 to 6.

    Example:
        >>> mixer = InfiniAttention(64, n_heads=4, segment_length=8)
        >>> y, state = mixer(torch.zeros(2, 20, 64))
        >>> y.shape, state.memory.M.shape, state.alive.shape
        (torch.Size([2, 20, 64]), torch.Size([2, 4, 16, 16]), torch.Size([2, 4]))
    """

    of_one_input = "q", "k", "v"

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int | None = None,
        d_head: int | None = None,
        segment_length: int = 2048,
        update: Update = "linear",
        positions: Positions = "rotary",
        rotary_base: float = 10_000.0,
        gate_init: float = 0.0,
        gate_empty: bool = True,
        eps: float = 1e-10,
        detach: Detach = "never",
        dropout: float = 0.0,
    ) -> None:
        super().__init__(d_model, segment_length=segment_length, detach=detach, dropout=dropout)
        positive(eps=eps)
        self.n_heads, self.d_head = split_width("d_model", d_model, n_heads, d_head, least=CHANNELS_PER_HEAD)
        self.update, self.gate_empty, self.eps = update, gate_empty, eps

        width = self.n_heads * self.d_head
        self.q = nn.Linear(d_model, width, bias=False)
        self.k = nn.Linear(d_model, width, bias=False)
        self.v = nn.Linear(d_model, width, bias=False)
        self.sigma = ELU(self.d_head)
        self.rotary = Rotary(self.d_head, base=rotary_base) if positions == "rotary" else None
        self.beta = nn.Parameter(torch.full((self.n_heads,), float(gate_init)))
        mark(self, "beta", group="channel", weight_decay=False, float32=True)
        self.out = nn.Linear(width, d_model, bias=False)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return O, and a `SegmentState` of an `InfiniMemory`, and the segment's keys and values."""
        A, state = self.by_segments(x, state, reset)
        return self.out(A), state

    def read(
        self, x: Tensor, memory: InfiniMemory, segment: tuple[Tensor, Tensor], sight: Sight
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return A, and the keys and values of the segment up to the new steps."""
        Q, K, V = (y.unflatten(-1, (self.n_heads, -1)) for y in projected(x, self.q, self.k, self.v))
        K, V = map(joined, segment, (K, V))
        with without_autocast(x.device.type):
            A_mem = self._retrieved(self.sigma(Q), memory)
        if sight.memory is not None:
            A_mem = A_mem.where(sight.memory[..., None, None], 0)
        turned_Q, turned_K = Q, K
        if self.rotary is not None:
            step = torch.arange(K.shape[1], device=x.device)[None]
            (turned_Q,) = self.rotary(step[:, K.shape[1] - x.shape[1] :], Q)
            (turned_K,) = self.rotary(step, K)
        A_dot = visible_attention(turned_Q, turned_K, V, sight.steps, dropout=self.active_dropout)
        gate = torch.sigmoid(self.beta)[:, None]
        if not self.gate_empty:
            written = (memory.z > 0).any(-1)[:, None, :, None]
            if sight.memory is not None:
                written = written & sight.memory[..., None, None]
            gate = gate * written
        A = gate * A_mem + (1 - gate) * A_dot
        return A.flatten(-2).to(V.dtype), (K, V)

    def write(self, memory: InfiniMemory, segment: tuple[Tensor, Tensor], alive: Tensor) -> InfiniMemory:
        """Return M_s and z_s."""
        K, V = segment
        with without_autocast(K.device.type):
            K, V = self.sigma(K).where(alive[..., None, None], 0).to(memory.M.dtype), V.to(memory.M.dtype)
            if self.update == "delta":
                V = V - self._retrieved(K, memory)
            M = memory.M + K.permute(0, 2, 3, 1) @ V.transpose(1, 2)
        return InfiniMemory(M, memory.z + K.sum(1))

    def _retrieved(self, keys: Tensor, memory: InfiniMemory) -> Tensor:
        """Return sigma(Q) M / (sigma(Q) z) for sigma of queries or keys (b, t, h, k)."""
        keys = keys.to(memory.M.dtype).transpose(1, 2)
        values = keys @ memory.M / (keys @ memory.z[..., None]).clamp(min=self.eps)
        return values.transpose(1, 2)

    def start(
        self, batch: int, device: torch.device | str | None
    ) -> tuple[InfiniMemory, tuple[Tensor, Tensor]]:
        """Return a memory of zeros, and no keys and values."""
        steps = torch.zeros(batch, 0, self.n_heads, self.d_head, **output_kwargs(self.k, device))
        z = torch.zeros(batch, self.n_heads, self.d_head, **self.factory_kwargs(device))
        return InfiniMemory(z.new_zeros(*z.shape, self.d_head), z), (steps, steps)
