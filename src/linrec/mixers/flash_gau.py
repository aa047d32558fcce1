"""FLASH: Transformer Quality in Linear Time (Hua, Dai, Liu and Le, 2022).

    U = SiLU(X W_u)     V = SiLU(X W_v)     Z = SiLU(X W_z)
    Q^quad, Q^lin, K^quad, K^lin = R_n (gamma * Z_n + beta), each with a gamma and a beta of its own
    V^quad_n = sum_{m <= n, in the chunk of n} relu(Q^quad_n . K^quad_m / C + b_{n-m})^2 V_m
    V^lin_n = 1/C sum_{m in chunks before} (Q^lin_n . K^lin_m) V_m
    O = (U * (V^quad + V^lin)) W_o

X is the input, U the gate, V the values, O the output, and n time. Queries and keys share Z. R_n turns pairs
of channels by their position, b are biases by distance, and C is the number of steps in a chunk. Vectors are
rows, and there is one head. A step that is C or more steps back is in an earlier chunk, wherever chunks
begin. The sum over these steps is a recurrence, whose inputs come C steps late:

    S_n = S_{n-1} + K^lin_{n-C}^T V_{n-C}
    V^lin_n = 1/C (Q^lin_n S_n + sum_{n-C < m < n, in the chunk before} (Q^lin_n . K^lin_m) V_m)

So each step has pairs with the last C steps alone, and rows of a batch need not agree on where chunks begin.
"""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from linrec.nn.mixer import Mixer, State
from linrec.nn.parameters import mark
from linrec.nn.positions import Windows, positions
from linrec.nn.projections import draw, output_kwargs
from linrec.nn.rotary import Rotary
from linrec.ops import inspection
from linrec.ops.core.isolation import Isolation, documents
from linrec.ops.gate_loop import gate_loop
from linrec.rules import at_least, require

__all__ = ["FlashGAU", "FlashState", "RotaryBias", "ToeplitzBias"]

Activation = Literal["relu2", "relu", "softmax"]
PositionBias = Literal["toeplitz", "rotary", "none"]
Positions = Literal["rotary", "none"]


class FlashState(NamedTuple):
    """The state of FLASH between two pieces of a sequence.

    Attributes:
        k: keys of the last C steps, quadratic and linear ones side by side, (b, C, s) or (b, C, 2 s).
        v: their values, (b, C, e).
        S: sum of K^T V over the steps before the last C steps, (b, s, e); None without the linear part.
        position: steps since the sequence began, (b,) int64. Entries of k and v from before the beginning are
            ignored.
    """

    k: Float[Tensor, "b C k"]
    v: Float[Tensor, "b C e"]
    S: Float[Tensor, "b s e"] | None
    position: Int[Tensor, "b"]


class FlashGAU(Mixer):
    """O = (U * (V^quad + V^lin)) W_o: attention within chunks, linear attention to the chunks before.

    The defaults are the paper's FLASH. Two such layers replace attention and a feed-forward network of a
    Transformer: a model of FLASH has `channel_mixing="none"` and twice the layers.

    | variant | arguments |
    |---|---|
    | chunks apart, without linear attention | `linear=False` |
    | linear attention alone: a step does not see its own chunk | `quadratic=False` |
    | FLASH-Quad, on sequences of up to N steps | `chunk_size=N, linear=False` |
    | softmax, of scores over sqrt(s) in place of C | `activation="softmax"` |
    | b_i = w_i, a learned number for each distance | `position_bias="toeplitz"` |
    | b_i = (R_0 a) . (R_i b) of learned a and b, the paper's from 512 steps on | `position_bias="rotary"` |

    Chunks are counted from the start of each sequence, so from each reset on. The state has C steps and a
    matrix; its size does not depend on the length.

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
        chunk attention. The factors 1 / C and the parameters of b come from the paper's code.

    Example:
        >>> mixer = FlashGAU(64, chunk_size=16, d_qk=32)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.v.shape, state.S.shape, state.position
        (torch.Size([2, 10, 64]), torch.Size([2, 16, 128]), torch.Size([2, 32, 128]), tensor([10, 10]))
    """

    recurrence = "gate_loop"

    takes_turns = True

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
        at_least(1, chunk_size=chunk_size, cure="The paper's is 256.")
        at_least(1, expansion=expansion, cure="The paper's is 2.")
        at_least(1, d_qk=d_qk, cure="The paper's is 128.")
        at_least(0, init_std=init_std)
        require(
            quadratic or linear,
            "`quadratic` and `linear` must not both be False: no step would see another.",
        )
        require(
            d_qk % 2 == 0 or "rotary" not in (positions, position_bias),
            f"`d_qk` must be even where pairs of channels turn; got {d_qk}. The paper's is 128.",
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
        mark(self, "gamma", "beta", group="default", weight_decay=False)
        self.rotary = Rotary(d_qk, base=rotary_base) if positions == "rotary" else None
        self.bias: nn.Module | None = None
        if quadratic and position_bias == "toeplitz":
            self.bias = ToeplitzBias(chunk_size, std=init_std)
        elif quadratic and position_bias == "rotary":
            self.bias = RotaryBias(chunk_size, d_qk, base=rotary_base, std=init_std)
        self.out = nn.Linear(self.d_value, d_model)
        draw([self.u, self.v, self.z, self.out], nn.init.normal_, std=init_std)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return O, and a `FlashState`."""
        past = self.init_state(x.shape[0], device=x.device) if state is None else state
        (_, time, _), C = x.shape, self.chunk_size
        U, V, Z = (functional.silu(linear(x)) for linear in (self.u, self.v, self.z))
        position, seen = positions(past.position, time, reset=reset)
        both = (Z[:, :, None, None] * self.gamma + self.beta).flatten(2, 3)
        if self.rotary is not None:
            (both,) = self.rotary(position, both)
        # of each part (b, t, parts, s), the quadratic one first
        Q, K = both.to(past.k.dtype).chunk(2, dim=2)
        keys, values = torch.cat([past.k, K.flatten(2)], 1), torch.cat([past.v, V.to(past.v.dtype)], 1)
        inspection.note(Q=Q, keys=keys, position=position)
        # views would keep all steps as long as the state
        S, last_k, last_v = past.S, keys[:, -C:].clone(), values[:, -C:].clone()
        if self.linear:
            # a key that is C steps late is of this sequence from its step C on
            own = (position >= C)[..., None, None]
            late_k, late_v = keys[:, :time, None, -self.d_qk :].where(own, 0), values[:, :time, None]
            if reset is not None:
                late_v = late_v.where(own, 0)
            V_far, S = gate_loop(Q[:, :, -1:] / C, late_k, late_v, state=S[:, None], reset=reset)
            S = S[:, 0]
        if reset is not None:
            # a weight of zero would let NaN pass
            cached = torch.arange(C, 0, -1, device=x.device) <= past.position[:, None]
            document = torch.cat([cached.long() - 1, documents(reset)], 1)
            other = (document != document[:, -1:])[:, -C:, None]
            last_k, last_v = last_k.masked_fill(other, 0), last_v.masked_fill(other, 0)
            isolation = Isolation(document)
            Q = isolation.enter(Q, begin=C, carried=False)
            keys, values = isolation.enter(keys, begin=0), isolation.enter(values, begin=0)
        V_near = self._near(Q, keys, values, position)
        if reset is not None:
            V_near = isolation.leave(V_near, begin=C, window=C)
        mixed = V_near + V_far[:, :, 0] if self.linear else V_near
        return self.out(U * mixed.to(x.dtype)), FlashState(last_k, last_v, S, seen)

    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> State:
        """Return zeros, at position 0."""
        widths, like = (self.gamma.shape[1] * self.d_qk, self.d_value), output_kwargs(self.v, device)
        k, v = (torch.zeros(batch, self.chunk_size, width, **like) for width in widths)
        S = None
        if self.linear:
            sizes = 1, self.d_qk, self.d_value
            S = gate_loop.empty_state(batch, *sizes, **self.factory_kwargs(device))[:, 0]
        return FlashState(k, v, S, torch.zeros(batch, dtype=torch.int64, device=k.device))

    def token_mixing(self, x: Tensor, *, reset: Tensor | None = None) -> Tensor:
        """Return magnitudes of the weights that V is multiplied by in V^quad + V^lin."""
        call, noted = self._memory(x, reset)
        # with the rows of the identity as values, the outputs are the weights
        identity = torch.eye(x.shape[1], dtype=noted["keys"].dtype, device=x.device)
        values = functional.pad(identity, (0, 0, self.chunk_size, 0)).expand(x.shape[0], -1, -1)
        mixing = self._near(noted["Q"], noted["keys"], values, noted["position"]).abs()
        if call is not None and (late := inspection.token_mixing(call)) is not None:
            # values enter S late by C steps
            late = late[:, :, self.chunk_size :]
            mixing = mixing + functional.pad(late, (0, x.shape[1] - late.shape[2]))
        return mixing

    def _near(self, Q: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> Tensor:
        """Return V^quad, and the sum of V^lin, over the steps less than C before each step."""
        C, windows = self.chunk_size, Windows(Q.shape[1], self.chunk_size)
        q, position = windows.steps(Q).transpose(2, 3), windows.steps(position)[..., None]
        k, v, age = windows.behind(keys), windows.behind(values), windows.age(Q.device)
        products = (q @ k.unflatten(2, (-1, self.d_qk))).unbind(2)
        in_chunk = age <= position % C
        weights = torch.zeros((), dtype=Q.dtype, device=Q.device)
        if self.quadratic:
            seen = in_chunk & (age >= 0)
            scores = products[0] / (self.d_qk**0.5 if self.activation == "softmax" else C)
            if self.bias is not None:
                scores = scores + self.bias()[age.clamp(0, C - 1)]
            if self.activation == "softmax":
                weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            else:
                weights = functional.relu(scores).masked_fill(~seen, 0)
                weights = weights.square() if self.activation == "relu2" else weights
        if self.linear:
            before = ~in_chunk & (age < C) & (age <= position)
            weights = weights + (products[-1] / C).masked_fill(~before, 0)
        return windows.joined(weights.to(values.dtype) @ v.mT)


class ToeplitzBias(nn.Module):
    """b_i = w_i for i = 0 .. size - 1, a learned number for each distance.

    Args:
        size: distances.
        std: standard deviation of w when training starts.
    """

    def __init__(self, size: int, *, std: float) -> None:
        super().__init__()
        self.w = nn.Parameter(std * torch.randn(size))

    def forward(self) -> Float[Tensor, "size"]:
        """Return the biases of all distances."""
        return self.w


class RotaryBias(nn.Module):
    """b_i = (R_0 a) . (R_i b) for i = 0 .. size - 1, of learned a and b, whose pairs of channels turn.

    Args:
        size: distances.
        d: channels of a and b, even.
        base: of the frequencies; see `linrec.nn.Rotary`.
        std: standard deviation of a and b when training starts.

    Source:
        Hua, Dai, Liu and Le, Transformer Quality in Linear Time (2022), its relative position bias from 512
        steps on.
    """

    def __init__(self, size: int, d: int, *, base: float = 10_000.0, std: float) -> None:
        super().__init__()
        self.size, self.rotary = size, Rotary(d, base=base)
        self.a = nn.Parameter(std * torch.randn(d))
        self.b = nn.Parameter(std * torch.randn(d))

    def forward(self) -> Float[Tensor, "size"]:
        """Return the biases of all distances."""
        distance = torch.arange(self.size, device=self.b.device)[None]
        (turned,) = self.rotary(distance, self.b.expand(1, self.size, 1, -1))
        return turned[0, :, 0] @ self.a
