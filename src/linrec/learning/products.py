"""Products of a layer's weights with vectors, recorded while a step of the layer runs."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from typing_extensions import override

__all__ = ["Product", "Products"]

# a function of x and W, or of x and the transpose of W
PRODUCTS = (functional.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__)


class Product(NamedTuple):
    """y = W x + b at one step.

    Args:
        weight: name of the parameter that W is rows of.
        bias: name of the parameter that b is rows of, or None.
        rows: those rows.
        x: (b, d).
        y: (b, o), in the graph of h_t.
    """

    weight: str
    bias: str | None
    rows: slice
    x: Tensor
    y: Tensor

    @property
    def name(self) -> str:
        """The weight's name, with the first row where the product has some of the rows."""
        return self.weight if self.rows.start == 0 else f"{self.weight}[{self.rows.start}:]"


class Products(TorchFunctionMode):
    """Within the context, record the products of a layer's weights.

    Args:
        names: the layer's parameters and their names.

    Attributes:
        found: the products so far.
        on: whether to record.
        holds: whether the inputs of products are constant.
    """

    def __init__(self, names: Mapping[Tensor, str]) -> None:
        super().__init__()
        self.names, self.found = names, list[Product]()
        self.on, self.holds = True, False

    @override
    def __torch_function__(self, f: Any, types: Any, given: Any = (), options: Any = None) -> Any:
        whole = None
        if self.on and f in PRODUCTS and not options:
            x, W, b = (*given, None)[:3]
            W = W if f is functional.linear or W.dim() != 2 else W.mT
            whole = self._of(W)
        # one row of x for each row of the batch
        if whole is None or W.stride() != whole.stride() or len(x) != x[..., 0].numel():
            return f(*given, **(options or {}))
        y = functional.linear(x.detach() if self.holds else x, W, b).flatten(1)
        start = (W.storage_offset() - whole.storage_offset()) // W.stride(0)
        bias = None if b is None or (of := self._of(b)) is None else self.names[of]
        rows = slice(start, start + len(W))
        self.found.append(Product(self.names[whole], bias, rows, x.detach().flatten(1), y))
        return y.view(*x.shape[:-1], len(W))

    def _of(self, part: Tensor) -> Tensor | None:
        """Return the parameter that a tensor is, or is rows of."""
        whole = part if part._base is None else part._base
        return whole if whole in self.names and part.shape[1:] == whole.shape[1:] else None
