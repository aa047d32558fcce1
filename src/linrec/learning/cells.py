"""A step of a recurrent layer, opened: its products with weights, its new state, and their derivatives.

    h_t = F(h_{t-1}, y_1, .., y_k),    y_i = W_i x_i + b_i

The x_i are the layer's input or functions of h_{t-1}. The prediction reads h_t as a leaf, so that the error
dl_t/dh_t and the derivatives of F are apart.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from linrec.learning.layers import outermost, replacing
from linrec.learning.products import Product, Products
from linrec.nn.mixer import Mixer
from linrec.ops.core.call import Call, Result, handling
from linrec.rules import require
from linrec.trees import leaves

__all__ = ["Opened", "find_cells", "opening"]


class Opened(NamedTuple):
    """One step of a layer.

    Args:
        before: h_{t-1} (b, n), a leaf.
        h: h_t (b, n), in the graph of `before` and of the products.
        after: h_t (b, n), a leaf of the prediction's graph.
        products: the products before h_t.
        weights: the layer's parameters that learn, by name.
    """

    before: Tensor
    h: Tensor
    after: Tensor
    products: Sequence[Product]
    weights: Mapping[str, Tensor]

    def back(self, v: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return v^T dh_t/dh_{t-1}, and v^T dh_t/dy of each product, v (b, n) or (k, b, n)."""
        inputs = [self.before, *(product.y for product in self.products)]
        options = {"retain_graph": True, "allow_unused": True, "is_grads_batched": v.dim() > 2}
        found = torch.autograd.grad(self.h, inputs, v, **options)
        # `materialize_grads` knows no batches
        first, *rest = (
            of.new_zeros(*v.shape[:-2], *of.shape) if g is None else g
            for g, of in zip(found, inputs, strict=True)
        )
        return first, rest

    def forward(self, v: Tensor) -> Tensor:
        """Return dh_t/dh_{t-1} v for v (b, n), as the derivative of a backward pass, which is linear."""
        zeros = torch.zeros_like(self.h, requires_grad=True)
        (by_before,) = torch.autograd.grad(
            self.h, self.before, zeros, create_graph=True, materialize_grads=True
        )
        if not by_before.requires_grad:
            return torch.zeros_like(v)
        return torch.autograd.grad(by_before, zeros, v, retain_graph=True, materialize_grads=True)[0]

    def jacobians(self) -> tuple[Tensor, list[Tensor]]:
        """Return dh_t/dh_{t-1} (b, n, n), and dh_t/dy (n, b, o) of each product."""
        n = self.h.shape[1]
        units = torch.eye(n, dtype=self.h.dtype, device=self.h.device)
        J, by_y = self.back(units[:, None].expand(n, *self.h.shape))
        return J.transpose(0, 1), by_y

    def by_weights(self, by_y: Iterable[Tensor], inputs: Iterable[Tensor] | None = None) -> dict[str, Tensor]:
        """Return derivatives by weights and biases (.., b, *shape), of derivatives by y (.., b, o).

        Args:
            by_y: one tensor for each product.
            inputs: takes the place of x of each product; the entry behind the last one that of the 1 of b.
        """
        found: dict[str, Tensor] = {}
        xs = (functional.pad(p.x, (0, 1), value=1.0) for p in self.products) if inputs is None else inputs
        for product, g, x in zip(self.products, by_y, xs, strict=True):
            outer = g[..., None] * x[:, None]
            for name, part in ((product.weight, outer[..., :-1]), (product.bias, outer[..., -1])):
                if name is None or name not in self.weights:
                    continue
                if name not in found:
                    found[name] = g.new_zeros(*g.shape[:-1], *self.weights[name].shape)
                found[name].narrow(g.dim() - 1, product.rows.start, g.shape[-1]).add_(part)
        return found


@contextmanager
def opening(
    cells: Mapping[str, Mixer],
    learning: Mapping[str, nn.Parameter],
    *,
    holds: bool = False,
    states: Mapping[str, tuple[Tensor, Tensor]] | None = None,
) -> Iterator[dict[str, Opened]]:
    """Within the context, open the steps of layers, by path in the order of their calls.

    Args:
        cells: the layers, each of which runs a single step.
        learning: parameters that learn, by their names in the model.
        holds: whether products that the cell makes of h_{t-1} are constant in it.
        states: takes the place of the leaves h_{t-1} and h_t of each layer, (b, n) both.
    """
    steps: dict[str, Opened] = {}

    def opened(path: str, run: Callable[..., Any]) -> Callable[..., Any]:
        names: dict[Tensor, str] = {p: name for name, p in cells[path].named_parameters()}
        start = f"{path}." if path else ""
        weights = {name: p for p, name in names.items() if start + name in learning}

        def forward(*arguments: Any, **options: Any) -> Any:
            products = Products(names)

            def cell(call: Call, proceed: Callable[[], Result]) -> Result:
                given = call.inputs
                if not products.on or call.operator.name not in ("scan", "nonlinear_scan"):
                    return proceed()
                x, start = given.x[:, 0], given.state
                start = torch.zeros_like(x) if start is None else start.detach()
                if given.reset is not None:
                    start = start.masked_fill(given.reset[:, :1].reshape(-1, *[1] * (start.dim() - 1)), 0)
                given_states = None if states is None else states[path]
                before = start.flatten(1).requires_grad_() if given_states is None else given_states[0]
                products.holds, h_0 = holds, before.view(start.shape)
                scans = call.operator.name == "scan"
                h = given.a[:, 0] * h_0 + x if scans else given.cell(h_0, x, *given.parameters)
                products.on = False
                after = h.detach().flatten(1).requires_grad_() if given_states is None else given_states[1]
                steps[path] = Opened(before, h.flatten(1), after, products.found, weights)
                state = after.view(h.shape)
                return state[:, None].to(given.x.dtype), state

            with handling(cell, compiled=False), products:
                return run(*arguments, **options)

        return forward

    with replacing({mixer: opened(path, mixer.forward) for path, mixer in cells.items()}):
        yield steps


def find_cells(
    model: nn.Module, learning: Mapping[str, nn.Parameter], *, holds: bool = False
) -> dict[str, tuple[Mixer, Opened]]:
    """Return the recurrent layers by path, each with a step of 8 random rows.

    Raises:
        ValueError: a layer's memory is not the real state of a single `scan` or `nonlinear_scan`.
    """
    found: dict[str, tuple[Mixer, Opened]] = {}
    for path, mixer in outermost(model).items():
        kind = next(p for p in mixer.parameters() if p.is_floating_point())
        draw = torch.Generator(kind.device).manual_seed(0)
        u = kind.new_zeros(8, 1, mixer.d_model).normal_(generator=draw)
        state = mixer.init_state(8, device=kind.device)
        numbers = [leaf for leaf in leaves(state) if leaf.is_floating_point()]
        for leaf in numbers:
            leaf.normal_(generator=draw)
        with opening({path: mixer}, learning, holds=holds) as steps, torch.enable_grad():
            mixer(u, state)
        require(
            len(leaves(state)) == len(numbers) == 1
            and path in steps
            and steps[path].h.shape == numbers[0].flatten(1).shape,
            f"the memory of `{path or 'model'}` ({type(mixer).__name__}) must be the real state of one "
            "`scan` or `nonlinear_scan`, as of 'elman' or 'gru'. Take 'rtrl', 'dense_rtrl' or 'tbptt'.",
        )
        found[path] = mixer, steps[path]
    return found
