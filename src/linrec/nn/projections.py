"""Linear layers with initial values of their own, layers of one input, and layers that others replace.

Other libraries replace layers (adapters, quantisation), or hook them (offloading, sharding, pruning). Code of
linrec therefore calls a layer, or reads its tensors only if `readable` says that a call would do the same.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from linrec.nn.parameters import tensor_options
from linrec.nn.row_linear import RowLinear, row_linear
from linrec.ops.core.precision import without_autocast
from linrec.torch_private import any_global_hook

__all__ = [
    "affine_map",
    "draw",
    "drawn_linear",
    "input_kwargs",
    "join",
    "matrix",
    "orthogonal_linear",
    "output_kwargs",
    "projected",
    "readable",
    "xavier_linear",
]


# classes of plain layers y = W x + b
LINEAR = (nn.Linear, RowLinear)


def draw(
    linears: nn.Module | Iterable[nn.Linear], fill: Callable[..., Tensor], **arguments: float | str
) -> None:
    """Draw the weights of linear layers, and set the biases to zero.

    Args:
        linears: the layers, or a module, of which all layers are meant.
        fill: a function of `torch.nn.init`, which fills a tensor in place.
        arguments: further arguments of `fill`.

    Example:
        >>> linear = nn.Linear(2, 3)
        >>> draw([linear], nn.init.constant_, val=4.0)
        >>> linear(torch.ones(2)).tolist()
        [8.0, 8.0, 8.0]
    """
    for linear in linears.modules() if isinstance(linears, nn.Module) else linears:
        if isinstance(linear, nn.Linear):
            fill(linear.weight, **arguments)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)


def drawn_linear(
    d_in: int, d_out: int, fill: Callable[..., Tensor], *, bias: bool = False, **arguments: float | str
) -> nn.Linear:
    """Return y = W x + b, with W as `fill` draws it and b zero.

    Args:
        d_in: width of the input.
        d_out: width of the output.
        fill: a function of `torch.nn.init`; see `draw`.
        bias: whether there is a b.
        arguments: further arguments of `fill`.
    """
    linear = nn.Linear(d_in, d_out, bias=bias)
    draw([linear], fill, **arguments)
    return linear


def xavier_linear(d_in: int, d_out: int, *, gain: float = 1.0, bias: bool = False) -> nn.Linear:
    """y = W x + b, entries of W uniform in +- gain sqrt(6 / (d_in + d_out)), b zero.

    Args:
        d_in: width of the input.
        d_out: width of the output.
        gain: factor on the bound.
        bias: whether there is a b.

    Source:
        Glorot and Bengio (2010), eq. 16.
    """
    return drawn_linear(d_in, d_out, nn.init.xavier_uniform_, bias=bias, gain=gain)


def orthogonal_linear(d_in: int, d_out: int, *, gain: float = 1.0) -> nn.Linear:
    """y = W x, with the rows of W, or its columns where they are fewer, orthogonal and of length `gain`.

    Args:
        d_in: width of the input.
        d_out: width of the output.
        gain: length of the rows or columns; 0 makes a W of zeros.

    Source:
        Saxe, McClelland and Ganguli, Exact Solutions to the Nonlinear Dynamics of Learning in Deep Linear
        Neural Networks (2013).
    """
    if gain == 0:
        return drawn_linear(d_in, d_out, nn.init.zeros_)
    return drawn_linear(d_in, d_out, nn.init.orthogonal_, gain=gain)


def readable(kind: type[nn.Module] | tuple[type[nn.Module], ...], *modules: nn.Module) -> bool:
    """Return whether a computation may read the tensors of modules in place of calling the modules.

    False where a call does more than the class says: for wrappers, subclasses and parametrized layers, with
    hooks or a replaced `forward`, for tensors on the device "meta", where offloading leaves them, and for
    weights of a tensor class of their own.

    Args:
        kind: the exact class of each module, or several classes.
        modules: modules with a tensor `weight`.
    """
    kinds = kind if isinstance(kind, tuple) else (kind,)
    return not any_global_hook() and all(
        type(module) in kinds
        and not (
            module._forward_hooks
            or module._forward_pre_hooks
            or module._backward_hooks
            or module._backward_pre_hooks
            or "forward" in module.__dict__
        )
        and _is_plain(module.weight)
        for module in modules
    )


def _is_plain(weight: Any) -> bool:
    # programs that are traced have tensors of torch's own classes
    return torch.compiler.is_compiling() or (type(weight) in (nn.Parameter, Tensor) and not weight.is_meta)


def matrix(linear: nn.Module, d_in: int, device: torch.device | None = None) -> Float[Tensor, "d_out d_in"]:
    """Return W of a layer y = W x, for products inside of a recurrence.

    A layer that is not `readable` is called with the columns of the identity.

    Args:
        linear: the layer, which may be wrapped or replaced.
        d_in: width of x.
        device: where x lives; None is where the layer's tensors live.
    """
    if readable(LINEAR, linear):
        weight: Tensor = linear.weight  # type: ignore[assignment]
        return weight
    return _called(linear, torch.eye(d_in, **tensor_options(linear, device))).mT


def affine_map(
    linear: nn.Module, d_in: int, device: torch.device | None = None, *, kind: type[nn.Linear] = nn.Linear
) -> tuple[Float[Tensor, "d_out d_in"], Float[Tensor, " d_out"]]:
    """Return W and b of a layer y = W x + b with a bias, for products inside of a recurrence.

    Args:
        linear: the layer, which may be wrapped or replaced.
        d_in: width of x.
        device: where x lives; None is where the layer's tensors live.
        kind: the class of a layer that is not replaced.
    """
    if readable((kind, RowLinear), linear):
        return linear.weight, linear.bias  # type: ignore[return-value]
    # the last row is zeros
    y = _called(linear, torch.eye(d_in + 1, d_in, **tensor_options(linear, device)))
    return (y[:-1] - y[-1]).mT, y[-1]


def _called(linear: nn.Module, rows: Tensor) -> Tensor:
    # recurrences keep the precision of weights
    with without_autocast(rows.device.type):
        y: Tensor = linear(rows)
        return y


def projected(x: Float[Tensor, "*batch d"], *linears: nn.Module | None) -> tuple[Any, ...]:
    """Return the outputs of linear layers for the same input, as one product if layers are joined and plain.

    A layer may be None, and so is its output then.
    """
    layers = [linear for linear in linears if linear is not None]
    joined = getattr(layers[0], "joined", None) if layers else None
    if joined is None or not readable(LINEAR, *layers):
        return tuple(None if linear is None else linear(x) for linear in linears)
    weight, bias, sizes = joined
    outputs = iter(row_linear(x, weight, bias).split(sizes, -1))
    return tuple(None if linear is None else next(outputs) for linear in linears)


def join(linears: Iterable[nn.Module | None]) -> None:
    """Put the weights of layers side by side, so that `projected` takes one product; for inference alone.

    Weights stay parameters of their layers, as parts of one tensor. Layers that are not plain, or that differ
    in dtype, stay as they are.
    """
    layers = [linear for linear in linears if linear is not None]
    plain = [linear for linear in layers if isinstance(linear, nn.Linear) and readable(LINEAR, linear)]
    if len(plain) < len(layers) or len({linear.weight.dtype for linear in plain}) > 1:
        return
    sizes = [linear.out_features for linear in plain]
    weight = torch.cat([linear.weight.detach() for linear in plain])
    bias = None
    if any(linear.bias is not None for linear in plain):
        bias = weight.new_zeros(sum(sizes))
        for linear, part in zip(plain, bias.split(sizes), strict=True):
            if linear.bias is not None:
                part.copy_(linear.bias.detach())
                linear.bias = nn.Parameter(part, requires_grad=False)
    for linear, part in zip(plain, weight.split(sizes), strict=True):
        linear.weight = nn.Parameter(part, requires_grad=False)
    plain[0].joined = weight, bias, sizes  # type: ignore[assignment]


def input_kwargs(linear: nn.Module, device: torch.device | str | None = None) -> dict[str, Any]:
    """Return the dtype and the device of a projection's input, for caches that keep the inputs.

    Args:
        linear: the projection.
        device: where the inputs live; None is where the weight lives.
    """
    return tensor_options(linear, device)


def output_kwargs(linear: nn.Module, device: torch.device | str | None = None) -> dict[str, Any]:
    """Return the dtype and the device of the outputs of a projection, for caches that keep the outputs.

    The dtype is the weight's, or autocast's within `torch.autocast`, which leaves float64 as it is.

    Args:
        linear: the projection.
        device: where the outputs live; None is where the weight lives.
    """
    options = tensor_options(linear, device)
    kind = torch.device(options["device"]).type
    # "meta" has no autocast
    if kind != "meta" and options["dtype"] != torch.float64 and torch.is_autocast_enabled(kind):
        options["dtype"] = torch.get_autocast_dtype(kind)
    return options
