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
from torch import Tensor, nn
from torch.nn import functional

from linrec.nn.head_sizes import heads_of
from linrec.nn.mixer import Mixer, State
from linrec.nn.parameters import mark
from linrec.nn.state_space import DiagonalSSM, Spectrum
from linrec.ops.diagonal_ssm import diagonal_ssm
from linrec.ops.inspection import kernel_mixing, note
from linrec.ops.long_conv import Discretization, long_conv

__all__ = ["H3"]


class H3(Mixer):
    """O = Q SSM_diag(SSM_shift(K) V^T): linear attention whose sums over time are state-space models.

    The shift lets a key be compared with steps before, and the products of keys and values are stored under a
    state that forgets slowly; together they recall the token after an earlier occurrence of a token.

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
        Fu, Dao, Saab, Thomas, Rudra and Ré (2023), the H3 layer; constants and the learned B of the shift
        come from the released code.

    Example:
        >>> mixer = H3(16, n_heads=4, d_state=8)
        >>> y, (tail, x) = mixer(torch.zeros(2, 50, 16))
        >>> y.shape, tail.shape, x.shape
        (torch.Size([2, 50, 16]), torch.Size([2, 7, 16]), torch.Size([2, 4, 4, 4, 4]))
    """

    recurrence = "diagonal_ssm"

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
        self.d_state = d_state
        first = torch.zeros(d_model, d_state)
        first[:, 0] = 1
        self.shift_B = nn.Parameter(first)
        mark(self, "shift_B")
        bound = 1 / math.sqrt(d_state)
        self.shift_C = nn.Parameter(torch.empty(d_model, d_state).uniform_(-bound, bound))
        # taps of single channels, not a matrix
        mark(self, "shift_C", group="channel", weight_decay=True)
        self.shift_D = nn.Parameter(torch.randn(d_model))
        self.out = nn.Linear(d_model, d_model)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return y, the last keys (b, N - 1, d_model), and x of SSM_diag (b, d_head, d_head, n_heads, n).

        The axes d_head of the state are the channels of keys and then the channels of values.
        """
        tail, S = (None, None) if state is None else state
        q, k, v = self.q(x), self.k(x), self.v(x)

        B, C, now = (part.to(self.state_dtype) for part in (self.shift_B, self.shift_C, self.shift_D))
        more = (0, self.d_state - 1)
        taps = (functional.pad(C, more).unfold(1, self.d_state, 1) @ B[..., None]).squeeze(-1)
        taps = taps + functional.pad(now[:, None], more)
        if tail is None:
            tail = taps.new_zeros(x.shape[0], self.d_state - 1, self.d_model)
        # zero-length time would have fewer inputs than taps without one more
        k, keys = long_conv(k, taps, state=functional.pad(tail, (0, 0, 1, 0)), reset=reset)
        # a view would keep all keys as long as the state
        tail = keys[:, keys.shape[1] - self.d_state + 1 :].to(taps.dtype, copy=True)

        q, k, v = (part.unflatten(-1, (self.n_heads, self.d_head)) for part in (q, k, v))
        note(q=q, k=k)
        # every product of a key's and a value's channel is a sequence of its own
        products = (k[..., None] * v[..., None, :]).movedim((3, 4), (1, 2))
        z, rows = products.flatten(0, 2), products.shape[:3]
        each = None if reset is None else reset.repeat_interleave(self.d_head**2, 0)
        S = None if S is None else S.flatten(0, 2)
        *system, D = self.diagonal()
        KV, S = diagonal_ssm(z, *system, state=S, reset=each, mode=self.diagonal.mode)
        KV = KV + D.to(KV.dtype) * z

        o = (q.movedim(3, 1)[:, :, None] * KV.unflatten(0, rows)).sum(1)
        return self.out(o.movedim(1, 3).flatten(2)), (tail, S.unflatten(0, rows))

    def token_mixing(self, x: Tensor, *, reset: Tensor | None = None) -> Tensor:
        """Return the mean over heads of |K_{n-m} Q_n Kbar_m|, which V_m is multiplied by; K is SSM_diag's."""
        _, notes = self._memory(x, reset)
        kernel, (*_, D) = self.diagonal.kernel(x.shape[1]), self.diagonal()
        now = functional.pad(D.to(kernel.dtype)[:, None], (0, x.shape[1] - 1))
        weights = torch.einsum("bnhi,bmhi->bhnm", notes["q"], notes["k"])
        return kernel_mixing(kernel + now, x, reset, weights)
