"""Hyena Hierarchy: Towards Larger Convolutional Language Models (Poli and others, 2023).

    (v, x^1, .., x^N) = ShortConv(W x + b)
    z^1 = v     z^{n+1}_t = x^n_t * (h^n * z^n)_t     y = z^{N+1}     o = W_o y + b_o
    h^n_t = (exp(-alpha t / (L - 1)) + shift) FFN^n(PositionalEncoding(t)),  and D^n more for t = 0

x input, v value, x^n gates, h^n filters, one for each channel, N the order, y output of the recurrence, o
output of the layer; L taps, alpha the decay of a channel's window. FFN has sines between its layers,
sin(omega z) with a learned omega per unit. PositionalEncoding(t) is t / (L - 1) and the real and imaginary
parts of exp(-2 pi i f_k t / L).
"""

from typing import NamedTuple, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from linrec.nn.implicit_filters import ImplicitFilter, SineNetwork
from linrec.nn.long_filters import Filter, LongFilter
from linrec.nn.mixer import Mixer, State
from linrec.nn.parameters import mark
from linrec.nn.projections import draw
from linrec.nn.short_convolution import ShortConvolution
from linrec.ops.core.isolation import documents
from linrec.ops.inspection import note
from linrec.rules import COUNT, at_least, divisor, positive

__all__ = ["Hyena", "HyenaState"]


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
        >>> import torch
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
