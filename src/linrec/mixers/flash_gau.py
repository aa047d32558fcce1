"""FLASH: Transformer Quality in Linear Time (Hua, Dai, Liu and Le, 2022).

    U = SiLU(X W_u)     V = SiLU(X W_v)     Z = SiLU(X W_z)
    Q^quad, Q^lin, K^quad, K^lin = R_n (gamma * Z_n + beta), each with a gamma and a beta of its own
    V^quad_n = sum_{m <= n, in the chunk of n} relu(Q^quad_n . K^quad_m / C + b_{n-m})^2 V_m
    V^lin_n = 1/C sum_{m in chunks before} (Q^lin_n . K^lin_m) V_m
    O = (U * (V^quad + V^lin)) W_o

X input, U gate, V values, Z what queries and keys share, R_n the turn of pairs of channels by their position,
b biases by distance, C steps in a chunk, O output, n time; vectors are rows, and there is one head. What is C
or more steps back is in a chunk before, wherever chunks begin. That is a recurrence, whose inputs come C
steps late:

    S_n = S_{n-1} + K^lin_{n-C}^T V_{n-C}
    V^lin_n = 1/C (Q^lin_n S_n + sum_{n-C < m < n, in the chunk before} (Q^lin_n . K^lin_m) V_m)

So each step has pairs with the last C steps alone, and rows of a batch need not agree on where chunks begin.
"""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional

from linrec.errors import unknown
from linrec.nn.mixer import Mixer, State
from linrec.nn.parameters import mark
from linrec.nn.positions import positions
from linrec.nn.rotary import Rotary
from linrec.ops.core.handlers import refuse_split_time
from linrec.ops.core.isolation import Isolation
from linrec.ops.core.loop import blocks, joined
from linrec.ops.core.machine import exporting
from linrec.ops.gate_loop import gate_loop

__all__ = ["FlashGAU", "FlashState"]

Activation = Literal["relu2", "relu", "softmax"]
PositionBias = Literal["toeplitz", "rotary", "none"]
Positions = Literal["rotary", "none"]


class FlashState(NamedTuple):
    """What FLASH carries from one piece of a sequence to the next.

    Attributes:
        k: keys of the last C steps, quadratic and linear ones side by side, (b, C, s) or (b, C, 2 s).
        v: their values, (b, C, e).
        S: sum of K^T V over the steps before those, (b, s, e); None without the linear part.
        position: steps since the sequence began, (b,) int64. Of k and v, what is older is not looked at.
    """

    k: Float[Tensor, "b C k"]
    v: Float[Tensor, "b C e"]
    S: Float[Tensor, "b s e"] | None
    position: Int[Tensor, "b"]


class FlashGAU(Mixer):
    """O = (U * (V^quad + V^lin)) W_o: attention within chunks, linear attention to the chunks before.

    The defaults are the paper's FLASH. It has two such layers where a Transformer has attention and a
    feed-forward network: a model of them is `channel_mixing="none"` and twice the layers.

    | variant | arguments |
    |---|---|
    | chunks apart, without linear attention | `linear=False` |
    | linear attention alone: a step does not see its own chunk | `quadratic=False` |
    | FLASH-Quad, on sequences of up to N steps | `chunk_size=N, linear=False` |
    | softmax, of scores over sqrt(s) in place of C | `activation="softmax"` |
    | b_i = w_i, a learned number for each distance | `position_bias="toeplitz"` |
    | b_i = (R_0 a) . (R_i b) of learned a and b, the paper's from 512 steps on | `position_bias="rotary"` |

    Chunks are counted from the start of each sequence, so from each reset on. The state has C steps and a
    matrix, whatever the length.

    When training starts, weights, gamma, w, a and b are normal with a standard deviation of 0.02; beta and
    the biases of projections are zero.

    Args:
        d_model: width of the sequence.
        chunk_size: C.
        expansion: e / d_model, of e channels of U and V.
        d_qk: s, the width of Z, queries and keys, even where they turn.
        quadratic: whether there is V^quad.
        linear: whether there is V^lin.
        activation: of V^quad, "relu2", "relu" or "softmax".
        position_bias: b, "toeplitz", "rotary" or "none".
        positions: "rotary", or "none" for queries and keys that do not turn.
        rotary_base: base of the frequencies.
        init_std: the standard deviation above.

    Raises:
        ValueError: a size below 1, an odd `d_qk` with rotary positions or biases, an unknown name of a
            variant, or neither of the two parts.

    Source:
        Hua, Dai, Liu and Le, Transformer Quality in Linear Time (2022), its gated attention unit and mixed
        chunk attention. The factors 1 / C and what is learned of b are from the paper's code.

    Example:
        >>> import torch
        >>> mixer = FlashGAU(64, chunk_size=16, d_qk=32)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.v.shape, state.S.shape, state.position
        (torch.Size([2, 10, 64]), torch.Size([2, 16, 128]), torch.Size([2, 32, 128]), tensor([10, 10]))
    """

    def __init__(
        self,
        d_model: int,
        *,
        chunk_size: int = 256,
        expansion: int = 2,
        d_qk: int = 128,
        quadratic: bool = True,
        linear: bool = True,
        activation: Activation = "relu2",
        position_bias: PositionBias = "toeplitz",
        positions: Positions = "rotary",
        rotary_base: float = 10_000.0,
        init_std: float = 0.02,
    ) -> None:
        super().__init__(d_model)
        if min(chunk_size, expansion, d_qk) < 1:
            raise ValueError(
                "`chunk_size`, `expansion` and `d_qk` must be at least 1; got "
                f"{chunk_size}, {expansion} and {d_qk}. The paper's are 256, 2 and 128."
            )
        if not quadratic and not linear:
            raise ValueError("`quadratic` and `linear` must not both be False: no step would see another.")
        if activation not in ("relu2", "relu", "softmax"):
            raise unknown("`activation`", activation, ["relu2", "relu", "softmax"])
        if position_bias not in ("toeplitz", "rotary", "none"):
            raise unknown("`position_bias`", position_bias, ["toeplitz", "rotary", "none"])
        if positions not in ("rotary", "none"):
            raise unknown("`positions`", positions, ["rotary", "none"])
        if d_qk % 2 and "rotary" in (positions, position_bias):
            raise ValueError(
                f"`d_qk` must be even where pairs of channels turn; got {d_qk}. The paper's is 128."
            )
        self.chunk_size, self.d_qk, self.d_value = chunk_size, d_qk, expansion * d_model
        self.quadratic, self.linear, self.activation = quadratic, linear, activation

        self.u = nn.Linear(d_model, self.d_value)
        self.v = nn.Linear(d_model, self.d_value)
        self.z = nn.Linear(d_model, d_qk)
        # of queries and of keys, for each part
        shape = (2, quadratic + linear, d_qk)
        self.gamma = nn.Parameter(init_std * torch.randn(shape))
        self.beta = nn.Parameter(torch.zeros(shape))
        for name in ("gamma", "beta"):
            mark(self, name, group="default", weight_decay=False)
        self.rotary = Rotary(d_qk, base=rotary_base) if positions == "rotary" else None
        self.bias: nn.Module | None = None
        if quadratic and position_bias == "toeplitz":
            self.bias = _ToeplitzBias(chunk_size, init_std)
        elif quadratic and position_bias == "rotary":
            self.bias = _RotaryBias(chunk_size, Rotary(d_qk, base=rotary_base), init_std)
        self.out = nn.Linear(self.d_value, d_model)
        for linear_layer in (self.u, self.v, self.z, self.out):
            nn.init.normal_(linear_layer.weight, std=init_std)
            nn.init.zeros_(linear_layer.bias)

    def forward(
        self,
        x: Float[Tensor, "b t d_model"],
        state: State = None,
        *,
        reset: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b t d_model"], FlashState]:
        """Mix `x` over time; see `Mixer.forward`. The state is a `FlashState`."""
        self.check_input(x, reset, state)
        past = self.init_state(x.shape[0], device=x.device) if state is None else state
        mixed, state = self._attend(x, functional.silu(self.v(x)), past, reset)
        return self.out(functional.silu(self.u(x)) * mixed.to(x.dtype)), state

    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> FlashState:
        """Zeros, at position 0."""
        return self._start(batch, self.d_value, self.u.weight.device if device is None else device)

    @property
    def state_size(self) -> int:
        """Elements of k and v, C (2 s + e), or C (s + e) of one part; of S, s e; and the position."""
        steps = self.chunk_size * (self.gamma.shape[1] * self.d_qk + self.d_value)
        return steps + self.linear * self.d_qk * self.d_value + 1

    def token_mixing(
        self, x: Float[Tensor, "b t d_model"], *, reset: Bool[Tensor, "b t"] | None = None
    ) -> Float[Tensor, "b t t"]:
        """Magnitudes of the weights that V is multiplied by in V^quad + V^lin."""
        # what attention makes of the identity is the matrix
        identity = torch.eye(x.shape[1], dtype=x.dtype, device=x.device).expand(len(x), -1, -1)
        return self._attend(x, identity, self._start(len(x), x.shape[1], x.device), reset)[0].abs()

    def _start(self, batch: int, width: int, device: torch.device | str) -> FlashState:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(batch, *shape, dtype=self._state_dtype(), device=device)

        keys = zeros(self.chunk_size, self.gamma.shape[1] * self.d_qk)
        S = zeros(self.d_qk, width) if self.linear else None
        position = torch.zeros(batch, dtype=torch.int64, device=device)
        return FlashState(keys, zeros(self.chunk_size, width), S, position)

    def _attend(
        self, x: Tensor, v: Tensor, past: FlashState, reset: Tensor | None
    ) -> tuple[Tensor, FlashState]:
        """V^quad + V^lin for values v (b, t, e), in the dtype of the state, and the state after them."""
        # values of other steps enter a sum here
        refuse_split_time("flash_gau")
        time, size = x.shape[1], self.chunk_size
        if time == 0:
            return torch.zeros_like(v), past
        position, seen = positions(past.position, time, reset=reset)

        q, k = self._queries_and_keys(x, position)
        keys = torch.cat([past.k, k.flatten(2).to(past.k.dtype)], 1)
        values = torch.cat([past.v, v.to(past.v.dtype)], 1)
        # views would keep all steps as long as the state
        S, last_k, last_v = past.S, keys[:, -size:].clone(), values[:, -size:].clone()
        if S is not None:
            # a key that is C steps late is of this sequence from its step C on
            own = (position >= size)[..., None, None]
            late_k, late_v = keys[:, :time, None, -self.d_qk :].where(own, 0), values[:, :time, None]
            if reset is not None:
                late_v = late_v.where(own, 0)
            query = q[:, :, -1:].to(keys.dtype) / size
            older, S = gate_loop(query, late_k, late_v, state=S[:, None], reset=reset)
            S = S[:, 0]
        q = q.to(keys.dtype)
        if reset is None:
            mixed = self._pairs(q, keys, values, position)
        else:
            # a weight of zero would let NaN pass
            age = torch.arange(size, 0, -1, device=x.device)
            document = torch.cat([(age <= past.position[:, None]).long() - 1, reset.cumsum(1)], 1)
            other = (document != document[:, -1:])[:, -size:, None]
            last_k, last_v = last_k.masked_fill(other, 0), last_v.masked_fill(other, 0)
            isolation = Isolation(document)
            q = isolation.enter(q, begin=size, carried=False)
            keys, values = isolation.enter(keys, begin=0), isolation.enter(values, begin=0)
            mixed = isolation.leave(self._pairs(q, keys, values, position), begin=size, window=size)
        if S is not None:
            mixed = mixed + older[:, :, 0]
        return mixed, FlashState(last_k, last_v, S, seen)

    def _queries_and_keys(self, x: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """Q and K (b, t, parts, s), the quadratic part first."""
        z = functional.silu(self.z(x))[:, :, None, None]
        both = (z * self.gamma + self.beta).flatten(2, 3)
        if self.rotary is not None:
            (both,) = self.rotary(position, both)
        q, k = both.chunk(2, dim=2)
        return q, k

    def _pairs(self, q: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> Tensor:
        """What each step gets of the steps less than C before it, block of queries by block."""
        time, size = q.shape[1], self.chunk_size
        # a block sees itself and the C steps before it, the first of which is too old
        if exporting():
            block = size
            queries, position = blocks(q, size, 1).transpose(2, 3), blocks(position, size, 1)[..., None]
            keys, values = (blocks(part, size, 1, overlap=size).mT for part in (keys, values))
        else:
            block = min(time, size)
            missing = -time % block
            queries = functional.pad(q, (0, 0, 0, 0, 0, missing)).unflatten(1, (-1, block)).transpose(2, 3)
            position = functional.pad(position, (0, missing)).unflatten(1, (-1, block))[..., None]
            keys, values = (
                functional.pad(part, (0, 0, 0, missing)).unfold(1, size + block, block)
                for part in (keys, values)
            )
        products = (queries @ keys.unflatten(2, (-1, self.d_qk))).unbind(2)
        age = torch.arange(size, size + block, device=q.device)[:, None]
        age = age - torch.arange(size + block, device=q.device)
        in_chunk = age <= position % size

        weights = torch.zeros((), dtype=q.dtype, device=q.device)
        if self.quadratic:
            weights = self._weights(products[0], age, in_chunk & (age >= 0))
        if self.linear:
            before = ~in_chunk & (age < size) & (age <= position)
            weights = weights + (products[-1] / size).masked_fill(~before, 0)
        mixed = weights.to(values.dtype) @ values.mT
        return joined(mixed, time, 1) if exporting() else mixed.flatten(1, 2)[:, :time]

    def _weights(self, scores: Tensor, age: Tensor, seen: Tensor) -> Tensor:
        """The weights of V^quad for Q^quad . K^quad of all pairs, zero where a pair is not `seen`."""
        scores = scores / (self.d_qk**0.5 if self.activation == "softmax" else self.chunk_size)
        if self.bias is not None:
            scores = scores + self.bias()[age.clamp(0, self.chunk_size - 1)]
        if self.activation == "softmax":
            return scores.masked_fill(~seen, -torch.inf).softmax(-1)
        weights = functional.relu(scores).masked_fill(~seen, 0)
        return weights.square() if self.activation == "relu2" else weights


class _ToeplitzBias(nn.Module):
    """b_i = w_i for i = 0 .. C - 1."""

    def __init__(self, chunk_size: int, init_std: float) -> None:
        super().__init__()
        self.w = nn.Parameter(init_std * torch.randn(chunk_size))

    def forward(self) -> Tensor:
        return self.w


class _RotaryBias(nn.Module):
    """b_i = (R_0 a) . (R_i b) for i = 0 .. C - 1."""

    def __init__(self, chunk_size: int, rotary: Rotary, init_std: float) -> None:
        super().__init__()
        self.chunk_size, self.rotary = chunk_size, rotary
        self.a = nn.Parameter(init_std * torch.randn(rotary.d_head))
        self.b = nn.Parameter(init_std * torch.randn(rotary.d_head))

    def forward(self) -> Tensor:
        distance = torch.arange(self.chunk_size, device=self.b.device)[None]
        (turned,) = self.rotary(distance, self.b.expand(1, self.chunk_size, 1, -1))
        return turned[0, :, 0] @ self.a
