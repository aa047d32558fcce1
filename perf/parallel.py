"""`python -m perf parallel`: training of long sequences over processes that share them, under torchrun."""

import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch.profiler import ProfilerActivity

from linrec.lab.train import LoopConfig
from linrec.lab.train.fabric import Fabric, Grid, gathered, make_grid
from linrec.lab.train.optim import make_optimizers, set_learning_rate
from linrec.lab.train.step import train_step
from linrec.models import LanguageModel
from linrec.models.compilation import EAGER_STEPS
from perf.command import Command, RefusedError, Report
from perf.engine import Record
from perf.sizes import QUICK, Model, Size, sized
from perf.table import Part, Table, reasons
from perf.timing import Bench, Windows, why
from perf.training import OPTIM, as_training, make_objective, number_of_parameters


@dataclass(frozen=True)
class Job:
    """A model to train at a length."""

    name: str
    length: int
    model: Model
    size: Size


class Counted(Grid):
    """A grid that keeps what its contexts count."""

    seen: ClassVar[list[Any]] = []

    def split(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.columns == 1 else self._counted()

    @contextmanager
    def _counted(self) -> Iterator[None]:
        with super().split() as ranks:
            yield
        self.seen.append(ranks)


@dataclass(frozen=True)
class Parallel(Command):
    """Tokens per second of training language models on sequences that the processes of torchrun share.

        python -m perf parallel --models gla
        torchrun --nproc-per-node 2 -m perf parallel --models gla

    Every process has a GPU and a part of each sequence. The step is that of `linrec train`, with gradients
    summed by DDP. A failure in one of several processes ends all of them; measure the longest lengths apart.

    Args:
        models: models of one size, by the names of `perf.sizes.MODELS`.
        size: size of the models, by the names of `perf.sizes.SIZES`.
        lengths: tokens of a sequence.
        batch: sequences of a step.
        precision: bfloat16 autocast over float32 parameters, or float32 throughout.
        recompute: compute each block again in the backward pass.
        compile: compile the model; "auto" does so on CUDA alone. No step is replayed as a CUDA graph.
        strategy: "fsdp" shards the parameters over the processes.
        steps: steps of a window.
    """

    models: tuple[str, ...] = ("gla", "gated_delta_net", "mamba2", "hybrid")
    size: str = "374M"
    lengths: tuple[int, ...] = (131_072,)
    batch: int = 1
    precision: Literal["32-true", "bf16-mixed"] = "bf16-mixed"
    recompute: bool = False
    compile: Literal["auto", "on", "off"] = "auto"
    strategy: Literal["auto", "ddp", "fsdp"] = "auto"
    steps: int = 3

    windows = Windows(3, 0.0)

    @property
    def suffix(self) -> str:
        again = "-recompute" * self.recompute
        return f"-{self.size}-{'-'.join(self.models)}-{processes()}x{max(self.lengths)}{again}"

    @property
    def loop(self) -> LoopConfig:
        return LoopConfig(
            batch_size=self.batch,
            recompute=self.recompute,
            precision=self.precision,
            matmul_precision="high",
            deterministic=False,
            compile=self.compile,
            device=self.device,
            strategy=self.strategy,
            time_parallel=processes(),
        )

    def chosen(self) -> Mapping[str, Job]:
        models, size = sized(self.models, self.size)
        size, lengths = (QUICK, (64,)) if self.quick else (size, self.lengths)
        if bad := [length for length in lengths if length < 1 or length % processes()]:
            raise RefusedError(
                f"--lengths must be multiples of the {processes()} processes, at least 1; got {bad[0]}."
            )
        jobs = [Job(name, length, model, size) for name, model in models.items() for length in lengths]
        return {f"{job.name}, {job.length}": job for job in jobs}

    def about(self, bench: Bench) -> tuple[Bench, Record]:
        protocol = {"processes": processes(), "batch": self.batch, "steps": self.steps, "size": self.size}
        return bench, {"protocol": {**protocol, "loop": dataclasses.asdict(self.loop)}}

    def run(self, rows: Mapping[str, Job], line: str) -> int:
        """Measure in every process; the first writes and prints the results."""
        if processes() > 1:
            line = line.replace("python", f"torchrun --nproc-per-node {processes()}", 1)
            if self.device == "cuda":
                torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        bench, fields = self.about(self.bench())
        with as_training(self.loop):
            if int(os.environ.get("RANK", "0")):
                for row in rows.values():
                    self.measure(bench, row)
                return 0
            report = Report(self, line, **fields)
            report.measure(rows, partial(self.measure, bench))
        return report.finish()

    def measure(self, bench: Bench, row: Job) -> Record:
        head = {"model": row.name, "length": row.length}
        try:
            return {**head, **self.trained(bench, row)}
        except Exception as error:
            if processes() > 1:
                # the others wait for this process until it ends
                print(f"perf: {row.name}, {row.length}: {why(error)}", file=sys.stderr, flush=True)
                os._exit(1)
            return {**head, "missing": why(error)}

    def trained(self, bench: Bench, job: Job) -> Record:
        """Return the speed, the memory and the communication of the training step."""
        bench.release()
        fabric, model, objective = make_objective(
            partial(LanguageModel, job.model.config(job.size)), self.loop
        )
        optimizers = make_optimizers(model, OPTIM)
        set_learning_rate(optimizers, 1.0)
        grid = Counted(*make_grid(fabric, processes()))
        window = torch.zeros(4, device=fabric.device)
        torch.manual_seed(0)
        tokens = torch.randint(job.size.vocab_size, (self.batch, job.length + 1)).to(fabric.device)
        steppers: Any = [fabric.setup_optimizers(optimizer) for optimizer in optimizers]
        step: Callable[[], None] = partial(
            train_step,
            tokens[:, :-1].contiguous(),
            tokens[:, 1:].contiguous(),
            fabric=fabric,
            objective=objective,
            optimizers=steppers,
            window=window,
            clip_norm=OPTIM.clip_norm,
            grid=grid,
        )
        first_seconds = bench.time_once(step) / 1e3
        first_loss = float(window[0])
        for _ in range(EAGER_STEPS):
            step()
        rates = [self._rate(bench, fabric, step) for _ in range(bench.windows.windows)]
        grid.seen.clear()
        step()
        sent = sum(ranks.sent for ranks in grid.seen)
        peak = torch.tensor(bench.peak_bytes() or 0, device=fabric.device)
        tokens_per_second = [rate * self.batch * job.length for rate in rates]
        return {
            "parameters": number_of_parameters(model),
            "processes": processes(),
            "first_seconds": first_seconds,
            "tokens_per_second": {
                "median": statistics.median(tokens_per_second),
                "lowest": min(tokens_per_second),
            },
            "step_ms": 1e3 / statistics.median(rates),
            "peak_bytes": max(int(each) for each in gathered(fabric, peak)) or None,
            "sent_bytes": sent,
            "communication": self._communication(bench, step),
            "loss": first_loss,
        }

    def _rate(self, bench: Bench, fabric: Fabric, step: Callable[[], None]) -> float:
        """Return steps per second of a window, with as many steps in every process."""
        bench.wait()
        fabric.barrier()
        start = time.perf_counter()
        for _ in range(1 if self.quick else self.steps):
            step()
        bench.wait()
        return (1 if self.quick else self.steps) / (time.perf_counter() - start)

    def _communication(self, bench: Bench, step: Callable[[], None]) -> float | None:
        """Return the share of a step in which exchanges run or wait for other processes.

        On CUDA they may run beside other kernels. On the CPU they include the comparison of calls.
        """
        if processes() == 1:
            return None
        activities = [ProfilerActivity.CUDA if bench.on_cuda else ProfilerActivity.CPU]
        bench.wait()
        start = time.perf_counter()
        with torch.profiler.profile(activities=activities) as found:
            step()
            bench.wait()
            seconds = time.perf_counter() - start
        kind = "ncclDevKernel" if bench.on_cuda else "gloo:"
        events = [event for event in found.events() if event.name.startswith(kind)]
        return sum(event.time_range.elapsed_us() for event in events) * 1e-6 / seconds

    @staticmethod
    def show(results: Record) -> Iterator[Part]:
        protocol = results["protocol"]
        yield Table(
            f"{protocol['processes']} processes share {protocol['batch']} sequences of {protocol['size']}",
            "model {model} | length {length:,} | tokens/s {tokens_per_second[median]:,.0f} | "
            "lowest {tokens_per_second[lowest]:,.0f} | ms/step {step_ms:.4g} | GiB {peak_bytes:.3g GiB} | "
            "sent MB {sent:.3g} | in exchanges {shared} | loss {loss:.4f}",
            [
                {
                    **row,
                    "sent": row["sent_bytes"] / 1e6,
                    "shared": "-" if row["communication"] is None else f"{100 * row['communication']:.1f}%",
                }
                for row in results["rows"]
                if "missing" not in row
            ],
            wrap=("model",),
        )
        yield from reasons(results["rows"], "model")


def processes() -> int:
    """Return the number of processes that torchrun started."""
    return int(os.environ.get("WORLD_SIZE", "1"))
