"""Several processes that train one model, each on its share of every batch; mostly there is one alone.

torchrun starts them. All must come to the same calls in the same order. What one alone does, such as writing
a file, is done in a call that all make, so that its failure ends all of them. With one process, nothing is
exchanged.
"""

import os
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor, distributed

from linrec.errors import TrainError
from linrec.train.fabric import Fabric

P = ParamSpec("P")
T = TypeVar("T")


def summed(fabric: Fabric, tensor: Tensor) -> Tensor:
    """Return the sum of a tensor over the processes; the device is not waited for."""
    if fabric.world_size > 1:
        tensor = tensor.clone()
        distributed.all_reduce(tensor)
    return tensor


def gathered(fabric: Fabric, tensor: Tensor) -> list[Tensor]:
    """Return the tensors of all processes, which are of one shape, first process first."""
    if fabric.world_size == 1:
        return [tensor]
    # where the processes can exchange it
    mine = tensor.to(fabric.device)
    of_all = [torch.empty_like(mine) for _ in range(fabric.world_size)]
    distributed.all_gather(of_all, mine)
    return [of_one.to(tensor.device) for of_one in of_all]


def any_process(fabric: Fabric, flag: bool) -> bool:
    """Tell whether the flag is set in any process; waits for the device where there are several."""
    if fabric.world_size == 1:
        return flag
    return bool(summed(fabric, torch.tensor(flag, dtype=torch.int32, device=fabric.device)))


def first(fabric: Fabric, do: Callable[P, T], *args: P.args, **named: P.kwargs) -> T | None:
    """Call a function in the first process alone, and raise in all what it raises there.

    Returns:
        What the function returned; None in all processes but the first.
    """
    return _together(fabric, do if fabric.is_global_zero else None, *args, **named)


def first_ahead(fabric: Fabric, do: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
    """Call a function in all processes, in the others after the first, which may leave files for them."""
    if fabric.world_size == 1:
        return do(*args, **named)
    of_first = first(fabric, do, *args, **named)
    of_other = _together(fabric, None if fabric.is_global_zero else do, *args, **named)
    # a function may return None, so the rank decides
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


def program() -> list[str]:
    """Return the words that start linrec as this process was started: `linrec`, or torchrun with them.

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
