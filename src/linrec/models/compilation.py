"""Regional compilation, where blocks of equal structure share a compilation, and steps as CUDA graphs."""

import copy
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy

from linrec.models.language_model import LanguageModel
from linrec.ops.core.garbage import uncollected
from linrec.torch_private import compiler_options, custom_graph_pass

__all__ = ["EAGER_STEPS", "CapturedStep", "compiling", "with_parts_compiled"]

EAGER_STEPS = 3
"""Calls of a `CapturedStep` that run eagerly."""


@contextmanager
def compiling() -> Iterator[None]:
    """Let blocks of equal structure share one compilation within the context, and save little for backward.

    By default torch compiles a module again for each value of an integer attribute, and gives up after eight
    times. Here an attribute `layer`, the number of a layer in its stack, may vary, also with `dynamic=False`.

    By default torch also saves every elementwise result that a matrix product of the backward pass reads:
    outputs of norms, products of gates, weights in half precision. A kernel of the backward pass can compute
    these again from tensors that are saved anyway. Weights in half precision are saved nevertheless: casting
    them again takes a kernel per weight.
    """
    numbered = torch.compiler.config.patch(dynamic_sources=r".*\.layer$")  # type: ignore[attr-defined]
    with compiler_options(_saving_casts()), numbered:
        yield


@functools.cache
def _saving_casts() -> Any:
    """Return the pass over a graph that marks casts of weights as saved for the backward pass."""
    graph_pass, hash_of_files = custom_graph_pass()

    class SavingCasts(graph_pass):  # type: ignore[misc, valid-type]
        def __call__(self, graph: torch.fx.Graph) -> None:
            for node in graph.find_nodes(
                op="call_function", target=torch.ops.prims.convert_element_type.default
            ):
                (source, dtype), value = node.args, node.meta["val"]
                if source.op == "placeholder" and value.dim() == 2 and dtype.itemsize == 2:
                    node.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)

        def uuid(self) -> Any:
            # graphs are cached by this number
            return hash_of_files((__file__,))

    return SavingCasts()


def with_parts_compiled(model: LanguageModel, **options: Any) -> LanguageModel:
    """Return a copy whose blocks, last norm and head are compiled, each on its own.

    The copy shares all tensors with the model, which stays as it is. Call the copy within `compiling`.

    Args:
        model: the model.
        options: arguments of `torch.compile`.
    """

    def compiled(module: nn.Module) -> nn.Module:
        part = copy.copy(module)
        part.compile(**options)
        return part

    found = copy.copy(model)
    # a shallow copy shares the dictionary of modules
    found._modules = dict(model._modules)
    found.blocks = nn.ModuleList(compiled(block) for block in model.blocks)
    found.norm, found.head = compiled(model.norm), compiled(model.head)  # type: ignore[assignment]
    return found


class CapturedStep:
    """A training step that is captured as a CUDA graph and replayed: a single launch instead of hundreds.

    The first calls run the step eagerly, so that kernels are compiled and tuned and the optimiser's state is
    created; the next call captures the graph. Arguments of other shapes, or with None in other places, start
    again from eager calls. The step must return None and update its state in place.

    Args:
        step: a function of tensors on a CUDA device.
        unless: a function of the same arguments that returns whether this call must run eagerly. Eager calls
            do not change the graph of the other calls. None is for steps without these calls.
        in_place: a function that returns the tensors that the step reads and writes where they are, besides
            its arguments, and that others may replace. Other tensors than before start again from eager
            calls. None is for steps without these tensors.
    """

    def __init__(
        self,
        step: Callable[..., None],
        *,
        unless: Callable[..., bool] | None = None,
        in_place: Callable[[], Sequence[Tensor]] | None = None,
    ) -> None:
        self._step = step
        self._unless = unless
        self._in_place = in_place
        self._tensors: Sequence[Tensor] = ()
        self._stream = torch.cuda.Stream()
        self._shapes: list[tuple[int, ...] | None] = []
        self._arguments: tuple[Tensor | None, ...] = ()

    def __call__(self, *arguments: Tensor | None) -> None:
        """Run the step once."""
        if self._unless is not None and self._unless(*arguments):
            self._run(*arguments)
            return
        shapes = [None if argument is None else tuple(argument.shape) for argument in arguments]
        tensors = () if self._in_place is None else self._in_place()
        same = len(tensors) == len(self._tensors) and all(map(operator.is_, tensors, self._tensors))
        if shapes != self._shapes or not same:
            self._shapes, self._tensors, self._calls, self._arguments = shapes, tensors, 0, ()
            self._graph = torch.cuda.CUDAGraph()
        self._calls += 1
        if self._calls <= EAGER_STEPS:
            self._run(*arguments)
            return
        if not self._arguments:
            self._arguments = tuple(None if a is None else a.clone() for a in arguments)
            with uncollected(), torch.cuda.graph(self._graph, stream=self._stream):
                self._step(*self._arguments)
        for static, argument in zip(self._arguments, arguments, strict=True):
            if static is not None and argument is not None:
                static.copy_(argument)
        self._graph.replay()

    def _run(self, *arguments: Tensor | None) -> None:
        """Run the step eagerly."""
        # on the capture stream, because autograd remembers the stream on which its nodes were created
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._step(*arguments)
        torch.cuda.current_stream().wait_stream(self._stream)
