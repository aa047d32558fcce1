"""pp-prop: eligibility traces of inputs and of units, whose product is that of a weight."""

from typing import Any, ClassVar

from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from linrec.learning.cells import Opened
from linrec.learning.eligibility import DRTRL, credited, decayed
from linrec.learning.influence import Traces
from linrec.rules import require

__all__ = ["PPProp"]


class PPProp(DRTRL):
    """pp-prop: a trace of inputs and a trace of units in place of a trace of weights.

        x~ <- alpha x~ + x,    f <- alpha D f + (1 - alpha) dh_t/dy
        grad_W = (dl_t/dh_t f) x~^T / (1 - alpha^t)

    Memory is that of inputs and units. alpha = 0 is the gradient of the same step; `ostl` without H is
    released as alpha = 1e-6.

    `memory["traces"][path]` has "x" (b, d + 1), with a last entry for the bias, and "f" (b, g, o), by the
    products' weights, and t.

    Args:
        alpha: decay of both traces. A rank K of the released code means alpha = (K - 1) / (K + 1).

    Source:
        Wang, Zhang, Gu and others, BrainTrace (2024), ES-D-RTRL.
    """

    name: ClassVar[str] = "pp_prop"

    def __init__(self, *args: Any, alpha: float = 0.9, **options: Any) -> None:
        require(
            0 <= alpha < 1, f"`alpha` must be in [0, 1); got {alpha}. 0 is the gradient of the same step."
        )
        self.alpha = alpha
        super().__init__(*args, **options)

    @override
    def options(self) -> dict[str, Any]:
        return super().options() | {"alpha": self.alpha}

    @override
    def first(self, path: str, sample: Opened) -> Traces:
        super().first(path, sample)
        g, products = self.groups[path], sample.products
        return {
            "x": {p.name: p.x.new_zeros(p.x.shape[1] + 1) for p in products},
            "f": {p.name: p.y.new_zeros(g, p.y.shape[1]) for p in products},
            "t": sample.h.new_zeros(()),
        }

    @override
    def follow(self, path: str, step: Opened, held: Traces, noise: Tensor) -> Traces:
        D, by_y = self.unit_derivatives(path, step)
        x = {
            p.name: self.alpha * held["x"][p.name] + functional.pad(p.x, (0, 1), value=1.0)
            for p in step.products
        }
        f = {
            p.name: self.alpha * decayed(D, held["f"][p.name]) + (1 - self.alpha) * new.transpose(0, 1)
            for p, new in zip(step.products, by_y, strict=True)
        }
        return {"x": x, "f": f, "t": held["t"] + 1}

    @override
    def credit(self, step: Opened, error: Tensor, traces: Traces) -> dict[str, Tensor]:
        scale = 1 / (1 - self.alpha ** traces["t"])
        by_y = [credited(error * scale[:, None], traces["f"][p.name]).sum(1) for p in step.products]
        found = step.by_weights(by_y, [traces["x"][p.name] for p in step.products])
        return {name: g.sum(0) for name, g in found.items()}
