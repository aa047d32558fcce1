"""Communication between the processes that train a model together, each on its share of every batch.

torchrun starts the processes. All processes must make the same calls in the same order. Work for a single
process, such as writing a file, also goes through a call that all processes make, so that an error ends all
of them. A single process exchanges nothing.
"""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor, distributed

from linrec.errors import TrainError
from linrec.lab.train.fabric import Fabric

P = ParamSpec("P")
T = TypeVar("T")


def summed(fabric: Fabric, tensor: Tensor) -> Tensor:
    """Return the sum of a tensor over the processes, without synchronising with the device."""
    if fabric.world_size > 1:
        tensor = tensor.clone()
        distributed.all_reduce(tensor)
    return tensor


def gathered(fabric: Fabric, tensor: Tensor) -> list[Tensor]:
    """Return the tensors of all processes, in the order of their ranks; the shapes must be equal."""
    if fabric.world_size == 1:
        return [tensor]
    # the communication backend needs tensors on the training device
    mine = tensor.to(fabric.device)
    of_all = [torch.empty_like(mine) for _ in range(fabric.world_size)]
    distributed.all_gather(of_all, mine)
    return [of_one.to(tensor.device) for of_one in of_all]


def any_process(fabric: Fabric, flag: bool) -> bool:
    """Return whether the flag is set in any process; synchronises with the device if there are several."""
    if fabric.world_size == 1:
        return flag
    return bool(summed(fabric, torch.tensor(flag, dtype=torch.int32, device=fabric.device)))


def first(fabric: Fabric, do: Callable[P, T], *args: P.args, **named: P.kwargs) -> T | None:
    """Call a function only in the first process, and raise its error in all processes.

    Returns:
        The function's return value in the first process; None in all other processes.
    """
    return _together(fabric, do if fabric.is_global_zero else None, *args, **named)


def first_ahead(fabric: Fabric, do: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
    """Call a function in the first process and then in all others, which may read files of the first."""
    if fabric.world_size == 1:
        return do(*args, **named)
    of_first = first(fabric, do, *args, **named)
    of_other = _together(fabric, None if fabric.is_global_zero else do, *args, **named)
    # decided by the rank, because the function may return None
    return of_first if fabric.is_global_zero else of_other  # type: ignore[return-value]


def _together(fabric: Fabric, do: Callable[P, T] | None, *args: P.args, **named: P.kwargs) -> T | None:
    if fabric.world_size == 1:
        return None if do is None else do(*args, **named)
    result, error = None, None
    try:
        result = None if do is None else do(*args, **named)
    except (OSError, TrainError, ValueError) as caught:
        error = caught
    errors: list[Exception | None] = [None] * fabric.world_size
    distributed.all_gather_object(errors, error)
    for any_error in errors:
        if any_error is not None:
            raise any_error
    return result


def is_lost(error: BaseException) -> bool:
    """Return whether the connection to another process broke, for example because the process was killed."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return False
    # gloo raises plain errors that name its source file
    return isinstance(error, distributed.DistError) or "/gloo/" in str(error)


def says_first() -> bool:
    """Return whether this process is the first to call this; any process may have been killed."""
    try:
        # torchrun itself holds the store
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = distributed.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=2))
        return store.add("linrec/lost", 1) == 1
    except RuntimeError:
        return True


def program() -> list[str]:
    """Return the command that started this process: `linrec`, or torchrun with its options.

    Example:
        >>> program()
        ['linrec']
    """
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes == 1:
        return ["linrec"]
    here = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    nodes = [] if here == processes else ["--nnodes", str(processes // here)]
    return ["torchrun", *nodes, "--nproc-per-node", str(here), "-m", "linrec"]
