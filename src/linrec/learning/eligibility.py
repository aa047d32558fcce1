"""Eligibility traces, which leave out the influence of units on each other: D-RTRL, RFLO and OSTL.

Unit u has one or more numbers of state, such as h and s of an LSTM. If the products of weights are held
constant, the unit's next numbers depend only on the unit's numbers, by D (g, g) for each unit:

    e_W <- D e_W + dh_t/dy x^T,    y = W x

so a trace has g numbers per weight, whatever the number of units. The influence that goes from unit to unit
through weights is left out.
"""

from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from linrec.learning.cells import Opened, Product
from linrec.learning.influence import Influence, Traces

__all__ = ["DRTRL", "OSTL", "RFLO", "credited", "decayed"]


class DRTRL(Influence):
    """Real-time recurrent learning without the influence between units (D-RTRL).

        e_W <- D e_W + dh_t/dy x^T,    grad_W = dl_t/dh_t e_W

    D are the derivatives of a unit's state by its last state, with products of weights held: 1 - leak for a
    leaky unit, 1 - z for a GRU, 0 for `elman`. A weight that changes the state only through another product
    of the cell, as that of a reset gate, gets no gradient. Exact where the recurrence is element-wise.

    `memory["traces"][path][name]` is e (b, g, *shape of the parameter).

    Raises:
        ValueError: with all products held, units change each other.

    Source:
        Wang, Zhang, Gu and others, BrainTrace (2024); the rule itself is in Murray (2019) and Bellec and
        others (2020).

    Example:
        >>> from linrec import mixers
        >>> learner = DRTRL(mixers.build("gru", 4))
        >>> step = learner.step(torch.ones(1, 4), torch.ones(1, 4))
        >>> learner.memory["traces"][""]["rnn.weight_ih_l0"].shape
        torch.Size([1, 1, 12, 4])
    """

    name: ClassVar[str] = "d_rtrl"
    holds = True

    def __init__(self, *args: Any, **options: Any) -> None:
        self.groups: dict[str, int] = {}
        super().__init__(*args, **options)

    @override
    def first(self, path: str, sample: Opened) -> Traces:
        self.groups[path] = self._group(path, sample)
        by_weights = sample.by_weights(product.y for product in sample.products)
        g = self.groups[path]
        return {name: of.new_zeros(g, *of.shape[1:]) for name, of in by_weights.items()}

    @override
    def follow(self, path: str, step: Opened, held: Traces, noise: Tensor) -> Traces:
        D, by_y = self.unit_derivatives(path, step)
        new = step.by_weights(by_y)
        return {name: decayed(D, e) + new[name].transpose(0, 1) for name, e in held.items()}

    @override
    def credit(self, step: Opened, error: Tensor, traces: Traces) -> dict[str, Tensor]:
        return {name: credited(error, e).sum((0, 1)) for name, e in traces.items()}

    def unit_derivatives(
        self, path: str, step: Opened
    ) -> tuple[Float[Tensor, "b g g u"], list[Float[Tensor, "g b o"]]]:
        """Return D, and the derivatives of a unit's numbers by its entries of each product."""
        b, n = step.h.shape
        g = self.groups[path]
        ones = torch.eye(g, dtype=step.h.dtype, device=step.h.device).repeat_interleave(n // g, 1)
        D, by_y = step.back(ones[:, None].expand(g, b, n))
        return D.view(g, b, g, n // g).transpose(0, 1), by_y

    def _group(self, path: str, sample: Opened) -> int:
        """Return the smallest number g of state per unit with which units do not change each other."""
        J, by_y = sample.jacobians()
        n = sample.h.shape[1]
        for g in (g for g in range(1, max(n, 2)) if n % g == 0):
            unit = torch.arange(n, device=J.device) % (n // g)
            apart = unit[:, None] != unit
            products = zip(sample.products, by_y, strict=True)
            if not (J * apart).any() and all(_are_of_units(p, y, unit) for p, y in products):
                return g
        raise ValueError(
            f"units of `{path or 'model'}` must change each other by products of weights alone for "
            f"`{self.name}`. Take 'uoro', 'snap' or 'dense_rtrl'."
        )


class RFLO(DRTRL):
    """Random-feedback online learning: the trace of a leaky unit decays by its leak.

        h_t = (1 - leak) h_{t-1} + leak phi(a),    e_W <- (1 - leak) e_W + leak phi'(a) x^T

    This is `DRTRL` of leaky units, such as `elman(leak=0.1)`, with errors by the weights of the readout, or
    by random ones as in `EProp`.

    Source:
        Murray, Local Online Learning in Recurrent Networks with Random Feedback (2019), equation 8.
    """

    name: ClassVar[str] = "rflo"


class OSTL(DRTRL):
    """Online spatio-temporal learning: traces that decay by the diagonal of dh_t/dh_{t-1}.

        e_W <- diag(J) e_W + dh_t/dy x^T,    grad_W = dl_t/dh_t e_W

    Without H, the recurrent part of J, the paper's trace for feed-forward layers of spiking units is left,
    which is `DRTRL`. With H, this is `snap` with n = 1 for cells whose weights each change one unit.

    Args:
        recurrent: whether J includes H, the path of a unit to itself through its recurrent weights.

    Source:
        Bohnstingl, Wozniak, Pantazi and Eleftheriou, Online Spatio-Temporal Learning in Deep Neural Networks
        (2022).
    """

    name: ClassVar[str] = "ostl"

    def __init__(self, *args: Any, recurrent: bool = True, **options: Any) -> None:
        super().__init__(*args, **options)
        # the probe of units has held products
        self.recurrent, self.holds = recurrent, not recurrent

    @override
    def options(self) -> dict[str, Any]:
        return super().options() | {"recurrent": self.recurrent}

    @override
    def unit_derivatives(self, path: str, step: Opened) -> tuple[Tensor, list[Tensor]]:
        D, by_y = super().unit_derivatives(path, step)
        if not self.recurrent:
            return D, by_y
        b, n = step.h.shape
        g = self.groups[path]
        J, _ = step.jacobians()
        return J.view(b, g, n // g, g, n // g).diagonal(dim1=2, dim2=4), by_y


def _are_of_units(product: Product, by_y: Float[Tensor, "n b o"], unit: Tensor) -> bool:
    """Return whether entry j of a product changes the unit j modulo the number of units alone."""
    units = int(unit.max()) + 1
    entry = torch.arange(by_y.shape[2], device=unit.device) % units
    is_whole = by_y.shape[2] % units == 0 and product.rows.start % units == 0
    return is_whole and not (by_y * (unit[:, None, None] != entry)).any()


def decayed(D: Float[Tensor, "b g g u"], e: Float[Tensor, "b g o *d"]) -> Tensor:
    """Return D e, of the unit that each row of e belongs to."""
    return torch.einsum("bijo,bjo...->bio...", D.repeat(1, 1, 1, e.shape[2] // D.shape[3]), e)


def credited(error: Float[Tensor, "b n"], e: Float[Tensor, "b g o *d"]) -> Tensor:
    """Return the error times e, (b, g, o, *d)."""
    of_units = error.unflatten(1, (e.shape[1], -1))
    rows = of_units.repeat(1, 1, e.shape[2] // of_units.shape[2])
    return rows.reshape(*rows.shape, *[1] * (e.dim() - 3)) * e
