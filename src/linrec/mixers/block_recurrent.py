"""Block-Recurrent Transformer (Hutchins and others, 2022): states that attend to blocks, and back.

    K_e, V_e from E     K_s, V_s from S~ = norm(S) + P
    Y = [SA(Q_e; K_e, V_e) | CA(Q'_e; K_s, V_s)] W_o           vertical
    H = [SA(Q_s; K_s, V_s) | CA(Q'_s; K_e, V_e)]               horizontal
    S <- gate(S, H)                                            "skip"
    S <- gate(S, relu(H W_1))                                  "single"
    S <- gate(S, H), then gate(S, relu(norm(S) W_1))           "dual"

E are the inputs of a block of W steps, S the state vectors, P their position embeddings, SA self-attention
and CA cross-attention by heads, Q queries, K keys, V values, Y the output, and | joins heads. SA of E is
causal over a window of W steps, in the block and the block before. `StateGate` has the gates' equations.
"""

import math
from typing import Literal, NamedTuple, TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from linrec.nn.head_sizes import kv_groups, repeat_heads, split_width
from linrec.nn.mixer import State
from linrec.nn.norms import Norm, make_norm
from linrec.nn.parameters import mark, tensor_options
from linrec.nn.positions import BucketPositions, make_bucket_bias
from linrec.nn.projections import output_kwargs
from linrec.nn.segment_mixer import SegmentMixer, joined, keeps_keys
from linrec.nn.segments import Detach, Sight
from linrec.nn.visible_attention import visible_attention
from linrec.rules import at_least
from linrec.trees import replaced

__all__ = ["BlockRecurrent", "GateKind", "RecurrentStates", "StateGate"]

GateKind: TypeAlias = Literal["fixed", "full", "lstm"]
Configuration = Literal["skip", "single", "dual"]
QKNorm = Literal["l2", "none"]
Written = Literal["window", "block"]

# of the paper's models
CHANNELS_PER_HEAD = 128
STATE_STD = 0.1
# of the released code
QK_EPS = 1e-6
# of gates when training starts: standard deviation of biases, and variance of weights times their inputs
BIAS_STD, GATE_VARIANCE = 0.1, 0.1
# standard deviation of a standard normal distribution that is cut at two standard deviations
CUT = 0.87962566103423978


class RecurrentStates(NamedTuple):
    """The memory that a block leaves.

    Attributes:
        S: the state vectors (b, N, d_model).
        started: whether S was written (b,); the states are the learned S_0 otherwise.
        k: keys of the last block (b, W, h, d_head).
        v: values of the last block (b, W, h, d_head).
        alive: which steps of the last block are of the row's current sequence (b, W).
        k_s: keys of the state vectors (b, N, h, d_head); of no vectors before the first step of a block.
        v_s: values of the state vectors, likewise.
    """

    S: Float[Tensor, "b N d_model"]
    started: Bool[Tensor, "b"]
    k: Float[Tensor, "b W h d"]
    v: Float[Tensor, "b W h d"]
    alive: Bool[Tensor, "b W"]
    k_s: Float[Tensor, "b N h d"]
    v_s: Float[Tensor, "b N h d"]


class BlockRecurrent(SegmentMixer):
    """Y = [SA(Q_e; K_e, V_e) | CA(Q'_e; K_s, V_s)] W_o, with states S that each block of W steps updates.

    In the paper's model of 12 layers, the tenth layer is recurrent, and the others are attention with a
    sliding window: `mixer` is a pattern of "attention" and "block_recurrent". The defaults are the paper's
    best gate and configuration.

    | layer | arguments |
    |---|---|
    | of the paper's name Rec:fixed:skip | the defaults |
    | Rec:lstm:dual | `gate="lstm", configuration="dual"` |
    | of Transformer-XL's reach, the whole block before | `sliding=False` |

    The released code hides a step's own key, and a step at the start of a sequence sees keys of zeros in the
    place of steps that do not exist. Here a step sees itself and W - 1 steps before it. With `qk_norm="l2"`,
    the released code multiplies the position bias by the scale of scores too.

    Args:
        d_model: width of the sequence, and of a state vector.
        n_heads: heads. None is the largest number that divides `d_model` and leaves at least 128 channels to
            each head, or 1.
        d_head: channels of a head. None is `d_model` / `n_heads`.
        kv_heads: heads of keys and values, each shared by `n_heads` / `kv_heads` neighbouring queries. None
            is `n_heads`.
        segment_length: W, the steps of a block and of the window.
        n_states: N, the number of state vectors.
        gate: "fixed", "full" or "lstm".
        configuration: "skip", "single" or "dual".
        d_hidden: hidden units of "single" and "dual"; None is 4 `d_model`.
        sliding: whether a step sees W steps. Without it, a step sees all steps of the block before.
        write_from: the keys that states attend to: of the "window", the block and the block before, or of the
            "block" alone.
        positions: of the window, "t5", a learned bias for each head and bucket of distances, or "none".
        qk_norm: "l2" makes queries and keys unit vectors and multiplies scores by a learned number for each
            head; "none" divides scores by sqrt(d_head).
        state_norm: norm of the states before their projections, "rms", the released code's, or "layer".
        norm_eps: epsilon of that norm.
        detach: where gradients through the memory stop: a number n, at every n-th block, the paper's 8;
            "segment", after every block; or "never".
        dropout: probability that a weight of attention in the window is dropped, in training alone.

    Raises:
        ValueError: `n_heads` that does not divide `d_model`, an unknown name, or a number out of range.

    Source:
        Hutchins, Schlag, Wu, Dyer and Neyshabur, Block-Recurrent Transformers (2022), section 3. Norms of
        queries and keys are the released code's.

    Example:
        >>> mixer = BlockRecurrent(64, n_heads=4, segment_length=8, n_states=6)
        >>> y, state = mixer(torch.zeros(2, 20, 64))
        >>> y.shape, state.memory.S.shape, state.alive.shape
        (torch.Size([2, 20, 64]), torch.Size([2, 6, 64]), torch.Size([2, 4]))
    """

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int | None = None,
        d_head: int | None = None,
        kv_heads: int | None = None,
        segment_length: int = 512,
        n_states: int = 512,
        gate: GateKind = "fixed",
        configuration: Configuration = "skip",
        d_hidden: int | None = None,
        sliding: bool = True,
        write_from: Written = "window",
        positions: BucketPositions = "t5",
        qk_norm: QKNorm = "l2",
        state_norm: Norm = "rms",
        norm_eps: float = 1e-6,
        detach: Detach = 8,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(d_model, segment_length=segment_length, detach=detach, dropout=dropout)
        at_least(1, n_states=n_states, cure="The paper's is 512.")
        at_least(1, d_hidden=d_hidden, or_none=True)
        at_least(0, norm_eps=norm_eps)
        self.n_heads, self.d_head = split_width("d_model", d_model, n_heads, d_head, least=CHANNELS_PER_HEAD)
        self.kv_heads, self.n_states = kv_groups(self.n_heads, kv_heads), n_states
        self.configuration, self.sliding, self.write_from = configuration, sliding, write_from

        width, kv_width = self.n_heads * self.d_head, self.kv_heads * self.d_head
        # queries of self-attention, then of cross-attention
        self.q_e = nn.Linear(d_model, 2 * width, bias=False)
        self.k_e = nn.Linear(d_model, kv_width, bias=False)
        self.v_e = nn.Linear(d_model, kv_width, bias=False)
        self.q_s = nn.Linear(d_model, 2 * width, bias=False)
        self.k_s = nn.Linear(d_model, kv_width, bias=False)
        self.v_s = nn.Linear(d_model, kv_width, bias=False)
        self.state_norm = make_norm(state_norm, d_model, eps=norm_eps)
        self.S_0 = nn.Parameter(STATE_STD * torch.randn(n_states, d_model))
        self.P = nn.Parameter(torch.randn(n_states, d_model))
        mark(self, "S_0", "P", group="channel", weight_decay=False)
        # scales of the scores of SA and CA of E, then of S
        self.scale: nn.Parameter | None = None
        if qk_norm == "l2":
            self.scale = nn.Parameter(torch.ones(4, self.n_heads))
            mark(self, "scale", group="channel", weight_decay=False)
        self.bias = make_bucket_bias(positions, self.n_heads)
        self.out = nn.Linear(2 * width, d_model, bias=False)
        hidden = 4 * d_model if d_hidden is None else d_hidden
        self.gate = None if configuration == "single" else StateGate(2 * width, d_model, gate)
        self.hidden: nn.Linear | None = None
        self.hidden_gate: StateGate | None = None
        if configuration != "skip":
            single = configuration == "single"
            self.hidden = nn.Linear(2 * width if single else d_model, hidden, bias=False)
            self.hidden_gate = StateGate(hidden, d_model, gate, tanh=single)
        norm: Norm = state_norm if configuration == "dual" else "none"
        self.hidden_norm = make_norm(norm, d_model, eps=norm_eps)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return Y, and a `SegmentState` of a `RecurrentStates`, and the block's keys and values."""
        heads, state = self.by_segments(x, state, reset)
        return self.out(heads), state

    def prepare(self, memory: RecurrentStates) -> RecurrentStates:
        """Return the memory with K_s and V_s, which are computed again where weights may have changed."""
        if memory.k_s.shape[1] and keeps_keys(self):
            return memory
        k_s, v_s = self._of_states(self._states(memory))
        return replaced(memory, k_s=k_s, v_s=v_s)

    def read(
        self, E: Tensor, memory: RecurrentStates, segment: tuple[Tensor, Tensor], sight: Sight
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the heads of Y, and K_e and V_e of the block up to the new steps."""
        Q, Q_cross = self._heads(self.q_e, E).chunk(2, 2)
        K, V = map(joined, segment, (self._heads(self.k_e, E), self._heads(self.v_e, E)))
        keys, values = joined(memory.k, K), joined(memory.v, V)
        window = self.segment_length if self.sliding else None
        visible = sight.of(memory.alive, E.shape[1], window=window)
        bias = None if self.bias is None else self.bias(*visible.shape[1:])
        attended = self._attention(0, Q, keys, values, visible, bias, dropout=self.active_dropout)

        K_s, V_s, shown = memory.k_s.to(Q.dtype), memory.v_s.to(Q.dtype), None
        if sight.memory is not None:
            # a step after a reset sees the learned states, and other steps see S
            first = self._of_states(self.S_0.to(memory.S.dtype))
            K_s, V_s = (torch.cat([x, y.expand_as(x)], 1) for x, y in zip((K_s, V_s), first, strict=True))
            shown = torch.stack([sight.memory, ~sight.memory], -1).repeat_interleave(self.n_states, -1)
        crossed = self._attention(1, Q_cross, K_s, V_s, shown)
        return torch.cat([attended, crossed], 2).flatten(-2), (K, V)

    def write(
        self, memory: RecurrentStates, segment: tuple[Tensor, Tensor], alive: Tensor
    ) -> RecurrentStates:
        """Return the next states, and the block's keys and values."""
        S, (K, V) = self._states(memory), segment
        Q, Q_cross = self._heads(self.q_s, self._embedded(S)).chunk(2, 2)
        attended = self._attention(2, Q, memory.k_s.to(Q.dtype), memory.v_s.to(Q.dtype), None)
        keys, values, visible = K, V, alive
        if self.write_from == "window":
            keys, values = joined(memory.k, K), joined(memory.v, V)
            visible = torch.cat([memory.alive, alive], 1)
        visible = visible[:, None].expand(-1, self.n_states, -1)
        crossed = self._attention(3, Q_cross, keys, values, visible)
        h = torch.cat([attended, crossed], 2).flatten(-2)
        if self.gate is not None:
            S = self.gate(S, h)
            h = self.hidden_norm(S)
        if self.hidden is not None and self.hidden_gate is not None:
            S = self.hidden_gate(S, functional.relu(self.hidden(h)))
        none = K.new_zeros(K.shape[0], 0, *K.shape[2:])
        return RecurrentStates(S, torch.ones_like(memory.started), K, V, alive, none, none)

    @property
    def state_size(self) -> int:
        """Elements of the memory, of K_s and V_s, and of the longest unfinished block."""
        return super().state_size + self.n_states * 2 * self.kv_heads * self.d_head

    def start(
        self, batch: int, device: torch.device | str | None
    ) -> tuple[RecurrentStates, tuple[Tensor, Tensor]]:
        """Return the memory of no blocks, and no keys and values."""
        S = torch.zeros(batch, self.n_states, self.d_model, **self.factory_kwargs(device))
        steps, sizes = (batch, self.segment_length), (self.kv_heads, self.d_head)
        k = torch.zeros(*steps, *sizes, **output_kwargs(self.k_e, device))
        off = torch.zeros(steps, dtype=torch.bool, device=S.device)
        none = k.new_zeros(batch, 0, *sizes)
        return RecurrentStates(S, off.new_zeros(batch), k, k.clone(), off, none, none), (none, none)

    def _states(self, memory: RecurrentStates) -> Tensor:
        """Return S, or S_0 where no block has been written."""
        return torch.where(memory.started[:, None, None], memory.S, self.S_0.to(memory.S.dtype))

    def _embedded(self, S: Tensor) -> Tensor:
        """Return norm(S) + P, in the dtype of the weights."""
        return (self.state_norm(S) + self.P.to(S.dtype)).to(tensor_options(self.k_s)["dtype"])

    def _of_states(self, S: Tensor) -> tuple[Tensor, Tensor]:
        """Return K_s and V_s."""
        embedded = self._embedded(S)
        return self._heads(self.k_s, embedded), self._heads(self.v_s, embedded)

    def _heads(self, linear: nn.Linear, x: Tensor) -> Tensor:
        """Return queries, keys or values (b, n, heads, d_head)."""
        return linear(x).unflatten(-1, (-1, self.d_head))

    def _attention(
        self,
        place: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        visible: Tensor | None,
        bias: Tensor | None = None,
        *,
        dropout: float = 0.0,
    ) -> Tensor:
        """Return attention by heads to visible keys, or to all, with the scale of scores at `place`."""
        if self.scale is not None:
            # the attention divides by sqrt(d_head)
            scale = (self.scale[place].abs() * math.sqrt(self.d_head))[:, None].to(q.dtype)
            q, k = (x * (x.square().sum(-1, keepdim=True) + QK_EPS).rsqrt() for x in (q, k))
            q = q * scale
        k, v = repeat_heads(k, self.n_heads), repeat_heads(v, self.n_heads)
        return visible_attention(q, k, v, visible, bias, causal=False, dropout=dropout)


class StateGate(nn.Module):
    """Return the next states from states S and hidden units h.

        z = W_z h + b_z                                               (tanh of it, with `tanh`)
        "fixed": g = sigmoid(b)                                       S' = g S + (1 - g) z
        "full":  g = sigmoid(W h + b + 1)                             S' = g S + (1 - g) z
        "lstm":  f = sigmoid(W_f h + b_f + 1), i = sigmoid(W_i h + b_i - 1)     S' = f S + i z

    When training starts, b, b_f and b_i are normal with a standard deviation of 0.1. W, W_f and W_i are
    truncated normal with a variance of 0.1 / `d_hidden`.

    Args:
        d_hidden: channels of h.
        d_model: channels of S.
        kind: "fixed", "full" or "lstm".
        tanh: whether z is between -1 and 1.

    Source:
        Hutchins and others, Block-Recurrent Transformers (2022), section 3.3. "full", the initial values of
        gates, and z without tanh are the released code's.
    """

    def __init__(self, d_hidden: int, d_model: int, kind: GateKind, *, tanh: bool = False) -> None:
        super().__init__()
        self.kind, self.tanh = kind, tanh
        self.z = nn.Linear(d_hidden, d_model)
        if kind == "fixed":
            self.bias = nn.Parameter(BIAS_STD * torch.randn(d_model))
            mark(self, "bias")
            return
        # f and i of "lstm" side by side
        self.gates = mark(nn.Linear(d_hidden, d_model * (2 if kind == "lstm" else 1)))
        std = (GATE_VARIANCE / d_hidden) ** 0.5 / CUT
        nn.init.trunc_normal_(self.gates.weight, std=std, a=-2 * std, b=2 * std)
        nn.init.normal_(self.gates.bias, std=BIAS_STD)

    def forward(
        self, state: Float[Tensor, "b n d_model"], h: Float[Tensor, "b n d_hidden"]
    ) -> Float[Tensor, "b n d_model"]:
        """Return S', in the dtype of `state`."""
        z = self.z(h).to(state.dtype)
        z = torch.tanh(z) if self.tanh else z
        if self.kind == "lstm":
            f, i = self.gates(h).to(state.dtype).chunk(2, -1)
            return torch.sigmoid(f + 1) * state + torch.sigmoid(i - 1) * z
        logit = self.bias.to(state.dtype) if self.kind == "fixed" else self.gates(h).to(state.dtype) + 1
        return torch.lerp(z, state, torch.sigmoid(logit).expand_as(z))
