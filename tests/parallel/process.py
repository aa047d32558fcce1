"""Processes that share sequences: each runs all cases, and ends at the first that fails.

    python -m tests.parallel.process SIZE FOLDER DEVICE [NAME ...]

The names are of cases; without, those of the size and the device run. A case is a function `case_...`, and holds where it raises nothing on any rank. Imports take longer than the
cases do, so one set of processes runs all of them, forked from one that has imported everything.
"""

import contextlib
import io
import multiprocessing
import os
import runpy
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from linrec.ops.core.backends import numba_usable
from linrec.parallel.ranks import NAME, Call
from linrec.testing import assert_agree
from tests.parallel import agreement, compare, models, operators

# seconds
LIMIT = 300
EXAMPLE = Path(__file__).parents[2] / "examples/time_parallel.py"
# they take long, and do not depend on how many parts there are
FOR_TWO = {
    "operators.a_bonus",
    "operators.a_normaliser",
    "operators.every_mode_and_backend",
    "operators.every_shape_of_the_gates",
    "operators.complex_queries_and_keys",
    "operators.other_precisions",
    "models.every_mixer",
    "models.language_models_in_two_pieces",
    "models.checkpointing",
    "models.compiled",
    "process.example",
}
FOR_FOUR = {"models.two_groups"}
# shapes and dtypes, each of which a GPU has kernels to compile for, are left to the tests of the operators;
# these show that what is carried between devices is right, by each way that an operator or a model takes
ON_GPUS = {
    "operators.scan",
    "operators.long_parts",
    "operators.gate_loop_in_every_way",
    "operators.decays_that_underflow",
    "operators.no_rows_and_no_steps",
    "operators.delta_rule",
    "operators.short_conv",
    "operators.attention",
    "models.language_models_in_two_pieces",
    "models.autocast",
    "process.example",
}


def cases(size: int, device: str, names: list[str]) -> dict[str, Callable[[], None]]:
    """The cases for so many processes on "cpu" or "cuda", by name."""
    found = {
        f"{module.__name__.rpartition('.')[2]}.{name.removeprefix('case_')}": case
        for module in (operators, models, agreement)
        for name, case in vars(module).items()
        if name.startswith("case_")
    }
    # last, since it makes a process group of its own
    found["process.example"] = case_example
    left_out = FOR_TWO if size == 4 else FOR_FOUR
    assert left_out | ON_GPUS <= set(found)
    wanted = set(names) or (ON_GPUS if device == "cuda" else set(found) - left_out)
    return {name: case for name, case in found.items() if name in wanted}


def case_example() -> None:
    """As torchrun starts it; that its results agree, it asserts itself."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ["MASTER_ADDR"] = "localhost"
    sys.argv = [str(EXAMPLE), "300", "16"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    # two layers of 16 complex channels: A and B forward, two states backward, both times what is compared,
    # with the operator's name in several integers
    sent = 2 * 2 * (2 * 16 * 8 + (len(Call._fields) - 1 + NAME // 8) * 8)
    for words in ("300 tokens of one sequence, 2 x", f"sent by each process: {sent} bytes"):
        assert (words in printed.getvalue()) == (rank == 0)


def rank_main(rank: int, size: int, folder: Path, device: str, names: list[str]) -> None:
    if device == "cuda":
        torch.cuda.set_device(rank)
    compare.device = device
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=LIMIT)
    )
    for name, case in cases(size, device, names).items():
        torch.manual_seed(0)
        try:
            case()
        except Exception:
            # the others would wait for what it did not do; they see it leave
            sys.exit(f"case {name} on rank {rank} of {size}: {traceback.format_exc()}")


def main(size: int, folder: Path, device: str, *names: str) -> int:
    """Return 0 if all cases hold on all ranks."""
    # both import what takes long when they are first needed
    numba_usable()
    assert_agree(torch.ones(1), torch.ones(1), "ones")
    # autograd's threads for GPUs do not survive a fork
    context = multiprocessing.get_context("spawn" if device == "cuda" else "fork")
    arguments = (size, folder, device, [*names])
    ranks = [context.Process(target=rank_main, args=(rank, *arguments)) for rank in range(size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(LIMIT)
        # one that waits for ever keeps the others
        process.kill()
    return int(any(process.exitcode for process in ranks))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:]))
