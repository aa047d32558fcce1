"""Decoding of language models: tokens per second of prompts and of steps, and what the memory allows."""

import time
from typing import Any

import torch

from linrec.generation import stream
from linrec.generation.precision import with_weights_cast
from linrec.generation.prefill import prefill
from linrec.generation.steps import EAGER_STEPS
from linrec.literals import Precision
from linrec.models import LanguageModel, ModelConfig
from linrec.models.compilation import with_parts_compiled
from linrec.ops.attention import AttentionCache
from linrec.trees import leaves
from perf.kernels import profile_of
from perf.memory import peak_bytes, release, why
from perf.sizes import Model, Size
from perf.timing import calls_per_second, tokens_per_second, wait
from perf.training import Windows
from perf.training_peers import fla_model

# tokens that a peer generates in the time that is measured
PEER_TOKENS = 64
PRECISION: Precision = "bf16-mixed"
LIMIT = (
    "bytes of a step: every weight but the embedding's is read once, in the dtype that the step reads it in, "
    "and the state is read once and written once, but for caches of attention, to which a step is written; "
    "the limit is these bytes over the rate of a copy on the device"
)


@torch.no_grad()
def measure_decoding(
    config: ModelConfig,
    batch: int,
    length: int,
    device: torch.device,
    windows: Windows,
    *,
    compile: bool,
    profile: bool = False,
) -> dict[str, Any]:
    """Measure generation after a prompt of random tokens.

    Args:
        config: the model.
        batch: sequences that are generated at once.
        length: tokens of the prompt.
        device: where to measure.
        windows: windows that steps are counted in, and seconds that each should take.
        compile: whether steps and prompts are compiled; on CUDA, steps are replayed as one graph either way.
        profile: whether to take a profile of the steps too, on CUDA.

    Returns:
        What JSON holds: "parameters", "captured", "prefill_tokens_per_second", "first_seconds" until steps
        have their final speed, "tokens_per_second" with "median", "lowest" and "highest", "step_ms", "bytes",
        "peak_bytes" and, where asked for, "profile" as `profile_of` returns it; or "missing", why there are
        none.
    """
    release(device)
    # compilations of the models before count against a limit
    torch.compiler.reset()
    try:
        with torch.device(device):
            model = LanguageModel(config).eval()
        prompt = torch.randint(config.vocab_size, (batch, length), device=device)
        begun = time.perf_counter()
        numbers = stream(model, prompt, precision=PRECISION, compile=compile)
        for _ in range(2 * EAGER_STEPS):
            next(numbers)
        wait(device)
        first = time.perf_counter() - begun
        steps = calls_per_second(
            lambda: next(numbers), device, windows=windows.windows, seconds=windows.seconds
        )
        cast = with_weights_cast(model, PRECISION)
        parts = with_parts_compiled(cast) if compile else None
        prompts = calls_per_second(
            lambda: prefill(cast, prompt, None, None, PRECISION, compiled=parts),
            device,
            windows=windows.windows,
            seconds=windows.seconds,
        )
        found = {
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "captured": numbers.captured,
            "prefill_tokens_per_second": prompts.median * batch * length,
            "first_seconds": first,
            "tokens_per_second": tokens_per_second(steps, batch),
            "step_ms": 1e3 / steps.median,
            "bytes": bytes_of_a_step(cast, numbers.state.layers),
            "peak_bytes": peak_bytes(device),
        }
        return found | {"profile": profile_of(lambda: next(numbers), device)} if profile else found
    except Exception as error:
        return {"missing": why(error)}


@torch.no_grad()
def measure_fla_decoding(
    model: Model, size: Size, batch: int, length: int, device: torch.device
) -> dict[str, Any]:
    """Measure `generate` of flash-linear-attention's model, with its cache and weights in bfloat16.

    Returns:
        What JSON holds: "tokens_per_second", of `PEER_TOKENS` tokens after the first ones; or "missing".
    """
    release(device)
    try:
        with torch.device(device):
            made: Any = fla_model(model, size, use_cache=True).to(torch.bfloat16).eval()
        prompt = torch.randint(size.vocab_size, (batch, length), device=device)

        def seconds(tokens: int) -> float:
            begun = time.perf_counter()
            made.generate(
                prompt, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=True, pad_token_id=0
            )
            wait(device)
            return time.perf_counter() - begun

        few = 8
        for tokens in (few, few + PEER_TOKENS):
            # compiles and tunes
            seconds(tokens)
        spent = seconds(few + PEER_TOKENS) - seconds(few)
        return {"tokens_per_second": batch * PEER_TOKENS / spent}
    except Exception as error:
        return {"missing": why(error)}


def bytes_of_a_step(model: LanguageModel, state: Any) -> int:
    """Return the fewest bytes that a step moves; see `LIMIT`."""
    weights = {id(parameter): parameter for parameter in model.parameters()}
    # a head that was cast does not share the embedding's weight anymore
    if model.head.weight is not model.embedding.weight:
        del weights[id(model.embedding.weight)]
    read = sum(weight.nbytes for weight in weights.values())
    read += sum(part.nbytes for part in leaves(state))
    return read + _bytes_written(state)


def _bytes_written(state: Any) -> int:
    if isinstance(state, AttentionCache):
        return sum(part.nbytes // state.k.shape[1] for part in leaves(state))
    if isinstance(state, tuple):
        return sum(map(_bytes_written, state))
    return sum(part.nbytes for part in leaves(state))
