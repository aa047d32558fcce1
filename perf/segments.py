"""`python -m perf segments`: training steps of models with a memory of segments.

A step trains on a segment with the memory of the segment before.
"""

import dataclasses
import importlib.util
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from linrec.lab.bench.variants import parse_variant
from linrec.lab.train.fabric import matmul_precision
from linrec.models import LanguageModel, MemoryConfig, ModelConfig
from linrec.models.compilation import EAGER_STEPS, CapturedStep, compiling, with_parts_compiled
from linrec.trees import leaves, map_tree
from perf.command import Command, check_names, check_profile
from perf.engine import Record, attempt
from perf.kernels import profile_of
from perf.table import Part, Table, profiles, reasons
from perf.timing import Bench, UnsuitedError
from perf.training import number_of_parameters

Model = Callable[[Tensor, Any], tuple[Tensor, Any]]
"""(tokens, state) -> (logits, state)"""

# steps until the memory is full and compiled code serves it
WARM_STEPS = 4
SEGMENTS = (1, 10, 100)
"""Numbers of segments after which the peak of memory is read; with detached states it does not grow."""
PEER = "x-transformers"
# `linrec train` runs steps on CUDA in the last way
EAGER, COMPILED, CAPTURED = WAYS = ("eager", "compiled", "captured")


@dataclass(frozen=True)
class Shape:
    """A shape; by default Transformer-XL's base model of WikiText-103 over bytes (Dai and others, 2019)."""

    d_model: int = 410
    n_layers: int = 16
    n_heads: int = 10
    d_ffn: int = 2100
    segment: int = 150
    batch: int = 60
    vocab_size: int = 256


QUICK = Shape(d_model=16, n_layers=2, n_heads=2, d_ffn=32, segment=6, batch=2)


@dataclass(frozen=True)
class Segments(Command):
    """Training steps on a segment with the memory of the segment before, at Transformer-XL's base shape.

    Args:
        models: names of the models; "all" takes every model.
        peers: also measure x-transformers, with its memories, fused attention and rotary positions.
        profile: tell where the device's time goes; CUDA alone.
    """

    models: tuple[str, ...] = ("all",)
    peers: bool = False
    profile: bool = False

    packages = (PEER,)
    key = "models"

    @property
    def shape(self) -> Shape:
        return QUICK if self.quick else Shape()

    def chosen(self) -> Mapping[str, tuple[str, str]]:
        check_profile(self)
        known = list(variants(self.shape))
        check_names("model", self.models, [*known, "all"])
        names = known if "all" in self.models else self.models
        ways = WAYS[:1] if self.quick else WAYS[: 3 if self.device == "cuda" else 2]
        rows = itertools.product([*names, *((PEER,) if self.peers else ())], ways)
        return {f"{name}, {way}": (name, way) for name, way in rows}

    def about(self, bench: Bench) -> tuple[Bench, Record]:
        protocol = {"shape": dataclasses.asdict(self.shape), "windows": bench.windows._asdict()}
        return bench, {"protocol": protocol}

    def measure(self, bench: Bench, row: tuple[str, str]) -> Record:
        """Measure training steps on random tokens, in bfloat16 autocast with AdamW and clipped gradients."""
        name, way = row
        bench.release()
        with matmul_precision("high"), compiling():
            found = attempt(partial(measured, bench, name, self.shape, way, self.profile))
        return {"model": name, "way": way, **found}

    @staticmethod
    def show(results: Record) -> Iterator[Part]:
        yield Table(
            "{n_layers} layers, width {d_model}, {batch} segments of {segment} tokens, "
            "memory of {segment}".format(**results["protocol"]["shape"]),
            "model {model} | {way} | parameters {parameters:,.1f M}M | "
            "tokens/s {tokens_per_second[median]:,.0f} | ms/step {step_ms:.1f} | "
            "GiB {peak_bytes:.1f GiB} | first s {first_seconds:.1f}",
            [model for model in results["models"] if "missing" not in model],
            wrap=("model",),
        )
        yield from profiles(results["models"], "model", "way")
        yield from reasons(results["models"], "model", "way")


def variants(shape: Shape) -> dict[str, str]:
    """Return the models, as `linrec bench --mixers` takes them, by name."""
    n, heads = f"segment_length={shape.segment}", f"n_heads={shape.n_heads}"
    xl = f"transformer_xl({n}, {heads})"
    # 41 channels of the base model's heads have no pairs for rotary positions
    plain = f"{heads}, positions='none'"
    return {
        "transformer_xl": xl,
        "enhanced_recurrence": f"{xl}@enhanced_recurrence({n})",
        "compressive_transformer": f"compressive_transformer({n}, {heads}, compression_rate=3)",
        "block_recurrent": f"block_recurrent({n}, {heads})",
        "block_state": f"block_state({n}, {heads})",
        "infini_attention": f"infini_attention({n}, {plain})",
        "recurrent_memory": f"attention({plain})@recurrent_memory({n}, detach='segment')",
        "memformer": f"attention({plain})@memformer({n}, detach='segment')",
    }


def make(name: str, shape: Shape) -> Model:
    """Return a model of the shape; `PEER` names the model of x-transformers."""
    if name == PEER:
        return _peer(shape)
    variant = parse_variant(variants(shape)[name])
    return LanguageModel(
        ModelConfig(
            vocab_size=shape.vocab_size,
            d_model=shape.d_model,
            n_layers=shape.n_layers,
            mixer=variant.mixer,
            mixer_args=dict(variant.mixer_args),
            channel_mixing="ffn",
            d_channel_mixing=shape.d_ffn,
            memory=variant.memory or MemoryConfig(),
        )
    )


def _peer(shape: Shape) -> Model:
    if importlib.util.find_spec("x_transformers") is None:
        raise UnsuitedError("is not installed")
    from x_transformers import Decoder, TransformerWrapper

    model = TransformerWrapper(
        num_tokens=shape.vocab_size,
        max_seq_len=shape.segment,
        max_mem_len=shape.segment,
        use_abs_pos_emb=False,
        attn_layers=Decoder(
            dim=shape.d_model,
            depth=shape.n_layers,
            heads=shape.n_heads,
            attn_dim_head=shape.d_model // shape.n_heads,
            ff_mult=shape.d_ffn / shape.d_model,
            # fused attention does not take its relative position bias
            rotary_pos_emb=True,
            attn_flash=True,
        ),
    )
    return _Peer(model, shape)


class _Peer(nn.Module):
    """x-transformers with memories of one shape and layout, because each compilation takes minutes."""

    def __init__(self, model: nn.Module, shape: Shape) -> None:
        super().__init__()
        self.model = model
        self.shape = shape

    def forward(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        logits, memories = self.model(tokens, mems=state, return_mems=True)
        return logits, [memory.contiguous() for memory in memories]

    def start(self) -> list[Tensor]:
        sizes = self.shape.batch, self.shape.segment, self.shape.d_model
        return [torch.zeros(sizes) for _ in range(self.shape.n_layers)]


def _compiled(model: Any) -> Any:
    # as `linrec train` compiles a model: layer by layer
    return with_parts_compiled(model) if isinstance(model, LanguageModel) else torch.compile(model)


def measured(bench: Bench, name: str, shape: Shape, way: str, profile: bool) -> Record:
    """Return the speed and the memory of training steps, each with the memory of the step before."""
    device = bench.device
    torch.manual_seed(0)
    with device:
        model: Any = make(name, shape)
        start = model.start() if isinstance(model, _Peer) else None
        tokens = torch.randint(shape.vocab_size, (shape.batch, shape.segment + 1))
    torch.compiler.reset()
    run = model if way == EAGER else _compiled(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=way == CAPTURED)
    held: list[Any] = [start]

    def step(tokens: Tensor) -> Any:
        with torch.autocast(device.type, torch.bfloat16):
            logits, last = run(tokens[:, :-1], held[0])
        nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        optimizer.zero_grad()
        return map_tree(Tensor.detach, last)

    def carried() -> None:
        held[0] = step(tokens)

    def in_place(tokens: Tensor) -> None:
        # a graph reads and writes the same memory each time
        for mine, new in zip(leaves(held[0]), leaves(step(tokens)), strict=True):
            mine.copy_(new)

    begun = time.perf_counter()
    for _ in range(WARM_STEPS):
        carried()
    # the peak of the computation, without its compilation
    bench.release()
    training: Callable[[], None] = carried
    if way == CAPTURED:
        held[0] = map_tree(Tensor.clone, held[0])
        training = partial(CapturedStep(in_place), tokens)
        for _ in range(EAGER_STEPS + 1):
            training()
    bench.wait()
    first = time.perf_counter() - begun
    peaks = {}
    for before, count in itertools.pairwise((0, *SEGMENTS)):
        for _ in range(count - before):
            training()
        peaks[str(count)] = bench.peak_bytes()
    rate = bench.calls_per_second(training)
    found = {
        "parameters": number_of_parameters(model),
        "first_seconds": first,
        "peaks": peaks,
        "tokens_per_second": rate.tokens(shape.batch * shape.segment),
        "step_ms": 1e3 / rate.median,
        "peak_bytes": bench.peak_bytes(),
    }
    if profile:
        found["profile"] = profile_of(training, device)
    return found
