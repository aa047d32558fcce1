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
    shared = torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True, recompile_limit=64)
    numbered = torch.compiler.config.patch(dynamic_sources=r".*\.layer$")  # type: ignore[attr-defined]
    frugal = torch._functorch.config.patch(ban_recompute_materialized_backward=False)
    casts = torch._inductor.config.patch(joint_custom_pre_pass=_saving_casts())
    with shared, numbered, frugal, casts:
        yield


@functools.cache
def _saving_casts() -> Any:
    """Return the pass over a graph that marks casts of weights as saved for the backward pass."""
    # imported here because the compiler's modules take a second to import
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class SavingCasts(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            for node in graph.find_nodes(
                op="call_function", target=torch.ops.prims.convert_element_type.default
            ):
                (source, dtype), value = node.args, node.meta["val"]
                if source.op == "placeholder" and value.dim() == 2 and dtype.itemsize == 2:
                    node.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)

        def uuid(self) -> Any:
            # graphs are cached by this number
            return get_hash_for_files((__file__,))

    return SavingCasts()


def with_parts_compiled(model: LanguageModel, **options: Any) -> LanguageModel:
    """Return a copy whose blocks, last norm and head are compiled, each on its own.

    The copy shares all tensors with the model, which stays as it is. Call the copy within `compiling`.

    Args:
        model: the model.
        options: arguments of `torch.compile`.

    Example:
        >>> from linrec.models import ModelConfig
        >>> model = LanguageModel(ModelConfig(vocab_size=5, d_model=8, n_layers=2))
        >>> compiled = with_parts_compiled(model, backend="eager")
        >>> compiled.head.weight is model.head.weight
        True
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
