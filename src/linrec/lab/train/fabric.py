"""Setup of Lightning Fabric; the only module that imports it.

Fabric is imported on first use: it imports torch's compiler, which takes two seconds, and `--help` and
command line errors should not wait for it.
"""

import logging
import os
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

import torch

from linrec.errors import ConfigError
from linrec.lab.train.config import LoopConfig
from linrec.lab.train.sharding import shard

if TYPE_CHECKING:
    from lightning_fabric import Fabric
else:
    # only annotations use the name at run time
    Fabric = Any

# log messages to hide: advice on matmul precision, which `loop.matmul_precision` chooses, and messages that
# repeat the configuration
_NOT_SHOWN = ("Tensor Cores", "Mixed Precision", "Initializing distributed", "distributed_backend=")
for _module in ("rank_zero", "distributed"):
    logging.getLogger(f"lightning_fabric.utilities.{_module}").addFilter(
        lambda record: not any(words in record.getMessage() for words in _NOT_SHOWN)
    )

# how long processes wait for each other, for example while the first process tokenises a text
_PATIENCE = timedelta(hours=6)

__all__ = ["Fabric", "expect_skipped", "make_fabric", "uses_compile"]


def make_fabric(config: LoopConfig) -> Fabric:
    """Return a Fabric with the device, the precision and the strategy of the configuration.

    Under torchrun, the processes are connected, and each process gets its own device.

    Raises:
        ConfigError: the device is not available; an environment variable of torchrun is missing; the batch
            size is not a multiple of the processes; or a strategy for several processes is chosen without
            torchrun.
    """
    device, processes = _device_type(config.device), int(os.environ.get("WORLD_SIZE", "1"))
    if processes == 1:
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


def expect_skipped(fabric: Fabric) -> None:
    """Let DDP accept steps in which some parameters have no gradient; it then searches each step's graph."""
    # Fabric takes the argument before there is a model to decide by, and passes it on with the model
    strategy: Any = fabric.strategy
    strategy._ddp_kwargs["find_unused_parameters"] = True


def uses_compile(config: LoopConfig, device: torch.device) -> bool:
    """Return whether to compile: with "on", and with "auto" on CUDA, where kernel launches are expensive.

    Example:
        >>> uses_compile(LoopConfig(compile="auto"), torch.device("cpu"))
        False
    """
    return config.compile == "on" or (config.compile == "auto" and device.type == "cuda")


def _lightning(module: str) -> Any:
    return import_module(f"lightning_fabric.{module}")


def _device_type(wanted: str) -> Literal["cpu", "cuda", "mps"]:
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if (wanted == "cuda" and not cuda) or (wanted == "mps" and not mps):
        raise ConfigError(
            f"there is no {wanted} device here; pass --loop.device cpu, or auto to use the best available "
            "device."
        )
    if wanted == "cuda" or (wanted == "auto" and cuda):
        return "cuda"
    if wanted == "mps" or (wanted == "auto" and mps):
        return "mps"
    return "cpu"


def _check_processes(config: LoopConfig, device: str, processes: int) -> int:
    """Check torchrun's environment and return the number of processes on this machine."""
    for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise ConfigError(
                f"WORLD_SIZE={processes} requires {processes} processes, but {name} is not set. Start them "
                f"with torchrun --nproc-per-node {processes} -m linrec train ..., or unset WORLD_SIZE."
            )
    piece = config.batch_size // config.accumulate
    if piece % processes:
        of = f" / `loop.accumulate` = {piece}" if config.accumulate > 1 else ""
        raise ConfigError(
            f"`loop.batch_size`{of} must be a multiple of the {processes} processes, which share it; "
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
