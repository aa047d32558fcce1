"""The processes that share a sequence: their order, the agreement on calls, and the exchange of tensors."""

import itertools
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor

__all__ = ["part"]

OPERATORS = ("scan", "gate_loop")
DTYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128)


class Call(NamedTuple):
    """Description of a rank's call, as integers to exchange; all but `steps` must be equal on all ranks."""

    number: int
    backward: int
    operator: int
    dtype: int
    reverse: int
    has_state: int
    has_gradient: int
    batch: int
    channels: int
    d_key: int
    d_value: int
    steps: int


_NO_YES = ("no", "yes")

# the name of each field in errors, and the meaning of its integers
_FIELDS: dict[str, tuple[str, tuple[object, ...] | None]] = {
    "number": ("the number of earlier calls", None),
    "backward": ("backward pass", _NO_YES),
    "operator": ("the operator", OPERATORS),
    "dtype": ("the dtype of the state", DTYPES),
    "reverse": ("`reverse`", _NO_YES),
    "has_state": ("`state` given", _NO_YES),
    "has_gradient": ("gradient asked for", _NO_YES),
    "batch": ("the batch size", None),
    "channels": ("the number of channels or heads", None),
    "d_key": ("dk", None),
    "d_value": ("dv", None),
}


class Ranks:
    """The ranks of a process group in the order of time, and this process among them.

    Args:
        group: the process group; None is the default one.

    Attributes:
        rank: rank of this process.
        size: number of ranks.
        sent: bytes that this rank has sent; each of the other ranks receives them.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                "there is no process group; start the program with torchrun, and call "
                "`torch.distributed.init_process_group()` first."
            )
        if dist.get_rank(group) < 0:
            raise ValueError("`group` must contain this process. Pass a group that does.")
        # a weak reference: gloo may abort at exit if, for example, an autograd graph still holds the group
        self._group = ref(dist.group.WORLD if group is None else group)
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.sent = 0
        # the host waits for these integers, so they should not queue behind GPU kernels
        self._hosts_meet = "cpu" in dist.get_backend_config(group)

    @property
    def group(self) -> Any:
        """The process group."""
        group = self._group()
        if group is None:
            raise ValueError(
                "the process group of `time_parallel` is gone; call `backward` before "
                "`torch.distributed.destroy_process_group()`."
            )
        return group

    def next_number(self) -> int:
        """Return the number of calls of this group so far, and count this call."""
        return next(_CALLS.setdefault(self.group, itertools.count()))

    def agree(self, call: Call, device: torch.device) -> list[int]:
        """Exchange the calls of all ranks, and return the number of steps on each rank.

        Args:
            call: this rank's call.
            device: device of its tensors.
        """
        mine = torch.tensor(call, device="cpu" if self._hosts_meet else device)
        calls = [Call(*row) for row in torch.stack(self.gather(mine)).tolist()]
        for rank, other in enumerate(calls):
            for field, (name, values) in _FIELDS.items():
                first, second = getattr(calls[0], field), getattr(other, field)
                if first != second:
                    shown = (first, second) if values is None else (values[first], values[second])
                    raise ValueError(
                        "ranks that share a sequence must make the same calls in the same order, on inputs "
                        f"that differ only in time; {name}: {shown[0]} on rank 0, {shown[1]} on rank "
                        f"{rank}. "
                        "Give all of them the same batch and model. If an output contributes to the loss of "
                        "one rank, it must contribute on all ranks."
                    )
        return [other.steps for other in calls]

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, which must have the same shape and dtype."""
        # some backends do not support complex tensors
        real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
        gathered = [torch.empty_like(real, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(gathered, real.contiguous(), group=self.group)
        self.sent += real.nbytes
        return [torch.view_as_complex(x) for x in gathered] if tensor.is_complex() else gathered


_CALLS: WeakKeyDictionary[dist.ProcessGroup, itertools.count] = WeakKeyDictionary()


def part(
    x: Shaped[Tensor, "..."], *, dim: int = 1, group: dist.ProcessGroup | None = None
) -> Shaped[Tensor, "..."]:
    """Return this rank's segment of x: T / P steps, with one more step on the first T mod P ranks.

    Any other split works too, as long as the order of the segments is the order of the ranks.

    Args:
        x: a tensor of T steps, the same on every rank.
        dim: the axis of time.
        group: the P processes that share the sequence; None is the default group.

    Returns:
        A view of x.

    Raises:
        ValueError: there is no process group, or this process is not in it.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> part(torch.arange(3)[None])
        tensor([[0, 1, 2]])
        >>> dist.destroy_process_group()
    """
    ranks = Ranks(group)
    return torch.tensor_split(x, ranks.size, dim)[ranks.rank]
