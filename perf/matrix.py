"""`python -m perf matrix` and `steps`: operators with matrix states, one (dk, dv) state per head."""

import dataclasses
import importlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from linrec.ops import delta_rule, gate_loop
from perf import engine
from perf.engine import BOTH, DTYPES, FORWARD, PASSES, Calls, Implementation, Record, Tensors
from perf.operations import Row, cut, decays, normal
from perf.ops import PeerCommand, ratios
from perf.peers import turned
from perf.table import SHORT, Part, Table, errors, missing_peers, passes_of
from perf.timing import Bench, share

Size: TypeAlias = tuple[int, ...]

CHECKED = (
    "first and last batch row and head, every step, against (chunkwise, torch) in float64; all gradients"
)
CHECKED_STEP = "y and the new state, every row and head, against the reference in float64"
# steps of a chunk, for counting matrix products
CHUNK = 64

ASKED: dict[str, dict[str, float]] = {
    "linear": {"attention": 1.0, "reference": 0.1},
    "head": {"fla": 1.0, "attention": 1.0, "reference": 0.1},
    "channel": {"fla": 1 / 1.3, "attention": 1.0, "reference": 0.1},
    "delta": {"fla": 1.0, "attention": 1.0, "reference": 0.1},
    "gated_delta": {"fla": 1.0, "attention": 1.0, "reference": 0.1},
}
"""The greatest ratio of linrec's time to a peer's that is asked, by the operation's name and the peer's."""

# sizes are (batch, time, heads, channels), for keys and values alike, or (batch, time, heads, dk, dv)
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


def rows_of(device: str, sizes: Sequence[Size]) -> list[Row]:
    dtype = "bf16" if device == "cuda" else "f32"
    return [Row(operation, size, dtype) for size in sizes for operation in ASKED]


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


def linrec(operation: str, inputs: Tensors, dy: Tensor, **how: str) -> Calls:
    run = operator(operation)
    return engine.calls_of(lambda *xs: run(*xs, **how)[0], inputs, dy)


def attention(operation: str, inputs: Tensors, dy: Tensor) -> Calls:
    function = partial(functional.scaled_dot_product_attention, is_causal=True)
    return engine.calls_of(function, tuple(map(turned, inputs[:3])), turned(dy), turned, same=False)


# the name in fla.ops, and the arguments after q, k and v of the chunkwise and the recurrent function
FLA: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "linear": ("linear_attn", (), ()),
    "head": ("simple_gla", ("g",), ("g",)),
    "channel": ("gla", ("g",), ("gk",)),
    "delta": ("delta_rule", ("beta",), ("beta",)),
    "gated_delta": ("gated_delta_rule", ("beta", "g"), ("beta", "g")),
}


def _fla(kind: str, operation: str, **options: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return flash-linear-attention's "chunk" or "fused_recurrent" function of the inputs of `make`."""
    name, chunkwise, recurrent = FLA[operation]
    function = getattr(importlib.import_module(f"fla.ops.{name}"), f"{kind}_{name}")
    if operation == "linear":
        options["normalize"] = False
    names = chunkwise if kind == "chunk" else recurrent

    def run(q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> tuple[Tensor, Tensor]:
        return function(q, k, v, scale=1.0, **dict(zip(names, more, strict=True)), **options)

    return run


def fla(operation: str, inputs: Tensors, dy: Tensor) -> Calls:
    function = _fla("chunk", operation)
    return engine.calls_of(lambda *xs: function(*xs)[0], inputs, dy)


def torch_step(operation: str, inputs: Tensors, state: Tensor) -> Calls:
    run = operator(operation)
    return step_calls(partial(run, *inputs, state=state, mode="recurrent", backend="torch"))


def fla_step(operation: str, inputs: Tensors, state: Tensor) -> Calls:
    function = _fla("fused_recurrent", operation, initial_state=state, output_final_state=True)
    return step_calls(partial(function, *inputs))


def step_calls(step: Callable[[], Tensors], **more: Any) -> Calls:
    return Calls({FORWARD: step}, step, **more)


CHUNKWISE = partial(linrec, mode="chunkwise", backend="torch")
REFERENCE = partial(linrec, mode="recurrent", backend="reference")
ATTENTION = "torch's scaled_dot_product_attention, causal"
CHUNKS = "flash-linear-attention's chunk_* of the same recurrence"
FUSED = "flash-linear-attention's fused_recurrent_* of the same recurrence"
MATRIX_PEERS = (
    Implementation("torch", "linrec's own torch backend, chunkwise", "torch", CHUNKWISE),
    Implementation("reference", "linrec's reference, a loop over time", "torch", REFERENCE, device="cpu"),
    Implementation("attention", ATTENTION, "torch", attention),
    Implementation("fla", CHUNKS, "fla", fla, device="cuda"),
)
STEP_PEERS = (
    Implementation("torch", "linrec's own torch backend, recurrent", "torch", torch_step),
    Implementation("fla", FUSED, "fla", fla_step, device="cuda"),
)


@dataclass(frozen=True)
class Matrix(PeerCommand):
    """Speed and memory of gate_loop with large heads and of the delta rule, beside softmax attention.

    Args:
        heads: measure head sizes from 16 x 16 to 256 x 512 in place of the rows, against the limits of memory
            and of matrix products, and write DEVICE-heads.json.
    """

    heads: bool = False

    known = MATRIX_PEERS

    @property
    def suffix(self) -> str:
        return "-heads" if self.heads else "-matrix"

    def all_rows(self) -> list[Row]:
        if not self.heads:
            return rows_of(self.device, ((2, 70, 2, 8),) if self.quick else SIZES[self.device])
        # the heads of v fill the same width
        batch, time, width = (1, 70, 32) if self.quick else (8, 4096, 2048)
        sizes = HEAD_SIZES[:2] if self.quick else HEAD_SIZES
        return [
            Row(operation, (batch, time, max(1, width // dv), dk, dv), "bf16")
            for operation in ("head", "channel", "delta")
            for dk, dv in sizes
        ]

    def about(self, bench: Bench) -> tuple[Bench, Record]:
        bench, fields = super().about(bench)
        if self.heads:
            bench, product = bench.with_product(torch.bfloat16, quick=self.quick)
            bench = dataclasses.replace(bench, copy=bench.copy_rate(2**20 if self.quick else 2**30))
            fields |= {"copy_rate": bench.copy, "matmul_rate": product["rate"]}
        return bench, fields

    def measure(self, bench: Bench, row: Row) -> Record:
        """Measure a row; with --heads, each pass has its "share" of the limit that takes longer."""
        inputs, dy = make(row, bench.device)
        run = operator(row.operation)
        calls = engine.calls_of(lambda *xs: run(*xs)[0], inputs, dy, check=partial(check, row, inputs, dy))
        given = (row.operation, inputs, dy)
        found = self.beside_peers(bench, calls, *given, memory=True)
        for name, entry in found.get("passes", {}).items():
            if self.heads:
                rates = zip(limits_of(row)[name], (bench.copy, bench.product), strict=True)
                ms = entry["ms"]["median"]
                entry["share"] = max(share(least, rate, ms) for least, rate in rates if rate is not None)
            for peer, timed in entry["peers"].items():
                if "ratio" in timed:
                    asked = ASKED[row.operation].get(peer)
                    timed |= {"asked": asked, "met": None if asked is None else timed["ratio"] <= asked}
        return {**row.head(), "checked": CHECKED, **found}

    @staticmethod
    def show(results: Record) -> Iterator[Part]:
        rows = [row for row in results["rows"] if "passes" in row]
        if any("share" in row["passes"][FORWARD] for row in rows):
            yield from show_heads(results, rows)
        else:
            yield from show_rows(results, rows)
        yield from missing_peers(passes_of(rows))
        yield from errors(results["rows"])


def show_rows(results: Record, rows: Sequence[Record]) -> Iterator[Part]:
    peers = list(results["peers"])
    title = "milliseconds of a call"
    columns = [
        "row {name}",
        *(f"{short} {{passes[{one}][ms][median]:digits}}" for one, short in SHORT.items()),
    ]
    if any(row["peak_bytes"] is not None for row in rows):
        title += ", and the peak memory of forward and backward in GiB"
        columns.append("linrec {peak_bytes:.2f GiB}")
        columns += [f"{peer} {{peers_peak_bytes[{peer}]:.2f GiB}}" for peer in peers]
    yield Table(title, " | ".join(columns), rows, absent="-")
    if peers:
        yield ratios(passes_of(rows), peers)


def show_heads(results: Record, rows: Sequence[Record]) -> Iterator[Part]:
    """Yield time and share of the limit by head size, and the largest step between neighbouring sizes."""
    title = "ms forward, and forward and backward; % of the limit of memory or matrix products"
    columns = ["row {name}"]
    for one, short in SHORT.items():
        columns += [f"{short} {{passes[{one}][ms][median]:digits}}", f"% {{passes[{one}][share]:.3g %}}"]
        if "fla" in results["peers"]:
            columns.append(f"fla {{passes[{one}][peers][fla]:.2g ratio}}")
    title += "; fla: linrec's time over its" if "fla" in results["peers"] else ""
    yield Table(title, " | ".join(columns), rows)
    for name in PASSES:
        yield f"{name}: {_largest_step(rows, name)}"


def _largest_step(rows: Sequence[Record], name: str) -> str:
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


@dataclass(frozen=True)
class Steps(PeerCommand):
    """Speed of one step of gate_loop with large heads and of the delta rule, against a copy of the state."""

    suffix = "-steps"
    known = STEP_PEERS

    def all_rows(self) -> list[Row]:
        return rows_of(self.device, ((2, 1, 2, 8),) if self.quick else STEP_SIZES[self.device])

    @torch.no_grad()
    def measure(self, bench: Bench, row: Row) -> Record:
        inputs, state = make_step(row, bench.device)
        calls = step_calls(
            partial(operator(row.operation), *inputs, state=state),
            check=partial(check_step, row, inputs, state),
            # y has the size of v
            n_bytes={FORWARD: fewest_bytes(inputs, inputs[2], state)},
            dtype=state.dtype,
        )
        given = (row.operation, inputs, state)
        found = self.beside_peers(bench, calls, *given)
        found |= found.pop("passes", {}).get(FORWARD, {})
        return {**row.head(), "checked": CHECKED_STEP, **found}

    @staticmethod
    def show(results: Record) -> Iterator[Part]:
        rows, peers = [row for row in results["rows"] if "ms" in row], list(results["peers"])
        title = f"milliseconds of a step, and percent of the rate of {results['yardstick']}"
        title += "\nlast linrec's time / the peer's: below 1, linrec is faster" if peers else ""
        columns = [
            "row {name}",
            "ms {ms[median]:digits}",
            "% {percent:.0f}",
            "called {called_ms[median]:digits}",
        ]
        columns += [f"{peer} {{peers[{peer}]:.2g ratio}}" for peer in peers]
        yield Table(title, " | ".join(columns), rows)
        yield from missing_peers(rows)
        yield from errors(results["rows"])
