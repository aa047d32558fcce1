"""FSDP2: every process keeps its part of each parameter, and gathers those of a block while it is in use.

torch.distributed.tensor and .fsdp take a second to import, so what needs them does it where it begins.
"""

import sys
import warnings
from collections import Counter
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def shard(objective: nn.Module, mesh: "DeviceMesh") -> nn.Module:
    """Split the parameters of an `Objective` over the processes of a mesh, in place.

    Each block is gathered as one, before it is used. Embedding, head and last norm are gathered together for
    the whole step, and so is what blocks share, such as the lower bounds of HGRU: no block owns that.
    Gathered parameters are as precise as the others; autocast makes its 16-bit copies of them.

    Args:
        objective: an `Objective`; its parameters become `DTensor`s on the mesh's kind of device.
        mesh: processes, along a dimension "data_parallel".
    """
    from torch.distributed.fsdp import fully_shard

    mesh = mesh["data_parallel"]
    blocks = list(objective.get_submodule("model.blocks").children())
    users = Counter(module for block in blocks for module in block.modules())
    # a place outside of all blocks, where the root finds them
    objective.shared = shared = nn.ModuleList(module for module, n in users.items() if n > 1)
    for block in blocks:
        fully_shard(block, mesh=mesh, ignored_params=set(shared.parameters()))
    # the states that blocks return may be views; nothing writes into them
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    fully_shard(objective, mesh=mesh)
    return objective


def whole(tensor: Any) -> Tensor:
    """Return a tensor that may be split over the processes as a whole one; all processes must ask for it."""
    return tensor.full_tensor() if _is_split(tensor) else tensor


def placed_like(tensor: Tensor, other: Any) -> Tensor:
    """Return a whole tensor on the device of another one, split over the processes where that one is."""
    tensor = tensor.to(other.device)
    if _is_split(other) and tensor.shape == other.shape:
        from torch.distributed.tensor import distribute_tensor

        # each process has the whole: nothing need be sent
        return distribute_tensor(tensor, other.device_mesh, other.placements, src_data_rank=None)
    return tensor


def _is_split(tensor: Any) -> bool:
    # where nobody has imported the module, there are no such tensors
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)
