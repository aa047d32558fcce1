"""Wrap kernels as functions that support autograd, torch.compile, fake tensors and torch.func.

A kernel is a function that fills preallocated outputs. A second function, its adjoint, fills preallocated
gradients. Named tuples declare inputs and outputs once; the gradients are attributes named after the inputs:

    class Inputs(NamedTuple):          class Outputs(NamedTuple):
        x: Tensor                          y: Tensor
        state: Tensor | None               starts: Tensor
        reverse: bool

    def forward(out: Outputs, given: Inputs) -> None: ...
    def adjoint(out: Gradients, given: Inputs, kept: Outputs, d: Outputs) -> None: ...

`kernel_op` makes a `Differentiable` from these. A `Differentiable` may also consist of torch operations.
"""

import contextlib
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Generic, NamedTuple, TypeVar, cast, get_type_hints

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from linrec.ops.core.ambient import Ambient, exporting
from linrec.torch_private import dispatch_modes, in_forward_mode, is_batched_gradient, transforms_active

In = TypeVar("In", bound=tuple)
Out = TypeVar("Out", bound=tuple)

Adjoint = Callable[[In, Out, Out, Sequence[bool]], Sequence[Tensor | None]]
"""(given, kept, d, needs) -> gradients; see `Differentiable`."""

Tangent = Callable[[Callable[[In], Out], In, Out, In], Sequence[Tensor | None]]
"""(run, given, out, d) -> tangents of the outputs; see `Differentiable`."""


class Memory(NamedTuple):
    """Shape and dtype of a contiguous tensor to allocate."""

    shape: Sequence[int]
    dtype: torch.dtype


Space = Memory | Tensor
"""Memory to allocate: a `Memory`, or a tensor of this shape and dtype, which allocates in half the time."""


def like(x: Any, dtype: torch.dtype | None = None) -> Space:
    """Return the memory for a tensor like x, optionally in another dtype; `NOTHING` if x is not a tensor."""
    if not isinstance(x, Tensor):
        return NOTHING
    return x if dtype is None or dtype == x.dtype else Memory(x.shape, dtype)


NOTHING = Memory((0,), torch.float32)
"""Memory of an absent tensor."""


def differentiated(*inputs: Any) -> bool:
    """Return whether autograd must record a function of these inputs; only tensors among them count.

    Other calls skip `torch.autograd.Function`, whose overhead exceeds the time of a small recurrence.
    """
    # a program is exported in ATen operations, which autograd can differentiate
    if exporting():
        return False
    # a tensor does not show whether it has a tangent
    if in_forward_mode():
        return True
    if not torch.is_grad_enabled():
        return False
    # tracing is free, and under torch.func `requires_grad` does not show what its transforms need
    if torch.compiler.is_compiling() or transforms_active():
        return True
    return any(isinstance(x, Tensor) and x.requires_grad for x in inputs)


class Differentiable(Generic[In, Out]):
    """A function of a named tuple with a custom adjoint; a call returns the named tuple of outputs.

    Args:
        inputs: the named tuple of inputs: tensors, None and flags.
        outputs: the named tuple of outputs.
        forward: (given, keep) -> outputs; without `keep`, outputs that only the adjoint reads may be empty.
        adjoint: (given, kept, d, needs) -> a gradient for each input, None for inputs without a gradient. `d`
            contains the gradients of the outputs; `needs` tells which inputs need a gradient.
        again: the adjoint in torch operations, for double backward. By default it is autograd of `plain`, or
            without `plain` the adjoint itself.
        plain: the function in torch operations; it replaces `forward` under vmap.
        beside: an axis, by name, for each output and for some inputs. If vmap maps only these inputs,
            `forward` runs instead of `plain`, with the mapped axis folded into these axes.
        kept: names of the outputs that only the adjoint reads.
        saves: names of the inputs and outputs that the adjoint reads; it receives None for all others. By
            default these are all inputs and the outputs in `kept`.
        fresh: whether `forward` allocates all outputs itself, as kernels do.
        tangent: the derivative in forward mode: (run, given, out, d) -> a tangent of each output. `given` and
            `out` contain the tensors that `saves` names, and `d` the tangents of the inputs, zeros if absent.
            `run` is this function: calls of it and torch operations keep the tangents differentiable. Without
            `tangent`, kernels raise an error in forward mode.
    """

    def __init__(
        self,
        inputs: type[In],
        outputs: type[Out],
        forward: Callable[[In, bool], Out],
        adjoint: Adjoint[In, Out],
        *,
        again: Adjoint[In, Out] | None = None,
        plain: Callable[[In], Sequence[Tensor]] | None = None,
        beside: Mapping[str, int] | None = None,
        kept: Sequence[str] = (),
        saves: Sequence[str] | None = None,
        fresh: bool = False,
        tangent: Tangent[In, Out] | None = None,
    ) -> None:
        twice: Adjoint[In, Out] = again or (adjoint if plain is None else by_autograd(plain))
        hints = get_type_hints(inputs)
        results: Sequence[str] = outputs._fields  # type: ignore[attr-defined]
        names = (*hints, *kept) if saves is None else saves
        is_tensor = tuple(hint in (Tensor, Tensor | None) for hint in hints.values())
        is_kept = tuple(name in kept for name in results)
        # indices of saved tensors, counting inputs first and then outputs
        n = len(hints)
        saved = tuple(
            i for i, name in enumerate((*hints, *results)) if name in names and (i >= n or is_tensor[i])
        )

        def restored(ctx: Any) -> list[Any]:
            """Return inputs and outputs, with None in place of tensors that are not saved."""
            tensors: list[Any] = [*ctx.flags, *[None] * len(results)]
            for i, x in zip(saved, ctx.saved_tensors, strict=True):
                tensors[i] = x
            return tensors

        # torch.compile traces the class below, so its closure may contain only plain functions and tuples
        class Function(torch.autograd.Function):
            generate_vmap_rule = plain is None

            @staticmethod
            def forward(*given: Any) -> Any:
                found = tuple(forward(inputs(*given), True))
                if fresh or not torch.compiler.is_compiling():
                    return found
                # torch 2.11 compiles wrong gradients of an output that the last operation of `forward`
                # returned as it was, such as x.to(dtype)
                return tuple(x.view_as(x) for x in found)

            @staticmethod
            def setup_context(ctx: Any, given: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
                ctx.flags = [None if tensor else x for x, tensor in zip(given, is_tensor, strict=True)]
                ctx.dtypes = [x.dtype if isinstance(x, Tensor) else None for x in given]
                if kept:
                    ctx.mark_non_differentiable(*[x for x, keep in zip(output, is_kept, strict=True) if keep])
                tensors: list[Any] = [*given, *output]
                # In the backward pass, torch.compile (torch 2.13) may overwrite a complex output without
                # noticing that a saved real view shares its memory. So only the real view is saved. Double
                # backward needs the output itself, but compiled code does not support double backward.
                ctx.real = torch.compiler.is_compiling()
                if ctx.real:
                    tensors[n:] = [torch.view_as_real(x) if x.is_complex() else x for x in output]
                ctx.save_for_backward(*[tensors[i] for i in saved])

            @staticmethod
            def backward(ctx: Any, *d: Any) -> tuple[Tensor | None, ...]:
                tensors = restored(ctx)
                for i, x in enumerate(tensors[n:], n):
                    if ctx.real and x is not None and x.dim() > d[i - n].dim():
                        tensors[i] = torch.view_as_complex(x)
                needs = ctx.needs_input_grad
                of_d = [None if keep else x for x, keep in zip(d, is_kept, strict=True)]
                # kernels have no derivative, so double backward, as under torch.func.grad, uses the adjoint
                # in torch operations
                run = twice if torch.is_grad_enabled() else adjoint
                gradients = run(inputs(*tensors[:n]), outputs(*tensors[n:]), outputs(*cast(Any, of_d)), needs)
                return tuple(
                    _reduced(g, dtype) if need and g is not None else None
                    for g, need, dtype in zip(gradients, needs, ctx.dtypes, strict=True)
                )

        if plain is not None:

            def vmap(info: Any, in_dims: tuple[int | None, ...], *given: Any) -> Any:
                axes, size = [None if beside is None else beside.get(name) for name in hints], info.batch_size
                places = list(zip(given, in_dims, axes, strict=True))
                if beside is not None and all(dim is None or axis is not None for _, dim, axis in places):
                    folded = [x if axis is None else _folded(x, dim, size, axis) for x, dim, axis in places]
                    found, out_dims = Function.apply(*folded), tuple(beside[name] for name in results)
                    unfolded = (
                        x.unflatten(axis, (size, -1)) for x, axis in zip(found, out_dims, strict=True)
                    )
                    return tuple(unfolded), out_dims
                mapped = torch.func.vmap(lambda *given: tuple(plain(inputs(*given))), in_dims)(*given)
                return mapped, (0,) * len(mapped)

            Function.vmap = staticmethod(vmap)  # type: ignore[method-assign]

        # torch.compile takes no class with forward mode
        class Dual(Function):
            @staticmethod
            def setup_context(ctx: Any, given: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
                Function.setup_context(ctx, given, output)
                both = [*given, *output]
                ctx.save_for_forward(*[both[i] for i in saved])

            @staticmethod
            def jvp(ctx: Any, *d: Any) -> tuple[Tensor | None, ...]:
                assert tangent is not None
                tensors = restored(ctx)
                return tuple(tangent(self, inputs(*tensors[:n]), outputs(*tensors[n:]), inputs(*d)))

        # autograd reads the signature at every call, and computing it is slower than a small recurrence.
        # Also, torch.compile takes the first of *given for the context if the number of arguments is unknown
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        Function.forward.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in hints])  # type: ignore[attr-defined]
        self.outputs, self.forward, self.function = outputs, forward, Function
        self.dual, self.fresh = None if tangent is None else Dual, fresh
        self.operators: tuple[Any, ...] = ()
        # `forward` itself cannot run under vmap
        self.mapped = plain is not None

    def __call__(self, given: In) -> Out:
        """Run the function, through autograd if necessary."""
        if in_forward_mode() and not torch.compiler.is_compiling():
            if self.dual is not None:
                return self.outputs(*self.dual.apply(*given))
            if not self.fresh and not transforms_active():
                # torch operations have their own forward mode
                return self.forward(given, False)
        if differentiated(*given) or (self.mapped and _transformed()):
            arguments = _distinct(given) if torch.compiler.is_compiling() else given
            return self.outputs(*self.function.apply(*arguments))
        return self.forward(given, False)


def _transformed() -> bool:
    # under torch.compile this cannot be determined
    return not torch.compiler.is_compiling() and transforms_active()


def _distinct(given: tuple[Any, ...]) -> list[Any]:
    """Return the inputs with views in place of repeated tensors, which torch.compile refuses."""
    repeated = [isinstance(x, Tensor) and any(x is y for y in given[:i]) for i, x in enumerate(given)]
    return [x.view_as(x) if again else x for x, again in zip(given, repeated, strict=True)]


def _reduced(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    # the gradient of a real input is the real part
    if gradient.is_complex() and not dtype.is_complex:
        gradient = gradient.real
    return gradient.to(dtype)


def by_autograd(twin: Callable[[In], Sequence[Tensor]]) -> Adjoint[In, Any]:
    """Return the adjoint, by autograd, of a function of torch operations.

    The function returns the first outputs of a kernel. The gradients are differentiable. They are partial
    derivatives: an input computed from another input counts as independent, as in a kernel's adjoint.
    """

    def again(given: In, kept: Any, d: Any, needs: Sequence[bool]) -> list[Tensor | None]:
        # a path from one saved input to another is in the outer graph; aliases leave it out here
        inputs = [x.view_as(x) if isinstance(x, Tensor) else x for x in given]
        wanted = [x for x, need in zip(inputs, needs, strict=True) if need]
        # some outputs may depend only on inputs that need no gradient
        pairs = [(y, dy) for y, dy in zip(twin(type(given)(*inputs)), d, strict=False) if y.requires_grad]
        if not pairs:
            return [None] * len(inputs)
        outputs, d = zip(*pairs, strict=True)
        found = iter(torch.autograd.grad(outputs, wanted, d, create_graph=True, allow_unused=True))
        return [next(found) if need else None for need in needs]

    return again


@contextlib.contextmanager
def successors(pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Within the context, have kernels write the state that follows a given state into its buffer.

    Recorded CUDA graphs read and write the same memory at every replay. A graph whose kernels write the next
    state where the next graph reads it needs no copies. On the CPU, memory that was used before needs no page
    faults. Kernels without `follows` allocate, as always.

    Args:
        pairs: states, and for each the contiguous buffer of its successor, in memory of its own.
    """
    with _SUCCESSORS.set({state.data_ptr(): buffer for state, buffer in pairs}, compiled=False):
        yield


# buffers by the address of the state that they follow
_SUCCESSORS: Ambient[dict[int, Tensor]] = Ambient("successors", {})


def _placed(given: Any, state: str | None, space: Space, device: torch.device) -> Tensor:
    """Return memory for an output: once, the buffer of the successor of the state of this name."""
    before = None if state is None else getattr(given, state)
    buffer = None if before is None else _SUCCESSORS.get().pop(before.data_ptr(), None)
    if buffer is None or (buffer.numel(), buffer.dtype) != (math.prod(space.shape), space.dtype):
        return allocated(space, device)
    # a kernel may leave out axes of size 1, or order them in another way
    return buffer.view(*space.shape)


def forward_op(
    name: str,
    inputs: type[In],
    outputs: type[Out],
    memory: Callable[[In, bool], Sequence[Space]],
    forward: Callable[[Out, In], None],
    *,
    batch: str | None = None,
    follows: Mapping[str, str] | None = None,
) -> Callable[..., Out]:
    """Return a kernel without adjoint as a function (given, keep=False) -> outputs; see `kernel_op`.

    `follows` maps outputs to the inputs whose `successors` they are, which may be None.
    """
    lead = 0 if batch is None else inputs._fields.index(batch)  # type: ignore[attr-defined]

    def filled(given: In, keep: bool) -> Out:
        device = given[lead].device
        spaces = memory(given, keep)
        if follows is not None and _SUCCESSORS.get():
            of = map(follows.get, outputs._fields)  # type: ignore[attr-defined]
            out = outputs(
                *[_placed(given, name, space, device) for name, space in zip(of, spaces, strict=True)]
            )
        else:
            out = outputs(*[allocated(space, device) for space in spaces])
        forward(out, given)
        return out

    arguments = [*get_type_hints(inputs).items(), ("keep", bool)]
    returned = len(outputs._fields)  # type: ignore[attr-defined]
    op = _registered(name, arguments, (inputs,), returned, memory, filled, lead, batch is not None)

    def run(given: In, keep: bool = False) -> Out:
        return outputs(*op(*given, keep)) if needs_dispatcher(given) else filled(given, keep)

    return run


def kernel_op(
    name: str,
    inputs: type[In],
    outputs: type[Out],
    memory: Callable[[In, bool], Sequence[Space]],
    forward: Callable[[Out, In], None],
    adjoint: Callable[["Gradients", In, Out, Out], None],
    *,
    gradients: Callable[[In, Out, Out, Sequence[bool]], Sequence[Space]] | None = None,
    batch: str | None = None,
    follows: Mapping[str, str] | None = None,
    **options: Any,
) -> Differentiable[In, Out]:
    """Return a kernel and its adjoint as a `Differentiable`.

    They are registered as `linrec::name` and `linrec::name_backward`, so each is a single operation for
    torch.compile, fake tensors and vmap. Outputs and gradients are allocated here, contiguous, from declared
    shapes, so that the kernel and its fake implementation cannot disagree.

    Args:
        name: name of the operator in the torch library.
        inputs: see `Differentiable`.
        outputs: see `Differentiable`.
        memory: (given, keep) -> a `Space` for each output.
        forward: (out, given): fills the outputs.
        adjoint: (out, given, kept, d): fills the gradients, which are attributes of `out`, or None for inputs
            without memory. A gradient is allocated when the adjoint first accesses it.
        gradients: (given, kept, d, needs) -> a `Space` for each tensor of the inputs, `NOTHING` for a
            gradient that the adjoint skips. By default every gradient has the shape and dtype of its input.
        batch: name of the input whose first axis is the batch. The first axis of all tensors is then the
            batch or of size 1, and vmap folds the mapped axis into it. Without `batch`, vmap runs `plain`.
        follows: maps outputs to the inputs whose `successors` they are.
        options: further arguments of `Differentiable`. `again` or `plain` is required, because the adjoint
            itself cannot be differentiated.
    """
    assert "again" in options or "plain" in options
    hints = get_type_hints(inputs)
    names = [name for name, hint in hints.items() if hint in (Tensor, Tensor | None)]
    tensors = [place for place, name in enumerate(hints) if name in names]
    results: Sequence[str] = outputs._fields  # type: ignore[attr-defined]

    def spaces(given: In, kept: Out, d: Out, needs: Sequence[bool]) -> Sequence[Space]:
        return [like(given[i]) for i in tensors] if gradients is None else gradients(given, kept, d, needs)

    def filled(given: In, kept: Out, d: Out, needs: Sequence[bool]) -> list[Tensor | None]:
        out = Gradients(dict(zip(names, spaces(given, kept, d, needs), strict=True)), d[0].device)
        adjoint(out, given, kept, d)
        # boolean inputs get memory too, which the adjoint never accesses and autograd ignores
        return [getattr(out, name) for name in names]

    arguments = [(name, Tensor | None if name in names else hint) for name, hint in hints.items()]
    arguments += [(f"{kind}_{name}", Tensor | None) for kind in ("kept", "d") for name in results]
    op = _registered(
        f"{name}_backward", [*arguments, ("needs", Sequence[bool])], (inputs, outputs, outputs), len(names),
        spaces, filled, len(hints) + len(results), batch is not None, tensors,
    )  # fmt: skip

    def backward(given: In, kept: Out, d: Out, needs: Sequence[bool]) -> list[Tensor | None]:
        flat = *given, *kept, *d
        found = op(*flat, list(needs)) if needs_dispatcher(flat) else filled(given, kept, d, needs)
        of_inputs = dict(zip(names, found, strict=True))
        return [of_inputs.get(name) for name in hints]

    run = forward_op(name, inputs, outputs, memory, forward, batch=batch, follows=follows)
    kernel = Differentiable(inputs, outputs, run, backward, fresh=True, **options)
    kernel.operators = tuple(getattr(torch.ops.linrec, op).default for op in (name, f"{name}_backward"))
    return kernel


class Gradients:
    """The gradients that an adjoint fills, each allocated at its first access, to reduce the peak memory."""

    def __init__(self, spaces: dict[str, Space], device: torch.device) -> None:
        self._spaces, self._device = spaces, device

    def __getattr__(self, name: str) -> Any:
        # called only for names that have no value yet; flags have no gradient
        space = self._spaces.get(name, NOTHING)
        gradient = None if space is NOTHING else allocated(space, self._device)
        setattr(self, name, gradient)
        return gradient


def _registered(
    name: str,
    arguments: Sequence[tuple[str, Any]],
    kinds: Sequence[type],
    returned: int,
    memory: Callable[..., Sequence[Space]],
    filled: Callable[..., Sequence[Tensor | None]],
    lead: int,
    folds: bool,
    gradients_of: Sequence[int] = (),
) -> Callable[..., Sequence[Tensor]]:
    """Return the operator `linrec::name` as a function of flat arguments that returns a tuple of tensors.

    The arguments are the fields of named tuples of these `kinds` and an extra value, as `memory` and `filled`
    expect them. `lead` is the index of the argument that determines the device and the batch size. Under vmap
    the mapped axis is folded into the batch if `folds`. `gradients_of` holds the indices of the inputs whose
    gradients are the outputs.

    This replaces `torch.library.custom_op`, whose autograd layers duplicate `Differentiable` and cost more
    time than a small recurrence. Its first call also imports torch's compiler, which takes a second.
    """

    def parts(flat: Sequence[Any]) -> list[Any]:
        fields = iter(flat)
        return [*(kind(*islice(fields, len(kind._fields))) for kind in kinds), *fields]  # type: ignore[attr-defined]

    # an operator with a single output returns it without a tuple
    def run(*flat: Any) -> Any:
        device = flat[lead].device
        out = tuple(allocated(NOTHING, device) if x is None else x for x in filled(*parts(flat)))
        return out if returned > 1 else out[0]

    def fake(*flat: Any) -> Any:
        out = tuple(flat[lead].new_empty(space.shape, dtype=space.dtype) for space in memory(*parts(flat)))
        return out if returned > 1 else out[0]

    def call(*flat: Any) -> Any:
        return op(*flat) if returned > 1 else (op(*flat),)

    def mapped(info: Any, in_dims: tuple[Any, ...], *flat: Any) -> Any:
        size, batch = info.batch_size, _batch_of(flat[lead], in_dims[lead])
        places = zip(flat, in_dims, strict=True)
        folded = [_folded(x, dim, size, 0, batch) if isinstance(x, Tensor) else x for x, dim in places]
        unfolded, out_dims = [], []
        for i, x in enumerate(call(*folded)):
            # an unneeded gradient is `NOTHING`, which has no batch axis
            mapped = x.ndim > 1
            x = x.unflatten(0, (size, batch)) if mapped else x
            given = flat[gradients_of[i]] if gradients_of else None
            if mapped and given is not None and _batch_of(given, in_dims[gradients_of[i]]) < batch:
                x = x.sum(1, keepdim=True)
            unfolded.append(x)
            out_dims.append(0 if mapped else None)
        return (tuple(unfolded), tuple(out_dims)) if returned > 1 else (unfolded[0], out_dims[0])

    listed = ", ".join(f"{_SCHEMA[hint]} {argument}" for argument, hint in arguments)
    _LIBRARY.define(
        f"{name}({listed}) -> ({', '.join(['Tensor'] * returned)})", tags=(torch.Tag.pt2_compliant_tag,)
    )
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    op = getattr(torch.ops.linrec, name).default
    torch.library.register_fake(op, fake)
    if folds:
        torch.library.register_vmap(op, mapped)

    return call


def needs_dispatcher(inputs: Sequence[Any]) -> bool:
    """Return whether a call needs torch's dispatcher: for a compiler, a mode, a transform or a subclass.

    Other calls run the kernel directly, because the dispatcher takes as long as a small kernel.
    """
    if torch.compiler.is_compiling():
        return True
    if dispatch_modes() > 0 or transforms_active():
        return True
    for x in inputs:
        if isinstance(x, Tensor) and (
            # kernels read memory directly; the dispatcher resolves lazy conjugation and negation
            type(x) not in (Tensor, Parameter) or x.is_conj() or x.is_neg() or is_batched_gradient(x)
        ):
            return True
    return False


_LIBRARY = torch.library.Library("linrec", "FRAGMENT")
_SCHEMA = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    bool: "bool",
    int: "SymInt",
    float: "float",
    torch.dtype: "ScalarType",
    Sequence[bool]: "bool[]",
}
_LINE = 64
# tensors of at least this many bytes get huge pages from NumPy
_HUGE = 1 << 22


def allocated(space: Space, device: torch.device) -> Tensor:
    """Return uninitialised memory.

    The operating system maps new memory page by page at the first write, which takes three times longer than
    the write itself. For large CPU arrays NumPy requests huge pages; torch does not.
    """
    if isinstance(space, Tensor) and (not space.is_cpu or space.nbytes < _HUGE):
        return torch.empty_like(space, memory_format=torch.contiguous_format)
    shape, dtype = space.shape, space.dtype
    if device.type != "cpu" or (size := math.prod(shape) * dtype.itemsize) < _HUGE:
        return torch.empty(shape, dtype=dtype, device=device)
    memory = np.empty(size + _LINE, dtype=np.uint8)
    first = -memory.ctypes.data % _LINE
    return torch.from_numpy(memory[first : first + size]).view(dtype).view(*shape)


def terms(total: Tensor, shape: Sequence[int]) -> Tensor:
    """Return memory for the terms of a gradient that is a sum; the gradient itself if the shapes match."""
    return total if total.shape == shape else allocated(Memory(shape, total.dtype), total.device)


def add_up(totals: Sequence[Tensor | None], parts: Sequence[Tensor]) -> None:
    """Fill gradients with the sums of their terms over axes of size 1, and drop padding on other axes."""
    for total, x in zip(totals, parts, strict=True):
        if total is not None and total is not x:
            for axis, size in enumerate(total.shape):
                if 1 < size < x.shape[axis]:
                    x = x.narrow(axis, 0, size)
            total.copy_(x.sum_to_size(total.shape))


def _batch_of(x: Tensor, dim: int | None) -> int:
    """Return the size of the batch axis, which is the first axis apart from the mapped axis."""
    return x.shape[0] if dim is None else x.movedim(dim, 0).shape[1]


def _folded(x: Tensor, dim: int | None, size: int, axis: int, batch: int = -1) -> Tensor:
    """Return a tensor with the mapped axis folded into another axis; an unmapped tensor is repeated."""
    x = x.unsqueeze(axis) if dim is None else x.movedim(dim, axis)
    rest = [-1] * (x.ndim - axis - 2)
    return x.expand(*[-1] * axis, size, batch, *rest).flatten(axis, axis + 1)
