"""Lightning attention: MiniMax-01, Scaling Foundation Models with Lightning Attention (MiniMax, 2025).

    Q, K, V = SiLU(X W_q), SiLU(X W_k), SiLU(X W_v)
    S_t = exp(-s_h (1 - l / (L - 1) + 1e-5)) S_{t-1} + k_t^T v_t        s_h = 2^(-8 h / H)
    o_t = q_t S_t
    Y = (RMSNorm(O) * sigmoid(X W_g)) W_o

X input, Q query, K key, V value, S state, s slope of head h = 1 .. H, l layer of L, counted from 0, O outputs
of all heads side by side, Y output, t time.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from linrec.nn.head_sizes import heads_of, most_heads
from linrec.nn.mixer import Mixer, State
from linrec.nn.norms import RMSNorm, gated
from linrec.nn.projections import projected
from linrec.ops.gate_loop import gate_loop
from linrec.rules import at_least, positive

__all__ = ["LightningAttention"]

# of the paper's model
CHANNELS_PER_HEAD = 128
# of the released code, which keeps the last layer from not decaying at all
FADE_EPS = 1e-5


class LightningAttention(Mixer):
    """S_t = exp(-s_h (1 - l / (L - 1) + 1e-5)) S_{t-1} + k_t^T v_t: decays are constants of head and layer.

    Decays are strongest in the first layer. l and L count the layers of all kinds; layers learn their places
    when a model calls `LightningAttention.place`, and a layer that stands alone is the first. The paper's
    model has a layer of softmax attention after each seven of these layers.

    All weights start as torch draws them.

    Args:
        d_model: width of the sequence.
        n_heads: heads H. None is the largest number that divides `d_model` and leaves at least 128 channels
            to each head, or 1.
        d_head: channels of a head; None is `d_model` / `n_heads`.
        output_gate: whether the normalised o is multiplied by sigmoid(X W_g).
        norm_eps: of the norm.

    Raises:
        ValueError: an `n_heads` that does not divide `d_model`, or a number out of range.

    Source:
        MiniMax (2025), section 2.2; activations, slopes, norm and gate are from the released code.

    Example:
        >>> mixer = LightningAttention(64, n_heads=4)
        >>> y, S = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, S.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 4, 16, 16]))
    """

    recurrence = "gate_loop"
    of_one_input = "q", "k", "v", "gate"

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int | None = None,
        d_head: int | None = None,
        output_gate: bool = True,
        norm_eps: float = 1e-6,
    ) -> None:
        super().__init__(d_model)
        at_least(1, n_heads=n_heads, d_head=d_head, or_none=True)
        positive(norm_eps=norm_eps, cure="The released code has 1e-6.")
        self.n_heads = most_heads(d_model, CHANNELS_PER_HEAD) if n_heads is None else n_heads
        self.d_head = heads_of("d_model", d_model, self.n_heads) if d_head is None else d_head
        width = self.n_heads * self.d_head
        self.place(0, 1)
        self.q = nn.Linear(d_model, width, bias=False)
        self.k = nn.Linear(d_model, width, bias=False)
        self.v = nn.Linear(d_model, width, bias=False)
        self.norm = RMSNorm(width, eps=norm_eps)
        self.gate = nn.Linear(d_model, width, bias=False) if output_gate else None
        self.out = nn.Linear(width, d_model, bias=False)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return Y, and S (b, h, dk, dv)."""
        *qkv, g = projected(x, self.q, self.k, self.v, self.gate)
        q, k, v = (functional.silu(part).unflatten(-1, (self.n_heads, -1)) for part in qkv)
        h = torch.arange(1, self.n_heads + 1, **self.factory_kwargs(x.device))
        log_decay = -(2.0 ** (-8 * h / self.n_heads)) * self.fade
        o, state = gate_loop(q, k, v, log_decay, state=state, reset=reset)
        o = gated(self.norm(o.flatten(-2)).to(x.dtype), g, torch.sigmoid)
        return self.out(o), state

    def place(self, layer: int, n_layers: int) -> None:
        """Weaken the decays by the layer's place among the layers of all kinds."""
        self.fade = 1 - layer / (n_layers - 1 + FADE_EPS) + FADE_EPS
