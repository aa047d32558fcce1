"""Devices, processes and settings of torch for a run; the only module that imports Lightning Fabric.

Fabric is imported on first use: it imports torch's compiler, which takes two seconds, and `--help` and
command line errors should not wait for it. torch.distributed.tensor and .fsdp take another second, and are
imported by the functions that need them.

torchrun starts the processes that train a model together, each on its share of every batch. All processes
must make the same calls in the same order. Work for a single process, such as writing a file, also goes
through a call that all processes make, so that an error ends all of them.
"""

import logging
import os
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor, distributed, nn

from linrec.errors import ConfigError, TrainError
from linrec.lab.tasks import Batch
from linrec.lab.train.config import LoopConfig
from linrec.literals import DeviceName
from linrec.parallel import part, time_parallel

if TYPE_CHECKING:
    from lightning_fabric import Fabric
    from torch.distributed.device_mesh import DeviceMesh
else:
    # only annotations use the name at run time
    Fabric = Any

P = ParamSpec("P")
T = TypeVar("T")

# log messages to hide: advice on matmul precision, which `loop.matmul_precision` chooses, and messages that
# repeat the configuration
_NOT_SHOWN = ("Tensor Cores", "Mixed Precision", "Initializing distributed", "distributed_backend=")
for _module in ("rank_zero", "distributed"):
    logging.getLogger(f"lightning_fabric.utilities.{_module}").addFilter(
        lambda record: not any(words in record.getMessage() for words in _NOT_SHOWN)
    )

# how long processes wait for each other, for example while the first process tokenises a text
_PATIENCE = timedelta(hours=6)


def make_fabric(config: LoopConfig) -> Fabric:
    """Return a Fabric with the device, the precision and the strategy of the configuration.

    Under torchrun, the processes are connected, and each process gets its own device. A configuration that
    does not fit the machine or torchrun's environment is a ConfigError.
    """
    device = device_of(config.device, option="--loop.device").type
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes == 1:
        if config.time_parallel > 1:
            raise ConfigError(
                f"`loop.time_parallel` = {config.time_parallel} needs as many processes; got a single one. "
                f"Start them with torchrun --nproc-per-node {config.time_parallel} -m linrec train ..."
            )
        # torchrun may start a single process, which then does all of the work
        if config.strategy != "auto" and "LOCAL_WORLD_SIZE" not in os.environ:
            raise ConfigError(
                f"`loop.strategy` {config.strategy} is for several processes; got a single process. Start "
                "them with torchrun --nproc-per-node N -m linrec train ..., or pass --loop.strategy auto."
            )
        return _lightning("fabric").Fabric(accelerator=device, devices=1, precision=config.precision)
    here = _check_processes(config, device, processes)
    strategies = _lightning("strategies")
    strategy = strategies.DDPStrategy(timeout=_PATIENCE)
    if config.strategy == "fsdp":
        strategy = strategies.ModelParallelStrategy(
            shard, data_parallel_size=processes, tensor_parallel_size=1, timeout=_PATIENCE
        )
    fabric = _lightning("fabric").Fabric(
        accelerator=device,
        devices=here,
        num_nodes=processes // here,
        strategy=strategy,
        precision=config.precision,
        plugins=_lightning("plugins.environments").TorchElasticEnvironment(),
    )
    fabric.launch()
    return fabric


class Grid(NamedTuple):
    """The processes of a run: rows have different sequences, the processes of a row share them over time.

    Attributes:
        rows: number of rows.
        row: the row of this process.
        columns: number of processes in a row, `loop.time_parallel`.
        group: the process group of the row; None if it has a single process.
    """

    rows: int = 1
    row: int = 0
    columns: int = 1
    group: Any = None

    def part(self, batch: Batch) -> Batch:
        """Return this process's steps of a batch of its row."""
        if self.columns == 1:
            return batch
        time, others = batch.targets.shape[-1], (batch.lengths, batch.source)
        if batch.targets.dim() != 2 or time % self.columns or any(x is not None for x in others):
            raise ConfigError(
                f"`loop.time_parallel` = {self.columns} needs a language model, and sequences whose length "
                f"is a multiple of it; got targets of shape {tuple(batch.targets.shape)}."
            )
        steps = {name: part(x, group=self.group) for name, x in batch._asdict().items() if x is not None}
        return batch._replace(**steps)

    def split(self) -> AbstractContextManager[Any]:
        """Return the context in which a model runs on `part`, forward and backward."""
        return nullcontext() if self.columns == 1 else time_parallel(self.group)


ALONE = Grid()


def make_grid(fabric: Fabric, columns: int) -> Grid:
    """Return the grid of the processes with so many in each row, which are neighbours."""
    rows, row = fabric.world_size // columns, fabric.global_rank // columns
    if columns == 1:
        return Grid(rows, row)
    device = fabric.device.type
    # ranks compare their calls through gloo, for which the host does not wait for the GPU
    backend: Any = {"time": "cpu:gloo,cuda:nccl"} if device == "cuda" else None
    mesh = distributed.init_device_mesh(
        device, (rows, columns), mesh_dim_names=("data", "time"), backend_override=backend
    )
    return Grid(rows, row, columns, mesh.get_group("time"))


def expect_skipped(fabric: Fabric) -> None:
    """Let DDP accept steps in which some parameters have no gradient; it then searches each step's graph."""
    # Fabric takes the argument before there is a model to decide by, and passes it on with the model
    strategy: Any = fabric.strategy
    strategy._ddp_kwargs["find_unused_parameters"] = True


def device_of(name: DeviceName, *, option: str = "--device") -> torch.device:
    """Return the device that an option names; "auto" takes CUDA, then MPS, then the CPU."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return torch.device(next(kind for kind, is_there in there.items() if is_there))
    if not there[name]:
        raise ConfigError(
            f"there is no {name} device here; pass {option} cpu, or auto to use the best available device."
        )
    return torch.device(name)


def uses_compile(config: LoopConfig, device: torch.device) -> bool:
    """Return whether to compile: with "on", and with "auto" on CUDA, where kernel launches are expensive."""
    return config.compile == "on" or (config.compile == "auto" and device.type == "cuda")


def _lightning(module: str) -> Any:
    return import_module(f"lightning_fabric.{module}")


def _check_processes(config: LoopConfig, device: str, processes: int) -> int:
    """Check torchrun's environment and return the number of processes on this machine."""
    for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise ConfigError(
                f"WORLD_SIZE={processes} requires {processes} processes, but {name} is not set. Start them "
                f"with torchrun --nproc-per-node {processes} -m linrec train ..., or unset WORLD_SIZE."
            )
    if processes % config.time_parallel:
        raise ConfigError(
            f"`loop.time_parallel` must divide the {processes} processes; got {config.time_parallel}."
        )
    piece, rows = config.batch_size // config.accumulate, processes // config.time_parallel
    if piece % rows:
        of = f" / `loop.accumulate` = {piece}" if config.accumulate > 1 else ""
        by = f" / `loop.time_parallel` = {rows}" if config.time_parallel > 1 else ""
        raise ConfigError(
            f"`loop.batch_size`{of} must be a multiple of the {processes} processes{by}, which share it; "
            f"got {config.batch_size}{f' / {config.accumulate}' if of else ''}."
        )
    here = int(os.environ["LOCAL_WORLD_SIZE"])
    there = torch.cuda.device_count() if device == "cuda" else 1
    if device != "cpu" and here > there:
        raise ConfigError(
            f"{here} processes on a machine need {here} {device} devices; there are {there}. "
            "Start fewer processes, or pass --loop.device cpu."
        )
    return here


def shard(objective: nn.Module, mesh: "DeviceMesh") -> nn.Module:
    """Shard the parameters of an `Objective` over the processes of a mesh, in place (FSDP2).

    The parameters of a block are gathered together before the block runs. Embedding, head and last norm are
    gathered for the whole step, and so are modules that several blocks share, such as the lower bounds of
    HGRU. Gathered parameters keep their precision; autocast creates 16-bit copies of them.
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
    """Call a function in the first process and return its value there; raise its error in all processes."""
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
    """Return the command that started this process: `linrec`, or torchrun with its options."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes == 1:
        return ["linrec"]
    here = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    nodes = [] if here == processes else ["--nnodes", str(processes // here)]
    return ["torchrun", *nodes, "--nproc-per-node", str(here), "-m", "linrec"]


def seed_all(seed: int) -> None:
    """Seed torch on every device, and Python, so that all processes build the same model."""
    torch.manual_seed(seed)
    random.seed(seed)


def seed_dropout(seed: int, rank: int) -> None:
    """Seed torch differently in every process, for different dropout masks; call after building the model."""
    if rank > 0:
        torch.manual_seed(int(np.random.SeedSequence([seed, rank]).generate_state(1, np.uint64)[0]))


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Make torch use deterministic algorithms within the context, if wanted.

    Operations without a deterministic algorithm, such as a cumulative sum on CUDA, run without a warning.
    """
    if not wanted:
        yield
        return
    # cuBLAS reads this variable on its first use; without it, torch raises an error
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    # at run time, torch replaces this module by an object with the attribute below
    settings: Any = torch.utils.deterministic
    fill = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    # filling every uninitialised tensor costs time, and only helps programs that read uninitialised memory
    settings.fill_uninitialized_memory = False
    try:
        with warnings.catch_warnings():
            for end in ("does not have a deterministic implementation", "to a non-deterministic algorithm"):
                warnings.filterwarnings("ignore", message=f".*{end}")
            yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        settings.fill_uninitialized_memory = fill


@contextmanager
def matmul_precision(wanted: str) -> Iterator[None]:
    """Set torch's precision of float32 matrix products within the context, "highest" or "high".

    Torch's warning about TensorFloat32 is hidden, because the configuration chooses the precision.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(wanted)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
            yield
    finally:
        torch.set_float32_matmul_precision(before)
