"""Regional compilation: blocks of equal structure share a compilation."""

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

from linrec.models.language_model import LanguageModel
from linrec.torch_private import compiler_options, custom_graph_pass

__all__ = ["compiling", "with_parts_compiled"]


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
