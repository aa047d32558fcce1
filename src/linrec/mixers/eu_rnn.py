"""EURNN: Tunable Efficient Unitary Neural Networks and their Application to RNNs (Jing and others, 2017).

    W = D F_L .. F_2 F_1
    h_t = modrelu(W h_{t-1} + U x_t)
    modrelu(z) = z relu(|z| + b) / |z|
    y_t = Re(h_t)

x is the input, t time, h the complex hidden state, y the output, U a complex input matrix, b a bias per
channel and D a diagonal matrix with entries e^(i omega). F_l turns pairs of channels (p, q):

    h_p <- cos(theta) h_p - sin(theta) e^(i phi) h_q
    h_q <- sin(theta) h_p + cos(theta) e^(i phi) h_q

L layers take O(L n) steps. Layers of neighbours reach every unitary matrix if L = n. In the FFT style, L is
log2 n, and the pairs are those of a fast Fourier transform.
"""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from linrec.nn.activations import complex_modrelu, modrelu, to_complex, to_pairs
from linrec.nn.cells import NonlinearMixer
from linrec.nn.mixer import State
from linrec.nn.parameters import mark
from linrec.rules import COUNT, at_least, require

__all__ = ["EURNN"]

Style = Literal["tunable", "fft"]
# added to |z| in the released modReLU
EPS = 0.01


class EURNN(NonlinearMixer):
    """h_t = modrelu(W h_{t-1} + U x_t), y_t = Re(h_t), with W a product of rotations of pairs of channels.

    | model of the paper | arguments |
    |---|---|
    | tunable space, capacity L | `capacity` |
    | FFT style | `style="fft"` |
    | orthogonal W, for a real state | `is_complex=False` |

    Initial values are those of the released code: all angles uniform in [-pi, pi], U in [-0.01, 0.01], and
    the result of modReLU equal to z if the state is complex. The released code adds 0.01 to |z| in modReLU:
    the divisor is |z| + 0.01 here too, and b starts at 0.01. With a real state, modrelu(z) is
    sign(z) relu(|z| + b). The angles are in group "transition" without weight decay.

    Rows 2j and 2j + 1 of `U` are the real and the imaginary part of a channel, unless the state is real.
    `theta` and `phi` have the pairs of a layer in the order of p, layer by layer. A complex state has 2
    d_model real channels in `linrec.ops.nonlinear_scan`. A unitary W does not contract, so Newton's method
    needs many iterations.

    Args:
        d_model: width of the sequence and of the state, n.
        style: "tunable", layers of neighbours, (0, 1), (2, 3), .. and (1, 2), (3, 4), .. in turn; or "fft",
            layers of pairs at distances n / 2, n / 4, .. 1.
        capacity: layers L of the tunable style. None is 2.
        is_complex: whether the state is complex. A real state has no phi and no D.
        mode: mode of `linrec.ops.nonlinear_scan`; "auto" is the loop.

    Raises:
        ValueError: a `capacity` below 1 or in the FFT style, a `d_model` in the FFT style that is not a power
            of 2, or an unknown name.

    Source:
        Jing and others, Tunable Efficient Unitary Neural Networks (EUNN) and their Application to RNNs
        (2017), and the released code, jingli9111/EUNN-tensorflow.

    Example:
        >>> mixer = EURNN(64, capacity=4)
        >>> y, state = mixer(torch.zeros(2, 10, 64))
        >>> y.shape, state.shape, state.dtype
        (torch.Size([2, 10, 64]), torch.Size([2, 64]), torch.complex64)
    """

    def __init__(
        self,
        d_model: int,
        *,
        style: Style = "tunable",
        capacity: int | None = None,
        is_complex: bool = True,
        mode: str = "auto",
    ) -> None:
        super().__init__(d_model, mode, is_complex=is_complex)
        at_least(1, most=COUNT, capacity=capacity, or_none=True, cure="None is 2.")
        require(
            style == "tunable" or (d_model > 1 and d_model & (d_model - 1) == 0),
            f"`d_model` must be a power of 2 above 1 in the FFT style; got {d_model}. Other widths have "
            'style="tunable".',
        )
        require(
            style == "tunable" or capacity is None,
            f"`capacity` must be None in the FFT style, which has log2(d_model) layers; got {capacity}.",
        )
        self.layers = _layers(d_model, style, capacity or 2)

        self.U = nn.Linear(d_model, (2 if is_complex else 1) * d_model, bias=False)
        nn.init.uniform_(self.U.weight, -0.01, 0.01)
        n_pairs = sum(layer.n_pairs for layer in self.layers)
        self.theta = nn.Parameter(torch.empty(n_pairs).uniform_(-math.pi, math.pi))
        self.phi = self.omega = None
        if is_complex:
            self.phi = nn.Parameter(torch.empty(n_pairs).uniform_(-math.pi, math.pi))
            self.omega = nn.Parameter(torch.empty(d_model).uniform_(-math.pi, math.pi))
            mark(self, "phi", "omega", float32=True)
        mark(self, "theta", float32=True)
        self.b = nn.Parameter(torch.full((d_model,), EPS))

    def mix(self, x: Tensor, state: State, reset: Tensor | None) -> tuple[Tensor, State]:
        """Return y, and the last h (b, d_model)."""
        theta, Ux = self.theta.to(self.state_dtype), self.U(x)
        angle = self._spread(-theta, theta)
        own, other = angle.cos(), angle.sin()
        if self.phi is None or self.omega is None:
            real = own, other, self.b
            return self.nonlinear_scan(self._real_cell, Ux, real, state=state, reset=reset)
        phi, omega = self.phi.to(theta), self.omega.to(theta)
        zeros = torch.zeros_like(phi)
        own, other = own * _unit(self._spread(zeros, phi)), other * _unit(self._spread(phi, zeros))
        weights = own, other, self.b, _unit(omega)
        h, state = self.nonlinear_scan(self._complex_cell, Ux, weights, state=state, reset=reset)
        return h[..., ::2], state

    def _real_cell(self, h: Tensor, Ux: Tensor, own: Tensor, other: Tensor, b: Tensor) -> Tensor:
        """Return a real h_t."""
        return modrelu(self._turned(h, own, other) + Ux, b)

    def _complex_cell(
        self, h: Tensor, Ux: Tensor, own: Tensor, other: Tensor, b: Tensor, D: Tensor
    ) -> Tensor:
        """Return a complex h_t, in pairs."""
        Wh = D * self._turned(to_complex(h), own, other)
        return to_pairs(complex_modrelu(Wh + to_complex(Ux), b, eps=EPS))

    def _turned(self, h: Tensor, own: Tensor, other: Tensor) -> Tensor:
        """Return F_L .. F_1 h, from factors (L, d_model) of a channel and of its partner."""
        for place, layer in enumerate(self.layers):
            h = own[place] * h + other[place] * layer.swap(h)
        return h

    def _spread(self, at_p: Tensor, at_q: Tensor) -> Tensor:
        """Return (L, d_model) with numbers of all pairs at p and at q, and 0 at channels without a pair."""
        sizes = [layer.n_pairs for layer in self.layers]
        rows = zip(self.layers, at_p.split(sizes), at_q.split(sizes), strict=True)
        return torch.stack([layer.row(p, q, self.d_model) for layer, p, q in rows])


class _Layer(NamedTuple):
    """Pairs (p, p + distance), with p in `groups` ranges of `distance` channels from `first` on."""

    first: int
    groups: int
    distance: int

    @property
    def n_pairs(self) -> int:
        return self.groups * self.distance

    def row(self, p: Tensor, q: Tensor, n: int) -> Tensor:
        """Return n channels with numbers of the pairs at p and at q, and 0 elsewhere."""
        shape = self.groups, self.distance
        pairs = torch.stack([p.view(shape), q.view(shape)], 1).flatten()
        return functional.pad(pairs, (self.first, n - self.first - len(pairs)))

    def swap(self, h: Tensor) -> Tensor:
        """Return h with the channels of every pair exchanged."""
        size = 2 * self.n_pairs
        before, pairs, after = h.split([self.first, size, h.shape[-1] - self.first - size], -1)
        pairs = pairs.unflatten(-1, (self.groups, 2, self.distance)).flip(-2).flatten(-3)
        return torch.cat([before, pairs, after], -1)


def _unit(angle: Tensor) -> Tensor:
    return torch.polar(torch.ones_like(angle), angle)


def _layers(n: int, style: Style, capacity: int) -> list[_Layer]:
    if style == "fft":
        return [_Layer(0, 2**k, n >> (k + 1)) for k in range(n.bit_length() - 1)]
    return [_Layer(k % 2, (n - k % 2) // 2, 1) for k in range(capacity)]
