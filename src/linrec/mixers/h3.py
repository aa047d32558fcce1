"""H3: Hungry Hungry Hippos, Towards Language Modeling with State Space Models (Fu, Dao and others, 2023).

    Q_t = W_Q u_t + b_Q     K_t = W_K u_t + b_K     V_t = W_V u_t + b_V
    Kbar = SSM_shift(K)
    KV = SSM_diag(Kbar_t V_t^T)     of each head
    O_t = Q_t KV_t
    y_t = W_O [O_t of all heads] + b_O

u input, Q, K and V query, key and value, y output, t time. Both SSMs are x_t = A x_{t-1} + B z_t with outputs
C x_t + D z_t, for an input z of one channel. SSM_shift runs on each channel of K; its A moves all entries of
x on by one, so that it keeps the last N inputs: a convolution of N taps, C_{n+l} B_n summed over n. SSM_diag
is S4D's (`linrec.mixers.s4d`), and the same for all products of a head.
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from linrec.nn.head_sizes import heads_of
from linrec.nn.mixer import Mixer, State, Transitions
from linrec.nn.parameters import mark
from linrec.nn.state_space import DiagonalSSM, Spectrum
from linrec.ops.inspection import kernel_mixing
from linrec.ops.long_conv import Discretization, long_conv

__all__ = ["H3"]


class H3(Mixer):
    """O = Q SSM_diag(SSM_shift(K) V^T): linear attention whose sums over time are state-space models.

    The shift lets a key be compared with steps before, and the products of keys and values are stored under a
    state that forgets slowly; together they recall what came after an earlier occurrence of a token.

    | model | arguments |
    |---|---|
    | H3 | the defaults: heads of one channel |
    | H3 with attention in two layers | `ModelConfig(mixer=...)`; the preset "h3-hybrid" |
    | wider heads | `n_heads`; a head of c channels remembers c^2 products of a key and a value |

    When training starts, the shift's B is the first unit vector, its C uniform in +- 1 / sqrt(N), and its D
    normal; the diagonal model is S4D-Lin with the bilinear transform. A, B and the step sizes of both are
    marked as group "transition" without weight decay.

    Args:
        d_model: width of the sequence, and of q, k and v.
        n_heads: heads h. None is `d_model`, heads of one channel.
        d_state: N, steps of the shift, and numbers of the real state of each product of a key and a value;
            even, but with `init="real"`.
        init: where A of the diagonal model starts, "lin", "inv", "legs" or "real".
        discretization: of the diagonal model, "bilinear", "zoh" or "euler".
        dt_min: smallest step size when training starts.
        dt_max: largest step size when training starts.
        mode: of the diagonal model, "auto", "convolution", "recurrent" or "scan".

    Raises:
        ValueError: `n_heads` that does not divide `d_model`, an unknown name, a `d_state` that is odd or not
            positive, a step size that is not positive, or one that makes Euler's steps unstable.

    Source:
        Fu, Dao, Saab, Thomas, Rudra and Ré (2023), the H3 layer; constants and the learned B of the shift are
        those of the released code.

    Example:
        >>> import torch
        >>> mixer = H3(16, n_heads=4, d_state=8)
        >>> y, (tail, x) = mixer(torch.zeros(2, 50, 16))
        >>> y.shape, tail.shape, x.shape
        (torch.Size([2, 50, 16]), torch.Size([2, 7, 16]), torch.Size([2, 4, 4, 4, 4]))
    """

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int | None = None,
        d_state: int = 64,
        init: Spectrum = "lin",
        discretization: Discretization = "bilinear",
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        mode: str = "auto",
    ) -> None:
        super().__init__(d_model)
        self.n_heads = d_model if n_heads is None else n_heads
        self.d_head = heads_of("d_model", d_model, self.n_heads)
        self.q = nn.Linear(d_model, d_model)
        self.k = nn.Linear(d_model, d_model)
        self.v = nn.Linear(d_model, d_model)
        self.diagonal = DiagonalSSM(
            self.n_heads,
            d_state=d_state,
            init=init,
            discretization=discretization,
            dt_min=dt_min,
            dt_max=dt_max,
            mode=mode,
        )
        first = torch.zeros(d_model, d_state)
        first[:, 0] = 1
        self.shift_B = nn.Parameter(first)
        mark(self, "shift_B", group="transition", weight_decay=False)
        bound = 1 / math.sqrt(d_state)
        self.shift_C = nn.Parameter(torch.empty(d_model, d_state).uniform_(-bound, bound))
        # taps of single channels, not a matrix
        mark(self, "shift_C", group="channel", weight_decay=True)
        self.shift_D = nn.Parameter(torch.randn(d_model))
        self.out = nn.Linear(d_model, d_model)

    def forward(
        self,
        x: Float[Tensor, "b t d_model"],
        state: State = None,
        *,
        reset: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b t d_model"], State]:
        """Mix `x` over time; see `Mixer.forward`.

        The state is the last keys (b, N - 1, d_model), and x of the diagonal model, (b, d_head, d_head,
        n_heads, n): channels of keys before those of values.
        """
        self.check_input(x, reset, state)
        tail, S = (None, None) if state is None else state
        q, k, tail = self._queries_and_keys(x, tail, reset)
        v = self._in_heads(self.v(x))
        # every product of a key's and a value's channel is a sequence of its own
        products = (k[..., None] * v[..., None, :]).movedim((3, 4), (1, 2))
        sequences = products.flatten(0, 2)
        each = None if reset is None else reset.repeat_interleave(self.d_head**2, 0)
        KV, S = self.diagonal(sequences, None if S is None else S.flatten(0, 2), reset=each)
        S = S.unflatten(0, products.shape[:3])
        o = (q.movedim(3, 1)[:, :, None] * KV.unflatten(0, products.shape[:3])).sum(1)
        return self.out(o.movedim(1, 3).flatten(2)), (tail, S)

    def taps(self) -> Float[Tensor, "d_model N"]:
        """The convolution that SSM_shift is, its D included, the tap of the current step first."""
        dtype = self._state_dtype()
        B, C = self.shift_B.to(dtype), self.shift_C.to(dtype)
        N = C.shape[1]
        taps = (functional.pad(C, (0, N - 1)).unfold(1, N, 1) @ B[..., None]).squeeze(-1)
        return taps + functional.pad(self.shift_D.to(dtype)[:, None], (0, N - 1))

    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> tuple[Tensor, Tensor]:
        """Zeros (batch, N - 1, d_model) and (batch, d_head, d_head, n_heads, n)."""
        device = self.shift_D.device if device is None else device
        steps = self.shift_C.shape[1] - 1
        tail = torch.zeros(batch, steps, self.d_model, dtype=self._state_dtype(), device=device)
        S = self.diagonal.init_state(batch * self.d_head**2, **self.factory_kwargs(device))
        return tail, S.unflatten(0, (batch, self.d_head, self.d_head))

    @property
    def state_size(self) -> int:
        """Last keys, and elements of x of the diagonal model, counting a complex number once."""
        return self.d_model * (self.shift_C.shape[1] - 1) + self.d_head**2 * self.diagonal.A_log.numel()

    def transitions(self, x: Float[Tensor, "b t d_model"]) -> Transitions:
        """Abar of the diagonal model of each head, constant in time; see `Mixer.transitions`."""
        return self.diagonal.transitions()

    def token_mixing(
        self, x: Float[Tensor, "b t d_model"], *, reset: Bool[Tensor, "b t"] | None = None
    ) -> Float[Tensor, "b t t"]:
        """Mean over heads of |k_{n-m} Q_n Kbar_m|, which V_m is multiplied by; k is SSM_diag's kernel."""
        q, k, _ = self._queries_and_keys(x, None, reset)
        kernel = self.diagonal.kernel(x.shape[1])
        now = functional.pad(self.diagonal.D.to(kernel.dtype)[:, None], (0, x.shape[1] - 1))
        return kernel_mixing(kernel + now, x, reset, torch.einsum("bnhi,bmhi->bhnm", q, k))

    def _queries_and_keys(
        self, x: Tensor, tail: Tensor | None, reset: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Q and Kbar in heads, and the last keys."""
        taps = self.taps()
        if tail is None:
            tail = taps.new_zeros(x.shape[0], taps.shape[1] - 1, self.d_model)
        # no step, which takes none of it, would be too few inputs without one more
        earlier = functional.pad(tail, (0, 0, 1, 0))
        k, keys = long_conv(self.k(x), taps, state=earlier, reset=reset)
        # a view would keep all keys as long as the state
        tail = keys[:, x.shape[1] + 1 :].to(taps.dtype, copy=True)
        return self._in_heads(self.q(x)), self._in_heads(k), tail

    def _in_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.n_heads, self.d_head))
