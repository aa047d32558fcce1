"""`python -m perf matrix` and `steps`: operators with matrix states, one (dk, dv) state per head."""

import importlib
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional

from linrec.ops import delta_rule, gate_loop
from perf import engine
from perf.engine import BOTH, DTYPES, FORWARD, PASSES, Calls, Case, Implementation, Row, Tensors
from perf.operations import cut, decays, normal
from perf.ops import PeerOptions, operator_report, show_ratios, with_yardstick
from perf.peers import turned
from perf.table import gib, number, ratio, show_errors, show_missing, show_table
from perf.timing import Bench, UnsuitedError, keep_freed_memory

Size: TypeAlias = tuple[int, ...]

CHECKED = (
    "first and last batch row and head, every step, against (chunkwise, torch) in float64; all gradients"
)
CHECKED_STEP = "y and the new state, every row and head, against the reference in float64"
# sizes are (batch, time, heads, channels), for keys and values alike, or (batch, time, heads, dk, dv);
# steps of a chunk, for counting matrix products
CHUNK = 64


@dataclass(frozen=True)
class MatrixOptions(PeerOptions):
    """Speed and memory of gate_loop with large heads and of the delta rule, beside softmax attention.

    Args:
        heads: measure head sizes from 16 x 16 to 256 x 512 in place of the rows, against the limits of memory
            and of matrix products, and write DEVICE-heads.json.
    """

    heads: bool = False


@dataclass(frozen=True)
class StepsOptions(PeerOptions):
    """Speed of one step of gate_loop with large heads and of the delta rule, against a copy of the state."""


def matrix(options: MatrixOptions, command: str) -> int:
    """Measure the rows, write and print the results; return the exit status."""
    peers, quick, heads = options.chosen(MATRIX_PEERS), options.quick, options.heads
    rows = head_rows(quick=quick) if heads else rows_of(options.device, quick=quick)
    chosen, bench = engine.selected(options.rows, engine.by_name(rows)), engine.bench_of(options)
    report = operator_report(options, command, bench, peers, "-heads" if heads else "-matrix")
    if not bench.on_cuda:
        report.results["keeps_freed_memory"] = keep_freed_memory()
    limits = None
    if heads:
        n_bytes, size = (2**20, 64) if quick else (2**30, 8192)
        limits = bench.copy_rate(n_bytes), bench.matmul_rate(torch.bfloat16, size)
        report.results |= zip(("copy_rate", "matmul_rate"), limits, strict=True)
    report.measure(chosen, lambda row: measure_row(bench, row, peers, limits))
    return report.finish(show_heads if heads else show)


def steps(options: StepsOptions, command: str) -> int:
    """Measure one decoding step of the operators, write and print the results; return the exit status."""
    peers = options.chosen(STEP_PEERS)
    rows = engine.selected(options.rows, engine.by_name(step_rows_of(options.device, quick=options.quick)))
    bench = engine.bench_of(options)
    report = operator_report(options, command, bench, peers, "-steps")
    bench, fields = with_yardstick(bench, quick=options.quick)
    report.results |= fields
    report.measure(rows, lambda row: measure_step(bench, row, peers))
    return report.finish(show_steps)


ASKED: dict[str, dict[str, float]] = {
    "linear": {"attention": 1.0, "reference": 0.1},
    "head": {"fla": 1.0, "attention": 1.0, "reference": 0.1},
    "channel": {"fla": 1 / 1.3, "attention": 1.0, "reference": 0.1},
    "delta": {"fla": 1.0, "attention": 1.0, "reference": 0.1},
    "gated_delta": {"fla": 1.0, "attention": 1.0, "reference": 0.1},
}
"""The greatest ratio of linrec's time to a peer's that is asked, by the operation's name and the peer's."""

SIZES: dict[str, tuple[Size, ...]] = {
    # softmax attention is still cheaper at the last size
    "cuda": ((8, 4096, 16, 128), (8, 4096, 32, 64), (1, 32768, 16, 128), (8, 2048, 16, 128)),
    "cpu": ((1, 4096, 4, 64),),
}
STEP_SIZES: dict[str, tuple[Size, ...]] = {
    "cuda": (*((batch, 1, 16, 128) for batch in (1, 16, 128, 512)), (8, 1, 32, 64)),
    "cpu": ((1, 1, 4, 64), (8, 1, 4, 64)),
}
HEAD_SIZES = tuple((dk, dv) for dk in (16, 32, 48, 64, 96, 128, 192, 256) for dv in (dk, 2 * dk))
"""dk and dv of --heads."""


def rows_of(device_type: str, *, quick: bool = False) -> list[Row]:
    """Return the rows of a device; `quick` keeps the operations, at a meaningless size."""
    return _rows(device_type, ((2, 70, 2, 8),) if quick else SIZES[device_type])


def step_rows_of(device_type: str, *, quick: bool = False) -> list[Row]:
    """Return the rows of single steps, as `rows_of` does."""
    return _rows(device_type, ((2, 1, 2, 8),) if quick else STEP_SIZES[device_type])


def _rows(device_type: str, sizes: Sequence[Size]) -> list[Row]:
    dtype = "bf16" if device_type == "cuda" else "f32"
    return [Row(operation, size, dtype) for size in sizes for operation in ASKED]


def head_rows(*, quick: bool = False) -> list[Row]:
    """Return rows that differ in the sizes of their heads; the heads of v fill the same width."""
    batch, time, width = (1, 70, 32) if quick else (8, 4096, 2048)
    sizes = HEAD_SIZES[:2] if quick else HEAD_SIZES
    return [
        Row(operation, (batch, time, max(1, width // dv), dk, dv), "bf16")
        for operation in ("head", "channel", "delta")
        for dk, dv in sizes
    ]


def limits_of(row: Row) -> dict[str, tuple[int, int]]:
    """Return the fewest bytes and the operations of matrix products of each pass.

    Forward reads q, k, v and gates, and writes y. Backward reads these inputs and dy, and writes a gradient
    for each input. Products are those of chunks of 64 steps, three times as many with the backward pass; the
    further products of the delta rule are not counted.
    """
    batch, time, heads, dk, *_ = row.size
    dv, steps, itemsize = row.size[-1], batch * time * heads, DTYPES[row.dtype].itemsize
    gates = {"linear": 0, "head": 4, "channel": 4 * dk, "delta": itemsize, "gated_delta": itemsize + 4}
    inputs = itemsize * (2 * dk + dv) + gates[row.operation]
    products = 4 * dk * dv + CHUNK * (dk + dv)
    forward = inputs + itemsize * dv
    both = forward + 2 * inputs + itemsize * dv
    return {FORWARD: (steps * forward, steps * products), BOTH: (steps * both, 3 * steps * products)}


def operator(operation: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the operator: it maps the inputs of `make` to y (b, t, h, d) and the last state."""
    return delta_rule if "delta" in operation else gate_loop


def make(row: Row, device: torch.device) -> tuple[Tensors, Tensor]:
    """Return the inputs of a row, and the gradient dy of its output.

    Queries and keys have norm 1, decays time scales from 10 to 1,000 steps, writing strengths are in (0, 1).
    """
    random = torch.Generator(device).manual_seed(0)
    dtype = DTYPES[row.dtype]
    keys, values = row.size[:4], (*row.size[:3], row.size[-1])
    q, k, v, dy = (normal(size, dtype, random) for size in (keys, keys, values, values))
    q, k = (functional.normalize(x, dim=-1) for x in (q, k))
    log_decay = decays(keys, torch.float32, random).log()
    beta = normal(row.size[:3], dtype, random).sigmoid()
    more = {
        "linear": (),
        "head": (log_decay[..., 0],),
        "channel": (log_decay,),
        "delta": (beta,),
        "gated_delta": (beta, log_decay[..., 0]),
    }[row.operation]
    return (q, k, v, *(x.contiguous() for x in more)), dy


def check(row: Row, inputs: Tensors, dy: Tensor) -> None:
    """Compare outputs and gradients of some rows and heads with results in double precision."""
    run = operator(row.operation)
    *few, few_dy = (cut(x, 2) for x in (*inputs, dy))
    found = engine.outputs_and_gradients(lambda *xs: run(*xs)[0], inputs, dy)
    expected = engine.outputs_and_gradients(
        lambda *xs: run(*xs, mode="chunkwise", backend="torch")[0], tuple(few), few_dy
    )
    engine.assert_all_agree(
        engine.gradient_names(inputs), [cut(x, 2) for x in found], expected, found[0].dtype
    )


def measure_row(
    bench: Bench,
    row: Row,
    peers: Sequence[Implementation],
    limits: tuple[float, float] | None = None,
) -> dict[str, Any]:
    """Check and time one row, and the peers on the same inputs.

    Peaks of memory are peaks of forward and backward, beyond the inputs. With `limits`, bytes and operations
    per second, each pass has its "share" of the limit that takes longer. A peer's entry has "asked", the
    greatest ratio that is asked, and whether it is "met".
    """
    inputs, dy = make(row, bench.device)
    run = operator(row.operation)
    case = Case(
        arguments=(row.operation, inputs, dy),
        calls=engine.calls_of(lambda *xs: run(*xs)[0], inputs, dy),
        check=partial(check, row, inputs, dy),
    )
    result = row.record(CHECKED) | engine.measure_case(bench, case, peers, memory=True)
    for name, entry in result.get("passes", {}).items():
        if limits is not None:
            least = max(part / rate for part, rate in zip(limits_of(row)[name], limits, strict=True))
            entry["share"] = least / entry["ms"]["median"] * 1e3
        for peer, found in entry["peers"].items():
            if "ratio" in found:
                asked = ASKED[row.operation].get(peer)
                met = None if asked is None else found["ratio"] <= asked
                found |= {"asked": asked, "met": met}
    return result


def make_step(row: Row, device: torch.device) -> tuple[Tensors, Tensor]:
    """Return the inputs of one step (b, 1, ...), and the state (b, h, d, d) in float32 before it."""
    batch, _, heads, channels = row.size
    random = torch.Generator(device).manual_seed(1)
    inputs, _ = make(row, device)
    return inputs, normal((batch, heads, channels, channels), torch.float32, random)


def check_step(row: Row, inputs: Tensors, state: Tensor) -> None:
    """Compare y and the new state, which is float32, with the reference in double precision."""
    run = operator(row.operation)
    found = run(*inputs, state=state)
    wide = (x.double() for x in inputs)
    expected = run(*wide, state=state.double(), mode="recurrent", backend="reference")
    engine.assert_all_agree(("y", "state"), found, expected)


def fewest_bytes(inputs: Tensors, y: Tensor, state: Tensor) -> int:
    """Return the fewest bytes that a step reads and writes: the state twice, all else once."""
    return sum(x.numel() * x.element_size() for x in (*inputs, y, state, state))


@torch.no_grad()
def measure_step(bench: Bench, row: Row, peers: Sequence[Implementation]) -> dict[str, Any]:
    """Check and time one step, and the peers on the same inputs and state."""
    inputs, state = make_step(row, bench.device)
    calls = _step_calls(partial(operator(row.operation), *inputs, state=state))
    case = Case(
        arguments=(row.operation, inputs, state),
        calls=calls,
        check=partial(check_step, row, inputs, state),
        # y has the size of v
        n_bytes={FORWARD: fewest_bytes(inputs, inputs[2], state)},
        dtype=state.dtype,
    )
    result = row.record(CHECKED_STEP) | engine.measure_case(bench, case, peers)
    return result | result.pop("passes", {}).get(FORWARD, {})


def _step_calls(step: Callable[[], Tensors]) -> Calls:
    return Calls({FORWARD: step}, step)


def torch_backend(operation: str, inputs: Tensors, dy: Tensor) -> Calls:
    """linrec itself, by torch operations."""
    return _linrec(operation, inputs, dy, mode="chunkwise", backend="torch")


def reference(operation: str, inputs: Tensors, dy: Tensor) -> Calls:
    """linrec's reference, a loop over time."""
    if inputs[0].is_cuda:
        raise UnsuitedError("is measured on the CPU alone")
    return _linrec(operation, inputs, dy, mode="recurrent", backend="reference")


def _linrec(operation: str, inputs: Tensors, dy: Tensor, **how: str) -> Calls:
    run = operator(operation)
    return engine.calls_of(lambda *xs: run(*xs, **how)[0], inputs, dy)


def attention(operation: str, inputs: Tensors, dy: Tensor) -> Calls:
    """torch's causal softmax attention of q, k and v, in its own layout."""
    function = partial(functional.scaled_dot_product_attention, is_causal=True)
    return engine.calls_of(function, tuple(map(turned, inputs[:3])), turned(dy), turned)


# the name in fla.ops, and the arguments after q, k and v of the chunkwise and the recurrent function
FLA: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "linear": ("linear_attn", (), ()),
    "head": ("simple_gla", ("g",), ("g",)),
    "channel": ("gla", ("g",), ("gk",)),
    "delta": ("delta_rule", ("beta",), ("beta",)),
    "gated_delta": ("gated_delta_rule", ("beta", "g"), ("beta", "g")),
}


def _fla(kind: str, operation: str, inputs: Tensors, **options: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return flash-linear-attention's "chunk" or "fused_recurrent" function of the inputs of `make`."""
    if not inputs[0].is_cuda:
        raise UnsuitedError("runs on CUDA alone")
    name, chunkwise, recurrent = FLA[operation]
    function = getattr(importlib.import_module(f"fla.ops.{name}"), f"{kind}_{name}")
    if operation == "linear":
        options["normalize"] = False
    names = chunkwise if kind == "chunk" else recurrent

    def run(q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> tuple[Tensor, Tensor]:
        return function(q, k, v, scale=1.0, **dict(zip(names, more, strict=True)), **options)

    return run


def fla(operation: str, inputs: Tensors, dy: Tensor) -> Calls:
    """flash-linear-attention's chunkwise kernel of the operation."""
    function = _fla("chunk", operation, inputs)
    return engine.calls_of(lambda *xs: function(*xs)[0], inputs, dy)


def torch_step(operation: str, inputs: Tensors, state: Tensor) -> Calls:
    """linrec itself, by torch operations."""
    run = operator(operation)
    return _step_calls(partial(run, *inputs, state=state, mode="recurrent", backend="torch"))


def fla_step(operation: str, inputs: Tensors, state: Tensor) -> Calls:
    """flash-linear-attention's kernel that runs the steps one by one."""
    function = _fla("fused_recurrent", operation, inputs, initial_state=state, output_final_state=True)
    return _step_calls(partial(function, *inputs))


MATRIX_PEERS = (
    Implementation("torch", "linrec's own torch backend, chunkwise", "torch", torch_backend),
    Implementation("reference", "linrec's reference, a loop over time", "torch", reference),
    Implementation(
        "attention", "torch's scaled_dot_product_attention, causal", "torch", attention, same=False
    ),
    Implementation("fla", "flash-linear-attention's chunk_* of the same recurrence", "fla", fla),
)
STEP_PEERS = (
    Implementation("torch", "linrec's own torch backend, recurrent", "torch", torch_step),
    Implementation(
        "fla", "flash-linear-attention's fused_recurrent_* of the same recurrence", "fla", fla_step
    ),
)


def show(console: Console, results: dict[str, Any]) -> None:
    """Print times and memory, the ratios to the peers, and the errors."""
    rows = [row for row in results["rows"] if "passes" in row]
    peers = list(results["peers"])
    if rows:
        memory = any(row["peak_bytes"] is not None for row in rows)
        names = ["linrec", *peers] if memory else []
        lines = []
        for row in rows:
            peaks = {"linrec": row["peak_bytes"], **row.get("peers_peak_bytes", {})}
            times = [number(row["passes"][name]["ms"]["median"]) for name in PASSES]
            lines.append([row["name"], *times, *(gib(peaks.get(name), otherwise="-") for name in names)])
        title = "milliseconds of a call"
        title += ", and the peak memory of forward and backward in GiB" if memory else ""
        show_table(console, title, ("row", "fwd", "fwd+bwd", *names), lines)
        if peers:
            show_ratios(console, rows, peers)
    _show_problems(console, results, rows)


def show_heads(console: Console, results: dict[str, Any]) -> None:
    """Print time and share of the limit by head size, and the largest step between neighbouring sizes."""
    rows = [row for row in results["rows"] if "passes" in row]
    beside = ["fla"] if "fla" in results["peers"] else []
    lines = []
    for row in rows:
        cells = [row["name"]]
        for entry in row["passes"].values():
            cells += [number(entry["ms"]["median"]), f"{100 * entry['share']:.3g}"]
            cells += [ratio(entry["peers"].get(peer, {})) for peer in beside]
        lines.append(cells)
    title = "ms forward, and forward and backward; % of the limit of memory or matrix products"
    title += "; fla: linrec's time over its" if beside else ""
    show_table(console, title, ("row", "fwd", "%", *beside, "fwd+bwd", "%", *beside), lines)
    for name in PASSES:
        console.print(f"{name}: {_largest_step(rows, name)}", highlight=False)
    _show_problems(console, results, rows)


def _largest_step(rows: Sequence[dict[str, Any]], name: str) -> str:
    """Return the largest ratio of the shares of two neighbouring sizes of the same operation."""
    found = [
        (abs(math.log(first["passes"][name]["share"] / second["passes"][name]["share"])), first, second)
        for first, second in itertools.pairwise(rows)
        if first["operation"] == second["operation"]
    ]
    if not found:
        return "no neighbours"
    step, first, second = max(found, key=lambda entry: entry[0])
    return f"largest step between neighbours {math.exp(step):.2f}, {first['name']} and {second['name']}"


def show_steps(console: Console, results: dict[str, Any]) -> None:
    """Print times, rates and ratios to the peers, and the errors."""
    rows, peers = [row for row in results["rows"] if "ms" in row], list(results["peers"])
    lines = []
    for row in rows:
        times = [number(row["ms"]["median"]), f"{row['percent']:.0f}", number(row["called_ms"]["median"])]
        lines.append([row["name"], *times, *(ratio(row["peers"][peer]) for peer in peers)])
    title = f"milliseconds of a step, and percent of the rate of {results['yardstick']}"
    title += "\nlast linrec's time / the peer's: below 1, linrec is faster" if peers else ""
    if rows:
        show_table(console, title, ("row", "ms", "%", "called", *peers), lines)
    show_missing(console, rows)
    show_errors(console, results["rows"])


def _show_problems(console: Console, results: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    show_missing(console, [entry for row in rows for entry in row["passes"].values()])
    show_errors(console, results["rows"])
