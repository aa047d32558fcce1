"""Recurrent Attention Network, RAN (Li, Li, Luo, Xie, Liang and Zhang, 2023): a cell that windows pass on.

    X = LN([g_s | x_s])
    H = LN(MHA(X) + GLU(X)),  MHA with rotary positions
    c_s = standardise(H_0),  y_t = standardise(H_t), t = 1 .. W
    g_2 = c_1,  g_{s+1} = LN(c_s + GLU(c_{s-1}))
    o_t = LN(Attn(q_t; c_1 .. c_{s-1}) W_o + GLU(q_t)),  q_t = y_t W_q                 memory review

x_s are the W steps of window s, g_s its cell, c_s the cell that it leaves, o the outputs, and | joins steps.
GLU(x) = (W x + b) * sigmoid(W' x + b'), standardise(x) = (x - mean(x)) / std(x), and Attn has one head. g_1
is a parameter. Step t of a window sees the steps 0 .. t of X, and the cell, step 0, sees all of them.
"""

from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from linrec.nn.head_sizes import split_width
from linrec.nn.mixer import State
from linrec.nn.norms import make_norm
from linrec.nn.parameters import mark, tensor_options
from linrec.nn.projections import output_kwargs
from linrec.nn.rotary import Rotary
from linrec.nn.segment_mixer import PastSteps, SegmentMixer, joined
from linrec.nn.segments import Detach, Sight
from linrec.nn.visible_attention import visible_attention
from linrec.rules import at_least, positive

__all__ = ["RecurrentAttentionNetwork"]

# keys and values of a window's steps
Window: TypeAlias = tuple[Tensor, Tensor]

CHANNELS_PER_HEAD = 128
# of `standardise`
EPS = 1e-7


class RecurrentAttentionNetwork(SegmentMixer):
    """H = LN(MHA([g_s | x_s]) + GLU([g_s | x_s])): attention in windows, whose cell reaches later windows.

    The cell passes to the next window, and the outputs attend to the cells of all windows before, the memory
    review. The paper's classifiers see a whole window at once, and review the cells of later windows too.
    Here a step sees the past alone; the cell, which only later windows read, sees its whole window. With the
    released code's mask for language models the cell sees itself alone.

    The paper stacks layers without skip connections; a block has one beside the GLU. A step of the first
    window, or of a window that follows a reset, reviews nothing, and Attn is 0 there.

    Args:
        d_model: width of the sequence, and of a cell.
        n_heads: heads of MHA. None is the largest number that divides `d_model` and leaves at least 128
            channels to each head, or 1.
        d_head: channels of a head. None is `d_model` / `n_heads`.
        segment_length: W, the steps of a window.
        n_cells: cells that the review sees, the last ones; at least 2. The paper's is without a limit.
        silu: whether queries, keys, values and outputs of both attentions pass through a SiLU, as in the
            released code.
        rotary_base: base of the frequencies.
        norm_eps: epsilon of the norms, above 0: the first cell starts at zeros.
        detach: where gradients through the cells stop: "never", as in the paper; "segment", at every window;
            or a number n, at every n-th window.
        dropout: probability that a weight of MHA is dropped, in training alone.

    Raises:
        ValueError: `n_heads` that does not divide `d_model`, an odd number of channels to turn, or a number
            out of range.

    Source:
        Li and others, Recurrent Attention Networks for Long-text Modeling (2023), section 3.

    Example:
        >>> mixer = RecurrentAttentionNetwork(64, n_heads=4, segment_length=8, n_cells=6)
        >>> y, state = mixer(torch.zeros(2, 20, 64))
        >>> y.shape, state.memory.h.shape, state.memory.alive[0].tolist()
        (torch.Size([2, 20, 64]), torch.Size([2, 6, 64]), [False, False, False, False, True, True])
    """

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int | None = None,
        d_head: int | None = None,
        segment_length: int = 256,
        n_cells: int = 64,
        silu: bool = True,
        rotary_base: float = 10_000.0,
        norm_eps: float = 1e-5,
        detach: Detach = "never",
        dropout: float = 0.0,
    ) -> None:
        super().__init__(d_model, segment_length=segment_length, detach=detach, dropout=dropout)
        at_least(2, n_cells=n_cells, cure="A cell reads the two cells before it.")
        positive(norm_eps=norm_eps)
        self.n_heads, self.d_head = split_width("d_model", d_model, n_heads, d_head, least=CHANNELS_PER_HEAD)
        self.n_cells, self.silu = n_cells, silu
        self.rotary = Rotary(self.d_head, base=rotary_base)
        width = self.n_heads * self.d_head
        self.x_norm, self.h_norm, self.g_norm, self.o_norm = (
            make_norm("layer", d_model, eps=norm_eps) for _ in range(4)
        )
        self.q, self.k, self.v = (nn.Linear(d_model, width) for _ in range(3))
        self.out = nn.Linear(width, d_model)
        # of the memory review
        self.q_c, self.k_c, self.v_c, self.out_c = (nn.Linear(d_model, d_model) for _ in range(4))
        self.h_glu, self.g_glu, self.o_glu = (nn.Linear(d_model, 2 * d_model) for _ in range(3))
        self.g_1 = nn.Parameter(torch.zeros(d_model))
        mark(self, "g_1", group="channel", weight_decay=False)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return o, and a `SegmentState` of the cells, and the window's keys and values."""
        return self.by_segments(x, state, reset)

    def read(self, x: Tensor, memory: PastSteps, segment: Window, sight: Sight) -> tuple[Tensor, Window]:
        """Return o, and the keys and values of the window up to the new steps."""
        X, time = self.x_norm(x), x.shape[1]
        # a sequence's steps are counted from its cell, wherever in a window it starts
        own = torch.arange(1, time + 1, device=x.device)[None]
        q, k, v = self._heads(X, own if sight.steps is None else sight.steps.sum(-1))
        K, V = map(joined, segment, (k, v))
        starts = [self._cell(memory)]
        visible = sight.of(memory.alive[:, :1] | True, time)
        if sight.memory is not None:
            # a step after a reset sees the cell of a sequence's start
            starts.append(self.g_1.expand_as(starts[0]).to(starts[0].dtype))
            visible = torch.cat([visible[..., :1], ~sight.memory[..., None], visible[..., 1:]], -1)
        _, k_g, v_g = self._heads(self.x_norm(torch.cat(starts, 1)))
        keys, values = joined(k_g, K), joined(v_g, V)
        h = visible_attention(q, keys, values, visible, causal=False, dropout=self.active_dropout)
        y = _standardised(self._added(X, h))
        return self._reviewed(y, memory, sight.of_memory(memory.alive, time)), (K, V)

    def write(self, memory: PastSteps, segment: Window, alive: Tensor) -> PastSteps:
        """Return the cells with c_s behind them."""
        X = self.x_norm(self._cell(memory))
        q, k, v = self._heads(X)
        visible = functional.pad(alive, (1, 0), value=True)[:, None]
        K, V = map(joined, (k, v), segment)
        h = visible_attention(q, K, V, visible, causal=False)
        c = _standardised(self._added(X, h)).to(memory.h.dtype)
        return memory.then(PastSteps.of(c, torch.ones_like(alive[:, :1])))

    def _cell(self, memory: PastSteps) -> Float[Tensor, "b 1 d"]:
        """Return g_s."""
        before, last = memory.h[:, -2:].to(tensor_options(self.g_glu)["dtype"]).split(1, 1)
        one, two = memory.alive[:, -1:, None], memory.alive[:, -2:-1, None]
        g = torch.where(two, self.g_norm(last + functional.glu(self.g_glu(before))).to(last.dtype), last)
        return torch.where(one, g, self.g_1.to(g.dtype))

    def _heads(self, X: Tensor, position: Tensor | None = None) -> list[Tensor]:
        """Return q, k and v (b, n, heads, d_head), turned by their positions; None is 0."""
        q, k, v = (self._active(f(X)).unflatten(-1, (self.n_heads, -1)) for f in (self.q, self.k, self.v))
        return [q, k, v] if position is None else [*self.rotary(position, q, k), v]

    def _added(self, X: Tensor, heads: Tensor) -> Tensor:
        """Return H, from the heads of MHA."""
        return self.h_norm(self._active(self.out(heads.flatten(-2))) + functional.glu(self.h_glu(X)))

    def _reviewed(self, y: Tensor, memory: PastSteps, seen: Tensor) -> Tensor:
        """Return o, whose queries see some of the cells, or zeros if they see none."""
        cells = functional.pad(memory.h.to(y.dtype), (0, 0, 1, 0))
        q, k, v = (self._active(f(z)) for f, z in ((self.q_c, y), (self.k_c, cells), (self.v_c, cells)))
        v = v.masked_fill(torch.arange(v.shape[1], device=v.device)[:, None] == 0, 0)
        visible = torch.cat([~seen.any(-1, keepdim=True), seen], -1)
        found = visible_attention(q[:, :, None], k[:, :, None], v[:, :, None], visible, causal=False)[:, :, 0]
        return self.o_norm(self._active(self.out_c(found)) + functional.glu(self.o_glu(q)))

    def _active(self, x: Tensor) -> Tensor:
        return functional.silu(x) if self.silu else x

    def start(self, batch: int, device: torch.device | str | None) -> tuple[PastSteps, Window]:
        """Return no cells, and no keys and values."""
        memory = PastSteps.empty(batch, self.n_cells, self.d_model, **self.factory_kwargs(device))
        steps = torch.zeros(batch, 0, self.n_heads, self.d_head, **output_kwargs(self.k, device))
        return memory, (steps, steps)


def _standardised(x: Tensor) -> Tensor:
    """Return x with a mean of 0 and a deviation of 1 over channels."""
    return functional.layer_norm(x, x.shape[-1:], eps=EPS)
