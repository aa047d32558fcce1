"""Hyena Hierarchy: Towards Larger Convolutional Language Models (Poli and others, 2023).

    (v, x^1, .., x^N) = ShortConv(W x + b)
    z^1 = v     z^{n+1}_t = x^n_t * (h^n * z^n)_t     y = z^{N+1}     o = W_o y + b_o
    h^n_t = (exp(-alpha t / (L - 1)) + shift) FFN^n(PositionalEncoding(t)),  and D^n more for t = 0

x input, v value, x^n gates, h^n filters, one for each channel, N the order, y output of the recurrence, o
output of the layer; L taps, alpha the decay of a channel's window. FFN has sines between its layers,
sin(omega z) with a learned omega per unit. PositionalEncoding(t) is t / (L - 1) and the real and imaginary
parts of exp(-2 pi i f_k t / L).
"""

import itertools
import math
from typing import NamedTuple, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from linrec.nn.long_filters import Filter, LongFilter
from linrec.nn.mixer import Mixer, State
from linrec.nn.parameters import Float32Module, mark
from linrec.nn.projections import draw
from linrec.nn.short_convolution import ShortConvolution
from linrec.ops.core.isolation import documents
from linrec.ops.core.precision import without_autocast
from linrec.ops.inspection import note
from linrec.rules import COUNT, at_least, divisor, positive, require

__all__ = ["Hyena", "HyenaState", "ImplicitFilter", "SineNetwork"]

# how much of a window is left at `fast` and at `slow` times L
FADED = 0.01
# the lowest frequency of the positional encoding, in periods per L
LOWEST = 1e-4


class HyenaState(NamedTuple):
    """The state of Hyena between two pieces of a sequence.

    Args:
        tail: of the short convolution (b, conv_size - 1, (N + 1) d_model), or None without one.
        filters: of each filter: the inputs so far (b, s, d_model), or modes (b, d_model, n) once distilled.
    """

    tail: Float[Tensor, "b width c"] | None
    filters: tuple[Tensor, ...]


class Hyena(Mixer):
    """z^{n+1}_t = x^n_t * (h^n * z^n)_t, n = 1 .. N, from v to y: long convolutions and gates in turn.

    Filters are functions of position with `length` taps, made by a small network; choose the length of the
    sequences in training as `length`. Longer sequences run, too, and no step sees further back than `length`
    - 1 steps. The state is the inputs of each filter, up to `length` - 1 steps. `linrec.lab.distillation`
    turns a trained layer into a recurrence with a state of fixed size.

    | variant | argument |
    |---|---|
    | Hyena-2, Hyena-3 | `order=2`, 3 |
    | the authors' code, whose order N has N - 1 filters: v is not filtered | `first_filter=False` |
    | the authors' code, whose layers of sines share omega | `shared_omega=True` |
    | the authors' code, which spaces the windows of all filters together | `joint_windows=True` |
    | the authors' code, which trains the positional encoding | `learn_positions=True` |
    | the authors' code, whose windows end at zero | `shift=0.0` |
    | heads, which share the filters of d_model / n_heads channels | `n_heads` |

    The paper states neither omega nor the spacing of windows; both come from the authors' code (HyenaDNA).
    The authors' code has an argument for heads and cannot run with more than one.

    Linear layers start as torch's own; D is normal. The sine networks and their outputs are marked as group
    "transition" without weight decay, since the authors' code trains them separately. The authors' language
    models start with `std=0.02` and `out_std` = 0.02 / sqrt(2 layers).

    Args:
        d_model: width of the sequence, of v and of each gate.
        order: N, gates.
        length: L, taps of each filter.
        first_filter: whether h^1 filters v, or z^2 = x^1 * v.
        n_heads: neighbouring groups of channels that have the same filters.
        conv_size: taps of the short convolution; None disables it.
        d_filter: width of the sine network.
        filter_depth: its layers with sines.
        n_bands: frequencies of the positional encoding.
        omega: frequency that sines start with.
        shared_omega: whether all layers of sines have one omega per unit together.
        fast: share of L at which the fastest window has faded to 0.01.
        slow: the same of the slowest window.
        joint_windows: whether alpha is evenly spaced over the channels of all filters, the filters of a
            channel being neighbours, and not over the channels of each filter alone.
        learn_positions: whether PositionalEncoding is a parameter.
        shift: the value that windows approach at their end.
        bias: whether the projections have biases.
        std: standard deviation of all matrices when training starts, the sine networks' included, whose
            biases are then zero; None is torch's own start.
        out_std: the same of W_o alone; None is `std`.

    Raises:
        ValueError: an `order` below 1, or below 2 without the first filter, another number below 1,
            `n_heads` that do not divide `d_model`, or windows without 0 < fast <= slow.

    Source:
        Hyena Hierarchy (Poli and others, 2023), its definition of the order-N operator, and its section on
        filters.

    Example:
        >>> mixer = Hyena(16, length=64)
        >>> y, state = mixer(torch.zeros(2, 50, 16))
        >>> y.shape, state.tail.shape, [inputs.shape for inputs in state.filters]
        (torch.Size([2, 50, 16]), torch.Size([2, 2, 48]), [torch.Size([2, 50, 16]), torch.Size([2, 50, 16])])
    """

    recurrence = "long_conv"

    def __init__(
        self,
        d_model: int,
        *,
        order: int = 2,
        length: int = 1024,
        first_filter: bool = True,
        n_heads: int = 1,
        conv_size: int | None = 3,
        d_filter: int = 64,
        filter_depth: int = 3,
        n_bands: int = 2,
        omega: float = 10.0,
        shared_omega: bool = False,
        fast: float = 0.3,
        slow: float = 1.5,
        shift: float = 0.05,
        joint_windows: bool = False,
        learn_positions: bool = False,
        bias: bool = True,
        std: float | None = None,
        out_std: float | None = None,
    ) -> None:
        super().__init__(d_model)
        at_least(1 if first_filter else 2, most=COUNT, order=order, cure="There must be a filter.")
        at_least(1, length=length, d_filter=d_filter, n_bands=n_bands)
        at_least(1, most=COUNT, filter_depth=filter_depth)
        positive(std=std, out_std=out_std, or_none=True, cure="The authors' is 0.02.")
        divisor("d_model", d_model, n_heads=n_heads)
        self.order, self.first_filter = order, first_filter
        width = (order + 1) * d_model
        self.inputs = nn.Linear(d_model, width, bias=bias)
        self.conv = ShortConvolution(width, conv_size, bias=bias)
        network = SineNetwork(
            length,
            n_bands=n_bands,
            width=d_filter,
            depth=filter_depth,
            omega=omega,
            shared_omega=shared_omega,
            learn_positions=learn_positions,
        )
        count = order if first_filter else order - 1
        self.filters = nn.ModuleList(
            mark(
                ImplicitFilter(
                    d_model,
                    network,
                    fast=fast,
                    slow=slow,
                    shift=shift,
                    n_heads=n_heads,
                    among=(n, count) if joint_windows else (0, 1),
                )
            )
            for n in range(count)
        )
        self.out = nn.Linear(d_model, d_model, bias=bias)
        if std is not None:
            draw(self, nn.init.normal_, std=std)
        if out_std is not None:
            nn.init.normal_(self.out.weight, std=out_std)

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return o, and a `HyenaState`."""
        past = self.init_state(x.shape[0], device=x.device) if state is None else state
        parts, tail = self.conv(self.inputs(x), past.tail, reset=reset)
        note(parts=parts)
        z, *gates = parts.chunk(self.order + 1, -1)
        if not self.first_filter:
            gate, *gates = gates
            z = gate * z
        states = []
        for gate, h, before in zip(gates, self._filters, past.filters, strict=True):
            filtered, after = h(z, before, reset=reset)
            z = gate * filtered
            states.append(after)
        return self.out(z), HyenaState(tail, tuple(states))

    def init_state(self, batch: int, *, device: torch.device | str | None = None) -> State:
        """Return a tail of zeros, and no inputs of the filters; of a distilled layer, modes of zero."""
        kwargs = self.factory_kwargs(device)
        tail = self.conv.init_state(batch, **kwargs)
        return HyenaState(tail, tuple(h.init_state(batch, **kwargs) for h in self._filters))

    @property
    def state_size(self) -> int:
        """Inputs of the filters per step that is kept; of a distilled layer, elements of modes and tail."""
        if any(isinstance(h, LongFilter) for h in self._filters):
            return sum(h.state_size for h in self._filters)
        return super().state_size

    def token_mixing(self, x: Tensor, *, reset: Tensor | None = None) -> Tensor:
        """Return the mean over channels of |H|, y = H v: the product of gates and filters, as matrices."""
        _, notes = self._memory(x, reset)
        parts = notes["parts"].to(self.state_dtype).mT[..., None]
        _, *gates = parts.chunk(self.order + 1, 1)
        time = x.shape[1]
        steps = torch.arange(time, device=x.device)
        apart = steps[:, None] - steps
        seen = (apart >= 0).expand(x.shape[0], 1, time, time)
        if reset is not None:
            document = documents(reset)
            seen = seen & (document[:, :, None] == document[:, None])[:, None]
        H = torch.eye(time, dtype=parts.dtype, device=x.device)
        if not self.first_filter:
            H = gates.pop(0) * H
        for gate, h in zip(gates, self._filters, strict=True):
            H = gate * ((h.kernel(time)[:, apart.clamp(min=0)] * seen) @ H)
        return H.abs().mean(1)

    @property
    def _filters(self) -> list[Filter]:
        return cast(list[Filter], [*self.filters])


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
