"""Long filters of Hyena: functions of position, made by a small network of sines."""

import itertools
import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from linrec.nn.long_filters import LongFilter
from linrec.nn.parameters import Float32Module
from linrec.ops.core.precision import without_autocast
from linrec.rules import require

__all__ = ["ImplicitFilter", "SineNetwork"]

# how much of a window is left at `fast` and at `slow` times L
FADED = 0.01
# the lowest frequency of the positional encoding, in periods per L
LOWEST = 1e-4


class SineNetwork(Float32Module):
    """z_1 = sin(omega_1 (W_1 p_t + b_1)), .., z_j = sin(omega_j (W_j z_{j-1} + b_j)): features of positions.

    p_t is t / (L - 1) and the real and imaginary parts of exp(-2 pi i f_k t / L), the positional encoding.

    Args:
        length: L, steps of a period of the lowest whole frequency.
        n_bands: frequencies of the positional encoding, which start near 0 and end at n_bands - 1.
        width: of each layer.
        depth: layers.
        omega: where the frequencies of the sines start.
        shared_omega: whether omega is the same for all layers.
        learn_positions: whether p is a parameter, which starts as the positional encoding.

    Source:
        Hyena Hierarchy (Poli and others, 2023), its section on filters.

    Example:
        >>> network = SineNetwork(8, n_bands=2, width=4, depth=3, omega=10.0)
        >>> network(torch.arange(5.0)).shape
        torch.Size([5, 4])
    """

    def __init__(
        self,
        length: int,
        *,
        n_bands: int,
        width: int,
        depth: int,
        omega: float,
        shared_omega: bool = False,
        learn_positions: bool = False,
    ) -> None:
        super().__init__()
        self.length, self.n_bands, self.depth = length, n_bands, depth
        sizes = [1 + 2 * n_bands, *[width] * depth]
        self.layers = nn.ModuleList(nn.Linear(m, n) for m, n in itertools.pairwise(sizes))
        self.omega = nn.Parameter(torch.full((1 if shared_omega else depth, 1, width), float(omega)))
        self.keep_float32("layers", "omega")
        self.p: nn.Parameter | None = None
        if learn_positions:
            self.p = nn.Parameter(self._encoding(torch.arange(length, dtype=self.omega.dtype)))
            self.keep_float32("p")

    def forward(self, t: Float[Tensor, "taps"]) -> Float[Tensor, "taps width"]:
        """Return features of the positions `t` = 0, 1, .., in their dtype."""
        z = self._encoding(t) if self.p is None else self.p[: len(t)].to(t.dtype)
        omegas = self.omega.to(t.dtype).expand(self.depth, -1, -1)
        for layer, omega in zip(self.layers, omegas, strict=True):
            z = torch.sin(omega * layer(z))
        return z

    def _encoding(self, t: Float[Tensor, "taps"]) -> Float[Tensor, "taps n"]:
        """Return p of the positions `t`."""
        f = torch.linspace(LOWEST, self.n_bands - 1, self.n_bands, dtype=t.dtype, device=t.device)
        angle = 2 * math.pi / self.length * t[:, None] * f
        return torch.cat([t[:, None] / max(1, self.length - 1), angle.cos(), -angle.sin()], 1)


class ImplicitFilter(LongFilter):
    """h_t = (exp(-alpha t / (L - 1)) + shift) W z(t), and D more for t = 0, for every channel.

    Args:
        channels: d.
        network: z, which filters of a layer share.
        fast: share of L at which the window of the last channel has faded to 0.01.
        slow: the same of the first channel; alpha is evenly spaced in between.
        shift: the value that windows approach at their end.
        n_heads: neighbouring groups of channels that have the same W, D and windows.
        among: (n, M) for windows of filter n of M, counted from 0; the alphas of all filters take turns in an
            evenly spaced range.

    Source:
        Hyena Hierarchy (Poli and others, 2023), its section on filters.

    Example:
        >>> network = SineNetwork(8, n_bands=2, width=4, depth=3, omega=10.0)
        >>> ImplicitFilter(6, network, fast=0.3, slow=1.5, shift=0.0).kernel(10).shape
        torch.Size([6, 10])
    """

    def __init__(
        self,
        channels: int,
        network: SineNetwork,
        *,
        fast: float,
        slow: float,
        shift: float,
        n_heads: int = 1,
        among: tuple[int, int] = (0, 1),
    ) -> None:
        super().__init__(channels, network.length)
        require(
            0 < fast <= slow,
            f"`fast` and `slow` must be shares of `length` with 0 < fast <= slow; got {fast} and {slow}.",
        )
        self.network, self.fast, self.slow, self.shift = network, fast, slow, shift
        self.n_heads, self.among = n_heads, among
        self.out = nn.Linear(network.omega.shape[-1], channels // n_heads, bias=False)
        self.keep_float32("out")
        self.D = nn.Parameter(torch.randn(channels // n_heads))

    def taps(self, length: int, *, device: torch.device | None = None) -> Float[Tensor, "d length"]:
        """Return the first taps of h, with D."""
        device, dtype = device or self.D.device, self.state_dtype
        with without_autocast(device.type):
            t = torch.arange(length, dtype=dtype, device=device)
            h = self.out(self.network(t)).mT
            slowest, fastest = (-math.log(FADED) / share for share in (self.slow, self.fast))
            n, count = self.among
            alpha = torch.linspace(slowest, fastest, count * len(self.D), dtype=dtype, device=device)[
                n::count
            ]
            h = h * (torch.exp(-alpha[:, None] * t / max(1, self.length - 1)) + self.shift)
            h = torch.cat([h[:, :1] + self.D.to(dtype)[:, None], h[:, 1:]], 1)
            return h if self.n_heads == 1 else h.repeat(self.n_heads, 1)
