"""FSDP2: every process holds a shard of each parameter, and gathers a block's parameters while it runs.

torch.distributed.tensor and .fsdp take a second to import, so the functions here import them when called.
"""

import sys
import warnings
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def shard(objective: nn.Module, mesh: "DeviceMesh") -> nn.Module:
    """Shard the parameters of an `Objective` over the processes of a mesh, in place.

    The parameters of a block are gathered together before the block runs. Embedding, head and last norm are
    gathered for the whole step, and so are modules that several blocks share, such as the lower bounds of
    HGRU. Gathered parameters keep their precision; autocast creates 16-bit copies of them.

    Args:
        objective: an `Objective`; its parameters become `DTensor`s on the mesh's device type.
        mesh: mesh of the processes, with a dimension "data_parallel".
    """
    from torch.distributed.fsdp import fully_shard

    mesh = mesh["data_parallel"]
    blocks = list(objective.get_submodule("model.blocks").children())
    users = Counter(module for block in blocks for module in block.modules())
    # register shared modules outside of all blocks, so that the root module shards them
    objective.shared = shared = nn.ModuleList(module for module, n in users.items() if n > 1)
    for block in blocks:
        fully_shard(block, mesh=mesh, ignored_params=set(shared.parameters()))
    # states that blocks return may be views, which is safe because they are never modified in place
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    fully_shard(objective, mesh=mesh)
    return objective


def whole(tensor: Any) -> Tensor:
    """Return the full tensor of a sharded tensor, or the tensor itself; all processes must call this."""
    return tensor.full_tensor() if _is_split(tensor) else tensor


def placed_like(tensor: Tensor, other: Any) -> Tensor:
    """Return a full tensor on the device of `other`, in its layout and shards if the shapes are equal."""
    tensor = tensor.to(other.device)
    if tensor.shape != other.shape:
        return tensor
    if _is_split(other):
        from torch.distributed.tensor import distribute_tensor

        # every process has the full tensor, so nothing is communicated
        return distribute_tensor(tensor, other.device_mesh, other.placements, src_data_rank=None)
    # optimisers walk through a parameter and its moments in the order of memory
    return torch.empty_like(other, dtype=tensor.dtype).copy_(tensor)


def _is_split(tensor: Any) -> bool:
    # DTensors exist only if the module has been imported
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)
