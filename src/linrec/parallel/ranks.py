"""The processes that share a sequence: their order, the agreement on calls, and the exchange of tensors."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor

from linrec.trees import Tree, leaves, map_tree

__all__ = ["part"]

# letters of the names of operators that ranks exchange
NAME = 32
DTYPES = (
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.bool,
)


class Call(NamedTuple):
    """Description of a rank's call; all but `steps` and `has_reset` must be equal on all ranks."""

    number: int
    backward: int
    operator: str
    dtype: int
    reverse: int
    has_state: int
    has_gradient: int
    batch: int
    channels: int
    d_key: int
    d_value: int
    steps: int
    has_reset: int = 0


_NO_YES = ("no", "yes")

# the name of each field in errors, and the meaning of its integers
_FIELDS: dict[str, tuple[str, tuple[object, ...] | None]] = {
    "number": ("the number of earlier calls", None),
    "backward": ("backward pass", _NO_YES),
    "operator": ("the operator", None),
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

    def agree(self, call: Call, device: torch.device) -> list[Call]:
        """Exchange the calls of all ranks, and return them; raise if they differ.

        Args:
            call: this rank's call.
            device: device of its tensors.
        """
        mine = torch.tensor(_numbers(call), device=self._device(device))
        calls = [_call(row) for row in torch.stack(self.gather(mine)).tolist()]
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
        return calls

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, which must have the same shape and dtype."""
        # some backends do not support complex tensors
        real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
        gathered = [torch.empty_like(real, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(gathered, real.contiguous(), group=self.group)
        self.sent += real.nbytes
        return [torch.view_as_complex(x) for x in gathered] if tensor.is_complex() else gathered

    def scatter(self, rows: Tensor) -> Tensor:
        """Return row `rank` of the tensor of every rank, stacked; the tensors have one row per rank."""
        real = torch.view_as_real(rows.resolve_conj()) if rows.is_complex() else rows
        received = torch.empty_like(real, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, real.contiguous(), group=self.group)
        self.sent += real[0].nbytes
        return torch.view_as_complex(received) if rows.is_complex() else received

    def total(self, tensor: Tensor) -> Tensor:
        """Return the sum over ranks."""
        total = tensor.clone(memory_format=torch.contiguous_format)
        real = torch.view_as_real(total) if total.is_complex() else total
        dist.all_reduce(real, group=self.group)
        self.sent += real.nbytes
        return total

    def send(self, tree: Tree, to: int) -> None:
        """Send a tree with at least one tensor to a rank."""
        where = {"group_dst": to, "group": self.group}
        dist.send_object_list([_described(tree)], device=self._device(leaves(tree)[0].device), **where)
        for x in _to_send(tree):
            dist.send(x, **where)
            self.sent += x.nbytes

    def receive(self, of: int, device: torch.device) -> Tree:
        """Return the tree that a rank sends, on a device."""
        described, where = [None], {"group_src": of, "group": self.group}
        dist.recv_object_list(described, device=self._device(device), **where)
        tree = map_tree(lambda x: torch.empty_like(x, device=device), described[0])
        for x in _to_send(tree):
            dist.recv(x, **where)
        return tree

    def spread(self, tree: Tree, of: int) -> Tree:
        """Return the tree of one rank on all ranks, without gradients."""
        device, where = leaves(tree)[0].device, {"group_src": of, "group": self.group}
        described = [_described(tree)]
        dist.broadcast_object_list(described, device=self._device(device), **where)
        if of == self.rank:
            tree = map_tree(lambda x: x.detach().contiguous(), tree)
        else:
            tree = map_tree(lambda x: torch.empty_like(x, device=device), described[0])
        for x in _to_send(tree):
            dist.broadcast(x, **where)
            self.sent += x.nbytes if of == self.rank else 0
        return tree

    def _device(self, device: torch.device) -> torch.device:
        """Return the device on which ranks exchange numbers that the host reads."""
        return torch.device("cpu") if self._hosts_meet else device


def _described(tree: Tree) -> Tree:
    """Return the tree with shapes and dtypes in place of numbers."""
    return map_tree(lambda x: torch.empty(x.shape, dtype=x.dtype, device="meta"), tree)


def _to_send(tree: Tree) -> list[Tensor]:
    """Return the tensors of a tree without gradients, contiguous, complex ones as pairs."""
    tensors = [x.detach().resolve_conj().contiguous() for x in leaves(tree)]
    return [torch.view_as_real(x) if x.is_complex() else x for x in tensors]


def _numbers(call: Call) -> list[int]:
    """Return the call as integers, eight letters of the operator's name in each."""
    name = call.operator.encode()[:NAME].ljust(NAME)
    words = [int.from_bytes(name[i : i + 8], "big") for i in range(0, NAME, 8)]
    return [*(number for number in call if not isinstance(number, str)), *words]


def _call(numbers: Sequence[int]) -> Call:
    """Return the call of these integers."""
    name = b"".join(word.to_bytes(8, "big") for word in numbers[-NAME // 8 :]).decode().rstrip()
    number, backward, *others = numbers[: -NAME // 8]
    return Call(number, backward, name, *others)


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
