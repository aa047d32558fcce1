"""S4ND: Modeling Images and Videos as Multidimensional Signals Using State Spaces (Nguyen and others, 2022).

    K = K^(1) x K^(2)     K^(i)_l = 2 Re(C^(i) Abar^l Bbar) for l >= 0, and another C^(i) for l < 0
    y = K * u + D u
    o = GLU(W GELU(y) + b)

u input of a channel, K^(i) the kernel of axis i, x the outer product: K_(l, m) = K^(1)_l K^(2)_m, y
output of the channel, o output of the layer; Abar and Bbar of a diagonal state-space model
(`linrec.mixers.s4d`) for each channel and axis. A convolution with an outer product equals successive
convolutions with its factors, each along its own axis.
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from linrec.nn.channel_mixing import Output, PositionWise
from linrec.nn.mixer import Mixer, State
from linrec.nn.state_space import DiagonalSSM, Spectrum, per_channel
from linrec.ops.core.call import refuse_split_time
from linrec.ops.diagonal_ssm import diagonal_ssm
from linrec.ops.long_conv import Discretization
from linrec.rules import at_least, positive, require

__all__ = ["S4ND"]


class S4ND(Mixer):
    """y = (K^(1) x .. x K^(n)) * u + D u for images and videos, with a state-space kernel for every axis.

    In one layer a pixel receives information from all others. The layer is a `Mixer`, so that a `Block`
    accepts it. But every output depends on the whole input, so it has no state.

    | option of the paper or the released code | argument |
    |---|---|
    | videos | `axes=3` |
    | causal kernels | `bidirectional=False` |
    | kernels without high frequencies, for training at low resolution | `bandlimit` |
    | inputs of a different resolution than in training | `step_rescale` |
    | kernels that are means of outer products, `trank` | `rank` |
    | separate A and B of the kernels for every channel, `n_ssm` | `n_ssm=None` |

    As in the released code, the backward kernel along an axis starts at the next pixel. The released code
    also offers kernels of S4, whose matrix is diagonal plus low rank.

    Args:
        d_model: width, the number of channels.
        axes: n, the number of axes of inputs (b, *grid, d_model).
        d_state: N, real numbers of state per channel and axis; even, except with `init="real"`.
        init: initial A, "legs", "lin", "inv" or "real".
        discretization: "zoh", "bilinear" or "euler".
        dt_min: smallest initial step size.
        dt_max: largest initial step size.
        n_ssm: number of distinct A and B per axis; None means `d_model`.
        bidirectional: whether kernels are two-sided.
        rank: number of outer products whose mean is K.
        bandlimit: None, or alpha: frequencies dt |Im A| / (2 pi) of alpha / 2 or more are removed. The
            highest frequency of a grid is 1 / 2, at alpha = 1.
        step_rescale: factor on all step sizes, such as 2 for images with half the rows and columns.
        activation: whether GELU is applied to y.
        output: channel mixing at the end, "glu", "linear" or "none".

    Raises:
        ValueError: a name is unknown, a number is out of range, `n_ssm` does not divide `d_model`,
            `bandlimit` is given with real states, or 0 < dt_min <= dt_max does not hold.

    Source:
        S4ND (Nguyen, Goel, Gu, Downs, Shah, Dao, Baccus and Ré, 2022), its section on the layer and on
        bandlimiting; the defaults are the released code's, except that A has no low-rank part.

    Example:
        >>> import torch
        >>> layer = S4ND(8, d_state=4)
        >>> y, _ = layer(torch.zeros(2, 5, 7, 8))
        >>> y.shape
        torch.Size([2, 5, 7, 8])
    """

    def __init__(
        self,
        d_model: int,
        *,
        axes: int = 2,
        d_state: int = 64,
        init: Spectrum = "legs",
        discretization: Discretization = "zoh",
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        n_ssm: int | None = 1,
        bidirectional: bool = True,
        rank: int = 1,
        bandlimit: float | None = None,
        step_rescale: float = 1.0,
        activation: bool = True,
        output: Output = "glu",
    ) -> None:
        super().__init__(d_model)
        at_least(1, axes=axes, rank=rank)
        positive(step_rescale=step_rescale, cure="It is a factor; 1.0 leaves the steps as they are.")
        positive(bandlimit=bandlimit, or_none=True)
        require(
            bandlimit is None or init != "real",
            f'`bandlimit` must be None with `init="real"`, which has no frequencies; got {bandlimit}.',
        )
        self.rank, self.bandlimit, self.step_rescale = rank, bandlimit, step_rescale
        self.bidirectional = bidirectional
        self.kernels = nn.ModuleList(
            DiagonalSSM(
                d_model,
                d_state=d_state,
                init=init,
                discretization=discretization,
                dt_min=dt_min,
                dt_max=dt_max,
                n_ssm=n_ssm,
                n_outputs=rank * (1 + bidirectional),
                skip=False,
            )
            for _ in range(axes)
        )
        self.D = nn.Parameter(torch.randn(d_model))
        self.out = PositionWise(d_model, output=output, activation=activation)

    def forward(
        self,
        x: Float[Tensor, "b *grid d_model"],
        state: State = None,
        *,
        reset: Bool[Tensor, "b t"] | None = None,
        dt: Float[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b *grid d_model"], None]:
        """Mix `x` over all its axes.

        Args:
            x: (b, *grid, d_model), such as (b, rows, columns, d_model), of any size.
            state: None.
            reset: None: an image is a single sequence.
            dt: None: pixels have equal distances.

        Returns:
            o in the shape of `x`, and None.

        Raises:
            ValueError: `x` has the wrong shape, or `state`, `reset` or `dt` is not None.
            TypeError: `x` is not of a floating dtype.
        """
        axes = len(self.kernels)
        require(
            x.ndim == axes + 2 and x.shape[-1] == self.d_model,
            f"`x` must have shape (batch, {axes} axes, d_model = {self.d_model}); got {tuple(x.shape)}. "
            "Pass channels last.",
        )
        if not x.is_floating_point():
            raise TypeError(f"`x` must be of a real floating dtype; got {x.dtype}. Embed pixels first.")
        require(
            state is None and reset is None and dt is None,
            "`state`, `reset` and `dt` must be None for S4ND; got a tensor. Pass the whole image at once.",
        )
        refuse_split_time("S4ND")
        # every outer product has its own copy of the channels
        y = x if self.rank == 1 else torch.cat([x] * self.rank, -1)
        for axis, kernel in enumerate(self.kernels, 1):
            lines = y.movedim(axis, -2)
            y = self._along(kernel, lines.flatten(0, -3)).view(lines.shape).movedim(-2, axis)
        y = y.unflatten(-1, (self.rank, -1)).mean(-2) + self.D.to(y.dtype) * x
        return self.out(y), None

    def _along(self, kernel: nn.Module, u: Tensor) -> Tensor:
        """Return K^(i) * u for lines u (b, t, rank d_model) along one axis."""
        assert isinstance(kernel, DiagonalSSM)
        Abar, Bbar, C = kernel.discrete(self.step_rescale)
        if self.bandlimit is not None and kernel.A_imag is not None:
            A_imag, dt = per_channel(kernel.channels, kernel.A_imag, kernel.dt_log.exp()[:, None])
            C = torch.where(dt * A_imag.abs() / (2 * math.pi) < self.bandlimit / 2, C, 0)
        d = u.shape[-1]
        y, _ = diagonal_ssm(u, Abar[:d], Bbar[:d], C[:d])
        if self.bidirectional:
            back, _ = diagonal_ssm(u.flip(1), Abar[d:], Bbar[d:], C[d:])
            # the backward kernel starts at the next pixel
            y = y + nn.functional.pad(back.flip(1)[:, 1:], (0, 0, 0, 1))
        return y

    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> None:
        """Return None: there is no state."""

    @property
    def is_causal(self) -> bool:
        """False: images have no order."""
        return False
