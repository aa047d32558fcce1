"""The private names of torch that linrec uses, each with what breaks without it; no other file uses any.

All were seen in torch 2.13. `tests/test_torch_private.py` tells which of them another version no longer has.
What a single feature needs is a function, so that the rest of linrec works without it.
"""

from contextlib import AbstractContextManager, ExitStack
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

# torch.func: without it, kernels run beneath vmap and grad, which then see no operations
from torch._C import _are_functorch_transforms_active as transforms_active

# modes: without it, a kernel runs unseen by a dispatch mode, such as that of fake tensors
from torch._C import _len_torch_dispatch_stack as dispatch_modes

# batched gradients of autograd, the older vmap: without it, kernels read their tensors as one sample
from torch._C._functorch import is_legacy_batchedtensor as is_batched_gradient
from torch.autograd import forward_ad

# hooks of all modules: without it, projections that read weights directly pass by counters and profilers
from torch.nn.modules.module import _has_any_global_hook as any_global_hook

# operations seen one by one: without it, neither cells nor fake kernels are checked
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode

__all__ = [
    "TorchDispatchMode",
    "any_global_hook",
    "dispatch_modes",
    "is_batched_gradient",
    "transforms_active",
]


def tracing_export() -> bool:
    """Return whether torch.export is tracing; else programs are exported with kernels that ATen lacks.

    `torch.compiler.is_exporting` should mean the same, but in torch 2.11 it is also true under torch.compile.
    """
    return torch.compiler._is_exporting_flag


def in_forward_mode() -> bool:
    """Return whether forward-mode derivatives are computed; else the adjoint loop drops them."""
    return forward_ad._current_level >= 0


def fake_tensors() -> "FakeTensorMode":
    """Return a mode of tensors without values; there is no check of fake kernels without it."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


def exported_scan() -> Any:
    """Return the higher-order operator of a loop; else no program with a loop of dynamic length is exported.

    The import takes a second.
    """
    from torch._dynamo.eval_frame import remove_from_cache
    from torch._higher_order_ops.scan import scan

    if not torch.compiler.is_dynamo_compiling():
        # torch compiles `scan` in each export, and would check the sizes against those of all earlier exports
        for code in scan.__code__.co_consts:
            if isinstance(code, CodeType):
                remove_from_cache(code)
    return scan


def compiler_options(casts: Any) -> AbstractContextManager[Any]:
    """Return a context of the compiler's options for layers of equal structure, see `regional.compiling`.

    Without them, a deep model is compiled layer by layer, and saves more for the backward pass.
    """
    with ExitStack() as options:
        patches = (
            torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True, recompile_limit=64),
            torch._functorch.config.patch(ban_recompute_materialized_backward=False),
            torch._inductor.config.patch(joint_custom_pre_pass=casts),
        )
        for patch in patches:
            options.enter_context(patch)
        return options.pop_all()


def custom_graph_pass() -> tuple[type[Any], Any]:
    """Return the base class of passes over a compiled graph, and the hash of files that caches know it by.

    Without them, compiled training casts weights twice. The import takes a second.
    """
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    return CustomGraphPass, get_hash_for_files


def attention_choice(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any) -> int:
    """Return the kernel that torch's attention takes; else attention on the CPU has no second derivatives."""
    return torch._fused_sdp_choice(q, k, v, mask, **options)


def flash_on_cpu(q: Tensor, k: Tensor, v: Tensor, causal: bool, **options: Any) -> tuple[Tensor, Tensor]:
    """Return outputs and log-sums of attention on the CPU, whose second derivatives need both."""
    run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    y, log_sum = run(q, k, v, 0.0, causal, **options)
    return y, log_sum


def flash_on_cpu_backward(*saved: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `flash_on_cpu`."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*saved, **options)


def lerp_all(tensors: list[Tensor], ends: list[Tensor], weight: float, *, in_place: bool) -> Any:
    """Interpolate lists of tensors; the optimiser Muon needs this and the next function."""
    return (torch._foreach_lerp_ if in_place else torch._foreach_lerp)(tensors, ends, weight)


def shrink_and_subtract(tensors: list[Tensor], factor: Any, others: list[Tensor]) -> None:
    """Multiply a list of tensors by a factor, and subtract others, in place."""
    torch._foreach_mul_(tensors, factor)
    torch._foreach_sub_(tensors, others)


def references(tensor: Tensor) -> int:
    """Return how many tensors share the memory of a tensor, and a constant; else no memory is used again."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
