"""SpaceTime (Zhang, Saab, Poli, Dao, Goel and Ré, 2023): state-space models with companion matrices.

    A = [e_2 | .. | e_N | a / |a|_1]
    x_t = A x_{t-1} + b u_t         y_t = c^T x_t + D u_t       o_t = y_t + W GELU(y_t) + w
    x_{t+h} = (A + b k^T)^h x_t     y_{t+h} = c^T x_{t+h}       u_{t+h+1} = k^T x_{t+h}       closed loop

u input of a channel, x state of a channel (N numbers), y output, o output of the layer, e_i unit vectors.
a, b, c and k are parameters of a channel, D is a skip weight, W and w are a map, t is time, h is the number
of steps of a forecast.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from linrec.nn.mixer import Mixer, State
from linrec.nn.parameters import mark
from linrec.ops.dense_ssm import dense_ssm
from linrec.rules import COUNT, at_least, divisor

__all__ = ["SpaceTime"]


class SpaceTime(Mixer):
    """x_t = A x_{t-1} + b u_t, y_t = c^T x_t + D u_t, with a companion matrix A for each channel.

    A companion matrix shifts the state by one place, and feeds its last entry back by a. So y can be any
    autoregression of order N, and any moving average of N inputs. |a|_1 = 1 keeps eigenvalues within the unit
    circle.

    With `closed_loop` it is the decoder's layer: o_t = y_t without D, W and w, and b, c and k are divided by
    their sums of magnitudes too. `forecast` then goes on from a state without inputs. In the released code,
    the state that a forecast starts from has the b that is not divided, and the next inputs have such a k.

    The released encoder's first block also has filters that are fixed: differences of the inputs, and
    deviations from moving averages. They are left out here.

    Args:
        d_model: width of the sequence, and channels.
        d_state: N, at least 2.
        n_kernels: how many systems there are; `d_model` / `n_kernels` neighbouring channels share one. None
            is `d_model`.
        closed_loop: whether there is a k, for `forecast`.
        mode: "auto", "convolution" or "recurrent".

    Raises:
        ValueError: an `n_kernels` that does not divide `d_model`, a `d_state` below 2, or an unknown mode.

    Source:
        Zhang, Saab, Poli, Dao, Goel and Ré, Effectively Modeling Time Series with Simple Discrete State
        Spaces (2023), sections 3.1 and 3.2. The layer around the systems is the released code's.

    Example:
        >>> mixer = SpaceTime(16, d_state=8)
        >>> y, state = mixer(torch.zeros(2, 50, 16))
        >>> y.shape, state.shape
        (torch.Size([2, 50, 16]), torch.Size([2, 16, 8]))
    """

    recurrence = "dense_ssm"

    def __init__(
        self,
        d_model: int,
        *,
        d_state: int = 64,
        n_kernels: int | None = None,
        closed_loop: bool = False,
        mode: str = "auto",
    ) -> None:
        super().__init__(d_model)
        dense_ssm.operator.check_mode(mode)
        at_least(2, most=COUNT, d_state=d_state)
        divisor("d_model", d_model, n_kernels=n_kernels, or_none=True)
        self.d_state, self.mode = d_state, mode
        systems = d_model if n_kernels is None else n_kernels
        self.a, self.b, self.c = (nn.Parameter(torch.randn(systems, d_state)) for _ in range(3))
        self.k = nn.Parameter(torch.randn(systems, d_state)) if closed_loop else None
        self.D = None if closed_loop else nn.Parameter(torch.randn(d_model))
        self.out = None if closed_loop else nn.Linear(d_model, d_model)
        names = ("a", "b", "c") if self.k is None else ("a", "b", "c", "k")
        # numbers of single channels, not matrices
        mark(self, *names, group="channel", weight_decay=True)
        self.keep_float32(*names)

    def mix(self, u: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return o, and x (b, d_model, N)."""
        A, b, c, _ = self.system()
        y, x = dense_ssm(u, A, b, c[:, None], state=state, reset=reset, mode=self.mode)
        y = y.squeeze(-1)
        if self.D is None or self.out is None:
            return y, x
        y = y + self.D.to(y.dtype) * u
        return y + self.out(functional.gelu(y)), x

    def system(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return A (d_model, N, N), b, c and, of a closed loop, k (d_model, N), in float32 or better."""
        dtype, each = self.state_dtype, self.d_model // len(self.a)
        a, b, c = (part.to(dtype) for part in (self.a, self.b, self.c))
        k = None if self.k is None else self.k.to(dtype)
        if k is not None:
            b, c, k = _normalised(b), _normalised(c), _normalised(k).repeat_interleave(each, 0)
        shift = torch.eye(self.d_state, dtype=dtype, device=a.device)[:, 1:].expand(len(a), -1, -1)
        A = torch.cat([shift, _normalised(a)[..., None]], -1)
        A, b, c = (part.repeat_interleave(each, 0) for part in (A, b, c))
        return A, b, c, k

    def forecast(
        self, state: Float[Tensor, "b d n"], horizon: int
    ) -> tuple[Float[Tensor, "b h d"], Float[Tensor, "b h d"]]:
        """Return y and the predicted next inputs u of the closed loop, from a state on.

        Args:
            state: x after the last step, as a call returns it.
            horizon: number of steps, at least 1. The first of them is y of the last step itself, which
                training compares with the step that follows.

        Raises:
            ValueError: a mixer without `closed_loop`, or a `horizon` below 1.
        """
        at_least(1, horizon=horizon)
        A, b, c, k = self.system()
        if k is None:
            raise ValueError("`closed_loop` must be True for a forecast; got False, which has no k.")
        outputs, loop = torch.stack([c, k], 1), A + b[..., None] * k[:, None]
        first = torch.einsum("dmn,bdn->bdm", outputs, state)
        nothing = state.new_zeros(len(state), horizon - 1, self.d_model)
        following, _ = dense_ssm(nothing, loop, b, outputs, state=state)
        y, u = torch.cat([first[:, None], following], 1).unbind(-1)
        return y, u


def _normalised(x: Tensor) -> Tensor:
    """Divide vectors by their sums of magnitudes, but vectors of zeros."""
    return x / x.abs().sum(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
